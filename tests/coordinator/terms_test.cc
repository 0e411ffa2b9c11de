// Terms: when they open, what they end, that they never go back, and coordinators that restart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/core.h"
#include "tests/coordinator/core_driver.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;

TEST(CoordinatorTerm, OpensAtTheFirstTrainerAndCompletesAtTheLast) {
  CoreDriver d(2);
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_FALSE(d.core.WaitComplete(100, d.now).has_value());
  // Nothing is published before.
  EXPECT_EQ(d.core.Held(d.HeldBy(100, 1), d.now).status().code(), Code::kUnavailable);
  ASSERT_TRUE(d.Join(1, 101).ok());
  const auto complete = d.core.WaitComplete(100, d.now);
  ASSERT_TRUE(complete.has_value());
  ASSERT_TRUE(complete->ok());
  EXPECT_TRUE((**complete)->complete);
  EXPECT_EQ((**complete)->members.size(), 2u);
  EXPECT_GE(d.core.term(), static_cast<uint64_t>(d.now.wall_ns / 1'000'000));
  ASSERT_TRUE(d.TryHeld(d.HeldBy(100, 1)).ok());
}

TEST(CoordinatorTerm, OfALaterMillisecondIsHigherWhateverItsRandomBits) {
  uint64_t before = 0;
  for (int64_t ms = 1'700'000'000'000; ms < 1'700'000'000'064; ++ms) {
    CoordinatorOptions options = CoreDriver::Options(false, ms);
    options.seed = static_cast<uint64_t>(ms) * 77;
    CoreDriver d(1, false, ms);
    d.core = CoordinatorCore(options);
    ASSERT_TRUE(d.Join(0, 100).ok());
    EXPECT_GT(d.core.term(), before);
    EXPECT_LT(d.core.term(), uint64_t{1} << 53);  // a JSON number holds it
    before = d.core.term();
  }
}

TEST(CoordinatorTerm, IsAboveWhatAnyMemberReported) {
  CoreDriver d(1);
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  d.states[100].highest_term = uint64_t{1} << 60;
  d.Pass(600);
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_GT(d.core.term(), uint64_t{1} << 60);
}

TEST(CoordinatorTerm, AMemberThatReportsAHigherOneOpensOneAbove) {
  for (const int how : {0, 1, 2}) {
    CoreDriver d(1);
    d.JoinAll();
    d.Held(0, 1);
    const uint64_t before = d.core.term();
    const uint64_t higher = before + 1'000'000;
    if (how == 0) {
      d.states[kPoller].highest_term = higher;
      d.Heartbeat(kPoller);
    } else if (how == 1) {
      ASSERT_TRUE(d.core.Serving(kPoller, {higher, 3}, true, d.now).ok());
    } else {
      d.states[901].serving = {higher, 3};
      ASSERT_TRUE(d.JoinRollout(901, "e1").ok());
    }
    EXPECT_GT(d.core.term(), higher);
    EXPECT_EQ(d.core.WaitComplete(100, d.now)->status().code(), Code::kStaleTerm);
    EXPECT_TRUE(d.Heartbeat(100).stale_term);
    // What was available stays offered, until the ranks publish anew.
    EXPECT_EQ(d.Poll().id, (VersionId{before, 1}));
    d.states[100].joined_term = 0;
    ASSERT_TRUE(d.Join(0, 100).ok());
    EXPECT_FALSE(d.Heartbeat(100).stale_term);
    d.Held(0, 1);
    EXPECT_EQ(d.Poll().id, (VersionId{d.core.term(), 1}));
  }
}

