#include "session/engine_channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/wire.h"

namespace bascule {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSlice{1000};
constexpr milliseconds kProbe{300};          // for one question of a termination round
constexpr milliseconds kIntroduction{5000};  // a live rank introduces itself within two beats

void PutId(WireWriter* out, VersionId id) {
  out->U64(id.term);
  out->U64(id.version);
}
VersionId GetId(WireReader* in) {
  VersionId id;
  id.term = in->U64();
  id.version = in->U64();
  return id;
}
void PutKey(WireWriter* out, const UpdateKey& key) {
  PutId(out, key.id);
  out->U64(key.decider);
  out->U64(key.attempt);
}
UpdateKey GetKey(WireReader* in) {
  UpdateKey key;
  key.id = GetId(in);
  key.decider = in->U64();
  key.attempt = in->U64();
  return key;
}

Status Malformed() {
  return Status(Code::kInvalidArgument, "malformed engine message (a rank of another build?)");
}

Status NotDecided(const std::string& why) {
  return Status(Code::kNotDecided,
                "the engine's update was aborted: " + why + "; the engine keeps its version");
}

// The numbered answers, as they travel.
enum class Numbered : uint8_t { kNotYet = 0, kAnswer = 1, kError = 2, kLost = 3 };

}  // namespace

EngineChannel::EngineChannel(Options options)
    : options_(std::move(options)), core_(options_.in_place) {
  if (leads()) decider_.emplace(options_.incarnation, options_.world_size);
}

Result<std::unique_ptr<EngineChannel>> EngineChannel::Start(Options options) {
  std::unique_ptr<EngineChannel> channel(new EngineChannel(std::move(options)));
  if (channel->options_.world_size > 1) {
    EngineChannel* raw = channel.get();
    BASCULE_ASSIGN_OR_RETURN(channel->server_,
                             StartGrpcServer(channel->options_.listen, channel->options_.token,
                                             [raw](const std::string& method,
                                                   const std::string& request, Deadline deadline) {
                                               return raw->Handle(method, request, deadline);
                                             }));
    channel->address_ = channel->server_->address();
  }
  if (channel->leads()) {
    channel->decider_->Hello(0, channel->options_.incarnation, {});
    channel->leader_ = channel->options_.incarnation;
  }
  return channel;
}

EngineChannel::~EngineChannel() { Stop(); }

void EngineChannel::Stop() {
  if (server_) server_->Stop();
  changed_.notify_all();
}

std::string EngineChannel::Name(uint32_t rank) const {
  return fmt::format("engine {} rank {}", options_.engine, rank);
}

bool EngineChannel::WaitCore(const std::function<bool(const RankCore&)>& done, Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.at(), [&] { return done(core_); });
}

// ---- server side ------------------------------------------------------------------------------

Result<std::string> EngineChannel::Handle(const std::string& method, const std::string& request,
                                          Deadline deadline) {
  WireReader in(request);
  if (method == "outcome") {
    const UpdateKey key = GetKey(&in);
    const bool decider_gone = in.U8() != 0;
    const bool abort = in.U8() != 0;
    const std::string why = in.Bytes();
    if (!in.done()) return Malformed();
    WireWriter out;
    std::unique_lock lock(mutex_);
    Outcome outcome = Outcome::kNotLearned;
    if (decider_ && key.decider == decider_->incarnation()) {
      outcome = abort ? decider_->AbortAsked(key, why) : decider_->OutcomeOf(key);
      if (outcome == Outcome::kUndecided) {
        // The asker waits for the decision: hold its call for a while.
        changed_.wait_until(lock, deadline.Earlier(Deadline::In(kSlice)).at(), [&] {
          outcome = decider_->OutcomeOf(key);
          return outcome != Outcome::kUndecided;
        });
      }
      out.U8(static_cast<uint8_t>(outcome));
      out.Bytes(outcome == Outcome::kAbort ? decider_->WhyAborted(key) : "");
    } else {
      out.U8(static_cast<uint8_t>(core_.AnswerOutcome(key, decider_gone)));
      out.Bytes("");
    }
    changed_.notify_all();
    return out.Take();
  }
  if (method == "learn") {
    const UpdateKey key = GetKey(&in);
    const uint8_t outcome = in.U8();
    if (!in.done() || outcome > static_cast<uint8_t>(Outcome::kAbort)) return Malformed();
    std::lock_guard lock(mutex_);
    (void)core_.LearnFromDecider(key, static_cast<Outcome>(outcome));
    changed_.notify_all();
    return std::string();
  }
  if (method == "status") {
    WireWriter out;
    std::lock_guard lock(mutex_);
    Status servable = core_.Servable();
    PutId(&out, core_.serving());
    out.U64(options_.incarnation);
    out.U8(servable.ok() ? 1 : 0);
    out.Bytes(servable.ToString());
    return out.Take();
  }
  if (!leads()) {
    return Status(Code::kInvalidArgument, "this rank does not lead its engine; ask rank 0")
        .WithPeer(Name(options_.rank));
  }
  return HandleLeader(method, request, deadline);
}

