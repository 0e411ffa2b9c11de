#include "bascule/dtype.h"

#include <array>

namespace bascule {
namespace {

struct Named {
  DType dtype;
  std::string_view name;
};

// The names of the safetensors format.
constexpr std::array kNames = {
    Named{DType::kF32, "F32"}, Named{DType::kBF16, "BF16"},      Named{DType::kF16, "F16"},
    Named{DType::kF64, "F64"}, Named{DType::kF8E4M3, "F8_E4M3"}, Named{DType::kF8E5M2, "F8_E5M2"},
    Named{DType::kI64, "I64"}, Named{DType::kI32, "I32"},        Named{DType::kI16, "I16"},
    Named{DType::kI8, "I8"},   Named{DType::kU8, "U8"},          Named{DType::kBool, "BOOL"},
};

}  // namespace

std::string_view DTypeName(DType dtype) {
  for (const Named& named : kNames) {
    if (named.dtype == dtype) return named.name;
  }
  return "?";
}

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const Named& named : kNames) {
    if (named.name == name) return named.dtype;
  }
  return std::nullopt;
}

}  // namespace bascule
