// Casts are plain loops, written from dtype.h's rule and not from src/copy, and compiled once per
// Highway target, so that the compiler vectorizes them for the machine at hand.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "digest/audit.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bascule/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace bascule::HWY_NAMESPACE {

constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kMagnitude = 0x7FFFFFFF;

// condition ? a : b by masks: compilers turn that into vector code where a ternary of a float
// operation stays a branch.
HWY_INLINE uint32_t Select(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0 - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

HWY_INLINE uint32_t FloatFromBF16(uint32_t code) { return code << 16; }

// `halves` times 2^-24 is the value of a subnormal: exact, and normal as fp32.
HWY_INLINE uint32_t FloatFromF16(uint32_t code) {
  const uint32_t sign = (code & 0x8000) << 16;
  const uint32_t halves = code & 0x7FFF;
  const auto subnormal =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(halves)) * 0x1p-24F);
  const uint32_t finite = Select(halves < 0x400, subnormal, (halves << 13) + (112u << 23));
  return sign | Select(halves < 0x7C00, finite, (halves << 13) | kInfinity);
}

HWY_INLINE uint32_t BF16FromFloat(uint32_t bits) {
  const uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return Select((bits & kMagnitude) > kInfinity, bits >> 16 | 0x40, nearest);
}

// Rounds to nearest even. Below 2^-14 the sum with 0.5 has the fp16 subnormals' unit as its last
// bit, so that the addition rounds.
HWY_INLINE uint32_t F16FromFloat(uint32_t bits) {
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000;
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  const uint32_t finite = Select(magnitude < 113u << 23, subnormal, normal);
  const uint32_t nan = 0x7E00 | (magnitude >> 13 & 0x3FF);
  const uint32_t special = Select(magnitude > kInfinity, nan, 0x7C00);
  return sign | Select(magnitude < 143u << 23, finite, special);
}

HWY_INLINE uint32_t BF16FromWidened(uint32_t bits) { return bits >> 16; }

HWY_INLINE uint32_t F16FromWidened(uint32_t bits) {
  const uint32_t nan = (bits >> 16 & 0x8000) | 0x7C00 | (bits >> 13 & 0x3FF);
  return Select((bits & kMagnitude) > kInfinity, nan, F16FromFloat(bits));
}

HWY_INLINE uint32_t F16FromBF16(uint32_t code) { return F16FromFloat(FloatFromBF16(code)); }
HWY_INLINE uint32_t BF16FromF16(uint32_t code) { return BF16FromFloat(FloatFromF16(code)); }

// Casts `count` codes; any alignment.
template <typename From, typename To, uint32_t (*kCast)(uint32_t)>
HWY_INLINE void CastCodes(const std::byte* from, std::byte* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From code;
    std::memcpy(&code, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    const To result = static_cast<To>(kCast(code));
    std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &result, sizeof(To));
  }
}

// Narrows `count` widened codes; returns how many were not widened ones. Blocks are short.
template <uint32_t (*kNarrow)(uint32_t), uint32_t (*kWiden)(uint32_t)>
HWY_INLINE uint64_t NarrowBack(const std::byte* from, std::byte* to, int64_t count) {
  uint32_t inexact = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t code;
    std::memcpy(&code, from + i * 4, 4);
    const uint32_t narrow = kNarrow(code);
    const auto result = static_cast<uint16_t>(narrow);
    std::memcpy(to + i * 2, &result, 2);
    inexact += kWiden(narrow) != code ? 1 : 0;
  }
  return inexact;
}

uint64_t NarrowBackBlock(DType to_type, const std::byte* from, std::byte* to, int64_t count) {
  return to_type == DType::kBF16 ? NarrowBack<BF16FromWidened, FloatFromBF16>(from, to, count)
                                 : NarrowBack<F16FromWidened, FloatFromF16>(from, to, count);
}

