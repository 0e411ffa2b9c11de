// Strided memory as runs of bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "bascule/layout.h"

namespace bascule {

// `count` runs of `bytes`, `stride` bytes apart, the first at `offset`.
struct RunSeries {
  int64_t offset = 0;
  int64_t bytes = 0;
  int64_t count = 1;
  int64_t stride = 0;
};

// One dimension of strided memory.
struct StridedDim {
  int64_t extent = 1;
  int64_t stride = 0;  // bytes
};

// The memory of an array: its elements and, sorted by stride, the dimensions that are left when
// neighbours that touch are merged into runs.
class StridedMemory {
 public:
  StridedMemory(int64_t offset, int64_t element_bytes) : offset_(offset), run_(element_bytes) {}

  // A dimension of extent 0 makes the whole empty; extent 1 is dropped. At most kMaxDims + 1 dims.
  void AddDim(int64_t extent, int64_t stride) {
    if (extent == 0) empty_ = true;
    if (extent > 1) dims_[count_++] = {extent, stride};
  }

  // Merges; call once, after the last AddDim.
  void Finish() {
    auto begin = dims_.begin();
    std::sort(begin, begin + count_,
              [](const StridedDim& a, const StridedDim& b) { return a.stride < b.stride; });
    int first = 0;
    while (first < count_ && dims_[first].stride == run_) run_ *= dims_[first++].extent;
    std::move(begin + first, begin + count_, begin);
    count_ -= first;
  }

  [[nodiscard]] bool empty() const { return empty_; }
  [[nodiscard]] int64_t offset() const { return offset_; }
  [[nodiscard]] int64_t run_bytes() const { return run_; }
  [[nodiscard]] int dims() const { return count_; }  // innermost first
  [[nodiscard]] const StridedDim& dim(int d) const { return dims_[d]; }

  // Calls visit(const RunSeries&) until it returns false; returns whether all returned true.
  template <typename Visit>
  bool ForEachSeries(const Visit& visit) const {
    if (empty_) return true;
    std::array<int64_t, kMaxDims + 1> index{};
    RunSeries series{offset_, run_, 1, 0};
    if (count_ > 0) series.count = dims_[0].extent;
    if (count_ > 0) series.stride = dims_[0].stride;
    while (true) {
      if (!visit(series)) return false;
      int d = 1;
      while (d < count_ && ++index[d] == dims_[d].extent) {
        series.offset -= (dims_[d].extent - 1) * dims_[d].stride;
        index[d++] = 0;
      }
      if (d >= count_) return true;
      series.offset += dims_[d].stride;
    }
  }

 private:
  int64_t offset_;
  int64_t run_;
  bool empty_ = false;
  int count_ = 0;
  std::array<StridedDim, kMaxDims + 1> dims_{};
};

// The memory of a binding, finished.
[[nodiscard]] inline StridedMemory MemoryOf(const Binding& binding) {
  StridedMemory memory(binding.byte_offset, DTypeSize(binding.dtype));
  for (int d = 0; d < binding.box.ndim(); ++d) {
    memory.AddDim(binding.box[d].size(), binding.byte_strides[static_cast<size_t>(d)]);
  }
  memory.Finish();
  return memory;
}

}  // namespace bascule