Result<std::string> EngineChannel::HandleLeader(const std::string& method,
                                                const std::string& request, Deadline deadline) {
  WireReader in(request);
  const uint64_t leader = in.U64();
  const uint32_t rank = in.U32();
  const uint64_t incarnation = in.U64();
  if (!in.ok() || rank >= options_.world_size) return Malformed();
  WireWriter out;
  std::unique_lock lock(mutex_);
  if (method == "hello") {
    const VersionId serving = GetId(&in);
    if (!in.done()) return Malformed();
    const uint64_t next_poll = decider_->Hello(rank, incarnation, serving);
    out.U64(options_.incarnation);
    out.U64(next_poll);
    changed_.notify_all();
    return out.Take();
  }
  if (leader != options_.incarnation) {
    return Status(Code::kAborted, "rank 0 of the engine was restarted; poll again")
        .WithPeer(Name(0));
  }
  const Deadline slice = deadline.Earlier(Deadline::In(kSlice));
  if (method == "poll") {
    const uint64_t index = in.U64();
    const bool newest = in.U8() != 0;
    if (!in.done()) return Malformed();
    std::optional<DeciderCore::NumberedPoll> poll;
    changed_.wait_until(lock, slice.at(), [&] {
      poll = decider_->PollFrom(index, newest);
      return poll.has_value();
    });
    if (!poll) {
      out.U8(static_cast<uint8_t>(Numbered::kNotYet));
      return out.Take();
    }
    const DeciderCore::PollAnswer* answer = &poll->answer;
    out.U8(static_cast<uint8_t>(answer->status.ok() ? Numbered::kAnswer : Numbered::kError));
    out.U64(poll->number);
    out.U8(static_cast<uint8_t>(answer->status.code()));
    out.Bytes(answer->status.message());
    out.U8(answer->key ? 1 : 0);
    PutKey(&out, answer->key.value_or(UpdateKey{}));
    out.U64(answer->epoch);
    out.U8(answer->own_membership ? 1 : 0);
    out.I64(answer->publish_start_ns);
    return out.Take();
  }
  if (method == "ready") {
    const UpdateKey key = GetKey(&in);
    const uint64_t index = in.U64();
    if (!in.done()) return Malformed();
    bool lost = false;
    std::optional<bool> answer;
    changed_.wait_until(lock, slice.at(), [&] {
      // What has ended needs no call of rank 0 any more.
      const Outcome outcome = decider_->OutcomeOf(key);
      if (outcome == Outcome::kCommit) answer = true;
      if (outcome != Outcome::kUndecided) return true;
      answer = decider_->ReadyAt(key, index, &lost);
      return answer.has_value() || lost;
    });
    if (!answer && !lost && decider_->OutcomeOf(key) == Outcome::kAbort) {
      return NotDecided(decider_->WhyAborted(key));
    }
    Numbered kind = answer ? Numbered::kAnswer : lost ? Numbered::kLost : Numbered::kNotYet;
    out.U8(static_cast<uint8_t>(kind));
    out.U8(answer.value_or(false) ? 1 : 0);
    return out.Take();
  }
  if (method == "attempt") {
    const VersionId id = GetId(&in);
    if (!in.done()) return Malformed();
    PutKey(&out, decider_->AttemptAt(id));
    return out.Take();
  }
  if (method == "vote") {
    const UpdateKey key = GetKey(&in);
    const bool ok = in.U8() != 0;
    const std::string why = in.Bytes();
    if (!in.done()) return Malformed();
    decider_->Vote(key, rank, incarnation, ok, why);
    changed_.notify_all();
    return out.Take();
  }
  if (method == "serving") {
    const VersionId id = GetId(&in);
    if (!in.done()) return Malformed();
    decider_->Serving(rank, incarnation, id);
    changed_.notify_all();
    return out.Take();
  }
  return Status(Code::kUnimplemented, "unknown engine message " + method);
}

