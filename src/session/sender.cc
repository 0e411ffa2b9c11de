// WeightSender: a trainer rank.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "bascule/session.h"
#include "base/fork_guard.h"
#include "session/agent.h"
#include "session/environment.h"
#include "session/source_service.h"

namespace bascule {
namespace {

using std::chrono::milliseconds;

// How long Publish waits for the coordinator once the weights are safe in the arena. Beyond that
// the heartbeat goes on reporting.
constexpr milliseconds kReportPatience{1000};

constexpr uint32_t kMostVersionsHeld = 64;

int64_t WallNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// What is shared by the sender and its publications; publications may outlive the sender.
struct SenderState {
  std::unique_ptr<SourceService> service;
  std::shared_ptr<Transport> transport;
  std::unique_ptr<Agent> agent;
  TrainerOptions options;

  mutable std::mutex mutex;
  std::map<VersionId, HeldVersion> versions;  // held, and recently told
  std::map<VersionId, std::string> reasons;   // why aborted or retired
  std::vector<VersionId> unreported;          // held, but the coordinator could not be told yet
  Status gone;                                // why this incarnation is no member any more
  MemberReport last;                          // for status displays
  uint64_t prepared_epoch = 0;
  std::atomic<bool> publishing{false};
  std::atomic<bool> connected{false};  // `agent` is set
  std::atomic<bool> complete{false};   // all ranks of the term had joined

  [[nodiscard]] Status Usable() const {
    if (!agent) return Status(Code::kClosed, "the sender is closed; connect anew");
    BASCULE_RETURN_IF_ERROR(agent->Usable());
    if (agent->stale()) {
      return Status(Code::kStaleTerm,
                    fmt::format("the trainer world restarted (term {} after {}); connect anew",
                                agent->newest_term(), agent->term()))
          .WithRank(static_cast<int>(options.rank));
    }
    std::lock_guard lock(mutex);
    return gone;
  }

  void Told(VersionId id, VersionState state, const std::string& reason) {
    std::lock_guard lock(mutex);
    auto it = versions.find(id);
    if (it == versions.end()) return;
    if (state != VersionState::kUnknown) it->second.told = state;
    if (!reason.empty()) reasons[id] = reason;
    // What is told of versions long gone is of no use to a restarted coordinator.
    while (versions.size() > 64) {
      reasons.erase(versions.begin()->first);
      versions.erase(versions.begin());
    }
  }

  // Tells the coordinator of what it could not be told when it was published. On the agent's
  // thread.
  void ReportAgain() {
    std::vector<HeldVersion> pending;
    {
      std::lock_guard lock(mutex);
      for (VersionId id : unreported) pending.push_back(versions[id]);
    }
    const auto held = service->Held();
    for (const HeldVersion& version : pending) {
      if (std::find(held.begin(), held.end(), version.id) != held.end()) {
        auto reply = agent->directory().Held(Request(version), Deadline::In(kReportPatience));
        if (!reply.ok() && IsAway(reply.status())) return;
        if (reply.ok()) Told(version.id, reply->state, reply->reason);
      }
      std::lock_guard lock(mutex);
      std::erase(unreported, version.id);
    }
  }

  [[nodiscard]] HeldRequest Request(const HeldVersion& held) const {
    HeldRequest request;
    request.token = agent->token();
    request.incarnation = agent->incarnation();
    request.held = held;
    request.deadline_ns = held.deadline_ns;
    return request;
  }
  // The coordinator could not be asked; it may be back later.
  static bool IsAway(const Status& status) {
    return status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded;
  }

