// Joining, leaving, heartbeats, blobs: who is a member of a CoordinatorCore.
#include "coordinator/core.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/coordinator/core_driver.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(CoordinatorHandshake, WrongJobOrTokenIsDeniedAndTellsNothing) {
  CoreDriver d(2);
  d.JoinAll();
  for (const bool wrong_job : {false, true}) {
    JoinRequest request = d.Request(0, 500);
    (wrong_job ? request.job : request.token) = "other";
    const Status status = d.core.Join(request, d.now).status();
    EXPECT_EQ(status.code(), Code::kPermissionDenied);
    EXPECT_THAT(status.ToString(), Not(HasSubstr("trainer")));
    EXPECT_THAT(status.ToString(), Not(HasSubstr("secret")));
    EXPECT_EQ(status.rank(), -1);
  }
}

TEST(CoordinatorHandshake, VersionsThatDoNotOverlapAreNamed) {
  CoreDriver d(2);
  JoinRequest request = d.Request(0, 500);
  request.protocol_min = kProtocolMax + 1;
  request.protocol_max = kProtocolMax + 3;
  Status status = d.core.Join(request, d.now).status();
  EXPECT_EQ(status.code(), Code::kVersionMismatch);
  EXPECT_THAT(status.message(), HasSubstr("protocol 2..4"));
  EXPECT_THAT(status.message(), HasSubstr("1..1"));
  request = d.Request(0, 500);
  request.planner_version = kPlannerVersion + 1;
  status = d.core.Join(request, d.now).status();
  EXPECT_EQ(status.code(), Code::kVersionMismatch);
  EXPECT_THAT(status.message(), HasSubstr(std::to_string(kPlannerVersion + 1)));
  request = d.Request(0, 500);
  request.protocol_max = kProtocolMax + 3;  // overlaps
  EXPECT_TRUE(d.core.Join(request, d.now).ok());
}

TEST(CoordinatorHandshake, MembersThatCannotBeAreRefused) {
  CoreDriver d(2);
  auto refused = [&d](auto change) {
    JoinRequest request = d.Request(0, 500);
    change(request);
    return d.core.Join(request, d.now).status().code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.incarnation = 0; }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.rank = 2; }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.world_size = 0; }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.world_size = ~0u; }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.engine = "e"; }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.role = Role::kRollout; }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.member.node.resize(1 << 20); }));
  EXPECT_TRUE(refused([](JoinRequest& r) { r.state.held.resize(5000); }));
  EXPECT_TRUE(d.core.Members(d.now)->members.empty());
}

TEST(CoordinatorMembers, AreSortedAndOpenEpochs) {
  CoreDriver d(2);
  uint64_t epoch = d.core.epoch();
  auto opened = [&] { return d.core.epoch() > std::exchange(epoch, d.core.epoch()); };
  ASSERT_TRUE(d.JoinRollout(900, "e1", 1, 2).ok());
  EXPECT_TRUE(opened());
  ASSERT_TRUE(d.JoinRollout(901, "e1", 0, 2).ok());
  ASSERT_TRUE(d.JoinRollout(902, "e0", 0, 1).ok());
  ASSERT_TRUE(d.Join(1, 101).ok());
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_TRUE(opened());
  const auto members = d.core.Members(d.now);
  std::vector<uint64_t> order;
  for (const MemberInfo& member : members->members) order.push_back(member.incarnation);
  EXPECT_EQ(order, (std::vector<uint64_t>{100, 101, 902, 901, 900}));
  EXPECT_EQ(members->epoch, d.core.epoch());
  // The same again changes nothing.
  ASSERT_TRUE(d.Join(1, 101).ok());
  ASSERT_TRUE(d.JoinRollout(902, "e0", 0, 1).ok());
  EXPECT_FALSE(opened());
  ASSERT_TRUE(d.core.Leave(902, d.now).ok());
  EXPECT_TRUE(opened());
  ASSERT_TRUE(d.core.Leave(902, d.now).ok());
  EXPECT_FALSE(opened());
}

