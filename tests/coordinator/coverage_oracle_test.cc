// Which ranks cover a world: against counting element by element on random templates.
#include "coordinator/coverage_oracle.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>

#include "base/random.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;

// A template of random meshes: lists whose entries may overlap, leave holes or be empty.
WorldTemplate RandomTemplate(SplitMix64& random) {
  WorldTemplate world;
  const auto axes = random.Below(3);
  for (uint64_t i = 0; i < axes; ++i) {
    world.axis_sizes.push_back(static_cast<uint32_t>(1 + random.Below(3)));
  }
  constexpr int64_t kExtent = 6;
  auto add_dim = [&] {
    DimSelect select;
    uint32_t entries = 1;
    for (uint32_t axis = 0; axis < world.axis_sizes.size(); ++axis) {
      if (random.Below(2) == 0) continue;
      select.axes.push_back(axis);
      entries *= world.axis_sizes[axis];
    }
    IntervalList list;
    for (uint32_t e = 0; e < entries; ++e) {
      int64_t at = static_cast<int64_t>(random.Below(3));
      while (at < kExtent && random.Below(4) != 0) {
        const int64_t end =
            std::min<int64_t>(kExtent, at + 1 + static_cast<int64_t>(random.Below(4)));
        list.intervals.push_back({at, end});
        at = end + 1 + static_cast<int64_t>(random.Below(2));
      }
      list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
    }
    select.list = static_cast<uint32_t>(world.lists.size());
    world.lists.push_back(list);
    return select;
  };
  for (const char* name : {"a", "b", "c"}) {
    if (random.Below(4) == 0) continue;
    TemplateClass tensors;
    tensors.shape.assign(name[0] == 'a' ? 1 : 2, kExtent);
    const uint64_t products = 1 + random.Below(2);
    for (uint64_t p = 0; p < products; ++p) {
      BoxProduct product;
      for (size_t d = 0; d < tensors.shape.size(); ++d) product.dims.push_back(add_dim());
      tensors.products.push_back(product);
    }
    world.names.push_back(name);
    world.class_of.push_back(static_cast<uint32_t>(world.classes.size()));
    world.classes.push_back(tensors);
  }
  world.Canonicalize();
  return world;
}

struct RandomWorld {
  TemplateMap templates;
  std::map<ContentDigest, std::string> bytes;
  std::vector<MemberInfo> members;
  std::vector<const MemberInfo*> pointers;
};

RandomWorld MakeWorld(uint64_t seed) {
  SplitMix64 random(seed);
  RandomWorld made;
  const uint64_t templates = 1 + random.Below(3);
  for (uint64_t t = 0; t < templates; ++t) {
    const WorldTemplate world = RandomTemplate(random);
    EXPECT_TRUE(world.Validate().ok()) << world.Validate().ToString();
    const std::string bytes = world.Serialize();
    made.templates[DigestOf(bytes)] = std::make_shared<const WorldTemplate>(world);
    made.bytes[DigestOf(bytes)] = bytes;
    for (uint64_t rank = 0; rank < world.ranks(); ++rank) {
      MemberInfo member;
      member.rank = static_cast<uint32_t>(made.members.size());
      member.world_template = DigestOf(bytes);
      member.coordinates = world.CoordinatesOf(rank);
      made.members.push_back(member);
    }
  }
  for (const MemberInfo& member : made.members) made.pointers.push_back(&member);
  return made;
}

// Which members hold each element.
std::map<std::string, std::set<uint32_t>> HoldersOfElements(const RandomWorld& world) {
  std::map<std::string, std::set<uint32_t>> holders;
  for (uint32_t m = 0; m < world.members.size(); ++m) {
    const WorldTemplate& of = *world.templates.at(world.members[m].world_template);
    for (size_t name = 0; name < of.names.size(); ++name) {
      std::vector<Box> boxes;
      of.BoxesOf(of.class_of[name], world.members[m].coordinates, &boxes);
      for (const Box& box : boxes) {
        for (int64_t i = box[0].begin; i < box[0].end; ++i) {
          if (box.ndim() == 1) {
            holders[fmt::format("{} {}", of.names[name], i)].insert(m);
            continue;
          }
          for (int64_t j = box[1].begin; j < box[1].end; ++j) {
            holders[fmt::format("{} {} {}", of.names[name], i, j)].insert(m);
          }
        }
      }
    }
  }
  return holders;
}

