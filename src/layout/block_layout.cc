#include "layout/block_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout/checked.h"
#include "layout/runs.h"

namespace bascule {

uint32_t BindingSink::TensorNumber(const LogicalTensor& tensor) {
  auto [at, added] =
      tensor_numbers->try_emplace(tensor.name, static_cast<uint32_t>(layout->tensors.size()));
  if (added) layout->tensors.push_back(tensor);
  return at->second;
}

namespace {

// The first tensor of a block, to speak of it.
const std::string& NameOf(const Block& block) {
  const Block* first = &block;
  while (!first->parts().empty()) first = &first->parts()[0];
  return first->tensor().name;
}

Status Invalid(const Block& block, std::string message) {
  return Status(Code::kInvalidArgument, std::move(message)).WithTensor(NameOf(block));
}

Status InTile(const Block& block, const char* what) {
  return Status(Code::kUnimplemented,
                fmt::format("{} along a dimension that an Interleave around it tiles", what))
      .WithTensor(NameOf(block));
}

// An error that knows no tensor yet.
Status Named(Status status, const Block& block) {
  return status.ok() ? status : std::move(status).WithTensor(NameOf(block));
}

Status CheckDim(const Block& block, int dim, int ndim) {
  if (dim >= 0 && dim < ndim) return Status::Ok();
  return Invalid(block, fmt::format("dimension {} of a block of {}", dim, ndim));
}

// Parts that are present must agree in shape but for `except`.
Status CheckShapes(const Block& block, const std::vector<MeasuredBlock>& parts, int except) {
  const MeasuredBlock* first = nullptr;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].ndim != parts[0].ndim) {
      return Invalid(block.parts()[i], fmt::format("part {} has {} dimensions, part 0 has {}", i,
                                                   parts[i].ndim, parts[0].ndim));
    }
    if (!parts[i].present) continue;
    if (first == nullptr) first = &parts[i];
    for (int d = 0; d < parts[i].ndim; ++d) {
      auto dim = static_cast<size_t>(d);
      if (d != except && parts[i].shape[dim] != first->shape[dim]) {
        return Invalid(block.parts()[i],
                       fmt::format("local shape [{}] does not fit its neighbour's [{}]",
                                   fmt::join(parts[i].shape, ", "), fmt::join(first->shape, ", ")));
      }
    }
  }
  return Status::Ok();
}

std::vector<int64_t> TilesOf(const Block& interleave) {
  if (!interleave.numbers().empty()) return interleave.numbers();
  return std::vector<int64_t>(interleave.parts().size(), 1);
}

// The sets of indices that a tensor block picks before placements cut them.
Result<std::vector<IndexSet>> SetsOf(const Block& block) {
  std::vector<IndexSet> sets;
  for (int64_t extent : block.tensor().shape) sets.push_back(Stepped(0, extent, 1));
  std::vector<bool> sliced(sets.size());
  for (const Block::SliceSpec& slice : block.slices()) {
    BASCULE_RETURN_IF_ERROR(CheckDim(block, slice.dim, static_cast<int>(sets.size())));
    auto dim = static_cast<size_t>(slice.dim);
    if (slice.begin < 0 || slice.end < slice.begin || slice.end > block.tensor().shape[dim] ||
        slice.step < 1 || sliced[dim]) {
      return Invalid(block, fmt::format("slice {}:{}:{} of dimension {} of extent {}, or a second "
                                        "one",
                                        slice.begin, slice.end, slice.step, slice.dim,
                                        block.tensor().shape[dim]));
    }
    if (slice.step > 1 &&
        static_cast<uint64_t>((slice.end - slice.begin) / slice.step) > WorldTemplate::kMaxBoxes) {
      return Invalid(block, "a slice picks too many single indices");
    }
    sets[dim] = Stepped(slice.begin, slice.end, slice.step);
    sliced[dim] = true;
  }
  return sets;
}

}  // namespace

Result<MeasuredBlock> BlockExpander::Measure(const Block& block) {
  return MeasureBlock(block, Tiles{});
}

