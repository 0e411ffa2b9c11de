// Invariants of the session (design 3.5, docs/protocol.md) over random schedules and, for a small
// job, over all of them.
//
// SCHEDULES in the environment sets how many (100000 by default): SCHEDULES=1000000 test_session
// --gtest_filter='Schedule.*'.
#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <random>
#include <unordered_set>

#include "tests/session/model/model.h"

namespace bascule {
namespace {

using testing::Model;
using testing::ModelOptions;
using testing::Step;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // an order of magnitude slower
#else
constexpr bool kSanitized = false;
#endif

uint64_t Schedules() {
  const char* text = std::getenv("SCHEDULES");
  if (text != nullptr) return std::strtoull(text, nullptr, 10);
  return kSanitized ? 4000 : 100000;
}

// One random schedule: random steps with the faults falling anywhere, then calm.
std::string RunSchedule(const ModelOptions& options, uint64_t seed) {
  std::mt19937_64 random(seed);
  Model model(options, seed);
  std::string trace;
  const auto length = 20 + random() % 160;
  // The moment of the first fault is drawn first, so that it falls on every step alike.
  const auto fault_at = random() % length;
  for (uint64_t i = 0; i < length; ++i) {
    auto steps = model.Enabled();
    std::vector<Step> faults;
    std::vector<Step> others;
    for (const Step& step : steps) {
      const bool fault = step.kind == Step::kKill || step.kind == Step::kStop;
      (fault ? faults : others).push_back(step);
    }
    const bool fail = !faults.empty() && (i == fault_at || (i > fault_at && random() % 32 == 0));
    const auto& from = fail || others.empty() ? faults : others;
    if (from.empty()) break;
    // Deadlines and lost answers are rarer than progress.
    Step step = from[random() % from.size()];
    if (step.kind == Step::kTime && random() % 4 != 0) continue;
    if (step.kind == Step::kReceiver && step.choice > 0 && random() % 4 != 0) continue;
    trace += Model::Name(step) + "; ";
    model.Run(step);
    if (!model.violation().empty()) {
      return model.violation() + "\nafter: " + trace + "\n" + model.Describe();
    }
  }
  if (!model.Calm()) {
    return "not calm at the end: " + model.violation() + "\nafter: " + trace + "\n" +
           model.Describe();
  }
  return "";
}

void RunMany(const ModelOptions& options, uint64_t count, uint64_t salt) {
  for (uint64_t seed = 0; seed < count; ++seed) {
    std::string failure = RunSchedule(options, seed * 64 + salt);
    ASSERT_TRUE(failure.empty()) << "seed " << seed << ": " << failure;
  }
}

TEST(Schedule, OneFault) { RunMany({}, Schedules() * 3 / 10, 1); }

TEST(Schedule, OneFaultInPlace) { RunMany({.in_place = true}, Schedules() * 2 / 10, 2); }

TEST(Schedule, TwoFaultsThreeReceivers) {
  RunMany({.receivers = 3, .faults = 2}, Schedules() / 10, 3);
}

// A leader that was declared gone while it stood still wakes with a commit that nobody else may
// follow any more.
TEST(Schedule, AStoppedLeaderWakes) {
  RunMany({.receivers = 3, .versions = 3, .only_leader_stops = true}, Schedules() * 2 / 10, 6);
}

TEST(Schedule, ReplicasThreeFaults) {
  RunMany({.faults = 3, .replicas = true}, Schedules() / 10, 4);
}

TEST(Schedule, OneSlot) { RunMany({.versions = 3, .slots = 1}, Schedules() / 10, 5); }

// Every schedule of 2 trainers and 2 receivers, one version, one chunk a pair, at most one crash,
// by hashing states; each life of rank 0 opens one update (more would repeat it without end).
TEST(Schedule, ExhaustiveSmallJob) {
  ModelOptions options{.trainers = 2, .receivers = 2, .versions = 1, .slots = 1, .faults = 1};
  options.stops = false;
  options.clock_runs = false;
  options.most_updates = 1;
  std::unordered_set<uint64_t> seen;
  std::deque<Model> frontier;
  frontier.emplace_back(options, 0);
  seen.insert(frontier.front().Fingerprint());
  uint64_t states = 0;
  while (!frontier.empty() && (states < 20000 || !kSanitized)) {
    Model model = std::move(frontier.front());
    frontier.pop_front();
    ++states;
    for (const Step& step : model.Enabled()) {
      Model next = model;
      next.Run(step);
      ASSERT_TRUE(next.violation().empty()) << next.violation() << "\n" << next.Describe();
      if (seen.insert(next.Fingerprint()).second) frontier.push_back(std::move(next));
    }
  }
  RecordProperty("states", std::to_string(states));
  EXPECT_TRUE(frontier.empty() || kSanitized);
  EXPECT_GT(states, kSanitized ? 10000u : 500000u) << "the model lost most of its behaviour";
}

}  // namespace
}  // namespace bascule
