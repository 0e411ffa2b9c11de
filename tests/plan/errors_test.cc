// What Prepare refuses. Every error about a tensor names it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/plan/worlds.h"

namespace bascule::testing {
namespace {

using ::testing::HasSubstr;

struct OneTensor {
  std::string name = "model.norm.weight";
  std::vector<int64_t> shape{8, 4};
  DType dtype = DType::kBF16;
  std::vector<std::pair<std::string, std::string>> aliases = {};
};

std::shared_ptr<const WorldTemplate> Whole(const OneTensor& tensor) {
  TemplateMaker maker({});
  BoxProduct product;
  for (int64_t extent : tensor.shape) product.dims.push_back(maker.All(extent));
  maker.Name(tensor.name, maker.Class(tensor.shape, tensor.dtype, {product}));
  for (const auto& [name, target] : tensor.aliases) maker.AddAlias(name, target);
  return maker.Done();
}

World Pair(const OneTensor& held, const OneTensor& needed) {
  World world;
  AddMembers(&world, Whole(held), Role::kTrainer, "", {0});
  AddMembers(&world, Whole(needed), Role::kRollout, "e0", {1});
  return world;
}

void ExpectError(World world, Code code, const std::string& text, const std::string& tensor) {
  auto planner = Planner::Prepare(std::move(world));
  ASSERT_FALSE(planner.ok());
  EXPECT_EQ(planner.status().code(), code);
  EXPECT_THAT(planner.status().message(), HasSubstr(text));
  EXPECT_EQ(planner.status().tensor(), tensor);
}

TEST(PlanErrors, NeededButNotHeld) {
  ExpectError(Pair({.name = "a"}, {.name = "b"}), Code::kNotFound, "engine e0 rank 0", "b");
}

TEST(PlanErrors, HeldInPart) {
  TemplateMaker half({});
  BoxProduct product{{half.List({{{0, 5}}}, {}), half.All(4)}};
  half.Name("model.norm.weight", half.Class({8, 4}, DType::kBF16, {product}));
  World world;
  AddMembers(&world, half.Done(), Role::kTrainer, "", {0});
  AddMembers(&world, Whole({}), Role::kRollout, "e0", {1});
  ExpectError(std::move(world), Code::kNotFound, "no trainer holds 12 of the 32 elements",
              "model.norm.weight");
}

TEST(PlanErrors, ShapesDisagree) {
  ExpectError(Pair({.shape = {8, 4}}, {.shape = {4, 8}}), Code::kInvalidArgument,
              "trainers hold it with shape [8, 4], rollouts need shape [4, 8]",
              "model.norm.weight");
  World world = Pair({}, {});
  AddMembers(&world, Whole({.shape = {8, 5}}), Role::kTrainer, "", {0});
  ExpectError(std::move(world), Code::kInvalidArgument, "[8, 4] and [8, 5]", "model.norm.weight");
}

TEST(PlanErrors, TypesThatCannotBeCast) {
  ExpectError(Pair({.dtype = DType::kBF16}, {.dtype = DType::kF8E4M3}), Code::kInvalidArgument,
              "published as BF16, which cannot be cast to F8_E4M3", "model.norm.weight");
}

TEST(PlanErrors, TwoPublishTypes) {
  World world = Pair({.dtype = DType::kBF16}, {});
  AddMembers(&world, Whole({.dtype = DType::kF32}), Role::kTrainer, "", {0});
  ExpectError(std::move(world), Code::kInvalidArgument, "BF16 and as F32", "model.norm.weight");
}

TEST(PlanErrors, MembersThatDoNotFitTheirTemplates) {
  World world = Pair({}, {});
  world.members[1].coordinates = {0};
  ExpectError(world, Code::kInvalidArgument, "1 coordinates for a mesh of 0 axes", "");
  world = Pair({}, {});
  world.members[1].world_template = 2;
  ExpectError(world, Code::kInvalidArgument, "template 2", "");
  world = Pair({}, {});
  std::swap(world.members[0], world.members[1]);
  ExpectError(world, Code::kInvalidArgument, "sorted", "");
  world = Pair({}, {});
  world.template_digests.pop_back();
  ExpectError(world, Code::kInvalidArgument, "digest", "");
  world = Pair({}, {});
  world.chunk_bytes = 0;
  ExpectError(world, Code::kInvalidArgument, "chunk_bytes", "");
}

// A tensor that the mesh of a rollout leaves empty on every rank is not needed.
TEST(PlanErrors, NothingNeededIsNoError) {
  TemplateMaker none({});
  BoxProduct product{{none.List({{}}, {}), none.All(4)}};
  none.Name("elsewhere", none.Class({8, 4}, DType::kBF16, {product}));
  World world;
  AddMembers(&world, Whole({}), Role::kTrainer, "", {0});
  AddMembers(&world, none.Done(), Role::kRollout, "e0", {1});
  auto planner = Planner::Prepare(world);
  ASSERT_TRUE(planner.ok()) << planner.status().ToString();
  EXPECT_TRUE((*planner)->PartOf(1).chunks.empty());
  EXPECT_TRUE(Planner::Prepare(World{}).ok());
}

// Tied weights: each side may store either name, and declare the tie or not.
TEST(PlanAliases, TiedNamesFindTheirTarget) {
  const OneTensor embed{.name = "embed", .aliases = {{"lm_head", "embed"}}};
  const OneTensor head{.name = "lm_head", .aliases = {{"embed", "lm_head"}}};
  const OneTensor only_embed{.name = "embed"};
  const OneTensor only_head{.name = "lm_head"};
  struct Case {
    OneTensor held;
    OneTensor needed;
  };
  for (const Case& c : {Case{embed, embed}, Case{embed, head}, Case{embed, only_head},
                        Case{only_embed, head}, Case{head, embed}, Case{only_head, embed}}) {
    SCOPED_TRACE(c.held.name + " -> " + c.needed.name);
    auto planner = Planner::Prepare(Pair(c.held, c.needed));
    ASSERT_TRUE(planner.ok()) << planner.status().ToString();
    const Part part = (*planner)->PartOf(1);
    ASSERT_EQ(part.tensors.size(), 1U);
    EXPECT_EQ(part.tensors[0].name, c.held.name);
    EXPECT_EQ(part.tensors[0].source_names, (std::vector<uint32_t>{0, 0}));
    EXPECT_EQ(part.bytes, 64U);
  }
  ExpectError(Pair(only_embed, only_head), Code::kNotFound, "no trainer holds", "lm_head");
}

TEST(PlanTypes, WideDestinationsReceiveThePublishType) {
  auto wide = Planner::Prepare(Pair({}, {.dtype = DType::kF32}));
  ASSERT_TRUE(wide.ok());
  EXPECT_EQ((*wide)->PartOf(1).tensors[0].wire, DType::kBF16);
  EXPECT_EQ((*wide)->PartOf(1).bytes, 64U);
  auto narrow = Planner::Prepare(Pair({.dtype = DType::kF32}, {}));
  ASSERT_TRUE(narrow.ok());
  EXPECT_EQ((*narrow)->PartOf(1).tensors[0].wire, DType::kBF16);
  EXPECT_EQ((*narrow)->PartOf(1).bytes, 64U);
}

}  // namespace
}  // namespace bascule::testing
