// The digest against its formula, written here word by word, and against numbers from another
// language.
#include "digest/digest.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace bascule {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes SplitMixBytes(uint64_t seed, size_t size) {
  Bytes bytes(size + 8);
  for (size_t at = 0, i = 0; at < size; at += 8, ++i) {
    const uint64_t value = Mix64(seed + (i + 1) * 0x9E3779B97F4A7C15u);
    std::memcpy(bytes.data() + at, &value, 8);
  }
  bytes.resize(size);
  return bytes;
}

// A byte at a time: byte b of word w adds K * P * (byte << 8 b).
uint64_t SlowDigest(const uint8_t* data, uint64_t position, uint64_t size, uint64_t tensor_key) {
  uint64_t digest = 0;
  for (uint64_t i = 0; i < size; ++i) {
    const uint64_t at = position + i;
    const uint64_t word = at / 4;
    const uint64_t lane_key = LaneKeys()[word % kDigestBlockWords];
    digest += BlockKey(tensor_key, word / kDigestBlockWords) * lane_key *
              (uint64_t{data[i]} << (8 * (at % 4)));
  }
  return digest;
}

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

TEST(LaneKeys, AreDistinctAndOdd) {
  std::set<uint32_t> seen;
  for (uint32_t key : LaneKeys()) {
    EXPECT_EQ(key % 2, 1u);
    seen.insert(key);
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kDigestBlockWords));
}

struct Golden {
  const char* name;
  int64_t first;
  int64_t count;
  int element_bytes;
  uint64_t seed;
  uint64_t digest;
};

// Printed by: python tests/reference/digest_reference.py --cpp
constexpr Golden kGolden[] = {
    // clang-format off
    {"model.embed_tokens.weight", 0, 1, 2, 1, 0xEF6A32009A20C56F},
    {"model.embed_tokens.weight", 1, 1, 2, 2, 0xFE4D21B3D3D20000},
    {"model.embed_tokens.weight", 0, 1024, 2, 3, 0xB0889D9163AB9C35},
    {"model.embed_tokens.weight", 1023, 3, 2, 4, 0x1A3886C95630D753},
    {"model.layers.0.mlp.down_proj.weight", 777, 5000, 2, 5, 0x3BAFC518F18978C6},
    {"model.layers.0.mlp.down_proj.weight", 4294967295, 4099, 2, 6, 0x7B108AA83D48A4C3},
    {"lm_head.weight", 0, 512, 4, 7, 0xEFFDFA5E6E9120E0},
    {"lm_head.weight", 511, 1537, 4, 8, 0x054E513CEA46BB5C},
    {"lm_head.weight", 123456789, 10000, 4, 9, 0xEF6D4C1F1C2C3AB8},
    {"scale", 0, 2048, 1, 10, 0x34273C96803B01BA},
    {"scale", 2047, 2, 1, 11, 0x3EE72F5CBE98DD30},
    {"scale", 3, 6001, 1, 12, 0x89F8397F89267256},
    {"tokens", 255, 3000, 8, 13, 0xE6F07479E4B5EA84},
    {"", 1099511627776, 100, 8, 14, 0xB28BE25184A2D2CB},
    {"модель", 5, 70000, 2, 15, 0x2BF12864D5F952E7},
    // clang-format on
};

TEST(Digest, EqualsTheNumbersOfThePythonReference) {
  ForEachTarget([] {
    for (const Golden& golden : kGolden) {
      const Bytes data =
          SplitMixBytes(golden.seed, static_cast<size_t>(golden.count * golden.element_bytes));
      EXPECT_EQ(DigestRun(data.data(), golden.first, golden.count, golden.element_bytes,
                          TensorKey(golden.name)),
                golden.digest)
          << golden.name << " " << golden.first << " " << golden.count;
    }
  });
}

TEST(Digest, EqualsTheFormulaForAnyStartLengthAndAlignment) {
  const Bytes data = SplitMixBytes(99, 1 << 16);
  ForEachTarget([&] {
    std::mt19937_64 random(1);
    for (int trial = 0; trial < 4000; ++trial) {
      const int width = 1 << (random() % 4);
      const size_t alignment = random() % 64;
      const int64_t longest = trial % 4 == 0 ? 20000 / width : 200;
      const int64_t count = static_cast<int64_t>(random() % static_cast<uint64_t>(longest + 1));
      const int64_t first = static_cast<int64_t>(random() % (trial % 2 == 0 ? 5000 : 1ull << 40));
      const uint64_t key = random();
      ASSERT_EQ(DigestRun(data.data() + alignment, first, count, width, key),
                SlowDigest(data.data() + alignment, static_cast<uint64_t>(first * width),
                           static_cast<uint64_t>(count * width), key))
          << "width " << width << " first " << first << " count " << count;
    }
  });
}

TEST(Digest, OfRandomCutsAddsUpToTheWhole) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const int width = 1 << (random() % 4);
    const int64_t count = 1 + static_cast<int64_t>(random() % 3000);
    const int64_t first = static_cast<int64_t>(random() % 10000);
    const uint64_t key = random();
    const Bytes data = SplitMixBytes(random(), static_cast<size_t>(count * width));
    uint64_t sum = 0;
    for (int64_t at = 0; at < count;) {
      const int64_t part = std::min(count - at, 1 + static_cast<int64_t>(random() % 700));
      sum += DigestRun(data.data() + at * width, first + at, part, width, key);
      at += part;
    }
    ASSERT_EQ(sum, DigestRun(data.data(), first, count, width, key));
  }
}

