// Layouts: how the logical tensors of a checkpoint lie in the memory of one rank.
//
// All types are plain values and thread-compatible. Coordinates are those of the HF checkpoint;
// they are the one space in which both sides meet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "bascule/dtype.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// Of a logical tensor.
inline constexpr int kMaxDims = 8;

// Half-open [begin, end), in elements. Empty when begin >= end.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  [[nodiscard]] int64_t size() const { return end > begin ? end - begin : 0; }
  [[nodiscard]] bool empty() const { return end <= begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
  friend auto operator<=>(const Interval&, const Interval&) = default;
};

// A product of intervals, one per logical dimension; a box of 0 dimensions is a scalar (1 element).
class Box {
 public:
  Box() = default;
  Box(std::initializer_list<Interval> dims) {
    for (const Interval& dim : dims) dims_[static_cast<size_t>(ndim_++)] = dim;
  }
  explicit Box(const std::vector<Interval>& dims) {
    for (const Interval& dim : dims) dims_[static_cast<size_t>(ndim_++)] = dim;
  }
  // The box [0, shape[0]) x [0, shape[1]) x ...
  static Box Whole(const std::vector<int64_t>& shape) {
    Box box;
    for (int64_t extent : shape) box.dims_[static_cast<size_t>(box.ndim_++)] = {0, extent};
    return box;
  }
  [[nodiscard]] int ndim() const { return ndim_; }
  Interval& operator[](int dim) { return dims_[static_cast<size_t>(dim)]; }
  const Interval& operator[](int dim) const { return dims_[static_cast<size_t>(dim)]; }
  // Number of elements.
  [[nodiscard]] int64_t size() const {
    int64_t n = 1;
    for (int d = 0; d < ndim_; ++d) n *= (*this)[d].size();
    return n;
  }
  [[nodiscard]] bool empty() const { return size() == 0; }
  // The common part; empty() where there is none. Both must have equal ndim().
  [[nodiscard]] Box Intersect(const Box& other) const {
    Box box = *this;
    for (int d = 0; d < ndim_; ++d) {
      if (other[d].begin > box[d].begin) box[d].begin = other[d].begin;
      if (other[d].end < box[d].end) box[d].end = other[d].end;
      if (box[d].end < box[d].begin) box[d].end = box[d].begin;
    }
    return box;
  }
  // "[0:8, 16:32]".
  [[nodiscard]] std::string ToString() const;
  friend bool operator==(const Box&, const Box&) = default;
  friend auto operator<=>(const Box&, const Box&) = default;

 private:
  int32_t ndim_ = 0;
  std::array<Interval, kMaxDims> dims_{};
};

// A tensor of the HF checkpoint. `dtype` is what this side stores for it: a source's publish
// dtype, a destination's own dtype. `derived` marks scales and codes of quantized tensors.
struct LogicalTensor {
  std::string name;
  std::vector<int64_t> shape;  // 0 to kMaxDims dimensions, each >= 0
  DType dtype = DType::kF32;
  bool derived = false;
  friend bool operator==(const LogicalTensor&, const LogicalTensor&) = default;
};

// What kind of memory a buffer is.
enum class MemoryKind : uint8_t {
  kHost = 0,    // any CPU memory
  kShared = 1,  // CPU memory whose pages are those of `fd`, so that peers on the node can map it
  kDevice = 2,  // CUDA device memory
};

// Memory that a rank owns. The library never frees it; it must outlive the session.
struct Buffer {
  std::string name;  // for messages, e.g. the framework's parameter name
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;
  int device = -1;
  int fd = -1;             // kShared: a descriptor of the pages (borrowed)
  uint64_t fd_offset = 0;  // kShared: the offset of `data` in it, in bytes
};

// A declared elementwise function applied on landing, in fp32.
enum class LandingFunction : uint8_t {
  kNone = 0,
  kNegExp = 1,  // y = -exp(x): Mamba's A from A_log
};

// One box of one logical tensor <-> strided local memory. Element (i0, i1, ...) of the tensor lies
// at buffer.data + byte_offset + sum_d (i_d - box[d].begin) * byte_strides[d].
struct Binding {
  uint32_t tensor = 0;  // index in Layout::tensors
  uint32_t buffer = 0;  // index in Layout::buffers
  Box box;
  int64_t byte_offset = 0;
  std::array<int64_t, kMaxDims> byte_strides{};  // >= 0; any value where the extent is 1
  DType dtype = DType::kF32;  // of the memory; a source's may differ from publish
  LandingFunction function = LandingFunction::kNone;
};

// A tied weight: `name` is stored nowhere of its own and is its target, a tensor of this layout or
// of its world.
struct Alias {
  std::string name;
  std::string target;
  friend bool operator==(const Alias&, const Alias&) = default;
};

// Destination bytes that nothing fills: `count` runs of `bytes`, `stride` bytes apart.
struct Padding {
  uint32_t buffer = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t count = 1;
  uint64_t stride = 0;
};

class WorldTemplate;  // layout/world_template.h

// All bindings of one rank. Built by hand, from a mesh (mesh.h), JSON or a framework.
struct Layout {
  std::vector<LogicalTensor> tensors;
  std::vector<Buffer> buffers;
  std::vector<Binding> bindings;
  std::vector<Alias> aliases;
  std::vector<Padding> padding;
  // Destination side: source tensors that this engine does not want, by name; a trailing '*'
  // matches any suffix ("model.mtp.*").
  std::vector<std::string> unused;
  // The shape that all ranks of a declared mesh share, and this rank's place in it. Null where
  // nothing was declared: then the rank's own boxes become a template of one rank.
  std::shared_ptr<const WorldTemplate> world;
  std::vector<uint32_t> coordinates;

  // Index of a tensor by name, or -1. Linear; for building and tests.
  [[nodiscard]] int64_t FindTensor(const std::string& name) const;
};

// Which way a layout is used.
enum class Side : uint8_t { kSource, kDestination };

// Checks one rank's layout by itself: names unique, aliases with a target, shapes legal, boxes
// inside their tensors, bindings inside their buffers, dtypes as the side needs them, the boxes
// those of `world` where one is set. A source must bind each element once; a destination may bind a
// box twice (one need, two landings). Data pointers are not looked at. InvalidArgument names the
// tensor and the remedy.
[[nodiscard]] Status ValidateLayout(const Layout& layout, Side side = Side::kSource);

// Checks that bindings and padding fill every byte of every buffer exactly once, and that buffers
// which have memory share none of it (destinations). The error names the buffer, the byte, and the
// binding or bindings; or both buffers.
[[nodiscard]] Status CheckDestinationCoverage(const Layout& layout);

}  // namespace bascule
#pragma GCC visibility pop
