// Two-sided coverage.
#include "layout/coverage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "bascule/mesh.h"

namespace bascule {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A world and all its members.
struct Members {
  std::shared_ptr<const WorldTemplate> world;
  std::vector<WorldMember> members;
};

Members MembersOf(LayoutBuilder builder) {
  Members result{*builder.BuildWorld(), {}};
  for (uint64_t rank = 0; rank < result.world->ranks(); ++rank) {
    result.members.push_back({result.world.get(), result.world->CoordinatesOf(rank)});
  }
  return result;
}

LayoutBuilder On(const char* axis, uint32_t size) {
  return *LayoutBuilder::Create(Mesh{{axis}, {size}});
}

void Add(LayoutBuilder* builder, const std::string& name, std::vector<int64_t> shape,
         Placements placements, DType dtype = DType::kBF16) {
  ASSERT_TRUE(builder->Add(Block::Of({name, std::move(shape), dtype}, placements)).ok());
}

TEST(MatchesPattern, TrailingStar) {
  EXPECT_TRUE(MatchesPattern("model.mtp.*", "model.mtp.0.weight"));
  EXPECT_TRUE(MatchesPattern("*", "anything"));
  EXPECT_TRUE(MatchesPattern("a", "a"));
  EXPECT_FALSE(MatchesPattern("a", "ab"));
  EXPECT_FALSE(MatchesPattern("ab*", "a"));
  EXPECT_FALSE(MatchesPattern("", "a"));
}

TEST(CheckCoverage, TakesDifferentCutsAndCasts) {
  LayoutBuilder source = On("fsdp", 4);
  LayoutBuilder engine = On("tp", 3);
  Add(&source, "w", {10, 9}, {{"fsdp", Shard(0)}});
  Add(&engine, "w", {10, 9}, {{"tp", Shard(1)}}, DType::kF32);
  EXPECT_TRUE(
      CheckCoverage(MembersOf(std::move(source)).members, MembersOf(std::move(engine)).members)
          .ok());
}

TEST(CheckCoverage, NamesWhatIsMissing) {
  LayoutBuilder source = On("fsdp", 4);
  LayoutBuilder engine = On("tp", 2);
  Add(&source, "w", {8, 6}, {{"fsdp", Shard(0)}});
  Add(&source, "moved", {8, 6}, {});
  Add(&source, "coded", {8}, {}, DType::kU8);
  Add(&engine, "w", {8, 6}, {{"tp", Shard(1)}});
  Members sources = MembersOf(std::move(source));
  Members ranks = MembersOf(std::move(engine));

  Status status = CheckCoverage(sources.members, ranks.members);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("2 tensors of the sources are wanted by no engine"),
                                      HasSubstr("'coded', 'moved'")));
  EXPECT_EQ(status.tensor(), "coded");

  // One source rank of four is gone.
  sources.members.erase(sources.members.begin() + 2);
  status = CheckCoverage(sources.members, ranks.members);
  EXPECT_THAT(status.message(), HasSubstr("elements that no source holds: 'w' [4:6, 0:3]"));

  LayoutBuilder other = On("tp", 2);
  Add(&other, "moved", {6, 8}, {{"tp", Shard(1)}});
  Add(&other, "coded", {8}, {});
  status = CheckCoverage(sources.members, MembersOf(std::move(other)).members);
  EXPECT_THAT(status.message(), HasSubstr("2 tensors differ in shape or dtype: 'coded' (source U8, "
                                          "engine BF16), 'moved' (source [8, 6], engine [6, 8])"));

  LayoutBuilder unknown = On("tp", 2);
  for (int i = 0; i < 7; ++i) Add(&unknown, "x" + std::to_string(i), {2}, {});
  status = CheckCoverage(sources.members, MembersOf(std::move(unknown)).members);
  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("7 tensors of the engine are held by no source: 'x0', 'x1', 'x2', "
                              "'x3', 'x4', ..."),
                    Not(HasSubstr("x5"))));
}

TEST(CheckCoverage, UnusedPatternsAndMembersThatWantNothing) {
  LayoutBuilder source = On("fsdp", 2);
  Add(&source, "w", {4}, {{"fsdp", Shard(0)}});
  Add(&source, "mtp.0", {4}, {{"fsdp", Shard(0)}});
  Add(&source, "mtp.1", {4}, {{"fsdp", Shard(0)}});
  LayoutBuilder engine = On("pp", 2);
  Add(&engine, "w", {4}, {{"pp", At(1)}});
  engine.AddUnused("mtp.*");
  EXPECT_TRUE(
      CheckCoverage(MembersOf(std::move(source)).members, MembersOf(std::move(engine)).members)
          .ok());
}