Result<MeasuredBlock> BlockExpander::MeasureBlock(const Block& block, const Tiles& tiles) {
  if (block.kind() == Block::Kind::kTensor) return MeasureTensor(block, tiles);
  if (!block.slices().empty() || block.function() != LandingFunction::kNone) {
    return Invalid(block, "Slice and Landing belong to Block::Of, not to what is made of it");
  }
  if (block.parts().empty()) return Invalid(block, "a block without parts");
  switch (block.kind()) {
    case Block::Kind::kTensor: break;
    case Block::Kind::kConcat: return MeasureConcat(block, tiles);
    case Block::Kind::kStack: return MeasureStack(block, tiles);
    case Block::Kind::kInterleave: return MeasureInterleave(block, tiles);
    case Block::Kind::kTranspose: return MeasureTranspose(block, tiles);
    case Block::Kind::kPad: return MeasurePad(block, tiles);
  }
  return Status(Code::kInternal, "unknown kind of block");
}

Result<Leaf> BlockExpander::MakeLeaf(const Block& block, const Tiles& tiles) {
  BASCULE_RETURN_IF_ERROR(TemplateBuilder::CheckTensor(block.tensor()));
  const size_t ndim = block.tensor().shape.size();
  Result<std::vector<AxisRule>> rules = RulesOf(world_->mesh(), block.placements(), ndim);
  if (!rules.ok()) return Named(rules.status(), block);
  BASCULE_ASSIGN_OR_RETURN(std::vector<IndexSet> sets, SetsOf(block));
  std::vector<std::vector<AxisRule>> cuts;
  for (size_t d = 0; d < ndim; ++d) {
    Result<std::vector<AxisRule>> dim_cuts = CutsOf(*rules, static_cast<int>(d));
    if (!dim_cuts.ok()) return Named(dim_cuts.status(), block);
    BASCULE_RETURN_IF_ERROR(Named(CheckCuts(*dim_cuts, SizeOf(sets[d])), block));
    if (tiles[d] != 0 && PaddedExtent(*dim_cuts) >= 0) return InTile(block, "ShardPadded");
    cuts.push_back(std::move(dim_cuts).value());
  }
  Leaf leaf;
  leaf.product = world_->ProductOf(*rules, cuts, sets, tiles);
  if (!coordinates_->has_value()) {
    leaf.present = false;
    return leaf;
  }
  leaf.present = Present(*rules, **coordinates_);
  for (size_t d = 0; d < ndim; ++d) {
    IndexSet own = Apply(cuts[d], std::move(sets[d]), **coordinates_);
    int64_t padded = PaddedExtent(cuts[d]);
    leaf.local_shape.push_back(padded >= 0 ? padded : SizeOf(own));
    leaf.own.push_back(tiles[d] != 0 ? CutAtTiles(own, tiles[d]) : std::move(own));
  }
  if (!TensorBytes(leaf.local_shape, block.tensor().dtype)) {
    return Invalid(block, "padded to more than 2^63 bytes");
  }
  return leaf;
}

Result<MeasuredBlock> BlockExpander::MeasureTensor(const Block& block, const Tiles& tiles) {
  std::string key;
  AppendKey(block.tensor().shape, &key);
  AppendKey(static_cast<int64_t>(block.tensor().dtype), &key);
  for (const Block::SliceSpec& slice : block.slices()) {
    AppendKey({slice.dim, slice.begin, slice.end, slice.step}, &key);
  }
  AppendKey(std::vector<int64_t>(tiles.begin(), tiles.end()), &key);
  AppendKey(block.placements(), &key);
  auto at = leaves_.find(key);
  if (at == leaves_.end()) {
    BASCULE_ASSIGN_OR_RETURN(Leaf leaf, MakeLeaf(block, tiles));
    at = leaves_.emplace(std::move(key), std::move(leaf)).first;
  }
  const Leaf& leaf = at->second;
  MeasuredBlock measured;
  measured.ndim = static_cast<int>(block.tensor().shape.size());
  measured.present = leaf.present;
  if (leaf.present) measured.shape = leaf.local_shape;
  measured.leaf = &leaf;
  return measured;
}

namespace {

// A block of parts that are measured; without a shape yet.
MeasuredBlock Parent(std::vector<MeasuredBlock> parts) {
  MeasuredBlock measured;
  measured.ndim = parts[0].ndim;
  measured.parts = std::move(parts);
  for (const MeasuredBlock& part : measured.parts) {
    if (!part.present) continue;
    if (!measured.present) measured.shape = part.shape;
    measured.present = true;
  }
  return measured;
}

}  // namespace