TEST(CoordinatorTerm, ARestartedRankOpensTheNextAndTheOthersAreStale) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId open{d.core.term(), 2};
  d.Held(0, 2);
  d.Beat(7, {101});
  // Absence alone opens nothing.
  EXPECT_EQ(d.core.term(), open.term);
  ASSERT_TRUE(d.Join(1, 201).ok());
  EXPECT_GT(d.core.term(), open.term);
  EXPECT_EQ(d.Query(open).state, VersionState::kAborted);

  const Status stale = d.core.Held(d.HeldBy(100, 3), d.now).status();
  EXPECT_EQ(stale.code(), Code::kStaleTerm);
  EXPECT_THAT(stale.message(), HasSubstr("connect anew"));
  EXPECT_THAT(stale.message(), HasSubstr("trainer 1 restarted"));
  EXPECT_EQ(d.core.WaitComplete(100, d.now)->status().code(), Code::kStaleTerm);
  EXPECT_EQ(d.core.Rebind(d.Request(0, 100).member, d.now).status().code(), Code::kStaleTerm);
  const HeartbeatReply beat = d.Heartbeat(100);
  EXPECT_TRUE(beat.member);  // it may still hold what others read
  EXPECT_TRUE(beat.stale_term);
  EXPECT_EQ(beat.term, d.core.term());
  EXPECT_TRUE(d.core.Revoked(100, open, d.now).ok());

  // It reconnects, as it is or as a new incarnation.
  CoreDriver other = d;
  d.states[100] = {};
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_TRUE(d.core.WaitComplete(201, d.now)->ok());
  ASSERT_TRUE(other.Join(0, 300).ok());
  EXPECT_TRUE(other.core.WaitComplete(201, other.now)->ok());
}

TEST(CoordinatorTerm, ThatEndsAbortsWhatIsOpenInItThoughAllItsRanksLive) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  const VersionId open{d.core.term(), 1};
  d.states[kPoller].highest_term = open.term + 1;
  d.Heartbeat(kPoller);
  EXPECT_EQ(d.Query(open).state, VersionState::kAborted);
  EXPECT_THAT(d.Query(open).reason, HasSubstr("is over: a member reported the higher term"));
}

TEST(CoordinatorTerm, AvailableVersionsOfOldTermsStayWhileTheirHoldersDo) {
  CoreDriver d(2, /*replicas=*/true);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId old{d.core.term(), 1};
  d.Beat(7, {101});
  ASSERT_TRUE(d.Join(1, 201).ok());
  ASSERT_TRUE(d.Join(0, 300).ok());  // reconnected with a new sender; the old one lives still
  EXPECT_EQ(d.Poll().id, old);
  EXPECT_TRUE(d.Poll().own_membership);
  const auto members = d.core.MembersFor(old, 0, d.now);
  ASSERT_TRUE(members.ok());
  ASSERT_EQ((*members)->members.size(), 2u);  // trainer 0 as it was, and the rollout
  EXPECT_EQ((*members)->members[0].incarnation, 100u);
  ASSERT_TRUE(d.core.Leave(100, d.now).ok());
  EXPECT_FALSE(d.Poll().offered);
  EXPECT_EQ(d.Query(old).state, VersionState::kRetired);
}

TEST(CoordinatorTerm, ARankThatMovesOnHoldsWhatItSaysItHolds) {
  for (const bool holds : {true, false}) {
    CoreDriver d(1);
    d.JoinAll();
    d.Held(0, 1);
    const VersionId old{d.core.term(), 1};
    d.states[kPoller].highest_term = d.core.term() + 5;
    d.Heartbeat(kPoller);
    d.states[100].joined_term = 0;
    if (!holds) d.states[100].held.clear();
    ASSERT_TRUE(d.Join(0, 100).ok());
    EXPECT_EQ(d.Poll().offered, holds);
    EXPECT_EQ(d.Query(old).state, holds ? VersionState::kAvailable : VersionState::kRetired);
  }
}

TEST(CoordinatorTerm, TwoLiveRanksWithOneNumberAreRefusedByName) {
  CoreDriver d(2);
  d.JoinAll();
  d.Pass(250);
  const Status second = d.Join(1, 201).status();
  EXPECT_EQ(second.code(), Code::kAlreadyExists);
  EXPECT_EQ(second.rank(), 1);
  EXPECT_EQ(second.peer(), "trainer 1");
  EXPECT_THAT(second.message(), HasSubstr("two live ranks with one number"));
  EXPECT_THAT(second.message(), HasSubstr("250 ms ago"));
  EXPECT_THAT(second.message(), HasSubstr("600 ms of silence"));
  EXPECT_EQ(d.core.RivalOf(d.Request(1, 201).member).incarnation, 101u);
  // Silent beyond its deadline, or left: taken over.
  CoreDriver left = d;
  d.Pass(400);
  EXPECT_TRUE(d.Join(1, 201).ok());
  EXPECT_TRUE(left.core.Leave(101, left.now).ok());
  EXPECT_TRUE(left.Join(1, 201).ok());
}

