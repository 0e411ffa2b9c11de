// The executor against a loop over coordinates, for random boxes, strides, dtypes and teams.
#include "copy/cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/copy/targets.h"

namespace bascule {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

int64_t Below(Random& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

// One operation as the test knows it: before normalization.
struct Case {
  CopyShape shape;
  CopyOp op;
};

// The plain meaning of an operation, an element at a time.
class Reference {
 public:
  Reference(const Case& one, const std::byte* source, std::byte* target, Sum* sum)
      : case_(one), source_(source), target_(target), sum_(sum) {}

  void Run() {
    for (size_t d = 0; d < Dims(); ++d) {
      if (case_.shape.extents[d] == 0) return;
    }
    std::vector<int64_t> index(Dims(), 0);
    do {
      Element(index);
    } while (Next(index));
  }

 private:
  size_t Dims() const { return static_cast<size_t>(case_.shape.ndim); }

  bool Next(std::vector<int64_t>& index) const {
    for (size_t d = Dims(); d-- > 0;) {
      if (++index[d] < case_.shape.extents[d]) return true;
      index[d] = 0;
    }
    return false;
  }

  void Element(const std::vector<int64_t>& index) {
    int64_t from = case_.op.source_offset;
    int64_t to = case_.op.target_offset;
    int64_t element = case_.op.first_element;
    for (size_t d = 0; d < Dims(); ++d) {
      from += index[d] * case_.shape.source_strides[d];
      to += index[d] * case_.shape.target_strides[d];
      element += index[d] * case_.shape.tensor_strides[d];
    }
    uint64_t code = 0;
    std::memcpy(&code, source_ + from, Width(case_.shape.source));
    const uint64_t wire = Cast(code, case_.shape.source, case_.shape.wire);
    Digest(wire, static_cast<uint64_t>(element));
    const uint64_t landed = Cast(Land(wire), Landed(), case_.shape.target);
    std::memcpy(target_ + to, &landed, Width(case_.shape.target));
  }

  static size_t Width(DType dtype) { return static_cast<size_t>(DTypeSize(dtype)); }

  static uint64_t Cast(uint64_t code, DType from, DType to) {
    return from == to ? code : CastCode(static_cast<uint32_t>(code), from, to);
  }

  DType Landed() const {
    return case_.shape.function == LandingFunction::kNone ? case_.shape.wire : DType::kF32;
  }

  uint64_t Land(uint64_t wire) const {
    if (case_.shape.function == LandingFunction::kNone) return wire;
    const auto bits = static_cast<uint32_t>(Cast(wire, case_.shape.wire, DType::kF32));
    return std::bit_cast<uint32_t>(-expf(std::bit_cast<float>(bits)));
  }

  void Digest(uint64_t wire, uint64_t element) {
    if (case_.op.sum == kNoSum) return;
    const uint64_t width = Width(case_.shape.wire);
    for (uint64_t i = 0; i < width; ++i) {
      const uint64_t at = element * width + i;
      const uint64_t byte = (wire >> (8 * i)) & 0xFF;
      sum_[case_.op.sum].digest += BlockKey(case_.op.tensor_key, at / 4 / kDigestBlockWords) *
                                   LaneKeys()[at / 4 % kDigestBlockWords] *
                                   (byte << (8 * (at % 4)));
    }
    ++sum_[case_.op.sum].elements;
  }

  const Case& case_;
  const std::byte* source_;
  std::byte* target_;
  Sum* sum_;
};

// Makes random operations of one program whose targets do not overlap.
class CaseMaker {
 public:
  explicit CaseMaker(Random& random) : random_(random) {}

  std::vector<Case> Make(int count, int64_t most_elements) {
    std::vector<Case> cases;
    for (int i = 0; i < count; ++i) cases.push_back(One(most_elements));
    return cases;
  }
  int64_t source_bytes() const { return source_bytes_; }
  int64_t target_bytes() const { return target_bytes_; }

 private:
  static constexpr uint32_t kSums = 5;

  Case One(int64_t most_elements) {
    Case one;
    CopyShape& shape = one.shape;
    PickTypes(&shape);
    shape.ndim = static_cast<int32_t>(Below(random_, 5));
    int64_t elements = 1;
    int64_t volume = 1;
    for (size_t d = static_cast<size_t>(shape.ndim); d-- > 0;) {
      const int64_t left = std::max<int64_t>(1, most_elements / elements);
      const int64_t limit = Below(random_, 3) == 0 ? 3 : left;
      shape.extents[d] = 1 + Below(random_, std::min(left, limit));
      if (Below(random_, 150) == 0) shape.extents[d] = 0;
      shape.tensor_strides[d] = volume;
      elements *= std::max<int64_t>(1, shape.extents[d]);
      // The tensor is often wider than the box.
      volume *= shape.extents[d] + (Below(random_, 2) == 0 ? 0 : Below(random_, 70));
    }
    one.op.first_element = Below(random_, Below(random_, 2) == 0 ? 9000 : int64_t{1} << 36);
    one.op.tensor_key = random_();
    one.op.sum = Below(random_, 6) == 0 ? kNoSum : static_cast<uint32_t>(Below(random_, kSums));
    one.op.source_offset = source_bytes_;
    source_bytes_ += Place(shape, DTypeSize(shape.source), &shape.source_strides);
    one.op.target_offset = target_bytes_;
    target_bytes_ += Place(shape, DTypeSize(shape.target), &shape.target_strides);
    return one;
  }

  void PickTypes(CopyShape* shape) {
    constexpr DType kReal[] = {DType::kF32, DType::kBF16, DType::kF16};
    constexpr DType kOther[] = {DType::kI64, DType::kI32, DType::kI16, DType::kF8E4M3};
    if (Below(random_, 3) == 0) {
      shape->source = shape->wire = shape->target = kOther[random_() % 4];
      return;
    }
    shape->source = kReal[random_() % 3];
    shape->wire = Below(random_, 2) == 0 ? shape->source : kReal[random_() % 3];
    shape->target = Below(random_, 2) == 0 ? shape->wire : kReal[random_() % 3];
    if (Below(random_, 8) == 0) shape->function = LandingFunction::kNegExp;
  }

  // Strides of a random order of dimensions, sometimes with gaps; returns the bytes it takes, which
  // leave the next operation at any alignment of its element.
  int64_t Place(const CopyShape& shape, int64_t width, std::array<int64_t, kMaxDims>* strides) {
    std::vector<size_t> order(static_cast<size_t>(shape.ndim));
    std::iota(order.begin(), order.end(), size_t{0});
    if (Below(random_, 3) == 0) std::shuffle(order.begin(), order.end(), random_);
    int64_t stride = width * (Below(random_, 6) == 0 ? 1 + Below(random_, 3) : 1);
    for (size_t i = order.size(); i-- > 0;) {
      (*strides)[order[i]] = stride;
      stride *= std::max<int64_t>(1, shape.extents[order[i]]);
      const int64_t gap = Below(random_, 4);
      if (gap == 0) stride += width * Below(random_, 40);
      if (gap == 1) stride = (stride + 255) / 256 * 256;
    }
    const int64_t end = stride + Below(random_, 9);
    return Below(random_, 2) == 0 ? end : (end + 63) / 64 * 64;
  }

  Random& random_;
  int64_t source_bytes_ = 0;
  int64_t target_bytes_ = 0;
};

Bytes RandomBytes(Random& random, int64_t size) {
  Bytes bytes(static_cast<size_t>(size) + 8);
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    const uint64_t value = random();
    std::memcpy(bytes.data() + at, &value, 8);
  }
  return bytes;
}

void ExpectEqualToReference(Random& random, CpuExecutor& executor, int count, int64_t elements) {
  CaseMaker maker(random);
  const std::vector<Case> cases = maker.Make(count, elements);
  CopyProgram program;
  program.sums = 5;
  for (const Case& one : cases) program.Add(one.shape, one.op);
  const Bytes source = RandomBytes(random, maker.source_bytes());
  const Bytes before = RandomBytes(random, maker.target_bytes());
  Bytes expected = before;
  std::vector<Sum> expected_sums(5);
  for (const Case& one : cases) {
    Reference(one, source.data(), expected.data(), expected_sums.data()).Run();
  }

  Bytes target = before;
  const ConstMemory source_memory{source.data(), source.size()};
  const Memory target_memory{target.data(), target.size()};
  const std::span<const ConstMemory> sources(&source_memory, 1);
  const std::span<const Memory> targets(&target_memory, 1);
  ASSERT_TRUE(CheckProgram(program, sources, targets).ok());
  std::vector<Sum> sums(5);
  ASSERT_TRUE(executor.Run(program, sources, targets, sums).ok());
  const auto wrong = std::mismatch(target.begin(), target.end(), expected.begin()).first;
  ASSERT_EQ(wrong - target.begin(), target.end() - target.begin()) << "first wrong byte";
  ASSERT_EQ(sums, expected_sums);

  std::vector<Sum> again(5);
  ASSERT_TRUE(executor.DigestSources(program, sources, again, {}).ok());
  ASSERT_EQ(again, expected_sums);

  target = before;
  ASSERT_TRUE(executor.Run(program, sources, targets, {}, {.digest = false}).ok());
  ASSERT_TRUE(target == expected);
}

TEST(CpuExecutor, EqualsTheReferenceForSmallOperations) {
  ForEachTarget([] {
    Random random(1);
    CpuExecutor executor(1);
    for (int trial = 0; trial < 1500; ++trial) {
      ASSERT_NO_FATAL_FAILURE(ExpectEqualToReference(random, executor, 6, 300)) << trial;
    }
  });
}

TEST(CpuExecutor, EqualsTheReferenceForAnyTeam) {
  Random random(2);
  for (int threads = 1; threads <= 5; ++threads) {
    CpuExecutor executor(threads);
    for (int trial = 0; trial < 40; ++trial) {
      ASSERT_NO_FATAL_FAILURE(ExpectEqualToReference(random, executor, 30, 20000)) << trial;
    }
  }
}

TEST(CpuExecutor, EqualsTheReferenceForOperationsOfManySlices) {
  ForEachTarget([] {
    Random random(3);
    CpuExecutor executor(3);
    for (int trial = 0; trial < 25; ++trial) {
      ASSERT_NO_FATAL_FAILURE(ExpectEqualToReference(random, executor, 2, 400000)) << trial;
    }
  });
}

// Rows of a dense matrix between memories of any row pitch.
struct Matrix {
  CopyProgram program;
  int64_t rows;
  int64_t columns;