Result<MeasuredBlock> BlockExpander::MeasureConcat(const Block& block, const Tiles& tiles) {
  std::vector<MeasuredBlock> parts;
  for (const Block& part : block.parts()) {
    BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, MeasureBlock(part, tiles));
    parts.push_back(std::move(measured));
  }
  BASCULE_RETURN_IF_ERROR(CheckDim(block, block.dim(), parts[0].ndim));
  BASCULE_RETURN_IF_ERROR(CheckShapes(block, parts, block.dim()));
  auto dim = static_cast<size_t>(block.dim());
  if (tiles[dim] != 0) return InTile(block, "Concat");
  MeasuredBlock measured = Parent(std::move(parts));
  if (!measured.present) return measured;
  int64_t extent = 0;
  for (const MeasuredBlock& part : measured.parts) {
    if (!part.present) continue;
    std::optional<int64_t> sum = CheckedAdd(extent, part.shape[dim]);
    if (!sum) return Invalid(block, "the parts are longer than 2^63");
    extent = *sum;
  }
  measured.shape[dim] = extent;
  return measured;
}

Result<MeasuredBlock> BlockExpander::MeasureStack(const Block& block, const Tiles& tiles) {
  if (tiles[0] != 0) return InTile(block, "Stack");
  Tiles inner{};
  std::copy(tiles.begin() + 1, tiles.end(), inner.begin());
  std::vector<MeasuredBlock> parts;
  for (const Block& part : block.parts()) {
    BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, MeasureBlock(part, inner));
    parts.push_back(std::move(measured));
  }
  BASCULE_RETURN_IF_ERROR(CheckShapes(block, parts, -1));
  if (parts[0].ndim == kMaxDims) return Invalid(block, "Stack makes too many dimensions");
  MeasuredBlock measured = Parent(std::move(parts));
  ++measured.ndim;
  auto present = std::count_if(measured.parts.begin(), measured.parts.end(),
                               [](const MeasuredBlock& part) { return part.present; });
  if (measured.present) measured.shape.insert(measured.shape.begin(), present);
  return measured;
}

Result<MeasuredBlock> BlockExpander::MeasureInterleave(const Block& block, const Tiles& tiles) {
  const std::vector<int64_t> sizes = TilesOf(block);
  if (sizes.size() != block.parts().size() ||
      std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 1; })) {
    return Invalid(block, "Interleave needs one tile of at least 1 for each part");
  }
  BASCULE_RETURN_IF_ERROR(CheckDim(block, block.dim(), kMaxDims));
  auto dim = static_cast<size_t>(block.dim());
  if (tiles[dim] != 0) return InTile(block, "Interleave");
  std::vector<MeasuredBlock> parts;
  for (size_t i = 0; i < sizes.size(); ++i) {
    Tiles inner = tiles;
    inner[dim] = sizes[i] == 1 ? 0 : sizes[i];
    BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, MeasureBlock(block.parts()[i], inner));
    parts.push_back(std::move(measured));
  }
  BASCULE_RETURN_IF_ERROR(CheckDim(block, block.dim(), parts[0].ndim));
  BASCULE_RETURN_IF_ERROR(CheckShapes(block, parts, block.dim()));
  MeasuredBlock measured = Parent(std::move(parts));
  if (!measured.present) return measured;
  int64_t total = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const MeasuredBlock& part = measured.parts[i];
    const MeasuredBlock& first = measured.parts[0];
    if (!part.present || part.shape[dim] % sizes[i] != 0 ||
        part.shape[dim] / sizes[i] != first.shape[dim] / sizes[0]) {
      return Invalid(block.parts()[i],
                     fmt::format("does not have as many whole tiles of {} as its neighbours, or is "
                                 "on other ranks",
                                 sizes[i]));
    }
    std::optional<int64_t> sum = CheckedAdd(total, part.shape[dim]);
    if (!sum) return Invalid(block, "the parts are longer than 2^63");
    total = *sum;
  }
  measured.shape[dim] = total;
  return measured;
}

