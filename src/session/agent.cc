#include "session/agent.h"

#include <fmt/format.h>
#include <unistd.h>

#include <random>
#include <utility>

#include "bascule/version.h"
#include "coordinator/grpc_directory.h"

namespace bascule {

uint64_t RandomId() {
  std::random_device device;
  uint64_t id = 0;
  while (id == 0) id = (static_cast<uint64_t>(device()) << 32) | device();
  return id;
}

void NoteError(const Status& error, MemberReport* report) {
  constexpr size_t kMost = 512;
  report->error = error.ToString().substr(0, kMost);
  report->error_wall_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::system_clock::now().time_since_epoch())
                              .count();
}

Agent::Agent(Options options) : options_(std::move(options)), pid_(getpid()) {}

Result<std::unique_ptr<Agent>> Agent::Start(Options options, Deadline deadline) {
  if (options.job.name.empty()) {
    return Status(Code::kInvalidArgument, "JobOptions::name is empty; give the job a name");
  }
  if (options.job.coordinator.empty()) {
    return Status(Code::kInvalidArgument,
                  "JobOptions::coordinator is empty; give host:port, or \"here\" to host it");
  }
  std::unique_ptr<Agent> agent(new Agent(std::move(options)));
  agent->incarnation_ = agent->options_.member.incarnation;
  if (agent->options_.job.coordinator == kHostHere) {
    BASCULE_ASSIGN_OR_RETURN(agent->server_, CoordinatorServer::Start(agent->options_.job));
    agent->coordinator_ = agent->server_->address();
  } else {
    agent->coordinator_ = agent->options_.job.coordinator;
  }
  agent->directory_ = MakeGrpcDirectory(agent->coordinator_, agent->options_.job.token);
  agent->views_ = std::make_unique<ViewCache>(agent->directory_.get());
  agent->options_.member.world_template = DigestOf(agent->options_.template_bytes);
  BASCULE_RETURN_IF_ERROR(agent->Join(deadline));
  agent->thread_ = std::thread([raw = agent.get()] { raw->Loop(); });
  return agent;
}

Agent::~Agent() {
  if (forked()) {
    // The child of a fork has none of the threads: let go of everything without touching it.
    thread_.detach();
    [[maybe_unused]] const auto* directory = directory_.release();
    [[maybe_unused]] const auto* server = server_.release();
    return;
  }
  (void)Close(Deadline::In(std::chrono::seconds(1)));
}

MemberInfo Agent::member() const {
  std::lock_guard lock(mutex_);
  return options_.member;
}

bool Agent::forked() const { return getpid() != pid_; }

Status Agent::Usable() const {
  if (forked()) {
    return Status(Code::kForked,
                  "this session was inherited through fork(); only the parent may use it");
  }
  if (closed_) return Status(Code::kClosed, "the session is closed; connect anew");
  return Status::Ok();
}

Status Agent::StoreTemplate(const std::string& bytes, const ContentDigest& digest,
                            Deadline deadline) {
  BASCULE_ASSIGN_OR_RETURN(bool known, directory_->HasBlob(digest, deadline));
  if (known) return Status::Ok();
  return directory_->PutBlob(digest, bytes, deadline);
}

Status Agent::Join(Deadline deadline) {
  JoinRequest request;
  request.job = options_.job.name;
  request.token = options_.job.token;
  request.build = Version();
  request.state = options_.state();
  std::string bytes;
  {
    std::lock_guard lock(mutex_);
    request.member = options_.member;
    bytes = options_.template_bytes;
  }
  request.state.highest_term = std::max(request.state.highest_term, newest_term_.load());
  request.state.joined_term = term_;
  Result<JoinReply> joined = Status(Code::kInternal, "never asked");
  do {
    BASCULE_RETURN_IF_ERROR(StoreTemplate(bytes, request.member.world_template, deadline));
    joined = directory_->Join(request, deadline);
    // A coordinator that was restarted in between has no templates.
  } while (joined.status().code() == Code::kNotFound && !deadline.Passed());
  BASCULE_ASSIGN_OR_RETURN(JoinReply reply, std::move(joined));
  joined_ = true;
  unsettled_ = false;  // it came with the layout
  term_ = reply.term;
  stale_ = reply.stale_term;
  newest_term_ = std::max(newest_term_.load(), reply.term);
  epoch_ = reply.epoch;
  interval_ms_ = reply.heartbeat_ms > 0 ? reply.heartbeat_ms : options_.job.heartbeat.count();
  return Status::Ok();
}

bool Agent::IsUncertain(const Status& status) {
  const Code code = status.code();
  return code == Code::kUnavailable || code == Code::kDeadlineExceeded || code == Code::kClosed ||
         code == Code::kInternal;
}

