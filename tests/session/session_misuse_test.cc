// Calls out of order, options out of range, handles that were lost, layouts that change half way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tests/session/job_fixture.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;
using testing::RankMemory;
using testing::Soon;
using testing::ToyJob;
using testing::ToyModel;

std::vector<std::shared_ptr<Update>> Staged(ToyJob* job) {
  std::vector<std::shared_ptr<Update>> updates;
  for (auto& receiver : job->receivers) {
    auto update = receiver->Poll(Soon());
    EXPECT_TRUE(update.ok() && *update != nullptr) << update.status().ToString();
    updates.push_back(*update);
  }
  for (auto& update : updates) EXPECT_TRUE(update->Stage(Soon()).ok());
  for (auto& update : updates) EXPECT_TRUE(update->WaitStaged(Soon()).ok());
  return updates;
}

TEST(SessionMisuse, ADecidedUpdateWhoseHandleWasLostIsGivenBackByPoll) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  job.Update(1);
  job.Publish(2);
  {
    auto updates = Staged(&job);
    for (auto& update : updates) ASSERT_TRUE(update->Decide(Soon()).ok());
  }  // an exception between Decide and Commit loses both handles
  for (auto& receiver : job.receivers) EXPECT_EQ(receiver->state(), ReceiverState::kDecided);
  job.Publish(3);
  for (size_t rank = 0; rank < 2; ++rank) {
    auto update = job.receivers[rank]->Poll(Soon());
    ASSERT_TRUE(update.ok() && *update != nullptr) << update.status().ToString();
    EXPECT_EQ((*update)->id().version, 2u);
    Status committed = (*update)->Commit(Soon());
    ASSERT_TRUE(committed.ok()) << committed.ToString();
    EXPECT_EQ(job.rollout_memory[rank]->Wrong(2), 0);
  }
  job.Update(3);
}

TEST(SessionMisuse, ReadyMayBeCalledAnyNumberOfTimesByOneRankFirst) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  std::vector<std::shared_ptr<Update>> updates;
  for (auto& receiver : job.receivers) updates.push_back(*receiver->Poll(Soon()));
  ASSERT_TRUE(updates[0]->Stage(Soon()).ok());
  ASSERT_TRUE(updates[0]->WaitStaged(Soon()).ok());
  // Rank 0 goes on generating, and asks at every step; rank 1 comes late.
  for (int i = 0; i < 500; ++i) {
    auto ready = updates[0]->Ready(Soon());
    ASSERT_TRUE(ready.ok()) << ready.status().ToString();
    EXPECT_FALSE(*ready);
  }
  ASSERT_TRUE(updates[1]->Stage(Soon()).ok());
  ASSERT_TRUE(updates[1]->WaitStaged(Soon()).ok());
  EXPECT_TRUE(*updates[0]->Ready(Soon()));
  // Ranks that step together are never so far apart: it gets the newest answer, at each of as many
  // calls as rank 0 made.
  for (int i = 0; i < 400; ++i) EXPECT_TRUE(*updates[1]->Ready(Soon()));
  // The next update counts from the start.
  for (auto& update : updates) ASSERT_TRUE(update->Commit(Soon()).ok());
  job.Publish(2);
  job.Update(2);
}

TEST(SessionMisuse, TheKthReadyIsAnsweredAlikeOnEveryRank) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  std::vector<std::shared_ptr<Update>> updates;
  for (auto& receiver : job.receivers) updates.push_back(*receiver->Poll(Soon()));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(*updates[0]->Ready(Soon()));
  for (auto& update : updates) ASSERT_TRUE(update->Stage(Soon()).ok());
  for (auto& update : updates) ASSERT_TRUE(update->WaitStaged(Soon()).ok());
  EXPECT_TRUE(*updates[0]->Ready(Soon()));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(*updates[1]->Ready(Soon())) << i;
  EXPECT_TRUE(*updates[1]->Ready(Soon()));
  EXPECT_EQ(updates[1]->Ready(Soon(100)).status().code(), Code::kDeadlineExceeded);
}