  [[nodiscard]] MemberState State() const {
    MemberState state;
    state.term_complete = complete;
    const auto held = service->Held();
    std::lock_guard lock(mutex);
    state.report = last;
    for (const auto& [id, version] : versions) {
      const bool is_held = std::find(held.begin(), held.end(), id) != held.end();
      if (is_held) {
        state.held.push_back(version);
      } else if (version.told == VersionState::kAborted ||
                 version.told == VersionState::kAvailable) {
        state.told.push_back(version);
      }
    }
    return state;
  }
};

PublicationState FromVersionState(VersionState state) {
  switch (state) {
    case VersionState::kUnknown: return PublicationState::kUnknown;
    case VersionState::kOpen: return PublicationState::kOpen;
    case VersionState::kAvailable: return PublicationState::kAvailable;
    case VersionState::kAborted: return PublicationState::kAborted;
    case VersionState::kRetired: return PublicationState::kRetired;
  }
  return PublicationState::kUnknown;
}

class PublicationImpl final : public Publication {
 public:
  PublicationImpl(std::shared_ptr<SenderState> state, VersionId id, Report report)
      : state_(std::move(state)), id_(id), report_(std::move(report)) {}

  [[nodiscard]] VersionId id() const override { return id_; }
  [[nodiscard]] Report report() const override {
    Report report = report_;
    report.control_messages += queries_;
    return report;
  }

  Status Wait(Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(VersionReply reply, Query(true, deadline));
    switch (reply.state) {
      case VersionState::kAvailable: return Status::Ok();
      case VersionState::kAborted:
        return Status(Code::kAborted, Describe("was aborted: " + reply.reason)).WithRank(rank());
      case VersionState::kRetired:
        return Status(Code::kRetired, Describe("is retired: " + reply.reason)).WithRank(rank());
      case VersionState::kOpen:
      case VersionState::kUnknown: break;
    }
    return Status(Code::kDeadlineExceeded,
                  Describe("is not available yet; ranks that have not published it hold it up"))
        .WithRank(rank());
  }

  Result<PublicationState> State(Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(VersionReply reply, Query(false, deadline));
    return FromVersionState(reply.state);
  }

  Status Release(Deadline deadline) override {
    if (!state_->agent) return Status(Code::kClosed, "the sender is closed");
    BASCULE_RETURN_IF_ERROR(state_->agent->Usable());
    // First no new readers, then no readers. An unreachable coordinator must not hold up a trainer.
    (void)state_->agent->directory().Revoked(state_->agent->incarnation(), id_,
                                             deadline.Earlier(Deadline::In(kReportPatience)));
    return state_->service->Release(id_, deadline);
  }

 private:
  [[nodiscard]] int rank() const { return static_cast<int>(state_->options.rank); }
  [[nodiscard]] std::string Describe(const std::string& what) const {
    return fmt::format("version {} of term {} {}", id_.version, id_.term, what);
  }
  Result<VersionReply> Query(bool wait, Deadline deadline) {
    if (!state_->agent) return Status(Code::kClosed, "the sender is closed");
    BASCULE_RETURN_IF_ERROR(state_->agent->Usable());
    ++queries_;
    auto reply =
        state_->agent->directory().QueryVersion(state_->agent->incarnation(), id_, wait, deadline);
    if (!reply.ok()) return reply;
    if (reply->state == VersionState::kUnknown) {
      // Older than what the coordinator keeps: what this rank was told last.
      std::lock_guard lock(state_->mutex);
      auto it = state_->versions.find(id_);
      if (it == state_->versions.end() || it->second.told == VersionState::kUnknown) {
        return Status(Code::kNotFound,
                      Describe("is known no more; the coordinator keeps the last 64 of a term"))
            .WithRank(rank());
      }
      reply->state = it->second.told;
      reply->reason = state_->reasons[id_];
      return reply;
    }
    state_->Told(id_, reply->state, reply->reason);
    return reply;
  }

  std::shared_ptr<SenderState> state_;
  VersionId id_;
  Report report_;
  std::atomic<uint64_t> queries_{0};
};

class SenderImpl final : public WeightSender {
 public:
  explicit SenderImpl(std::shared_ptr<SenderState> state) : state_(std::move(state)) {}
  ~SenderImpl() override {
    if (state_->agent && state_->agent->forked()) {
      // The threads are the parent's: let go without touching anything.
      new (std::nothrow) std::shared_ptr<SenderState>(std::move(state_));
      return;
    }
    (void)Close(Deadline::In(std::chrono::seconds(1)));
  }