// Types differ and are castable.
void CastBlock(DType from_type, DType to_type, const std::byte* from, std::byte* to,
               int64_t count) {
  using U16 = uint16_t;
  using U32 = uint32_t;
  if (from_type == DType::kF32) {
    if (to_type == DType::kBF16) return CastCodes<U32, U16, BF16FromFloat>(from, to, count);
    return CastCodes<U32, U16, F16FromFloat>(from, to, count);
  }
  if (from_type == DType::kBF16) {
    if (to_type == DType::kF32) return CastCodes<U16, U32, FloatFromBF16>(from, to, count);
    return CastCodes<U16, U16, F16FromBF16>(from, to, count);
  }
  if (to_type == DType::kF32) return CastCodes<U16, U32, FloatFromF16>(from, to, count);
  return CastCodes<U16, U16, BF16FromF16>(from, to, count);
}

}  // namespace bascule::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <array>
#include <utility>

#include "digest/audit.h"

namespace bascule {

HWY_EXPORT(CastBlock);
HWY_EXPORT(NarrowBackBlock);

namespace {

// Codes that are cast or gathered at a time; a block stays in the first-level cache.
constexpr int64_t kBlockElements = 2048;
// Rows of a tile of strided memory: as many 2-byte elements as a cache line has.
constexpr int64_t kTileRows = 32;

struct WalkDim {
  int64_t extent = 1;
  int64_t bytes = 0;     // stride in memory
  int64_t elements = 0;  // stride in the tensor
};

// How the elements of a box lie: dimensions outermost first, those of extent 1 left out and those
// that go on in memory and tensor alike merged. The last has tensor stride 1.
struct Walk {
  std::array<WalkDim, kMaxDims + 1> dims{};
  int count = 0;
  const std::byte* data = nullptr;
  int64_t first = 0;  // element of the tensor
};

Walk WalkOf(const StridedBox& memory, const Box& want, std::span<const int64_t> shape) {
  Walk walk;
  walk.data = memory.first;
  std::array<WalkDim, kMaxDims> inside_out{};
  int count = 0;
  int64_t tensor_stride = 1;
  for (int d = want.ndim() - 1; d >= 0; --d) {
    const WalkDim dim{want[d].size(), memory.byte_strides[static_cast<size_t>(d)], tensor_stride};
    walk.data += (want[d].begin - memory.box[d].begin) * dim.bytes;
    walk.first += want[d].begin * tensor_stride;
    tensor_stride *= shape[static_cast<size_t>(d)];
    if (dim.extent == 1) continue;
    WalkDim* inner = count == 0 ? nullptr : &inside_out[static_cast<size_t>(count - 1)];
    if (inner != nullptr && dim.bytes == inner->extent * inner->bytes &&
        dim.elements == inner->extent * inner->elements) {
      inner->extent *= dim.extent;
    } else {
      inside_out[static_cast<size_t>(count++)] = dim;
    }
  }
  while (count > 0)
    walk.dims[static_cast<size_t>(walk.count++)] = inside_out[static_cast<size_t>(--count)];
  if (walk.count == 0 || walk.dims[static_cast<size_t>(walk.count - 1)].elements != 1) {
    walk.dims[static_cast<size_t>(walk.count++)] = {1, DTypeSize(memory.dtype), 1};
  }
  return walk;
}

// Calls visit(data, first element) for each place of dimensions [0, dims).
template <typename Visit>
void ForEachPlace(const Walk& walk, int dims, const Visit& visit) {
  std::array<int64_t, kMaxDims + 1> index{};
  const std::byte* data = walk.data;
  int64_t first = walk.first;
  while (true) {
    visit(data, first);
    int d = dims - 1;
    for (; d >= 0; --d) {
      const auto at = static_cast<size_t>(d);
      const WalkDim& dim = walk.dims[at];
      data += dim.bytes;
      first += dim.elements;
      if (++index[at] < dim.extent) break;
      index[at] = 0;
      data -= dim.extent * dim.bytes;
      first -= dim.extent * dim.elements;
    }
    if (d < 0) return;
  }
}

template <typename T>
void GatherTile(const std::byte* from, int64_t row_bytes, int64_t column_bytes, int64_t rows,
                int64_t columns, std::byte* to) {
  for (int64_t c = 0; c < columns; ++c) {
    const std::byte* column = from + c * column_bytes;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + (r * columns + c) * static_cast<int64_t>(sizeof(T)), column + r * row_bytes,
                  sizeof(T));
    }
  }
}

