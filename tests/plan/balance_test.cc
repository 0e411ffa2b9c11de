// Loads of sources against the optimum, which a maximum flow finds.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "plan/holders.h"
#include "tests/plan/flow.h"
#include "tests/plan/worlds.h"

namespace bascule::testing {
namespace {

constexpr uint64_t kElementBytes = 2;

// Trainers hold random stretches of each tensor, so that holder sets overlap in every way.
std::shared_ptr<const WorldTemplate> OverlappingHolders(uint32_t ranks, uint32_t tensors,
                                                        const std::vector<int64_t>& shape,
                                                        Dice* dice) {
  TemplateMaker maker({ranks});
  for (uint32_t t = 0; t < tensors; ++t) {
    const auto whole = static_cast<uint32_t>(dice->Between(0, ranks - 1));
    std::vector<std::vector<Interval>> rows;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const int64_t begin = dice->Between(0, shape[0] - 1);
      rows.push_back({{begin, dice->Between(begin, shape[0])}});
      if (rank == whole) rows.back() = {{0, shape[0]}};
      if (rank != whole && dice->OneIn(2)) rows.back().clear();
    }
    BoxProduct product{{maker.List(std::move(rows), {0}), maker.All(shape[1])}};
    maker.Name(Numbered("t", t), maker.Class(shape, DType::kBF16, {product}));
  }
  return maker.Done();
}

std::shared_ptr<const WorldTemplate> ShardedNeeds(uint32_t ranks, uint32_t tensors,
                                                  const std::vector<int64_t>& shape, Dice* dice) {
  TemplateMaker maker({ranks});
  for (uint32_t t = 0; t < tensors; ++t) {
    BoxProduct product{{dice->OneIn(2) ? maker.Shard(shape[0], {0}) : maker.All(shape[0]),
                        dice->OneIn(2) ? maker.Shard(shape[1], {0}) : maker.All(shape[1])}};
    maker.Name(Numbered("t", t), maker.Class(shape, DType::kBF16, {product}));
  }
  return maker.Done();
}

World OverlappingWorld(uint64_t seed) {
  Dice dice(seed);
  World world;
  world.chunk_bytes = 4096;
  world.whole_bytes = 8;
  const auto trainers = static_cast<uint32_t>(dice.Between(2, 12));
  const auto tensors = static_cast<uint32_t>(dice.Between(2, 6));
  const std::vector<int64_t> shape{dice.Between(40, 90), dice.Between(40, 90)};
  // Every third case shares nodes between trainers and rollouts.
  const bool shared = seed % 3 == 0;
  std::vector<uint32_t> nodes;
  for (uint32_t i = 0; i < trainers; ++i) nodes.push_back(i / 3);
  AddMembers(&world, OverlappingHolders(trainers, tensors, shape, &dice), Role::kTrainer, "",
             nodes);
  const int64_t engines = dice.Between(1, 4);
  for (int64_t e = 0; e < engines; ++e) {
    const auto ranks = static_cast<uint32_t>(dice.Between(1, 4));
    const auto node = static_cast<uint32_t>((shared ? 0 : 100) + dice.Between(0, 5));
    AddMembers(&world, ShardedNeeds(ranks, tensors, shape, &dice), Role::kRollout, Numbered("e", e),
               std::vector<uint32_t>(ranks, node));
  }
  return world;
}

// What must be served, by the sets that can: to other nodes, and to ranks of the holders' node.
struct AllDemands {
  Demands outside;
  std::map<uint32_t, Demands> on_node;
};

AllDemands DemandsOf(const World& world) {
  AllDemands all;
  ElementMap map = MapElements(world);
  for (const auto& [name, needed] : map.needers) {
    for (size_t e = 0; e < needed.size(); ++e) {
      std::map<uint32_t, uint64_t> needers_on;
      for (uint32_t id : needed[e]) ++needers_on[world.members[id].node];
      for (const auto& [node, needers] : needers_on) {
        std::vector<uint32_t> near;
        for (uint32_t id : map.holders[name][e]) {
          if (world.members[id].node == node) near.push_back(id);
        }
        if (near.empty()) {
          all.outside[map.holders[name][e]] += kElementBytes;
        } else {
          all.on_node[node][near] += kElementBytes * needers;
        }
      }
    }
  }
  return all;
}

// The largest load of a trainer, with what it serves to its own node or to others.
struct WorstLoads {
  uint64_t outside = 0;
  std::map<uint32_t, uint64_t> on_node;
};

WorstLoads LoadsOf(const World& world, const Planner& planner) {
  std::vector<uint64_t> outside(world.members.size(), 0);
  std::vector<uint64_t> on_node(world.members.size(), 0);
  for (const LinkUse& link : planner.Explain().links) {
    (link.same_node ? on_node : outside)[link.source] += link.bytes;
  }
  WorstLoads worst;
  for (uint32_t id = 0; id < world.members.size(); ++id) {
    if (world.members[id].role != Role::kTrainer) continue;
    worst.outside = std::max(worst.outside, outside[id]);
    uint64_t& on = worst.on_node[world.members[id].node];
    on = std::max(on, on_node[id]);
  }
  return worst;
}

TEST(PlanBalance, LoadsAreWithinOnePercentOfTheOptimum) {
  double worst = 0;
  double sum = 0;
  int cases = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const World world = OverlappingWorld(seed);
    auto planner = Planner::Prepare(world);
    ASSERT_TRUE(planner.ok()) << planner.status().ToString();
    const AllDemands demands = DemandsOf(world);
    const WorstLoads loads = LoadsOf(world, **planner);
    auto check = [&](uint64_t load, const Demands& demand) {
      if (demand.empty()) return;
      const uint64_t least = LeastLargestLoad(demand);
      EXPECT_GE(load, least);
      EXPECT_LE(load, least + least / 100 + 2 * world.whole_bytes);
      const double ratio = static_cast<double>(load) / static_cast<double>(least);
      worst = std::max(worst, ratio);
      sum += ratio;
      ++cases;
    };
    check(loads.outside, demands.outside);
    for (const auto& [node, demand] : demands.on_node) check(loads.on_node.at(node), demand);
  }
  RecordProperty("cases", cases);
  RecordProperty("mean", std::to_string(sum / cases));
  RecordProperty("worst", std::to_string(worst));
  EXPECT_GT(cases, 60);
  EXPECT_LE(sum / cases, 1.001);
}