  Result<std::shared_ptr<Publication>> Publish(uint64_t version, Deadline deadline) override;
  [[nodiscard]] Result<std::shared_ptr<Publication>> PublishNow(VersionId id, Deadline deadline);
  Status UpdateLayout(const Layout& layout, Deadline deadline) override;
  [[nodiscard]] uint64_t term() const override { return state_->agent ? state_->agent->term() : 0; }
  [[nodiscard]] std::string coordinator() const override {
    return state_->agent ? state_->agent->coordinator() : std::string();
  }
  Status Close(Deadline deadline) override {
    if (!state_->agent) return Status::Ok();
    if (state_->agent->forked()) return state_->agent->Usable();
    return state_->agent->Close(deadline);
  }

 private:
  [[nodiscard]] Status PrepareEpoch(Deadline deadline);
  [[nodiscard]] Status Settle(Deadline deadline);
  [[nodiscard]] Status ReportHeld(const HeldVersion& held, Deadline deadline);
  std::shared_ptr<SenderState> state_;
};

// Exclusive use of Publish and UpdateLayout.
class Exclusive {
 public:
  explicit Exclusive(std::atomic<bool>* flag) : flag_(flag), taken_(!flag->exchange(true)) {}
  ~Exclusive() {
    if (taken_) flag_->store(false);
  }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;
  [[nodiscard]] bool taken() const { return taken_; }

