// Every byte of every destination buffer is filled exactly once, and no byte is in two buffers.
//
// Per buffer: all runs of bindings and padding are multiples of one granule (the gcd of their
// offsets, lengths and strides), so one bit a granule, filled a run at a time, decides. Dense
// buffers have granules of megabytes, column cuts of a row; only element-wise interleaving comes
// down to an element.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "bascule/layout.h"
#include "layout/runs.h"

namespace bascule {
namespace {

// Bits [0, size), set a range at a time.
class Bitmap {
 public:
  explicit Bitmap(int64_t size) : size_(size), words_(static_cast<size_t>((size + 63) / 64)) {}

  // Sets [begin, end). Returns the first bit of it that was set already, or -1.
  int64_t Fill(int64_t begin, int64_t end) {
    while (begin < end) {
      auto word = static_cast<size_t>(begin / 64);
      int64_t low = begin % 64;
      int64_t high = std::min<int64_t>(64, low + end - begin);
      uint64_t mask = (high - low == 64) ? ~0ULL : ((1ULL << (high - low)) - 1) << low;
      if ((words_[word] & mask) != 0) {
        return static_cast<int64_t>(word) * 64 + std::countr_zero(words_[word] & mask);
      }
      words_[word] |= mask;
      begin += high - low;
    }
    return -1;
  }

  // The first bit that is not set, or -1.
  [[nodiscard]] int64_t FirstClear() const {
    for (size_t word = 0; word < words_.size(); ++word) {
      if (words_[word] == ~0ULL) continue;
      int64_t bit = static_cast<int64_t>(word) * 64 + std::countr_one(words_[word]);
      return bit < size_ ? bit : -1;
    }
    return -1;
  }

