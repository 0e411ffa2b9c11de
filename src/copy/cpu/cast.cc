// The published cast rule, one value at a time: what every vector cast must equal.
#include <bit>

#include "copy/cpu/executor.h"

namespace bascule {
namespace {

uint32_t WidenF16(uint32_t code) {
  const uint32_t sign = (code & 0x8000u) << 16;
  const uint32_t exponent = (code >> 10) & 0x1Fu;
  uint32_t mantissa = code & 0x3FFu;
  if (exponent == 0x1F) return sign | 0x7F800000u | mantissa << 13;
  if (exponent != 0) return sign | (exponent + 112) << 23 | mantissa << 13;
  if (mantissa == 0) return sign;
  // mantissa * 2^-24, made normal.
  const int shift = std::countl_zero(mantissa) - 21;
  mantissa = (mantissa << shift) & 0x3FFu;
  return sign | static_cast<uint32_t>(113 - shift) << 23 | mantissa << 13;
}

uint32_t Widen(uint32_t code, DType from) {
  if (from == DType::kBF16) return code << 16;
  if (from == DType::kF16) return WidenF16(code);
  return code;
}

// value / 2^shift, to nearest, ties to even.
uint32_t RoundShift(uint32_t value, int shift) {
  const uint32_t kept = value >> shift;
  const uint32_t rest = value & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0);
}

uint32_t NarrowToBF16(uint32_t bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bits >> 16 | 0x40u;
  return RoundShift(bits, 16);  // a carry out of the mantissa is the next exponent, or infinity
}

uint32_t NarrowToF16(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent > 15) return sign | 0x7C00u;
  if (exponent >= -14) return sign | RoundShift(magnitude - (112u << 23), 13);
  if (exponent < -25) return sign;  // below half of the least subnormal
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  return sign | RoundShift(mantissa, -1 - exponent);
}

}  // namespace

uint32_t CastCode(uint32_t code, DType from, DType to) {
  if (from == to) return code;
  const uint32_t bits = Widen(code, from);
  if (to == DType::kBF16) return NarrowToBF16(bits);
  if (to == DType::kF16) return NarrowToF16(bits);
  return bits;
}

}  // namespace bascule
