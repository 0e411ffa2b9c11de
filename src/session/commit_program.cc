// The switch: the bytes of all bindings in few, long runs.
#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "layout/runs.h"
#include "session/program_building.h"
#include "session/programs.h"

namespace bascule {
namespace {

bool SameDims(const StridedMemory& a, const StridedMemory& b, int dims) {
  for (int d = 0; d < dims; ++d) {
    if (a.dim(d).extent != b.dim(d).extent || a.dim(d).stride != b.dim(d).stride) return false;
  }
  return true;
}

// `memory` with a longer run, or with `more` added to the extent of dimension `grown`.
StridedMemory Grown(const StridedMemory& memory, int64_t run, int grown, int64_t more) {
  StridedMemory result(memory.offset(), run);
  for (int d = 0; d < memory.dims(); ++d) {
    result.AddDim(memory.dim(d).extent + (d == grown ? more : 0), memory.dim(d).stride);
  }
  result.Finish();
  return result;
}

// a and b as one, where b goes on where each run of `a` ends, or where the last run of `a` ends.
std::optional<StridedMemory> Joined(const StridedMemory& a, const StridedMemory& b) {
  if (a.dims() == b.dims() && SameDims(a, b, a.dims())) {
    if (a.offset() == b.offset() && a.run_bytes() == b.run_bytes()) return a;
    if (a.offset() + a.run_bytes() == b.offset()) {
      return Grown(a, a.run_bytes() + b.run_bytes(), -1, 0);
    }
  }
  const int dims = std::max(a.dims(), b.dims());
  const int shared = dims - 1;
  if (a.run_bytes() != b.run_bytes() || dims == 0 || std::min(a.dims(), b.dims()) < shared ||
      !SameDims(a, b, shared)) {
    return std::nullopt;
  }
  // One that lacks the outermost dimension has extent 1 in it.
  const StridedDim& outer = a.dims() == dims ? a.dim(shared) : b.dim(shared);
  if (b.dims() == dims && b.dim(shared).stride != outer.stride) return std::nullopt;
  const int64_t a_extent = a.dims() == dims ? outer.extent : 1;
  const int64_t b_extent = b.dims() == dims ? b.dim(shared).extent : 1;
  if (a.offset() + a_extent * outer.stride != b.offset()) return std::nullopt;
  StridedMemory result(a.offset(), a.run_bytes());
  for (int d = 0; d < shared; ++d) result.AddDim(a.dim(d).extent, a.dim(d).stride);
  result.AddDim(a_extent + b_extent, outer.stride);
  result.Finish();
  return result;
}

// Joins neighbours of the order at hand until none are left to join.
void JoinNeighbours(std::vector<StridedMemory>* memories) {
  std::vector<StridedMemory> joined;
  for (const StridedMemory& memory : *memories) {
    joined.push_back(memory);
    while (joined.size() > 1) {
      const auto both = Joined(joined[joined.size() - 2], joined.back());
      if (!both) break;
      joined.pop_back();
      joined.back() = *both;
    }
  }
  *memories = std::move(joined);
}

// Orders by what is beside each other in one row of the outermost dimension, then down the rows.
auto ColumnKey(const StridedMemory& memory) {
  const int64_t stride = memory.dims() == 0 ? 1 : memory.dim(memory.dims() - 1).stride;
  return std::tuple(memory.run_bytes(), memory.dims(), stride,
                    stride == 0 ? 0 : memory.offset() % stride, memory.offset());
}

// The same bytes in as few and as long runs as neighbours give.
void JoinAll(std::vector<StridedMemory>* memories) {
  size_t before = 0;
  do {
    before = memories->size();
    std::stable_sort(memories->begin(), memories->end(),
                     [](const auto& a, const auto& b) { return a.offset() < b.offset(); });
    JoinNeighbours(memories);
    std::stable_sort(memories->begin(), memories->end(),
                     [](const auto& a, const auto& b) { return ColumnKey(a) < ColumnKey(b); });
    JoinNeighbours(memories);
  } while (memories->size() < before);
}

// Appends copies of the innermost `dims` of the memory. Where a shape has no room for all
// dimensions, the outermost becomes several operations.
void AddBytes(uint32_t buffer, uint64_t key, const StridedMemory& memory, int dims, int64_t offset,
              CopyProgram* program) {
  if (dims + 1 > kMaxDims) {
    const StridedDim& outer = memory.dim(dims - 1);
    for (int64_t i = 0; i < outer.extent; ++i) {
      AddBytes(buffer, key, memory, dims - 1, offset + i * outer.stride, program);
    }
    return;
  }
  CopyShape shape;
  shape.ndim = dims + 1;
  for (int d = 0; d < dims; ++d) {
    const auto at = static_cast<size_t>(dims - 1 - d);
    shape.extents[at] = memory.dim(d).extent;
    shape.source_strides[at] = memory.dim(d).stride;
  }
  shape.extents[static_cast<size_t>(dims)] = memory.run_bytes();
  shape.source_strides[static_cast<size_t>(dims)] = 1;
  shape.target_strides = shape.source_strides;
  shape.tensor_strides = programs::RowMajor(
      shape.ndim, 1, [&shape](int d) { return shape.extents[static_cast<size_t>(d)]; });
  shape.source = shape.wire = shape.target = DType::kU8;
  CopyOp op;
  op.source_base = op.target_base = buffer;
  op.source_offset = op.target_offset = offset;
  op.tensor_key = key;
  program->Add(shape, op);
}

}  // namespace

CopyProgram BuildCommit(const Layout& layout) {
  std::vector<std::vector<StridedMemory>> memories(layout.buffers.size());
  std::vector<uint64_t> keys(layout.buffers.size());
  for (const Binding& binding : layout.bindings) {
    if (binding.box.empty()) continue;
    if (memories[binding.buffer].empty()) {
      keys[binding.buffer] = TensorKey(layout.tensors[binding.tensor].name);
    }
    memories[binding.buffer].push_back(MemoryOf(binding));
  }
  CopyProgram program;
  for (uint32_t buffer = 0; buffer < memories.size(); ++buffer) {
    JoinAll(&memories[buffer]);
    for (const StridedMemory& memory : memories[buffer]) {
      AddBytes(buffer, keys[buffer], memory, memory.dims(), memory.offset(), &program);
    }
  }
  return program;
}

}  // namespace bascule