TEST(CheckCoverage, ResolvesAliasesOfBothSides) {
  auto source = [](bool tied) {
    LayoutBuilder builder = On("fsdp", 2);
    Add(&builder, "embed", {8}, {{"fsdp", Shard(0)}});
    if (tied) builder.AddAlias({"lm_head", "embed"});
    if (!tied) Add(&builder, "lm_head", {8}, {{"fsdp", Shard(0)}});
    return MembersOf(std::move(builder));
  };
  auto engine = [](bool tied, const char* unused = nullptr) {
    LayoutBuilder builder = On("tp", 2);
    Add(&builder, "embed", {8}, {{"tp", Shard(0)}});
    if (tied) builder.AddAlias({"lm_head", "embed"});
    if (!tied) Add(&builder, "lm_head", {8}, {{"tp", Shard(0)}});
    if (unused != nullptr) builder.AddUnused(unused);
    return MembersOf(std::move(builder));
  };
  for (bool source_tied : {false, true}) {
    for (bool engine_tied : {false, true}) {
      Status status = CheckCoverage(source(source_tied).members, engine(engine_tied).members);
      if (!engine_tied || source_tied) {
        EXPECT_TRUE(status.ok()) << status.ToString();
        continue;
      }
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr("the engine ties lm_head to embed, but the trainers "
                                              "hold them apart; tie them at the trainers"));
      EXPECT_EQ(status.tensor(), "lm_head");
    }
  }
  // Not by a pattern, which says nothing of this tensor.
  EXPECT_FALSE(CheckCoverage(source(false).members, engine(true, "*").members).ok());
  EXPECT_TRUE(CheckCoverage(source(false).members, engine(true, "lm_head").members).ok());
  // Sources that do not know the other name, or tie it to what the engine does not know.
  LayoutBuilder alone = On("fsdp", 2);
  Add(&alone, "embed", {8}, {{"fsdp", Shard(0)}});
  EXPECT_TRUE(CheckCoverage(MembersOf(std::move(alone)).members, engine(true).members).ok());
  LayoutBuilder other = On("fsdp", 2);
  Add(&other, "embed", {8}, {{"fsdp", Shard(0)}});
  Add(&other, "head", {8}, {{"fsdp", Shard(0)}});
  other.AddAlias({"lm_head", "head"});
  EXPECT_THAT(
      CheckCoverage(MembersOf(std::move(other)).members, engine(true, "head").members).message(),
      HasSubstr("the engine ties lm_head to embed"));
  // The engine binds only the head; the source has it as an alias.
  LayoutBuilder head = On("tp", 2);
  Add(&head, "lm_head", {8}, {});
  EXPECT_TRUE(CheckCoverage(source(true).members, MembersOf(std::move(head)).members).ok());
}

// Undeclared ranks: each has a template of its own.
TEST(CheckCoverage, JoinsTemplatesOfOneRank) {
  std::vector<WorldTemplate> worlds;
  for (int64_t r = 0; r < 4; ++r) {
    Layout layout;
    layout.tensors = {{"w", {8, 2}, DType::kF32}};
    layout.buffers = {{.name = "b", .bytes = 64}};
    layout.bindings = {{0, 0, Box{{2 * r, 2 * r + 2}, {0, 2}}, 0, {8, 4}, DType::kF32}};
    worlds.push_back(*TemplateOf(layout));
  }
  std::vector<WorldMember> sources;
  for (const WorldTemplate& world : worlds) sources.push_back({&world, {}});
  LayoutBuilder engine = On("tp", 1);
  Add(&engine, "w", {8, 2}, {}, DType::kF32);
  Members ranks = MembersOf(std::move(engine));
  EXPECT_TRUE(CheckCoverage(sources, ranks.members).ok());
  sources.erase(sources.begin() + 1);
  EXPECT_THAT(CheckCoverage(sources, ranks.members).message(), HasSubstr("'w' [2:4, 0:2]"));
  worlds[0].classes[0].dtype = DType::kBF16;
  EXPECT_THAT(CheckCoverage(sources, ranks.members).message(),
              HasSubstr("ranks of one side declare it as BF16 [8, 2] and as F32 [8, 2]"));
}

// Random boxes against a map of elements.
TEST(CheckCoverage, MatchesElementsOfRandomBoxes) {
  std::mt19937 random(11);
  auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  int covered = 0;
  for (int round = 0; round < 2000; ++round) {
    auto layout_of = [&](int boxes, int64_t size, std::vector<int>* held) {
      Layout layout;
      layout.tensors = {{"w", {6, 6}, DType::kU8}};
      layout.buffers = {{.name = "b", .bytes = 1000}};
      for (int b = 0; b < boxes; ++b) {
        int64_t i = below(6);
        int64_t j = below(6);
        Box box{{i, std::min<int64_t>(6, i + 1 + below(size))},
                {j, std::min<int64_t>(6, j + 1 + below(size))}};
        layout.bindings.push_back({0, 0, box, 0, {6, 1}, DType::kU8});
        for (int64_t x = box[0].begin; x < box[0].end; ++x) {
          for (int64_t y = box[1].begin; y < box[1].end; ++y) {
            (*held)[static_cast<size_t>(x * 6 + y)] = 1;
          }
        }
      }
      return *TemplateOf(layout);
    };
    std::vector<int> held(36);
    std::vector<int> needed(36);
    WorldTemplate source = layout_of(8, 6, &held);
    WorldTemplate engine = layout_of(2, 3, &needed);
    bool expected = true;
    for (size_t i = 0; i < 36; ++i) expected = expected && held[i] >= needed[i];
    covered += expected ? 1 : 0;
    std::vector<WorldMember> sources = {{&source, {}}};
    std::vector<WorldMember> ranks = {{&engine, {}}};
    EXPECT_EQ(CheckCoverage(sources, ranks).ok(), expected);
  }
  EXPECT_GT(covered, 200);
  EXPECT_LT(covered, 1800);
}

TEST(CheckCoverage, IsFastForKimiK2) {
  LayoutBuilder source = On("fsdp", 256);
  LayoutBuilder engine = On("ep", 32);
  for (int layer = 0; layer < 60; ++layer) {
    for (uint32_t e = 0; e < 384; ++e) {
      for (const char* part : {"gate", "up", "down"}) {
        std::string name = std::to_string(layer) + "." + std::to_string(e) + part;
        Add(&source, name, {2048, 7168}, {{"fsdp", Shard(0)}});
        Add(&engine, name, {2048, 7168}, {{"ep", At(e / 12)}});
      }
    }
  }
  Members sources = MembersOf(std::move(source));
  Members ranks = MembersOf(std::move(engine));
  auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(CheckCoverage(sources.members, ranks.members).ok());
  std::printf(
      "%.0f ms\n",
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace
}  // namespace bascule