Status Agent::Rebind(const std::string& template_bytes, const std::vector<uint32_t>& coordinates,
                     Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(Settle(deadline));
  ContentDigest digest = DigestOf(template_bytes);
  BASCULE_RETURN_IF_ERROR(StoreTemplate(template_bytes, digest, deadline));
  MemberInfo member = this->member();
  member.world_template = digest;
  member.coordinates = coordinates;
  ++member.layout_serial;
  Result<JoinReply> reply = directory_->Rebind(member, deadline);
  std::lock_guard lock(mutex_);
  if (!reply.ok()) {
    if (IsUncertain(reply.status())) {
      options_.member.layout_serial += 2;
      unsettled_ = true;
    }
    return reply.status();
  }
  options_.member = std::move(member);
  options_.template_bytes = template_bytes;
  epoch_ = reply->epoch;
  return Status::Ok();
}

Status Agent::Settle(Deadline deadline) {
  if (!unsettled_) return Status::Ok();
  std::string bytes;
  {
    std::lock_guard lock(mutex_);
    bytes = options_.template_bytes;
  }
  const MemberInfo member = this->member();
  BASCULE_RETURN_IF_ERROR(StoreTemplate(bytes, member.world_template, deadline));
  BASCULE_ASSIGN_OR_RETURN(JoinReply reply, directory_->Rebind(member, deadline));
  unsettled_ = false;
  epoch_ = reply.epoch;
  return Status::Ok();
}

void Agent::Log(LogLevel level, const std::string& text) const {
  if (options_.job.log) options_.job.log(level, fmt::format("{}: {}", MemberName(member()), text));
}

void Agent::BeatSoon() {
  std::lock_guard lock(mutex_);
  soon_ = true;
  wake_.notify_all();
}

void Agent::Loop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, std::chrono::milliseconds(interval_ms_),
                   [this] { return stop_ || soon_; });
    if (stop_) break;
    soon_ = false;
    lock.unlock();
    Beat();
    lock.lock();
  }
}

void Agent::Beat() {
  if (gone_) return;
  HeartbeatRequest request;
  request.token = options_.job.token;
  request.incarnation = incarnation_;
  request.layout_serial = member().layout_serial;
  request.state = options_.state();
  request.state.highest_term = std::max(request.state.highest_term, newest_term_.load());
  request.state.joined_term = term_;
  request.told_epoch = epoch_;
  // A beat never outlives its interval by much, so that Close and BeatSoon are prompt.
  Deadline deadline = Deadline::In(std::chrono::milliseconds(interval_ms_));
  auto reply = directory_->Heartbeat(request, deadline);
  if (!reply.ok()) {  // the coordinator is away: beat on
    if (!away_ && !closed_) {
      Log(LogLevel::kWarning, "the coordinator does not answer: " + reply.status().message());
    }
    away_ = true;
    return;
  }
  if (std::exchange(away_, false)) Log(LogLevel::kInfo, "the coordinator answers again");
  if (!reply->member) {
    if (reply->rejoin && Join(deadline).ok()) return;
    if (reply->rejoin) return;  // try again at the next beat
    gone_ = true;
    Log(LogLevel::kError, "declared gone by the coordinator; connect anew");
    options_.on_gone(Status(Code::kUnavailable,
                            fmt::format("the coordinator declared {} gone (silent beyond its "
                                        "deadline, or replaced); connect anew",
                                        MemberName(member()))));
    return;
  }
  newest_term_ = std::max(newest_term_.load(), reply->term);
  epoch_ = reply->epoch;
  if (reply->stale_term && !stale_.exchange(true)) {
    Log(LogLevel::kWarning,
        fmt::format("the trainer world restarted (term {} after {}); connect anew", reply->term,
                    term_.load()));
  }
  (void)Settle(deadline);
  options_.on_beat(*reply);
}

Status Agent::Close(Deadline deadline) {
  if (closed_.exchange(true)) return Status::Ok();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  // Calls of other threads, which may wait long, end here. (Most of all those that wait for the
  // coordinator that this process hosts and is about to stop.)
  if (directory_) directory_->Cancel();
  if (thread_.joinable()) thread_.join();
  // A coordinator that is gone already cannot be told and need not be.
  const Deadline patience = deadline.Earlier(Deadline::In(std::chrono::seconds(1)));
  Status left;
  if (joined_ && !gone_) {
    left = MakeGrpcDirectory(coordinator_, options_.job.token)->Leave(incarnation_, patience);
  }
  if (left.code() == Code::kUnavailable || left.code() == Code::kDeadlineExceeded) left = {};
  if (server_) server_->Stop();
  return left;
}

}  // namespace bascule