TEST(CoordinatorMembers, AMembershipThatWasHandedOutCanBeAskedForAgain) {
  CoreDriver d(1);
  d.JoinAll();
  d.Held(0, 1);
  const PollReply offer = d.Poll();
  ASSERT_TRUE(offer.offered);
  EXPECT_FALSE(offer.own_membership);
  ASSERT_TRUE(d.JoinRollout(901, "e1").ok());
  const auto then = d.core.MembersFor(offer.id, offer.epoch, d.now);
  ASSERT_TRUE(then.ok());
  EXPECT_EQ((*then)->members.size(), 2u);
  EXPECT_EQ((*then)->epoch, offer.epoch);
  EXPECT_EQ((*d.core.MembersFor(offer.id, 0, d.now))->members.size(), 3u);
  for (uint64_t i = 0; i < 40; ++i) {
    ASSERT_TRUE(d.JoinRollout(1000 + i, fmt::format("x{}", i)).ok());
    (void)d.core.Members(d.now);
  }
  EXPECT_EQ(d.core.MembersFor(offer.id, offer.epoch, d.now).status().code(), Code::kNotFound);
}

TEST(CoordinatorMembers, AHeldVersionKeepsTheLayoutItWasPublishedUnder) {
  CoreDriver d(1);
  d.JoinAll();
  d.Held(0, 1);
  MemberInfo changed = d.Request(0, 100).member;
  changed.layout_serial = 1;
  changed.coordinates = {7};
  ASSERT_TRUE(d.core.Rebind(changed, d.now).ok());
  const PollReply offer = d.Poll();
  ASSERT_TRUE(offer.offered);
  EXPECT_TRUE(offer.own_membership);
  EXPECT_EQ((*d.core.MembersFor(offer.id, offer.epoch, d.now))->members[0].layout_serial, 0u);
  EXPECT_EQ(d.core.Members(d.now)->members[0].layout_serial, 1u);
  // What is published now is under the new one.
  HeldRequest stale = d.HeldBy(100, 2);
  EXPECT_EQ(d.core.Held(stale, d.now).status().code(), Code::kInvalidArgument);
  stale.held.layout_serial = 1;
  ASSERT_TRUE(d.TryHeld(stale).ok());
  EXPECT_FALSE(d.Poll().own_membership);
}

TEST(CoordinatorMembers, RebindChangesTheLayoutOnlyAndInOrder) {
  CoreDriver d(1);
  d.JoinAll();
  MemberInfo changed = d.Request(0, 100).member;
  changed.layout_serial = 2;
  ASSERT_TRUE(d.core.Rebind(changed, d.now).ok());
  ASSERT_TRUE(d.core.Rebind(changed, d.now).ok());  // asked again
  MemberInfo late = d.Request(0, 100).member;
  late.layout_serial = 1;
  EXPECT_EQ(d.core.Rebind(late, d.now).status().code(), Code::kInvalidArgument);
  MemberInfo other = changed;
  other.world_size = 2;
  other.layout_serial = 3;
  EXPECT_EQ(d.core.Rebind(other, d.now).status().code(), Code::kInvalidArgument);
  other = changed;
  other.incarnation = 555;
  EXPECT_EQ(d.core.Rebind(other, d.now).status().code(), Code::kUnavailable);
}

TEST(CoordinatorMembers, TwoLiveRolloutsWithOneNumberAreRefused) {
  CoreDriver d(1);
  d.JoinAll();
  const Status same = d.JoinRollout(901).status();
  EXPECT_EQ(same.code(), Code::kAlreadyExists);
  EXPECT_EQ(same.peer(), "engine e0 rank 0");
  // Nor two sizes of one engine.
  EXPECT_EQ(d.JoinRollout(901, "e0", 1, 2).status().code(), Code::kAlreadyExists);
  ASSERT_TRUE(d.JoinRollout(901, "e1", 0, 2).ok());
  ASSERT_TRUE(d.JoinRollout(902, "e1", 1, 2).ok());
  d.Pass(601);  // silent beyond the deadline: no tick needed
  ASSERT_TRUE(d.JoinRollout(903).ok());
  EXPECT_TRUE(*d.core.Gone(kPoller, d.now));
}

TEST(CoordinatorSilence, SixHeartbeatsDeclareARankGone) {
  CoreDriver d(2);
  d.JoinAll();
  d.Beat(5, {101, kPoller});
  EXPECT_FALSE(*d.core.Gone(101, d.now));
  d.Beat(1, {101, kPoller});  // 600 ms: at the deadline, not beyond
  EXPECT_FALSE(*d.core.Gone(101, d.now));
  d.Beat(1, {101, kPoller});
  EXPECT_TRUE(*d.core.Gone(101, d.now));
  EXPECT_TRUE(*d.core.Gone(kPoller, d.now));
  EXPECT_FALSE(*d.core.Gone(100, d.now));
  ASSERT_EQ(d.core.Members(d.now)->members.size(), 1u);
}