// ---- client side ------------------------------------------------------------------------------

Result<std::shared_ptr<RpcClient>> EngineChannel::ClientOf(uint32_t rank, Deadline deadline) {
  {
    std::lock_guard lock(client_mutex_);
    auto it = clients_.find(rank);
    if (it != clients_.end()) return it->second.client;
  }
  BASCULE_ASSIGN_OR_RETURN(Membership membership, agent_->directory().Members(deadline));
  std::lock_guard lock(client_mutex_);
  for (const MemberInfo& member : membership.members) {
    if (member.role != Role::kRollout || member.engine != options_.engine) continue;
    last_incarnation_[member.rank] = member.incarnation;
    if (member.rank != rank) continue;
    Client client{member.channel, member.incarnation,
                  std::shared_ptr<RpcClient>(MakeGrpcClient(member.channel, options_.token))};
    clients_[rank] = client;
    return client.client;
  }
  return Status(Code::kUnavailable, Name(rank) + " has not joined (any more); start it")
      .WithPeer(Name(rank));
}

Result<std::string> EngineChannel::AskRank(uint32_t rank, const std::string& method,
                                           const std::string& request, Deadline deadline) {
  if (rank == options_.rank) return Handle(method, request, deadline);
  BASCULE_ASSIGN_OR_RETURN(auto client, ClientOf(rank, deadline));
  ++requests_;
  auto answer = client->Call(method, request, deadline);
  if (!answer.ok() && (answer.status().code() == Code::kUnavailable ||
                       answer.status().code() == Code::kDeadlineExceeded)) {
    // It may have been restarted elsewhere: look its address up again next time.
    std::lock_guard lock(client_mutex_);
    clients_.erase(rank);
    return Status(answer.status()).WithPeer(Name(rank));
  }
  return answer;
}

Status EngineChannel::Hello(Deadline deadline) {
  WireWriter out;
  out.U64(0);
  out.U32(options_.rank);
  out.U64(options_.incarnation);
  {
    std::lock_guard lock(mutex_);
    PutId(&out, core_.serving());
  }
  BASCULE_ASSIGN_OR_RETURN(std::string bytes, AskRank(0, "hello", out.Take(), deadline));
  WireReader in(bytes);
  const uint64_t leader = in.U64();
  const uint64_t next_poll = in.U64();
  if (!in.done()) return Malformed();
  std::lock_guard lock(client_mutex_);
  leader_ = leader;
  next_poll_ = next_poll;
  return Status::Ok();
}

Status EngineChannel::EnsureIntroduced(Deadline deadline) {
  {
    std::lock_guard lock(client_mutex_);
    if (leader_ != 0) return Status::Ok();
  }
  return Hello(deadline);
}

void EngineChannel::NoteMembers(const std::vector<MemberInfo>& members) {
  std::lock_guard lock(client_mutex_);
  for (const MemberInfo& member : members) {
    if (member.role == Role::kRollout && member.engine == options_.engine) {
      last_incarnation_[member.rank] = member.incarnation;
    }
  }
}

void EngineChannel::Introduce(Deadline deadline) {
  if (!leads()) (void)EnsureIntroduced(deadline);
}

