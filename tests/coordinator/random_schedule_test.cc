// Random schedules of the coordinator's core: ranks that die, sleep and come back, coordinators
// that restart, clocks that step, messages that get lost or come twice. After each step the
// promises of design 3.5 are checked against what the processes really did.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <set>

#include "base/random.h"
#include "coordinator/core.h"

namespace bascule {
namespace {

constexpr int64_t kBeat = 100;

// One life of one rank, behaving as sessions do.
struct Process {
  Role role = Role::kTrainer;
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  MemberState state;
  bool joined = false;
  bool dead = false;
  bool stale = false;
  int64_t asleep_until = 0;
  uint64_t next_version = 1;
};

class World {
 public:
  World(uint64_t seed, uint32_t trainers, bool replicas)
      : random_(seed), trainers_(trainers), replicas_(replicas), core_(Options()) {
    for (uint32_t rank = 0; rank < trainers_; ++rank) Spawn(Role::kTrainer, rank);
    for (uint32_t rank = 0; rank < 2; ++rank) Spawn(Role::kRollout, rank);
  }

  void Step() {
    now_.steady_ms += kBeat / 2;
    now_.wall_ns += kBeat / 2 * 1'000'000;
    Disturb();
    Redeliver();
    for (size_t i = 0; i < processes_.size(); ++i) {
      Process& process = processes_[i];
      if (process.dead || process.asleep_until > now_.steady_ms) continue;
      process.joined ? Beat(process) : Join(process);
      if (!process.joined || process.dead) continue;
      process.role == Role::kTrainer ? Train(process) : Roll(process);
    }
    core_.Tick(now_);
    CheckMembers();
  }

  [[nodiscard]] int offers() const { return offers_; }
  [[nodiscard]] const std::string& trace() const { return trace_; }

 private:
  CoordinatorOptions Options() {
    CoordinatorOptions options;
    options.heartbeat_ms = kBeat;
    options.coordinator_id = random_.Next();
    options.seed = random_.Next();
    options.start = now_;
    options.oracle = std::make_shared<TrivialOracle>(replicas_);
    return options;
  }
  bool OneIn(uint64_t n) { return random_.Below(n) == 0; }
  void Note(const std::string& what) { trace_ += fmt::format("{} {}\n", now_.steady_ms, what); }
  void Spawn(Role role, uint32_t rank) {
    Process process;
    process.role = role;
    process.rank = rank;
    process.incarnation = ++incarnations_;
    Note(fmt::format("spawn {} {} as {}", role == Role::kTrainer ? "trainer" : "rollout", rank,
                     process.incarnation));
    processes_.push_back(process);
  }

  void Disturb() {
    if (OneIn(40)) {
      const int64_t step = static_cast<int64_t>(random_.Below(4)) * 1000 - 2000;
      now_.wall_ns += step * 1'000'000;
      core_ = CoordinatorCore(Options());
      restarted_ms_ = now_.steady_ms;
      late_.clear();  // a connection ends with its server
      Note(fmt::format("coordinator restarts, clock steps {} ms", step));
    }
    if (OneIn(30)) {
      const size_t victim = random_.Below(processes_.size());
      if (!processes_[victim].dead) {
        processes_[victim].dead = true;
        Note(fmt::format("{} dies", processes_[victim].incarnation));
        Spawn(processes_[victim].role, processes_[victim].rank);
      }
    }
    if (OneIn(30)) {
      Process& process = processes_[random_.Below(processes_.size())];
      process.asleep_until = now_.steady_ms + static_cast<int64_t>(random_.Below(10)) * kBeat;
      Note(fmt::format("{} sleeps to {}", process.incarnation, process.asleep_until));
    }
  }

  // Messages that come a second time, late.
  void Redeliver() {
    while (!late_.empty() && OneIn(2)) {
      const size_t which = random_.Below(late_.size());
      late_[which]();
      late_.erase(late_.begin() + static_cast<int64_t>(which));
    }
    while (late_.size() > 20) late_.pop_front();
  }
  void Later(std::function<void()> message) {
    if (OneIn(10)) late_.push_back(std::move(message));
  }

