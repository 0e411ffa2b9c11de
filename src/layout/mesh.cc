#include "bascule/mesh.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout/world_template.h"

namespace bascule {

int Mesh::Axis(std::string_view name) const {
  auto at = std::find(axis_names.begin(), axis_names.end(), name);
  return at == axis_names.end() ? -1 : static_cast<int>(at - axis_names.begin());
}

uint64_t Mesh::ranks() const {
  uint64_t ranks = 1;
  for (uint32_t size : axis_sizes) ranks *= size;
  return ranks;
}

std::vector<uint32_t> Mesh::CoordinatesOf(uint64_t rank) const {
  std::vector<uint32_t> coordinates(axis_sizes.size());
  for (size_t axis = axis_sizes.size(); axis-- > 0;) {
    coordinates[axis] = static_cast<uint32_t>(rank % axis_sizes[axis]);
    rank /= axis_sizes[axis];
  }
  return coordinates;
}

Status Mesh::Validate() const {
  auto invalid = [](std::string message) {
    return Status(Code::kInvalidArgument, "mesh: " + std::move(message));
  };
  if (axis_names.size() != axis_sizes.size() || axis_sizes.size() > WorldTemplate::kMaxAxes) {
    return invalid(fmt::format("{} axis names and {} sizes; give one each, at most {}",
                               axis_names.size(), axis_sizes.size(), WorldTemplate::kMaxAxes));
  }
  uint64_t ranks = 1;
  for (size_t axis = 0; axis < axis_names.size(); ++axis) {
    if (axis_names[axis].empty() || Axis(axis_names[axis]) != static_cast<int>(axis)) {
      return invalid("the axis name '" + axis_names[axis] + "' is empty or used twice");
    }
    ranks *= axis_sizes[axis];
    if (ranks == 0 || ranks > WorldTemplate::kMaxRanks) {
      return invalid(fmt::format("sizes [{}] make no rank or more than {}",
                                 fmt::join(axis_sizes, ", "), WorldTemplate::kMaxRanks));
    }
  }
  return Status::Ok();
}

Placement Replicate() { return {}; }

Placement Shard(int dim) {
  Placement placement;
  placement.kind = Placement::Kind::kShard;
  placement.dim = dim;
  return placement;
}

Placement ShardParts(int dim, uint32_t parts) {
  Placement placement = Shard(dim);
  placement.parts = parts;
  return placement;
}

Placement ShardPadded(int dim, int64_t padded) {
  Placement placement = Shard(dim);
  placement.padded = padded;
  return placement;
}

Placement StridedShard(int dim, uint32_t split_factor) {
  Placement placement;
  placement.kind = Placement::Kind::kStridedShard;
  placement.dim = dim;
  placement.split_factor = split_factor;
  return placement;
}

Placement At(uint32_t coordinate) { return AtAny({coordinate}); }

Placement AtAny(std::vector<uint32_t> coordinates) {
  Placement placement;
  placement.kind = Placement::Kind::kAt;
  placement.at = std::move(coordinates);
  return placement;
}

Block Block::Of(LogicalTensor tensor, Placements placements) {
  Block block;
  block.tensor_ = std::move(tensor);
  block.placements_ = std::move(placements);
  return block;
}

Block Block::Concat(int dim, std::vector<Block> parts) {
  Block block;
  block.kind_ = Kind::kConcat;
  block.dim_ = dim;
  block.parts_ = std::move(parts);
  return block;
}

Block Block::Stack(std::vector<Block> parts) {
  Block block;
  block.kind_ = Kind::kStack;
  block.parts_ = std::move(parts);
  return block;
}

Block Block::Interleave(int dim, std::vector<Block> parts, std::vector<int64_t> tiles) {
  Block block;
  block.kind_ = Kind::kInterleave;
  block.dim_ = dim;
  block.parts_ = std::move(parts);
  block.numbers_ = std::move(tiles);
  return block;
}

Block Block::Slice(int dim, int64_t begin, int64_t end, int64_t step) && {
  slices_.push_back({dim, begin, end, step});
  return std::move(*this);
}

Block Block::Transpose(std::vector<int> order) && {
  Block block;
  block.kind_ = Kind::kTranspose;
  block.numbers_.assign(order.begin(), order.end());
  block.parts_.push_back(std::move(*this));
  return block;
}

Block Block::PadTo(int dim, int64_t extent) && {
  Block block;
  block.kind_ = Kind::kPad;
  block.dim_ = dim;
  block.numbers_ = {extent};
  block.parts_.push_back(std::move(*this));
  return block;
}

Block Block::Landing(LandingFunction function) && {
  function_ = function;
  return std::move(*this);
}

Block FusedQkv(LogicalTensor q, LogicalTensor k, LogicalTensor v, uint32_t kv_heads,
               const std::string& axis) {
  const Placements kv = {{axis, ShardParts(0, kv_heads)}};
  std::vector<Block> parts;
  parts.push_back(Block::Of(std::move(q), {{axis, Shard(0)}}));
  parts.push_back(Block::Of(std::move(k), kv));
  parts.push_back(Block::Of(std::move(v), kv));
  return Block::Concat(0, std::move(parts));
}

Block FusedGateUp(LogicalTensor gate, LogicalTensor up, const Placements& placements,
                  bool interleaved) {
  std::vector<Block> parts;
  parts.push_back(Block::Of(std::move(gate), placements));
  parts.push_back(Block::Of(std::move(up), placements));
  return interleaved ? Block::Interleave(0, std::move(parts)) : Block::Concat(0, std::move(parts));
}

}  // namespace bascule