void GatherTile(int width, const std::byte* from, int64_t row_bytes, int64_t column_bytes,
                int64_t rows, int64_t columns, std::byte* to) {
  switch (width) {
    case 1: return GatherTile<uint8_t>(from, row_bytes, column_bytes, rows, columns, to);
    case 2: return GatherTile<uint16_t>(from, row_bytes, column_bytes, rows, columns, to);
    case 4: return GatherTile<uint32_t>(from, row_bytes, column_bytes, rows, columns, to);
    default: return GatherTile<uint64_t>(from, row_bytes, column_bytes, rows, columns, to);
  }
}

// Sums one box of one tensor.
class BoxSummer {
 public:
  BoxSummer(DType memory, DType wire, bool widened, uint64_t tensor_key)
      : memory_(memory),
        wire_(wire),
        widened_(widened && memory != wire && Holds(memory, wire)),
        tensor_key_(tensor_key),
        width_(DTypeSize(memory)) {}

  void Add(const Walk& walk) {
    const int last = walk.count - 1;
    const WalkDim& inner = walk.dims[static_cast<size_t>(last)];
    if (inner.extent == 1 || inner.bytes == width_) {
      ForEachPlace(walk, last, [&](const std::byte* data, int64_t first) {
        AddRun(data, first, inner.extent);
      });
    } else {
      AddStrided(walk);
    }
  }

  [[nodiscard]] uint64_t digest() const { return digest_; }
  [[nodiscard]] uint64_t inexact() const { return inexact_; }

 private:
  void AddRun(const std::byte* data, int64_t first, int64_t count) {
    if (memory_ == wire_) {
      digest_ += DigestRun(data, first, count, width_, tensor_key_);
      return;
    }
    for (int64_t done = 0; done < count; done += kBlockElements) {
      const int64_t block = std::min(kBlockElements, count - done);
      const std::byte* from = data + done * width_;
      if (widened_) {
        inexact_ += HWY_DYNAMIC_DISPATCH(NarrowBackBlock)(wire_, from, cast_.data(), block);
      } else {
        HWY_DYNAMIC_DISPATCH(CastBlock)(memory_, wire_, from, cast_.data(), block);
      }
      digest_ += DigestRun(cast_.data(), first + done, block, DTypeSize(wire_), tensor_key_);
    }
  }

  // Takes rows along the dimension that lies closest in memory, so that whole cache lines are used.
  void AddStrided(Walk walk) {
    const WalkDim inner = walk.dims[static_cast<size_t>(--walk.count)];
    WalkDim rows{1, 0, 0};
    if (walk.count > 0) {
      const auto begin = walk.dims.begin();
      auto closest =
          std::min_element(begin, begin + walk.count,
                           [](const WalkDim& a, const WalkDim& b) { return a.bytes < b.bytes; });
      rows = *closest;
      std::copy(closest + 1, begin + walk.count, closest);
      --walk.count;
    }
    const int64_t tile_rows = std::min(rows.extent, kTileRows);
    const int64_t tile_columns = std::min(inner.extent, kBlockElements / tile_rows);
    ForEachPlace(walk, walk.count, [&](const std::byte* data, int64_t first) {
      for (int64_t c = 0; c < inner.extent; c += tile_columns) {
        for (int64_t r = 0; r < rows.extent; r += tile_rows) {
          AddTile(data + r * rows.bytes + c * inner.bytes, first + r * rows.elements + c,
                  {std::min(tile_rows, rows.extent - r), rows.bytes, rows.elements},
                  {std::min(tile_columns, inner.extent - c), inner.bytes, 1});
        }
      }
    });
  }

  void AddTile(const std::byte* data, int64_t first, const WalkDim& rows, const WalkDim& columns) {
    GatherTile(width_, data, rows.bytes, columns.bytes, rows.extent, columns.extent, tile_.data());
    for (int64_t r = 0; r < rows.extent; ++r) {
      AddRun(tile_.data() + r * columns.extent * width_, first + r * rows.elements, columns.extent);
    }
  }

