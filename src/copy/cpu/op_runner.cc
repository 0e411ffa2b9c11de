#include "copy/cpu/op_runner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "copy/cpu/executor.h"
#include "copy/cpu/transpose.h"

namespace bascule {
namespace {

// Tiles of transposes: this many bytes along both dimensions, two cache lines.
constexpr int64_t kTileSide = 128;
// Tiles fit the first-level cache.
constexpr int64_t kTileBytes = 8192;
constexpr int64_t kLineBytes = 64;
// Runs longer than this may be cut.
constexpr int64_t kLongRun = int64_t{256} << 10;

// Strides in bytes of a two-dimensional block.
struct Strides {
  int64_t row;
  int64_t column;
};

template <typename T>
void CopyStrided(const std::byte* from, Strides from_strides, std::byte* to, Strides to_strides,
                 int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    const std::byte* source = from + r * from_strides.row;
    std::byte* target = to + r * to_strides.row;
    for (int64_t c = 0; c < columns; ++c) {
      T value;
      std::memcpy(&value, source + c * from_strides.column, sizeof(T));
      std::memcpy(target + c * to_strides.column, &value, sizeof(T));
    }
  }
}

void CopyStrided(int64_t width, const std::byte* from, Strides from_strides, std::byte* to,
                 Strides to_strides, int64_t rows, int64_t columns) {
  switch (width) {
    case 1: return CopyStrided<uint8_t>(from, from_strides, to, to_strides, rows, columns);
    case 2: return CopyStrided<uint16_t>(from, from_strides, to, to_strides, rows, columns);
    case 4: return CopyStrided<uint32_t>(from, from_strides, to, to_strides, rows, columns);
    default: return CopyStrided<uint64_t>(from, from_strides, to, to_strides, rows, columns);
  }
}

// Walks the lines along which the strided side lies closer one after the other.
void CopyElements(int64_t width, const std::byte* from, Strides from_strides, std::byte* to,
                  Strides to_strides, int64_t rows, int64_t columns, Strides strided) {
  if (rows > 1 && strided.row < strided.column) {
    CopyStrided(width, from, {from_strides.column, from_strides.row}, to,
                {to_strides.column, to_strides.row}, columns, rows);
  } else {
    CopyStrided(width, from, from_strides, to, to_strides, rows, columns);
  }
}

// The lines of a tile lie pages apart, where no hardware prefetcher finds them.
template <int kWrite>
void PrefetchTile(const std::byte* at, Strides strides, int64_t width, int64_t rows,
                  int64_t columns) {
  const bool rows_inside = strides.row < strides.column;
  const int64_t lines = rows_inside ? columns : rows;
  const int64_t stride = rows_inside ? strides.column : strides.row;
  const int64_t bytes =
      ((rows_inside ? rows : columns) - 1) * (rows_inside ? strides.row : strides.column) + width;
  if (bytes > kTileBytes) return;
  for (int64_t line = 0; line < lines; ++line, at += stride) {
    for (int64_t byte = 0; byte < bytes; byte += kLineBytes) {
      __builtin_prefetch(at + byte, kWrite);
    }
    __builtin_prefetch(at + bytes - 1, kWrite);
  }
}

void SwapDims(OpPlan* plan, size_t a, size_t b) {
  std::swap(plan->extents[a], plan->extents[b]);
  std::swap(plan->source_strides[a], plan->source_strides[b]);
  std::swap(plan->target_strides[a], plan->target_strides[b]);
  std::swap(plan->tensor_strides[a], plan->tensor_strides[b]);
}

// Puts beside the innermost dimension the one along which the strided side lies closest, so that a
// tile uses whole cache lines of both sides.
void PickTileRows(OpPlan* plan) {
  if (plan->ndim < 2) return;
  const auto& strides = plan->source_dense ? plan->target_strides : plan->source_strides;
  size_t best = plan->ndim - 2;
  for (size_t d = 0; d + 2 < plan->ndim; ++d) {
    if (strides[d] < strides[best]) best = d;
  }
  for (size_t d = best; d + 2 < plan->ndim; ++d) SwapDims(plan, d, d + 1);
}

void SizeTiles(OpPlan* plan) {
  const int64_t widest = std::max({plan->source_bytes, plan->wire_bytes, plan->target_bytes});
  const int64_t side = kTileSide / std::min(plan->source_bytes, plan->target_bytes);
  plan->tile_rows = plan->ndim < 2 ? 1 : std::min(side, plan->extents[plan->ndim - 2]);
  plan->tile_columns =
      std::min(plan->inner(), std::max(side, kTileBytes / (plan->tile_rows * widest)));
}

void CopyDims(const CopyShape& shape, RunMode mode, OpPlan* plan) {
  plan->ndim = static_cast<size_t>(shape.ndim);
  plan->elements = 1;
  for (size_t d = 0; d < plan->ndim; ++d) {
    plan->extents[d] = shape.extents[d];
    plan->source_strides[d] =
        mode == RunMode::kDigestTarget ? shape.target_strides[d] : shape.source_strides[d];
    plan->target_strides[d] = shape.target_strides[d];
    plan->tensor_strides[d] = shape.tensor_strides[d];
    plan->elements *= shape.extents[d];
  }
  if (plan->ndim == 0 || plan->tensor_strides[plan->ndim - 1] != 1) {
    plan->extents[plan->ndim] = 1;
    plan->source_strides[plan->ndim] = plan->source_bytes;
    plan->target_strides[plan->ndim] = plan->target_bytes;
    plan->tensor_strides[plan->ndim] = 1;
    ++plan->ndim;
  }
}

void FindKernels(const CopyShape& shape, DType source, OpPlan* plan) {
  KernelSpec spec;
  spec.source = source;
  spec.wire = shape.wire;
  spec.target = plan->in_two ? shape.wire : shape.target;
  spec.store = plan->store;
  spec.narrow_back = plan->narrow_back;
  spec.digest = true;
  plan->digesting = FindRowKernel(spec);
  if (!plan->store) return;
  spec.digest = false;
  plan->plain = FindRowKernel(spec);
  spec.source = shape.wire;
  spec.target = shape.target;
  if (plan->in_two) plan->landing = FindRowKernel(spec);
}

// Buffers grow to the largest tile and stay.
std::byte* Grown(std::vector<std::byte>* buffer, int64_t bytes) {
  if (buffer->size() < static_cast<size_t>(bytes)) buffer->resize(static_cast<size_t>(bytes));
  return buffer->data();
}

float Apply(LandingFunction function, float value) {
  switch (function) {
    case LandingFunction::kNone: return value;
    case LandingFunction::kNegExp:
      return -std::exp(value);  // libm's expf, element by element: the same on every machine
  }
  return value;
}

}  // namespace