// Every message to the leader starts with whom it is meant for and who speaks.
Result<std::string> EngineChannel::AskLeader(const std::string& method, const std::string& request,
                                             Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(EnsureIntroduced(deadline));
  WireWriter out;
  {
    std::lock_guard lock(client_mutex_);
    out.U64(leader_);
  }
  out.U32(options_.rank);
  out.U64(options_.incarnation);
  auto answer = AskRank(0, method, out.Take() + request, deadline);
  if (!answer.ok() && answer.status().code() == Code::kAborted) {
    std::lock_guard lock(client_mutex_);
    leader_ = 0;  // introduce again next time
  }
  return answer;
}

// ---- polling ----------------------------------------------------------------------------------

// A rank that has joined but not introduced itself yet would miss the answer of this poll and then
// wait for one that the leader makes later: the leader waits for it, for a while.
void EngineChannel::AwaitIntroductions(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (decider_->KnowsAll()) return;
  }
  auto membership = agent_->directory().Members(deadline);
  if (!membership.ok()) return;
  std::vector<uint32_t> expected;
  for (const MemberInfo& member : membership->members) {
    if (member.role == Role::kRollout && member.engine == options_.engine) {
      expected.push_back(member.rank);
    }
  }
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline.Earlier(Deadline::In(kIntroduction)).at(), [&] {
    return std::all_of(expected.begin(), expected.end(),
                       [this](uint32_t rank) { return decider_->Knows(rank); });
  });
}

Result<EngineChannel::PollResult> EngineChannel::LeaderPoll(Deadline deadline) {
  AwaitIntroductions(deadline);
  VersionId common;
  {
    std::lock_guard lock(mutex_);
    decider_->Serving(0, options_.incarnation, core_.serving());
    common = decider_->CommonVersion();
  }
  auto reply = agent_->directory().Poll(agent_->incarnation(), common, false, deadline);
  DeciderCore::PollAnswer answer;
  if (!reply.ok()) answer.status = reply.status();
  std::lock_guard lock(mutex_);
  if (reply.ok() && reply->offered) {
    answer.key = decider_->OpenUpdate(reply->id, true);
    answer.epoch = reply->epoch;
    answer.own_membership = reply->own_membership;
    answer.publish_start_ns = reply->publish_start_ns;
  }
  decider_->RecordPoll(answer);
  changed_.notify_all();
  if (!answer.status.ok()) return answer.status;
  return PollResult{answer.key, answer.epoch, answer.own_membership, answer.publish_start_ns};
}

Result<EngineChannel::PollResult> EngineChannel::Poll(Deadline deadline) {
  if (leads()) return LeaderPoll(deadline);
  Status absent;
  for (;;) {
    Status introduced = EnsureIntroduced(deadline);
    if (introduced.code() == Code::kDeadlineExceeded && !absent.ok()) return absent;
    // A rank 0 that has not connected yet may do so until the deadline.
    if (introduced.code() == Code::kUnavailable && !deadline.Passed() && !cancelled_) {
      absent = std::move(introduced);
      WaitCore([](const RankCore&) { return false; },
               deadline.Earlier(Deadline::In(milliseconds(50))));
      continue;
    }
    BASCULE_RETURN_IF_ERROR(std::move(introduced));
    WireWriter out;
    {
      std::lock_guard lock(client_mutex_);
      out.U64(next_poll_);
      out.U8(poll_missed_ ? 1 : 0);
    }
    auto answer = AskLeader("poll", out.Take(), deadline);
    if (!answer.ok()) {
      std::lock_guard lock(client_mutex_);
      poll_missed_ = true;
      return answer.status();
    }
    const std::string bytes = std::move(*answer);
    WireReader in(bytes);
    const auto kind = static_cast<Numbered>(in.U8());
    if (kind == Numbered::kNotYet) {
      if (!deadline.Passed()) continue;
      std::lock_guard lock(client_mutex_);
      poll_missed_ = true;
      return Status(Code::kDeadlineExceeded,
                    "rank 0 of the engine has not polled yet; poll on every rank alike")
          .WithPeer(Name(0));
    }
    std::lock_guard lock(client_mutex_);
    const uint64_t number = in.U64();
    const auto code = static_cast<Code>(in.U8());
    const std::string message = in.Bytes();
    const bool offered = in.U8() != 0;
    const UpdateKey key = GetKey(&in);
    const uint64_t epoch = in.U64();
    const bool own_membership = in.U8() != 0;
    const int64_t publish_start = in.I64();
    if (!in.done()) return Malformed();
    next_poll_ = number + 1;
    poll_missed_ = false;
    if (kind == Numbered::kError) return Status(code, message).WithPeer(Name(0));
    return PollResult{offered ? std::optional(key) : std::nullopt, epoch, own_membership,
                      publish_start};
  }
}

