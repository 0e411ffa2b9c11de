// Control messages: they come back as they were, and foreign bytes are an error, never a crash.
#include "coordinator/messages.h"

#include <gtest/gtest.h>

#include "base/random.h"

namespace bascule {
namespace {

class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}
  uint64_t Number() {
    switch (random_.Below(4)) {
      case 0: return 0;
      case 1: return random_.Below(100);
      case 2: return ~uint64_t{0};
      default: return random_.Next();
    }
  }
  uint32_t Small() { return static_cast<uint32_t>(Number()); }
  int64_t Signed() { return static_cast<int64_t>(Number()); }
  bool Flag() { return random_.Below(2) == 0; }
  std::string Text() {
    std::string text(random_.Below(20), '\0');
    for (char& c : text) c = static_cast<char>(random_.Next());  // any bytes, not only UTF-8
    return text;
  }
  VersionState State() { return static_cast<VersionState>(random_.Below(5)); }
  VersionId Id() { return {Number(), Number()}; }
  uint64_t Count() { return random_.Below(4); }
  MemberInfo Member() {
    MemberInfo m;
    m.role = Flag() ? Role::kTrainer : Role::kRollout;
    m.engine = Text();
    m.rank = Small();
    m.world_size = Small();
    m.incarnation = Number();
    m.layout_serial = Number();
    m.node = Text();
    m.world_template = {Number(), Number()};
    for (uint64_t i = Count(); i > 0; --i) m.coordinates.push_back(Small());
    for (uint64_t i = Count(); i > 0; --i) m.addresses.push_back({Text(), Text()});
    m.channel = Text();
    return m;
  }
  HeldVersion Held() {
    HeldVersion h;
    h.id = Id();
    h.told = State();
    h.epoch = Number();
    h.layout_serial = Number();
    for (uint64_t i = Count(); i > 0; --i) h.replica_sums.push_back({Number(), Number()});
    h.publish_start_ns = Signed();
    h.deadline_ns = Signed();
    return h;
  }
  MemberState Members() {
    MemberState s;
    for (uint64_t i = Count(); i > 0; --i) s.held.push_back(Held());
    s.serving = Id();
    s.servable = Flag();
    s.highest_term = Number();
    s.joined_term = Number();
    s.term_complete = Flag();
    for (uint64_t i = Count(); i > 0; --i) s.told_gone.push_back(Number());
    for (uint64_t i = Count(); i > 0; --i) s.told.push_back(Held());
    if (Flag()) s.report = {Id(), Number() | 1, Number(), Signed(), Signed(), Text(), Signed()};
    return s;
  }

 private:
  SplitMix64 random_;
};

void ExpectSame(const HeldVersion& a, const HeldVersion& b) {
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.told, b.told);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.layout_serial, b.layout_serial);
  EXPECT_EQ(a.replica_sums, b.replica_sums);
  EXPECT_EQ(a.publish_start_ns, b.publish_start_ns);
  EXPECT_EQ(a.deadline_ns, b.deadline_ns);
}

void ExpectSame(const MemberState& a, const MemberState& b) {
  ASSERT_EQ(a.held.size(), b.held.size());
  for (size_t i = 0; i < a.held.size(); ++i) ExpectSame(a.held[i], b.held[i]);
  EXPECT_EQ(a.serving, b.serving);
  EXPECT_EQ(a.servable, b.servable);
  EXPECT_EQ(a.highest_term, b.highest_term);
  EXPECT_EQ(a.joined_term, b.joined_term);
  EXPECT_EQ(a.term_complete, b.term_complete);
  EXPECT_EQ(a.told_gone, b.told_gone);
  ASSERT_EQ(a.told.size(), b.told.size());
  for (size_t i = 0; i < a.told.size(); ++i) ExpectSame(a.told[i], b.told[i]);
  EXPECT_EQ(a.report.id, b.report.id);
  EXPECT_EQ(a.report.done, b.report.done);
  EXPECT_EQ(a.report.bytes, b.report.bytes);
  EXPECT_EQ(a.report.took_ns, b.report.took_ns);
  EXPECT_EQ(a.report.stall_ns, b.report.stall_ns);
  EXPECT_EQ(a.report.error, b.report.error);
  EXPECT_EQ(a.report.error_wall_ns, b.report.error_wall_ns);
}