  const DType memory_;
  const DType wire_;
  const bool widened_;
  const uint64_t tensor_key_;
  const int width_;
  uint64_t digest_ = 0;
  uint64_t inexact_ = 0;
  alignas(64) std::array<std::byte, kBlockElements * 8> tile_;
  alignas(64) std::array<std::byte, kBlockElements * 4> cast_;
};

// Bytes between two questions whether to go on.
constexpr int64_t kSliceBytes = int64_t{8} << 20;

// Appends the box in slices of whole rows of its first dimensions.
void AppendSlices(const Box& box, int64_t element_bytes, std::vector<Box>* slices) {
  const int64_t bytes = box.size() * element_bytes;
  int dim = 0;
  while (dim < box.ndim() && box[dim].size() == 1) ++dim;
  if (bytes <= kSliceBytes || dim == box.ndim()) return slices->push_back(box);
  const int64_t row_bytes = bytes / box[dim].size();
  const int64_t rows = std::max<int64_t>(1, kSliceBytes / row_bytes);
  for (int64_t begin = box[dim].begin; begin < box[dim].end; begin += rows) {
    Box slice = box;
    slice[dim] = {begin, std::min(box[dim].end, begin + rows)};
    if (rows == 1 && row_bytes > kSliceBytes) {
      AppendSlices(slice, element_bytes, slices);
    } else {
      slices->push_back(slice);
    }
  }
}

Status TensorError(const LogicalTensor& tensor, Code code, std::string message) {
  return Status(code, std::move(message)).WithTensor(tensor.name);
}

// Appends the boxes of a without b.
void Subtract(const Box& a, const Box& b, std::vector<Box>* rest) {
  const Box common = a.Intersect(b);
  if (common.empty()) return rest->push_back(a);
  Box core = a;
  for (int d = 0; d < a.ndim(); ++d) {
    Box side = core;
    side[d].end = common[d].begin;
    if (!side.empty()) rest->push_back(side);
    side = core;
    side[d].begin = common[d].end;
    if (!side.empty()) rest->push_back(side);
    core[d] = common[d];
  }
}

// Sums the bindings of a layout.
class LayoutSummer {
 public:
  LayoutSummer(const Layout& layout, const std::function<bool()>& cancelled, Side side)
      : layout_(layout),
        cancelled_(cancelled),
        side_(side),
        sums_(layout.tensors.size()),
        earlier_(layout.tensors.size()) {}

  // Counts what no earlier binding holds; what one does must be equal in both.
  Status Add(const Binding& binding, DType wire) {
    std::vector<Box> rest{binding.box};
    for (const Binding* other : earlier_[binding.tensor]) {
      const Box common = other->box.Intersect(binding.box);
      if (common.empty()) continue;
      BASCULE_RETURN_IF_ERROR(Compare(*other, binding, common, wire));
      std::vector<Box> left;
      for (const Box& box : rest) Subtract(box, common, &left);
      rest = std::move(left);
    }
    for (const Box& box : rest) {
      BASCULE_RETURN_IF_ERROR(SumPart(binding, box, wire, &sums_[binding.tensor]));
    }
    earlier_[binding.tensor].push_back(&binding);
    return Status::Ok();
  }

  [[nodiscard]] std::vector<Sum> Take() && { return std::move(sums_); }

 private:
  Status Compare(const Binding& first, const Binding& second, const Box& box, DType wire) const {
    Sum sums[2];
    BASCULE_RETURN_IF_ERROR(SumPart(first, box, wire, &sums[0]));
    BASCULE_RETURN_IF_ERROR(SumPart(second, box, wire, &sums[1]));
    if (sums[0] == sums[1]) return Status::Ok();
    return TensorError(
        layout_.tensors[first.tensor], Code::kDataLoss,
        "box " + box.ToString() + " is not the same in " + layout_.buffers[first.buffer].name +
            " at byte " + std::to_string(first.byte_offset) + " and in " +
            layout_.buffers[second.buffer].name + " at byte " + std::to_string(second.byte_offset));
  }