OpRunner::OpRunner(const CopyProgram& program, RunMode mode, bool stream)
    : program_(program), mode_(mode), stream_(stream) {
  KernelSpec bytes;
  bytes.digest = false;
  turning_ = FindRowKernel(bytes);
}

OpPlan PlanOf(const CopyShape& shape, RunMode mode) {
  OpPlan plan;
  const DType source = mode == RunMode::kDigestTarget ? shape.target : shape.source;
  plan.store = mode == RunMode::kCopy;
  plan.source_bytes = DTypeSize(source);
  plan.wire_bytes = DTypeSize(shape.wire);
  plan.target_bytes = DTypeSize(shape.target);
  plan.wire = shape.wire;
  plan.target = shape.target;
  if (plan.store) plan.function = shape.function;
  plan.in_two = plan.store && (plan.function != LandingFunction::kNone ||
                               (shape.wire != shape.source && shape.wire != shape.target));
  plan.narrow_back = mode == RunMode::kDigestTarget && shape.wire != shape.target &&
                     Holds(shape.target, shape.wire);
  CopyDims(shape, mode, &plan);
  const size_t last = plan.ndim - 1;
  plan.source_dense = plan.inner() == 1 || plan.source_strides[last] == plan.source_bytes;
  plan.target_dense =
      !plan.store || plan.inner() == 1 || plan.target_strides[last] == plan.target_bytes;
  FindKernels(shape, source, &plan);
  if (plan.source_dense && plan.target_dense && !plan.in_two) {
    const int64_t run_bytes = plan.inner() * std::max(plan.source_bytes, plan.target_bytes);
    plan.unit = run_bytes <= kLongRun ? plan.inner() : 4096;
  } else {
    if (!plan.source_dense || !plan.target_dense) PickTileRows(&plan);
    SizeTiles(&plan);
    plan.unit = plan.ndim < 2 ? plan.tile_columns : plan.tile_rows * plan.inner();
  }
  return plan;
}

