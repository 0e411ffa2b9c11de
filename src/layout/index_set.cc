#include "layout/index_set.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout/world_template.h"

namespace bascule {

int64_t SizeOf(const IndexSet& set) {
  int64_t size = 0;
  for (const Interval& interval : set) size += interval.size();
  return size;
}

namespace {

void Append(Interval interval, IndexSet* set) {
  if (interval.empty()) return;
  if (!set->empty() && set->back().end == interval.begin) {
    set->back().end = interval.end;
  } else {
    set->push_back(interval);
  }
}

void AppendTaken(const IndexSet& set, Interval positions, IndexSet* taken) {
  int64_t position = 0;
  for (const Interval& interval : set) {
    if (position >= positions.end) return;
    int64_t begin = std::max(positions.begin - position, int64_t{0});
    int64_t end = std::min(positions.end - position, interval.size());
    Append({interval.begin + begin, interval.begin + end}, taken);
    position += interval.size();
  }
}

}  // namespace

IndexSet Take(const IndexSet& set, Interval positions) {
  IndexSet taken;
  AppendTaken(set, positions, &taken);
  return taken;
}

IndexSet Stepped(int64_t begin, int64_t end, int64_t step) {
  IndexSet set;
  if (step == 1) {
    Append({begin, end}, &set);
    return set;
  }
  for (int64_t index = begin; index < end; index += step) Append({index, index + 1}, &set);
  return set;
}

IndexSet CutAtTiles(const IndexSet& set, int64_t tile) {
  IndexSet cut;
  int64_t room = tile;
  for (Interval interval : set) {
    while (!interval.empty()) {
      int64_t size = std::min(room, interval.size());
      cut.push_back({interval.begin, interval.begin + size});
      interval.begin += size;
      room = size == room ? tile : room - size;
    }
  }
  return cut;
}

Interval ChunkOf(int64_t extent, int64_t chunks, int64_t index) {
  int64_t size = extent / chunks + (extent % chunks != 0 ? 1 : 0);
  if (size == 0 || index > extent / size) return {extent, extent};
  int64_t begin = index * size;
  return {begin, begin + std::min(size, extent - begin)};
}

namespace {

Status Invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

Status CheckRule(const AxisRule& rule, const std::string& axis, size_t ndim) {
  const Placement& placement = rule.placement;
  switch (placement.kind) {
    case Placement::Kind::kReplicate: return Status::Ok();
    case Placement::Kind::kAt:
      if (placement.at.empty()) return Invalid("At on axis '" + axis + "' has no coordinate");
      for (uint32_t coordinate : placement.at) {
        if (coordinate >= rule.ranks) {
          return Invalid(
              fmt::format("At({}) on axis '{}' of size {}", coordinate, axis, rule.ranks));
        }
      }
      return Status::Ok();
    case Placement::Kind::kShard:
    case Placement::Kind::kStridedShard: break;
  }
  if (placement.dim < 0 || static_cast<size_t>(placement.dim) >= ndim) {
    return Invalid(
        fmt::format("axis '{}' shards dimension {} of a tensor of {}", axis, placement.dim, ndim));
  }
  if (placement.split_factor == 0 || placement.split_factor > WorldTemplate::kMaxRanks) {
    return Invalid(fmt::format("split_factor {} on axis '{}'", placement.split_factor, axis));
  }
  uint32_t parts = placement.parts;
  if (parts != 0 && parts % rule.ranks != 0 && rule.ranks % parts != 0) {
    return Invalid(fmt::format("{} parts on axis '{}' of size {}: neither divides the other", parts,
                               axis, rule.ranks));
  }
  return Status::Ok();
}

}  // namespace

Result<std::vector<AxisRule>> RulesOf(const Mesh& mesh, const Placements& placements, size_t ndim) {
  std::vector<AxisRule> rules;
  for (const AxisPlacement& named : placements) {
    int axis = mesh.Axis(named.axis);
    if (axis < 0) {
      return Invalid(fmt::format("the mesh has no axis '{}', only [{}]", named.axis,
                                 fmt::join(mesh.axis_names, ", ")));
    }
    AxisRule rule{static_cast<uint32_t>(axis), mesh.axis_sizes[static_cast<size_t>(axis)],
                  named.placement};
    bool cuts = rule.placement.kind == Placement::Kind::kShard ||
                rule.placement.kind == Placement::Kind::kStridedShard;
    if (cuts && rule.placement.dim < 0) rule.placement.dim += static_cast<int>(ndim);
    BASCULE_RETURN_IF_ERROR(CheckRule(rule, named.axis, ndim));
    if (rule.placement.kind != Placement::Kind::kReplicate) rules.push_back(std::move(rule));
  }
  std::sort(rules.begin(), rules.end(),
            [](const AxisRule& a, const AxisRule& b) { return a.axis < b.axis; });
  for (size_t i = 1; i < rules.size(); ++i) {
    if (rules[i].axis == rules[i - 1].axis) {
      return Invalid("axis '" + mesh.axis_names[rules[i].axis] + "' is placed twice");
    }
  }
  return rules;
}

Result<std::vector<AxisRule>> CutsOf(std::span<const AxisRule> rules, int dim) {
  std::vector<AxisRule> cuts;
  std::vector<AxisRule> deferred;
  bool strided_part_ended = false;
  for (const AxisRule& rule : rules) {
    if (rule.placement.kind == Placement::Kind::kAt || rule.placement.dim != dim) continue;
    if (rule.placement.kind == Placement::Kind::kStridedShard) {
      deferred.push_back(rule);
      continue;
    }
    if (strided_part_ended) {
      return Status(Code::kUnimplemented,
                    fmt::format("dimension {}: a Shard to the right of the Shard that ends a "
                                "strided part; DTensor does not define it",
                                dim));
    }
    cuts.push_back(rule);
    uint64_t ranks = rule.ranks;
    strided_part_ended = !deferred.empty();
    for (; !deferred.empty(); deferred.pop_back()) {
      AxisRule strided = deferred.back();
      if (strided.placement.split_factor != ranks) {
        return Invalid(
            fmt::format("dimension {}: split_factor {} where {} ranks to its right "
                        "shard it",
                        dim, strided.placement.split_factor, ranks));
      }
      ranks *= strided.ranks;
      strided.placement.kind = Placement::Kind::kShard;
      cuts.push_back(std::move(strided));
    }
  }
  cuts.insert(cuts.end(), deferred.begin(), deferred.end());
  return cuts;
}

Status CheckCuts(std::span<const AxisRule> cuts, int64_t extent) {
  for (const AxisRule& cut : cuts) {
    const Placement& placement = cut.placement;
    if (placement.padded != 0 && (cuts.size() > 1 || placement.padded < extent)) {
      return Invalid(fmt::format("dimension {} of {} cannot be padded to {}{}", placement.dim,
                                 extent, placement.padded,
                                 cuts.size() > 1 ? " where other axes cut it too" : ""));
    }
    if (placement.parts != 0 && (cuts.size() > 1 || extent % placement.parts != 0)) {
      return Invalid(fmt::format("dimension {} of {} cannot be cut into {} equal parts{}",
                                 placement.dim, extent, placement.parts,
                                 cuts.size() > 1 ? " where other axes cut it too" : ""));
    }
  }
  return Status::Ok();
}

namespace {

IndexSet ApplyOne(const AxisRule& cut, const IndexSet& set, uint32_t coordinate) {
  const Placement& placement = cut.placement;
  const int64_t size = SizeOf(set);
  if (placement.kind == Placement::Kind::kShard) {
    if (placement.padded != 0) {
      Interval chunk = ChunkOf(placement.padded, cut.ranks, coordinate);
      return Take(set, {std::min(chunk.begin, size), std::min(chunk.end, size)});
    }
    if (placement.parts != 0 && placement.parts < cut.ranks) {
      return Take(set, ChunkOf(size, placement.parts, coordinate / (cut.ranks / placement.parts)));
    }
    return Take(set, ChunkOf(size, cut.ranks, coordinate));
  }
  IndexSet joined;
  for (uint32_t piece = 0; piece < placement.split_factor; ++piece) {
    Interval outer = ChunkOf(size, placement.split_factor, piece);
    Interval inner = ChunkOf(outer.size(), cut.ranks, coordinate);
    AppendTaken(set, {outer.begin + inner.begin, outer.begin + inner.end}, &joined);
  }
  return joined;
}

}  // namespace

IndexSet Apply(std::span<const AxisRule> cuts, IndexSet set,
               std::span<const uint32_t> coordinates) {
  for (const AxisRule& cut : cuts) set = ApplyOne(cut, set, coordinates[cut.axis]);
  return set;
}

bool Present(std::span<const AxisRule> rules, std::span<const uint32_t> coordinates) {
  return std::all_of(rules.begin(), rules.end(), [&](const AxisRule& rule) {
    const std::vector<uint32_t>& at = rule.placement.at;
    return rule.placement.kind != Placement::Kind::kAt ||
           std::find(at.begin(), at.end(), coordinates[rule.axis]) != at.end();
  });
}

int64_t PaddedExtent(std::span<const AxisRule> cuts) {
  for (const AxisRule& cut : cuts) {
    if (cut.placement.padded != 0) return ChunkOf(cut.placement.padded, cut.ranks, 0).size();
  }
  return -1;
}

}  // namespace bascule