Result<UpdateKey> EngineChannel::AttemptAt(VersionId id, Deadline deadline) {
  WireWriter out;
  PutId(&out, id);
  BASCULE_ASSIGN_OR_RETURN(std::string bytes, AskLeader("attempt", out.Take(), deadline));
  WireReader in(bytes);
  UpdateKey key = GetKey(&in);
  if (!in.done()) return Malformed();
  return key;
}

Result<bool> EngineChannel::Ready(const UpdateKey& key, Deadline deadline) {
  if (leads()) {
    bool check = false;
    {
      std::lock_guard lock(mutex_);
      check = decider_->AllVoted(key) && !decider_->available(key);
    }
    if (check) {
      auto reply = agent_->directory().QueryVersion(agent_->incarnation(), key.id, false, deadline);
      std::lock_guard lock(mutex_);
      if (reply.ok() && reply->state == VersionState::kAvailable) decider_->SetAvailable(key.id);
    }
    std::lock_guard lock(mutex_);
    const Outcome outcome = decider_->OutcomeOf(key);
    if (outcome == Outcome::kAbort) return NotDecided(decider_->WhyAborted(key));
    const bool answer =
        outcome == Outcome::kCommit || (decider_->AllVoted(key) && decider_->available(key));
    decider_->RecordReady(key, answer);
    changed_.notify_all();
    return answer;
  }
  for (;;) {
    BASCULE_RETURN_IF_ERROR(EnsureIntroduced(deadline));
    uint64_t index = 0;
    {
      std::lock_guard lock(client_mutex_);
      if (ready_key_ != key) {
        ready_key_ = key;
        next_ready_ = 0;
      }
      index = next_ready_;
    }
    WireWriter out;
    PutKey(&out, key);
    out.U64(index);
    BASCULE_ASSIGN_OR_RETURN(std::string bytes, AskLeader("ready", out.Take(), deadline));
    WireReader in(bytes);
    const auto kind = static_cast<Numbered>(in.U8());
    const bool answer = in.U8() != 0;
    if (!in.done()) return Malformed();
    if (kind == Numbered::kNotYet) {
      if (!deadline.Passed()) continue;
      return Status(Code::kDeadlineExceeded,
                    "rank 0 of the engine has not called Ready yet; call it on every rank alike")
          .WithPeer(Name(0));
    }
    std::lock_guard lock(client_mutex_);
    if (kind == Numbered::kLost) {
      return Status(Code::kAborted, "rank 0 knows this update no more; poll again")
          .WithPeer(Name(0));
    }
    if (ready_key_ == key) next_ready_ = index + 1;
    return answer;
  }
}

// ---- deciding ---------------------------------------------------------------------------------

Status EngineChannel::Vote(const UpdateKey& key, bool ok, const std::string& why,
                           Deadline deadline) {
  WireWriter out;
  PutKey(&out, key);
  out.U8(ok ? 1 : 0);
  out.Bytes(why);
  const std::string request = out.Take();
  for (;;) {
    auto answer = AskLeader("vote", request, deadline.Earlier(Deadline::In(kSlice)));
    if (answer.ok()) return Status::Ok();
    const Code code = answer.status().code();
    const bool away = code == Code::kUnavailable || code == Code::kDeadlineExceeded;
    if (!away || deadline.Passed() || cancelled_) return answer.status();
    WaitCore([](const RankCore&) { return false; },
             deadline.Earlier(Deadline::In(milliseconds(50))));
  }
}

