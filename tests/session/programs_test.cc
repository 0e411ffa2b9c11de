// Copy programs of small layouts, by hand: their errors, how many operations they take, and what a
// sum is made of. Random layouts are in copy_programs_property_test.cc.
#include "session/programs.h"

#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "copy/cpu/executor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Binding Bind(uint32_t tensor, uint32_t buffer, Box box, int64_t offset,
             std::array<int64_t, kMaxDims> strides, DType dtype = DType::kBF16) {
  Binding binding;
  binding.tensor = tensor;
  binding.buffer = buffer;
  binding.box = box;
  binding.byte_offset = offset;
  binding.byte_strides = strides;
  binding.dtype = dtype;
  return binding;
}

// One dense tensor "w" in a buffer of its own.
Layout DenseLayout(std::vector<int64_t> shape, Box box, DType dtype = DType::kBF16) {
  Layout layout;
  layout.tensors = {{"w", std::move(shape), dtype}};
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = DTypeSize(dtype);
  for (int d = box.ndim() - 1; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = stride;
    stride *= box[d].size();
  }
  layout.buffers = {{"w", nullptr, static_cast<uint64_t>(stride)}};
  layout.bindings = {Bind(0, 0, box, 0, strides, dtype)};
  return layout;
}

Layout DenseLayout(const std::vector<int64_t>& shape, DType dtype = DType::kBF16) {
  return DenseLayout(shape, Box::Whole(shape), dtype);
}

// One trainer and one rollout.
class Pair {
 public:
  Pair(const Layout& source, const Layout& destination, uint64_t chunk_bytes = 1 << 20)
      : destination_(destination) {
    World world;
    world.members = {{Role::kTrainer, "", 0, 0, 0, {}}, {Role::kRollout, "e0", 0, 1, 1, {}}};
    for (const Layout* layout : {&source, &destination}) {
      auto shape = TemplateOf(*layout);
      EXPECT_TRUE(shape.ok()) << shape.status().ToString();
      world.template_digests.push_back(DigestOf(shape->Serialize()));
      world.templates.push_back(std::make_shared<const WorldTemplate>(std::move(*shape)));
    }
    world.chunk_bytes = chunk_bytes;
    auto planner = Planner::Prepare(std::move(world));
    EXPECT_TRUE(planner.ok()) << planner.status().ToString();
    planner_ = *planner;
    part_ = planner_->PartOf(1);
    arena_ = MapArena(*this->world().templates[0], {});
    places_ = PlacesOfArena(arena_, *this->world().templates[0], 0);
  }

  [[nodiscard]] const World& world() const { return planner_->world(); }
  [[nodiscard]] const WorldTemplate& source_template() const { return *world().templates[0]; }
  [[nodiscard]] const Part& part() const { return part_; }
  [[nodiscard]] const ArenaMap& arena() const { return arena_; }
  std::vector<std::vector<SourcePlace>>& places() { return places_; }

  Result<LandingProgram> Land() { return Land(destination_); }
  Result<LandingProgram> Land(const Layout& layout) {
    return BuildLanding(part_, world(), layout, [this](uint32_t, uint32_t tensor) {
      return std::span<const SourcePlace>(places_[tensor]);
    });
  }

 private:
  Layout destination_;
  std::shared_ptr<const Planner> planner_;
  Part part_;
  ArenaMap arena_;
  std::vector<std::vector<SourcePlace>> places_;
};

int64_t Elements(const CopyProgram& program, const CopyOp& op) {
  const CopyShape& shape = program.shapes[op.shape];
  int64_t elements = 1;
  for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) elements *= shape.extents[d];
  return elements;
}

// ---- landing ---------------------------------------------------------------------------------

