// Layouts from declared meshes.
//
// A framework says how its tensors are cut over a mesh of ranks; a LayoutBuilder expands that to
// the world template (which boxes the rank at any coordinates holds: needs no memory) and, where
// coordinates are given, to the bindings of that rank. Both come from one description.
//
//   Mesh mesh{{"dp", "tp"}, {4, 2}};
//   auto builder = LayoutBuilder::Create(mesh, {3, 1});
//   uint32_t qkv = builder->AddBuffer({.name = "qkv_proj.weight", .data = pointer, .bytes =
//   bytes}); Status status = builder->Add(FusedQkv(q, k, v, /*kv_heads=*/8, "tp"), {.buffer =
//   qkv}); Result<Layout> layout = builder->BuildLayout();
//
// All types are values and thread-compatible. Errors are InvalidArgument (Unimplemented where a
// combination is legal but not supported), with the tensor's name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bascule/layout.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// A grid of ranks with named axes; rank numbers are row-major, the last axis fastest (as torch's
// DeviceMesh). No axes: one rank. At most 16 axes and 2^24 ranks.
struct Mesh {
  std::vector<std::string> axis_names;
  std::vector<uint32_t> axis_sizes;

  // Index of an axis, or -1.
  [[nodiscard]] int Axis(std::string_view name) const;
  [[nodiscard]] uint64_t ranks() const;
  // Coordinates of a rank, rank < ranks().
  [[nodiscard]] std::vector<uint32_t> CoordinatesOf(uint64_t rank) const;
  // Names unique and not empty, as many sizes, none zero.
  [[nodiscard]] Status Validate() const;
};

// What one mesh axis does to a tensor; an axis that is not named replicates it. Placements apply
// left to right in mesh order, each to what the ones before left: torch DTensor's rule.
struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard, kAt };
  Kind kind = Kind::kReplicate;
  int dim = 0;                // of the logical tensor; negative: from the last
  uint32_t split_factor = 1;  // kStridedShard
  uint32_t parts = 0;         // kShard: at most this many parts; 0: as many as ranks
  int64_t padded = 0;         // kShard: the extent that is cut; 0: the tensor's own
  std::vector<uint32_t> at;   // kAt: the coordinates that hold the tensor
};
// Each rank holds all.
[[nodiscard]] Placement Replicate();
// torch.chunk: parts of ceil(extent / ranks); the last ranks have less or nothing.
[[nodiscard]] Placement Shard(int dim);
// Cuts into `parts` equal parts. With more ranks than parts, ranks / parts neighbours share one:
// attention heads over more ranks than kv heads. `parts` and ranks must divide one another.
[[nodiscard]] Placement ShardParts(int dim, uint32_t parts);
// The dimension is padded to `padded` elements and then cut like Shard. In memory every rank has
// ceil(padded / ranks) of them; those beyond the tensor are declared as padding. No other placement
// may cut the same dimension.
[[nodiscard]] Placement ShardPadded(int dim, int64_t padded);
// DTensor's _StridedShard, FSDP over TP: the cut is made *after* that of the Shard(dim) to its
// right, whose ranks (with those of strided shards between) are `split_factor`. With no Shard(dim)
// to the right: the extent is cut in `split_factor` chunks, each of them by rank, and a rank's
// parts are joined.
[[nodiscard]] Placement StridedShard(int dim, uint32_t split_factor);
// Only ranks with this coordinate hold the tensor: experts, pipeline stages.
[[nodiscard]] Placement At(uint32_t coordinate);
// The same with several coordinates.
[[nodiscard]] Placement AtAny(std::vector<uint32_t> coordinates);

// A placement and the axis that it is of.
struct AxisPlacement {
  std::string axis;
  Placement placement;
};
using Placements = std::vector<AxisPlacement>;  // in any order; mesh order counts

// How the memory of one array is made of parts of logical tensors. An array at one rank has a local
// shape; where At leaves a part on other ranks only, the part takes no room in the array.
class Block {
 public:
  // The rank's part of a tensor, or of the slice of it that Slice picks.
  [[nodiscard]] static Block Of(LogicalTensor tensor, Placements placements = {});
  // Parts one after another along an existing dimension: fused gate/up, QKV.
  [[nodiscard]] static Block Concat(int dim, std::vector<Block> parts);
  // Parts of equal local shape along a new first dimension: stacked experts, [E_local, ...].
  [[nodiscard]] static Block Stack(std::vector<Block> parts);
  // Takes tiles[i] indices of part i in turn along `dim`; no tiles: one each. {1, 1}: gate and up
  // row by row. {q rows, k rows, v rows} of a group: Megatron's QKV. Tiles other than all 1 cut
  // boxes at tile boundaries, and the parts may not be joined along `dim` again below.
  [[nodiscard]] static Block Interleave(int dim, std::vector<Block> parts,
                                        std::vector<int64_t> tiles = {});

  // Only indices begin, begin + step, ... < end of a logical dimension; placements then cut the
  // slice as if it were the tensor. Of an Of block, once a dimension: a tensor that is fused in the
  // checkpoint.
  [[nodiscard]] Block Slice(int dim, int64_t begin, int64_t end, int64_t step = 1) &&;
  // Dimension i of the result is dimension order[i] of this block.
  [[nodiscard]] Block Transpose(std::vector<int> order) &&;
  // Pads the end of a dimension to `extent`; the rest is declared as padding.
  [[nodiscard]] Block PadTo(int dim, int64_t extent) &&;
  // A function that is applied on landing. Of an Of block.
  [[nodiscard]] Block Landing(LandingFunction function) &&;

