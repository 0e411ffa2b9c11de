#include "coordinator/coverage_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "digest/digest.h"

namespace bascule {
namespace {

constexpr size_t kWorldsKept = 8;
constexpr uint64_t kMaxExpanded = 1 << 17;

uint64_t LayoutHash(const MemberInfo& member) {
  uint64_t hash = Mix64(member.world_template.high) ^ member.world_template.low;
  hash = Mix64(hash + member.coordinates.size());
  for (uint32_t coordinate : member.coordinates) hash = Mix64(hash + coordinate + 1);
  return hash;
}

// A box and the members that hold all of it.
struct HeldBox {
  const Box* box;
  const std::vector<uint32_t>* members;
};

bool Contains(const Box& outer, const Box& inner) {
  for (int d = 0; d < inner.ndim(); ++d) {
    if (outer[d].begin > inner[d].begin || outer[d].end < inner[d].end) return false;
  }
  return true;
}

// Cuts a cell until each part lies in all boxes that touch it, and collects the parts' holders.
class Refiner {
 public:
  explicit Refiner(std::set<std::vector<uint32_t>>* sets) : sets_(sets) {}

  void Refine(const Box& cell, const std::vector<HeldBox>& boxes) {
    if (boxes.empty() || cell.empty()) return;
    const bool uniform = std::all_of(boxes.begin(), boxes.end(), [&cell](const HeldBox& held) {
      return Contains(*held.box, cell);
    });
    if (uniform) return Emit(boxes);
    const auto [dim, at] = SplitOf(cell, boxes);
    for (const bool upper : {false, true}) {
      Box half = cell;
      (upper ? half[dim].begin : half[dim].end) = at;
      std::vector<HeldBox> inside;
      for (const HeldBox& held : boxes) {
        if (!held.box->Intersect(half).empty()) inside.push_back(held);
      }
      Refine(half, inside);
    }
  }

 private:
  // The middle one of the faces inside the cell, along the dimension that has the most.
  static std::pair<int, int64_t> SplitOf(const Box& cell, const std::vector<HeldBox>& boxes) {
    std::vector<int64_t> best;
    int best_dim = 0;
    for (int d = 0; d < cell.ndim(); ++d) {
      std::vector<int64_t> faces;
      for (const HeldBox& held : boxes) {
        for (int64_t face : {(*held.box)[d].begin, (*held.box)[d].end}) {
          if (face > cell[d].begin && face < cell[d].end) faces.push_back(face);
        }
      }
      std::sort(faces.begin(), faces.end());
      faces.erase(std::unique(faces.begin(), faces.end()), faces.end());
      if (faces.size() > best.size()) {
        best = std::move(faces);
        best_dim = d;
      }
    }
    return {best_dim, best[best.size() / 2]};
  }