// The core has learned `outcome` (or had before): says what the caller gets.
Status EngineChannel::AfterOutcome(const UpdateKey& key, const Learned& learned) {
  std::lock_guard lock(mutex_);
  if (learned.outcome == Outcome::kCommit) return Status::Ok();
  if (decider_) return NotDecided(decider_->WhyAborted(key));
  return NotDecided(learned.why.empty() ? "as the engine's other ranks know" : learned.why);
}

Status EngineChannel::Decide(const UpdateKey& key, Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (core_.key() == key && core_.state() == ReceiverState::kDecided) return Status::Ok();
    if (core_.banished()) return core_.Servable();
  }
  return leads() ? LeaderDecide(key, deadline) : FollowerDecide(key, deadline);
}

Status EngineChannel::LeaderDecide(const UpdateKey& key, Deadline deadline) {
  bool ask_available = true;
  for (;;) {
    std::unique_lock lock(mutex_);
    Outcome outcome = decider_->TryDecide(key);
    if (outcome == Outcome::kUndecided && decider_->AllVoted(key) && ask_available) {
      // Only for explicit versions: one that was polled is known to be available.
      lock.unlock();
      auto reply = agent_->directory().QueryVersion(agent_->incarnation(), key.id, false, deadline);
      lock.lock();
      if (reply.ok() && reply->state == VersionState::kAvailable) decider_->SetAvailable(key.id);
      if (reply.ok() && reply->state == VersionState::kAborted) {
        (void)decider_->Abort(key, "the version was aborted: " + reply->reason);
      }
      ask_available = !reply.ok() || reply->state == VersionState::kOpen;
      outcome = decider_->TryDecide(key);
      if (outcome == Outcome::kUndecided) {
        changed_.wait_until(lock, deadline.Earlier(Deadline::In(milliseconds(20))).at());
      }
    }
    if (outcome == Outcome::kUndecided && deadline.Passed()) {
      outcome = decider_->Abort(key, "not decided by the deadline: " + decider_->Missing(key));
    }
    if (outcome != Outcome::kUndecided) {
      (void)core_.LearnFromDecider(key, outcome);
      changed_.notify_all();
      lock.unlock();
      return AfterOutcome(key, {outcome, ""});
    }
    changed_.wait_until(lock, deadline.Earlier(Deadline::In(milliseconds(100))).at());
  }
}

Result<EngineChannel::Learned> EngineChannel::AskOutcome(uint32_t rank, const UpdateKey& key,
                                                         bool decider_gone,
                                                         const std::string& abort,
                                                         Deadline deadline) {
  WireWriter out;
  PutKey(&out, key);
  out.U8(decider_gone ? 1 : 0);
  out.U8(abort.empty() ? 0 : 1);
  out.Bytes(abort);
  BASCULE_ASSIGN_OR_RETURN(std::string bytes, AskRank(rank, "outcome", out.Take(), deadline));
  WireReader in(bytes);
  const uint8_t outcome = in.U8();
  std::string why = in.Bytes();
  if (!in.done() || outcome > static_cast<uint8_t>(Outcome::kNotLearned)) return Malformed();
  return Learned{static_cast<Outcome>(outcome), std::move(why)};
}