  Matrix(int64_t rows_in, int64_t columns_in, int64_t source_pitch, int64_t target_pitch,
         DType dtype, DType target_dtype, int64_t first)
      : rows(rows_in), columns(columns_in) {
    CopyShape shape;
    shape.ndim = 2;
    shape.extents = {rows, columns};
    shape.source_strides = {source_pitch, DTypeSize(dtype)};
    shape.target_strides = {target_pitch, DTypeSize(target_dtype)};
    shape.tensor_strides = {columns, 1};
    shape.source = dtype;
    shape.target = target_dtype;
    shape.wire = WireDType(dtype, target_dtype);
    program.Add(shape, {.sum = 0, .tensor_key = 17, .first_element = first});
    program.sums = 1;
  }
};

// Large enough for non-temporal stores: past the last-level cache.
TEST(CpuExecutor, StreamsPastTheCacheWithEqualBytes) {
  constexpr int64_t kColumns = 3000;
  constexpr int64_t kRows = 16000;  // 96 MB of bf16
  Random random(4);
  Bytes source = RandomBytes(random, kRows * kColumns * 2 + 64);
  for (int64_t shift : {0, 2, 4, 62}) {
    for (int64_t first : {0, 1, 32, 1022}) {
      Matrix matrix(kRows, kColumns, kColumns * 2, kColumns * 2 + 10, DType::kBF16, DType::kBF16,
                    first);
      Bytes target(static_cast<size_t>(kRows * (kColumns * 2 + 10) + 64));
      const ConstMemory from{source.data(), source.size()};
      const Memory to{target.data() + shift, target.size() - static_cast<size_t>(shift)};
      Sum sum;
      CpuExecutor executor(2);
      ASSERT_TRUE(executor.Run(matrix.program, {&from, 1}, {&to, 1}, {&sum, 1}).ok());
      for (int64_t row = 0; row < kRows; ++row) {
        ASSERT_EQ(std::memcmp(to.data + row * (kColumns * 2 + 10),
                              source.data() + row * kColumns * 2, kColumns * 2),
                  0)
            << row;
      }
      const Sum expected{DigestRun(source.data(), first, kRows * kColumns, 2, 17),
                         kRows * kColumns};
      ASSERT_EQ(sum, expected) << shift << " " << first;
    }
  }
}

TEST(CpuExecutor, StreamsCastsPastTheCacheWithEqualBytes) {
  constexpr int64_t kCount = 24 << 20;
  Random random(5);
  const Bytes narrow = RandomBytes(random, kCount * 2);
  Bytes wide(kCount * 4 + 64);
  Bytes back(kCount * 2 + 64);
  for (int64_t shift : {0, 4, 60}) {
    for (int64_t first : {0, 7, 64}) {
      CpuExecutor executor(2);
      Sum up;
      Sum down;
      const Memory wide_to{wide.data() + shift, kCount * 4};
      const ConstMemory wide_from{wide.data() + shift, kCount * 4};
      {
        const ConstMemory from{narrow.data(), narrow.size()};
        Matrix matrix(1, kCount, 0, 0, DType::kBF16, DType::kF32, first);
        ASSERT_TRUE(executor.Run(matrix.program, {&from, 1}, {&wide_to, 1}, {&up, 1}).ok());
        Sum landed;
        ASSERT_TRUE(executor.DigestTargets(matrix.program, {&wide_to, 1}, {&landed, 1}, {}).ok());
        ASSERT_EQ(landed, up);
      }
      Matrix matrix(1, kCount, 0, 0, DType::kF32, DType::kBF16, first);
      const Memory to{back.data() + shift / 2, kCount * 2};
      ASSERT_TRUE(executor.Run(matrix.program, {&wide_from, 1}, {&to, 1}, {&down, 1}).ok());
      for (int64_t i = 0; i < kCount; ++i) {
        uint16_t code = 0;
        uint16_t result = 0;
        std::memcpy(&code, narrow.data() + i * 2, 2);
        std::memcpy(&result, to.data + i * 2, 2);
        if ((code & 0x7FFF) > 0x7F80) code |= 0x40;  // NaNs are quieted by narrowing
        ASSERT_EQ(result, code) << i;
      }
      const Sum landed{DigestRun(to.data, first, kCount, 2, 17), kCount};
      ASSERT_EQ(down, landed);
    }
  }
}

// Each element is its own index in the tensor, so that a wrong one tells where it came from.
void ExpectTransposed(int32_t rows, int32_t columns, bool target_is_turned) {
  const int64_t count = int64_t{rows} * columns;
  std::vector<int32_t> dense(static_cast<size_t>(count));
  std::vector<int32_t> turned(dense.size());
  std::iota(dense.begin(), dense.end(), 0);
  for (int32_t row = 0; row < rows; ++row) {
    for (int32_t column = 0; column < columns; ++column) {
      turned[static_cast<size_t>(int64_t{column} * rows + row)] = row * columns + column;
    }
  }
  const std::vector<int32_t>& source = target_is_turned ? dense : turned;
  const std::vector<int32_t>& expected = target_is_turned ? turned : dense;
  CopyShape shape;
  shape.ndim = 2;
  shape.extents = {rows, columns};
  shape.source_strides = {columns * int64_t{4}, 4};
  shape.target_strides = {4, rows * int64_t{4}};
  if (!target_is_turned) std::swap(shape.source_strides, shape.target_strides);
  shape.tensor_strides = {columns, 1};
  shape.source = shape.wire = shape.target = DType::kI32;
  CopyProgram program;
  program.Add(shape, {.sum = 0, .tensor_key = 3});
  program.sums = 1;
  std::vector<int32_t> target(source.size(), -1);
  const ConstMemory from{reinterpret_cast<const std::byte*>(source.data()), source.size() * 4};
  const Memory to{reinterpret_cast<std::byte*>(target.data()), target.size() * 4};
  Sum sum;
  CpuExecutor executor(2);
  ASSERT_TRUE(executor.Run(program, {&from, 1}, {&to, 1}, {&sum, 1}).ok());
  const auto wrong = std::mismatch(target.begin(), target.end(), expected.begin());
  ASSERT_EQ(wrong.first, target.end()) << "element " << wrong.first - target.begin() << " is "
                                       << *wrong.first << ", not " << *wrong.second;
  ASSERT_EQ(sum, (Sum{DigestRun(dense.data(), 0, count, 4, 3), static_cast<uint64_t>(count)}));
}

TEST(CpuExecutor, CoordinatePatternLandsWhereItSays) {
  for (bool target_is_turned : {false, true}) {
    ExpectTransposed(300, 500, target_is_turned);
    ExpectTransposed(1, 7, target_is_turned);
    // Past the last-level cache: lines of tiles are stored non-temporally.
    ExpectTransposed(4096, 4160, target_is_turned);
    ExpectTransposed(4099, 4103, target_is_turned);
  }
}

TEST(CpuExecutor, DigestTargetsEqualsTheSourcesSumForExactLandings) {
  Random random(6);
  CpuExecutor executor(2);
  for (DType wire : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (DType memory : {DType::kBF16, DType::kF16, DType::kF32}) {
      if (!Holds(memory, wire)) continue;
      Matrix matrix(70, 333, 1400, 2000, wire, memory, 5);
      const Bytes source = RandomBytes(random, 70 * 1400);
      Bytes target(70 * 2000);
      const ConstMemory from{source.data(), source.size()};
      const Memory to{target.data(), target.size()};
      Sum sum;
      Sum landed;
      ASSERT_TRUE(executor.Run(matrix.program, {&from, 1}, {&to, 1}, {&sum, 1}).ok());
      ASSERT_TRUE(executor.DigestTargets(matrix.program, {&to, 1}, {&landed, 1}, {}).ok());
      EXPECT_EQ(sum, landed);  // signalling NaNs included
      EXPECT_EQ(landed.elements, 70u * 333u);
    }
  }
}

TEST(CpuExecutor, DigestTargetsNoticesWidenedValuesThatDoNotNarrowBack) {
  Random random(7);
  CpuExecutor executor(1);
  for (DType wire : {DType::kBF16, DType::kF16}) {
    Matrix matrix(50, 100, 200, 400, wire, DType::kF32, 0);
    const Bytes source = RandomBytes(random, 50 * 200);
    Bytes target(50 * 400);
    const ConstMemory from{source.data(), source.size()};
    const Memory to{target.data(), target.size()};
    Sum sum;
    ASSERT_TRUE(executor.Run(matrix.program, {&from, 1}, {&to, 1}, {&sum, 1}).ok());
    const Bytes landed = target;
    for (int trial = 0; trial < 3000; ++trial) {
      target = landed;
      // Any bit of any element: low ones round away in the narrowing cast.
      target[static_cast<size_t>(Below(random, 50 * 400))] ^= std::byte(1 << Below(random, 8));
      Sum damaged;
      ASSERT_TRUE(executor.DigestTargets(matrix.program, {&to, 1}, {&damaged, 1}, {}).ok());
      ASSERT_NE(damaged, sum) << trial;
    }
  }
}

TEST(CpuExecutor, DigestTargetsSkipsLandingFunctions) {
  CopyShape shape;
  shape.ndim = 1;
  shape.extents = {100};
  shape.source_strides = shape.target_strides = {4};
  shape.tensor_strides = {1};
  shape.function = LandingFunction::kNegExp;
  CopyProgram program;
  program.Add(shape, {.sum = 0});
  program.sums = 1;
  Bytes target(400);
  const Memory to{target.data(), target.size()};
  Sum sum;
  CpuExecutor executor(1);
  ASSERT_TRUE(executor.DigestTargets(program, {&to, 1}, {&sum, 1}, {}).ok());
  EXPECT_EQ(sum, Sum());
}

TEST(CpuExecutor, RunsARangeOfOperationsAndAddsToSums) {
  CopyShape shape;
  shape.ndim = 1;
  shape.extents = {16};
  shape.source_strides = shape.target_strides = {1};
  shape.tensor_strides = {1};
  shape.source = shape.wire = shape.target = DType::kU8;
  CopyProgram program;
  program.sums = 1;
  for (int64_t i = 0; i < 4; ++i) {
    program.Add(shape, {.sum = 0, .source_offset = i * 16, .target_offset = i * 16});
  }
  const Bytes source(64, std::byte{1});
  Bytes target(64);
  const ConstMemory from{source.data(), 64};
  const Memory to{target.data(), 64};
  Sum sum{0, 1000};
  CpuExecutor executor(1);
  CpuExecutor::Options options;
  options.first_op = 1;
  options.last_op = 3;
  ASSERT_TRUE(executor.Run(program, {&from, 1}, {&to, 1}, {&sum, 1}, options).ok());
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(target[i], std::byte(i >= 16 && i < 48 ? 1 : 0)) << i;
  }
  EXPECT_EQ(sum.elements, 1032u);
  EXPECT_EQ(executor.Run(program, {&from, 1}, {&to, 1}, {}, options).code(),
            Code::kInvalidArgument);
}