  void Emit(const std::vector<HeldBox>& boxes) {
    if (boxes.size() == 1) {
      sets_->insert(*boxes.front().members);
      return;
    }
    std::vector<uint32_t> all;
    for (const HeldBox& held : boxes) {
      all.insert(all.end(), held.members->begin(), held.members->end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    sets_->insert(std::move(all));
  }

  std::set<std::vector<uint32_t>>* sets_;
};

// The class of a tensor in each template that has it.
using ClassTuple = std::vector<std::pair<const WorldTemplate*, uint32_t>>;

// Tensors that all templates put into the same classes are refined once.
std::set<ClassTuple> TuplesOf(const std::set<const WorldTemplate*>& templates) {
  std::set<ClassTuple> tuples;
  if (templates.size() == 1) {
    const WorldTemplate* only = *templates.begin();
    for (uint32_t c : only->class_of) tuples.insert({{only, c}});
    return tuples;
  }
  std::map<std::string_view, ClassTuple> by_name;
  for (const WorldTemplate* world : templates) {
    for (size_t i = 0; i < world->names.size(); ++i) {
      by_name[world->names[i]].push_back({world, world->class_of[i]});
    }
  }
  for (auto& [name, tuple] : by_name) tuples.insert(std::move(tuple));
  return tuples;
}

}  // namespace

std::vector<std::vector<uint32_t>> HolderSetsOf(std::span<const MemberInfo* const> members,
                                                const TemplateMap& templates) {
  std::set<const WorldTemplate*> used;
  std::map<const WorldTemplate*, std::vector<uint32_t>> members_of;
  for (uint32_t i = 0; i < members.size(); ++i) {
    const auto found = templates.find(members[i]->world_template);
    if (found == templates.end()) continue;
    used.insert(found->second.get());
    members_of[found->second.get()].push_back(i);
  }
  std::set<std::vector<uint32_t>> sets;
  Refiner refiner(&sets);
  std::vector<Box> boxes;
  for (const ClassTuple& tuple : TuplesOf(used)) {
    std::map<Box, std::vector<uint32_t>> held;  // equal boxes once
    for (const auto& [world, class_index] : tuple) {
      for (uint32_t member : members_of[world]) {
        boxes.clear();
        world->BoxesOf(class_index, members[member]->coordinates, &boxes);
        for (const Box& box : boxes) held[box].push_back(member);
      }
    }
    // Sides that disagree on a shape are an error elsewhere; here each rank of dimensions is apart.
    std::map<int, std::vector<HeldBox>> by_ndim;
    for (auto& [box, holders] : held) {
      std::sort(holders.begin(), holders.end());
      if (!box.empty()) by_ndim[box.ndim()].push_back({&box, &holders});
    }
    for (const auto& [ndim, list] : by_ndim) {
      Box hull = *list.front().box;
      for (const HeldBox& item : list) {
        for (int d = 0; d < ndim; ++d) {
          hull[d].begin = std::min(hull[d].begin, (*item.box)[d].begin);
          hull[d].end = std::max(hull[d].end, (*item.box)[d].end);
        }
      }
      refiner.Refine(hull, list);
    }
  }
  return {sets.begin(), sets.end()};
}

void TemplateOracle::Add(const ContentDigest& digest, const std::string& bytes) {
  if (Find(digest) != nullptr) return;
  auto made = std::make_shared<Template>();
  Result<WorldTemplate> parsed = WorldTemplate::Parse(bytes);
  if (parsed.ok()) {
    auto world = std::make_shared<const WorldTemplate>(std::move(parsed).value());
    made->names_of_class.resize(world->classes.size());
    for (size_t i = 0; i < world->names.size(); ++i) {
      const uint64_t key = Mix64(TensorKey(world->names[i]));
      made->names = Mix64(made->names ^ key);
      made->names_of_class[world->class_of[i]] += key;
    }
    made->world = std::move(world);
  } else {
    made->error = parsed.status();
  }
  const std::lock_guard lock(mutex_);
  templates_.try_emplace(digest, std::move(made));
}

void TemplateOracle::Retain(const std::vector<ContentDigest>& digests) {
  const std::lock_guard lock(mutex_);
  std::erase_if(templates_, [&digests](const auto& item) {
    return !std::binary_search(digests.begin(), digests.end(), item.first);
  });
  groups_.clear();
  worlds_.clear();
}

std::shared_ptr<const TemplateOracle::Template> TemplateOracle::Find(
    const ContentDigest& digest) const {
  const std::lock_guard lock(mutex_);
  const auto found = templates_.find(digest);
  return found == templates_.end() ? nullptr : found->second;
}

Status TemplateOracle::Check(const MemberInfo& member) const {
  const auto known = Find(member.world_template);
  if (known == nullptr) {
    return Status(Code::kNotFound, fmt::format("world template {} is not stored; PutBlob it first",
                                               member.world_template.ToString()));
  }
  if (known->world == nullptr) {
    return Status(Code::kInvalidArgument,
                  fmt::format("blob {} is no world template: {}", member.world_template.ToString(),
                              known->error.message()));
  }
  const std::vector<uint32_t>& axes = known->world->axis_sizes;
  bool fits = axes.size() == member.coordinates.size();
  for (size_t i = 0; fits && i < axes.size(); ++i) fits = member.coordinates[i] < axes[i];
  if (fits) return Status::Ok();
  return Status(Code::kInvalidArgument,
                fmt::format("the coordinates [{}] are not in the mesh [{}] of the world template",
                            fmt::join(member.coordinates, ", "), fmt::join(axes, ", ")))
      .WithRank(static_cast<int>(member.rank));
}

std::shared_ptr<const TemplateOracle::WorldSets> TemplateOracle::SetsOf(
    std::span<const MemberInfo* const> world) const {
  uint64_t key = 0;
  for (const MemberInfo* member : world) key += LayoutHash(*member);
  TemplateMap templates;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& known : worlds_) {
      if (known->key == key && known->members == world.size()) return known;
    }
    for (const MemberInfo* member : world) {
      const auto found = templates_.find(member->world_template);
      if (found != templates_.end() && found->second->world != nullptr) {
        templates[found->first] = found->second->world;
      }
    }
  }
  auto made = std::make_shared<WorldSets>();
  made->key = key;
  made->members = world.size();
  std::vector<const MemberInfo*> distinct;
  for (const MemberInfo* member : world) {
    const auto index = static_cast<uint32_t>(distinct.size());
    if (made->index.try_emplace(LayoutHash(*member), index).second) distinct.push_back(member);
  }
  made->sets = HolderSetsOf(distinct, templates);
  const std::lock_guard lock(mutex_);
  worlds_.push_back(made);
  if (worlds_.size() > kWorldsKept) worlds_.pop_front();
  return made;
}

bool TemplateOracle::Covers(std::span<const MemberInfo* const> holders,
                            std::span<const MemberInfo* const> world) const {
  const auto known = SetsOf(world);
  std::vector<bool> holds(known->index.size());
  for (const MemberInfo* holder : holders) {
    const auto found = known->index.find(LayoutHash(*holder));
    if (found != known->index.end()) holds[found->second] = true;
  }
  return std::all_of(known->sets.begin(), known->sets.end(), [&holds](const auto& set) {
    return std::any_of(set.begin(), set.end(), [&holds](uint32_t i) { return holds[i]; });
  });
}

// A sum over tensors of hash(name) * hash(shape, dtype, boxes), so that it does not depend on how a
// template groups them to classes.
uint64_t TemplateOracle::ReplicaGroup(const MemberInfo& member) const {
  const auto known = Find(member.world_template);
  if (known == nullptr || known->world == nullptr) return LayoutHash(member);
  const uint64_t layout = LayoutHash(member);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = groups_.find(layout); found != groups_.end()) return found->second;
  }
  uint64_t group = 0;
  std::vector<Box> boxes;
  for (uint32_t c = 0; c < known->world->classes.size(); ++c) {
    const TemplateClass& tensors = known->world->classes[c];
    boxes.clear();
    known->world->BoxesOf(c, member.coordinates, &boxes);
    if (boxes.empty()) continue;
    std::sort(boxes.begin(), boxes.end());
    uint64_t hash = Mix64(static_cast<uint64_t>(tensors.dtype) + 1);
    for (int64_t extent : tensors.shape) hash = Mix64(hash ^ static_cast<uint64_t>(extent));
    for (const Box& box : boxes) {
      for (int d = 0; d < box.ndim(); ++d) {
        hash = Mix64(Mix64(hash ^ static_cast<uint64_t>(box[d].begin)) +
                     static_cast<uint64_t>(box[d].end));
      }
      hash = Mix64(hash + 1);
    }
    group += known->names_of_class[c] * hash;
  }
  group = Mix64(group ^ known->names);
  const std::lock_guard lock(mutex_);
  if (groups_.size() > (1 << 18)) groups_.clear();
  groups_[layout] = group;
  return group;
}