  void Join(Process& process) {
    JoinRequest request;
    request.member.role = process.role;
    request.member.rank = process.rank;
    request.member.world_size = process.role == Role::kTrainer ? trainers_ : 2;
    request.member.incarnation = process.incarnation;
    if (process.role == Role::kRollout) request.member.engine = "e";
    request.state = process.state;
    if (OneIn(20)) return;  // lost
    const auto reply = core_.Join(request, now_);
    Later([this, request] { (void)core_.Join(request, now_); });
    if (OneIn(20)) return;  // the answer is lost
    if (!reply.ok()) {
      const Code code = reply.status().code();
      ASSERT_TRUE(code == Code::kUnavailable || code == Code::kAlreadyExists ||
                  code == Code::kStaleTerm || code == Code::kNotFound)
          << reply.status().ToString();
      if (code == Code::kStaleTerm || code == Code::kNotFound) Restart(process);
      return;
    }
    Note(fmt::format("{} joins term {}{}", process.incarnation, reply->term,
                     reply->stale_term ? " (stale)" : ""));
    process.joined = true;
    process.state.highest_term = std::max(process.state.highest_term, reply->term);
    if (process.role == Role::kRollout) return;
    ASSERT_GT(reply->term, 0u);
    ASSERT_TRUE(process.state.joined_term == 0 || process.state.joined_term == reply->term);
    process.state.joined_term = reply->term;
    process.stale = reply->stale_term;
  }
  // The user connects anew, in a new process.
  void Restart(Process& process) {
    process.dead = true;
    Spawn(process.role, process.rank);
  }

  void Beat(Process& process) {
    if (OneIn(20)) return;
    HeartbeatRequest request;
    request.incarnation = process.incarnation;
    request.state = process.state;
    const auto reply = core_.Heartbeat(request, now_);
    Later([this, request] { (void)core_.Heartbeat(request, now_); });
    ASSERT_TRUE(reply.ok());
    if (OneIn(20)) return;
    if (!reply->member) {
      process.joined = false;
      if (!reply->rejoin) Restart(process);
      return;
    }
    process.state.highest_term = std::max(process.state.highest_term, reply->term);
    if (reply->term == process.state.joined_term) {
      process.state.term_complete |= reply->term_complete;
    }
    process.stale = reply->stale_term;
    for (const auto& [id, state] : reply->versions) Told(process, id, state);
  }

  void Train(Process& process) {
    if (process.stale) {
      // Some go on for a while as sources; then the user reconnects, as it is or anew.
      if (!OneIn(4)) return;
      if (OneIn(2)) return Restart(process);
      process.joined = process.stale = process.state.term_complete = false;
      process.state.joined_term = 0;
      process.next_version = 1;
      if (OneIn(2)) process.state.held.clear();
      return;
    }
    const auto complete = core_.WaitComplete(process.incarnation, now_);
    if (!complete.has_value() || !complete->ok()) return;
    process.state.term_complete = true;
    if (OneIn(2)) Publish(process);
    if (process.state.held.size() > 2 || (!process.state.held.empty() && OneIn(8))) {
      const VersionId id = process.state.held.front().id;
      process.state.told.push_back(process.state.held.front());
      process.state.held.erase(process.state.held.begin());
      revoked_.insert({process.incarnation, id});
      if (OneIn(10)) return;  // lost
      (void)core_.Revoked(process.incarnation, id, now_);
      Later([this, incarnation = process.incarnation, id] {
        (void)core_.Revoked(incarnation, id, now_);
      });
    }
  }

  void Publish(Process& process) {
    HeldRequest request;
    request.incarnation = process.incarnation;
    request.held.id = {process.state.joined_term, process.next_version};
    request.deadline_ns = OneIn(2) ? now_.wall_ns + 2000 * 1'000'000ll : 0;
    process.state.held.push_back(request.held);
    held_[request.held.id].insert(process.incarnation);
    ++process.next_version;
    if (OneIn(10)) {  // lost: given up
      process.state.held.pop_back();
      revoked_.insert({process.incarnation, request.held.id});
      return;
    }
    const auto reply = core_.Held(request, now_);
    Later([this, request] { (void)core_.Held(request, now_); });
    if (!reply.ok()) {
      const Code code = reply.status().code();
      ASSERT_TRUE(code == Code::kUnavailable || code == Code::kStaleTerm)
          << "version " << request.held.id.version << " " << reply.status().ToString();
      process.state.held.pop_back();
      revoked_.insert({process.incarnation, request.held.id});
      return;
    }
    if (!OneIn(20)) Told(process, request.held.id, reply->state);
  }

