// Drives a CoordinatorCore by hand: a small world whose clock the test moves.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/core.h"

namespace bascule {

inline constexpr uint64_t kPoller = 900;

struct CoreDriver {
  // `replicas`: every trainer holds the whole model; else each holds a part of its own.
  explicit CoreDriver(uint32_t world, bool replicas = false, int64_t wall_ms = 1'000'000)
      : world_size(world), core(Options(replicas, wall_ms)) {
    now = {0, wall_ms * 1'000'000};
  }

  static CoordinatorOptions Options(bool replicas, int64_t wall_ms, int64_t steady_ms = 0) {
    CoordinatorOptions options;
    options.job = "job";
    options.token = "token";
    options.heartbeat_ms = 100;
    options.coordinator_id = 7;
    options.start = {steady_ms, wall_ms * 1'000'000};
    options.oracle = std::make_shared<TrivialOracle>(replicas);
    return options;
  }

  void Pass(int64_t ms) {
    now.steady_ms += ms;
    now.wall_ns += ms * 1'000'000;
  }
  // The coordinator is killed and started anew; its clock may have stepped.
  void RestartCoordinator(int64_t step_ms = 0, bool replicas = false) {
    now.wall_ns += step_ms * 1'000'000;
    core = CoordinatorCore(Options(replicas, now.wall_ns / 1'000'000, now.steady_ms));
  }

  JoinRequest Request(uint32_t rank, uint64_t incarnation) {
    JoinRequest request;
    request.job = "job";
    request.token = "token";
    request.member.rank = rank;
    request.member.world_size = world_size;
    request.member.incarnation = incarnation;
    request.member.node = fmt::format("node{}", rank);
    request.state = states[incarnation];
    return request;
  }
  Result<JoinReply> Join(const JoinRequest& request) {
    Result<JoinReply> reply = core.Join(request, now);
    if (!reply.ok() || request.member.role != Role::kTrainer) return reply;
    MemberState& state = states[request.member.incarnation];
    state.joined_term = reply->term;
    state.highest_term = std::max(state.highest_term, reply->term);
    incarnation_of[request.member.rank] = request.member.incarnation;
    return reply;
  }
  // As a new process, or a member that goes on (its state says which).
  Result<JoinReply> Join(uint32_t rank, uint64_t incarnation) {
    return Join(Request(rank, incarnation));
  }
  Result<JoinReply> JoinRollout(uint64_t incarnation, const std::string& engine = "e0",
                                uint32_t rank = 0, uint32_t size = 1) {
    JoinRequest request = Request(rank, incarnation);
    request.member.role = Role::kRollout;
    request.member.engine = engine;
    request.member.world_size = size;
    return core.Join(request, now);
  }
  // Trainers with incarnations 100 + rank, and one rollout that polls.
  void JoinAll() {
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      const auto joined = Join(rank, 100 + rank);
      ASSERT_TRUE(joined.ok()) << joined.status().ToString();
    }
    const auto joined = JoinRollout(kPoller);
    ASSERT_TRUE(joined.ok()) << joined.status().ToString();
  }
  // Everybody but `silent` sends a heartbeat, `times` times an interval apart.
  void Beat(int times = 1, const std::vector<uint64_t>& silent = {}) {
    for (int i = 0; i < times; ++i) {
      Pass(100);
      for (const auto& [incarnation, state] : states) {
        if (std::count(silent.begin(), silent.end(), incarnation) == 0) Heartbeat(incarnation);
      }
      core.Tick(now);
    }
  }
  HeartbeatReply Heartbeat(uint64_t incarnation) {
    HeartbeatRequest request;
    request.token = "token";
    request.incarnation = incarnation;
    request.state = states[incarnation];
    auto reply = core.Heartbeat(request, now);
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    if (!reply.ok()) return {};
    MemberState& state = states[incarnation];
    if (reply->term == state.joined_term) state.term_complete |= reply->term_complete;
    for (const auto& [id, told] : reply->versions) {
      for (HeldVersion& held : state.held) {
        if (held.id == id) held.told = told;
      }
    }
    return *reply;
  }

  HeldRequest HeldBy(uint64_t incarnation, uint64_t version, std::vector<Sum> sums = {{5, 1}}) {
    HeldRequest request;
    request.token = "token";
    request.incarnation = incarnation;
    request.held.id = {states[incarnation].joined_term, version};
    request.held.epoch = core.epoch();
    request.held.replica_sums = std::move(sums);
    request.held.publish_start_ns = now.wall_ns;
    return request;
  }
  Result<VersionReply> TryHeld(const HeldRequest& request) {
    auto reply = core.Held(request, now);
    if (!reply.ok()) return reply;
    std::vector<HeldVersion>& held = states[request.incarnation].held;
    std::erase_if(held, [&](const HeldVersion& h) { return h.id == request.held.id; });
    held.push_back(request.held);
    held.back().told = reply->state;
    return reply;
  }
  VersionReply Held(uint32_t rank, uint64_t version, std::vector<Sum> sums = {{5, 1}}) {
    auto reply = TryHeld(HeldBy(incarnation_of[rank], version, std::move(sums)));
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? *reply : VersionReply();
  }
  Status Revoked(uint64_t incarnation, VersionId id) {
    std::erase_if(states[incarnation].held, [&](const HeldVersion& h) { return h.id == id; });
    return core.Revoked(incarnation, id, now);
  }
  VersionReply Query(VersionId id, uint64_t incarnation = kPoller) {
    auto reply = core.QueryVersion(incarnation, id, false, now);
    EXPECT_TRUE(reply.has_value());
    EXPECT_TRUE(reply->ok()) << reply->status().ToString();
    return reply->ok() ? **reply : VersionReply();
  }
  PollReply Poll(VersionId newer_than = {}, bool or_equal = false) {
    auto reply = core.Poll(kPoller, newer_than, or_equal, now);
    EXPECT_TRUE(reply.ok()) << reply.status().ToString();
    return reply.ok() ? *reply : PollReply();
  }

  uint32_t world_size;
  CoordinatorTime now;
  CoordinatorCore core;
  std::map<uint64_t, MemberState> states;  // as the members know it; by incarnation
  std::map<uint32_t, uint64_t> incarnation_of;
};

}  // namespace bascule