  // What the block is made of; for builders and tools.
  enum class Kind : uint8_t { kTensor, kConcat, kStack, kInterleave, kTranspose, kPad };
  // What Slice picks of one dimension.
  struct SliceSpec {
    int dim = 0;
    int64_t begin = 0;
    int64_t end = 0;
    int64_t step = 1;
  };
  [[nodiscard]] Kind kind() const { return kind_; }
  [[nodiscard]] const LogicalTensor& tensor() const { return tensor_; }
  [[nodiscard]] const Placements& placements() const { return placements_; }
  [[nodiscard]] const std::vector<SliceSpec>& slices() const { return slices_; }
  [[nodiscard]] LandingFunction function() const { return function_; }
  [[nodiscard]] int dim() const { return dim_; }
  // Tiles (none: all 1), the order of a transpose, or the extent of a pad.
  [[nodiscard]] const std::vector<int64_t>& numbers() const { return numbers_; }
  [[nodiscard]] const std::vector<Block>& parts() const { return parts_; }

 private:
  Kind kind_ = Kind::kTensor;
  LandingFunction function_ = LandingFunction::kNone;
  int dim_ = 0;
  LogicalTensor tensor_;
  Placements placements_;
  std::vector<SliceSpec> slices_;
  std::vector<int64_t> numbers_;
  std::vector<Block> parts_;
};

// [q; k; v] along dimension 0, cut by heads along `axis`; with more ranks than kv heads, neighbours
// share a kv head. Weights and biases alike.
[[nodiscard]] Block FusedQkv(LogicalTensor q, LogicalTensor k, LogicalTensor v, uint32_t kv_heads,
                             const std::string& axis);
// [gate; up] along dimension 0, or row by row.
[[nodiscard]] Block FusedGateUp(LogicalTensor gate, LogicalTensor up, const Placements& placements,
                                bool interleaved = false);

// Where an array lies.
struct LocalMemory {
  uint32_t buffer = 0;                     // from LayoutBuilder::AddBuffer
  int64_t byte_offset = 0;                 // of the array's first element in it
  std::vector<int64_t> byte_strides = {};  // one per dimension of the array; none: dense row-major
  std::optional<DType> dtype = {};         // of the memory; none: that of the tensors
};

// Tensors that lie one after another, row-major, in one buffer which ranks cut at any element:
// FSDP1's and Megatron's flat parameters. The rank with number r along `axes` (first most
// significant) holds elements [cuts[r], cuts[r + 1]) of the buffer.
struct FlatTensor {
  LogicalTensor tensor;
  Placements placements = {};  // over other axes: the flat tensor is then that rank's part
  int64_t start = -1;          // element in the buffer; -1: right after the tensor before
};
// The buffer, and how ranks cut it.
struct FlatBuffer {
  std::vector<FlatTensor> tensors;
  std::vector<std::string> axes;
  std::vector<int64_t> cuts = {};  // one more than ranks; none: parts of ceil(total / ranks)
};

// Move-only. After an error of Add the builder is good for nothing but to be destroyed.
class LayoutBuilder {
 public:
  // For a world template alone.
  [[nodiscard]] static Result<LayoutBuilder> Create(Mesh mesh);
  // For the rank at these coordinates as well.
  [[nodiscard]] static Result<LayoutBuilder> Create(Mesh mesh, std::vector<uint32_t> coordinates);
  LayoutBuilder(LayoutBuilder&&) noexcept;
  LayoutBuilder& operator=(LayoutBuilder&&) noexcept;
  ~LayoutBuilder();

  // The shape of a block's array at the rank's coordinates: what its memory must hold. NotFound
  // where all of it is At other ranks.
  [[nodiscard]] Result<std::vector<int64_t>> LocalShape(const Block& block);
  // How many elements of the flat buffer the rank holds.
  [[nodiscard]] Result<int64_t> LocalElements(const FlatBuffer& flat);

  // Returns the buffer's number.
  uint32_t AddBuffer(Buffer buffer);
  // Adds boxes to the world. A tensor may be added several times: its boxes add up.
  [[nodiscard]] Status Add(const Block& block);
  [[nodiscard]] Status AddFlat(const FlatBuffer& flat);
  // Adds boxes to the world and the rank's bindings. A block that is not on this rank needs no
  // memory and gives no bindings.
  [[nodiscard]] Status Add(const Block& block, const LocalMemory& memory);
  [[nodiscard]] Status AddFlat(const FlatBuffer& flat, const LocalMemory& memory);
  void AddAlias(Alias alias);
  void AddUnused(std::string pattern);
  void AddPadding(const Padding& padding);

  [[nodiscard]] Result<std::shared_ptr<const WorldTemplate>> BuildWorld() const;
  // The rank's layout with `world` and `coordinates` set; its tensors are those that it holds.
  [[nodiscard]] Result<Layout> BuildLayout() const;

 private:
  class Impl;
  explicit LayoutBuilder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace bascule
#pragma GCC visibility pop