TEST(SessionMisuse, ARankThatMissedPollsIsInStepAtOnce) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  for (int i = 0; i < 300; ++i) EXPECT_EQ(*job.receivers[0]->Poll(Soon()), nullptr);
  EXPECT_EQ(*job.receivers[1]->Poll(Soon()), nullptr);
  EXPECT_EQ(job.receivers[1]->Poll(Soon(100)).status().code(), Code::kDeadlineExceeded);
  job.Publish(1);
  // Rank 0 gave two updates up before rank 1 polled at all.
  for (int i = 0; i < 2; ++i) ASSERT_NE(*job.receivers[0]->Poll(Soon()), nullptr);
  job.Update(1);
  job.Publish(2);
  ASSERT_NE(*job.receivers[0]->Poll(Soon()), nullptr);
  job.Update(2);
  for (auto& memory : job.rollout_memory) EXPECT_EQ(memory->Wrong(2), 0);
}

TEST(SessionMisuse, Rank0MayCloseRightAfterItsCommit) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  auto updates = Staged(&job);
  ASSERT_TRUE(updates[0]->Commit(Soon()).ok());
  updates.erase(updates.begin());
  job.receivers.erase(job.receivers.begin());
  Status committed = updates[0]->Commit(Soon());
  EXPECT_TRUE(committed.ok()) << committed.ToString();
  EXPECT_EQ(job.rollout_memory[1]->Wrong(1), 0);
}

TEST(SessionMisuse, ReadyTellsThatTheUpdateHasEnded) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  auto updates = Staged(&job);
  ASSERT_TRUE(updates[1]->Abort(Soon()).ok());
  for (auto& update : updates) {
    Status ready = update->Ready(Soon()).status();
    EXPECT_EQ(ready.code(), Code::kNotDecided) << ready.ToString();
    EXPECT_THAT(ready.message(), HasSubstr("given up by the caller"));
  }
  updates = Staged(&job);
  ASSERT_TRUE(updates[0]->Commit(Soon()).ok());  // without asking
  auto ready = updates[1]->Ready(Soon());
  EXPECT_TRUE(ready.ok() && *ready) << ready.status().ToString();
  ASSERT_TRUE(updates[1]->Commit(Soon()).ok());
}

TEST(SessionMisuse, APollWaitsForARank0ThatIsYetToConnect) {
  ToyJob job;
  job.AddTrainers(1);
  job.Publish(1);
  std::vector<std::unique_ptr<RankMemory>> memory;
  std::vector<std::unique_ptr<WeightReceiver>> receivers(2);
  for (uint32_t rank : {0U, 1U}) {
    memory.push_back(std::make_unique<RankMemory>(ToyModel(), rank, 2, 1));
  }
  auto connect = [&](uint32_t rank) {
    auto receiver = WeightReceiver::Connect(
        job.job, {.engine = "e0", .rank = rank, .world_size = 2}, memory[rank]->layout, Soon());
    ASSERT_TRUE(receiver.ok()) << receiver.status().ToString();
    receivers[rank] = std::move(*receiver);
  };
  connect(1);
  EXPECT_EQ(receivers[1]->Poll(Soon(200)).status().code(), Code::kUnavailable);
  Result<std::shared_ptr<Update>> polled = Status(Code::kInternal, "");
  std::thread early([&] { polled = receivers[1]->Poll(Soon()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  connect(0);
  auto first = receivers[0]->Poll(Soon());
  early.join();
  ASSERT_TRUE(first.ok() && *first != nullptr) << first.status().ToString();
  ASSERT_TRUE(polled.ok() && *polled != nullptr) << polled.status().ToString();
  EXPECT_EQ((*polled)->id(), (*first)->id());
}

TEST(SessionMisuse, AnEngineMayConnectBetweenTwoTrainerWorlds) {
  JobOptions options = ToyJob::NewJob();
  auto server = CoordinatorServer::Start(options);
  ASSERT_TRUE(server.ok());
  ToyJob job;
  job.job = options;
  job.job.coordinator = (*server)->address();
  job.AddTrainers(1);
  job.senders.clear();
  job.trainer_memory.clear();
  job.AddEngine("e0", 1, -1);
  EXPECT_EQ(*job.receivers[0]->Poll(Soon()), nullptr);
  job.AddTrainers(1);
  job.Publish(1);
  job.Update(1);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
}

TEST(SessionMisuse, ARolloutIsToldThatItHostsNoCoordinator) {
  RankMemory memory(ToyModel(), 0, 1, -1);
  JobOptions job = ToyJob::NewJob();
  job.coordinator = kHostHere;
  Status status = WeightReceiver::Connect(job, {.engine = "e"}, memory.layout, Soon()).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("give JobOptions::coordinator"));
}

TEST(SessionMisuse, CommitAndWaitBeforeStageSaySoAndHarmNothing) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  auto update = *job.receivers[0]->Poll(Soon());
  for (const Status& status :
       {update->WaitStaged(Soon()), update->Decide(Soon()), update->Commit(Soon())}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("call Stage first"));
  }
  ASSERT_TRUE(update->Stage(Soon()).ok());
  ASSERT_TRUE(update->WaitStaged(Soon()).ok());
  Status committed = update->Commit(Soon());
  ASSERT_TRUE(committed.ok()) << committed.ToString();
  EXPECT_TRUE(update->Commit(Soon()).ok());
  Status aborted = update->Abort(Soon());
  EXPECT_EQ(aborted.code(), Code::kBusy);
  EXPECT_THAT(aborted.message(), HasSubstr("nothing to abort"));
  EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
}

