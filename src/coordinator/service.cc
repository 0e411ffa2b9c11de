#include "coordinator/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/random.h"

namespace bascule {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

int64_t WallNs(const CoordinatorServiceOptions& options) {
  if (options.wall_ns) return options.wall_ns();
  return duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

CoordinatorOptions CoreOptions(const CoordinatorServiceOptions& options,
                               std::shared_ptr<const CoverageOracle> oracle) {
  CoordinatorOptions core;
  core.job = options.job;
  core.token = options.token;
  core.coordinator_id = RandomU64() | 1;
  core.heartbeat_ms = std::max<int64_t>(1, options.heartbeat.count());
  core.seed = RandomU64() | 1;
  core.start.steady_ms =
      duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
  core.start.wall_ns = WallNs(options);
  core.oracle = std::move(oracle);
  core.limits = options.limits;
  core.record_events = options.log != nullptr;
  return core;
}

const Status& Stopped() {
  static const Status kStopped(Code::kUnavailable, "the coordinator stopped");
  return kStopped;
}

}  // namespace

std::shared_ptr<CoordinatorService> CoordinatorService::Create(CoordinatorServiceOptions options) {
  return std::shared_ptr<CoordinatorService>(new CoordinatorService(std::move(options)));
}

CoordinatorService::CoordinatorService(CoordinatorServiceOptions options)
    : options_(std::move(options)),
      oracle_(std::make_shared<TemplateOracle>()),
      last_time_(steady_clock::now()),
      core_(CoreOptions(options_, oracle_)) {
  thread_ = std::thread([this] { Run(); });
}

CoordinatorService::~CoordinatorService() { Stop(); }

void CoordinatorService::Stop() {
  if (fork_.forked()) {
    // The thread does not exist here, and the lock may be held for ever.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::list<Waiter> waiters;
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    waiters.swap(waiters_);
    thread.swap(thread_);
  }
  wake_.notify_all();
  for (Waiter& waiter : waiters) waiter.stopped();
  if (thread.joinable()) thread.join();
}

// With the lock.
CoordinatorTime CoordinatorService::Time() {
  const auto now = steady_clock::now();
  const auto step = now - last_time_;
  last_time_ = now;
  if (step > 2 * options_.heartbeat) slept_ += step - options_.heartbeat;
  const auto steady = duration_cast<milliseconds>((now - slept_).time_since_epoch());
  return {steady.count(), WallNs(options_)};
}

template <typename Function>
auto CoordinatorService::Call(Function function) -> decltype(function(CoordinatorTime())) {
  if (const Status forked = fork_.Check(); !forked.ok()) return forked;
  std::unique_lock lock(mutex_);
  if (stopped_) return Stopped();
  auto reply = function(Time());
  const bool changed = core_.changes() != seen_changes_ && !waiters_.empty();
  lock.unlock();
  if (changed) wake_.notify_one();
  return reply;
}

void CoordinatorService::Wait(Deadline deadline, Attempt attempt, std::function<void()> stopped) {
  if (fork_.forked()) return stopped();
  std::unique_lock lock(mutex_);
  if (stopped_) {
    lock.unlock();
    return stopped();
  }
  std::function<void()> completion = attempt(Time(), deadline.Passed());
  if (!completion) waiters_.push_back({deadline, std::move(attempt), std::move(stopped)});
  lock.unlock();
  wake_.notify_one();
  if (completion) completion();
}

void CoordinatorService::TellEvents(std::unique_lock<std::mutex>& lock) {
  if (!options_.log) return;
  const std::vector<std::string> events = core_.TakeEvents();
  if (events.empty()) return;
  lock.unlock();
  for (const std::string& event : events) options_.log(LogLevel::kInfo, "coordinator: " + event);
  lock.lock();
}

void CoordinatorService::Run() {
  const auto tick = std::max<steady_clock::duration>(options_.heartbeat / 4, milliseconds(1));
  auto next_tick = steady_clock::now() + tick;
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    auto until = next_tick;
    for (const Waiter& waiter : waiters_) until = std::min(until, waiter.deadline.at());
    wake_.wait_until(lock, until, [this, until] {
      return stopped_ || core_.changes() != seen_changes_ || steady_clock::now() >= until;
    });
    if (stopped_) return;
    TellEvents(lock);
    if (stopped_) return;
    const CoordinatorTime now = Time();
    const bool due = steady_clock::now() >= next_tick;
    if (due) {
      const size_t blobs = core_.StoredBlobs().size();
      core_.Tick(now);
      const std::vector<ContentDigest> kept = core_.StoredBlobs();
      if (kept.size() != blobs) oracle_->Retain(kept);
      next_tick = steady_clock::now() + tick;
    }
    const bool changed = core_.changes() != seen_changes_;
    seen_changes_ = core_.changes();
    std::vector<std::function<void()>> completions;
    for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
      const bool last = waiter->deadline.Passed();
      std::function<void()> completion;
      if (last || due || changed) completion = waiter->attempt(now, last);
      if (completion) {
        completions.push_back(std::move(completion));
        waiter = waiters_.erase(waiter);
      } else {
        ++waiter;
      }
    }
    if (completions.empty()) continue;
    lock.unlock();
    for (auto& completion : completions) completion();
    lock.lock();
  }
}

