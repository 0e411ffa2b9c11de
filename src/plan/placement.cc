#include "plan/placement.h"

#include <algorithm>
#include <map>

namespace bascule::plan {
namespace {

std::vector<uint32_t> AxesOf(const TemplateClass& tensors) {
  std::vector<uint32_t> axes;
  for (const BoxProduct& product : tensors.products) {
    for (const DimSelect& dim : product.dims) {
      axes.insert(axes.end(), dim.axes.begin(), dim.axes.end());
    }
  }
  std::sort(axes.begin(), axes.end());
  axes.erase(std::unique(axes.begin(), axes.end()), axes.end());
  return axes;
}

}  // namespace

std::shared_ptr<const AxisGroups> TemplateUsers::GroupsBy(const World& world,
                                                          std::vector<uint32_t> axes) {
  for (const auto& known : known_) {
    if (known->axes == axes) return known;
  }
  auto groups = std::make_shared<AxisGroups>();
  std::map<std::vector<uint32_t>, uint32_t> numbers;
  for (uint32_t member : members_) {
    std::vector<uint32_t> key;
    for (uint32_t axis : axes) key.push_back(world.members[member].coordinates[axis]);
    auto [at, added] = numbers.try_emplace(std::move(key), static_cast<uint32_t>(numbers.size()));
    if (added) groups->members.emplace_back();
    groups->members[at->second].push_back(member);
    groups->group_of.push_back(at->second);
  }
  groups->axes = std::move(axes);
  known_.push_back(groups);
  return groups;
}

Placement TemplateUsers::PlacementOf(const World& world, uint32_t class_index) {
  const WorldTemplate& shape = *world.templates[template_];
  Placement placement;
  placement.groups = GroupsBy(world, AxesOf(shape.classes[class_index]));
  for (const auto& members : placement.groups->members) {
    std::vector<Box> boxes;
    shape.BoxesOf(class_index, world.members[members[0]].coordinates, &boxes);
    placement.boxes.push_back(std::move(boxes));
  }
  return placement;
}

}  // namespace bascule::plan