Result<MeasuredBlock> BlockExpander::MeasureTranspose(const Block& block, const Tiles& tiles) {
  const std::vector<int64_t>& order = block.numbers();
  Tiles inner{};
  std::array<bool, kMaxDims> seen{};
  for (size_t i = 0; i < order.size(); ++i) {
    if (order.size() > kMaxDims || order[i] < 0 || order[i] >= static_cast<int64_t>(order.size()) ||
        seen[static_cast<size_t>(order[i])]) {
      return Invalid(block, fmt::format("[{}] is no order of dimensions", fmt::join(order, ", ")));
    }
    seen[static_cast<size_t>(order[i])] = true;
    inner[static_cast<size_t>(order[i])] = tiles[i];
  }
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock part, MeasureBlock(block.parts()[0], inner));
  if (part.ndim != static_cast<int>(order.size())) {
    return Invalid(
        block, fmt::format("[{}] is no order of {} dimensions", fmt::join(order, ", "), part.ndim));
  }
  MeasuredBlock measured;
  measured.ndim = part.ndim;
  measured.present = part.present;
  if (part.present) {
    for (int64_t dim : order) measured.shape.push_back(part.shape[static_cast<size_t>(dim)]);
  }
  measured.parts.push_back(std::move(part));
  return measured;
}

Result<MeasuredBlock> BlockExpander::MeasurePad(const Block& block, const Tiles& tiles) {
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock part, MeasureBlock(block.parts()[0], tiles));
  BASCULE_RETURN_IF_ERROR(CheckDim(block, block.dim(), part.ndim));
  auto dim = static_cast<size_t>(block.dim());
  if (tiles[dim] != 0) return InTile(block, "PadTo");
  if (part.present && part.shape[dim] > block.numbers()[0]) {
    return Invalid(block, fmt::format("dimension {} of local extent {} is padded to {}",
                                      block.dim(), part.shape[dim], block.numbers()[0]));
  }
  std::vector<MeasuredBlock> parts;
  parts.push_back(std::move(part));
  MeasuredBlock measured = Parent(std::move(parts));
  if (measured.present) measured.shape[dim] = block.numbers()[0];
  return measured;
}

Status BlockExpander::AddBoxes(const Block& block, const MeasuredBlock& measured) {
  if (block.kind() == Block::Kind::kTensor) {
    return world_->AddBoxes(block.tensor(), measured.leaf->product);
  }
  for (size_t i = 0; i < block.parts().size(); ++i) {
    BASCULE_RETURN_IF_ERROR(AddBoxes(block.parts()[i], measured.parts[i]));
  }
  return Status::Ok();
}

namespace {

// Writes the bindings of a measured block whose array starts at a byte offset of a buffer. Offsets
// cannot overflow: the caller has checked the array's span.
class BindingWriter {
 public:
  BindingWriter(const LocalMemory& memory, BindingSink sink) : memory_(memory), sink_(sink) {}

  Status Write(const Block& block, const MeasuredBlock& measured, int64_t base,
               const DimMaps& maps) {
    if (!measured.present) return Status::Ok();
    switch (block.kind()) {
      case Block::Kind::kTensor: return WriteTensor(block, *measured.leaf, base, maps);
      case Block::Kind::kConcat: return WriteConcat(block, measured, base, maps);
      case Block::Kind::kStack: return WriteStack(block, measured, base, maps);
      case Block::Kind::kInterleave: return WriteInterleave(block, measured, base, maps);
      case Block::Kind::kTranspose: return WriteTranspose(block, measured, base, maps);
      case Block::Kind::kPad: return WritePad(block, measured, base, maps);
    }
    return Status(Code::kInternal, "unknown kind of block");
  }

 private:
  static int64_t Offset(const DimMap& map, int64_t position) {
    if (map.tile == 0) return position * map.stride;
    return position / map.tile * map.tile_stride + position % map.tile * map.stride;
  }

  Status WriteTensor(const Block& block, const Leaf& leaf, int64_t base, const DimMaps& maps) {
    const size_t ndim = leaf.own.size();
    Binding binding;
    binding.buffer = memory_.buffer;
    binding.dtype = memory_.dtype.value_or(block.tensor().dtype);
    binding.function = block.function();
    binding.box = Box::Whole(block.tensor().shape);
    for (size_t d = 0; d < ndim; ++d) binding.byte_strides[d] = maps[d].stride;
    bool empty = std::any_of(leaf.own.begin(), leaf.own.end(),
                             [](const IndexSet& set) { return set.empty(); });
    if (!empty) {
      binding.tensor = sink_.TensorNumber(block.tensor());
      WriteBoxes(leaf, 0, base, maps, &binding);
    }
    std::vector<int64_t> filled;
    for (const IndexSet& set : leaf.own) filled.push_back(SizeOf(set));
    return WritePadding(block, filled, leaf.local_shape, base, maps, DTypeSize(binding.dtype));
  }

