// Element types and the one published cast rule.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#pragma GCC visibility push(default)
namespace bascule {

// Values are part of the wire format (docs/protocol.md); never renumber.
enum class DType : uint8_t {
  kF32 = 1,
  kBF16 = 2,
  kF16 = 3,
  kF64 = 4,
  kF8E4M3 = 5,
  kF8E5M2 = 6,
  kI64 = 7,
  kI32 = 8,
  kI16 = 9,
  kI8 = 10,
  kU8 = 11,
  kBool = 12,
};

// Bytes of one element.
[[nodiscard]] constexpr int DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16: return 2;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool: return 1;
  }
  return 0;
}

// The safetensors name ("F32", "BF16", ...).
[[nodiscard]] std::string_view DTypeName(DType dtype);
// The dtype of such a name; nullopt where there is none.
[[nodiscard]] std::optional<DType> DTypeFromName(std::string_view name);

// True where every value of `from` is a value of `to` (bf16 -> fp32, fp16 -> fp32, x -> x).
[[nodiscard]] constexpr bool Holds(DType to, DType from) {
  return to == from || (to == DType::kF32 && (from == DType::kBF16 || from == DType::kF16));
}

// True where a cast is defined: equal types, or any two of fp32, bf16 and fp16. Casts round to
// nearest, ties to even; overflow gives infinity; subnormals are kept. NaN: a cast to a narrower
// type keeps the sign and the upper mantissa bits and sets the quiet bit; a widening cast keeps
// every bit (a signalling NaN stays one). bf16 <-> fp16 goes through fp32.
[[nodiscard]] constexpr bool Castable(DType from, DType to) {
  auto real = [](DType t) { return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16; };
  return from == to || (real(from) && real(to));
}

// The type that crosses: the destination's, or the published one where the destination holds
// every value of it. So a cast on landing is always exact and can be undone.
[[nodiscard]] constexpr DType WireDType(DType published, DType destination) {
  return Holds(destination, published) ? published : destination;
}

}  // namespace bascule
#pragma GCC visibility pop
