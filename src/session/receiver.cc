// WeightReceiver: a rollout rank. Connects the engine channel (decisions) with the lander (bytes).
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <mutex>
#include <new>
#include <thread>

#include "bascule/session.h"
#include "base/fork_guard.h"
#include "session/agent.h"
#include "session/engine_channel.h"
#include "session/environment.h"
#include "session/lander.h"

namespace bascule {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSlice{1000};

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t WallNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// One background thread that runs jobs in order.
class Worker {
 public:
  Worker() : thread_([this] { Loop(); }) {}
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void Post(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    jobs_.push_back(std::move(job));
    wake_.notify_one();
  }
  // Drops what has not begun; waits for what has.
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      jobs_.clear();
      wake_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_;
};

// Takes a lock that may be held for long. (Not a timed mutex: its clock wait is one that the thread
// sanitizer does not see.)
bool LockBy(std::unique_lock<std::mutex>* lock, Deadline deadline) {
  while (!lock->try_lock()) {
    if (deadline.Passed()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// Shared by the receiver and its updates.
struct ReceiverShared {
  RolloutOptions options;
  std::string name;
  bool in_place = false;
  // Destroyed from the last to the first: whoever calls goes before whom it calls.
  std::unique_ptr<EngineChannel> channel;
  std::unique_ptr<Agent> agent;

  std::mutex data;  // one landing, switch or audit at a time
  std::unique_ptr<Lander> lander;
  std::atomic<uint64_t> peer_requests{0};  // sent to sources so far

  std::atomic<bool> connected{false};  // the agent's beats may use the channel

  std::mutex mutex;                            // guards what follows
  UpdateKey staging;                           // of the job in progress or done last
  Status staged;                               // its outcome
  UpdateKey ended;                             // of the job that is over, its leader told
  std::shared_ptr<std::atomic<bool>> give_up;  // its cancel flag
  std::function<Status(VersionId)> hook;
  Status why_poisoned;
  MemberReport last;                   // for status displays
  EngineChannel::PollResult polled{};  // the last answer
  std::unique_ptr<PeerHandler> handler;
  std::shared_ptr<Transport> transport;  // its threads call the handler, and that all of the above
  std::unique_ptr<Worker> worker;

  [[nodiscard]] Status Usable() const {
    if (!agent) return Status(Code::kClosed, "the receiver is closed; connect anew");
    return agent->Usable();
  }
  // Requests sent so far, by this rank.
  [[nodiscard]] uint64_t ControlRequests() const {
    return agent->directory().requests() + channel->requests();
  }
  [[nodiscard]] ReceiverState State() const {
    return channel->WithCore([](RankCore& core) { return core.state(); });
  }
  [[nodiscard]] Status Servable() {
    Status status = channel->WithCore([](RankCore& core) { return core.Servable(); });
    if (status.code() != Code::kPoisoned) return status;
    std::lock_guard lock(mutex);
    if (why_poisoned.ok()) return status;
    return Status(Code::kPoisoned, status.message() + "; cause: " + why_poisoned.message())
        .WithRank(static_cast<int>(options.rank))
        .WithPeer(why_poisoned.peer())
        .WithTensor(why_poisoned.tensor());
  }
  void CancelStaging() {
    std::lock_guard lock(mutex);
    if (give_up) give_up->store(true);
  }
  [[nodiscard]] bool Ended(const UpdateKey& key) {
    std::lock_guard lock(mutex);
    return ended == key;
  }
  // Why an update ended without a commit on this rank.
  [[nodiscard]] Status StagedStatus(const UpdateKey& key) {
    std::lock_guard lock(mutex);
    if (staging == key) return staged;
    const bool replaced = staging.decider == key.decider && staging.attempt > key.attempt;
    return replaced ? Status(Code::kAborted, "the update was given up for a newer one")
                    : Status(Code::kInvalidArgument,
                             "this rank has not staged the version; call Stage first");
  }
  void RunStage(const UpdateKey& key, const PlanBasis& basis,
                const std::shared_ptr<std::atomic<bool>>& cancel, Deadline deadline);
  [[nodiscard]] Status LandOnce(const PlanBasis& basis, const std::function<bool()>& cancelled,
                                Deadline deadline);
};

Status ReceiverShared::LandOnce(const PlanBasis& basis, const std::function<bool()>& cancelled,
                                Deadline deadline) {
  // In slices, so that Close need not wait for a coordinator that is gone.
  Status prepared = lander->Prepare(basis, deadline.Earlier(Deadline::In(kSlice)));
  if (prepared.code() == Code::kDeadlineExceeded) {
    return Status(Code::kUnavailable, prepared.message()).WithPeer(prepared.peer());
  }
  BASCULE_RETURN_IF_ERROR(std::move(prepared));
  channel->NoteMembers(lander->EngineMembers());
  if (in_place) return lander->OpenSources(basis.id, deadline);
  return lander->Land(basis.id, cancelled, deadline);
}

// The staging job, on the worker's thread: land, vote.
void ReceiverShared::RunStage(const UpdateKey& key, const PlanBasis& basis,
                              const std::shared_ptr<std::atomic<bool>>& cancel, Deadline deadline) {
  auto cancelled = [&cancel] { return cancel->load(); };
  Status status;
  int attempts = 0;
  for (;;) {
    {
      std::lock_guard lock(data);
      // A plan that is out of date (a source left) is made anew from the newest membership.
      status = LandOnce(attempts++ == 0 ? basis : PlanBasis{basis.id}, cancelled, deadline);
    }
    // A membership in motion (a rank joining, a plan that a source has not seen) settles soon.
    if (status.code() != Code::kUnavailable || cancelled()) break;
    if (deadline.Left() < milliseconds(100)) break;
    std::this_thread::sleep_for(milliseconds(50));
  }
  {
    std::lock_guard lock(mutex);
    staged = status;
    if (!status.ok() && !cancelled()) NoteError(status, &last);
  }
  const bool mine =
      channel->WithCore([&](RankCore& core) { return core.EndStage(key, status.ok()); });
  // A leader that cannot be told aborts by its deadline.
  if (mine) (void)channel->Vote(key, status.ok(), status.ToString(), deadline);
  {
    std::lock_guard lock(mutex);
    ended = key;
  }
  channel->WithCore([](RankCore&) {});  // wakes who waits for it
}

class UpdateImpl final : public Update {
 public:
  UpdateImpl(std::shared_ptr<ReceiverShared> shared, const PlanBasis& basis,
             std::optional<UpdateKey> key, int64_t publish_start_ns, uint64_t control_before)
      : shared_(std::move(shared)),
        id_(basis.id),
        basis_(basis),
        control_before_(control_before),
        peer_before_(shared_->peer_requests),
        key_(key) {
    const VersionId id = basis.id;
    report_.id = id;
    report_.publish_start_ns = publish_start_ns;
  }

  [[nodiscard]] VersionId id() const override { return id_; }
  Status Stage(Deadline deadline) override;
  Status WaitStaged(Deadline deadline) override;
  Result<bool> Ready(Deadline deadline) override;
  Status Decide(Deadline deadline) override;
  Status Commit(Deadline deadline) override;
  Status Abort(Deadline deadline) override;
  [[nodiscard]] Report report() const override {
    std::lock_guard lock(mutex_);
    Report report = report_;
    report.peer_messages += *peer_after_;
    return report;
  }

 private:
  [[nodiscard]] Result<UpdateKey> Key(Deadline deadline);
  [[nodiscard]] Status FinishEarlier(const UpdateKey& key, Deadline deadline);
  [[nodiscard]] Status SwitchTo(const UpdateKey& key, Deadline deadline);
  [[nodiscard]] Status RunHook(VersionId id);
  // This update was committed on this rank already.
  [[nodiscard]] bool Served(const UpdateKey& key) const {
    return shared_->channel->WithCore([&key](RankCore& core) {
      return core.key() == key && core.state() == ReceiverState::kIdle && core.serving() == key.id;
    });
  }
  void ReportLanding();
  void FinishReport(int64_t commit_start);
  void NoteCommit();
  void StartRotation(const UpdateKey& key);
  [[nodiscard]] Status Tag(const Status& status) const {
    if (status.ok() || status.rank() >= 0) return status;
    return Status(status).WithRank(static_cast<int>(shared_->options.rank));
  }

  std::shared_ptr<ReceiverShared> shared_;
  VersionId id_;
  PlanBasis basis_;
  const uint64_t control_before_;
  const uint64_t peer_before_;
  // Of the audit in the background, which may outlive this.
  std::shared_ptr<std::atomic<uint64_t>> peer_after_ = std::make_shared<std::atomic<uint64_t>>(0);
  mutable std::mutex mutex_;
  std::optional<UpdateKey> key_;
  Report report_;
};

Result<UpdateKey> UpdateImpl::Key(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (key_) return *key_;
  }
  BASCULE_ASSIGN_OR_RETURN(UpdateKey key, shared_->channel->AttemptAt(id_, deadline));
  std::lock_guard lock(mutex_);
  key_ = key;
  return key;
}

// Another update may be in progress on this rank: it is given up, unless it was decided.
Status UpdateImpl::FinishEarlier(const UpdateKey& key, Deadline deadline) {
  ReceiverState state = ReceiverState::kIdle;
  UpdateKey earlier;
  shared_->channel->WithCore([&](RankCore& core) {
    state = core.state();
    earlier = core.key();
  });
  if (earlier == key) return Status::Ok();
  switch (state) {
    case ReceiverState::kStaging:
      shared_->CancelStaging();
      shared_->channel->WithCore([&](RankCore& core) { return core.GiveUp(earlier); });
      (void)shared_->channel->Vote(earlier, false, "given up for a newer update", deadline);
      return Status::Ok();
    case ReceiverState::kReady:
    case ReceiverState::kVerified:
    case ReceiverState::kInDoubt:
      return shared_->channel->Abort(earlier, "given up for a newer update", deadline);
    case ReceiverState::kIdle:
    case ReceiverState::kDecided:
    case ReceiverState::kCommitting:
    case ReceiverState::kPoisoned: break;
  }
  return Status::Ok();
}

Status UpdateImpl::Stage(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  auto found = Key(deadline);
  if (!found.ok()) return Tag(found.status());
  const UpdateKey key = *found;
  BASCULE_RETURN_IF_ERROR(Tag(FinishEarlier(key, deadline)));
  bool landed = false;
  bool again = false;
  Status begun = shared_->channel->WithCore([&](RankCore& core) {
    again = core.key() == key &&
            (core.state() == ReceiverState::kStaging || core.state() == ReceiverState::kVerified ||
             core.state() == ReceiverState::kReady);
    return again ? Status::Ok() : core.BeginStage(key, &landed);
  });
  if (!begun.ok()) return Tag(begun);
  if (again) return Status::Ok();
  auto cancel = std::make_shared<std::atomic<bool>>(false);
  {
    std::lock_guard lock(shared_->mutex);
    shared_->staging = key;
    shared_->staged = Status::Ok();
    shared_->give_up = cancel;
    if (landed) shared_->ended = key;
  }
  if (landed) return Tag(shared_->channel->Vote(key, true, "", deadline));
  shared_->worker->Post([shared = shared_.get(), key, basis = basis_, cancel, deadline] {
    shared->RunStage(key, basis, cancel, deadline);
  });
  return Status::Ok();
}

Status UpdateImpl::WaitStaged(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  BASCULE_ASSIGN_OR_RETURN(UpdateKey key, Key(deadline));
  const bool ended = shared_->channel->WaitCore(
      [&](const RankCore& core) {
        return core.key() != key ||
               (core.state() != ReceiverState::kStaging && shared_->Ended(key));
      },
      deadline);
  if (!ended) {
    return Tag(Status(Code::kDeadlineExceeded, "the version is still landing; wait longer"));
  }
  return Tag(shared_->StagedStatus(key));
}

Result<bool> UpdateImpl::Ready(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  BASCULE_ASSIGN_OR_RETURN(UpdateKey key, Key(deadline));
  return shared_->channel->Ready(key, deadline);
}

Status UpdateImpl::Decide(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  const int64_t start = NowNs();
  BASCULE_ASSIGN_OR_RETURN(UpdateKey key, Key(deadline));
  if (Served(key)) return Status::Ok();
  // A rank that is still landing keeps the engine waiting, at most to the deadline. One that gives
  // up before it voted makes a commit impossible: abort is recorded with its "no", or for want of
  // its vote.
  const bool ended = shared_->channel->WaitCore(
      [&](const RankCore& core) { return core.state() != ReceiverState::kStaging; }, deadline);
  if (!ended && shared_->channel->WithCore([&](RankCore& core) { return core.GiveUp(key); })) {
    shared_->CancelStaging();
    (void)shared_->channel->Vote(key, false, shared_->name + " had not landed by the deadline",
                                 Deadline::In(milliseconds(200)));
    return Tag(Status(Code::kNotDecided,
                      "this rank had not landed the version by the deadline; the "
                      "update was aborted; stage it again"));
  }
  const bool staged = shared_->channel->WithCore([&](RankCore& core) {
    return core.key() == key &&
           (core.state() == ReceiverState::kReady || core.state() == ReceiverState::kVerified ||
            core.state() == ReceiverState::kInDoubt || core.state() == ReceiverState::kDecided);
  });
  if (!staged) {
    Status why = shared_->StagedStatus(key);
    if (why.code() == Code::kInvalidArgument) return Tag(why);  // it may still be staged
    (void)shared_->channel->Abort(key, shared_->name + ": " + why.ToString(),
                                  Deadline::In(milliseconds(500)).Earlier(deadline));
    return Tag(Status(Code::kNotDecided,
                      why.ok() ? "this rank has not staged the version; call Stage first"
                               : "this rank could not stage the version: " + why.message())
                   .WithRank(why.rank())
                   .WithTensor(why.tensor())
                   .WithPeer(why.peer()));
  }
  Status status = shared_->channel->Decide(key, deadline);
  std::lock_guard lock(mutex_);
  report_.phases.decide += NowNs() - start;  // Commit asks again what Decide has learned
  return Tag(status);
}

Status UpdateImpl::Commit(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  BASCULE_ASSIGN_OR_RETURN(UpdateKey key, Key(deadline));
  BASCULE_RETURN_IF_ERROR(Decide(deadline));
  if (Served(key)) return Status::Ok();
  bool nothing = false;
  BASCULE_RETURN_IF_ERROR(Tag(
      shared_->channel->WithCore([&](RankCore& core) { return core.BeginCommit(key, &nothing); })));
  const int64_t commit_start = NowNs();
  Status status;
  if (!nothing) {
    std::lock_guard lock(shared_->data);
    status = SwitchTo(key, deadline);
    ReportLanding();
  }
  if (!nothing && status.ok()) status = RunHook(key.id);
  if (!status.ok()) {
    std::lock_guard lock(shared_->mutex);
    shared_->why_poisoned = status;
    NoteError(status, &shared_->last);
    shared_->agent->Log(LogLevel::kError, "the switch failed: " + status.ToString());
  }
  shared_->channel->WithCore([&](RankCore& core) { core.EndCommit(key, status.ok()); });
  FinishReport(commit_start);
  if (status.ok()) NoteCommit();
  shared_->channel->AnnounceServing(Deadline::In(milliseconds(500)));
  {
    std::lock_guard lock(mutex_);
    report_.control_messages = shared_->ControlRequests() - control_before_;
    report_.peer_messages = shared_->peer_requests - peer_before_;
  }
  shared_->agent->BeatSoon();
  if (!status.ok()) {
    return Tag(Status(Code::kPoisoned, "the switch failed: " + status.message() +
                                           "; this rank is not servable until a version is staged "
                                           "and committed")
                   .WithRank(status.rank())
                   .WithTensor(status.tensor())
                   .WithPeer(status.peer()));
  }
  StartRotation(key);
  return Status::Ok();
}

// COMMITTING: from here on any failure leaves the live weights to nobody.
Status UpdateImpl::SwitchTo(const UpdateKey& key, Deadline deadline) {
  Lander& lander = *shared_->lander;
  lander.MarkBroken();
  const int64_t start = NowNs();
  if (shared_->in_place) {
    BASCULE_RETURN_IF_ERROR(lander.Land(
        key.id, [] { return false; }, deadline));
  } else {
    BASCULE_RETURN_IF_ERROR(lander.Switch());
  }
  lander.MarkLive();
  {
    std::lock_guard lock(mutex_);
    report_.phases.commit = NowNs() - start;
  }
  if (shared_->options.digest && lander.landed().first) {
    // The plan's first version: COMMITTED is only reported once the live storages are proved.
    const int64_t audit_start = NowNs();
    BASCULE_RETURN_IF_ERROR(lander.AuditLive([deadline] { return deadline.Passed(); }));
    lander.MarkProved();
    std::lock_guard lock(mutex_);
    report_.phases.audit = NowNs() - audit_start;
    report_.audited = true;
  }
  return Status::Ok();
}

Status UpdateImpl::RunHook(VersionId id) {
  std::function<Status(VersionId)> hook;
  {
    std::lock_guard lock(shared_->mutex);
    hook = shared_->hook;
  }
  return hook ? hook(id) : Status::Ok();
}

// What the lander knows of this update; under its lock.
void UpdateImpl::ReportLanding() {
  std::lock_guard lock(mutex_);
  const Lander& lander = *shared_->lander;
  report_.phases.stage = lander.phases().stage;
  report_.phases.verify = lander.phases().verify;
  report_.bytes = lander.part_bytes();
  report_.links = lander.Links();
  report_.peak_extra_bytes = lander.shadow_bytes();
}

void UpdateImpl::FinishReport(int64_t commit_start) {
  std::lock_guard lock(mutex_);
  const int64_t now = NowNs();
  if (report_.phases.commit == 0) report_.phases.commit = now - commit_start;
  report_.phases.stall = report_.phases.decide + now - commit_start;
  report_.commit_end_ns = WallNs();
  if (report_.publish_start_ns > 0) {
    report_.ewtt_ns = report_.commit_end_ns - report_.publish_start_ns;
  }
}

void UpdateImpl::NoteCommit() {
  const Report report = this->report();
  std::lock_guard lock(shared_->mutex);
  MemberReport& last = shared_->last;
  last.id = id_;
  ++last.done;
  last.bytes = report.bytes;
  last.took_ns = report.ewtt_ns;
  last.stall_ns = report.phases.stall;
  shared_->agent->Log(LogLevel::kInfo,
                      fmt::format("committed version {}: EWTT {:.3f} s, stall {:.1f} ms, {:.3f} GB",
                                  id_.version, static_cast<double>(report.ewtt_ns) / 1e9,
                                  static_cast<double>(report.phases.stall) / 1e6,
                                  static_cast<double>(report.bytes) / 1e9));
}

// After the pause: a sixteenth of the tensors, live, against the trainers' layouts.
void UpdateImpl::StartRotation(const UpdateKey& key) {
  shared_->worker->Post([shared = shared_.get(), key, after = peer_after_] {
    std::lock_guard lock(shared->data);
    const Lander& lander = *shared->lander;
    const uint64_t before = shared->peer_requests;
    const bool rotate = shared->options.digest && !lander.landed().first;
    if (rotate && lander.landed().id == key.id) {
      Status status = shared->lander->AuditRotation(key.id, Deadline::In(std::chrono::seconds(30)));
      const bool serving =
          shared->channel->WithCore([&](RankCore& core) { return core.serving() == key.id; });
      if (status.code() == Code::kDataLoss && serving) {
        {
          std::lock_guard why(shared->mutex);
          NoteError(status, &shared->last);
          shared->agent->Log(LogLevel::kError, "the audit found: " + status.ToString());
          shared->why_poisoned = std::move(status);
        }
        shared->channel->WithCore([](RankCore& core) { core.Poison(); });
      }
    }
    shared->lander->ReleaseSources(key.id);
    *after = shared->peer_requests - before;
  });
}

Status UpdateImpl::Abort(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  BASCULE_ASSIGN_OR_RETURN(UpdateKey key, Key(deadline));
  if (Served(key)) {
    return Tag(Status(Code::kBusy, fmt::format("version {} of term {} is committed on this rank; "
                                               "there is nothing to abort",
                                               id_.version, id_.term)));
  }
  const bool staging = shared_->channel->WithCore([&](RankCore& core) { return core.GiveUp(key); });
  if (staging) {
    shared_->CancelStaging();
    return Tag(shared_->channel->Vote(key, false, "given up by the caller", deadline));
  }
  return Tag(shared_->channel->Abort(key, "given up by the caller", deadline));
}

class ReceiverImpl final : public WeightReceiver {
 public:
  explicit ReceiverImpl(std::shared_ptr<ReceiverShared> shared) : shared_(std::move(shared)) {}
  ~ReceiverImpl() override {
    if (shared_->agent && shared_->agent->forked()) {
      new (std::nothrow)
          std::shared_ptr<ReceiverShared>(std::move(shared_));  // the threads are the parent's
      return;
    }
    (void)Close(Deadline::In(std::chrono::seconds(1)));
  }

  Result<std::shared_ptr<Update>> Poll(Deadline deadline) override {
    BASCULE_RETURN_IF_ERROR(shared_->Usable());
    const uint64_t before = shared_->ControlRequests();
    // What was decided must be committed, also where its handle was lost.
    const auto decided = shared_->channel->WithCore([](RankCore& core) {
      return core.state() == ReceiverState::kDecided ? std::optional(core.key()) : std::nullopt;
    });
    if (decided) {
      std::lock_guard lock(shared_->mutex);
      const bool known = shared_->polled.key == decided;
      return std::shared_ptr<Update>(
          std::make_shared<UpdateImpl>(shared_, PlanBasis{decided->id}, decided,
                                       known ? shared_->polled.publish_start_ns : 0, before));
    }
    BASCULE_RETURN_IF_ERROR(shared_->channel->WithCore(
        [](RankCore& core) { return core.banished() ? core.Servable() : Status::Ok(); }));
    auto polled = shared_->channel->Poll(deadline);
    if (!polled.ok()) {
      // The coordinator does not know this incarnation: the next heartbeat tells why.
      const bool unknown = polled.status().code() == Code::kNotFound;
      Status status =
          unknown ? Status(Code::kUnavailable, polled.status().message()) : Status(polled.status());
      return std::move(status).WithRank(static_cast<int>(shared_->options.rank));
    }
    {
      std::lock_guard lock(shared_->mutex);
      shared_->polled = *polled;
    }
    if (!polled->key) return std::shared_ptr<Update>();
    return std::shared_ptr<Update>(std::make_shared<UpdateImpl>(
        shared_, PlanBasis{polled->key->id, polled->epoch, polled->own_membership}, polled->key,
        polled->publish_start_ns, before));
  }

  Result<std::shared_ptr<Update>> Open(VersionId id) override {
    BASCULE_RETURN_IF_ERROR(shared_->Usable());
    if (id.none()) return Status(Code::kInvalidArgument, "Open needs a term and a version");
    return std::shared_ptr<Update>(std::make_shared<UpdateImpl>(
        shared_, PlanBasis{id}, std::nullopt, 0, shared_->ControlRequests()));
  }

  [[nodiscard]] ReceiverState state() const override { return shared_->State(); }
  [[nodiscard]] VersionId serving() const override {
    return shared_->channel->WithCore([](RankCore& core) { return core.serving(); });
  }
  [[nodiscard]] Status Servable() const override {
    BASCULE_RETURN_IF_ERROR(shared_->Usable());
    return shared_->Servable();
  }
  Status EngineServable(Deadline deadline) override {
    BASCULE_RETURN_IF_ERROR(shared_->Usable());
    return shared_->channel->EngineServable(deadline);
  }
  void SetPostCommitHook(std::function<Status(VersionId)> hook) override {
    std::lock_guard lock(shared_->mutex);
    shared_->hook = std::move(hook);
  }
  Status Audit(Deadline deadline) override;
  Status UpdateLayout(const Layout& layout, Deadline deadline) override;
  Status Close(Deadline deadline) override;

 private:
  [[nodiscard]] Status Rebind(const Layout& layout, const WorldTemplate& world, Deadline deadline);
  std::shared_ptr<ReceiverShared> shared_;
};

Status ReceiverImpl::Audit(Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  BASCULE_RETURN_IF_ERROR(shared_->Servable());
  std::unique_lock lock(shared_->data, std::defer_lock);
  if (!LockBy(&lock, deadline)) {
    return Status(Code::kDeadlineExceeded, "a landing is in progress; audit again after it");
  }
  Status status = shared_->lander->AuditLive([deadline] { return deadline.Passed(); });
  if (status.code() == Code::kAborted) {
    return Status(Code::kDeadlineExceeded, "the audit did not end by the deadline; raise it");
  }
  return status;
}

Status ReceiverImpl::UpdateLayout(const Layout& layout, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(shared_->Usable());
  BASCULE_RETURN_IF_ERROR(ValidateLayout(layout, Side::kDestination));
  BASCULE_RETURN_IF_ERROR(CheckHostMemory(layout));
  BASCULE_RETURN_IF_ERROR(CheckDestinationCoverage(layout));
  BASCULE_ASSIGN_OR_RETURN(auto world, WorldOf(layout));
  UpdateKey key;
  ReceiverState state = shared_->channel->WithCore([&key](RankCore& core) {
    key = core.key();
    return core.state();
  });
  switch (state) {
    case ReceiverState::kDecided:
    case ReceiverState::kCommitting:
      return Status(Code::kBusy, "an update is decided and not committed; commit it first");
    case ReceiverState::kStaging:
      shared_->CancelStaging();
      shared_->channel->WithCore([&key](RankCore& core) { return core.GiveUp(key); });
      (void)shared_->channel->Vote(key, false, "the rank's layout changed", deadline);
      break;
    case ReceiverState::kReady:
    case ReceiverState::kVerified:
    case ReceiverState::kInDoubt:
      BASCULE_RETURN_IF_ERROR(
          shared_->channel->Abort(key, "the layout of " + shared_->name + " changed", deadline));
      break;
    case ReceiverState::kIdle:
    case ReceiverState::kPoisoned: break;
  }
  BASCULE_RETURN_IF_ERROR(
      shared_->channel->WithCore([](RankCore& core) { return core.BeginRebind(); }));
  Status status = Rebind(layout, *world, deadline);
  shared_->channel->WithCore([&status](RankCore& core) { core.EndRebind(status.ok()); });
  if (status.ok()) shared_->channel->AnnounceServing(Deadline::In(milliseconds(500)));
  return status;
}

// On failure everything is as before.
Status ReceiverImpl::Rebind(const Layout& layout, const WorldTemplate& world, Deadline deadline) {
  std::unique_lock lock(shared_->data, std::defer_lock);
  if (!LockBy(&lock, deadline)) {
    return Status(Code::kDeadlineExceeded, "a landing did not stop by the deadline; try again");
  }
  auto lander = std::make_unique<Lander>(
      Lander::Options{shared_->options, shared_->in_place, shared_->name, &shared_->peer_requests},
      layout, shared_->transport.get(), shared_->agent.get());
  BASCULE_RETURN_IF_ERROR(lander->Allocate());
  BASCULE_RETURN_IF_ERROR(shared_->agent->Rebind(world.Serialize(), layout.coordinates, deadline));
  shared_->lander = std::move(lander);
  return Status::Ok();
}

Status ReceiverImpl::Close(Deadline deadline) {
  if (!shared_->agent) return Status::Ok();
  if (shared_->agent->forked()) return shared_->agent->Usable();
  shared_->CancelStaging();
  if (shared_->channel && shared_->connected) shared_->channel->HandOver(deadline);
  if (shared_->channel) shared_->channel->Cancel();
  if (shared_->worker) shared_->worker->Stop();
  Status status = shared_->agent->Close(deadline);
  if (shared_->channel) shared_->channel->Stop();
  return status;
}

// Rollouts are not sources yet: they only answer what their live weights sum to.
class RolloutHandler final : public PeerHandler {
 public:
  explicit RolloutHandler(ReceiverShared* shared) : shared_(*shared) {}

  Result<std::string> OnCall(uint64_t, std::string_view bytes) override {
    BASCULE_ASSIGN_OR_RETURN(PeerRequest request, DecodePeerRequest(bytes));
    if (request.method != PeerMethod::kSums) {
      return Status(Code::kUnimplemented, "rollout ranks are not sources");
    }
    if (!shared_.connected) return Busy("is still connecting");
    std::unique_lock lock(shared_.data, std::defer_lock);
    if (!LockBy(&lock, Deadline::In(kSlice))) return Busy("lands or switches a version");
    BASCULE_RETURN_IF_ERROR(shared_.Servable());
    SumsReply reply;
    reply.id = shared_.channel->WithCore([](RankCore& core) { return core.serving(); });
    if (!request.id.none() && request.id != reply.id) {
      return Status(Code::kRetired, fmt::format("{} serves version {} of term {}", shared_.name,
                                                reply.id.version, reply.id.term))
          .WithPeer(shared_.name);
    }
    reply.sums = shared_.lander->LiveSums(request.wanted);
    return Encode(reply);
  }
  Result<uint64_t> OnFetch(uint64_t, std::string_view, std::span<std::byte>) override {
    return Status(Code::kUnimplemented, "rollout ranks are not sources");
  }
  void OnDisconnect(uint64_t) override {}

 private:
  [[nodiscard]] Status Busy(const char* what) const {
    return Status(Code::kBusy, fmt::format("{} {}; ask again", shared_.name, what))
        .WithPeer(shared_.name);
  }
  ReceiverShared& shared_;
};

uint64_t AvailableMemory() {
  std::ifstream info("/proc/meminfo");
  std::string key;
  uint64_t kib = 0;
  std::string unit;
  while (info >> key >> kib >> unit) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

Result<bool> InPlace(const RolloutOptions& options, const Layout& layout) {
  uint64_t bytes = 0;
  for (const Buffer& buffer : layout.buffers) bytes += buffer.bytes;
  switch (options.shadow) {
    case ShadowMode::kAuto: return AvailableMemory() < bytes + bytes / 8;
    case ShadowMode::kHost: return false;
    case ShadowMode::kNone: return true;
    case ShadowMode::kDevice:
      return Status(Code::kUnimplemented,
                    "shadow=device needs a build with CUDA; use auto, host or none");
  }
  return Status(Code::kInvalidArgument, "unknown shadow mode");
}

// What can be said of an engine's layouts once all trainers have joined: nothing uncovered.
Status CheckAtConnect(Agent* agent, const RolloutOptions& options, Deadline deadline) {
  BASCULE_ASSIGN_OR_RETURN(Membership membership, agent->directory().Members(deadline));
  if (!membership.complete) return Status::Ok();
  // Trainers that have left hold nothing: the next ones are to come.
  const auto live = std::count_if(membership.members.begin(), membership.members.end(),
                                  [](const MemberInfo& m) { return m.role == Role::kTrainer; });
  const bool all = std::all_of(
      membership.members.begin(), membership.members.end(),
      [live](const MemberInfo& m) { return m.role != Role::kTrainer || m.world_size == live; });
  if (live == 0 || !all) return Status::Ok();
  auto view = agent->views().Newest(options.engine, deadline);
  // A coordinator that was restarted just now: checked again when a version is landed.
  if (view.status().code() == Code::kUnavailable) return Status::Ok();
  BASCULE_RETURN_IF_ERROR(view.status());
  return CheckEngineCoverage(**view);
}

Result<std::unique_ptr<WeightReceiver>> ConnectReceiver(const JobOptions& job,
                                                        const RolloutOptions& options,
                                                        const Layout& layout, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(CheckNotForked());
  BASCULE_RETURN_IF_ERROR(CheckEnvironment());
  if (options.engine.empty()) {
    return Status(Code::kInvalidArgument, "RolloutOptions::engine is empty; name the engine");
  }
  BASCULE_RETURN_IF_ERROR(CheckThreads(options.threads));
  BASCULE_RETURN_IF_ERROR(CheckDescriptors());
  if (options.rank >= options.world_size) {
    return Status(Code::kInvalidArgument, fmt::format("rank {} is not in an engine of {}",
                                                      options.rank, options.world_size))
        .WithRank(static_cast<int>(options.rank));
  }
  BASCULE_RETURN_IF_ERROR(ValidateLayout(layout, Side::kDestination));
  BASCULE_RETURN_IF_ERROR(CheckHostMemory(layout));
  BASCULE_RETURN_IF_ERROR(CheckDestinationCoverage(layout));
  if (job.coordinator == kHostHere) {
    return Status(Code::kInvalidArgument,
                  "a rollout hosts no coordinator: give JobOptions::coordinator, the address that "
                  "trainer 0 or \"bascule serve\" has");
  }
  BASCULE_ASSIGN_OR_RETURN(auto world, WorldOf(layout));
  auto shared = std::make_shared<ReceiverShared>();
  shared->options = options;
  BASCULE_ASSIGN_OR_RETURN(shared->in_place, InPlace(options, layout));

  MemberInfo member;
  member.role = Role::kRollout;
  member.engine = options.engine;
  member.rank = options.rank;
  member.world_size = options.world_size;
  member.incarnation = RandomId();
  member.node = NodeHint(job.socket_directory);
  member.coordinates = layout.coordinates;
  shared->name = MemberName(member);
  BASCULE_ASSIGN_OR_RETURN(
      shared->transport, MakeShmTransport({job.name, job.token, member.incarnation, shared->name},
                                          {.directory = job.socket_directory, .huge_pages = true}));
  shared->handler = std::make_unique<RolloutHandler>(shared.get());
  BASCULE_ASSIGN_OR_RETURN(std::string address, shared->transport->Listen(shared->handler.get()));
  member.addresses.push_back({shared->transport->name(), address});
  std::string listen = job.listen.substr(0, job.listen.rfind(':')) + ":0";
  BASCULE_ASSIGN_OR_RETURN(
      shared->channel,
      EngineChannel::Start({options.engine, options.rank, options.world_size, member.incarnation,
                            listen, job.token, shared->in_place}));
  member.channel = shared->channel->address();

  Agent::Options agent;
  agent.job = job;
  agent.member = member;
  agent.template_bytes = world->Serialize();
  ReceiverShared* raw = shared.get();
  agent.state = [raw] {
    MemberState state;
    raw->channel->WithCore([&state](RankCore& core) {
      state.serving = core.serving();
      state.servable = core.Servable().ok();
    });
    state.told_gone = raw->channel->ToldGone();
    std::lock_guard lock(raw->mutex);
    state.report = raw->last;
    return state;
  };
  const auto beat = job.heartbeat;
  agent.on_beat = [raw, beat](const HeartbeatReply&) {
    if (!raw->connected) return;
    raw->channel->Introduce(Deadline::In(beat));
    raw->channel->ResolveDoubt(Deadline::In(beat));
  };
  agent.on_gone = [raw](const Status&) {
    raw->channel->WithCore([](RankCore& core) { core.Banish(); });
  };
  shared->worker = std::make_unique<Worker>();
  BASCULE_ASSIGN_OR_RETURN(shared->agent, Agent::Start(std::move(agent), deadline));
  shared->channel->SetAgent(shared->agent.get());
  shared->lander = std::make_unique<Lander>(
      Lander::Options{options, shared->in_place, shared->name, &shared->peer_requests}, layout,
      shared->transport.get(), shared->agent.get());
  BASCULE_RETURN_IF_ERROR(shared->lander->Allocate());
  BASCULE_RETURN_IF_ERROR(CheckAtConnect(shared->agent.get(), options, deadline));
  shared->channel->Introduce(Deadline::In(milliseconds(500)).Earlier(deadline));
  shared->connected = true;
  return std::unique_ptr<WeightReceiver>(std::make_unique<ReceiverImpl>(std::move(shared)));
}

}  // namespace

Result<std::unique_ptr<WeightReceiver>> WeightReceiver::Connect(const JobOptions& job,
                                                                const RolloutOptions& options,
                                                                const Layout& layout,
                                                                Deadline deadline) {
  return Guarded<std::unique_ptr<WeightReceiver>>(
      [&] { return ConnectReceiver(job, options, layout, deadline); });
}

}  // namespace bascule
