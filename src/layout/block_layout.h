// Expands blocks: their boxes at all coordinates, and the bindings of one rank.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bascule/layout.h"
#include "bascule/mesh.h"
#include "layout/template_builder.h"

namespace bascule {

// Tensors and bindings of one rank, as they are found.
struct BindingSink {
  Layout* layout;
  std::unordered_map<std::string, uint32_t>* tensor_numbers;

  // The tensor's index in the layout.
  uint32_t TensorNumber(const LogicalTensor& tensor);
};

// One tensor's part of a block.
struct Leaf {
  uint32_t product = 0;  // in the TemplateBuilder
  // At the rank's coordinates:
  bool present = true;
  std::vector<IndexSet> own;         // per dimension
  std::vector<int64_t> local_shape;  // with padding
};

// A block at the rank's coordinates.
struct MeasuredBlock {
  int ndim = 0;
  bool present = false;        // some part is on this rank
  std::vector<int64_t> shape;  // where present
  const Leaf* leaf = nullptr;  // of a kTensor block
  std::vector<MeasuredBlock> parts;
};

// A position p of a dimension lies at p * stride bytes; with a tile at
// p / tile * tile_stride + p % tile * stride.
struct DimMap {
  int64_t stride = 0;
  int64_t tile = 0;
  int64_t tile_stride = 0;
};
using DimMaps = std::array<DimMap, kMaxDims>;

class BlockExpander {
 public:
  // Both outlive the expander. No coordinates: only products are made, nothing is present.
  BlockExpander(TemplateBuilder* world, const std::optional<std::vector<uint32_t>>* coordinates)
      : world_(world), coordinates_(coordinates) {}

  [[nodiscard]] Result<MeasuredBlock> Measure(const Block& block);
  // Adds the boxes of a measured block to the world.
  [[nodiscard]] Status AddBoxes(const Block& block, const MeasuredBlock& measured);
  // Adds the bindings and padding of a measured block.
  [[nodiscard]] Status AddBindings(const Block& block, const MeasuredBlock& measured,
                                   const LocalMemory& memory, BindingSink sink);

 private:
  using Tiles = std::array<int64_t, kMaxDims>;  // per dimension; 0: none

  [[nodiscard]] Result<MeasuredBlock> MeasureBlock(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<MeasuredBlock> MeasureTensor(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<MeasuredBlock> MeasureConcat(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<MeasuredBlock> MeasureStack(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<MeasuredBlock> MeasureInterleave(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<MeasuredBlock> MeasureTranspose(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<MeasuredBlock> MeasurePad(const Block& block, const Tiles& tiles);
  [[nodiscard]] Result<Leaf> MakeLeaf(const Block& block, const Tiles& tiles);

  TemplateBuilder* world_;
  const std::optional<std::vector<uint32_t>>* coordinates_;
  std::unordered_map<std::string, Leaf> leaves_;  // references stay valid
};

}  // namespace bascule