TEST(CoverageOracle, HolderSetsAreThoseOfTheElements) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    const RandomWorld world = MakeWorld(seed);
    std::set<std::vector<uint32_t>> expected;
    for (const auto& [element, holders] : HoldersOfElements(world)) {
      expected.insert({holders.begin(), holders.end()});
    }
    const auto sets = HolderSetsOf(world.pointers, world.templates);
    ASSERT_EQ(sets, (std::vector<std::vector<uint32_t>>{expected.begin(), expected.end()}))
        << "seed " << seed;
  }
}

TEST(CoverageOracle, CoversIsWhatCountingSays) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const RandomWorld world = MakeWorld(seed);
    const auto elements = HoldersOfElements(world);
    TemplateOracle oracle;
    for (const auto& [digest, bytes] : world.bytes) oracle.Add(digest, bytes);
    SplitMix64 random(seed);
    for (int round = 0; round < 10; ++round) {
      std::set<uint32_t> live;
      std::vector<const MemberInfo*> holders;
      for (const MemberInfo& member : world.members) {
        if (random.Below(3) == 0) continue;
        live.insert(member.rank);
        holders.push_back(&member);
      }
      bool covered = true;
      for (const auto& [element, held_by] : elements) {
        covered = covered && std::any_of(held_by.begin(), held_by.end(),
                                         [&live](uint32_t m) { return live.count(m) != 0; });
      }
      ASSERT_EQ(oracle.Covers(holders, world.pointers), covered) << "seed " << seed;
    }
  }
}

TEST(CoverageOracle, ReplicasAreThoseWithTheSameBoxes) {
  int replicas = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const RandomWorld world = MakeWorld(seed);
    TemplateOracle oracle;
    for (const auto& [digest, bytes] : world.bytes) oracle.Add(digest, bytes);
    auto boxes_of = [&world](const MemberInfo& member) {
      const WorldTemplate& of = *world.templates.at(member.world_template);
      std::pair<std::vector<std::string>, std::map<std::string, std::set<Box>>> all;
      all.first = of.names;
      for (size_t name = 0; name < of.names.size(); ++name) {
        std::vector<Box> boxes;
        of.BoxesOf(of.class_of[name], member.coordinates, &boxes);
        if (!boxes.empty()) all.second[of.names[name]] = {boxes.begin(), boxes.end()};
      }
      return all;
    };
    for (const MemberInfo& a : world.members) {
      for (const MemberInfo& b : world.members) {
        const bool same = boxes_of(a) == boxes_of(b);
        replicas += same && a.rank != b.rank ? 1 : 0;
        ASSERT_EQ(oracle.ReplicaGroup(a) == oracle.ReplicaGroup(b), same) << "seed " << seed;
      }
    }
  }
  EXPECT_GT(replicas, 100);
}

TEST(CoverageOracle, NamesTheTensorsOfABucket) {
  for (const size_t n : {size_t{1}, size_t{3}, size_t{1024}, size_t{1025}, size_t{5000}}) {
    WorldTemplate world;
    TemplateClass tensors;  // scalars
    tensors.products = {BoxProduct()};
    world.classes = {tensors};
    for (size_t i = 0; i < n; ++i) world.names.push_back(fmt::format("t{:05}", i));
    world.class_of.assign(n, 0);
    const std::string bytes = world.Serialize();
    TemplateOracle oracle;
    oracle.Add(DigestOf(bytes), bytes);
    MemberInfo member;
    member.world_template = DigestOf(bytes);
    ASSERT_TRUE(oracle.Check(member).ok()) << oracle.Check(member).ToString();
    const size_t buckets = std::min<size_t>(n, kReplicaBuckets);
    for (size_t i = 0; i < n; ++i) {
      const size_t bucket = i * buckets / n;
      size_t first = i;
      size_t last = i;
      while (first > 0 && (first - 1) * buckets / n == bucket) --first;
      while (last + 1 < n && (last + 1) * buckets / n == bucket) ++last;
      std::string tensor;
      const std::string text = oracle.BucketName(member, bucket, buckets, &tensor);
      if (first == last) {
        ASSERT_EQ(tensor, world.names[i]);
        ASSERT_THAT(text, HasSubstr(world.names[i]));
      } else {
        ASSERT_EQ(tensor, "");
        ASSERT_EQ(text, fmt::format("one of the {} tensors {} to {}", last - first + 1,
                                    world.names[first], world.names[last]));
      }
    }
    std::string tensor;
    EXPECT_EQ(oracle.BucketName(member, buckets + 5, buckets, &tensor),
              fmt::format("bucket {}", buckets + 5));
  }
}

