// Versions: OPEN -> AVAILABLE -> RETIRED, or OPEN -> ABORTED.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/core.h"
#include "tests/coordinator/core_driver.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;

TEST(CoordinatorVersion, IsAvailableOnceAllRanksHoldIt) {
  CoreDriver d(2);
  d.JoinAll();
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kUnknown);
  EXPECT_EQ(d.Held(0, 1).state, VersionState::kOpen);
  EXPECT_FALSE(d.Poll().offered);
  EXPECT_FALSE(d.core.QueryVersion(kPoller, {d.core.term(), 1}, true, d.now).has_value());
  EXPECT_EQ(d.Held(1, 1).state, VersionState::kAvailable);
  const PollReply offer = d.Poll();
  EXPECT_TRUE(offer.offered);
  EXPECT_EQ(offer.id, (VersionId{d.core.term(), 1}));
  EXPECT_TRUE(d.core.QueryVersion(kPoller, offer.id, true, d.now).has_value());
}

TEST(CoordinatorVersion, ADeadReplicaDoesNotBlock) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1);
  d.Beat(6, {101});
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kOpen);
  d.Beat(1, {101});
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kAvailable);
  // Nor later versions of the term.
  EXPECT_EQ(d.Held(0, 2).state, VersionState::kAvailable);
}

TEST(CoordinatorVersion, IsAbortedWhenLiveRanksCannotCoverIt) {
  CoreDriver d(3);
  d.JoinAll();
  d.Held(0, 1);
  const VersionId id{d.core.term(), 1};
  d.Beat(7, {101});
  const VersionReply reply = d.Query(id);
  EXPECT_EQ(reply.state, VersionState::kAborted);
  EXPECT_THAT(reply.reason, HasSubstr("trainer 1 (silent for"));
  // The others' reports change nothing.
  EXPECT_EQ(d.Held(2, 1).state, VersionState::kAborted);
}

TEST(CoordinatorVersion, IsAbortedWhenItIsRevokedBeforeItWasAvailable) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  ASSERT_TRUE(d.Revoked(100, {d.core.term(), 1}).ok());
  const VersionReply reply = d.Query({d.core.term(), 1});
  EXPECT_EQ(reply.state, VersionState::kAborted);
  EXPECT_THAT(reply.reason, HasSubstr("trainer 0 (revoked it)"));
}

TEST(CoordinatorVersion, IsAbortedWhenARankPassesItBy) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 2);
  d.core.Tick(d.now);
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kAborted);
  EXPECT_EQ(d.Held(0, 2).state, VersionState::kAvailable);
}

TEST(CoordinatorVersion, IsAbortedAtItsDeadline) {
  CoreDriver d(2);
  d.JoinAll();
  HeldRequest request = d.HeldBy(100, 1);
  request.deadline_ns = d.now.wall_ns + 250'000'000;
  ASSERT_TRUE(d.TryHeld(request).ok());
  const VersionId id{d.core.term(), 1};
  d.Beat(2);
  EXPECT_EQ(d.Query(id).state, VersionState::kOpen);
  d.Beat(1);
  EXPECT_EQ(d.Query(id).state, VersionState::kAborted);
  EXPECT_THAT(d.Query(id).reason, HasSubstr("trainer 1 (has not reported it)"));
  // An available one has no deadline.
  request.held.id.version = 2;
  request.deadline_ns = d.now.wall_ns + 250'000'000;
  ASSERT_TRUE(d.TryHeld(request).ok());
  d.Held(1, 2);
  d.Beat(5);
  EXPECT_EQ(d.Query({id.term, 2}).state, VersionState::kAvailable);
}

TEST(CoordinatorVersion, ItsDeadlineDoesNotMoveWithTheWallClock) {
  CoreDriver d(2);
  d.JoinAll();
  HeldRequest request = d.HeldBy(100, 1);
  request.deadline_ns = d.now.wall_ns + 250'000'000;
  ASSERT_TRUE(d.TryHeld(request).ok());
  d.now.wall_ns -= 3'600'000'000'000;
  d.Beat(3);
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kAborted);
}

TEST(CoordinatorVersion, NeverAbortsOnceAvailable) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  d.Beat(7, {101});
  const VersionReply reply = d.Query({d.core.term(), 1});
  EXPECT_EQ(reply.state, VersionState::kRetired);
  EXPECT_THAT(reply.reason, HasSubstr("trainer 1 (silent for"));
  EXPECT_FALSE(d.Poll().offered);
}

