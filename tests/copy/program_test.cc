// Building and checking programs.
#include "copy/program.h"

#include <chrono>
#include <random>

#include "gtest/gtest.h"

namespace bascule {
namespace {

CopyShape Dense(std::initializer_list<int64_t> extents, DType dtype = DType::kBF16) {
  CopyShape shape;
  shape.source = shape.wire = shape.target = dtype;
  for (int64_t extent : extents) shape.extents[static_cast<size_t>(shape.ndim++)] = extent;
  int64_t stride = 1;
  for (size_t d = static_cast<size_t>(shape.ndim); d-- > 0;) {
    shape.tensor_strides[d] = stride;
    shape.source_strides[d] = shape.target_strides[d] = stride * DTypeSize(dtype);
    stride *= shape.extents[d];
  }
  return shape;
}

TEST(CopyProgram, MergesWhatIsContiguousEverywhere) {
  CopyProgram program;
  program.Add(Dense({4, 1, 8, 16}), {});
  ASSERT_EQ(program.shapes.size(), 1u);
  const CopyShape& shape = program.shapes[0];
  EXPECT_EQ(shape.ndim, 1);
  EXPECT_EQ(shape.extents[0], 512);
  EXPECT_EQ(shape.tensor_strides[0], 1);
  EXPECT_EQ(shape.source_strides[0], 2);
}

TEST(CopyProgram, KeepsApartWhatIsNotContiguousOnOneSide) {
  for (int side = 0; side < 3; ++side) {
    CopyShape shape = Dense({4, 8, 16});
    (side == 0   ? shape.source_strides
     : side == 1 ? shape.target_strides
                 : shape.tensor_strides)[0] += 64;
    CopyProgram program;
    program.Add(shape, {});
    EXPECT_EQ(program.shapes[0].ndim, 2);
    EXPECT_EQ(program.shapes[0].extents[0], 4);
    EXPECT_EQ(program.shapes[0].extents[1], 128);
  }
}

TEST(CopyProgram, DropsScalarsToNoDimensionAndEmptyBoxesAltogether) {
  CopyProgram program;
  program.Add(Dense({1, 1}), {});
  EXPECT_EQ(program.shapes[0].ndim, 0);
  program.Add(Dense({}), {});
  EXPECT_EQ(program.ops.size(), 2u);
  program.Add(Dense({4, 0, 3}), {});
  EXPECT_EQ(program.ops.size(), 2u);
  EXPECT_EQ(program.shapes.size(), 1u);
  EXPECT_EQ(program.Bytes(), 8u);
}

TEST(CopyProgram, InternsShapes) {
  CopyProgram program;
  for (int i = 0; i < 1000; ++i) {
    for (int64_t extent = 1; extent <= 200; ++extent) program.Add(Dense({extent}), {});
  }
  EXPECT_EQ(program.shapes.size(), 200u);
  EXPECT_EQ(program.ops.size(), 200000u);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const auto& shape = program.shapes[program.ops[i].shape];
    ASSERT_EQ(shape.ndim == 0 ? 1 : shape.extents[0], static_cast<int64_t>(i % 200) + 1);
  }
}

TEST(CopyProgram, InternsAfterShapesWereChangedByHand) {
  CopyProgram program;
  program.Add(Dense({8}), {});
  program.shapes.push_back(Dense({9}));
  program.Add(Dense({9}), {});
  EXPECT_EQ(program.shapes.size(), 2u);
  EXPECT_EQ(program.ops.back().shape, 1u);
  CopyProgram copy = program;
  copy.Add(Dense({8}), {});
  EXPECT_EQ(copy.shapes.size(), 2u);
}

class CheckProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    CopyShape shape = Dense({4, 8});
    shape.source_strides[0] = 100;
    program_.Add(shape, {.sum = 0});
    program_.sums = 1;
  }
  Status Check(uint64_t source_bytes = 316, uint64_t target_bytes = 64) {
    const ConstMemory source{nullptr, source_bytes};
    const Memory target{nullptr, target_bytes};
    return CheckProgram(program_, {&source, 1}, {&target, 1});
  }
  CopyProgram program_;
};

TEST_F(CheckProgramTest, TakesWhatFitsExactly) { EXPECT_TRUE(Check().ok()); }

TEST_F(CheckProgramTest, NamesWhatDoesNotFit) {
  EXPECT_EQ(Check(315).code(), Code::kInvalidArgument);
  EXPECT_EQ(Check(316, 63).code(), Code::kInvalidArgument);
  program_.ops[0].source_offset = -1;
  EXPECT_FALSE(Check().ok());
  program_.ops[0].source_offset = INT64_MAX;
  EXPECT_FALSE(Check().ok());
  program_.ops[0].source_offset = 1;
  EXPECT_FALSE(Check().ok());
  EXPECT_TRUE(Check(317).ok());
}

TEST_F(CheckProgramTest, ChecksIndices) {
  program_.ops[0].sum = 1;
  EXPECT_FALSE(Check().ok());
  program_.ops[0].sum = kNoSum;
  EXPECT_TRUE(Check().ok());
  program_.ops[0].source_base = 1;
  EXPECT_FALSE(Check().ok());
  program_.ops[0].source_base = 0;
  program_.ops[0].target_base = 1;
  EXPECT_FALSE(Check().ok());
  program_.ops[0].target_base = 0;
  program_.ops[0].shape = 7;
  EXPECT_FALSE(Check().ok());
}

TEST_F(CheckProgramTest, ChecksShapes) {
  const CopyShape good = program_.shapes[0];
  program_.shapes[0].target = DType::kI16;
  EXPECT_FALSE(Check().ok());
  program_.shapes[0] = good;
  program_.shapes[0].source_strides[0] = INT64_MAX / 2;
  EXPECT_FALSE(Check(UINT64_MAX).ok());
  program_.shapes[0] = good;
  program_.shapes[0].target_strides[0] = -16;
  EXPECT_FALSE(Check().ok());
  program_.shapes[0] = good;
  program_.shapes[0].extents[0] = 0;
  EXPECT_FALSE(Check().ok());
  program_.shapes[0] = good;
  program_.shapes[0].source = program_.shapes[0].wire = program_.shapes[0].target = DType::kI16;
  program_.shapes[0].function = LandingFunction::kNegExp;
  EXPECT_FALSE(Check().ok());
}

}  // namespace
}  // namespace bascule