 private:
  std::atomic<bool>* flag_;
  bool taken_;
};

// Waits until every rank of the world has joined once; after that only looks, briefly, whether new
// engines joined: a coordinator that is away does not stop a trainer.
Status SenderImpl::PrepareEpoch(Deadline deadline) {
  Agent& agent = *state_->agent;
  if (state_->complete && state_->prepared_epoch == agent.epoch()) return Status::Ok();
  const Deadline patience =
      state_->complete ? deadline.Earlier(Deadline::In(kReportPatience)) : deadline;
  auto complete = agent.directory().WaitComplete(agent.incarnation(), patience);
  if (!complete.ok()) {
    BASCULE_RETURN_IF_ERROR(state_->Usable());  // e.g. closed meanwhile, by another thread
    const bool go_on = state_->complete && SenderState::IsAway(complete.status());
    return go_on ? Status::Ok() : complete.status();
  }
  state_->complete = true;
  if (state_->prepared_epoch == complete->epoch) return Status::Ok();
  BASCULE_RETURN_IF_ERROR(state_->service->PrepareFor(*complete, deadline));
  state_->prepared_epoch = complete->epoch;
  return Status::Ok();
}

Result<std::shared_ptr<Publication>> SenderImpl::Publish(uint64_t version, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(state_->Usable());
  Exclusive exclusive(&state_->publishing);
  if (!exclusive.taken()) return Status(Code::kBusy, "another Publish or UpdateLayout is running");
  const VersionId id{state_->agent->term(), version};
  auto publication = PublishNow(id, deadline);
  std::lock_guard lock(state_->mutex);
  if (!publication.ok()) {
    NoteError(publication.status(), &state_->last);
    return publication;
  }
  const Report report = (*publication)->report();
  state_->last.id = id;
  ++state_->last.done;
  state_->last.bytes = report.bytes;
  state_->last.took_ns = report.phases.publish;
  state_->last.stall_ns = report.phases.stall;
  state_->agent->Log(LogLevel::kInfo,
                     fmt::format("published version {} in {:.1f} ms, {:.3f} GB", version,
                                 static_cast<double>(report.phases.publish) / 1e6,
                                 static_cast<double>(report.bytes) / 1e9));
  return publication;
}

Result<std::shared_ptr<Publication>> SenderImpl::PublishNow(VersionId id, Deadline deadline) {
  Agent& agent = *state_->agent;
  const int64_t start = WallNs();
  const uint64_t requests = agent.directory().requests();
  BASCULE_RETURN_IF_ERROR(Settle(deadline));
  BASCULE_RETURN_IF_ERROR(PrepareEpoch(deadline));

  auto revoked = [this, &agent](VersionId old) {
    // Best effort: safety is the generation's, this only keeps Poll from offering the version.
    (void)agent.directory().Revoked(agent.incarnation(), old, Deadline::In(milliseconds(200)));
  };
  BASCULE_ASSIGN_OR_RETURN(SourceService::Filled filled,
                           state_->service->Fill(id, deadline, revoked));
  HeldVersion held;
  held.id = id;
  held.epoch = agent.epoch();
  held.layout_serial = filled.layout_serial;
  held.replica_sums = std::move(filled.replica_sums);
  held.publish_start_ns = start;
  held.deadline_ns = WallNs() + deadline.Left().count();
  {
    std::lock_guard lock(state_->mutex);
    state_->versions[id] = held;
  }
  Status reported = ReportHeld(held, deadline);
  if (!reported.ok()) {
    (void)state_->service->Release(id, Deadline::In(milliseconds(100)));
    return reported;
  }
  Report report;
  report.id = id;
  report.phases.publish = filled.publish_ns;
  report.phases.audit = filled.audit_ns;
  report.phases.stall = WallNs() - start;
  report.bytes = filled.bytes;
  report.publish_start_ns = start;
  report.peak_extra_bytes = state_->service->arena_bytes();
  report.control_messages = agent.directory().requests() - requests;
  return std::shared_ptr<Publication>(
      std::make_shared<PublicationImpl>(state_, id, std::move(report)));
}

// Tells the coordinator. Where it is away, the heartbeat tells it later: the trainer goes on.
Status SenderImpl::ReportHeld(const HeldVersion& held, Deadline deadline) {
  Agent& agent = *state_->agent;
  auto reply = agent.directory().Held(state_->Request(held),
                                      deadline.Earlier(Deadline::In(kReportPatience)));
  if (reply.ok()) {
    state_->Told(held.id, reply->state, reply->reason);
    return Status::Ok();
  }
  if (!SenderState::IsAway(reply.status())) return reply.status();
  {
    std::lock_guard lock(state_->mutex);
    state_->unreported.push_back(held.id);
  }
  agent.BeatSoon();
  return Status::Ok();
}

Status SenderImpl::UpdateLayout(const Layout& layout, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(state_->Usable());
  Exclusive exclusive(&state_->publishing);
  if (!exclusive.taken()) {
    return Status(Code::kBusy, "a publication is in progress; update the layout after it");
  }
  BASCULE_RETURN_IF_ERROR(ValidateLayout(layout));
  BASCULE_RETURN_IF_ERROR(CheckHostMemory(layout));
  BASCULE_ASSIGN_OR_RETURN(auto world, WorldOf(layout));
  Agent& agent = *state_->agent;
  BASCULE_RETURN_IF_ERROR(Settle(deadline));
  const uint64_t serial = agent.member().layout_serial + 1;
  BASCULE_ASSIGN_OR_RETURN(auto prepared,
                           state_->service->PrepareLayout(layout, world, layout.coordinates, serial,
                                                          state_->transport.get()));
  // Whatever comes of it, this rank and the coordinator go on with one layout.
  Status rebound = agent.Rebind(world->Serialize(), layout.coordinates, deadline);
  if (!rebound.ok()) {
    state_->service->Renumber(agent.member().layout_serial);
    return rebound;
  }
  state_->service->InstallLayout(std::move(prepared));
  state_->prepared_epoch = 0;
  return Status::Ok();
}

// The coordinator may have heard of a layout that was given up.
Status SenderImpl::Settle(Deadline deadline) { return state_->agent->Settle(deadline); }

Result<bool> WantsDirect(const TrainerOptions& options, const Layout& layout) {
  switch (options.arena) {
    case ArenaMode::kAuto:
    case ArenaMode::kHost: return false;
    case ArenaMode::kDirect:
      for (const Buffer& buffer : layout.buffers) {
        if (buffer.kind != MemoryKind::kShared) {
          return Status(Code::kInvalidArgument,
                        fmt::format("arena=direct needs shared memory, but buffer {} is not; put "
                                    "the parameters in shared memory or use arena=auto",
                                    buffer.name));
        }
      }
      return true;
    case ArenaMode::kDevice:
      return Status(Code::kUnimplemented, "arena=device needs a build with CUDA; use auto or host");
  }
  return Status(Code::kInvalidArgument, "unknown arena mode");
}

}  // namespace

namespace {

Result<std::unique_ptr<WeightSender>> ConnectSender(const JobOptions& job,
                                                    const TrainerOptions& options,
                                                    const Layout& layout, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(CheckNotForked());
  BASCULE_RETURN_IF_ERROR(CheckEnvironment());
  if (options.rank >= options.world_size) {
    return Status(Code::kInvalidArgument, fmt::format("trainer rank {} is not in a world of {}",
                                                      options.rank, options.world_size))
        .WithRank(static_cast<int>(options.rank));
  }
  if (options.versions_held < 1 || options.versions_held > kMostVersionsHeld) {
    return Status(Code::kInvalidArgument, fmt::format("versions_held is {}; 1 to {} are allowed",
                                                      options.versions_held, kMostVersionsHeld));
  }
  BASCULE_RETURN_IF_ERROR(CheckThreads(options.threads));
  BASCULE_RETURN_IF_ERROR(CheckDescriptors());
  BASCULE_RETURN_IF_ERROR(ValidateLayout(layout));
  BASCULE_RETURN_IF_ERROR(CheckHostMemory(layout));
  BASCULE_ASSIGN_OR_RETURN(auto world, WorldOf(layout));
  BASCULE_ASSIGN_OR_RETURN(bool direct, WantsDirect(options, layout));

  auto state = std::make_shared<SenderState>();
  state->options = options;
  MemberInfo member;
  member.role = Role::kTrainer;
  member.rank = options.rank;
  member.world_size = options.world_size;
  member.incarnation = RandomId();
  member.node = NodeHint(job.socket_directory);
  member.coordinates = layout.coordinates;
  const std::string name = MemberName(member);
  BASCULE_ASSIGN_OR_RETURN(
      state->transport, MakeShmTransport({job.name, job.token, member.incarnation, name},
                                         {.directory = job.socket_directory, .huge_pages = true}));
  // The service is the transport's handler and needs the agent's directory: the agent starts last
  // and is handed in through pointers that are set before any peer can call.
  state->service = std::make_unique<SourceService>(SourceService::Options{options, direct, name});
  BASCULE_ASSIGN_OR_RETURN(
      auto prepared,
      state->service->PrepareLayout(layout, world, layout.coordinates, 0, state->transport.get()));
  state->service->InstallLayout(std::move(prepared));
  BASCULE_ASSIGN_OR_RETURN(std::string address, state->transport->Listen(state->service.get()));
  member.addresses.push_back({state->transport->name(), address});

  Agent::Options agent;
  agent.job = job;
  agent.member = std::move(member);
  agent.template_bytes = world->Serialize();
  SenderState* raw = state.get();
  agent.state = [raw] { return raw->State(); };
  agent.on_beat = [raw](const HeartbeatReply& reply) {
    for (const auto& [id, version] : reply.versions) raw->Told(id, version, "");
    if (raw->connected) raw->ReportAgain();
  };
  agent.on_gone = [raw](const Status& why) {
    std::lock_guard lock(raw->mutex);
    raw->gone =
        Status(Code::kStaleTerm, why.message()).WithRank(static_cast<int>(raw->options.rank));
  };
  BASCULE_ASSIGN_OR_RETURN(auto started, Agent::Start(std::move(agent), deadline));
  state->service->SetViews(&started->views());
  state->agent = std::move(started);
  state->connected = true;
  return std::unique_ptr<WeightSender>(std::make_unique<SenderImpl>(std::move(state)));
}

}  // namespace

Result<std::unique_ptr<WeightSender>> WeightSender::Connect(const JobOptions& job,
                                                            const TrainerOptions& options,
                                                            const Layout& layout,
                                                            Deadline deadline) {
  return Guarded<std::unique_ptr<WeightSender>>(
      [&] { return ConnectSender(job, options, layout, deadline); });
}

}  // namespace bascule