  void Roll(Process& process) {
    const auto offer = core_.Poll(process.incarnation, process.state.serving, false, now_);
    if (!offer.ok() || !offer->offered) return;
    ++offers_;
    CheckOffer(offer->id);
    Told(process, offer->id, VersionState::kAvailable);
    ASSERT_GT(offer->id, process.state.serving);
    if (OneIn(2)) process.state.serving = offer->id;
    process.state.highest_term = std::max(process.state.highest_term, offer->id.term);
  }

  // AVAILABLE and ABORTED told to anyone who lives stay.
  void Told(Process& process, VersionId id, VersionState state) {
    for (HeldVersion& held : process.state.held) {
      if (held.id == id) held.told = state;
    }
    if (state != VersionState::kAvailable && state != VersionState::kAborted) return;
    for (const Process& other : processes_) {
      if (other.dead) continue;
      const auto before = told_.find({other.incarnation, id});
      if (before == told_.end() || before->second == state) continue;
      // One that slept while the coordinator restarted may have been too late to be heard.
      if (other.asleep_until > restarted_ms_) continue;
      ADD_FAILURE() << fmt::format(
          "{}: version {} of term {} is told as state {}, but {} was told {}", process.incarnation,
          id.version, id.term, static_cast<int>(state), other.incarnation,
          static_cast<int>(before->second));
    }
    told_[{process.incarnation, id}] = state;
    HeldVersion told;
    told.id = id;
    told.told = state;
    process.state.told.push_back(told);
    if (process.state.told.size() > 200) process.state.told.erase(process.state.told.begin());
  }

  // Every rank of the world (or, with replicas, one) held it; and no two lives of one rank did.
  void CheckOffer(VersionId id) {
    std::map<uint32_t, uint64_t> by_rank;
    std::set<uint32_t> live;
    for (uint64_t incarnation : held_[id]) {
      const Process& process = processes_[incarnation - 1];
      const auto [other, first] = by_rank.emplace(process.rank, incarnation);
      ASSERT_TRUE(first) << "trainer " << process.rank << " held it as " << incarnation
                         << " and as " << other->second;
      if (revoked_.count({incarnation, id}) == 0) live.insert(process.rank);
    }
    ASSERT_GE(by_rank.size(), replicas_ ? 1 : trainers_);
    ASSERT_GE(live.size(), 0u);
  }

  void CheckMembers() {
    std::set<std::tuple<Role, uint32_t>> numbers;
    const auto members = core_.Members(now_);
    for (const MemberInfo& member : members->members) {
      ASSERT_TRUE(numbers.insert({member.role, member.rank}).second);
      ASSERT_FALSE(*core_.Gone(member.incarnation, now_));
    }
    ASSERT_EQ(members->term, core_.term());
    // Within one life of the coordinator terms rise.
    if (last_term_of_ == restarted_ms_ && core_.settled()) {
      ASSERT_GE(core_.term(), last_term_);
    }
    last_term_of_ = restarted_ms_;
    last_term_ = core_.term();
  }

  SplitMix64 random_;
  uint32_t trainers_;
  bool replicas_;
  CoordinatorTime now_{0, 100'000 * 1'000'000ll};
  CoordinatorCore core_;
  uint64_t incarnations_ = 0;
  std::deque<Process> processes_;  // by incarnation - 1
  std::deque<std::function<void()>> late_;
  std::map<VersionId, std::set<uint64_t>> held_;
  std::set<std::pair<uint64_t, VersionId>> revoked_;
  std::map<std::pair<uint64_t, VersionId>, VersionState> told_;
  int64_t restarted_ms_ = 0;
  uint64_t last_term_ = 0;
  int64_t last_term_of_ = -1;
  int offers_ = 0;
  std::string trace_;
};

TEST(CoordinatorRandomSchedules, KeepThePromises) {
  const char* count = std::getenv("BASCULE_TEST_SCHEDULES");
  const uint64_t schedules = count == nullptr ? 2000 : std::strtoull(count, nullptr, 10);
  int offers = 0;
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    World world(seed, 1 + seed % 3, seed % 2 == 0);
    for (int step = 0; step < 200 && !::testing::Test::HasFailure(); ++step) world.Step();
    offers += world.offers();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed << "\n" << world.trace();
  }
  EXPECT_GT(offers, static_cast<int>(schedules) * 10);  // the schedules get somewhere
}

}  // namespace
}  // namespace bascule
