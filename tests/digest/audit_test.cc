// The walker against element by element references: no code of src/copy, no shared cast.
#include "digest/audit.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;

// Runs the body once for each instruction set that this machine has.
template <typename Body>
void ForEachTarget(const Body& body) {
  const int64_t all = hwy::SupportedTargets();
  for (int64_t target : {HWY_SSE4, HWY_AVX2, HWY_AVX3}) {
    if ((all & target) == 0) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    body();
    hwy::SetSupportedTargetsForTest(0);
  }
}

// The value of a real code; NaN and infinity apart.
double ValueOf(uint32_t code, DType dtype) {
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : dtype == DType::kF16 ? 10 : 23;
  const int exponent_bits = dtype == DType::kF16 ? 5 : 8;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const bool negative = (code >> (mantissa_bits + exponent_bits) & 1) != 0;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp((1u << mantissa_bits) | mantissa, exponent - bias - mantissa_bits);
  return negative ? -magnitude : magnitude;
}

uint32_t InfinityOf(DType dtype) {
  return dtype == DType::kF32 ? 0x7F800000 : dtype == DType::kBF16 ? 0x7F80 : 0x7C00;
}

// Narrows a fp32 code by searching for the nearest one: slow and unlike any fast way.
uint32_t NearestCode(uint32_t bits, DType to) {
  const uint32_t sign = bits >> 31 << 15;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const int shift = to == DType::kBF16 ? 16 : 13;
  if (magnitude > 0x7F800000) {  // NaN: sign, upper mantissa bits, quiet bit
    const uint32_t mantissa = (magnitude & 0x7FFFFF) >> shift;
    return sign | InfinityOf(to) | mantissa | (to == DType::kBF16 ? 0x40 : 0x200);
  }
  if (magnitude == 0x7F800000) return sign | InfinityOf(to);
  const double value = ValueOf(magnitude, DType::kF32);
  uint32_t low = 0;  // the largest code that is not above the value
  uint32_t high = InfinityOf(to);
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (ValueOf(middle, to) <= value ? low : high) = middle;
  }
  // Infinity counts as the value that would come next.
  const double below = value - ValueOf(low, to);
  const double above = ValueOf(high, to) - value;
  const bool up = above < below || (above == below && (high & 1) == 0);
  return sign | (up ? high : low);
}

uint32_t WidenedCode(uint32_t code, DType from) {
  const uint32_t sign = code >> 15 << 31;
  const uint32_t magnitude = code & 0x7FFF;
  const int shift = from == DType::kBF16 ? 16 : 13;
  const uint32_t infinity = InfinityOf(from);
  if (magnitude >= infinity) return sign | 0x7F800000 | (magnitude - infinity) << shift;
  return sign | std::bit_cast<uint32_t>(static_cast<float>(ValueOf(magnitude, from)));
}

uint32_t CastReference(uint32_t code, DType from, DType to) {
  if (from == to) return code;
  const uint32_t wide = from == DType::kF32 ? code : WidenedCode(code, from);
  return to == DType::kF32 ? wide : NearestCode(wide, to);
}

std::vector<std::byte> BytesOf(const std::vector<uint32_t>& codes, DType dtype) {
  const auto width = static_cast<size_t>(DTypeSize(dtype));
  std::vector<std::byte> bytes(codes.size() * width);
  for (size_t i = 0; i < codes.size(); ++i) std::memcpy(&bytes[i * width], &codes[i], width);
  return bytes;
}

// The sum of codes that are a whole tensor of one dimension.
Sum SumCodes(const std::vector<uint32_t>& codes, DType from, DType to, uint64_t* inexact) {
  const std::vector<std::byte> bytes = BytesOf(codes, from);
  const auto size = static_cast<int64_t>(codes.size());
  StridedBox memory{bytes.data(), Box{{0, size}}, {DTypeSize(from)}, from};
  return SumBox(memory, memory.box, std::vector{size}, to, 77, inexact);
}

Sum ReferenceSum(const std::vector<uint32_t>& codes, DType dtype) {
  const std::vector<std::byte> bytes = BytesOf(codes, dtype);
  const auto size = static_cast<int64_t>(codes.size());
  return {DigestRun(bytes.data(), 0, size, DTypeSize(dtype), 77), codes.size()};
}