TEST(SessionMisuse, OptionsOutOfRangeAreSaid) {
  RankMemory memory(ToyModel(), 0, 1, -1);
  JobOptions job = ToyJob::NewJob();
  job.coordinator = kHostHere;
  for (uint32_t held : {0U, 65U, 1000000U, 0xFFFFFFFFU}) {
    EXPECT_EQ(
        WeightSender::Connect(job, {.versions_held = held}, memory.layout, Soon()).status().code(),
        Code::kInvalidArgument);
  }
  EXPECT_TRUE(WeightSender::Connect(job, {.versions_held = 64}, memory.layout, Soon()).ok());
  for (int threads : {0, -1, 1025, 1 << 30}) {
    EXPECT_EQ(
        WeightSender::Connect(job, {.threads = threads}, memory.layout, Soon()).status().code(),
        Code::kInvalidArgument);
    EXPECT_EQ(
        WeightReceiver::Connect(job, {.engine = "e", .threads = threads}, memory.layout, Soon())
            .status()
            .code(),
        Code::kInvalidArgument);
  }
  // A coordinator that cannot be hosted is an error, not the end of the process.
  for (const char* listen : {"", "nonsense", "1.2.3.4:0"}) {
    JobOptions bad = job;
    bad.listen = listen;
    EXPECT_FALSE(WeightSender::Connect(bad, {}, memory.layout, Soon(500)).ok()) << listen;
  }
  JobOptions bad = job;
  bad.heartbeat = std::chrono::milliseconds(0);
  EXPECT_FALSE(WeightSender::Connect(bad, {}, memory.layout, Soon(500)).ok());
}