void CoordinatorService::Join(const JoinRequest& request, Deadline deadline,
                              const Done<JoinReply>& done) {
  // An older rank with the number counts as alive only if it is heard after this call began: one
  // that was killed a moment ago must not make its successor fail.
  auto began = std::make_shared<std::optional<int64_t>>();
  Attempt attempt = [this, request, done, began](CoordinatorTime now, bool last) {
    std::function<void()> over;
    if (!began->has_value()) *began = now.steady_ms;
    Result<JoinReply> reply = core_.Join(request, now);
    const Code code = reply.status().code();
    bool wait = code == Code::kUnavailable;
    if (code == Code::kAlreadyExists) {
      const CoordinatorCore::Rival rival = core_.RivalOf(request.member);
      wait = rival.incarnation != 0 && rival.last_seen_ms <= **began;
    }
    if (!wait || last) over = [done, reply = std::move(reply)] { done(reply); };
    return over;
  };
  Wait(deadline, std::move(attempt),
       [this, done] { done(fork_.forked() ? fork_.Check() : Stopped()); });
}

void CoordinatorService::WaitComplete(uint64_t incarnation, Deadline deadline,
                                      const Done<SharedMembership>& done) {
  Attempt attempt = [this, incarnation, done](CoordinatorTime now, bool last) {
    std::function<void()> over;
    auto reply = core_.WaitComplete(incarnation, now);
    if (!reply.has_value() && last) reply = core_.NotComplete();
    if (reply.has_value()) over = [done, reply = std::move(*reply)] { done(reply); };
    return over;
  };
  Wait(deadline, std::move(attempt),
       [this, done] { done(fork_.forked() ? fork_.Check() : Stopped()); });
}

void CoordinatorService::QueryVersion(uint64_t incarnation, VersionId id, bool wait,
                                      Deadline deadline, const Done<VersionReply>& done) {
  Attempt attempt = [this, incarnation, id, wait, done](CoordinatorTime now, bool last) {
    std::function<void()> over;
    auto reply = core_.QueryVersion(incarnation, id, wait, now);
    if (!reply.has_value() && last) reply = core_.NotEnded(id);
    if (reply.has_value()) over = [done, reply = std::move(*reply)] { done(reply); };
    return over;
  };
  Wait(deadline, std::move(attempt),
       [this, done] { done(fork_.forked() ? fork_.Check() : Stopped()); });
}

Status CoordinatorService::Leave(uint64_t incarnation) {
  return Call([&](CoordinatorTime now) { return core_.Leave(incarnation, now); });
}

Result<HeartbeatReply> CoordinatorService::Heartbeat(const HeartbeatRequest& request) {
  return Call([&](CoordinatorTime now) { return core_.Heartbeat(request, now); });
}

Result<JoinReply> CoordinatorService::Rebind(const MemberInfo& member) {
  return Call([&](CoordinatorTime now) { return core_.Rebind(member, now); });
}

Result<CoordinatorService::SharedMembership> CoordinatorService::Members() {
  return Call([&](CoordinatorTime now) { return Result<SharedMembership>(core_.Members(now)); });
}

Result<CoordinatorService::SharedMembership> CoordinatorService::MembersFor(VersionId id,
                                                                            uint64_t epoch) {
  return Call([&](CoordinatorTime now) { return core_.MembersFor(id, epoch, now); });
}

Status CoordinatorService::PutBlob(const ContentDigest& digest, std::string bytes) {
  if (bytes.size() > options_.limits.blob_bytes) {
    return Status(Code::kResourceExhausted, fmt::format("a blob of {} bytes; the limit is {}",
                                                        bytes.size(), options_.limits.blob_bytes));
  }
  if (DigestOf(bytes) != digest) {
    return Status(Code::kDataLoss,
                  fmt::format("the blob's bytes are not those of digest {}", digest.ToString()));
  }
  auto shared = std::make_shared<const std::string>(std::move(bytes));
  // Parsed here and not under the lock; before others see the blob, and again in case the oracle
  // was told in between to forget what is not stored.
  oracle_->Add(digest, *shared);
  BASCULE_RETURN_IF_ERROR(
      Call([&](CoordinatorTime now) { return core_.PutBlob(digest, shared, now); }));
  oracle_->Add(digest, *shared);
  return Status::Ok();
}

Result<bool> CoordinatorService::HasBlob(const ContentDigest& digest) {
  return Call([&](CoordinatorTime) { return Result<bool>(core_.HasBlob(digest)); });
}

Result<std::shared_ptr<const std::string>> CoordinatorService::GetBlob(
    const ContentDigest& digest) {
  return Call([&](CoordinatorTime) { return core_.GetBlob(digest); });
}

Result<VersionReply> CoordinatorService::Held(const HeldRequest& request) {
  return Call([&](CoordinatorTime now) { return core_.Held(request, now); });
}

Status CoordinatorService::Revoked(uint64_t incarnation, VersionId id) {
  return Call([&](CoordinatorTime now) { return core_.Revoked(incarnation, id, now); });
}

Result<PollReply> CoordinatorService::Poll(uint64_t incarnation, VersionId newer_than,
                                           bool or_equal) {
  return Call(
      [&](CoordinatorTime now) { return core_.Poll(incarnation, newer_than, or_equal, now); });
}

Status CoordinatorService::Serving(uint64_t incarnation, VersionId id, bool servable) {
  return Call([&](CoordinatorTime now) { return core_.Serving(incarnation, id, servable, now); });
}

Result<bool> CoordinatorService::Gone(uint64_t incarnation) {
  return Call([&](CoordinatorTime now) { return core_.Gone(incarnation, now); });
}

std::string CoordinatorService::StatusJson() {
  if (fork_.forked()) return "{}";
  const std::lock_guard lock(mutex_);
  return core_.StatusJson(Time());
}

}  // namespace bascule