TEST(Digest, ReadsNothingBeyondItsRun) {
  // Under AddressSanitizer a read past the end of the heap block fails.
  for (size_t size = 1; size < 300; ++size) {
    const Bytes data = SplitMixBytes(size, size);
    Bytes exact(data);
    exact.shrink_to_fit();
    EXPECT_EQ(DigestRun(exact.data(), 0, static_cast<int64_t>(size), 1, 7),
              SlowDigest(exact.data(), 0, size, 7));
  }
}

TEST(Sum, AddsAndSubtracts) {
  const Sum a{5, 1};
  const Sum b{0xFFFFFFFFFFFFFFFF, 2};
  EXPECT_EQ((a + b), (Sum{4, 3}));
  EXPECT_EQ((a + b - b), a);
}

// Damage of weights, one class at a time. Weights are bf16 of a normal distribution, as trained
// weights are: many equal codes and many zero low bits, unlike random bytes.
class Damage : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 48;
  static constexpr int64_t kColumns = 640;
  static constexpr int64_t kCount = kRows * kColumns;
  static constexpr int kTrials = 5000;

  void SetUp() override {
    std::normal_distribution<float> normal(0.0f, 0.02f);
    weights_.resize(kCount);
    for (uint16_t& code : weights_) code = Code(normal(random_));
    digest_ = Digest(weights_);
  }

  static uint16_t Code(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>(bits >> 16);
  }

  static uint64_t Digest(const std::vector<uint16_t>& codes) {
    return DigestRun(codes.data(), 12345, kCount, 2, TensorKey("w"));
  }

  int64_t Random(int64_t below) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
  }

  // Trials that changed nothing (a swap of equal codes) are repeated.
  template <typename Harm>
  void ExpectNoMiss(const Harm& harm) {
    int misses = 0;
    for (int trial = 0; trial < kTrials;) {
      std::vector<uint16_t> codes = weights_;
      harm(codes);
      if (codes == weights_) continue;
      misses += Digest(codes) == digest_ ? 1 : 0;
      ++trial;
    }
    EXPECT_EQ(misses, 0);
  }

  uint16_t* Row(std::vector<uint16_t>& codes, int64_t row) { return codes.data() + row * kColumns; }

  std::mt19937_64 random_{3};
  std::vector<uint16_t> weights_;
  uint64_t digest_ = 0;
};

TEST_F(Damage, BitFlips) {
  ExpectNoMiss([&](auto& codes) {
    for (int64_t n = 1 + Random(4); n > 0; --n) {
      codes[static_cast<size_t>(Random(kCount))] ^= static_cast<uint16_t>(1 << Random(16));
    }
  });
}

TEST_F(Damage, SwappedElements) {
  ExpectNoMiss([&](auto& codes) {
    std::swap(codes[static_cast<size_t>(Random(kCount))],
              codes[static_cast<size_t>(Random(kCount))]);
  });
}

TEST_F(Damage, SwappedNeighbours) {
  ExpectNoMiss([&](auto& codes) {
    const auto at = static_cast<size_t>(Random(kCount - 1));
    std::swap(codes[at], codes[at + 1]);
  });
}

TEST_F(Damage, SwappedRows) {
  ExpectNoMiss([&](auto& codes) {
    uint16_t* a = Row(codes, Random(kRows));
    std::swap_ranges(a, a + kColumns, Row(codes, Random(kRows)));
  });
}

TEST_F(Damage, ZeroedPages) {
  ExpectNoMiss([&](auto& codes) {
    const int64_t page = Random(kCount / 2048);
    std::fill_n(codes.begin() + page * 2048, 2048, uint16_t{0});
  });
}

TEST_F(Damage, ShiftedRows) {
  ExpectNoMiss([&](auto& codes) {
    const int64_t by = 1 + Random(kColumns - 1);
    uint16_t* row = Row(codes, Random(kRows));
    std::rotate(row, row + by, row + kColumns);
  });
}

TEST_F(Damage, ShiftedByABlock) {
  // Equal lanes, other blocks: only K_h tells them apart.
  ExpectNoMiss([&](auto& codes) {
    std::rotate(codes.begin(), codes.begin() + 1024 * (1 + Random(20)), codes.end());
  });
}

TEST_F(Damage, RepeatedRows) {
  ExpectNoMiss([&](auto& codes) {
    std::copy_n(Row(codes, Random(kRows)), kColumns, Row(codes, Random(kRows)));
  });
}

TEST_F(Damage, StaleOnePercent) {
  // The last step's values, an ulp away.
  ExpectNoMiss([&](auto& codes) {
    for (int64_t n = kCount / 100; n > 0; --n) {
      codes[static_cast<size_t>(Random(kCount))] ^= 1;
    }
  });
}

TEST_F(Damage, StaleTail) {
  ExpectNoMiss([&](auto& codes) {
    const int64_t from = Random(kCount);
    for (int64_t i = from; i < kCount; ++i) codes[static_cast<size_t>(i)] ^= 1;
  });
}

TEST_F(Damage, NegatedElements) {
  ExpectNoMiss([&](auto& codes) {
    const int64_t from = Random(kCount - 64);
    for (int64_t i = 0; i < 64; ++i) codes[static_cast<size_t>(from + i)] ^= 0x8000;
  });
}

TEST_F(Damage, OtherTensor) {
  EXPECT_NE(DigestRun(weights_.data(), 12345, kCount, 2, TensorKey("v")), digest_);
  EXPECT_NE(DigestRun(weights_.data(), 12346, kCount, 2, TensorKey("w")), digest_);
}

}  // namespace
}  // namespace bascule
