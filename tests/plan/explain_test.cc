// Explain and the bound, on worlds small enough to count by hand.
#include <gtest/gtest.h>

#include "tests/plan/worlds.h"

namespace bascule::testing {
namespace {

// One tensor of 1,000 x 8 bf16 (16,000 bytes), held in quarters by four trainers on two nodes, or
// in halves by two replicas of two.
std::shared_ptr<const WorldTemplate> Trainers(bool replicas) {
  TemplateMaker maker({2, 2});
  BoxProduct product{{replicas ? maker.Shard(1000, {1}) : maker.Shard(1000, {0, 1}), maker.All(8)}};
  maker.Name("w", maker.Class({1000, 8}, DType::kBF16, {product}));
  return maker.Done();
}

std::shared_ptr<const WorldTemplate> Rollouts(bool sharded) {
  TemplateMaker maker({2});
  BoxProduct product{{maker.All(1000), sharded ? maker.Shard(8, {0}) : maker.All(8)}};
  maker.Name("w", maker.Class({1000, 8}, DType::kBF16, {product}));
  return maker.Done();
}

World FourToFour(bool replicas, bool sharded) {
  World world;
  world.whole_bytes = 16;
  AddMembers(&world, Trainers(replicas), Role::kTrainer, "", {0, 0, 1, 1});
  AddMembers(&world, Rollouts(sharded), Role::kRollout, "e0", {2, 2});
  AddMembers(&world, Rollouts(sharded), Role::kRollout, "e1", {3, 3});
  return world;
}

constexpr Rates kRates{.node_memory = 1'000'000'000,
                       .trainer_egress = 10'000'000,
                       .rollout_egress = 20'000'000,
                       .rollout_ingress = 5'000'000};

TEST(Explain, ReplicatedNeedsEnterEachNodeOnce) {
  auto planner = Planner::Prepare(FourToFour(false, false));
  ASSERT_TRUE(planner.ok());
  const Explanation explained = (*planner)->Explain();
  EXPECT_EQ(explained.fetched_bytes,
            (std::vector<uint64_t>{0, 0, 0, 0, 16000, 16000, 16000, 16000}));
  EXPECT_EQ(explained.from_outside, (std::vector<uint64_t>{0, 0, 0, 0, 8000, 8000, 8000, 8000}));
  EXPECT_EQ(explained.served_bytes,
            (std::vector<uint64_t>{8000, 8000, 8000, 8000, 8000, 8000, 8000, 8000}));
  EXPECT_EQ(explained.worst_source_bytes, 8000U);
  for (const LinkUse& link : explained.links) {
    EXPECT_EQ(link.same_node, link.source >= 4);
    EXPECT_GT(link.bytes, 0U);
  }
}

TEST(Bound, CountsUniqueBytesAndNodeNeeds) {
  auto planner = Planner::Prepare(FourToFour(false, false));
  ASSERT_TRUE(planner.ok());
  const Bound bound = (*planner)->ComputeBound(kRates);
  EXPECT_EQ(bound.sole_source, 800'000);     // 8,000 bytes only on one node
  EXPECT_EQ(bound.trainer_egress, 800'000);  // 16,000 bytes from two nodes
  EXPECT_EQ(bound.all_egress, 533'333);      // 32,000 bytes from 2 x 10 + 2 x 20 MB/s
  EXPECT_EQ(bound.node_ingress, 3'200'000);  // 16,000 bytes into one node
  EXPECT_EQ(bound.memory, 32'000);           // 2 x 16,000 bytes staged on one node
  EXPECT_EQ(bound.nanoseconds, 3'200'000);
  EXPECT_STREQ(bound.binding_term(), "node ingress");
}

TEST(Bound, ReplicasMayAllSend) {
  auto planner = Planner::Prepare(FourToFour(true, true));
  ASSERT_TRUE(planner.ok());
  const Bound bound = (*planner)->ComputeBound(kRates);
  EXPECT_EQ(bound.sole_source, 800'000);  // all is only on these two nodes
  EXPECT_EQ(bound.trainer_egress, 800'000);
  const Explanation explained = (*planner)->Explain();
  EXPECT_EQ(explained.worst_source_bytes, 8000U);
  EXPECT_EQ((*planner)->ComputeBound(Rates{}).nanoseconds, 0);
  EXPECT_STREQ((*planner)->ComputeBound(Rates{}).binding_term(), "none");
}

TEST(Bound, NodesWithTrainersNeedNothingFromOutside) {
  World world;
  AddMembers(&world, Trainers(true), Role::kTrainer, "", {0, 0, 1, 1});
  AddMembers(&world, Rollouts(true), Role::kRollout, "e0", {0, 1});
  auto planner = Planner::Prepare(world);
  ASSERT_TRUE(planner.ok());
  const Bound bound = (*planner)->ComputeBound(kRates);
  EXPECT_EQ(bound.trainer_egress, 0);
  EXPECT_EQ(bound.node_ingress, 0);
  EXPECT_EQ(bound.memory, 24'000);  // 16,000 published + 8,000 staged
}

}  // namespace
}  // namespace bascule::testing