TEST(CoordinatorVersion, StaysWhileAReplicaHoldsItAndRetiresWithTheLast) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId id{d.core.term(), 1};
  ASSERT_TRUE(d.Revoked(100, id).ok());
  EXPECT_TRUE(d.Poll().offered);
  ASSERT_TRUE(d.Revoked(101, id).ok());
  EXPECT_FALSE(d.Poll().offered);
  EXPECT_EQ(d.Query(id).state, VersionState::kRetired);
  // Reports of it that come again do not revive it.
  EXPECT_EQ(d.core.Held(d.HeldBy(100, 1), d.now)->state, VersionState::kRetired);
}

TEST(CoordinatorVersion, PollSkipsToTheNewestThatIsCovered) {
  CoreDriver d(2);
  d.JoinAll();
  for (uint64_t version : {1, 2, 3}) {
    d.Held(0, version);
    if (version != 3) d.Held(1, version);
  }
  const uint64_t term = d.core.term();
  EXPECT_EQ(d.Poll().id, (VersionId{term, 2}));
  EXPECT_EQ(d.Poll({term, 1}).id, (VersionId{term, 2}));
  EXPECT_FALSE(d.Poll({term, 2}).offered);
  EXPECT_TRUE(d.Poll({term, 2}, true).offered);
  ASSERT_TRUE(d.Revoked(101, {term, 2}).ok());
  EXPECT_EQ(d.Poll().id, (VersionId{term, 1}));
  EXPECT_FALSE(d.Poll({term, 1}).offered);
}

TEST(CoordinatorVersion, PublishStartIsTheEarliest) {
  CoreDriver d(2);
  d.JoinAll();
  HeldRequest first = d.HeldBy(100, 1);
  HeldRequest second = d.HeldBy(101, 1);
  first.held.publish_start_ns = 500;
  second.held.publish_start_ns = 400;
  ASSERT_TRUE(d.TryHeld(first).ok());
  EXPECT_EQ(d.TryHeld(second)->publish_start_ns, 400);
  EXPECT_EQ(d.Poll().publish_start_ns, 400);
}

TEST(CoordinatorVersion, MustRiseWithinATerm) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 5);
  const Status lower = d.core.Held(d.HeldBy(100, 4), d.now).status();
  EXPECT_EQ(lower.code(), Code::kInvalidArgument);
  EXPECT_EQ(lower.rank(), 0);
  EXPECT_THAT(lower.message(), HasSubstr("version 4 after 5"));
  EXPECT_EQ(d.core.Held(d.HeldBy(100, 0), d.now).status().code(), Code::kInvalidArgument);
  // The same again is the same.
  EXPECT_EQ(d.Held(0, 5).state, VersionState::kOpen);
  EXPECT_EQ(d.Held(1, 5).state, VersionState::kAvailable);
  EXPECT_EQ(d.Held(0, 5).state, VersionState::kAvailable);
  d.Held(0, 6);
  EXPECT_EQ(d.Held(0, 5).state, VersionState::kAvailable);
  // But not with other values.
  EXPECT_EQ(d.core.Held(d.HeldBy(100, 6, {{9, 9}}), d.now).status().code(), Code::kInvalidArgument);
}

TEST(CoordinatorVersion, OnlyTrainersOfTheTermPublish) {
  CoreDriver d(1);
  d.JoinAll();
  HeldRequest request = d.HeldBy(100, 1);
  request.incarnation = kPoller;
  EXPECT_EQ(d.core.Held(request, d.now).status().code(), Code::kInvalidArgument);
  request = d.HeldBy(100, 1);
  ++request.held.id.term;
  EXPECT_EQ(d.core.Held(request, d.now).status().code(), Code::kStaleTerm);
  request = d.HeldBy(100, 1);
  request.token = "other";
  EXPECT_EQ(d.core.Held(request, d.now).status().code(), Code::kPermissionDenied);
  request = d.HeldBy(100, 1);
  request.held.replica_sums.resize(kReplicaBuckets + 1);
  EXPECT_EQ(d.core.Held(request, d.now).status().code(), Code::kInvalidArgument);
}

TEST(CoordinatorReplicas, ThatDifferAbortAndAreNamed) {
  CoreDriver d(3, true);
  d.JoinAll();
  d.Held(0, 1, {{1, 10}, {2, 10}, {3, 10}});
  const VersionReply reply = d.Held(2, 1, {{1, 10}, {2, 10}, {4, 10}});
  EXPECT_EQ(reply.state, VersionState::kAborted);
  EXPECT_THAT(reply.reason, HasSubstr("trainer 0"));
  EXPECT_THAT(reply.reason, HasSubstr("trainer 2"));
  EXPECT_THAT(reply.reason, HasSubstr("bucket 2"));
  // An element count that differs is a difference, too.
  d.Held(0, 2, {{1, 10}});
  EXPECT_EQ(d.Held(1, 2, {{1, 11}}).state, VersionState::kAborted);
  // Ranks that hold other boxes may hold other values.
  CoreDriver parts(2);
  parts.JoinAll();
  parts.Held(0, 1, {{1, 10}});
  EXPECT_EQ(parts.Held(1, 1, {{2, 10}}).state, VersionState::kAvailable);
}