const OpPlan& OpRunner::PlanFor(uint32_t shape) {
  if (shape != planned_) {
    plan_ = PlanOf(program_.shapes[shape], mode_);
    planned_ = shape;
  }
  return plan_;
}

OpRunner::Position OpRunner::At(const CopyOp& op, const std::byte* source, std::byte* target,
                                int64_t row, int64_t column, int64_t* rows_left) const {
  const size_t last = plan_.ndim - 1;
  Position at{source + column * plan_.source_strides[last],
              target == nullptr ? nullptr : target + column * plan_.target_strides[last],
              op.first_element + column * plan_.tensor_strides[last]};
  *rows_left = 1;
  for (size_t d = last; d-- > 0;) {
    const int64_t index = d == 0 ? row : row % plan_.extents[d];
    if (d != 0) row /= plan_.extents[d];
    if (d + 1 == last) *rows_left = plan_.extents[d] - index;
    at.source += index * plan_.source_strides[d];
    if (target != nullptr) at.target += index * plan_.target_strides[d];
    at.first += index * plan_.tensor_strides[d];
  }
  return at;
}

Sum OpRunner::Run(const CopyOp& op, const std::byte* source, std::byte* target, int64_t begin,
                  int64_t end, bool digest) {
  (void)PlanFor(op.shape);
  digest_ = digest;
  const int64_t inner = plan_.inner();
  // Small operations by the million: no divisions.
  if (begin == 0 && end == plan_.elements && plan_.ndim <= 2) {
    const int64_t rows = plan_.ndim < 2 ? 1 : plan_.extents[0];
    return Rows({source, target, op.first_element}, rows, inner, op.tensor_key);
  }
  Sum sum;
  while (begin < end) {
    const int64_t column = begin % inner;
    int64_t rows_left = 1;
    const Position at = At(op, source, target, begin / inner, column, &rows_left);
    int64_t rows = 1;
    int64_t run = std::min(inner - column, end - begin);
    if (run == inner) rows = std::min(rows_left, (end - begin) / inner);
    sum += Rows(at, rows, run, op.tensor_key);
    begin += rows * run;
  }
  return sum;
}

int64_t OpRunner::Prefetch(const CopyOp& op, const std::byte* source, int64_t most_bytes) const {
  const CopyShape& shape = program_.shapes[op.shape];
  const auto& strides =
      mode_ == RunMode::kDigestTarget ? shape.target_strides : shape.source_strides;
  const int64_t width = DTypeSize(mode_ == RunMode::kDigestTarget ? shape.target : shape.source);
  const size_t ndim = static_cast<size_t>(shape.ndim);
  const bool dense = ndim > 0 && strides[ndim - 1] == width;
  const int64_t run = dense ? shape.extents[ndim - 1] * width : width;
  const size_t outer = dense ? 2 : 1;  // the dimension of rows, from the end
  const int64_t rows = ndim < outer ? 1 : shape.extents[ndim - outer];
  const int64_t stride = ndim < outer ? 0 : strides[ndim - outer];
  int64_t fetched = 0;
  for (int64_t row = 0; row < rows && fetched < most_bytes; ++row, source += stride) {
    const int64_t bytes = std::min(run, most_bytes - fetched);
    for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(source + at);
    fetched += std::max(bytes, kLineBytes);
  }
  return fetched;
}

