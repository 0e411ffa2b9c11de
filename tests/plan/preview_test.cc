// The public preview says what the planner says.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "bascule/plan.h"
#include "tests/plan/worlds.h"

namespace bascule::testing {
namespace {

std::vector<PlannedRank> RanksOf(const World& world) {
  std::vector<PlannedRank> ranks;
  for (const Member& m : world.members) {
    ranks.push_back({m.engine, m.rank, m.node, world.templates[m.world_template], m.coordinates});
  }
  return ranks;
}

TEST(Preview, LinksAndBoundAreThoseOfThePlanner) {
  constexpr Rates kRates{1'000'000'000, 10'000'000, 20'000'000, 5'000'000};
  int planned = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    World world = RandomWorld(seed);
    world.chunk_bytes = World().chunk_bytes;
    world.whole_bytes = World().whole_bytes;
    auto preview = PlanPreview::Prepare(RanksOf(world));
    auto planner = Planner::Prepare(world);
    // The preview merges equal templates, as ranks do, and a plan depends on how they are numbered.
    const auto& digests = world.template_digests;
    if (std::set(digests.begin(), digests.end()).size() < digests.size()) continue;
    ASSERT_EQ(preview.ok(), planner.ok());
    if (!planner.ok()) continue;
    ++planned;
    const Explanation explained = (*planner)->Explain();
    std::vector<LinkUse> links;
    for (uint32_t target = 0; target < world.members.size(); ++target) {
      const PlannedPart part = (*preview)->PartOf(target);
      EXPECT_EQ(part.bytes, explained.fetched_bytes[target]);
      for (const PlannedLink& link : part.links) {
        links.push_back({link.source, target, link.bytes, link.chunks, link.same_node});
      }
    }
    std::sort(links.begin(), links.end(), [](const LinkUse& a, const LinkUse& b) {
      return std::pair(a.source, a.target) < std::pair(b.source, b.target);
    });
    ASSERT_EQ(links.size(), explained.links.size());
    for (size_t i = 0; i < links.size(); ++i) {
      EXPECT_EQ(links[i].source, explained.links[i].source);
      EXPECT_EQ(links[i].target, explained.links[i].target);
      EXPECT_EQ(links[i].bytes, explained.links[i].bytes);
      EXPECT_EQ(links[i].chunks, explained.links[i].chunks);
      EXPECT_EQ(links[i].same_node, explained.links[i].same_node);
    }
    EXPECT_EQ((*preview)->ComputeBound(kRates).nanoseconds,
              (*planner)->ComputeBound(kRates).nanoseconds);
  }
  EXPECT_GT(planned, 10);
}

TEST(Preview, MemoryIsThatOfTheArena) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const World world = RandomWorld(seed);
    for (const Member& m : world.members) {
      const WorldTemplate& shape = *world.templates[m.world_template];
      const RankMemory memory = MemoryOf(shape, m.coordinates);
      const ArenaMap arena = MapArena(shape, m.coordinates);
      EXPECT_EQ(memory.arena, arena.bytes);
      uint64_t weights = 0;
      for (const ArenaMap::Entry& entry : arena.entries) {
        const DType dtype = shape.classes[shape.class_of[entry.tensor]].dtype;
        weights +=
            static_cast<uint64_t>(entry.box.size()) * static_cast<uint64_t>(DTypeSize(dtype));
      }
      EXPECT_EQ(memory.weights, weights);
    }
  }
}

TEST(Preview, WhatAnEngineDoesNotWantIsAnError) {
  TemplateMaker trainers({1});
  const BoxProduct whole{{trainers.All(8)}};
  trainers.Name("a", trainers.Class({8}, DType::kF32, {whole}));
  trainers.Name("b", trainers.Class({8}, DType::kF32, {whole}));
  TemplateMaker rollouts({1});
  rollouts.Name("a", rollouts.Class({8}, DType::kF32, {{{rollouts.All(8)}}}));
  auto preview =
      PlanPreview::Prepare({{"", 0, 0, trainers.Done(), {0}}, {"e0", 0, 0, rollouts.Done(), {0}}});
  ASSERT_TRUE(preview.ok());
  const Status status = (*preview)->CheckEngines();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.tensor(), "b");
}

}  // namespace
}  // namespace bascule::testing