TEST(CoordinatorReplicas, AreComparedByARestartedCoordinatorToo) {
  CoreDriver d(2, true);
  d.JoinAll();
  // The coordinator dies between the two reports.
  d.Held(0, 1, {{1, 1}});
  d.states[101].held = {d.HeldBy(101, 1, {{2, 1}}).held};
  const VersionId id{d.core.term(), 1};
  d.RestartCoordinator(0, true);
  ASSERT_TRUE(d.Join(0, 100).ok());
  ASSERT_TRUE(d.JoinRollout(kPoller).ok());
  ASSERT_TRUE(d.Join(1, 101).ok());
  d.Beat(6);
  EXPECT_EQ(d.Query(id).state, VersionState::kAborted);
  EXPECT_THAT(d.Query(id).reason, HasSubstr("replicas differ"));
}

TEST(CoordinatorReplicas, WithoutDigestsAreNotCompared) {
  CoreDriver d(2, true);
  d.JoinAll();
  d.Held(0, 1, {});
  EXPECT_EQ(d.Held(1, 1, {}).state, VersionState::kAvailable);
}

TEST(CoordinatorHeartbeat, CarriesTheStatesOfRecentVersions) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  d.Held(0, 2);
  const auto versions = d.Heartbeat(kPoller).versions;
  ASSERT_EQ(versions.size(), 2u);
  EXPECT_EQ(versions[0].second, VersionState::kAvailable);
  EXPECT_EQ(versions[1].second, VersionState::kOpen);
}

TEST(CoordinatorHeartbeat, OfAnotherTermThanRecordedAsksToRejoin) {
  CoreDriver d(1);
  d.JoinAll();
  // A first Join, made before the restart of the coordinator, that reached it before the rejoin.
  const uint64_t term = d.states[100].joined_term;
  d.RestartCoordinator(5000);
  JoinRequest first = d.Request(0, 100);
  first.state = {};
  ASSERT_TRUE(d.core.Join(first, d.now).ok());
  ASSERT_NE(d.core.term(), term);
  const HeartbeatReply reply = d.Heartbeat(100);
  EXPECT_FALSE(reply.member);
  EXPECT_TRUE(reply.rejoin);
}

TEST(CoordinatorHeartbeat, NeverAddsAHolder) {
  CoreDriver d(2);
  d.JoinAll();
  d.Held(0, 1);
  d.Held(1, 1);
  const VersionId id{d.core.term(), 1};
  const MemberState old = d.states[100];
  ASSERT_TRUE(d.Revoked(100, id).ok());
  d.states[100] = old;  // a heartbeat made before that arrives after it
  d.Heartbeat(100);
  EXPECT_EQ(d.Query(id).state, VersionState::kRetired);
}

TEST(CoordinatorHeartbeat, TwoWithoutAVersionMeanThatItIsHeldNoMore) {
  CoreDriver d(1);
  d.JoinAll();
  d.Held(0, 1);
  const VersionId id{d.core.term(), 1};
  const MemberState holding = d.states[100];
  d.states[100].held.clear();  // the Revoked got lost
  d.Heartbeat(100);
  EXPECT_EQ(d.Query(id).state, VersionState::kAvailable);  // may have been made before the Held
  d.states[100] = holding;
  d.Heartbeat(100);
  d.states[100].held.clear();
  d.Heartbeat(100);
  EXPECT_EQ(d.Query(id).state, VersionState::kAvailable);
  d.Heartbeat(100);
  EXPECT_EQ(d.Query(id).state, VersionState::kRetired);
}

TEST(CoordinatorVersion, OnesThatWereForgottenAreUnknownAtOnce) {
  CoreDriver d(1);
  d.JoinAll();
  for (uint64_t version = 1; version <= 100; ++version) d.Held(0, version);
  const uint64_t term = d.core.term();
  const auto old = d.core.QueryVersion(kPoller, {term, 3}, true, d.now);
  ASSERT_TRUE(old.has_value());
  EXPECT_EQ((*old)->state, VersionState::kUnknown);
  EXPECT_FALSE(d.core.QueryVersion(kPoller, {term, 101}, true, d.now).has_value());
  EXPECT_TRUE(d.core.QueryVersion(kPoller, {term - 1, 1}, true, d.now).has_value());
  EXPECT_EQ(d.Poll().id, (VersionId{term, 100}));
}

}  // namespace
}  // namespace bascule