std::string TemplateOracle::BucketName(const MemberInfo& member, size_t bucket, size_t buckets,
                                       std::string* tensor) const {
  const auto known = Find(member.world_template);
  if (known == nullptr || known->world == nullptr) return fmt::format("bucket {}", bucket);
  const std::vector<std::string>& names = known->world->names;
  // Bucket of name i: i * buckets / n (HeldRequest).
  const size_t n = names.size();
  const size_t first = (bucket * n + buckets - 1) / buckets;
  const size_t end = ((bucket + 1) * n + buckets - 1) / buckets;
  if (buckets > n || first >= end || end > n) return fmt::format("bucket {}", bucket);
  if (end - first == 1) {
    *tensor = names[first];
    return "tensor " + names[first];
  }
  return fmt::format("one of the {} tensors {} to {}", end - first, names[first], names[end - 1]);
}

std::vector<MemberInfo> TemplateOracle::World(const MemberInfo& member) const {
  const auto known = Find(member.world_template);
  if (known == nullptr || known->world == nullptr || known->world->ranks() > kMaxExpanded) {
    return {member};
  }
  const uint64_t ranks = known->world->ranks();
  std::vector<MemberInfo> world(ranks, member);
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    world[rank].coordinates = known->world->CoordinatesOf(rank);
  }
  return world;
}

}  // namespace bascule