void ExpectCast(const std::vector<uint32_t>& codes, DType from, DType to) {
  std::vector<uint32_t> expected;
  for (uint32_t code : codes) expected.push_back(CastReference(code, from, to));
  ASSERT_EQ(SumCodes(codes, from, to, nullptr), ReferenceSum(expected, to))
      << DTypeName(from) << " -> " << DTypeName(to) << " from code " << codes[0];
}

// fp32 codes at and around every rounding decision of bf16 and fp16, and random ones.
std::vector<uint32_t> InterestingFloats() {
  std::vector<uint32_t> codes;
  for (uint32_t upper = 0; upper < 0x10000; upper += 1) {
    const uint32_t middle = upper << 16;
    for (uint32_t low : {0x0u, 0x1u, 0xFFFu, 0x1000u, 0x1001u, 0x2FFFu, 0x3000u, 0x3001u, 0x7FFFu,
                         0x8000u, 0x8001u, 0xFFFFu}) {
      codes.push_back(middle | low);
    }
  }
  std::mt19937 random(5);
  for (int i = 0; i < 100000; ++i) codes.push_back(static_cast<uint32_t>(random()));
  return codes;
}

TEST(SumBox, CastsByThePublishedRule) {
  std::vector<uint32_t> narrow(0x10000);
  std::iota(narrow.begin(), narrow.end(), 0u);
  const std::vector<uint32_t> wide = InterestingFloats();
  const std::vector<DType> real{DType::kF32, DType::kBF16, DType::kF16};
  ForEachTarget([&] {
    for (DType from : real) {
      const std::vector<uint32_t>& codes = from == DType::kF32 ? wide : narrow;
      for (DType to : real) {
        for (size_t begin = 0; begin < codes.size(); begin += 4099) {
          const auto first = codes.begin() + static_cast<std::ptrdiff_t>(begin);
          const auto count = std::min<size_t>(4099, codes.size() - begin);
          ExpectCast({first, first + static_cast<std::ptrdiff_t>(count)}, from, to);
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(SumBox, UndoesWideningBitByBit) {
  std::vector<uint32_t> codes(0x10000);
  std::iota(codes.begin(), codes.end(), 0u);
  ForEachTarget([&] {
    for (DType wire : {DType::kBF16, DType::kF16}) {
      std::vector<uint32_t> widened;
      for (uint32_t code : codes) widened.push_back(WidenedCode(code, wire));
      uint64_t inexact = 0;
      EXPECT_EQ(SumCodes(widened, DType::kF32, wire, &inexact), ReferenceSum(codes, wire));
      EXPECT_EQ(inexact, 0u);
    }
  });
}

TEST(SumBox, CountsWhatDoesNotNarrowBack) {
  ForEachTarget([&] {
    for (DType wire : {DType::kBF16, DType::kF16}) {
      uint64_t expected = 0;
      const std::vector<uint32_t> codes = InterestingFloats();
      std::set<uint32_t> widened;
      for (uint32_t code = 0; code < 0x10000; ++code) widened.insert(WidenedCode(code, wire));
      for (uint32_t code : codes) expected += widened.count(code) == 0 ? 1 : 0;
      uint64_t inexact = 0;
      (void)SumCodes(codes, DType::kF32, wire, &inexact);
      EXPECT_EQ(inexact, expected);
      // Equal types have nothing to undo.
      inexact = 0;
      (void)SumCodes(codes, DType::kF32, DType::kF32, &inexact);
      EXPECT_EQ(inexact, 0u);
    }
  });
}

// A random strided array in a buffer of its own: dimensions in random memory order, with gaps.
struct RandomMemory {
  std::vector<std::byte> bytes;
  std::vector<int64_t> shape;
  StridedBox strided;
};

RandomMemory MakeMemory(std::mt19937& random, DType dtype) {
  const auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  RandomMemory memory;
  const auto ndim = static_cast<size_t>(between(0, 4));
  const int64_t most = ndim <= 2 ? 90 : 12;
  Box box = Box::Whole(std::vector<int64_t>(ndim, 1));
  std::vector<size_t> order(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t extent = between(1, most);
    box[static_cast<int>(d)].begin = between(0, 3);
    box[static_cast<int>(d)].end = box[static_cast<int>(d)].begin + extent;
    memory.shape.push_back(box[static_cast<int>(d)].end + between(0, 2));
    order[d] = d;
  }
  if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
  int64_t stride = DTypeSize(dtype) * (random() % 3 == 0 ? 2 : 1);
  for (size_t i = ndim; i-- > 0;) {
    memory.strided.byte_strides[order[i]] = stride;
    const int64_t gap = random() % 3 == 0 ? 1 : 0;
    stride *= box[static_cast<int>(order[i])].size() + gap;
  }
  const size_t lead = random() % 9;
  memory.bytes.resize(lead + static_cast<size_t>(stride) + 8);
  for (std::byte& byte : memory.bytes) byte = static_cast<std::byte>(random());
  memory.strided.first = memory.bytes.data() + lead;
  memory.strided.box = box;
  memory.strided.dtype = dtype;
  return memory;
}

Box RandomPart(std::mt19937& random, const Box& box) {
  Box part = box;
  for (int d = 0; d < box.ndim(); ++d) {
    if (random() % 2 == 0) continue;
    const auto extent = static_cast<uint32_t>(box[d].size());
    part[d].begin += random() % extent;
    part[d].end = part[d].begin + 1 + random() % static_cast<uint32_t>(box[d].end - part[d].begin);
  }
  return part;
}

// One element at a time.
Sum SlowSum(const RandomMemory& memory, const Box& want, DType wire, uint64_t key) {
  Sum sum;
  std::vector<int64_t> at;
  for (int d = 0; d < want.ndim(); ++d) at.push_back(want[d].begin);
  while (true) {
    const std::byte* data = memory.strided.first;
    int64_t element = 0;
    for (size_t d = 0; d < at.size(); ++d) {
      data +=
          (at[d] - memory.strided.box[static_cast<int>(d)].begin) * memory.strided.byte_strides[d];
      element = element * memory.shape[d] + at[d];
    }
    std::array<std::byte, 8> code{};
    std::memcpy(code.data(), data, static_cast<size_t>(DTypeSize(memory.strided.dtype)));
    if (wire != memory.strided.dtype) {
      uint32_t bits = 0;
      std::memcpy(&bits, code.data(), 4);
      bits = CastReference(bits, memory.strided.dtype, wire);
      std::memcpy(code.data(), &bits, 4);
    }
    sum += {DigestRun(code.data(), element, 1, DTypeSize(wire), key), 1};
    int d = want.ndim() - 1;
    for (; d >= 0; --d) {
      const auto index = static_cast<size_t>(d);
      if (++at[index] < want[d].end) break;
      at[index] = want[d].begin;
    }
    if (d < 0) return sum;
  }
}

TEST(SumBox, EqualsASumOfElements) {
  const std::vector<std::pair<DType, DType>> types{
      {DType::kU8, DType::kU8},    {DType::kF8E4M3, DType::kF8E4M3}, {DType::kBF16, DType::kBF16},
      {DType::kF32, DType::kF32},  {DType::kI64, DType::kI64},       {DType::kF32, DType::kBF16},
      {DType::kF16, DType::kBF16}, {DType::kBF16, DType::kF32},      {DType::kF32, DType::kF16}};
  ForEachTarget([&] {
    std::mt19937 random(11);
    for (int round = 0; round < 300; ++round) {
      const auto [dtype, wire] = types[random() % types.size()];
      const RandomMemory memory = MakeMemory(random, dtype);
      const Box want = RandomPart(random, memory.strided.box);
      ASSERT_EQ(SumBox(memory.strided, want, memory.shape, wire, 1234),
                SlowSum(memory, want, wire, 1234))
          << "round " << round << ", " << want.ToString() << " of "
          << memory.strided.box.ToString();
    }
  });
}

TEST(SumBox, OfNothingIsZero) {
  StridedBox memory{nullptr, Box{{0, 4}, {0, 0}}, {}, DType::kF32};
  EXPECT_EQ(SumBox(memory, memory.box, std::vector<int64_t>{4, 0}, DType::kF32, 1), Sum());
}

// Two tensors in one buffer: rows 0-3 of "a.0.w" twice, rows 4-7 once; "a.norm" with a function.
class SumLayoutTest : public ::testing::Test {
 protected:
  SumLayoutTest() : bytes_(4 * 8 * 3 * 4 + 16) {
    for (size_t i = 0; i < bytes_.size() / 4; ++i) {
      const float value = static_cast<float>(i % 32) - 5;  // exact in bf16
      std::memcpy(&bytes_[4 * i], &value, 4);
    }
    layout_.tensors = {{"a.0.w", {8, 8}, DType::kF32}, {"a.norm", {4}, DType::kF32}};
    layout_.buffers = {{"fused", bytes_.data(), bytes_.size()}};
    for (int64_t part : {0, 1, 2}) {
      Binding binding;
      binding.box = Box{{part == 2 ? 4 : 0, part == 2 ? 8 : 4}, {0, 8}};
      binding.byte_offset = part * 128;
      binding.byte_strides = {32, 4};
      layout_.bindings.push_back(binding);
    }
    Binding norm;
    norm.tensor = 1;
    norm.box = Box{{0, 4}};
    norm.byte_offset = 384;
    norm.byte_strides = {4};
    norm.function = LandingFunction::kNegExp;
    layout_.bindings.push_back(norm);
  }

  Result<std::vector<Sum>> SumAll(DType wire, Side side = Side::kDestination) {
    return SumLayout(
        layout_, [wire](uint32_t) { return wire; }, [](uint32_t) { return true; }, {}, side);
  }

  std::vector<std::byte> bytes_;
  Layout layout_;
};

TEST_F(SumLayoutTest, CountsEachBoxOnceAndSkipsLandingFunctions) {
  auto sums = SumAll(DType::kBF16);
  ASSERT_TRUE(sums.ok()) << sums.status().ToString();
  ASSERT_EQ(sums->size(), 2u);
  EXPECT_EQ((*sums)[0].elements, 64u);
  EXPECT_EQ((*sums)[1], Sum());
  std::vector<uint16_t> codes(64);
  for (size_t i = 0; i < 64; ++i) {
    codes[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(i % 32) - 5) >> 16);
  }
  EXPECT_EQ((*sums)[0].digest, DigestRun(codes.data(), 0, 64, 2, TensorKey("a.0.w")));
}

TEST_F(SumLayoutTest, NamesTheTensorWhoseCopiesDiffer) {
  bytes_[128 + 7] ^= std::byte{0x40};
  auto sums = SumAll(DType::kF32);
  ASSERT_FALSE(sums.ok());
  EXPECT_EQ(sums.status().code(), Code::kDataLoss);
  EXPECT_EQ(sums.status().tensor(), "a.0.w");
  EXPECT_THAT(sums.status().message(), HasSubstr("[0:4, 0:8]"));
}

TEST_F(SumLayoutTest, CountsOverlapsOnceAndComparesThem) {
  const Sum whole = (*SumAll(DType::kF32))[0];
  // Rows 2-5 of "a.0.w" again, in a buffer of their own.
  std::vector<std::byte> again(128);
  std::memcpy(again.data(), &bytes_[64], 64);
  std::memcpy(again.data() + 64, &bytes_[256], 64);
  layout_.buffers.push_back({"again", again.data(), again.size()});
  Binding binding = layout_.bindings[0];
  binding.buffer = 1;
  binding.byte_offset = 0;
  binding.box = Box{{2, 6}, {0, 8}};
  layout_.bindings.insert(layout_.bindings.begin(), binding);
  auto sums = SumAll(DType::kF32);
  ASSERT_TRUE(sums.ok()) << sums.status().ToString();
  EXPECT_EQ((*sums)[0], whole);
  again[64 + 33] ^= std::byte{2};
  sums = SumAll(DType::kF32);
  ASSERT_FALSE(sums.ok());
  EXPECT_EQ(sums.status().tensor(), "a.0.w");
  EXPECT_THAT(sums.status().message(), HasSubstr("[4:6, 0:8]"));
}

TEST_F(SumLayoutTest, WidenedValuesMustNarrowBackOnADestinationOnly) {
  bytes_[256] ^= std::byte{1};
  auto landed = SumAll(DType::kBF16);
  ASSERT_FALSE(landed.ok());
  EXPECT_EQ(landed.status().code(), Code::kDataLoss);
  EXPECT_EQ(landed.status().tensor(), "a.0.w");
  EXPECT_TRUE(SumAll(DType::kBF16, Side::kSource).ok());
}

TEST_F(SumLayoutTest, LeavesOutWhatIsNotSelected) {
  bytes_[128 + 7] ^= std::byte{0x40};
  auto sums = SumLayout(
      layout_, [](uint32_t) { return DType::kF32; }, [](uint32_t tensor) { return tensor == 1; });
  ASSERT_TRUE(sums.ok());
  EXPECT_EQ((*sums)[0], Sum());
}

TEST_F(SumLayoutTest, IsCancelledAndRefusesDevicesAndCasts) {
  const auto wire = [](uint32_t) { return DType::kF32; };
  const auto all = [](uint32_t) { return true; };
  EXPECT_EQ(SumLayout(layout_, wire, all, [] { return true; }).status().code(), Code::kAborted);
  EXPECT_EQ(SumAll(DType::kI8).status().code(), Code::kInvalidArgument);
  layout_.buffers[0].kind = MemoryKind::kDevice;
  EXPECT_EQ(SumAll(DType::kF32).status().code(), Code::kUnimplemented);
}

TEST(SumLayout, LargeBoxesAreSlicedWithoutChangingTheSum) {
  const int64_t rows = 3;
  const int64_t columns = (int64_t{9} << 20) + 5;
  std::vector<std::byte> bytes(static_cast<size_t>(rows * columns * 2));
  std::mt19937_64 random(3);
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t value = random();
    std::memcpy(&bytes[i], &value, 8);
  }
  Layout layout;
  layout.tensors = {{"w", {rows, columns}, DType::kBF16}};
  layout.buffers = {{"w", bytes.data(), bytes.size()}};
  Binding binding;
  binding.box = Box::Whole(layout.tensors[0].shape);
  binding.byte_strides = {columns * 2, 2};
  binding.dtype = DType::kBF16;
  layout.bindings = {binding};
  int asked = 0;
  auto sums = SumLayout(
      layout, [](uint32_t) { return DType::kBF16; }, [](uint32_t) { return true; },
      [&asked] { return ++asked < 0; });
  ASSERT_TRUE(sums.ok());
  EXPECT_GE(asked, 6);
  EXPECT_EQ((*sums)[0].digest, DigestRun(bytes.data(), 0, rows * columns, 2, TensorKey("w")));
  EXPECT_EQ((*sums)[0].elements, static_cast<uint64_t>(rows * columns));
}

TEST(LayerOf, EndsAtTheFirstNumber) {
  EXPECT_EQ(LayerOf("model.layers.12.self_attn.q_proj.weight"), "model.layers.12");
  EXPECT_EQ(LayerOf("model.layers.3.mlp.experts.17.up.weight"), "model.layers.3");
  EXPECT_EQ(LayerOf("model.embed_tokens.weight"), "model.embed_tokens");
  EXPECT_EQ(LayerOf("model.conv1.weight"), "model.conv1");
  EXPECT_EQ(LayerOf("model.layers.7"), "model.layers.7");
  EXPECT_EQ(LayerOf("lm_head"), "lm_head");
  EXPECT_EQ(LayerOf("0.weight"), "0");
  EXPECT_EQ(LayerOf("a..b"), "a.");
  EXPECT_EQ(LayerOf(""), "");
}

TEST(InRotation, SixteenVersionsCoverEveryName) {
  for (int name = 0; name < 100; ++name) {
    const uint64_t key = TensorKey("t" + std::to_string(name));
    int times = 0;
    for (uint64_t version = 40; version < 56; ++version) times += InRotation(key, version) ? 1 : 0;
    EXPECT_EQ(times, 1);
  }
}

TEST(SumPadding, SeesEveryPaddingByteAndNoOther) {
  std::vector<std::byte> bytes(64);
  Layout layout;
  layout.buffers = {{"b", bytes.data(), bytes.size()}};
  layout.padding = {{0, 8, 4, 3, 16}, {0, 60, 4, 1, 0}};
  const std::vector<uint64_t> before = SumPadding(layout);
  const std::set<size_t> padded{8, 9, 10, 11, 24, 25, 26, 27, 40, 41, 42, 43, 60, 61, 62, 63};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= std::byte{1};
    EXPECT_EQ(SumPadding(layout) != before, padded.count(i) == 1) << i;
    bytes[i] ^= std::byte{1};
  }
  std::swap(bytes[8], bytes[9]);
  bytes[8] = std::byte{1};
  const std::vector<uint64_t> one = SumPadding(layout);
  std::swap(bytes[8], bytes[24]);
  EXPECT_NE(SumPadding(layout), one);
  // Buffers apart.
  std::vector<std::byte> other(8);
  layout.buffers.push_back({"other", other.data(), other.size()});
  layout.padding.push_back({1, 4, 4, 1, 0});
  const std::vector<uint64_t> two = SumPadding(layout);
  other[5] = std::byte{7};
  EXPECT_EQ(SumPadding(layout)[0], two[0]);
  EXPECT_NE(SumPadding(layout)[1], two[1]);
}

}  // namespace
}  // namespace bascule