 private:
  int64_t size_;
  std::vector<uint64_t> words_;
};

// What fills bytes: a binding, or a padding.
struct Filler {
  StridedMemory memory;
  const Binding* binding = nullptr;  // null: padding
};

Filler FillerOf(const Padding& padding) {
  Filler filler{
      StridedMemory(static_cast<int64_t>(padding.offset), static_cast<int64_t>(padding.bytes))};
  if (padding.bytes == 0) filler.memory.AddDim(0, 0);
  filler.memory.AddDim(static_cast<int64_t>(padding.count), static_cast<int64_t>(padding.stride));
  filler.memory.Finish();
  return filler;
}

bool Covers(const Filler& filler, int64_t byte) {
  return !filler.memory.ForEachSeries([byte](const RunSeries& series) {
    int64_t relative = byte - series.offset;
    if (relative < 0) return true;
    int64_t index = series.stride == 0 ? 0 : std::min(relative / series.stride, series.count - 1);
    return relative - index * series.stride >= series.bytes;
  });
}

std::string Describe(const Layout& layout, const Filler& filler) {
  if (filler.binding == nullptr) return "padding";
  return fmt::format("tensor '{}' box {}", layout.tensors[filler.binding->tensor].name,
                     filler.binding->box.ToString());
}

Status OverlapError(const Layout& layout, const Buffer& buffer, std::span<const Filler> fillers,
                    size_t second, int64_t byte) {
  size_t first = 0;
  while (first < second && !Covers(fillers[first], byte)) ++first;
  const Filler& named = fillers[second].binding == nullptr ? fillers[first] : fillers[second];
  Status status(Code::kInvalidArgument,
                first == second
                    ? fmt::format("byte {} of buffer '{}' is filled twice by {}: its strides make "
                                  "elements share memory",
                                  byte, buffer.name, Describe(layout, fillers[second]))
                    : fmt::format("byte {} of buffer '{}' is filled by {} and by {}; correct the "
                                  "offset or stride of one",
                                  byte, buffer.name, Describe(layout, fillers[first]),
                                  Describe(layout, fillers[second])));
  if (named.binding == nullptr) return status;
  return std::move(status).WithTensor(layout.tensors[named.binding->tensor].name);
}

Status GapError(const Layout& layout, const Buffer& buffer, std::span<const Filler> fillers,
                int64_t byte) {
  const Filler* before = nullptr;
  if (byte > 0) {
    for (const Filler& filler : fillers) {
      if (Covers(filler, byte - 1)) before = &filler;
    }
  }
  std::string where = before ? fmt::format(", right after {}", Describe(layout, *before)) : "";
  Status status(Code::kInvalidArgument,
                fmt::format("nothing fills byte {} of buffer '{}' ({} bytes){}; bind a tensor "
                            "there or declare the bytes as padding",
                            byte, buffer.name, buffer.bytes, where));
  if (before == nullptr || before->binding == nullptr) return status;
  return std::move(status).WithTensor(layout.tensors[before->binding->tensor].name);
}

int64_t GranuleOf(const Buffer& buffer, std::span<const Filler> fillers) {
  auto granule = static_cast<int64_t>(buffer.bytes);
  for (const Filler& filler : fillers) {
    granule = std::gcd(granule, filler.memory.offset());
    granule = std::gcd(granule, filler.memory.run_bytes());
    for (int d = 0; d < filler.memory.dims(); ++d) {
      granule = std::gcd(granule, filler.memory.dim(d).stride);
    }
  }
  return granule;
}

Status CheckBuffer(const Layout& layout, const Buffer& buffer, std::span<const Filler> fillers) {
  if (buffer.bytes == 0) return Status::Ok();
  int64_t granule = GranuleOf(buffer, fillers);
  Bitmap filled(static_cast<int64_t>(buffer.bytes) / granule);
  for (size_t i = 0; i < fillers.size(); ++i) {
    int64_t clash = -1;
    fillers[i].memory.ForEachSeries([&](const RunSeries& series) {
      int64_t begin = series.offset / granule;
      int64_t size = series.bytes / granule;
      int64_t stride = series.stride / granule;
      for (int64_t run = 0; run < series.count && clash < 0; ++run, begin += stride) {
        clash = filled.Fill(begin, begin + size);
      }
      return clash < 0;
    });
    if (clash >= 0) return OverlapError(layout, buffer, fillers, i, clash * granule);
  }
  int64_t gap = filled.FirstClear();
  if (gap >= 0) return GapError(layout, buffer, fillers, gap * granule);
  return Status::Ok();
}

// Host and shared memory are one address space, each device is another.
int SpaceOf(const Buffer& buffer) {
  return buffer.kind == MemoryKind::kDevice ? buffer.device : std::numeric_limits<int>::min();
}

Status CheckBuffersApart(const Layout& layout) {
  std::vector<const Buffer*> buffers;
  for (const Buffer& buffer : layout.buffers) {
    if (buffer.data != nullptr && buffer.bytes > 0) buffers.push_back(&buffer);
  }
  std::sort(buffers.begin(), buffers.end(), [](const Buffer* a, const Buffer* b) {
    return std::pair(SpaceOf(*a), a->data) < std::pair(SpaceOf(*b), b->data);
  });
  for (size_t i = 1; i < buffers.size(); ++i) {
    // All before do not overlap: the nearest below is the only one that can reach this.
    const Buffer& below = *buffers[i - 1];
    const Buffer& above = *buffers[i];
    const uint64_t distance =
        reinterpret_cast<uintptr_t>(above.data) - reinterpret_cast<uintptr_t>(below.data);
    if (SpaceOf(below) != SpaceOf(above) || distance >= below.bytes) continue;
    return {Code::kInvalidArgument,
            fmt::format("buffers '{}' and '{}' share {} bytes of memory: what is received into one "
                        "would overwrite the other; give each memory of its own, or bind both "
                        "tensors in one buffer",
                        below.name, above.name, std::min(below.bytes - distance, above.bytes))};
  }
  return Status::Ok();
}

}  // namespace

Status CheckDestinationCoverage(const Layout& layout) {
  BASCULE_RETURN_IF_ERROR(ValidateLayout(layout, Side::kDestination));
  std::vector<std::vector<Filler>> fillers(layout.buffers.size());
  for (const Binding& binding : layout.bindings) {
    StridedMemory memory = MemoryOf(binding);
    if (!memory.empty()) fillers[binding.buffer].push_back({memory, &binding});
  }
  for (const Padding& padding : layout.padding) {
    Filler filler = FillerOf(padding);
    if (!filler.memory.empty()) fillers[padding.buffer].push_back(filler);
  }
  for (size_t b = 0; b < layout.buffers.size(); ++b) {
    BASCULE_RETURN_IF_ERROR(CheckBuffer(layout, layout.buffers[b], fillers[b]));
  }
  return CheckBuffersApart(layout);
}

}  // namespace bascule
