// The thread-safe runtime of a CoordinatorCore: a mutex, clocks, one thread that ticks and
// completes waiting calls. The local and the gRPC directory both call it.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "bascule/deadline.h"
#include "bascule/log.h"
#include "base/fork_guard.h"
#include "coordinator/core.h"
#include "coordinator/coverage_oracle.h"
#include "coordinator/directory.h"

namespace bascule {

struct CoordinatorServiceOptions {
  std::string job;
  std::string token;
  std::chrono::milliseconds heartbeat{500};
  LogSink log;  // ranks that come and go, terms, versions that end badly; null: quiet
  CoordinatorLimits limits;
  std::function<int64_t()> wall_ns;  // tests: the wall clock; null: CLOCK_REALTIME
};

// All methods may be called from any thread. Those with a Done return at once; Done runs once, on
// the service's thread or the caller's, at the latest shortly after the deadline or at Stop.
class CoordinatorService {
 public:
  template <typename T>
  using Done = std::function<void(Result<T>)>;
  using SharedMembership = CoordinatorCore::SharedMembership;

  [[nodiscard]] static std::shared_ptr<CoordinatorService> Create(
      CoordinatorServiceOptions options);
  ~CoordinatorService();
  CoordinatorService(const CoordinatorService&) = delete;
  CoordinatorService& operator=(const CoordinatorService&) = delete;

  // Waits while the coordinator started lately and a running term may rejoin, and while it is not
  // known whether an older rank with the number is alive: then kAlreadyExists.
  void Join(const JoinRequest& request, Deadline deadline, const Done<JoinReply>& done);
  void WaitComplete(uint64_t incarnation, Deadline deadline, const Done<SharedMembership>& done);
  void QueryVersion(uint64_t incarnation, VersionId id, bool wait, Deadline deadline,
                    const Done<VersionReply>& done);

  [[nodiscard]] Status Leave(uint64_t incarnation);
  [[nodiscard]] Result<HeartbeatReply> Heartbeat(const HeartbeatRequest& request);
  [[nodiscard]] Result<JoinReply> Rebind(const MemberInfo& member);
  [[nodiscard]] Result<SharedMembership> Members();
  [[nodiscard]] Result<SharedMembership> MembersFor(VersionId id, uint64_t epoch);
  [[nodiscard]] Status PutBlob(const ContentDigest& digest, std::string bytes);
  [[nodiscard]] Result<bool> HasBlob(const ContentDigest& digest);
  [[nodiscard]] Result<std::shared_ptr<const std::string>> GetBlob(const ContentDigest& digest);
  [[nodiscard]] Result<VersionReply> Held(const HeldRequest& request);
  [[nodiscard]] Status Revoked(uint64_t incarnation, VersionId id);
  [[nodiscard]] Result<PollReply> Poll(uint64_t incarnation, VersionId newer_than, bool or_equal);
  [[nodiscard]] Status Serving(uint64_t incarnation, VersionId id, bool servable);
  [[nodiscard]] Result<bool> Gone(uint64_t incarnation);
  [[nodiscard]] std::string StatusJson();

  // Waiting calls and all later ones get kUnavailable. Idempotent.
  void Stop();

 private:
  // Tells the log what happened; gives up the lock meanwhile.
  void TellEvents(std::unique_lock<std::mutex>& lock);
  // Asks the core once; a completion to run without the lock when the call is over. `last`: the
  // deadline has passed.
  using Attempt = std::function<std::function<void()>(CoordinatorTime now, bool last)>;
  struct Waiter {
    Deadline deadline;
    Attempt attempt;
    std::function<void()> stopped;
  };

  explicit CoordinatorService(CoordinatorServiceOptions options);
  void Run();
  void Wait(Deadline deadline, Attempt attempt, std::function<void()> stopped);
  template <typename Function>
  auto Call(Function function) -> decltype(function(CoordinatorTime()));
  [[nodiscard]] CoordinatorTime Time();

  const ForkGuard fork_;
  const CoordinatorServiceOptions options_;
  const std::shared_ptr<TemplateOracle> oracle_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  // Time in which this process did not run (a suspended machine) is not the members' silence.
  std::chrono::steady_clock::time_point last_time_;
  std::chrono::steady_clock::duration slept_{0};
  CoordinatorCore core_;
  uint64_t seen_changes_ = 0;
  std::list<Waiter> waiters_;
  std::thread thread_;
};

}  // namespace bascule
