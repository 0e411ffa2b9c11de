// The whole path in one process: real shared memory, real gRPC.
#include <gtest/gtest.h>

#include "tests/session/job_fixture.h"

namespace bascule {
namespace {

using testing::Soon;
using testing::ToyJob;

TEST(Session, WeightsCrossAndAreThoseOfTheTrainers) {
  ToyJob job;
  job.AddTrainers(3);
  job.AddEngine("e0", 2, 1);
  for (uint64_t version = 1; version <= 4; ++version) {
    job.Publish(version);
    job.Update(version);
    for (auto& memory : job.rollout_memory) EXPECT_EQ(memory->Wrong(version), 0);
    for (auto& receiver : job.receivers) {
      EXPECT_EQ(receiver->serving().version, version);
      EXPECT_TRUE(receiver->Servable().ok());
      EXPECT_TRUE(receiver->EngineServable(Soon()).ok());
      Status audit = receiver->Audit(Soon());
      EXPECT_TRUE(audit.ok()) << audit.ToString();
    }
  }
}

TEST(Session, InPlaceLandsAtCommit) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 2, 0, ShadowMode::kNone);
  for (uint64_t version = 1; version <= 3; ++version) {
    job.Publish(version);
    job.Update(version);
    for (auto& memory : job.rollout_memory) EXPECT_EQ(memory->Wrong(version), 0);
  }
}

TEST(Session, PollOffersNothingNewOnceTheEngineServesTheNewest) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 2, 1);
  job.Publish(7);
  job.Update(7);
  for (auto& receiver : job.receivers) {
    auto update = receiver->Poll(Soon());
    ASSERT_TRUE(update.ok()) << update.status().ToString();
    EXPECT_EQ(*update, nullptr);
  }
}

TEST(Session, ABitFlippedAfterCommitIsFoundByTheAuditAndNamed) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  job.rollout_memory[0]->storage[4][100] ^= 0x10;
  Status audit = job.receivers[0]->Audit(Soon());
  EXPECT_EQ(audit.code(), Code::kDataLoss);
  EXPECT_EQ(audit.tensor(), "model.layers.1.q.weight");
}

TEST(Session, AVersionThatDoesNotIncreaseIsRefused) {
  ToyJob job;
  job.AddTrainers(1);
  job.Publish(5);
  auto again = job.senders[0]->Publish(5, Soon());
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), Code::kInvalidArgument);
  EXPECT_NE(again.status().message().find("does not increase"), std::string::npos);
}

TEST(Session, AnotherJobsTokenIsRefused) {
  ToyJob job;
  job.AddTrainers(1);
  testing::RankMemory memory(testing::ToyModel(), 0, 1, -1);
  JobOptions other = job.job;
  other.token = "guess";
  auto receiver = WeightReceiver::Connect(other, {.engine = "e0"}, memory.layout, Soon(2000));
  ASSERT_FALSE(receiver.ok());
  EXPECT_EQ(receiver.status().code(), Code::kPermissionDenied);
}

TEST(Session, TwoLiveRanksWithOneNumberAreRefused) {
  ToyJob job;
  job.AddTrainers(2);
  testing::RankMemory memory(testing::ToyModel(), 1, 2, 0);
  auto twin =
      WeightSender::Connect(job.job, {.rank = 1, .world_size = 2}, memory.layout, Soon(2000));
  ASSERT_FALSE(twin.ok());
  EXPECT_EQ(twin.status().code(), Code::kAlreadyExists) << twin.status().ToString();
}

TEST(Session, AnEngineThatWantsATensorNobodyHasIsToldWhichAtConnect) {
  ToyJob job;
  job.AddTrainers(2);
  auto model = testing::ToyModel();
  model.push_back({"model.layers.9.extra.weight", {4, 4}});
  testing::RankMemory memory(model, 0, 1, -1);
  auto receiver = WeightReceiver::Connect(job.job, {.engine = "e0"}, memory.layout, Soon());
  ASSERT_FALSE(receiver.ok());
  EXPECT_NE(receiver.status().ToString().find("model.layers.9.extra.weight"), std::string::npos)
      << receiver.status().ToString();
}

TEST(Session, ALateEngineGetsTheVersionThatIsHeld) {
  ToyJob job;
  job.AddTrainers(2);
  job.Publish(3);
  job.AddEngine("late", 2, 1);
  job.Update(3);
  for (auto& memory : job.rollout_memory) EXPECT_EQ(memory->Wrong(3), 0);
}

TEST(Session, AbortLeavesTheEngineWhereItWas) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  job.Publish(2);
  auto update = job.receivers[0]->Poll(Soon());
  ASSERT_TRUE(update.ok());
  ASSERT_TRUE((*update)->Stage(Soon()).ok());
  ASSERT_TRUE((*update)->WaitStaged(Soon()).ok());
  ASSERT_TRUE((*update)->Abort(Soon()).ok());
  EXPECT_EQ((*update)->Commit(Soon()).code(), Code::kNotDecided);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
  EXPECT_EQ(job.receivers[0]->serving().version, 1u);
  job.Update(2);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(2), 0);
}

TEST(Session, StepsCanBeCalledApartWithAnExplicitVersion) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 2, 0);
  job.Publish(1);
  VersionId id{job.senders[0]->term(), 1};
  std::vector<std::shared_ptr<Update>> updates;
  for (auto& receiver : job.receivers) {
    auto update = receiver->Open(id);
    ASSERT_TRUE(update.ok());
    updates.push_back(*update);
    Status status = updates.back()->Stage(Soon());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  for (auto& update : updates) ASSERT_TRUE(update->WaitStaged(Soon()).ok());
  for (auto& update : updates) {
    Status status = update->Decide(Soon());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  for (auto& update : updates) ASSERT_TRUE(update->Commit(Soon()).ok());
  for (auto& memory : job.rollout_memory) EXPECT_EQ(memory->Wrong(1), 0);
}

TEST(Session, AFailedHookPoisonsAndTheNextCommitHeals) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.receivers[0]->SetPostCommitHook(
      [](VersionId) { return Status(Code::kInternal, "cache could not be reset"); });
  job.Publish(1);
  auto update = job.receivers[0]->Poll(Soon());
  ASSERT_TRUE(update.ok());
  ASSERT_TRUE((*update)->Stage(Soon()).ok());
  EXPECT_EQ((*update)->Commit(Soon()).code(), Code::kPoisoned);
  EXPECT_EQ(job.receivers[0]->state(), ReceiverState::kPoisoned);
  EXPECT_EQ(job.receivers[0]->Servable().code(), Code::kPoisoned);
  job.receivers[0]->SetPostCommitHook(nullptr);
  job.Update(1);
  EXPECT_TRUE(job.receivers[0]->Servable().ok());
  EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
}

TEST(Session, UpdateLayoutMovesAnEngineToANewSharding) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  testing::RankMemory moved(testing::ToyModel(), 0, 1, -1);
  Status status = job.receivers[0]->UpdateLayout(moved.layout, Soon());
  ASSERT_TRUE(status.ok()) << status.ToString();
  job.Publish(2);
  job.Update(2);
  EXPECT_EQ(moved.Wrong(2), 0);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
}

}  // namespace
}  // namespace bascule
