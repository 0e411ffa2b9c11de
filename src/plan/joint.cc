#include "plan/joint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <unordered_map>

namespace bascule::plan {
namespace {

std::vector<uint32_t> TemplatesOf(const World& world, Role role) {
  std::set<uint32_t> used;
  for (const Member& member : world.members) {
    if (member.role == role) used.insert(member.world_template);
  }
  return {used.begin(), used.end()};
}

uint32_t FindName(const WorldTemplate& world, std::string_view name) {
  auto at = std::lower_bound(world.names.begin(), world.names.end(), name);
  if (at == world.names.end() || *at != name) return kNone;
  return static_cast<uint32_t>(at - world.names.begin());
}

// Follows aliases. Their number bounds the walk, so that a cycle ends.
uint32_t FindStored(const WorldTemplate& world, std::string_view name) {
  uint32_t found = FindName(world, name);
  for (size_t step = 0; found == kNone && step < world.aliases.size(); ++step) {
    auto at = std::lower_bound(world.aliases.begin(), world.aliases.end(), name,
                               [](const Alias& a, std::string_view n) { return a.name < n; });
    if (at == world.aliases.end() || at->name != name) return kNone;
    name = at->target;
    found = FindName(world, name);
  }
  return found;
}

// Index in the template's sorted names of each of the sorted `items`, or kNone.
std::vector<uint32_t> MatchNames(const WorldTemplate& world,
                                 const std::vector<std::string_view>& items) {
  std::vector<uint32_t> index(items.size(), kNone);
  size_t at = 0;
  for (size_t i = 0; i < items.size() && at < world.names.size(); ++i) {
    int order = -1;
    while (at < world.names.size() && (order = world.names[at].compare(items[i])) < 0) ++at;
    if (order == 0) index[i] = static_cast<uint32_t>(at++);
  }
  return index;
}

// Every tensor that some rollout's template stores, sorted.
std::vector<std::string_view> NeededNames(const World& world, const Joint& joint) {
  std::vector<std::string_view> names;
  for (uint32_t t : joint.need_templates) {
    const auto& stored = world.templates[t]->names;
    names.insert(names.end(), stored.begin(), stored.end());
  }
  if (joint.need_templates.size() > 1) {
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
  }
  return names;
}

// Where no trainer knows a needed name, a rollout's own alias of it may be what trainers store.
void ResolveByOwnAliases(const World& world, Joint* joint, size_t item) {
  std::set<std::string_view> others;
  for (uint32_t t : joint->need_templates) {
    for (const Alias& alias : world.templates[t]->aliases) {
      if (alias.target == joint->items[item]) others.insert(alias.name);
    }
  }
  for (std::string_view name : others) {
    bool found = false;
    for (uint32_t t : joint->source_templates) {
      joint->name_index[t][item] = FindStored(*world.templates[t], name);
      found = found || joint->name_index[t][item] != kNone;
    }
    if (found) return;
  }
}

void ResolveAliases(const World& world, Joint* joint) {
  for (size_t item = 0; item < joint->items.size(); ++item) {
    bool found = false;
    for (uint32_t t : joint->source_templates) {
      uint32_t& index = joint->name_index[t][item];
      if (index == kNone && !world.templates[t]->aliases.empty()) {
        index = FindStored(*world.templates[t], joint->items[item]);
      }
      found = found || index != kNone;
    }
    if (!found) ResolveByOwnAliases(world, joint, item);
  }
}

// Refines the grouping `group` of items by one more attribute of theirs. Groups are numbered in
// order of first appearance; the hash map is only looked up.
template <typename AttributeOf>
void RefineGroups(std::vector<uint32_t>* group, AttributeOf&& attribute_of) {
  std::unordered_map<uint64_t, uint32_t> numbers;
  uint64_t last_key = 0;
  uint32_t last_number = kNone;
  for (size_t item = 0; item < group->size(); ++item) {
    const uint64_t key = uint64_t{(*group)[item]} << 32 | attribute_of(item);
    if (last_number == kNone || key != last_key) {
      last_key = key;
      last_number = numbers.try_emplace(key, static_cast<uint32_t>(numbers.size())).first->second;
    }
    (*group)[item] = last_number;
  }
}

uint32_t ClassOf(const World& world, const Joint& joint, uint32_t t, size_t item) {
  const uint32_t name = joint.name_index[t][item];
  return name == kNone ? kNone : world.templates[t]->class_of[name];
}

// Sorts items by group; groups are numbered by their first name already.
void SortItems(const std::vector<uint32_t>& group, Joint* joint) {
  std::vector<uint32_t> order(group.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return group[a] < group[b]; });
  auto permute = [&order](auto& values) {
    auto sorted = values;
    for (size_t i = 0; i < order.size(); ++i) sorted[i] = values[order[i]];
    values = std::move(sorted);
  };
  permute(joint->items);
  for (auto* indices : {&joint->name_index, &joint->own_name_index}) {
    for (auto& index : *indices) {
      if (!index.empty()) permute(index);
    }
  }
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Status CheckSources(const World& world, const Joint& joint, JointClass* joined) {
  const std::vector<uint32_t>& tuple = joint.source_tuples[joined->source_tuple];
  const TemplateClass* first = nullptr;
  for (size_t slot = 0; slot < tuple.size(); ++slot) {
    if (tuple[slot] == kNone) continue;
    const auto& held = world.templates[joint.source_templates[slot]]->classes[tuple[slot]];
    if (first == nullptr) first = &held;
    if (held.shape != first->shape) {
      return Status(Code::kInvalidArgument,
                    fmt::format("trainers disagree about its shape: {} and {}",
                                ShapeText(first->shape), ShapeText(held.shape)));
    }
    if (held.dtype != first->dtype) {
      return Status(Code::kInvalidArgument,
                    fmt::format("trainers publish it as {} and as {}; one publish dtype is needed",
                                DTypeName(first->dtype), DTypeName(held.dtype)));
    }
  }
  if (first != nullptr) {
    joined->shape = first->shape;
    joined->published = first->dtype;
  }
  return Status::Ok();
}

Status CheckNeeds(const World& world, const Joint& joint, JointClass* joined, bool held) {
  for (size_t slot = 0; slot < joined->need_class.size(); ++slot) {
    if (joined->need_class[slot] == kNone) continue;
    const auto& need =
        world.templates[joint.need_templates[slot]]->classes[joined->need_class[slot]];
    if (!held) {
      joined->shape = need.shape;
      joined->published = need.dtype;
      return Status::Ok();  // an error only where a rank's boxes of it are not empty
    }
    if (need.shape != joined->shape) {
      return Status(Code::kInvalidArgument,
                    fmt::format("trainers hold it with shape {}, rollouts need shape {}",
                                ShapeText(joined->shape), ShapeText(need.shape)));
    }
    if (!Castable(joined->published, need.dtype)) {
      return Status(Code::kInvalidArgument,
                    fmt::format("it is published as {}, which cannot be cast to {}",
                                DTypeName(joined->published), DTypeName(need.dtype)));
    }
  }
  return Status::Ok();
}

Status MakeClass(const World& world, uint32_t first, uint32_t items, Joint* joint) {
  JointClass joined;
  joined.first_item = first;
  joined.items = items;
  std::vector<uint32_t> tuple;
  bool held = false;
  for (uint32_t t : joint->source_templates) {
    tuple.push_back(ClassOf(world, *joint, t, first));
    held = held || tuple.back() != kNone;
  }
  for (uint32_t t : joint->need_templates) {
    const uint32_t name = joint->own_name_index[joined.need_class.size()][first];
    joined.need_class.push_back(name == kNone ? kNone : world.templates[t]->class_of[name]);
  }
  auto known = std::find(joint->source_tuples.begin(), joint->source_tuples.end(), tuple);
  joined.source_tuple = static_cast<uint32_t>(known - joint->source_tuples.begin());
  if (known == joint->source_tuples.end()) joint->source_tuples.push_back(std::move(tuple));
  Status status = CheckSources(world, *joint, &joined);
  if (status.ok()) status = CheckNeeds(world, *joint, &joined, held);
  if (!status.ok()) return std::move(status).WithTensor(std::string(joint->items[first]));
  joint->classes.push_back(std::move(joined));
  return Status::Ok();
}

}  // namespace

Result<Joint> JoinClasses(const World& world) {
  Joint joint;
  joint.source_templates = TemplatesOf(world, Role::kTrainer);
  joint.need_templates = TemplatesOf(world, Role::kRollout);
  joint.items = NeededNames(world, joint);
  joint.name_index.resize(world.templates.size());
  for (const auto* used : {&joint.source_templates, &joint.need_templates}) {
    for (uint32_t t : *used) {
      if (joint.name_index[t].empty())
        joint.name_index[t] = MatchNames(*world.templates[t], joint.items);
    }
  }
  std::vector<uint32_t> group(joint.items.size(), 0);
  // Before aliases are resolved: what a destination stores under this very name.
  for (uint32_t t : joint.need_templates) {
    RefineGroups(&group, [&](size_t item) { return ClassOf(world, joint, t, item); });
  }
  for (uint32_t t : joint.need_templates) joint.own_name_index.push_back(joint.name_index[t]);
  ResolveAliases(world, &joint);
  for (uint32_t t : joint.source_templates) {
    RefineGroups(&group, [&](size_t item) { return ClassOf(world, joint, t, item); });
  }
  SortItems(group, &joint);
  std::sort(group.begin(), group.end());
  for (uint32_t first = 0; first < group.size();) {
    uint32_t last = first;
    while (last < group.size() && group[last] == group[first]) ++last;
    BASCULE_RETURN_IF_ERROR(MakeClass(world, first, last - first, &joint));
    first = last;
  }
  return joint;
}

}  // namespace bascule::plan