TEST(CpuExecutor, EndsEarlyWhenCancelled) {
  constexpr int64_t kCount = 64 << 20;
  CopyShape shape;
  shape.ndim = 1;
  shape.extents = {kCount};
  shape.source_strides = shape.target_strides = {1};
  shape.tensor_strides = {1};
  shape.source = shape.wire = shape.target = DType::kU8;
  CopyProgram program;
  program.Add(shape, {});
  const Bytes source(kCount, std::byte{1});
  Bytes target(kCount);
  const ConstMemory from{source.data(), kCount};
  const Memory to{target.data(), kCount};
  for (int threads : {1, 3}) {
    CpuExecutor executor(threads);
    std::fill(target.begin(), target.end(), std::byte{0});
    int asked = 0;
    CpuExecutor::Options options;
    // In a team, the others may have done everything before the caller asks again.
    const int patience = threads == 1 ? 3 : 0;
    options.cancelled = [&] { return ++asked > patience; };
    EXPECT_EQ(executor.Run(program, {&from, 1}, {&to, 1}, {}, options).code(), Code::kAborted);
    EXPECT_EQ(asked, patience + 1);
    if (threads == 1) {
      EXPECT_EQ(target.back(), std::byte{0});
    }
    EXPECT_TRUE(executor.Run(program, {&from, 1}, {&to, 1}, {}).ok());
    EXPECT_EQ(target.back(), std::byte{1});
  }
}

}  // namespace
}  // namespace bascule
