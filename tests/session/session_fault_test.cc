// Faults and bad input against real sessions: damage, late and dead ranks, forks, restarts.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>

#include "tests/session/job_fixture.h"

namespace bascule {
namespace {

using testing::Soon;
using testing::ToyJob;

// Writable mappings of this process whose name contains `label`.
std::vector<std::pair<std::byte*, size_t>> Mappings(const std::string& label) {
  std::vector<std::pair<std::byte*, size_t>> found;
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find(label) == std::string::npos || line.find("rw-s") == std::string::npos) continue;
    uintptr_t begin = 0;
    uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) continue;
    found.emplace_back(reinterpret_cast<std::byte*>(begin), end - begin);
  }
  return found;
}

// Flips one bit of each arena of every trainer in this process.
int DamageArenas(size_t offset) {
  int damaged = 0;
  for (auto& [data, bytes] : Mappings("arena")) {
    if (offset >= bytes) continue;
    data[offset] ^= std::byte{1};
    ++damaged;
  }
  return damaged;
}

TEST(SessionFault, AChunkDamagedInTheArenaIsCaughtAndNothingChanges) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  for (uint64_t version = 2; version <= 5; ++version) {
    job.Publish(version);
    ASSERT_GT(DamageArenas(64), 0) << "no arena found in /proc/self/maps";
    auto update = job.receivers[0]->Poll(Soon());
    ASSERT_TRUE(update.ok());
    ASSERT_TRUE((*update)->Stage(Soon()).ok());
    Status staged = (*update)->WaitStaged(Soon());
    EXPECT_EQ(staged.code(), Code::kDataLoss) << staged.ToString();
    EXPECT_EQ(staged.tensor(), "model.embed.weight");
    EXPECT_EQ(staged.peer(), "trainer 0");
    EXPECT_EQ((*update)->Commit(Soon()).code(), Code::kNotDecided);
    EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
    EXPECT_TRUE(job.receivers[0]->Servable().ok());
    DamageArenas(64);  // mends it
  }
  job.Update(5);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(5), 0);
}

TEST(SessionFault, AFastPublisherRetiresAVersionUnderASlowEngine) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  auto old = job.receivers[0]->Poll(Soon());
  ASSERT_TRUE(old.ok());
  for (uint64_t version = 2; version <= 4; ++version) job.Publish(version);
  ASSERT_TRUE((*old)->Stage(Soon(1000)).ok());
  Status staged = (*old)->WaitStaged(Soon());
  EXPECT_EQ(staged.code(), Code::kRetired) << staged.ToString();
  job.Update(4);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(4), 0);
}

TEST(SessionFault, PublishDoesNotWaitForAnEngineThatNeverReads) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  for (uint64_t version = 1; version <= 20; ++version) job.Publish(version);
  job.Update(20);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(20), 0);
}

TEST(SessionFault, ReplicasThatDifferAreNotPublished) {
  ToyJob job;
  job.AddTrainers(2, -1);
  job.trainer_memory[0]->Fill(1);
  job.trainer_memory[1]->Fill(1);
  job.trainer_memory[1]->storage[2][3] ^= 1;
  auto first = job.senders[0]->Publish(1, Soon());
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  auto second = job.senders[1]->Publish(1, Soon());
  Status waited = (*first)->Wait(Soon());
  EXPECT_EQ(waited.code(), Code::kAborted) << waited.ToString();
  EXPECT_NE(waited.message().find("model.layers.0.k.weight"), std::string::npos)
      << waited.ToString();
}

TEST(SessionFault, ACallInAForkedChildReturnsForked) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  pid_t child = fork();
  if (child == 0) {
    bool ok = job.senders[0]->Publish(2, Soon(500)).status().code() == Code::kForked;
    ok = ok && job.receivers[0]->Poll(Soon(500)).status().code() == Code::kForked;
    ok = ok && job.senders[0]->Close(Soon(500)).code() == Code::kForked;
    ok = ok && CoordinatorServer::Start(ToyJob::NewJob()).status().code() == Code::kForked;
    testing::RankMemory memory(testing::ToyModel(), 1, 2, -1);
    auto anew = WeightReceiver::Connect(job.job, {.engine = "e1"}, memory.layout, Soon(500));
    ok = ok && anew.status().code() == Code::kForked;
    _exit(ok ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  job.Update(1);  // the parent is none the worse
  EXPECT_EQ(job.rollout_memory[0]->Wrong(1), 0);
}

TEST(SessionFault, CallsAfterCloseReturnClosed) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  ASSERT_TRUE(job.receivers[0]->Close(Soon()).ok());
  EXPECT_EQ(job.receivers[0]->Poll(Soon()).status().code(), Code::kClosed);
  ASSERT_TRUE(job.senders[0]->Close(Soon()).ok());
  EXPECT_EQ(job.senders[0]->Publish(1, Soon()).status().code(), Code::kClosed);
}