TEST(BuildLanding, OfADenseTensorIsOneRun) {
  const Layout layout = DenseLayout({64, 32});
  auto landing = Pair(layout, layout).Land();
  ASSERT_TRUE(landing.ok()) << landing.status().ToString();
  EXPECT_THAT(landing->program.ops, SizeIs(1));
  EXPECT_EQ(landing->first_op, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(landing->program.sums, 1u);
  const CopyShape& shape = landing->program.shapes[0];
  EXPECT_EQ(shape.ndim, 1);
  EXPECT_EQ(shape.extents[0], 64 * 32);
}

TEST(BuildLanding, LandsABoxTwiceAndCountsItOnce) {
  Layout twice = DenseLayout({8, 4});
  twice.buffers.push_back({"again", nullptr, 64});
  twice.bindings.push_back(Bind(0, 1, Box{{0, 8}, {0, 4}}, 0, {8, 2}));
  auto landing = Pair(DenseLayout({8, 4}), twice).Land();
  ASSERT_TRUE(landing.ok()) << landing.status().ToString();
  ASSERT_THAT(landing->program.ops, SizeIs(2));
  EXPECT_EQ(landing->program.ops[0].sum, 0u);
  EXPECT_EQ(landing->program.ops[1].sum, kNoSum);
  EXPECT_EQ(landing->program.ops[1].target_base, 1u);
}

TEST(BuildLanding, CountsWhatCanBeReadBack) {
  Layout twice = DenseLayout({8, 4});
  twice.bindings[0].function = LandingFunction::kNegExp;
  twice.buffers.push_back({"raw", nullptr, 64});
  twice.bindings.push_back(Bind(0, 1, Box{{0, 8}, {0, 4}}, 0, {8, 2}));
  auto landing = Pair(DenseLayout({8, 4}), twice).Land();
  ASSERT_TRUE(landing.ok()) << landing.status().ToString();
  for (const CopyOp& op : landing->program.ops) {
    const bool plain = landing->program.shapes[op.shape].function == LandingFunction::kNone;
    EXPECT_EQ(op.sum, plain ? 0 : kNoSum);
  }
}

TEST(BuildLanding, CountsTheCommonPartOfOverlappingBoxesOnce) {
  Layout overlapping = DenseLayout({8, 4}, Box{{0, 6}, {0, 4}});
  overlapping.buffers.push_back({"more", nullptr, 40});
  overlapping.bindings.push_back(Bind(0, 1, Box{{3, 8}, {0, 4}}, 0, {8, 2}));
  auto landing = Pair(DenseLayout({8, 4}), overlapping).Land();
  ASSERT_TRUE(landing.ok()) << landing.status().ToString();
  int64_t counted = 0;
  int64_t landed = 0;
  for (const CopyOp& op : landing->program.ops) {
    landed += Elements(landing->program, op);
    if (op.sum != kNoSum) counted += Elements(landing->program, op);
  }
  EXPECT_EQ(counted, 32);
  EXPECT_EQ(landed, 44);
}

TEST(BuildLanding, NamesTheTensorAndTheBoxThatNoBindingTakes) {
  Pair pair(DenseLayout({8, 4}), DenseLayout({8, 4}));
  auto landing = pair.Land(DenseLayout({8, 4}, Box{{0, 7}, {0, 4}}));
  ASSERT_FALSE(landing.ok());
  EXPECT_EQ(landing.status().tensor(), "w");
  EXPECT_THAT(landing.status().message(), HasSubstr("[0:8, 0:4]"));
  EXPECT_THAT(landing.status().message(), HasSubstr("28 of the 32"));
}

TEST(BuildLanding, NamesTheTensorAndTheBoxThatNoPlaceHolds) {
  Pair pair(DenseLayout({8, 4}), DenseLayout({8, 4}));
  pair.places()[0][0].box = Box{{0, 8}, {0, 3}};
  auto landing = pair.Land();
  ASSERT_FALSE(landing.ok());
  EXPECT_EQ(landing.status().tensor(), "w");
  EXPECT_THAT(landing.status().message(), HasSubstr("member 0 holds box [0:8, 3:4]"));
  pair.places()[0].clear();
  EXPECT_EQ(pair.Land().status().tensor(), "w");
}

TEST(BuildLanding, RefusesToRoundTwiceInOnePass) {
  // Live fp32, published as bf16, wanted as fp16: an arena rounds to bf16 first.
  Layout source = DenseLayout({8, 4});
  Pair pair(source, DenseLayout({8, 4}, DType::kF16));
  ASSERT_TRUE(pair.Land().ok());
  source.bindings[0].dtype = DType::kF32;
  source.bindings[0].byte_strides = {16, 4};
  pair.places() = PlacesOfLayout(source, pair.source_template(), 0);
  auto landing = pair.Land();
  ASSERT_FALSE(landing.ok());
  EXPECT_EQ(landing.status().tensor(), "w");
  EXPECT_THAT(landing.status().message(), HasSubstr("F32"));
  // Wanted as published it is cast once.
  Pair same(DenseLayout({8, 4}), DenseLayout({8, 4}));
  same.places() = pair.places();
  EXPECT_TRUE(same.Land().ok());
}

TEST(BuildLanding, FindsItsWayAmongManyBoxes) {
  // Rows one by one on either side, in orders of their own.
  Layout source;
  source.tensors = {{"w", {200, 4}, DType::kBF16}};
  source.buffers = {{"w", nullptr, 1600}};
  Layout destination = source;
  for (int64_t i = 0; i < 200; ++i) {
    const int64_t row = i * 7 % 200;
    source.bindings.push_back(Bind(0, 0, Box{{row, row + 1}, {0, 4}}, i * 8, {8, 2}));
    destination.bindings.push_back(Bind(0, 0, Box{{i, i + 1}, {0, 4}}, (199 - i) * 8, {8, 2}));
  }
  Pair pair(source, destination);
  pair.places() = PlacesOfLayout(source, pair.source_template(), 0);
  auto landing = pair.Land();
  ASSERT_TRUE(landing.ok()) << landing.status().ToString();
  std::set<int64_t> rows;
  for (const CopyOp& op : landing->program.ops) {
    ASSERT_EQ(Elements(landing->program, op), 4);
    const int64_t row = op.first_element / 4;
    rows.insert(row);
    EXPECT_EQ(op.source_offset / 8 * 7 % 200, row);
    EXPECT_EQ(199 - op.target_offset / 8, row);
  }
  EXPECT_THAT(rows, SizeIs(200));
}

// ---- snapshot --------------------------------------------------------------------------------

std::vector<WantedBox> Want(std::vector<Box> boxes, DType wire = DType::kBF16) {
  std::vector<WantedBox> wanted;
  for (const Box& box : boxes) {
    wanted.push_back({0, box, wire, static_cast<uint32_t>(wanted.size())});
  }
  return wanted;
}

class BuildSnapshotTest : public ::testing::Test {
 protected:
  Result<SnapshotProgram> Build(const std::vector<std::vector<WantedBox>>& wanted,
                                uint32_t max_cells = 4096) {
    return BuildSnapshot(layout_, world_, {}, wanted, max_cells);
  }
  Layout layout_ = DenseLayout({32, 16});
  WorldTemplate world_ = *TemplateOf(layout_);
};

TEST_F(BuildSnapshotTest, IsOneRunWhereNothingCuts) {
  for (const auto& wanted :
       {std::vector<std::vector<WantedBox>>{}, {Want({Box{{0, 32}, {0, 16}}})}}) {
    auto snapshot = Build(wanted);
    ASSERT_TRUE(snapshot.ok());
    EXPECT_THAT(snapshot->program.ops, SizeIs(1));
    EXPECT_EQ(snapshot->program.shapes[0].ndim, 1);
    EXPECT_THAT(snapshot->checks, SizeIs(wanted.size()));
    EXPECT_EQ(snapshot->box_cells, std::vector<std::vector<uint32_t>>{{0}});
  }
}

TEST_F(BuildSnapshotTest, CutsWhereReceiversDo) {
  // Columns for two ranks of one engine, chunks of rows for another engine: cells are their grid.
  const std::vector<std::vector<WantedBox>> wanted{
      Want({Box{{0, 32}, {0, 8}}}), Want({Box{{0, 32}, {8, 16}}}),
      Want({Box{{0, 10}, {0, 16}}, Box{{10, 32}, {0, 16}}}), Want({Box{{0, 32}, {0, 16}}})};
  auto snapshot = Build(wanted);
  ASSERT_TRUE(snapshot.ok());
  EXPECT_EQ(snapshot->program.sums, 4u);
  ASSERT_THAT(snapshot->checks, SizeIs(5));
  const std::vector<size_t> cells{2, 2, 2, 2, 4};
  for (size_t i = 0; i < cells.size(); ++i) {
    EXPECT_THAT(snapshot->checks[i].cells, SizeIs(cells[i])) << i;
  }
  EXPECT_EQ(snapshot->checks[3].receiver, 2u);
  EXPECT_EQ(snapshot->checks[3].chunk, 1u);
}

TEST_F(BuildSnapshotTest, RangesOfRowsAreNotCutThroughAllRows) {
  // Ranges of the row-major order: [0, 40), [40, 100), ... as heads, bodies and tails of rows. A
  // grid of all faces would have hundreds of cells.
  std::vector<WantedBox> wanted;
  uint32_t chunk = 0;
  const auto add = [&](int64_t row, int64_t rows, int64_t first, int64_t last) {
    if (rows > 0 && last > first) {
      wanted.push_back({0, Box{{row, row + rows}, {first, last}}, DType::kBF16, chunk});
    }
  };
  for (int64_t begin = 0; begin < 512; begin += 60, ++chunk) {
    const int64_t end = std::min<int64_t>(512, begin + 60);
    const int64_t head = (begin + 15) / 16;
    const int64_t tail = end / 16;
    add(begin / 16, begin % 16 == 0 ? 0 : 1, begin % 16, 16);
    add(head, tail - head, 0, 16);
    add(tail, 1, 0, end % 16);
  }
  auto snapshot = Build({wanted});
  ASSERT_TRUE(snapshot.ok());
  EXPECT_EQ(snapshot->program.sums, wanted.size());
  EXPECT_THAT(snapshot->checks, SizeIs(chunk));
}

TEST_F(BuildSnapshotTest, JoinsPiecesOfOneChunk) {
  std::vector<WantedBox> wanted = Want({Box{{0, 4}, {0, 16}}, Box{{4, 9}, {0, 16}}});
  wanted[1].chunk = 0;
  auto snapshot = Build({wanted});
  ASSERT_TRUE(snapshot.ok());
  EXPECT_EQ(snapshot->program.sums, 2u);  // the chunk and the rest
  EXPECT_THAT(snapshot->checks[0].cells, SizeIs(1));
}

TEST_F(BuildSnapshotTest, LeavesOutWhatWouldCutTooFine) {
  std::vector<Box> rows;
  for (int64_t row = 0; row < 32; ++row) rows.push_back(Box{{row, row + 1}, {0, 16}});
  const std::vector<std::vector<WantedBox>> wanted{Want({Box{{0, 16}, {0, 16}}}), Want(rows)};
  auto snapshot = Build(wanted, 8);
  ASSERT_TRUE(snapshot.ok());
  EXPECT_LE(snapshot->program.sums, 8u);
  ASSERT_FALSE(snapshot->checks.empty());
  EXPECT_EQ(snapshot->checks[0].receiver, 0u);  // the large one was kept
  EXPECT_LT(snapshot->checks.size(), 33u);
  auto one = Build(wanted, 1);
  ASSERT_TRUE(one.ok());
  EXPECT_THAT(one->checks, IsEmpty());
  EXPECT_THAT(one->program.ops, SizeIs(1));
}

TEST_F(BuildSnapshotTest, LeavesOtherDtypesToTheArena) {
  auto snapshot = Build({Want({Box{{0, 8}, {0, 16}}}, DType::kF16)});
  ASSERT_TRUE(snapshot.ok());
  EXPECT_THAT(snapshot->checks, IsEmpty());
  EXPECT_EQ(snapshot->program.sums, 1u);
}

TEST_F(BuildSnapshotTest, NamesWhatItDoesNotHold) {
  auto outside = Build({Want({Box{{0, 33}, {0, 16}}})});
  EXPECT_EQ(outside.status().tensor(), "w");
  EXPECT_THAT(outside.status().message(), HasSubstr("[0:33, 0:16]"));
  EXPECT_EQ(Build({{{7, Box{{0, 1}}, DType::kBF16, 0}}}).status().code(), Code::kInvalidArgument);
  layout_.bindings[0].box = Box{{0, 31}, {0, 16}};
  EXPECT_EQ(Build({}).status().tensor(), "w");
}

TEST(BuildArenaDigest, RefusesWhatIsNotThere) {
  const Layout layout = DenseLayout({32, 16});
  const WorldTemplate world = *TemplateOf(layout);
  const ArenaMap arena = MapArena(world, {});
  const auto build = [&](Box box, DType wire, uint32_t chunks) {
    return BuildArenaDigest(arena, world, Want({box}, wire), chunks).status();
  };
  EXPECT_TRUE(build(Box{{1, 3}, {2, 5}}, DType::kBF16, 1).ok());
  EXPECT_EQ(build(Box{{1, 33}, {2, 5}}, DType::kBF16, 1).tensor(), "w");
  EXPECT_EQ(build(Box{{1, 3}, {2, 5}}, DType::kI8, 1).tensor(), "w");
  EXPECT_EQ(build(Box{{1, 3}, {2, 5}}, DType::kBF16, 0).tensor(), "w");
}

// ---- places ----------------------------------------------------------------------------------

TEST(PlacesOfLayout, LeavesOutWhatAFunctionChangedAndWhatTheTemplateLacks) {
  Layout layout = DenseLayout({8, 4});
  const WorldTemplate world = *TemplateOf(layout);
  layout.tensors.push_back({"x", {4}, DType::kBF16});
  layout.buffers.push_back({"x", nullptr, 8});
  layout.bindings.push_back(Bind(1, 1, Box{{0, 4}}, 0, {2}));
  auto places = PlacesOfLayout(layout, world, 5);
  ASSERT_THAT(places, SizeIs(1));
  ASSERT_THAT(places[0], SizeIs(1));
  EXPECT_EQ(places[0][0].base, 5u);
  layout.bindings[0].function = LandingFunction::kNegExp;
  EXPECT_THAT(PlacesOfLayout(layout, world, 5)[0], IsEmpty());
}

// ---- commit ----------------------------------------------------------------------------------

Layout OneBuffer(uint64_t bytes) {
  Layout layout;
  layout.tensors = {{"a", {64, 64}, DType::kBF16}, {"b", {64, 64}, DType::kBF16}};
  layout.buffers = {{"fused", nullptr, bytes}};
  return layout;
}

std::vector<CopyOp> CommitOps(const Layout& layout) { return BuildCommit(layout).ops; }

TEST(BuildCommit, OfAFullyBoundBufferIsOneRun) {
  // Rows of a, then rows of b in two bindings.
  Layout stacked = OneBuffer(3 * 8192);
  const Box whole = Box{{0, 64}, {0, 64}};
  stacked.bindings = {Bind(1, 0, Box{{8, 64}, {0, 64}}, 8192 + 1024, {128, 2}),
                      Bind(0, 0, whole, 0, {128, 2}),
                      Bind(1, 0, Box{{0, 8}, {0, 64}}, 8192, {128, 2})};
  ASSERT_THAT(CommitOps(stacked), SizeIs(1));
  const CopyProgram program = BuildCommit(stacked);
  EXPECT_EQ(program.shapes[0].ndim, 1);
  EXPECT_EQ(program.shapes[0].extents[0], 2 * 8192);
  EXPECT_EQ(program.shapes[0].source, DType::kU8);
  EXPECT_EQ(program.ops[0].sum, kNoSum);

  Layout interleaved = OneBuffer(2 * 8192);  // element by element
  interleaved.bindings = {Bind(0, 0, whole, 0, {256, 4}), Bind(1, 0, whole, 2, {256, 4})};
  EXPECT_THAT(CommitOps(interleaved), SizeIs(1));

  Layout columns = OneBuffer(2 * 8192);  // rows side by side, one of them transposed
  columns.bindings = {Bind(0, 0, whole, 0, {256, 2}), Bind(1, 0, whole, 128, {2, 256})};
  EXPECT_THAT(CommitOps(columns), SizeIs(1));

  Layout bricks = OneBuffer(2 * 8192);  // a beside two halves of b
  bricks.bindings = {Bind(1, 0, Box{{0, 40}, {0, 64}}, 0, {256, 2}),
                     Bind(0, 0, whole, 128, {256, 2}),
                     Bind(1, 0, Box{{40, 64}, {0, 64}}, 40 * 256, {256, 2})};
  EXPECT_THAT(CommitOps(bricks), SizeIs(1));
}

TEST(BuildCommit, LeavesGapsOut) {
  Layout layout = OneBuffer(64 * 256 + 100);
  const Box whole = Box{{0, 64}, {0, 64}};
  layout.bindings = {Bind(0, 0, whole, 100, {256, 2})};
  const CopyProgram program = BuildCommit(layout);
  ASSERT_THAT(program.ops, SizeIs(1));
  EXPECT_EQ(program.ops[0].source_offset, 100);
  EXPECT_EQ(program.Bytes(), 2u * 8192);
  layout.bindings.clear();
  EXPECT_THAT(CommitOps(layout), IsEmpty());
}

TEST(BuildCommit, OfEightScatteredDimensionsStillFits) {
  Layout layout;
  layout.tensors = {{"t", std::vector<int64_t>(8, 2), DType::kBF16}};
  layout.buffers = {{"t", nullptr, 200000}};
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = 4;
  for (size_t d = 8; d-- > 0; stride *= 3) strides[d] = stride;
  layout.bindings = {Bind(0, 0, Box::Whole(layout.tensors[0].shape), 0, strides)};
  const CopyProgram program = BuildCommit(layout);
  EXPECT_EQ(program.Bytes(), 2u * 512);
  std::vector<std::byte> memory(200000);
  const ConstMemory source{memory.data(), memory.size()};
  const Memory target{memory.data(), memory.size()};
  EXPECT_TRUE(CheckProgram(program, {&source, 1}, {&target, 1}).ok());
}

}  // namespace
}  // namespace bascule