// Asks the decider until it answers; near the deadline asks it to record an abort, so that the
// answer is definite; then asks the others; then the rank is in doubt.
Status EngineChannel::FollowerDecide(const UpdateKey& key, Deadline deadline) {
  const auto left = deadline.Left();
  const Deadline patience = Deadline::In(left * 7 / 10);
  Termination termination(key, options_.world_size, options_.rank, false);
  while (!deadline.Passed()) {
    bool refused = false;
    {
      std::lock_guard lock(mutex_);
      // Learned meanwhile, by the agent's thread.
      if (core_.key() == key && core_.state() == ReceiverState::kDecided) return Status::Ok();
      refused = core_.Refuses(key.decider);
    }
    if (!refused) {
      const bool give_up = patience.Passed();
      const Deadline ask =
          give_up ? Deadline::In(kProbe).Earlier(deadline) : Deadline::In(kSlice).Earlier(patience);
      const std::string abort =
          give_up ? Name(options_.rank) + " waited for the decision until its deadline" : "";
      auto answer = AskOutcome(0, key, false, abort, ask);
      const Outcome outcome = answer.ok() ? answer->outcome : Outcome::kNotLearned;
      if (outcome == Outcome::kCommit || outcome == Outcome::kAbort) {
        bool learned = false;
        {
          std::lock_guard lock(mutex_);
          learned = core_.LearnFromDecider(key, outcome) || !core_.Refuses(key.decider);
          changed_.notify_all();
        }
        if (learned) return AfterOutcome(key, *answer);
      }
      // A question cut short by the end of this rank's patience says nothing about the leader.
      const bool cut_short = !give_up && patience.Passed();
      if (outcome == Outcome::kUndecided || cut_short) continue;
    }
    auto concluded = TerminationRound(&termination, deadline);
    if (concluded) return AfterOutcome(key, {*concluded, ""});
    WaitCore([&](const RankCore& core) { return core.state() == ReceiverState::kDecided; },
             Deadline::In(milliseconds(50)).Earlier(deadline));
  }
  std::lock_guard lock(mutex_);
  if (core_.key() == key && core_.state() == ReceiverState::kDecided) return Status::Ok();
  if (!core_.EnterDoubt(key)) return NotDecided("as was learned meanwhile");
  return Status(Code::kInDoubt,
                "rank 0 of the engine cannot be asked whether the update was decided; this rank is "
                "not servable until it learns; call Decide again")
      .WithPeer(Name(0));
}

// One question each to the decider, the directory and the other ranks.
std::optional<Outcome> EngineChannel::TerminationRound(Termination* termination,
                                                       Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (core_.Refuses(termination->key().decider)) termination->OnGone(0, true);
  }
  for (const auto& question : termination->Next()) {
    if (deadline.Passed()) break;
    const Deadline probe = Deadline::In(kProbe).Earlier(deadline);
    switch (question.kind) {
      case Termination::Question::kAskGone: {
        uint64_t incarnation = termination->key().decider;
        if (question.rank != 0) {
          std::lock_guard lock(client_mutex_);
          auto it = last_incarnation_.find(question.rank);
          if (it == last_incarnation_.end()) continue;
          incarnation = it->second;
        }
        auto gone = agent_->directory().Gone(incarnation, probe);
        if (gone.ok()) termination->OnGone(question.rank, *gone);
        if (gone.ok() && *gone) NoteGone(incarnation);
        if (termination->decider_gone()) {
          // From here on this rank refuses what the old decider says, like those it asks.
          std::lock_guard lock(mutex_);
          (void)core_.AnswerOutcome(termination->key(), true);
        }
        break;
      }
      case Termination::Question::kAskDecider:
      case Termination::Question::kAskRank: {
        auto outcome =
            AskOutcome(question.rank, termination->key(), question.decider_gone, "", probe);
        if (outcome.ok()) termination->OnOutcome(question, outcome->outcome);
        break;
      }
    }
    if (termination->outcome()) break;
  }
  if (!termination->outcome()) return std::nullopt;
  std::lock_guard lock(mutex_);
  const UpdateKey& key = termination->key();
  const Outcome outcome = *termination->outcome();
  if (!termination->from_decider()) {
    (void)core_.Learn(key, outcome);
  } else if (core_.Refuses(key.decider)) {
    // Pledged meanwhile: what the decider said counts no more.
    termination->OnGone(0, true);
    return std::nullopt;
  } else {
    (void)core_.LearnFromDecider(key, outcome);
  }
  changed_.notify_all();
  return outcome;
}

void EngineChannel::NoteGone(uint64_t incarnation) {
  std::lock_guard lock(client_mutex_);
  if (std::find(told_gone_.begin(), told_gone_.end(), incarnation) != told_gone_.end()) return;
  if (told_gone_.size() == 64) told_gone_.erase(told_gone_.begin());
  told_gone_.push_back(incarnation);
}