TEST(CoordinatorTerm, AnotherWorldSizeOpensTheNext) {
  CoreDriver d(2);
  d.JoinAll();
  const uint64_t before = d.core.term();
  d.world_size = 3;
  EXPECT_EQ(d.Join(0, 200).status().code(), Code::kAlreadyExists);
  // Nor does a rank with a free number end a world that lives.
  const Status stray = d.Join(2, 202).status();
  EXPECT_EQ(stray.code(), Code::kAlreadyExists);
  EXPECT_THAT(stray.message(), HasSubstr("trainer 2 says that its world has 3 ranks, but trainer"));
  EXPECT_EQ(d.core.term(), before);
  for (uint64_t life : {100U, 101U}) ASSERT_TRUE(d.core.Leave(life, d.now).ok());
  ASSERT_TRUE(d.Join(2, 202).ok());
  EXPECT_GT(d.core.term(), before);
  ASSERT_TRUE(d.Join(0, 200).ok());
  ASSERT_TRUE(d.Join(1, 201).ok());
  EXPECT_TRUE(d.core.WaitComplete(200, d.now)->ok());
  // One incarnation cannot be of two sizes.
  d.world_size = 2;
  EXPECT_FALSE(d.Join(0, 200).ok());
}

TEST(CoordinatorRestart, MembersGoOnInTheirTerm) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const uint64_t term = d.core.term();
  const uint64_t epoch = d.core.epoch();
  d.Pass(1000);
  d.RestartCoordinator();
  EXPECT_TRUE(d.Heartbeat(100).rejoin);
  ASSERT_TRUE(d.Join(1, 101).ok());
  EXPECT_EQ(d.core.term(), term);
  EXPECT_FALSE(d.core.settled());
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  EXPECT_FALSE(d.Poll().offered);  // not all holders are back
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_TRUE(d.core.settled());
  EXPECT_EQ(d.core.term(), term);
  EXPECT_GT(d.core.epoch(), epoch);
  EXPECT_EQ(d.Poll().id, (VersionId{term, 1}));
  EXPECT_TRUE(d.core.WaitComplete(100, d.now)->ok());
  EXPECT_EQ(d.Held(0, 2).state, VersionState::kOpen);
  EXPECT_EQ(d.Held(1, 2).state, VersionState::kAvailable);
}

TEST(CoordinatorRestart, EpochsDoNotComeAgainThoughTheClockStepsBack) {
  CoreDriver d(1);
  d.JoinAll();
  const uint64_t epoch = d.core.epoch();
  d.RestartCoordinator(-900'000);
  JoinRequest request = d.Request(0, 100);
  request.told_epoch = epoch;
  ASSERT_TRUE(d.Join(request).ok());
  EXPECT_GT(d.core.epoch(), epoch);
}

TEST(CoordinatorRestart, DeclaresNothingUntilAllRejoinedOrTheDeadlinePassed) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  const VersionId id{d.core.term(), 1};
  d.RestartCoordinator();
  ASSERT_TRUE(d.Join(0, 100).ok());
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  d.Beat(5);
  EXPECT_EQ(d.Query(id).state, VersionState::kOpen);
  EXPECT_FALSE(d.core.WaitComplete(100, d.now).has_value());
  d.Beat(1);
  EXPECT_EQ(d.Query(id).state, VersionState::kAborted);
  EXPECT_THAT(d.Query(id).reason, HasSubstr("trainer 1 (did not rejoin)"));
  EXPECT_TRUE(d.core.WaitComplete(100, d.now)->ok());
}

TEST(CoordinatorRestart, JudgesAnewWhatNobodyWasTold) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1);
  const VersionId id{d.core.term(), 1};
  d.RestartCoordinator(0, true);
  ASSERT_TRUE(d.Join(0, 100).ok());
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  d.Beat(7);  // rank 1 does not come back: its replica covers
  EXPECT_EQ(d.Query(id).state, VersionState::kAvailable);
}