// The shares themselves have no granularity but a byte.
TEST(PlanBalance, SharesReachTheOptimum) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Dice dice(seed);
    const auto holders = static_cast<uint32_t>(dice.Between(2, 16));
    std::map<std::vector<uint32_t>, uint64_t> demands;
    std::vector<uint64_t> load(holders, 0);
    const int64_t sets = dice.Between(1, 24);
    for (int64_t s = 0; s < sets; ++s) {
      std::vector<uint32_t> set;
      for (uint32_t h = 0; h < holders; ++h) {
        if (dice.OneIn(3)) set.push_back(h);
      }
      const auto bytes = static_cast<uint64_t>(dice.Between(0, 1'000'000));
      if (!set.empty()) demands[set] += bytes;
    }
    std::vector<plan::Shares> shares;
    for (const auto& [set, bytes] : demands) {
      if (set.size() == 1) {
        load[set[0]] += bytes;
      } else {
        shares.push_back({set, {}, bytes});
      }
    }
    plan::BalanceShares(&shares, &load);
    for (const plan::Shares& s : shares) {
      uint64_t total = 0;
      for (uint64_t bytes : s.bytes) total += bytes;
      EXPECT_EQ(total, s.total);
    }
    const uint64_t least = LeastLargestLoad(demands);
    EXPECT_LE(*std::max_element(load.begin(), load.end()), least + least / 100 + 16);
  }
}

}  // namespace
}  // namespace bascule::testing