TEST(CoordinatorSilence, ADeclaredGoneIncarnationThatWakesIsRefused) {
  CoreDriver d(2);
  d.JoinAll();
  d.Beat(7, {101, kPoller});
  for (uint64_t gone : {uint64_t{101}, kPoller}) {
    const HeartbeatReply reply = d.Heartbeat(gone);
    EXPECT_FALSE(reply.member);
    EXPECT_FALSE(reply.rejoin);
  }
  EXPECT_EQ(d.Join(1, 101).status().code(), Code::kStaleTerm);
  EXPECT_EQ(d.core.Held(d.HeldBy(101, 1), d.now).status().code(), Code::kStaleTerm);
  EXPECT_EQ(d.core.Poll(kPoller, {}, false, d.now).status().code(), Code::kNotFound);
  EXPECT_EQ(d.JoinRollout(kPoller).status().code(), Code::kNotFound);
  EXPECT_TRUE(d.JoinRollout(kPoller + 1).ok());
}

TEST(CoordinatorSilence, AnUnknownIncarnationIsAskedToRejoin) {
  CoreDriver d(1);
  const HeartbeatReply reply = d.Heartbeat(77);
  EXPECT_FALSE(reply.member);
  EXPECT_TRUE(reply.rejoin);
}

TEST(CoordinatorSilence, GoneIsSaidOfAnUnknownOneOnlyWhenItHadTimeToRejoin) {
  CoreDriver d(1);
  EXPECT_FALSE(*d.core.Gone(77, d.now));
  d.Pass(600);
  EXPECT_TRUE(*d.core.Gone(77, d.now));
  // And then it is so.
  EXPECT_FALSE(d.JoinRollout(77).ok());
  EXPECT_FALSE(d.Heartbeat(77).rejoin);
}

TEST(CoordinatorSilence, ARestartedCoordinatorLearnsWhoWasDeclaredGone) {
  CoreDriver d(1);
  d.JoinAll();
  d.RestartCoordinator();
  ASSERT_TRUE(d.JoinRollout(901, "e0", 0, 1).ok());
  d.states[100].told_gone = {901, 902};
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_TRUE(*d.core.Gone(901, d.now));
  EXPECT_FALSE(d.JoinRollout(902).ok());
}

TEST(CoordinatorBlobs, AreKeptWhileUsedAndAGraceAfter) {
  CoreDriver d(1);
  ContentDigest used{1, 1};
  ContentDigest unused{2, 2};
  auto put = [&](ContentDigest digest) {
    return d.core.PutBlob(digest, std::make_shared<const std::string>("bytes"), d.now);
  };
  ASSERT_TRUE(put(used).ok());
  ASSERT_TRUE(put(unused).ok());
  JoinRequest request = d.Request(0, 100);
  request.member.world_template = used;
  ASSERT_TRUE(d.Join(request).ok());
  d.Beat(10);
  EXPECT_TRUE(d.core.HasBlob(unused));
  d.Beat(60);
  EXPECT_FALSE(d.core.HasBlob(unused));
  EXPECT_TRUE(d.core.HasBlob(used));
  // Without an epoch in between nothing is dropped.
  ASSERT_TRUE(put(unused).ok());
  d.Beat(100);
  EXPECT_TRUE(d.core.HasBlob(unused));
}

TEST(CoordinatorBlobs, HaveLimits) {
  CoordinatorOptions options = CoreDriver::Options(false, 1000);
  options.limits.blob_bytes = 10;
  options.limits.all_blob_bytes = 25;
  options.limits.blobs = 4;
  CoordinatorCore core(options);
  auto put = [&core](uint64_t id, size_t bytes) {
    return core.PutBlob({id, id}, std::make_shared<const std::string>(bytes, 'x'), {}).code();
  };
  EXPECT_EQ(put(1, 11), Code::kResourceExhausted);
  EXPECT_EQ(put(1, 10), Code::kOk);
  EXPECT_EQ(put(1, 10), Code::kOk);  // the same again
  EXPECT_EQ(put(2, 10), Code::kOk);
  EXPECT_EQ(put(3, 6), Code::kResourceExhausted);
  EXPECT_EQ(put(3, 5), Code::kOk);
  EXPECT_EQ(put(4, 0), Code::kOk);
  EXPECT_EQ(put(5, 0), Code::kResourceExhausted);
}