TEST(SessionFault, ARankThatLeftRejoinsEmptyAndIsUpdatedToTheHeldVersion) {
  ToyJob job;
  job.AddTrainers(2);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  job.Update(1);
  job.receivers.pop_back();  // leaves
  testing::RankMemory fresh(testing::ToyModel(), 1, 2, 1);
  auto again = WeightReceiver::Connect(job.job, {.engine = "e0", .rank = 1, .world_size = 2},
                                       fresh.layout, Soon());
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  job.receivers.push_back(std::move(*again));
  EXPECT_EQ(job.receivers[0]->EngineServable(Soon()).code(), Code::kUnavailable);
  job.Update(1);  // offered again, because one rank does not serve it
  EXPECT_EQ(fresh.Wrong(1), 0);
  EXPECT_TRUE(job.receivers[0]->EngineServable(Soon()).ok());
}

TEST(SessionFault, ATrainerWorldThatRestartsIsANewTerm) {
  ToyJob job;
  auto server = CoordinatorServer::Start(job.job);
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  job.job.coordinator = (*server)->address();
  job.AddTrainers(2);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  const uint64_t old_term = job.senders[0]->term();
  // Rank 1 dies and comes back; rank 0 is told that its term is over.
  job.senders.pop_back();
  testing::RankMemory memory(testing::ToyModel(), 1, 2, 0);
  auto rank1 = WeightSender::Connect(job.job, {.rank = 1, .world_size = 2}, memory.layout, Soon());
  ASSERT_TRUE(rank1.ok()) << rank1.status().ToString();
  EXPECT_GT((*rank1)->term(), old_term);
  auto stale = job.senders[0]->Publish(2, Soon());
  ASSERT_FALSE(stale.ok());
  EXPECT_EQ(stale.status().code(), Code::kStaleTerm) << stale.status().ToString();
  job.senders.clear();
  auto rank0 = WeightSender::Connect(job.job, {.rank = 0, .world_size = 2},
                                     job.trainer_memory[0]->layout, Soon());
  ASSERT_TRUE(rank0.ok()) << rank0.status().ToString();
  job.trainer_memory[0]->Fill(9);
  memory.Fill(9);
  ASSERT_TRUE((*rank0)->Publish(1, Soon()).ok());  // versions start anew with the term
  ASSERT_TRUE((*rank1)->Publish(1, Soon()).ok());
  job.Update(1);
  EXPECT_EQ(job.rollout_memory[0]->Wrong(9), 0);
}

TEST(SessionFault, TheCoordinatorIsRestartedAndTheJobGoesOn) {
  ToyJob job;
  auto server = CoordinatorServer::Start(job.job);
  ASSERT_TRUE(server.ok());
  const std::string address = (*server)->address();
  job.job.coordinator = address;
  job.AddTrainers(2);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  job.Update(1);
  const uint64_t term = job.senders[0]->term();
  (*server)->Stop();
  *server = nullptr;
  // Weights stay published while it is away: they are in the arenas.
  JobOptions same = job.job;
  same.listen = address;
  auto restarted = CoordinatorServer::Start(same);
  ASSERT_TRUE(restarted.ok()) << restarted.status().ToString();
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // beats: everybody rejoins
  job.Publish(2);
  EXPECT_EQ(job.senders[0]->term(), term);
  job.Update(2);
  for (auto& memory : job.rollout_memory) EXPECT_EQ(memory->Wrong(2), 0);
}