  Status SumPart(const Binding& binding, const Box& part, DType wire, Sum* sum) const {
    const LogicalTensor& tensor = layout_.tensors[binding.tensor];
    const Buffer& buffer = layout_.buffers[binding.buffer];
    if (buffer.kind == MemoryKind::kDevice) {
      return TensorError(tensor, Code::kUnimplemented,
                         buffer.name + " is in device memory, which this build cannot audit");
    }
    if (!Castable(binding.dtype, wire)) {
      return TensorError(tensor, Code::kInvalidArgument,
                         "cannot be cast from " + std::string(DTypeName(binding.dtype)) + " to " +
                             std::string(DTypeName(wire)));
    }
    const StridedBox memory{buffer.data + binding.byte_offset, binding.box, binding.byte_strides,
                            binding.dtype};
    const uint64_t key = TensorKey(tensor.name);
    uint64_t inexact = 0;
    std::vector<Box> slices;
    AppendSlices(part, DTypeSize(binding.dtype), &slices);
    for (const Box& slice : slices) {
      if (cancelled_ && cancelled_()) return Status(Code::kAborted, "the audit was cancelled");
      *sum += SumBox(memory, slice, tensor.shape, wire, key,
                     side_ == Side::kDestination ? &inexact : nullptr);
    }
    if (inexact == 0) return Status::Ok();
    return TensorError(tensor, Code::kDataLoss,
                       std::to_string(inexact) + " values of box " + part.ToString() + " in " +
                           buffer.name + " are not values of " + std::string(DTypeName(wire)));
  }

  const Layout& layout_;
  const std::function<bool()>& cancelled_;
  const Side side_;
  std::vector<Sum> sums_;
  std::vector<std::vector<const Binding*>> earlier_;  // per tensor
};

bool AllDigits(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

Sum SumBox(const StridedBox& memory, const Box& want, std::span<const int64_t> shape, DType wire,
           uint64_t tensor_key, uint64_t* inexact) {
  if (want.empty()) return {};
  BoxSummer summer(memory.dtype, wire, inexact != nullptr, tensor_key);
  summer.Add(WalkOf(memory, want, shape));
  if (inexact != nullptr) *inexact += summer.inexact();
  return {summer.digest(), static_cast<uint64_t>(want.size())};
}

Result<std::vector<Sum>> SumLayout(const Layout& layout,
                                   const std::function<DType(uint32_t)>& wire_of,
                                   const std::function<bool(uint32_t)>& selected,
                                   const std::function<bool()>& cancelled, Side side) {
  LayoutSummer summer(layout, cancelled, side);
  for (const Binding& binding : layout.bindings) {
    if (binding.function != LandingFunction::kNone || binding.box.empty()) continue;
    if (selected && !selected(binding.tensor)) continue;
    BASCULE_RETURN_IF_ERROR(summer.Add(binding, wire_of(binding.tensor)));
  }
  return std::move(summer).Take();
}

std::string LayerOf(std::string_view tensor_name) {
  size_t begin = 0;
  while (true) {
    const size_t end = std::min(tensor_name.find('.', begin), tensor_name.size());
    if (AllDigits(tensor_name.substr(begin, end - begin))) {
      return std::string(tensor_name.substr(0, end));
    }
    if (end == tensor_name.size()) break;
    begin = end + 1;
  }
  return std::string(begin == 0 ? tensor_name : tensor_name.substr(0, begin - 1));
}

std::vector<uint64_t> SumPadding(const Layout& layout) {
  std::vector<uint64_t> sums(layout.buffers.size());
  for (const Padding& padding : layout.padding) {
    const std::byte* data = layout.buffers[padding.buffer].data;
    for (uint64_t i = 0; i < padding.count; ++i) {
      const uint64_t offset = padding.offset + i * padding.stride;
      sums[padding.buffer] +=
          DigestRun(data + offset, static_cast<int64_t>(offset),
                    static_cast<int64_t>(padding.bytes), 1, Mix64(padding.buffer + 1));
    }
  }
  return sums;
}

}  // namespace bascule
#endif  // HWY_ONCE
