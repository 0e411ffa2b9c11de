// Casts against the definition of the formats in double arithmetic, and vector casts against the
// scalar one.
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "copy/cpu/executor.h"
#include "copy/cpu/kernels.h"
#include "gtest/gtest.h"
#include "tests/copy/targets.h"

namespace bascule {
namespace {

struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
  [[nodiscard]] uint32_t codes() const { return 1u << (1 + exponent_bits + mantissa_bits); }
};
constexpr Format kF16Format{DType::kF16, 5, 10};
constexpr Format kBF16Format{DType::kBF16, 8, 7};
constexpr Format kF32Format{DType::kF32, 8, 23};

uint64_t Mantissa(uint32_t code, const Format& format) {
  return code & ((1u << format.mantissa_bits) - 1);
}
int Exponent(uint32_t code, const Format& format) {
  return static_cast<int>(code >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
}
bool IsNan(uint32_t code, const Format& format) {
  return Exponent(code, format) == (1 << format.exponent_bits) - 1 && Mantissa(code, format) != 0;
}

double Value(uint32_t code, const Format& format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = Exponent(code, format);
  const double sign = code >> (format.exponent_bits + format.mantissa_bits) != 0 ? -1.0 : 1.0;
  const double mantissa = static_cast<double>(Mantissa(code, format));
  if (exponent == (1 << format.exponent_bits) - 1) return sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  return sign * std::ldexp(mantissa + std::ldexp(1.0, format.mantissa_bits),
                           exponent - bias - format.mantissa_bits);
}

// Of a value that is not NaN: to nearest, ties to even.
uint32_t Encode(double value, const Format& format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t sign =
      std::signbit(value) ? 1u << (format.exponent_bits + format.mantissa_bits) : 0;
  const double magnitude = std::fabs(value);
  const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  // In units of the last place; nearbyint rounds ties to even.
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const double code =
      units + static_cast<double>(exponent + bias - 1) * std::ldexp(1.0, format.mantissa_bits);
  return sign | (code >= infinity ? infinity : static_cast<uint32_t>(code));
}

uint32_t ReferenceCast(uint32_t code, const Format& from, const Format& to) {
  if (!IsNan(code, from)) return Encode(Value(code, from), to);
  const uint32_t sign = code >> (from.exponent_bits + from.mantissa_bits);
  const uint32_t head = sign << to.exponent_bits | ((1u << to.exponent_bits) - 1);
  const int shift = to.mantissa_bits - from.mantissa_bits;
  const auto mantissa = static_cast<uint32_t>(Mantissa(code, from));
  if (shift >= 0) return head << to.mantissa_bits | mantissa << shift;
  return head << to.mantissa_bits | mantissa >> -shift | 1u << (to.mantissa_bits - 1);
}

// Every value near which rounding changes: all narrow codes, the midpoints between them and their
// neighbours, and a stride through everything else.
std::vector<uint32_t> FloatSample() {
  std::vector<uint32_t> sample;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (uint32_t lower : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x2000u, 0x3000u, 0x7FFFu, 0x8000u,
                           0x8001u, 0xC000u, 0xEFFFu, 0xF000u, 0xF001u, 0xFFFFu}) {
      sample.push_back(upper << 16 | lower);
    }
  }
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 1021) {
    sample.push_back(static_cast<uint32_t>(bits));
  }
  return sample;
}

std::vector<uint32_t> AllCodes16() {
  std::vector<uint32_t> codes(0x10000);
  std::iota(codes.begin(), codes.end(), 0);
  return codes;
}

TEST(CastCode, EqualsTheDefinitionForFloats) {
  for (uint32_t code : FloatSample()) {
    ASSERT_EQ(CastCode(code, DType::kF32, DType::kBF16),
              ReferenceCast(code, kF32Format, kBF16Format))
        << std::hex << code;
    ASSERT_EQ(CastCode(code, DType::kF32, DType::kF16), ReferenceCast(code, kF32Format, kF16Format))
        << std::hex << code;
  }
}

TEST(CastCode, EqualsTheDefinitionForEveryNarrowCode) {
  for (const Format& from : {kBF16Format, kF16Format}) {
    for (uint32_t code = 0; code < from.codes(); ++code) {
      const uint32_t wide = CastCode(code, from.dtype, DType::kF32);
      ASSERT_EQ(wide, ReferenceCast(code, from, kF32Format)) << std::hex << code;
      for (const Format& to : {kBF16Format, kF16Format}) {
        const uint32_t direct = from.dtype == to.dtype ? code : ReferenceCast(wide, kF32Format, to);
        ASSERT_EQ(CastCode(code, from.dtype, to.dtype), direct) << std::hex << code;
      }
    }
  }
}