TEST(SessionFault, AFollowerWhoseLeaderDiesIsInDoubtThenLearnsAbort) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  job.Publish(1);
  job.Update(1);
  job.Publish(2);
  std::vector<std::shared_ptr<Update>> updates;
  for (auto& receiver : job.receivers) {
    auto update = receiver->Poll(Soon());
    ASSERT_TRUE(update.ok());
    updates.push_back(*update);
    ASSERT_TRUE(updates.back()->Stage(Soon()).ok());
  }
  for (auto& update : updates) ASSERT_TRUE(update->WaitStaged(Soon()).ok());
  job.receivers.erase(job.receivers.begin());  // rank 0 leaves without a decision: gone for good
  updates.erase(updates.begin());
  Status outcome = updates[0]->Commit(Soon(3000));
  EXPECT_EQ(outcome.code(), Code::kNotDecided) << outcome.ToString();
  EXPECT_EQ(job.rollout_memory[1]->Wrong(1), 0);
  EXPECT_EQ(job.receivers[0]->serving().version, 1u);
}

TEST(SessionFault, AFollowerIsToldWhoHeldTheUpdateUp) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 3, 1);
  job.Publish(1);
  std::vector<std::shared_ptr<Update>> updates;
  for (auto& receiver : job.receivers) {
    auto update = receiver->Poll(Soon());
    ASSERT_TRUE(update.ok());
    updates.push_back(*update);
  }
  for (size_t rank : {0UL, 1UL}) ASSERT_TRUE(updates[rank]->Stage(Soon()).ok());
  for (size_t rank : {0UL, 1UL}) ASSERT_TRUE(updates[rank]->WaitStaged(Soon()).ok());
  // Rank 2 never stages; rank 1 is the first to have waited long enough.
  Status outcome = updates[1]->Commit(Soon(2000));
  EXPECT_EQ(outcome.code(), Code::kNotDecided) << outcome.ToString();
  EXPECT_NE(outcome.message().find("not staged on rank(s) 2"), std::string::npos)
      << outcome.ToString();
  outcome = updates[0]->Commit(Soon(2000));
  EXPECT_EQ(outcome.code(), Code::kNotDecided) << outcome.ToString();
  EXPECT_NE(outcome.message().find("engine e0 rank 1 waited"), std::string::npos)
      << outcome.ToString();
}

TEST(SessionFault, ClosingASenderEndsItsPublishThatWaits) {
  for (int round = 0; round < 5; ++round) {
    testing::RankMemory memory(testing::ToyModel(), 0, 2, 0);
    JobOptions options = ToyJob::NewJob();
    options.coordinator = kHostHere;
    auto sender =
        WeightSender::Connect(options, {.rank = 0, .world_size = 2}, memory.layout, Soon());
    ASSERT_TRUE(sender.ok()) << sender.status().ToString();
    Status published;
    std::thread publisher([&] { published = (*sender)->Publish(1, Soon(60000)).status(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * round));
    const auto start = std::chrono::steady_clock::now();
    (void)(*sender)->Close(Soon(1000));
    publisher.join();
    EXPECT_EQ(published.code(), Code::kClosed) << published.ToString();
    // Far below the publication's own deadline; the bound of Close is a second or two.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  }
}

TEST(SessionFault, PollingFollowersWaitForTheirLeaderAtMostToTheDeadline) {
  ToyJob job;
  job.AddTrainers(1);
  job.AddEngine("e0", 2, 1);
  const auto start = std::chrono::steady_clock::now();
  auto update = job.receivers[1]->Poll(Soon(300));
  ASSERT_FALSE(update.ok());
  EXPECT_EQ(update.status().code(), Code::kDeadlineExceeded) << update.status().ToString();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(SessionFault, AnUnknownSettingInTheEnvironmentIsAnError) {
  setenv("BASCULE_TIMOUT", "3", 1);
  testing::RankMemory memory(testing::ToyModel(), 0, 1, -1);
  JobOptions job = ToyJob::NewJob();
  job.coordinator = kHostHere;
  auto sender = WeightSender::Connect(job, {}, memory.layout, Soon());
  unsetenv("BASCULE_TIMOUT");
  ASSERT_FALSE(sender.ok());
  EXPECT_NE(sender.status().message().find("BASCULE_TIMOUT"), std::string::npos);
}

}  // namespace
}  // namespace bascule