Sum OpRunner::Rows(const Position& at, int64_t rows, int64_t run, uint64_t tensor_key) {
  if (plan_.source_dense && plan_.target_dense && !plan_.in_two) {
    const size_t above = plan_.ndim - 2;
    const bool one = plan_.ndim < 2;
    RowBlock block;
    block.source = at.source;
    block.target = at.target;
    block.run = run;
    block.element_bytes = plan_.source_bytes;
    block.rows = rows;
    block.source_stride = one ? 0 : plan_.source_strides[above];
    block.target_stride = one ? 0 : plan_.target_strides[above];
    block.tensor_stride = one ? 0 : plan_.tensor_strides[above];
    block.first = at.first;
    block.tensor_key = tensor_key;
    block.stream = stream_;
    return DenseRows(block);
  }
  Sum sum;
  for (int64_t column = 0; column < run; column += plan_.tile_columns) {
    const int64_t columns = std::min(plan_.tile_columns, run - column);
    for (int64_t row = 0; row < rows; row += plan_.tile_rows) {
      const int64_t next = row + plan_.tile_rows;
      if (next < rows) {
        PrefetchTileAt(TileAt(at, next, column), std::min(plan_.tile_rows, rows - next), columns);
      }
      sum +=
          Tile(TileAt(at, row, column), std::min(plan_.tile_rows, rows - row), columns, tensor_key);
    }
  }
  return sum;
}

OpRunner::Position OpRunner::TileAt(const Position& at, int64_t row, int64_t column) const {
  const size_t last = plan_.ndim - 1;
  const size_t above = plan_.ndim < 2 ? last : plan_.ndim - 2;  // of one dimension, row is 0
  Position tile = at;
  tile.source += row * plan_.source_strides[above] + column * plan_.source_strides[last];
  if (plan_.store) {
    tile.target += row * plan_.target_strides[above] + column * plan_.target_strides[last];
  }
  tile.first += row * plan_.tensor_strides[above] + column * plan_.tensor_strides[last];
  return tile;
}

// Only tiles of several rows come here.
void OpRunner::PrefetchTileAt(const Position& at, int64_t rows, int64_t columns) const {
  const size_t last = plan_.ndim - 1;
  const Strides source{plan_.source_strides[last - 1], plan_.source_strides[last]};
  PrefetchTile<0>(at.source, source, plan_.source_bytes, rows, columns);
  if (!plan_.store || stream_) return;
  const Strides target{plan_.target_strides[last - 1], plan_.target_strides[last]};
  PrefetchTile<1>(at.target, target, plan_.target_bytes, rows, columns);
}

Sum OpRunner::DenseRows(const RowBlock& block) {
  Sum sum;
  if (!digest_) {
    if (plan_.plain != nullptr) plan_.plain(block);
    return sum;
  }
  sum.elements = static_cast<uint64_t>(block.rows * block.run);
  if (!plan_.narrow_back) {
    sum.digest = plan_.digesting(block);
    return sum;
  }
  // What does not narrow back exactly is not counted. Chunks stay in the cache between the passes.
  RowBlock chunk = block;
  chunk.rows = 1;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.run; column += kTileBytes) {
      chunk.source = block.source + row * block.source_stride + column * plan_.source_bytes;
      chunk.first = block.first + row * block.tensor_stride + column;
      chunk.run = std::min(kTileBytes, block.run - column);
      sum.digest += plan_.digesting(chunk);
      sum.elements -= static_cast<uint64_t>(CountInexact(chunk.source, chunk.run, plan_.wire));
    }
  }
  return sum;
}

Sum OpRunner::Tile(const Position& at, int64_t rows, int64_t run, uint64_t tensor_key) {
  const size_t above = plan_.ndim < 2 ? 0 : plan_.ndim - 2;
  RowBlock block;
  block.source = at.source;
  block.source_stride = plan_.source_strides[above];
  block.target = at.target;
  block.target_stride = plan_.target_strides[above];
  block.tensor_stride = plan_.tensor_strides[above];
  block.rows = rows;
  block.run = run;
  block.element_bytes = plan_.source_bytes;
  block.first = at.first;
  block.tensor_key = tensor_key;
  if (!plan_.source_dense) Gather(&block);
  if (plan_.target_dense) {
    block.stream = stream_;
    return plan_.in_two ? InTwo(block) : DenseRows(block);
  }

  std::byte* const target = block.target;
  block.target_stride = run * plan_.target_bytes;
  block.target = Grown(&scattered_, rows * block.target_stride);
  const Sum sum = plan_.in_two ? InTwo(block) : DenseRows(block);
  Scatter(block, target);
  return sum;
}