TEST(CastCode, WideningCanBeUndone) {
  for (const Format& from : {kBF16Format, kF16Format}) {
    for (uint32_t code = 0; code < from.codes(); ++code) {
      if (IsNan(code, from)) continue;
      ASSERT_EQ(CastCode(CastCode(code, from.dtype, DType::kF32), DType::kF32, from.dtype), code);
    }
  }
}

std::vector<std::byte> Pack(const std::vector<uint32_t>& codes, DType dtype) {
  const auto width = static_cast<size_t>(DTypeSize(dtype));
  std::vector<std::byte> bytes(codes.size() * width);
  for (size_t i = 0; i < codes.size(); ++i) std::memcpy(bytes.data() + i * width, &codes[i], width);
  return bytes;
}

void ExpectVectorCast(const std::vector<uint32_t>& codes, DType from, DType to) {
  KernelSpec spec;
  spec.source = from;
  spec.target = to;
  for (DType wire : {from, to}) {
    spec.wire = wire;
    for (bool digest : {false, true}) {
      spec.digest = digest;
      const std::vector<std::byte> source = Pack(codes, from);
      std::vector<std::byte> target(codes.size() * static_cast<size_t>(DTypeSize(to)));
      RowBlock block;
      block.source = source.data();
      block.target = target.data();
      block.run = static_cast<int64_t>(codes.size());
      const uint64_t sum = FindRowKernel(spec)(block);
      std::vector<uint32_t> expected(codes);
      for (uint32_t& code : expected) code = CastCode(code, from, to);
      const std::vector<std::byte> expected_bytes = Pack(expected, to);
      ASSERT_TRUE(target == expected_bytes);
      const std::vector<std::byte>& wire_bytes = wire == from ? source : expected_bytes;
      ASSERT_EQ(sum, digest ? DigestRun(wire_bytes.data(), 0, block.run, DTypeSize(wire), 0) : 0);
    }
  }
}

TEST(VectorCast, EqualsTheScalarOneForFloats) {
  const std::vector<uint32_t> sample = FloatSample();
  ForEachTarget([&] {
    ExpectVectorCast(sample, DType::kF32, DType::kBF16);
    ExpectVectorCast(sample, DType::kF32, DType::kF16);
  });
}

TEST(VectorCast, EqualsTheScalarOneForEveryNarrowCode) {
  const std::vector<uint32_t> codes = AllCodes16();
  ForEachTarget([&] {
    ExpectVectorCast(codes, DType::kBF16, DType::kF32);
    ExpectVectorCast(codes, DType::kF16, DType::kF32);
    ExpectVectorCast(codes, DType::kBF16, DType::kF16);
    ExpectVectorCast(codes, DType::kF16, DType::kBF16);
  });
}

// Minutes: run with --gtest_also_run_disabled_tests after a change of the casts.
TEST(VectorCast, DISABLED_EqualsTheScalarOneForEveryFloat) {
  std::vector<uint32_t> codes(1 << 24);
  ForEachTarget([&] {
    for (uint64_t first = 0; first < (uint64_t{1} << 32); first += codes.size()) {
      std::iota(codes.begin(), codes.end(), static_cast<uint32_t>(first));
      ExpectVectorCast(codes, DType::kF32, DType::kBF16);
      ExpectVectorCast(codes, DType::kF32, DType::kF16);
    }
  });
}

TEST(CountInexact, FindsEveryValueThatDoesNotNarrowBack) {
  const std::vector<uint32_t> sample = FloatSample();
  for (const Format& narrow : {kBF16Format, kF16Format}) {
    int64_t expected = 0;
    for (uint32_t bits : sample) {
      // Exact where some code widens to it: its upper bits for bf16, the nearest for fp16.
      uint32_t code = CastCode(bits, DType::kF32, narrow.dtype);
      if (IsNan(bits, kF32Format)) {
        code = narrow.dtype == DType::kBF16
                   ? bits >> 16
                   : (bits >> 16 & 0x8000u) | 0x7C00u | (bits >> 13 & 0x3FFu);
      }
      if (CastCode(code, narrow.dtype, DType::kF32) != bits) ++expected;
    }
    const std::vector<std::byte> bytes = Pack(sample, DType::kF32);
    ForEachTarget([&] {
      EXPECT_EQ(CountInexact(bytes.data(), static_cast<int64_t>(sample.size()), narrow.dtype),
                expected);
    });
  }
}

}  // namespace
}  // namespace bascule