  // Bindings of all products of one interval a dimension, from dimension `d` on.
  void WriteBoxes(const Leaf& leaf, size_t d, int64_t offset, const DimMaps& maps,
                  Binding* binding) {
    if (d == leaf.own.size()) {
      binding->byte_offset = offset;
      sink_.layout->bindings.push_back(*binding);
      return;
    }
    int64_t position = 0;
    for (const Interval& interval : leaf.own[d]) {
      binding->box[static_cast<int>(d)] = interval;
      WriteBoxes(leaf, d + 1, offset + Offset(maps[d], position), maps, binding);
      position += interval.size();
    }
  }

  // Declares as padding what lies in `shape` but not in `filled`.
  Status WritePadding(const Block& block, const std::vector<int64_t>& filled,
                      const std::vector<int64_t>& shape, int64_t base, const DimMaps& maps,
                      int64_t element_bytes) {
    for (size_t padded = 0; padded < shape.size(); ++padded) {
      if (filled[padded] == shape[padded]) continue;
      StridedMemory memory(base + filled[padded] * maps[padded].stride, element_bytes);
      for (size_t d = 0; d < shape.size(); ++d) {
        if (maps[d].tile != 0) return InTile(block, "padding");
        int64_t extent = d < padded ? filled[d] : shape[d];
        memory.AddDim(d == padded ? shape[d] - filled[d] : extent, maps[d].stride);
      }
      memory.Finish();
      memory.ForEachSeries([&](const RunSeries& series) {
        sink_.layout->padding.push_back({memory_.buffer, static_cast<uint64_t>(series.offset),
                                         static_cast<uint64_t>(series.bytes),
                                         static_cast<uint64_t>(series.count),
                                         static_cast<uint64_t>(series.stride)});
        return true;
      });
    }
    return Status::Ok();
  }

  Status WriteConcat(const Block& block, const MeasuredBlock& measured, int64_t base,
                     const DimMaps& maps) {
    auto dim = static_cast<size_t>(block.dim());
    for (size_t i = 0; i < block.parts().size(); ++i) {
      const MeasuredBlock& part = measured.parts[i];
      BASCULE_RETURN_IF_ERROR(Write(block.parts()[i], part, base, maps));
      if (part.present) base += part.shape[dim] * maps[dim].stride;
    }
    return Status::Ok();
  }

  Status WriteStack(const Block& block, const MeasuredBlock& measured, int64_t base,
                    const DimMaps& maps) {
    DimMaps inner{};
    std::copy(maps.begin() + 1, maps.end(), inner.begin());
    for (size_t i = 0; i < block.parts().size(); ++i) {
      BASCULE_RETURN_IF_ERROR(Write(block.parts()[i], measured.parts[i], base, inner));
      if (measured.parts[i].present) base += maps[0].stride;
    }
    return Status::Ok();
  }

  Status WriteInterleave(const Block& block, const MeasuredBlock& measured, int64_t base,
                         const DimMaps& maps) {
    auto dim = static_cast<size_t>(block.dim());
    const std::vector<int64_t> tiles = TilesOf(block);
    const int64_t stride = maps[dim].stride;
    int64_t period = 0;
    for (int64_t tile : tiles) period += tile;
    for (size_t i = 0; i < tiles.size(); ++i) {
      DimMaps inner = maps;
      if (tiles[i] == 1) {
        inner[dim] = {stride * period, 0, 0};
      } else {
        inner[dim] = {stride, tiles[i], stride * period};
      }
      BASCULE_RETURN_IF_ERROR(Write(block.parts()[i], measured.parts[i], base, inner));
      base += tiles[i] * stride;
    }
    return Status::Ok();
  }

  Status WriteTranspose(const Block& block, const MeasuredBlock& measured, int64_t base,
                        const DimMaps& maps) {
    DimMaps inner{};
    for (size_t i = 0; i < block.numbers().size(); ++i) {
      inner[static_cast<size_t>(block.numbers()[i])] = maps[i];
    }
    return Write(block.parts()[0], measured.parts[0], base, inner);
  }