void OpRunner::Gather(RowBlock* block) {
  const int64_t width = plan_.source_bytes;
  const Strides strided{block->source_stride, plan_.source_strides[plan_.ndim - 1]};
  const Strides dense{block->run * width, width};
  std::byte* const gathered = Grown(&gathered_, block->rows * dense.row);
  if (strided.row == width && block->rows > 1) {
    const RowBlock lines = Turned(*block, width, strided.column);
    turning_(lines);
    TransposeTile(width, lines.target, lines.target_stride, lines.rows, lines.run, gathered,
                  dense.row);
  } else {
    CopyElements(width, block->source, strided, gathered, dense, block->rows, block->run, strided);
  }
  block->source = gathered;
  block->source_stride = dense.row;
}

void OpRunner::Scatter(const RowBlock& block, std::byte* target) {
  const int64_t width = plan_.target_bytes;
  const size_t last = plan_.ndim - 1;
  const Strides strided{plan_.target_strides[plan_.ndim < 2 ? last : last - 1],
                        plan_.target_strides[last]};
  const Strides dense{block.target_stride, width};
  if (strided.row == width && block.rows > 1) {
    RowBlock lines = Turned(block, width, strided.column);
    std::swap(lines.source_stride, lines.target_stride);
    lines.source = lines.target;
    lines.target = target;
    lines.stream = stream_;
    TransposeTile(width, block.target, dense.row, block.rows, block.run, turned_.data(),
                  lines.source_stride);
    turning_(lines);
  } else {
    CopyElements(width, block.target, dense, target, strided, block.rows, block.run, strided);
  }
}

// The lines of the strided side of a transposed tile, to be copied to a dense buffer. They go by
// the row kernels, which prefetch and stream; tiles are turned in the cache.
RowBlock OpRunner::Turned(const RowBlock& block, int64_t width, int64_t line_stride) {
  RowBlock lines;
  lines.source = block.source;
  lines.source_stride = line_stride;
  lines.run = block.rows;
  lines.rows = block.run;
  lines.element_bytes = width;
  lines.target_stride = block.rows * width;
  lines.target = Grown(&turned_, lines.rows * lines.target_stride);
  return lines;
}

Sum OpRunner::InTwo(const RowBlock& block) {
  RowBlock to_wire = block;
  to_wire.stream = false;
  to_wire.target_stride = block.run * plan_.wire_bytes;
  to_wire.target = Grown(&wire_, block.rows * to_wire.target_stride);
  const Sum sum = DenseRows(to_wire);

  RowBlock from_wire = block;
  from_wire.source = to_wire.target;
  from_wire.source_stride = to_wire.target_stride;
  from_wire.element_bytes = plan_.wire_bytes;
  if (plan_.function == LandingFunction::kNone) {
    plan_.landing(from_wire);
    return sum;
  }
  for (int64_t row = 0; row < block.rows; ++row) {
    LandRow(from_wire.source + row * from_wire.source_stride,
            block.target + row * block.target_stride, block.run);
  }
  return sum;
}

void OpRunner::LandRow(const std::byte* wire, std::byte* target, int64_t count) const {
  const size_t wire_bytes = static_cast<size_t>(plan_.wire_bytes);
  const size_t target_bytes = static_cast<size_t>(plan_.target_bytes);
  for (int64_t i = 0; i < count; ++i, wire += wire_bytes, target += target_bytes) {
    uint32_t code = 0;  // little-endian: the code is in the low bytes
    std::memcpy(&code, wire, wire_bytes);
    const float value = std::bit_cast<float>(CastCode(code, plan_.wire, DType::kF32));
    const float result = Apply(plan_.function, value);
    code = CastCode(std::bit_cast<uint32_t>(result), DType::kF32, plan_.target);
    std::memcpy(target, &code, target_bytes);
  }
}

}  // namespace bascule