TEST(CoordinatorRestart, WaitsForWhatRolloutsWereTold) {
  for (const VersionState told : {VersionState::kAvailable, VersionState::kAborted}) {
    CoreDriver d(2);
    d.JoinAll();
    const VersionId id{d.core.term(), 1};
    d.Held(0, 1);
    // Only the rollout was told; the trainers' answers were lost.
    if (told == VersionState::kAvailable) {
      d.Held(1, 1);
      for (uint64_t trainer : {100, 101}) d.states[trainer].held[0].told = VersionState::kOpen;
      d.states[101].held.clear();
    } else {
      d.states[101].held = d.states[100].held;
    }
    d.states[kPoller].told.resize(1);
    d.states[kPoller].told[0].id = id;
    d.states[kPoller].told[0].told = told;
    d.RestartCoordinator();
    ASSERT_TRUE(d.Join(0, 100).ok());
    ASSERT_TRUE(d.Join(1, 101).ok());
    EXPECT_TRUE(d.core.settled());
    d.Beat(2, {kPoller});
    EXPECT_EQ(d.Query(id, 100).state, VersionState::kOpen);
    ASSERT_TRUE(d.JoinRollout(kPoller).ok());
    d.Beat(6);
    EXPECT_EQ(d.Query(id).state, told == VersionState::kAvailable ? VersionState::kRetired : told);
    // What is published from now on does not wait.
    d.Held(0, 2);
    EXPECT_EQ(d.Held(1, 2).state, VersionState::kAvailable);
  }
}

// Ranks whose layouts say nothing of each other's.
class LonelyOracle final : public CoverageOracle {
 public:
  [[nodiscard]] Status Check(const MemberInfo&) const override { return Status::Ok(); }
  [[nodiscard]] bool Covers(std::span<const MemberInfo* const> holders,
                            std::span<const MemberInfo* const> world) const override {
    return TrivialOracle(false).Covers(holders, world);
  }
  [[nodiscard]] uint64_t ReplicaGroup(const MemberInfo& member) const override {
    return member.rank;
  }
  [[nodiscard]] std::string BucketName(const MemberInfo&, size_t, size_t,
                                       std::string*) const override {
    return "";
  }
};

TEST(CoordinatorRestart, WhatARankHeldThatNeverCameBackIsNotTakenForCovered) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  CoordinatorOptions options = CoreDriver::Options(false, 2'000'000);
  options.oracle = std::make_shared<LonelyOracle>();
  d.core = CoordinatorCore(options);
  ASSERT_TRUE(d.Join(0, 100).ok());
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  d.Beat(7);
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kAborted);
}

TEST(CoordinatorRestart, ToldAvailableStays) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId id{d.core.term(), 1};
  // Only trainer 1 was told; trainer 0 knows the version as open.
  ASSERT_EQ(d.states[100].held[0].told, VersionState::kOpen);
  ASSERT_EQ(d.states[101].held[0].told, VersionState::kAvailable);
  d.RestartCoordinator();
  ASSERT_TRUE(d.Join(1, 101).ok());
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_EQ(d.Query(id, 100).state, VersionState::kAvailable);
}

TEST(CoordinatorRestart, ToldAvailableStaysThoughItIsRetiredAtOnce) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId id{d.core.term(), 1};
  d.RestartCoordinator();
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  ASSERT_TRUE(d.Join(1, 101).ok());
  d.Beat(7);
  // Trainer 0 is gone: never aborted, as it was available; but it is no more.
  EXPECT_EQ(d.Query(id).state, VersionState::kRetired);
}

TEST(CoordinatorRestart, ToldAbortedStays) {
  for (const bool from_rollout : {false, true}) {
    CoreDriver d(2, true);
    d.JoinAll();
    HeldRequest request = d.HeldBy(100, 1);
    request.deadline_ns = d.now.wall_ns + 50'000'000;
    ASSERT_TRUE(d.TryHeld(request).ok());
    const VersionId id{d.core.term(), 1};
    d.Beat();
    ASSERT_EQ(d.Query(id).state, VersionState::kAborted);
    HeldVersion told;
    told.id = id;
    told.told = VersionState::kAborted;
    (from_rollout ? d.states[kPoller] : d.states[101]).told = {told};
    d.RestartCoordinator(0, true);
    // Trainer 0 was not told and holds it: judged anew it would be available.
    ASSERT_TRUE(d.Join(0, 100).ok());
    ASSERT_TRUE(d.JoinRollout(kPoller).ok());
    ASSERT_TRUE(d.Join(1, 101).ok());
    d.Beat(7);
    EXPECT_EQ(d.Query(id).state, VersionState::kAborted);
    EXPECT_FALSE(d.Poll().offered);
  }
}