std::vector<uint64_t> EngineChannel::ToldGone() {
  std::lock_guard lock(client_mutex_);
  return told_gone_;
}

void EngineChannel::ResolveDoubt(Deadline deadline) {
  UpdateKey key;
  {
    std::lock_guard lock(mutex_);
    if (core_.state() != ReceiverState::kInDoubt) return;
    key = core_.key();
  }
  Termination termination(key, options_.world_size, options_.rank, false);
  // Two rounds: the second asks for pledges when the first found the decider gone.
  for (int round = 0; round < 2 && !deadline.Passed(); ++round) {
    auto outcome = TerminationRound(&termination, deadline);
    if (outcome) return;
  }
}

Status EngineChannel::Abort(const UpdateKey& key, const std::string& why, Deadline deadline) {
  Learned learned;
  if (leads()) {
    std::lock_guard lock(mutex_);
    learned.outcome = decider_->Abort(key, why);
    (void)core_.LearnFromDecider(key, learned.outcome);
    changed_.notify_all();
  } else {
    BASCULE_ASSIGN_OR_RETURN(learned, AskOutcome(0, key, false, why, deadline));
    std::lock_guard lock(mutex_);
    if (core_.Refuses(key.decider)) {
      learned.outcome = Outcome::kNotLearned;
    } else {
      (void)core_.LearnFromDecider(key, learned.outcome);
    }
    changed_.notify_all();
  }
  if (learned.outcome == Outcome::kNotLearned) {
    // The decider of that update is gone: learn as a rank in doubt does.
    {
      std::lock_guard lock(mutex_);
      (void)core_.EnterDoubt(key);
    }
    ResolveDoubt(deadline);
    std::lock_guard lock(mutex_);
    if (core_.state() == ReceiverState::kInDoubt) {
      return Status(Code::kInDoubt, "the outcome of the update cannot be learned yet; try again");
    }
    return Status::Ok();
  }
  if (learned.outcome == Outcome::kCommit) {
    return Status(Code::kBusy,
                  fmt::format("the engine has decided to commit version {} of term {}; commit it "
                              "on this rank too (Poll gives the update back)",
                              key.id.version, key.id.term));
  }
  return Status::Ok();
}

void EngineChannel::HandOver(Deadline deadline) {
  if (!leads()) return;
  WireWriter out;
  {
    std::lock_guard lock(mutex_);
    const UpdateKey key = core_.key();
    if (decider_->OutcomeOf(key) != Outcome::kCommit || core_.serving() != key.id) return;
    PutKey(&out, key);
    out.U8(static_cast<uint8_t>(Outcome::kCommit));
  }
  const std::string request = out.Take();
  for (uint32_t rank = 1; rank < options_.world_size; ++rank) {
    (void)AskRank(rank, "learn", request, deadline.Earlier(Deadline::In(kProbe)));
  }
}

void EngineChannel::AnnounceServing(Deadline deadline) {
  WireWriter out;
  {
    std::lock_guard lock(mutex_);
    PutId(&out, core_.serving());
  }
  (void)AskLeader("serving", out.Take(), deadline);
}

Status EngineChannel::EngineServable(Deadline deadline) {
  VersionId common;
  for (uint32_t rank = 0; rank < options_.world_size; ++rank) {
    BASCULE_ASSIGN_OR_RETURN(std::string bytes, AskRank(rank, "status", "", deadline));
    WireReader in(bytes);
    const VersionId serving = GetId(&in);
    (void)in.U64();
    const bool servable = in.U8() != 0;
    const std::string why = in.Bytes();
    if (!in.done()) return Malformed();
    if (!servable) {
      return Status(Code::kUnavailable, "not servable: " + why).WithPeer(Name(rank));
    }
    if (rank == 0) common = serving;
    if (serving != common) {
      return Status(Code::kUnavailable,
                    fmt::format("it serves version {} of term {}, rank 0 serves version {} of term "
                                "{}; update the engine before it serves",
                                serving.version, serving.term, common.version, common.term))
          .WithPeer(Name(rank));
    }
  }
  return Status::Ok();
}

}  // namespace bascule
