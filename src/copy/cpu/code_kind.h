// How kernels see a dtype: as bytes, or as one of the three real types that are cast.
#pragma once

#include <cstdint>

#include "bascule/dtype.h"

namespace bascule {

enum class CodeKind : uint8_t { kRaw, kF32, kBF16, kF16 };

[[nodiscard]] constexpr CodeKind CodeKindOf(DType dtype) {
  if (dtype == DType::kF32) return CodeKind::kF32;
  if (dtype == DType::kBF16) return CodeKind::kBF16;
  if (dtype == DType::kF16) return CodeKind::kF16;
  return CodeKind::kRaw;
}

}  // namespace bascule
