#include "copy/cpu/transpose.h"

#include <cstring>

// See digest/digest.cc. Blocks are of 128-bit vectors, so that wider instruction sets gain only
// their instruction encoding.
#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "copy/cpu/transpose.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace bascule::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A square of as many lines as a vector has elements. Interleaving the first half of the lines with
// the second rotates the bits of an element's number (line, then place in it) by one; once a bit of
// the line number, that exchanges line and place.
template <typename T>
HWY_INLINE void TransposeBlock(const uint8_t* source, int64_t source_stride, uint8_t* target,
                               int64_t target_stride) {
  const hn::Full128<T> d;
  constexpr size_t kLines = 16 / sizeof(T);
  hn::Vec<decltype(d)> lines[kLines];
  for (size_t i = 0; i < kLines; ++i) {
    lines[i] = hn::LoadU(d, reinterpret_cast<const T*>(source));
    source += source_stride;
  }
  for (size_t round = 1; round < kLines; round *= 2) {
    hn::Vec<decltype(d)> mixed[kLines];
    for (size_t i = 0; i < kLines / 2; ++i) {
      mixed[2 * i] = hn::InterleaveLower(d, lines[i], lines[i + kLines / 2]);
      mixed[2 * i + 1] = hn::InterleaveUpper(d, lines[i], lines[i + kLines / 2]);
    }
    for (size_t i = 0; i < kLines; ++i) lines[i] = mixed[i];
  }
  for (size_t i = 0; i < kLines; ++i) {
    hn::StoreU(lines[i], d, reinterpret_cast<T*>(target));
    target += target_stride;
  }
}

template <typename T>
HWY_INLINE void TransposeElements(const uint8_t* source, int64_t source_stride, int64_t lines,
                                  int64_t length, uint8_t* target, int64_t target_stride) {
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t line = 0; line < lines; ++line) {
      std::memcpy(target + i * target_stride + line * static_cast<int64_t>(sizeof(T)),
                  source + line * source_stride + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
  }
}

template <typename T>
HWY_INLINE void Transpose(const uint8_t* source, int64_t source_stride, int64_t lines,
                          int64_t length, uint8_t* target, int64_t target_stride) {
  constexpr int64_t kWidth = sizeof(T);
  constexpr int64_t kSide = 16 / kWidth;
  const int64_t whole_lines = lines / kSide * kSide;
  const int64_t whole_length = length / kSide * kSide;
  for (int64_t line = 0; line < whole_lines; line += kSide) {
    for (int64_t i = 0; i < whole_length; i += kSide) {
      TransposeBlock<T>(source + line * source_stride + i * kWidth, source_stride,
                        target + i * target_stride + line * kWidth, target_stride);
    }
  }
  TransposeElements<T>(source + whole_length * kWidth, source_stride, lines, length - whole_length,
                       target + whole_length * target_stride, target_stride);
  TransposeElements<T>(source + whole_lines * source_stride, source_stride, lines - whole_lines,
                       whole_length, target + whole_lines * kWidth, target_stride);
}

void TransposeAny(int64_t width, const uint8_t* source, int64_t source_stride, int64_t lines,
                  int64_t length, uint8_t* target, int64_t target_stride) {
  switch (width) {
    case 1: return Transpose<uint8_t>(source, source_stride, lines, length, target, target_stride);
    case 2: return Transpose<uint16_t>(source, source_stride, lines, length, target, target_stride);
    case 4: return Transpose<uint32_t>(source, source_stride, lines, length, target, target_stride);
    default:
      return Transpose<uint64_t>(source, source_stride, lines, length, target, target_stride);
  }
}

}  // namespace bascule::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bascule {

HWY_EXPORT(TransposeAny);

void TransposeTile(int64_t width, const std::byte* source, int64_t source_stride, int64_t lines,
                   int64_t length, std::byte* target, int64_t target_stride) {
  HWY_DYNAMIC_DISPATCH(TransposeAny)
  (width, reinterpret_cast<const uint8_t*>(source), source_stride, lines, length,
   reinterpret_cast<uint8_t*>(target), target_stride);
}

}  // namespace bascule
#endif  // HWY_ONCE