TEST(CoordinatorRestart, WhatWasToldFirstStaysTrueInThisLife) {
  for (const VersionState first : {VersionState::kAvailable, VersionState::kAborted}) {
    CoreDriver d(2, true);
    d.JoinAll();
    d.Held(0, 1);
    const VersionId id{d.core.term(), 1};
    auto told = [&id](VersionState state) {
      std::vector<HeldVersion> list(1);
      list[0].id = id;
      list[0].told = state;
      return list;
    };
    d.states[kPoller].told = told(first);
    d.RestartCoordinator(0, true);
    ASSERT_TRUE(d.JoinRollout(kPoller).ok());
    ASSERT_TRUE(d.Join(0, 100).ok());
    ASSERT_TRUE(d.Join(1, 101).ok());
    EXPECT_EQ(d.Query(id).state, first);
    d.states[901].told =
        told(first == VersionState::kAborted ? VersionState::kAvailable : VersionState::kAborted);
    ASSERT_TRUE(d.JoinRollout(901, "e1").ok());
    EXPECT_EQ(d.Query(id).state, first);
  }
}

TEST(CoordinatorRestart, WhatARolloutServesWasAvailable) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1);
  const VersionId id{d.core.term(), 1};
  d.Held(1, 1);
  d.states[kPoller].serving = id;
  for (auto& [incarnation, state] : d.states) {
    for (HeldVersion& held : state.held) held.told = VersionState::kOpen;
  }
  d.RestartCoordinator(0, true);
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());  // before any trainer
  d.states[101].held.clear();                // revoked meanwhile
  ASSERT_TRUE(d.Join(1, 101).ok());
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_EQ(d.Query(id).state, VersionState::kAvailable);
  d.Beat(7);
  EXPECT_EQ(d.Query(id).state, VersionState::kAvailable);
  EXPECT_EQ(d.core.term(), id.term);
}

TEST(CoordinatorRestart, TogetherWithTheTrainersAndAClockThatSteppedBack) {
  for (const bool rollout_first : {true, false}) {
    CoreDriver d(2);
    d.JoinAll();
    d.Held(0, 1);
    d.Held(1, 1);
    const uint64_t before = d.core.term();
    d.states[kPoller].highest_term = before;
    d.states[kPoller].serving = {before, 1};
    d.RestartCoordinator(-500'000);
    if (rollout_first) {
      ASSERT_TRUE(d.JoinRollout(kPoller).ok());
      // The ranks of the running term may yet rejoin.
      EXPECT_EQ(d.Join(0, 200).status().code(), Code::kUnavailable);
      d.Beat(6);
    }
    ASSERT_TRUE(d.Join(0, 200).ok());
    ASSERT_TRUE(d.Join(1, 201).ok());
    if (!rollout_first) {
      EXPECT_LT(d.core.term(), before);
      ASSERT_TRUE(d.JoinRollout(kPoller).ok());
      EXPECT_GT(d.core.term(), before);
      EXPECT_EQ(d.core.Held(d.HeldBy(200, 1), d.now).status().code(), Code::kStaleTerm);
      for (uint32_t rank : {0, 1}) {
        d.states[200 + rank].joined_term = 0;
        ASSERT_TRUE(d.Join(rank, 200 + rank).ok());
      }
    }
    EXPECT_GT(d.core.term(), before);
    d.Held(0, 1);
    EXPECT_EQ(d.Held(1, 1).state, VersionState::kAvailable);
    EXPECT_EQ(d.Poll({before, 1}).id, (VersionId{d.core.term(), 1}));
  }
}

TEST(CoordinatorRestart, TogetherWithOneTrainerOpensTheNextTerm) {
  // The coordinator is hosted by trainer 0, which restarts.
  for (const bool new_one_first : {true, false}) {
    CoreDriver d(2);
    d.JoinAll();
    const uint64_t before = d.core.term();
    d.Beat();
    d.RestartCoordinator();
    if (new_one_first) {
      ASSERT_TRUE(d.Join(0, 200).ok());
      EXPECT_EQ(d.Join(1, 101).status().code(), Code::kStaleTerm);
    } else {
      ASSERT_TRUE(d.Join(1, 101).ok());
      EXPECT_EQ(d.core.term(), before);
      // The older trainer 0 may yet rejoin.
      EXPECT_EQ(d.Join(0, 200).status().code(), Code::kUnavailable);
      d.Beat(6, {100});
      ASSERT_TRUE(d.Join(0, 200).ok()) << "it was published in: no new life in that term";
    }
    EXPECT_GT(d.core.term(), before);
    d.states[101].joined_term = 0;
    ASSERT_TRUE(d.Join(1, 101).ok());
    EXPECT_TRUE(d.core.WaitComplete(200, d.now)->ok());
  }
}

TEST(CoordinatorRestart, AStragglerOfAnOldTermDoesNotReviveIt) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId old{d.core.term(), 1};
  d.Beat();
  ASSERT_TRUE(d.core.Leave(101, d.now).ok());
  ASSERT_TRUE(d.Join(1, 201).ok());
  ASSERT_TRUE(d.Join(0, 300).ok());
  const uint64_t term = d.core.term();
  d.states[100].highest_term = term;  // it heard of it in heartbeats
  d.RestartCoordinator(0, true);
  const auto straggler = d.Join(0, 100);
  ASSERT_TRUE(straggler.ok()) << straggler.status().ToString();
  EXPECT_TRUE(straggler->stale_term);
  EXPECT_EQ(straggler->term, old.term);
  ASSERT_TRUE(d.Join(0, 300).ok());
  ASSERT_TRUE(d.Join(1, 201).ok());
  EXPECT_EQ(d.core.term(), term);
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  EXPECT_EQ(d.Poll().id, old);  // it still holds it
  d.states[100].held.clear();
  d.Beat(2);
  EXPECT_FALSE(d.Poll().offered);
}