  Status WritePad(const Block& block, const MeasuredBlock& measured, int64_t base,
                  const DimMaps& maps) {
    BASCULE_RETURN_IF_ERROR(Write(block.parts()[0], measured.parts[0], base, maps));
    const Block* leaf = &block;
    while (!leaf->parts().empty()) leaf = &leaf->parts()[0];
    return WritePadding(block, measured.parts[0].shape, measured.shape, base, maps,
                        DTypeSize(memory_.dtype.value_or(leaf->tensor().dtype)));
  }

  const LocalMemory& memory_;
  BindingSink sink_;
};

// The bytes of one element of all of a block's memory.
Result<int64_t> ElementBytes(const Block& block, const LocalMemory& memory) {
  if (memory.dtype) return int64_t{DTypeSize(*memory.dtype)};
  if (block.kind() == Block::Kind::kTensor) return int64_t{DTypeSize(block.tensor().dtype)};
  int64_t bytes = 0;
  for (const Block& part : block.parts()) {
    BASCULE_ASSIGN_OR_RETURN(int64_t part_bytes, ElementBytes(part, memory));
    if (bytes != 0 && part_bytes != bytes) {
      return Invalid(part,
                     "tensors of one array have elements of different sizes; give the "
                     "dtype of the memory");
    }
    bytes = part_bytes;
  }
  return bytes;
}

// The strides of an array: given, or dense row-major.
Result<DimMaps> MapsOf(const Block& block, const std::vector<int64_t>& shape,
                       const LocalMemory& memory, int64_t element_bytes) {
  DimMaps maps{};
  if (!memory.byte_strides.empty() && memory.byte_strides.size() != shape.size()) {
    return Invalid(block, fmt::format("{} strides for an array of {} dimensions",
                                      memory.byte_strides.size(), shape.size()));
  }
  std::optional<int64_t> dense = element_bytes;
  for (size_t d = shape.size(); d-- > 0;) {
    if (!dense) return Invalid(block, "the array is larger than 2^63 bytes");
    maps[d].stride = memory.byte_strides.empty() ? *dense : memory.byte_strides[d];
    dense = CheckedMultiply(*dense, std::max<int64_t>(shape[d], 1));
  }
  return maps;
}

Status CheckSpan(const Block& block, const std::vector<int64_t>& shape, const DimMaps& maps,
                 const LocalMemory& memory, int64_t element_bytes, const Buffer& buffer) {
  std::optional<int64_t> end = CheckedAdd(memory.byte_offset, element_bytes);
  for (size_t d = 0; d < shape.size() && end; ++d) {
    if (maps[d].stride < 0) return Invalid(block, "a stride is negative");
    std::optional<int64_t> span = CheckedMultiply(shape[d] - 1, maps[d].stride);
    end = span ? CheckedAdd(*end, *span) : std::nullopt;
  }
  if (memory.byte_offset < 0 || !end || static_cast<uint64_t>(*end) > buffer.bytes) {
    return Invalid(
        block, fmt::format("the array of local shape [{}] at byte {} does not fit "
                           "buffer '{}' of {} bytes",
                           fmt::join(shape, ", "), memory.byte_offset, buffer.name, buffer.bytes));
  }
  return Status::Ok();
}

}  // namespace

Status BlockExpander::AddBindings(const Block& block, const MeasuredBlock& measured,
                                  const LocalMemory& memory, BindingSink sink) {
  if (!measured.present) return Status::Ok();
  if (std::find(measured.shape.begin(), measured.shape.end(), 0) != measured.shape.end()) {
    return Status::Ok();
  }
  if (memory.buffer >= sink.layout->buffers.size()) {
    return Invalid(block, fmt::format("buffer {} of {}; add it first", memory.buffer,
                                      sink.layout->buffers.size()));
  }
  BASCULE_ASSIGN_OR_RETURN(int64_t element_bytes, ElementBytes(block, memory));
  BASCULE_ASSIGN_OR_RETURN(DimMaps maps, MapsOf(block, measured.shape, memory, element_bytes));
  BASCULE_RETURN_IF_ERROR(CheckSpan(block, measured.shape, maps, memory, element_bytes,
                                    sink.layout->buffers[memory.buffer]));
  return BindingWriter(memory, sink).Write(block, measured, memory.byte_offset, maps);
}

}  // namespace bascule