TEST(CoverageOracle, ExpandsATemplateToAllItsRanks) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const RandomWorld world = MakeWorld(seed);
    TemplateOracle oracle;
    for (const auto& [digest, bytes] : world.bytes) oracle.Add(digest, bytes);
    std::set<std::vector<uint32_t>> expected;
    const ContentDigest first = world.members[0].world_template;
    for (const MemberInfo& member : world.members) {
      if (member.world_template == first) expected.insert(member.coordinates);
    }
    std::set<std::vector<uint32_t>> expanded;
    for (const MemberInfo& member : oracle.World(world.members[0])) {
      expanded.insert(member.coordinates);
    }
    EXPECT_EQ(expanded, expected);
  }
}

TEST(CoverageOracle, ForgetsTemplatesThatAreNotRetained) {
  const RandomWorld world = MakeWorld(3);
  TemplateOracle oracle;
  for (const auto& [digest, bytes] : world.bytes) oracle.Add(digest, bytes);
  EXPECT_TRUE(oracle.Check(world.members[0]).ok());
  oracle.Retain({});
  EXPECT_EQ(oracle.Check(world.members[0]).code(), Code::kNotFound);
}

// Sharding of a large job: 4096 ranks, 60 classes, half of them flat shards cut at any row.
TEST(CoverageOracle, AnswersForLargeWorldsInTime) {
  constexpr uint32_t kRanks = 4096;
  WorldTemplate world;
  world.axis_sizes = {kRanks};
  for (uint32_t c = 0; c < 60; ++c) {
    TemplateClass tensors;
    const int64_t rows = 4096 + 64 * c;
    tensors.shape = {rows, 512};
    IntervalList list;
    for (uint32_t r = 0; r < kRanks; ++r) {
      const Interval part{rows * r / kRanks, rows * (r + 1) / kRanks};
      if (!part.empty()) list.intervals.push_back(part);
      list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
    }
    world.lists.push_back(list);
    world.lists.push_back({{{0, 512}}, {0, 1}});
    tensors.products = {{{{2 * c, {0}}, {2 * c + 1, {}}}}};
    world.classes.push_back(tensors);
    world.names.push_back(fmt::format("t{:03}", c));
    world.class_of.push_back(c);
  }
  world.Canonicalize();
  const std::string bytes = world.Serialize();
  TemplateOracle oracle;
  oracle.Add(DigestOf(bytes), bytes);
  std::vector<MemberInfo> members(kRanks);
  std::vector<const MemberInfo*> all;
  for (uint32_t r = 0; r < kRanks; ++r) {
    members[r].world_template = DigestOf(bytes);
    members[r].coordinates = {r};
    all.push_back(&members[r]);
  }
  EXPECT_TRUE(oracle.Covers(all, all));
  const std::vector<const MemberInfo*> fewer(all.begin(), all.end() - 1);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(oracle.Covers(fewer, all));
  const auto took = std::chrono::steady_clock::now() - begin;
  RecordProperty("check_us", static_cast<int>(took / std::chrono::microseconds(20)));
  EXPECT_LT(took, std::chrono::seconds(2));  // 20 checks; a few hundred microseconds each
}

}  // namespace
}  // namespace bascule