TEST(CoordinatorMembers, OfAVersionBeforeAnyTermAreNone) {
  CoreDriver d(1);
  const auto members = d.core.MembersFor({0, 1}, 0, d.now);
  ASSERT_TRUE(members.ok()) << members.status().ToString();
  EXPECT_TRUE((*members)->members.empty());
  EXPECT_EQ(d.core.MembersFor({7, 1}, 0, d.now).status().code(), Code::kNotFound);
}

TEST(CoordinatorLimits, HoldUnderManyVersionsTermsAndIncarnations) {
  CoreDriver d(1);
  CoordinatorOptions options = CoreDriver::Options(false, 1000);
  options.limits.gone = 100;
  options.limits.members = 50;
  d.core = CoordinatorCore(options);
  uint64_t incarnation = 1000;
  for (int life = 0; life < 200; ++life) {
    d.states.clear();
    ASSERT_TRUE(d.Join(0, ++incarnation).ok());
    for (uint64_t version = 1; version <= 100; ++version) d.Held(0, version);
    ASSERT_TRUE(d.core.Leave(incarnation, d.now).ok());
    d.core.Tick(d.now);
  }
  const auto status = nlohmann::json::parse(d.core.StatusJson(d.now));
  EXPECT_LE(status["versions"].size(), 5 * 64u);  // of the term and the last few
  for (uint64_t i = 0; i < 60; ++i) {
    const Code code = d.JoinRollout(5000 + i, fmt::format("e{}", i)).status().code();
    EXPECT_EQ(code, i < 50 ? Code::kOk : Code::kResourceExhausted);
  }
}

TEST(CoordinatorCopies, AreIndependentAndHashAlike) {
  CoreDriver d(2);
  d.JoinAll();
  d.Beat(7);  // from now on its age does not matter
  d.Held(0, 1);
  CoreDriver copy = d;
  EXPECT_EQ(copy.core.Fingerprint(), d.core.Fingerprint());
  copy.Held(1, 1);
  EXPECT_NE(copy.core.Fingerprint(), d.core.Fingerprint());
  EXPECT_EQ(d.Query({d.core.term(), 1}).state, VersionState::kOpen);
  EXPECT_EQ(copy.Query({d.core.term(), 1}).state, VersionState::kAvailable);
  d.Held(1, 1);
  EXPECT_EQ(copy.core.Fingerprint(), d.core.Fingerprint());
  // Time that passes for all alike is no other state.
  auto later = [](CoreDriver driver, int64_t ms) {
    driver.Pass(ms);
    for (uint64_t member : {uint64_t{100}, uint64_t{101}, kPoller}) driver.Heartbeat(member);
    return driver.core.Fingerprint();
  };
  EXPECT_EQ(later(d, 50), later(d, 90));
}

TEST(CoordinatorEvents, TellWhatHappenedWhenAsked) {
  CoordinatorOptions options = CoreDriver::Options(false, 1000);
  options.record_events = true;
  CoreDriver d(1);
  d.core = CoordinatorCore(options);
  d.JoinAll();
  d.Held(0, 1);
  ASSERT_TRUE(d.core.Leave(100, d.now).ok());
  std::string all;
  for (const std::string& event : d.core.TakeEvents()) all += event + "\n";
  EXPECT_THAT(all, HasSubstr("trainer 0 joined (node \"node0\""));
  EXPECT_THAT(all, HasSubstr("opens: trainer 0 joined"));
  EXPECT_THAT(all, HasSubstr("trainer 0 is gone: it left"));
  EXPECT_THAT(all, HasSubstr("retired: live holders do not cover it any more"));
  EXPECT_TRUE(d.core.TakeEvents().empty());
  CoreDriver quiet(1);
  quiet.JoinAll();
  EXPECT_TRUE(quiet.core.TakeEvents().empty());
}

TEST(CoordinatorStatus, IsJsonEvenOfNamesThatAreNoText) {
  CoreDriver d(1);
  d.JoinAll();
  ASSERT_TRUE(d.JoinRollout(901, "e\xff\xfe\n\"").ok());
  d.Held(0, 1);
  const auto status = nlohmann::json::parse(d.core.StatusJson(d.now));
  EXPECT_EQ(status["job"], "job");
  EXPECT_EQ(status["term"], d.core.term());
  EXPECT_EQ(status["members"].size(), 3u);
  EXPECT_EQ(status["versions"][0]["state"], "available");
  EXPECT_EQ(status["versions"][0]["holders"], 1);
  EXPECT_THAT(d.core.StatusJson(d.now), Not(HasSubstr("token\"")));
}

}  // namespace
}  // namespace bascule
