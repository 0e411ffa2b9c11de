// Digests of plans of fixed worlds. Every rank computes its own part, so all compilers and
// optimization levels must agree. tests/plan/compare_compilers.sh builds this test with
// g++ -O0, -O2, -O3 and clang++ -O2 and runs each.
//
// A change here means that ranks of old and new builds must not share a plan: raise
// kPlannerVersion and print the new digests with --gtest_filter='PlanGolden*' (the failures show
// them).
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/plan/worlds.h"

namespace bascule::testing {
namespace {

// The digests of templates are fixed here, so that their byte format may change alone.
World WithFixedDigests(World world) {
  for (uint64_t i = 0; i < world.template_digests.size(); ++i) {
    world.template_digests[i] = {i + 1, 42};
  }
  return world;
}

std::vector<uint32_t> NodesOf(uint32_t ranks, uint32_t first, uint32_t per_node) {
  std::vector<uint32_t> nodes;
  for (uint32_t rank = 0; rank < ranks; ++rank) nodes.push_back(first + rank / per_node);
  return nodes;
}

struct Shape {
  std::vector<int64_t> extents;
  uint32_t count;
};
const std::vector<Shape> kShapes = {{{4096, 512}, 3}, {{1024}, 5}, {{6, 300, 64}, 2}, {{}, 1}};

// FSDP over axis 1, replicas over axis 0.
std::shared_ptr<const WorldTemplate> Hsdp(uint32_t replicas, uint32_t shards, bool flat) {
  TemplateMaker maker({replicas, shards});
  int64_t number = 100;
  for (const Shape& shape : kShapes) {
    std::vector<BoxProduct> products;
    if (flat && replicas == 1) {
      products = maker.FlatShards(shape.extents);
    } else {
      BoxProduct& product = products.emplace_back();
      for (size_t d = 0; d < shape.extents.size(); ++d) {
        product.dims.push_back(d == 0 ? maker.Shard(shape.extents[d], {1})
                                      : maker.All(shape.extents[d]));
      }
    }
    const uint32_t c = maker.Class(shape.extents, DType::kBF16, products);
    for (uint32_t i = 0; i < shape.count; ++i) maker.Name(Numbered("t", number++), c);
  }
  return maker.Done();
}

// Tensor parallel over the last dimension, replicated over axis 0.
std::shared_ptr<const WorldTemplate> TensorParallel(uint32_t replicas, uint32_t ranks,
                                                    DType dtype) {
  TemplateMaker maker({replicas, ranks});
  int64_t number = 100;
  for (const Shape& shape : kShapes) {
    BoxProduct product;
    for (size_t d = 0; d < shape.extents.size(); ++d) {
      const bool last = d + 1 == shape.extents.size() && d > 0;
      product.dims.push_back(last ? maker.Shard(shape.extents[d], {1})
                                  : maker.All(shape.extents[d]));
    }
    const uint32_t c = maker.Class(shape.extents, dtype, {product});
    for (uint32_t i = 0; i < shape.count; ++i) maker.Name(Numbered("t", number++), c);
  }
  return maker.Done();
}

World Fsdp() {
  World world;
  AddMembers(&world, Hsdp(1, 8, false), Role::kTrainer, "", NodesOf(8, 0, 4));
  AddMembers(&world, TensorParallel(2, 2, DType::kBF16), Role::kRollout, "e0", NodesOf(4, 2, 4));
  return world;
}

World Replicas() {
  World world;
  AddMembers(&world, Hsdp(3, 4, false), Role::kTrainer, "", NodesOf(12, 0, 4));
  AddMembers(&world, TensorParallel(1, 4, DType::kBF16), Role::kRollout, "e0", NodesOf(4, 3, 2));
  AddMembers(&world, TensorParallel(2, 2, DType::kF32), Role::kRollout, "e1", NodesOf(4, 4, 4));
  return world;
}

World Flat() {
  World world;
  world.chunk_bytes = 100'000;
  AddMembers(&world, Hsdp(1, 7, true), Role::kTrainer, "", NodesOf(7, 0, 8));
  AddMembers(&world, TensorParallel(1, 3, DType::kF16), Role::kRollout, "e0", NodesOf(3, 9, 1));
  return world;
}

World Colocated() {
  World world;
  world.whole_bytes = 1000;
  AddMembers(&world, Hsdp(2, 4, false), Role::kTrainer, "", NodesOf(8, 0, 4));
  AddMembers(&world, TensorParallel(1, 4, DType::kBF16), Role::kRollout, "e0", NodesOf(4, 0, 2));
  return world;
}

struct Golden {
  const char* name;
  World world;
  const char* plan;
  std::vector<const char*> parts;  // of some rollouts, from the first on
};

std::vector<Golden> Goldens() {
  return {
      {"fsdp",
       Fsdp(),
       "7d752e4d7f66f53f1828f14aba211f1f",
       {"cb52411bb9cc50747df5ceaea02d6b2c", "82b2b162f788f9d08d19688e2388c649",
        "e0d6ee779dad4ef19ac59bb37a396424"}},
      {"replicas",
       Replicas(),
       "0080ad842a7639e3b9ed7955421eaa12",
       {"ad02048517f3d960d684c4f1a3ceffac", "ac18ff5d01782e52bcccb0b634bfa010",
        "619dcbe033253c26e6188249bc650309", "cf2fe323a4ddfac3744fea4ea25451a3",
        "2a646a7218d47eb0818f931cf8a1d9c0", "bc495ebd7e6933efa79f58c5e8dff6ae"}},
      {"flat",
       Flat(),
       "4d803c133e10ea5e573d84f905ef039e",
       {"6771c8a5886da10b44edc29ed408bc61", "02037d68b79967702bd7e4f3d2f6d8c9"}},
      {"colocated",
       Colocated(),
       "105522ee16252020e5630691962d0937",
       {"6cb218ccedd9fec33d3d583f431e8891", "e410ce601b254e12e88666c39d68b180"}},
      {"random 8",
       RandomWorld(8),
       "5d2964abd01ac4ef4eeae9ff01540e49",
       {"764f40575a05270cc7c410dcc522af64"}},
      {"random 11",
       RandomWorld(11),
       "ed31fc937f9d55f2c574cfbd2e568c14",
       {"c5754d20d7a3e575614713cbf9c60341"}},
  };
}

TEST(PlanGolden, TheSameByAnyCompiler) {
  for (const Golden& golden : Goldens()) {
    SCOPED_TRACE(golden.name);
    auto planner = Planner::Prepare(WithFixedDigests(golden.world));
    ASSERT_TRUE(planner.ok()) << planner.status().ToString();
    EXPECT_EQ((*planner)->digest().ToString(), golden.plan);
    size_t part = 0;
    for (uint32_t id = 0; id < golden.world.members.size(); ++id) {
      if (golden.world.members[id].role == Role::kTrainer) continue;
      if (part == golden.parts.size()) break;
      EXPECT_EQ(PartDigest((*planner)->PartOf(id)).ToString(), golden.parts[part]) << part;
      ++part;
    }
    EXPECT_EQ(part, golden.parts.size());
  }
}

// What is not in the digest would let ranks with different plans talk to each other.
TEST(PlanGolden, DigestDependsOnEveryInput) {
  const World base = WithFixedDigests(Replicas());
  std::vector<World> changed(7, base);
  changed[1].chunk_bytes += 1;
  changed[2].whole_bytes += 1;
  changed[3].members[0].node = 77;
  changed[4].members.back().rank += 1;
  changed[5].template_digests[0].low += 1;
  changed[6].members.pop_back();
  std::vector<ContentDigest> digests;
  for (const World& world : changed) {
    auto planner = Planner::Prepare(world);
    ASSERT_TRUE(planner.ok());
    digests.push_back((*planner)->digest());
  }
  std::sort(digests.begin(), digests.end());
  EXPECT_EQ(std::unique(digests.begin(), digests.end()), digests.end());
}

}  // namespace
}  // namespace bascule::testing