TEST(SessionMisuse, ConnectEndsByItsDeadlineWhereNobodyAnswers) {
  RankMemory memory(ToyModel(), 0, 1, -1);
  JobOptions job = ToyJob::NewJob();
  job.coordinator = "127.0.0.1:1";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(WeightSender::Connect(job, {}, memory.layout, Soon(0)).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_EQ(WeightReceiver::Connect(job, {.engine = "e"}, memory.layout, Soon(200)).status().code(),
            Code::kUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(SessionMisuse, DescriptorsThatAreUsedUpAreAnError) {
  const pid_t child = fork();
  if (child == 0) {
    // A process that has connected nowhere yet.
    rlimit limit{20, 20};
    RankMemory memory(ToyModel(), 0, 1, -1);
    JobOptions job = ToyJob::NewJob();
    job.coordinator = kHostHere;
    setrlimit(RLIMIT_NOFILE, &limit);
    const Code code = WeightSender::Connect(job, {}, memory.layout, Soon()).status().code();
    _exit(code == Code::kResourceExhausted ? 0 : code == Code::kForked ? 2 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "an earlier test of this process has connected";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(SessionMisuse, AfterUpdateLayoutTheRankServesNothingUntilItCommits) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  RankMemory moved(ToyModel(), 0, 1, -1);  // other memory, never landed in
  ASSERT_TRUE(job.receivers[0]->UpdateLayout(moved.layout, Soon()).ok());
  EXPECT_TRUE(job.receivers[0]->serving().none());
  EXPECT_EQ(job.receivers[0]->Servable().code(), Code::kUnavailable);
  job.Update(1);  // the version that it had served is offered again
  EXPECT_EQ(moved.Wrong(1), 0);
  EXPECT_TRUE(job.receivers[0]->Servable().ok());
}

// A coordinator that is away while the layout changes: nothing is half applied, on either side.
TEST(SessionMisuse, AnUpdateLayoutThatFailedLeavesEverythingAsItWas) {
  ToyJob job;
  auto server = CoordinatorServer::Start(job.job);
  ASSERT_TRUE(server.ok());
  job.job.coordinator = (*server)->address();
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  JobOptions again = job.job;
  again.listen = (*server)->address();
  (*server)->Stop();
  server->reset();
  RankMemory source(ToyModel(), 0, 1, -1);
  RankMemory target(ToyModel(), 0, 1, -1);
  EXPECT_FALSE(job.senders[0]->UpdateLayout(source.layout, Soon(300)).ok());
  EXPECT_FALSE(job.receivers[0]->UpdateLayout(target.layout, Soon(300)).ok());
  EXPECT_EQ(job.receivers[0]->serving().version, 1u);
  server = CoordinatorServer::Start(again);
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  job.Publish(2);  // from the old memory
  job.Update(2);   // into the old memory
  EXPECT_EQ(job.rollout_memory[0]->Wrong(2), 0);
  ASSERT_TRUE(job.senders[0]->UpdateLayout(source.layout, Soon()).ok());
  ASSERT_TRUE(job.receivers[0]->UpdateLayout(target.layout, Soon()).ok());
  source.Fill(3);
  ASSERT_TRUE(job.senders[0]->Publish(3, Soon()).ok());
  job.Update(3);
  EXPECT_EQ(target.Wrong(3), 0);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(2), 0);
}

// One tensor at the trainer, two at the rollout, in one chunk.
TEST(SessionMisuse, ATensorThatIsTiedAtTheTrainerOnlyLandsTwice) {
  RankMemory trainer({{"embed", {7, 16}}, {"norm", {16}}}, 0, 1, -1);
  trainer.layout.aliases = {{"head", "embed"}};
  RankMemory rollout({{"embed", {7, 16}}, {"head", {7, 16}}, {"norm", {16}}}, 0, 1, -1);
  JobOptions job = ToyJob::NewJob();
  job.coordinator = kHostHere;
  auto sender = WeightSender::Connect(job, {}, trainer.layout, Soon());
  ASSERT_TRUE(sender.ok()) << sender.status().ToString();
  job.coordinator = (*sender)->coordinator();
  auto receiver = WeightReceiver::Connect(job, {.engine = "e"}, rollout.layout, Soon());
  ASSERT_TRUE(receiver.ok()) << receiver.status().ToString();
  for (uint64_t version = 1; version <= 18; ++version) {
    trainer.Fill(version);
    ASSERT_TRUE((*sender)->Publish(version, Soon()).ok());
    auto update = *(*receiver)->Poll(Soon());
    ASSERT_NE(update, nullptr);
    ASSERT_TRUE(update->Stage(Soon()).ok());
    Status staged = update->WaitStaged(Soon());
    ASSERT_TRUE(staged.ok()) << staged.ToString();
    Status committed = update->Commit(Soon());
    ASSERT_TRUE(committed.ok()) << committed.ToString();
    EXPECT_EQ(rollout.storage[0], trainer.storage[0]);
    EXPECT_EQ(rollout.storage[1], trainer.storage[0]);
    EXPECT_EQ(rollout.storage[2], trainer.storage[1]);
    ASSERT_TRUE((*receiver)->Servable().ok()) << (*receiver)->Servable().ToString();
  }
  receiver->reset();
}

}  // namespace
}  // namespace bascule