TEST(CoordinatorRestart, AStragglerThatDidNotHearOfTheNewTermGivesWayToIt) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1);
  ASSERT_TRUE(d.core.Leave(101, d.now).ok());
  d.Pass(10);
  ASSERT_TRUE(d.Join(1, 201).ok());
  const uint64_t term = d.core.term();
  d.RestartCoordinator(0, true);
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_LT(d.core.term(), term);  // for all that is known
  ASSERT_TRUE(d.Join(1, 201).ok());
  EXPECT_EQ(d.core.term(), term);
  EXPECT_TRUE(d.Heartbeat(100).stale_term);
}

TEST(CoordinatorRestart, TwoLivesOfOneNumberNeverMixInATerm) {
  // Trainer 1 published in the term, which nobody who rejoins knows; it restarted.
  CoreDriver d(3);
  d.JoinAll();
  const uint64_t term = d.core.term();
  d.Held(1, 1);
  d.RestartCoordinator();
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_EQ(d.Join(1, 201).status().code(), Code::kUnavailable);
  ASSERT_TRUE(d.Join(2, 102).ok());
  d.Beat(6, {101});
  ASSERT_TRUE(d.Join(1, 201).ok());
  EXPECT_GT(d.core.term(), term);
  EXPECT_EQ(d.core.WaitComplete(100, d.now)->status().code(), Code::kStaleTerm);
}

TEST(CoordinatorRestart, AWorldThatWasAssemblingDoesSoInTheNextTerm) {
  CoreDriver d(3);
  ASSERT_TRUE(d.Join(0, 100).ok());
  ASSERT_TRUE(d.Join(1, 101).ok());
  const uint64_t term = d.core.term();
  d.RestartCoordinator();
  ASSERT_TRUE(d.Join(0, 100).ok());
  ASSERT_TRUE(d.Join(1, 101).ok());
  EXPECT_EQ(d.core.term(), term);
  d.Beat(6);
  EXPECT_FALSE(d.core.WaitComplete(100, d.now).has_value());
  ASSERT_TRUE(d.Join(2, 102).ok());
  EXPECT_GT(d.core.term(), term);
  for (uint32_t rank : {0, 1}) {
    EXPECT_EQ(d.core.WaitComplete(100 + rank, d.now)->status().code(), Code::kStaleTerm);
    d.states[100 + rank] = {};
    ASSERT_TRUE(d.Join(rank, 100 + rank).ok());
  }
  EXPECT_TRUE(d.core.WaitComplete(102, d.now)->ok());
}

}  // namespace
}  // namespace bascule
