// Sets of indices of one dimension, and how placements cut them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/mesh.h"
#include "bascule/status.h"

namespace bascule {

// Sorted, disjoint, none empty. Position p of a set is its p-th index in order.
using IndexSet = std::vector<Interval>;

[[nodiscard]] int64_t SizeOf(const IndexSet& set);
// The indices at positions [begin, end); intervals that touch are joined.
[[nodiscard]] IndexSet Take(const IndexSet& set, Interval positions);
// begin, begin + step, ... < end.
[[nodiscard]] IndexSet Stepped(int64_t begin, int64_t end, int64_t step);
// Cuts intervals wherever the position is a multiple of `tile`.
[[nodiscard]] IndexSet CutAtTiles(const IndexSet& set, int64_t tile);

// The part of [0, extent) that torch.chunk gives to chunk `index` of `chunks`.
[[nodiscard]] Interval ChunkOf(int64_t extent, int64_t chunks, int64_t index);

// Placements of one tensor, by axis number in mesh order; replicating axes left out.
struct AxisRule {
  uint32_t axis = 0;
  uint32_t ranks = 1;
  Placement placement;  // dim not negative
};

// Checks placements of a tensor of `ndim` dimensions against a mesh.
[[nodiscard]] Result<std::vector<AxisRule>> RulesOf(const Mesh& mesh, const Placements& placements,
                                                    size_t ndim);

// The rules that cut one dimension, in the order in which they do: strided shards come after the
// shard to their right, as in DTensor's explicit order.
[[nodiscard]] Result<std::vector<AxisRule>> CutsOf(std::span<const AxisRule> rules, int dim);

// Checks what depends on the extent: parts divide it, padding is not smaller.
[[nodiscard]] Status CheckCuts(std::span<const AxisRule> cuts, int64_t extent);

// What the rank at coordinates keeps of a set.
[[nodiscard]] IndexSet Apply(std::span<const AxisRule> cuts, IndexSet set,
                             std::span<const uint32_t> coordinates);

// Whether the tensor is on the rank at coordinates (kAt rules).
[[nodiscard]] bool Present(std::span<const AxisRule> rules, std::span<const uint32_t> coordinates);

// Extent of the dimension in memory where a rule pads it, else -1.
[[nodiscard]] int64_t PaddedExtent(std::span<const AxisRule> cuts);

}  // namespace bascule
