#include "session/audit.h"

#include <algorithm>

namespace bascule {
namespace {

// a without b, as disjoint boxes.
void Subtract(const Box& a, const Box& b, std::vector<Box>* out) {
  Box common = a.Intersect(b);
  if (common.empty()) {
    out->push_back(a);
    return;
  }
  Box rest = a;
  for (int d = 0; d < a.ndim(); ++d) {
    if (rest[d].begin < common[d].begin) {
      Box part = rest;
      part[d].end = common[d].begin;
      out->push_back(part);
    }
    if (common[d].end < rest[d].end) {
      Box part = rest;
      part[d].begin = common[d].end;
      out->push_back(part);
    }
    rest[d] = common[d];
  }
}

std::vector<Box> SubtractAll(std::vector<Box> boxes, const std::vector<Box>& holes) {
  for (const Box& hole : holes) {
    std::vector<Box> rest;
    for (const Box& box : boxes) Subtract(box, hole, &rest);
    boxes = std::move(rest);
    if (boxes.empty()) break;
  }
  return boxes;
}

// The distinct elements of boxes that may overlap.
std::vector<Box> Disjoint(const std::vector<Box>& boxes) {
  std::vector<Box> result;
  for (const Box& box : boxes) {
    for (Box& rest : SubtractAll({box}, result)) result.push_back(rest);
  }
  return result;
}

// Name -> index in a template, aliases resolved.
class Names {
 public:
  explicit Names(const WorldTemplate& world) : world_(world) {}
  [[nodiscard]] int64_t Find(const std::string& name) const {
    auto it = std::lower_bound(world_.names.begin(), world_.names.end(), name);
    if (it != world_.names.end() && *it == name) return it - world_.names.begin();
    auto alias = std::find_if(world_.aliases.begin(), world_.aliases.end(),
                              [&name](const Alias& a) { return a.name == name; });
    return alias == world_.aliases.end() ? -1 : Find(alias->target);
  }

 private:
  const WorldTemplate& world_;
};

}  // namespace

std::vector<CountedBox> CountedFor(const World& world, uint32_t self, uint32_t receiver,
                                   const std::vector<uint32_t>& live) {
  const Member& me = world.members[self];
  const Member& reader = world.members[receiver];
  const WorldTemplate& mine = *world.templates[me.world_template];
  const WorldTemplate& theirs = *world.templates[reader.world_template];
  const Names names(mine);

  // Boxes of lower-numbered live trainers count before mine.
  std::vector<const Member*> before;
  for (const Member& member : world.members) {
    if (member.role != Role::kTrainer || member.rank >= me.rank) continue;
    if (std::binary_search(live.begin(), live.end(), member.rank)) before.push_back(&member);
  }
  // Classes repeat: what is left of my boxes after theirs depends on the classes alone when the
  // templates are one; else it is computed per tensor.
  std::map<uint32_t, std::vector<Box>> left_of_class;
  auto left_of = [&](uint32_t tensor) {
    const uint32_t my_class = mine.class_of[tensor];
    const bool one_template = std::all_of(before.begin(), before.end(), [&me](const Member* m) {
      return m->world_template == me.world_template;
    });
    if (one_template) {
      auto it = left_of_class.find(my_class);
      if (it != left_of_class.end()) return it->second;
    }
    std::vector<Box> boxes;
    mine.BoxesOf(my_class, me.coordinates, &boxes);
    for (const Member* member : before) {
      const WorldTemplate& other = *world.templates[member->world_template];
      const int64_t found = Names(other).Find(mine.names[tensor]);
      if (found < 0) continue;
      std::vector<Box> held;
      other.BoxesOf(other.class_of[static_cast<size_t>(found)], member->coordinates, &held);
      boxes = SubtractAll(std::move(boxes), held);
    }
    if (one_template) left_of_class[my_class] = boxes;
    return boxes;
  };

  std::vector<CountedBox> counted;
  for (size_t i = 0; i < theirs.names.size(); ++i) {
    const TemplateClass& wanted_class = theirs.classes[theirs.class_of[i]];
    std::vector<Box> wanted;
    theirs.BoxesOf(theirs.class_of[i], reader.coordinates, &wanted);
    if (wanted.empty()) continue;
    const int64_t found = names.Find(theirs.names[i]);
    if (found < 0) continue;
    const auto tensor = static_cast<uint32_t>(found);
    const DType wire = WireDType(mine.classes[mine.class_of[tensor]].dtype, wanted_class.dtype);
    for (const Box& want : Disjoint(wanted)) {
      for (const Box& box : left_of(tensor)) {
        Box common = box.Intersect(want);
        if (!common.empty()) counted.push_back({tensor, wire, common});
      }
    }
  }
  return counted;
}

Sum SumWanted(const WantedSum& wanted, std::span<const StridedBox> places,
              std::span<const int64_t> shape, bool live) {
  Sum sum;
  uint64_t inexact = 0;
  std::vector<Box> counted;
  for (const StridedBox& place : places) {
    if (place.box.ndim() != wanted.box.ndim() || !Castable(place.dtype, wanted.wire)) continue;
    const Box common = place.box.Intersect(wanted.box);
    if (common.empty()) continue;
    for (const Box& rest : SubtractAll({common}, counted)) {
      sum += SumBox(place, rest, shape, wanted.wire, TensorKey(wanted.tensor),
                    live ? &inexact : nullptr);
    }
    counted.push_back(common);
  }
  if (inexact > 0) sum.digest = ~sum.digest + inexact;
  return sum;
}

std::vector<Sum> SumWanted(const Layout& layout, std::span<const WantedSum> wanted, bool live) {
  std::map<std::string_view, uint32_t> index;
  for (uint32_t i = 0; i < layout.tensors.size(); ++i) index[layout.tensors[i].name] = i;
  for (const Alias& alias : layout.aliases) {
    auto target = index.find(alias.target);
    if (target != index.end()) index[alias.name] = target->second;
  }
  std::map<uint32_t, std::vector<StridedBox>> places;
  for (const Binding& binding : layout.bindings) {
    if (binding.function != LandingFunction::kNone) continue;
    places[binding.tensor].push_back({layout.buffers[binding.buffer].data + binding.byte_offset,
                                      binding.box, binding.byte_strides, binding.dtype});
  }
  std::vector<Sum> sums;
  for (const WantedSum& want : wanted) {
    auto found = index.find(want.tensor);
    sums.push_back(found == index.end() ? Sum{}
                                        : SumWanted(want, places[found->second],
                                                    layout.tensors[found->second].shape, live));
  }
  return sums;
}

std::string RowOf(const std::string& tensor, AuditScope scope) {
  const bool by_tensor =
      scope == AuditScope::kAllByTensor || scope == AuditScope::kRotationByTensor;
  return by_tensor ? tensor : LayerOf(tensor);
}

bool InScope(const std::string& tensor, AuditScope scope, uint64_t version) {
  const bool all = scope == AuditScope::kAllByTensor || scope == AuditScope::kAllByLayer;
  return all || InRotation(TensorKey(tensor), version);
}

}  // namespace bascule