TEST(ControlMessages, ComeBackAsTheyWere) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Maker make(seed);
    {
      JoinRequest a;
      a.job = make.Text();
      a.token = make.Text();
      a.protocol_min = make.Small();
      a.protocol_max = make.Small();
      a.planner_version = make.Small();
      a.build = make.Text();
      a.member = make.Member();
      a.state = make.Members();
      a.told_epoch = make.Number();
      const auto b = Decode<JoinRequest>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.job, a.token, a.protocol_min, a.protocol_max, a.planner_version, a.build,
                         a.member, a.told_epoch),
                std::tie(b->job, b->token, b->protocol_min, b->protocol_max, b->planner_version,
                         b->build, b->member, b->told_epoch));
      ExpectSame(a.state, b->state);
    }
    {
      const JoinReply a{make.Number(), make.Flag(),   make.Number(),
                        make.Signed(), make.Signed(), make.Number()};
      const auto b = Decode<JoinReply>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(
          std::tie(a.term, a.stale_term, a.epoch, a.wall_ns, a.heartbeat_ms, a.coordinator),
          std::tie(b->term, b->stale_term, b->epoch, b->wall_ns, b->heartbeat_ms, b->coordinator));
    }
    {
      Membership a{make.Number(), make.Number(), make.Flag(), {make.Member(), make.Member()}};
      const auto b = Decode<Membership>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.epoch, a.term, a.complete, a.members),
                std::tie(b->epoch, b->term, b->complete, b->members));
    }
    {
      HeartbeatRequest a{make.Text(), make.Number(), make.Number(), make.Members(), make.Number()};
      const auto b = Decode<HeartbeatRequest>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.token, a.incarnation, a.layout_serial, a.told_epoch),
                std::tie(b->token, b->incarnation, b->layout_serial, b->told_epoch));
      ExpectSame(a.state, b->state);
    }
    {
      HeartbeatReply a;
      a.member = make.Flag();
      a.rejoin = make.Flag();
      a.stale_term = make.Flag();
      a.term = make.Number();
      a.term_complete = make.Flag();
      a.epoch = make.Number();
      a.coordinator = make.Number();
      a.wall_ns = make.Signed();
      a.versions = {{make.Id(), make.State()}, {make.Id(), make.State()}};
      const auto b = Decode<HeartbeatReply>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.member, a.rejoin, a.stale_term, a.term, a.term_complete, a.epoch,
                         a.coordinator, a.wall_ns, a.versions),
                std::tie(b->member, b->rejoin, b->stale_term, b->term, b->term_complete, b->epoch,
                         b->coordinator, b->wall_ns, b->versions));
    }
    {
      const HeldRequest a{make.Text(), make.Number(), make.Held(), make.Signed()};
      const auto b = Decode<HeldRequest>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.token, a.incarnation, a.deadline_ns),
                std::tie(b->token, b->incarnation, b->deadline_ns));
      ExpectSame(a.held, b->held);
    }
    {
      const VersionReply a{make.State(), make.Text(), make.Signed(), make.Number()};
      const auto b = Decode<VersionReply>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.state, a.reason, a.publish_start_ns, a.epoch),
                std::tie(b->state, b->reason, b->publish_start_ns, b->epoch));
    }
    {
      PollReply a;
      a.offered = make.Flag();
      a.id = make.Id();
      a.epoch = make.Number();
      a.own_membership = make.Flag();
      a.publish_start_ns = make.Signed();
      const auto b = Decode<PollReply>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.offered, a.id, a.epoch, a.own_membership, a.publish_start_ns),
                std::tie(b->offered, b->id, b->epoch, b->own_membership, b->publish_start_ns));
    }
    {
      const ControlQuery a{
          make.Number(), make.Id(), make.Number(), make.Flag(), {make.Number(), make.Number()},
          make.Text()};
      const auto b = Decode<ControlQuery>(Encode(a));
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(std::tie(a.incarnation, a.id, a.epoch, a.flag, a.digest, a.bytes),
                std::tie(b->incarnation, b->id, b->epoch, b->flag, b->digest, b->bytes));
    }
    EXPECT_EQ(*Decode<bool>(Encode(true)), true);
    EXPECT_EQ(*Decode<bool>(Encode(false)), false);
  }
}

TEST(ControlMessages, DamagedOnesAreErrorsOrOtherMessages) {
  int errors = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    Maker make(seed);
    SplitMix64 random(seed);
    JoinRequest request;
    request.member = make.Member();
    request.state = make.Members();
    std::string bytes = Encode(request);
    if (bytes.empty()) continue;
    for (int i = 0; i < 3; ++i) {
      bytes[random.Below(bytes.size())] = static_cast<char>(random.Next());
    }
    if (seed % 3 == 0) bytes.resize(random.Below(bytes.size() + 1));
    const auto decoded = Decode<JoinRequest>(bytes);
    errors += decoded.ok() ? 0 : 1;
    if (!decoded.ok()) {
      EXPECT_EQ(decoded.status().code(), Code::kInvalidArgument);
    }
    (void)Decode<HeartbeatRequest>(bytes);
    (void)Decode<ControlQuery>(bytes);
    (void)Decode<Membership>(bytes);
  }
  EXPECT_GT(errors, 500);
}

TEST(ControlMessages, ValuesOutOfTheirRangeAreErrors) {
  VersionReply reply;
  reply.state = static_cast<VersionState>(5);
  EXPECT_FALSE(Decode<VersionReply>(Encode(reply)).ok());
  MemberInfo member;
  member.role = static_cast<Role>(2);
  EXPECT_FALSE(Decode<MemberInfo>(Encode(member)).ok());
  HeldRequest held;
  held.held.replica_sums.resize(kReplicaBuckets + 1);
  EXPECT_FALSE(Decode<HeldRequest>(Encode(held)).ok());
}

}  // namespace
}  // namespace bascule
