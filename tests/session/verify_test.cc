// CompareRanks and CompareWithLayout against live jobs.
#include "bascule/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/session/job_fixture.h"

namespace bascule {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RankMemory;
using testing::Soon;
using testing::ToyJob;
using testing::ToyModel;

RankName Trainer(uint32_t rank) { return {"", rank}; }
RankName Rollout(uint32_t rank) { return {"e0", rank}; }

// The number of elements that both memories hold.
uint64_t CommonElements(RankMemory* a, RankMemory* b) {
  std::set<std::pair<uint32_t, int64_t>> mine;
  a->ForEach([&](uint32_t tensor, int64_t element, uint16_t&) { mine.insert({tensor, element}); });
  uint64_t common = 0;
  b->ForEach([&](uint32_t tensor, int64_t element, uint16_t&) {
    common += mine.count({tensor, element});
  });
  return common;
}

TEST(ParseRankName, TakesBothWaysOfWriting) {
  for (const char* text : {"trainer:3", "trainer 3"}) {
    auto name = ParseRankName(text);
    ASSERT_TRUE(name.ok()) << name.status().ToString();
    EXPECT_EQ(name->ToString(), "trainer 3");
  }
  for (const char* text : {"a:b:12", "engine a:b rank 12"}) {
    auto name = ParseRankName(text);
    ASSERT_TRUE(name.ok()) << name.status().ToString();
    EXPECT_EQ(name->ToString(), "engine a:b rank 12");
  }
  for (const char* text : {"", "e0", "e0:", ":1", "e0:-1", "e0:1x", "e0:4294967296", "trainer "}) {
    EXPECT_EQ(ParseRankName(text).status().code(), Code::kInvalidArgument) << text;
  }
}

TEST(CompareRanks, FindsWhatDiffersAndNamesIt) {
  ToyJob job;
  job.AddTrainers(3);
  job.AddEngine("e0", 2, 1);
  job.Publish(4);
  job.Update(4);
  uint64_t total = 0;
  for (uint32_t trainer = 0; trainer < 3; ++trainer) {
    for (uint32_t rollout = 0; rollout < 2; ++rollout) {
      auto found = CompareRanks(job.job, Trainer(trainer), Rollout(rollout), {}, Soon());
      ASSERT_TRUE(found.ok()) << found.status().ToString();
      EXPECT_TRUE(found->equal());
      EXPECT_EQ(found->version.version, 4u);
      EXPECT_EQ(found->elements, CommonElements(job.trainer_memory[trainer].get(),
                                                job.rollout_memory[rollout].get()));
      EXPECT_EQ(found->bytes, 2 * found->elements);
      total += found->elements;
    }
  }
  EXPECT_GT(total, 0u);
  job.rollout_memory[1]->storage[4][5] ^= 1;  // model.layers.1.q.weight
  std::vector<std::string> different;
  for (uint32_t trainer = 0; trainer < 3; ++trainer) {
    auto found = CompareRanks(job.job, Rollout(1), Trainer(trainer), {}, Soon());
    ASSERT_TRUE(found.ok()) << found.status().ToString();
    different.insert(different.end(), found->different.begin(), found->different.end());
  }
  EXPECT_THAT(different, ElementsAre("model.layers.1.q.weight"));
}

TEST(CompareRanks, RolloutsOfTwoEngines) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  job.AddEngine("e1", 2, 0);
  job.receivers.erase(job.receivers.begin());  // e0 leaves
  auto gone = CompareRanks(job.job, Rollout(0), {"e1", 1}, {}, Soon());
  EXPECT_EQ(gone.status().code(), Code::kNotFound) << gone.status().ToString();
  EXPECT_THAT(gone.status().message(), HasSubstr("trainer 0, engine e1 rank 0"));
  auto nothing = CompareRanks(job.job, {"e1", 0}, {"e1", 1}, {}, Soon());
  EXPECT_EQ(nothing.status().code(), Code::kUnavailable) << nothing.status().ToString();
  job.Update(1);
  auto found = CompareRanks(job.job, {"e1", 0}, {"e1", 1}, {}, Soon());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_FALSE(found->equal()) << "ranks cut by rows have nothing in common";
  EXPECT_EQ(found->elements, 0u);
  EXPECT_EQ(found->only_left.size(), ToyModel().size());
}

TEST(CompareRanks, VersionsThatDifferAreSaid) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  for (uint64_t version = 2; version <= 4; ++version) job.Publish(version);
  auto found = CompareRanks(job.job, Rollout(0), Trainer(0), {}, Soon(2000));
  EXPECT_EQ(found.status().code(), Code::kRetired) << found.status().ToString();
  EXPECT_EQ(found.status().peer(), "trainer 0");
  job.Update(4);
  found = CompareRanks(job.job, Rollout(0), Trainer(0), {}, Soon());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_TRUE(found->equal());
}

TEST(CompareRanks, GoesOnWhileTheJobDoes) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  std::atomic<bool> stop{false};
  std::atomic<int> compared{0};
  std::thread tool([&] {
    while (!stop) {
      auto found = CompareRanks(job.job, Rollout(0), Trainer(0), {}, Soon());
      if (!found.ok()) {
        EXPECT_EQ(found.status().code(), Code::kRetired) << found.status().ToString();
        continue;
      }
      EXPECT_TRUE(found->equal());
      ++compared;
    }
  });
  for (uint64_t version = 2; version <= 10; ++version) {
    job.Publish(version);
    job.Update(version);
  }
  while (compared == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  stop = true;
  tool.join();
}

TEST(CompareRanks, AWrongTokenLearnsNothing) {
  ToyJob job;
  job.AddTrainers(1);
  JobOptions guess = job.job;
  guess.token = "guess";
  EXPECT_EQ(CompareRanks(guess, Trainer(0), Trainer(0), {}, Soon()).status().code(),
            Code::kPermissionDenied);
}

TEST(CompareWithLayout, OfACheckpoint) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 2, 1);
  job.Publish(6);
  job.Update(6);
  RankMemory checkpoint(ToyModel(), 0, 1, -1);
  checkpoint.Fill(6);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (const RankName& name : {Trainer(rank), Rollout(rank)}) {
      uint64_t last = 0;
      CompareOptions options;
      options.progress = [&last](uint64_t done, uint64_t total) {
        EXPECT_LE(done, total);
        last = done;
      };
      auto found = CompareWithLayout(job.job, name, checkpoint.layout, options, Soon());
      ASSERT_TRUE(found.ok()) << found.status().ToString();
      EXPECT_TRUE(found->equal()) << name.ToString();
      EXPECT_EQ(last, found->bytes);
      EXPECT_EQ(found->tensors, ToyModel().size());
    }
  }
  checkpoint.storage[3][15] ^= 4;  // in the half of a vector that rank 1 holds
  auto found = CompareWithLayout(job.job, Rollout(1), checkpoint.layout, {}, Soon());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_THAT(found->different, ElementsAre("model.layers.0.norm.weight"));
  checkpoint.layout.tensors[3].name = "other";
  found = CompareWithLayout(job.job, Rollout(1), checkpoint.layout, {}, Soon());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_THAT(found->only_left, ElementsAre("model.layers.0.norm.weight"));
  EXPECT_THAT(found->only_right, ElementsAre("other"));
  checkpoint.layout.tensors[0].shape = {37, 16, 1};
  EXPECT_EQ(CompareWithLayout(job.job, Rollout(1), checkpoint.layout, {}, Soon()).status().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace bascule
