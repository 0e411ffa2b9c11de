// Integer arithmetic on numbers that come from outside: overflow is a value, never undefined.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "bascule/dtype.h"

namespace bascule {

// Names longer than this are refused everywhere (bytes).
inline constexpr size_t kMaxNameBytes = 1024;

[[nodiscard]] inline std::optional<int64_t> CheckedAdd(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

[[nodiscard]] inline std::optional<int64_t> CheckedMultiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// Bytes of a dense tensor; nullopt where an extent is negative or a number does not fit: extents of
// zero do not hide an overflow of the others. The element count fits wherever the bytes do.
[[nodiscard]] inline std::optional<int64_t> TensorBytes(std::span<const int64_t> shape,
                                                        DType dtype) {
  int64_t bytes = DTypeSize(dtype);
  bool zero = false;
  for (int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      zero = true;
      continue;
    }
    std::optional<int64_t> next = CheckedMultiply(bytes, extent);
    if (!next) return std::nullopt;
    bytes = *next;
  }
  return zero ? 0 : bytes;
}

}  // namespace bascule
