#include "tests/session/model/model.h"

#include <fmt/format.h>

#include <algorithm>

namespace bascule::testing {
namespace {

constexpr int64_t kHeartbeatMs = 500;
const char* const kToken = "t";

uint64_t Combine(uint64_t hash, uint64_t value) {
  return Mix64(hash ^ (value + 0x9E3779B97F4A7C15u));
}

}  // namespace

Model::Model(const ModelOptions& options, uint64_t seed)
    : options_(options),
      faults_left_(options.faults),
      trainers_(options.trainers),
      receivers_(options.receivers) {
  now_ms_ += static_cast<int64_t>(seed % 1000);
  NewCoordinator();
  for (Trainer& trainer : trainers_) StartTrainer(&trainer);
  for (uint32_t rank = 0; rank < receivers_.size(); ++rank) StartReceiver(rank);
}

CoordinatorTime Model::Now() const { return {now_ms_, now_ms_ * 1'000'000}; }

void Model::NewCoordinator() {
  CoordinatorOptions options;
  options.job = "job";
  options.token = kToken;
  options.coordinator_id = ++coordinators_;
  options.heartbeat_ms = kHeartbeatMs;
  options.start = Now();
  options.oracle = std::make_shared<TrivialOracle>(options_.replicas);
  coordinator_.emplace(std::move(options));
}

void Model::StartTrainer(Trainer* trainer) {
  const uint64_t heard = 0;  // a new process remembers nothing
  const uint64_t next = std::max<uint64_t>(trainer->next, 1);
  *trainer = Trainer{};
  trainer->heard = heard;
  trainer->incarnation = ++incarnations_;
  trainer->core = SourceCore(options_.slots);
  trainer->next = next;
  trainer->last = next + options_.versions - 1;
  Arena& arena = arenas_[trainer->incarnation];
  arena.data.assign(options_.slots, Content{{}, true});
  arena.generation.assign(options_.slots, 1);
}

void Model::StartReceiver(uint32_t rank) {
  Receiver& receiver = receivers_[rank];
  receiver = Receiver{};
  receiver.incarnation = ++incarnations_;
  receiver.core = RankCore(options_.in_place);
  receiver.live = Content{{}, true};
  receiver.shadow = Content{{}, true};
  if (rank == 0) {
    receiver.decider.emplace(receiver.incarnation, options_.receivers);
    receiver.decider->Hello(0, receiver.incarnation, {});
    receiver.leader = receiver.incarnation;
  }
}

MemberInfo Model::Info(const Trainer& trainer, uint32_t rank) const {
  MemberInfo info;
  info.role = Role::kTrainer;
  info.rank = rank;
  info.world_size = options_.trainers;
  info.incarnation = trainer.incarnation;
  return info;
}

MemberInfo Model::Info(const Receiver& receiver, uint32_t rank) const {
  MemberInfo info;
  info.role = Role::kRollout;
  info.engine = "e";
  info.rank = rank;
  info.world_size = options_.receivers;
  info.incarnation = receiver.incarnation;
  return info;
}

MemberState Model::State(const Trainer& trainer) const {
  MemberState state;
  state.highest_term = trainer.heard;
  state.joined_term = trainer.term;
  state.term_complete = trainer.at != TrainerAt::kJoin && trainer.at != TrainerAt::kComplete;
  for (const auto& [id, version] : trainer.versions) {
    if (trainer.core.Find(id)) {
      state.held.push_back(version);
    } else if (version.told == VersionState::kAborted || version.told == VersionState::kAvailable) {
      state.told.push_back(version);
    }
  }
  return state;
}

MemberState Model::State(const Receiver& receiver) const {
  MemberState state;
  state.highest_term = receiver.heard;
  state.serving = receiver.core.serving();
  state.servable = receiver.core.Servable().ok();
  state.told_gone = receiver.told_gone;
  return state;
}

JoinRequest Model::Request(const MemberInfo& info, MemberState state) const {
  JoinRequest request;
  request.job = "job";
  request.token = kToken;
  request.member = info;
  request.state = std::move(state);
  return request;
}

void Model::SawTerm(uint64_t* heard, uint64_t term) {
  if (term < *heard && term != 0)
    Violate(fmt::format("a process was told term {} after {}", term, *heard));
  *heard = std::max(*heard, term);
  highest_term_ = std::max(highest_term_, term);
}

// ---- time and beats ---------------------------------------------------------------------------

void Model::Beat(Trainer* trainer, uint32_t rank) {
  if (trainer->at == TrainerAt::kJoin) return;
  HeartbeatRequest beat;
  beat.token = kToken;
  beat.incarnation = trainer->incarnation;
  beat.state = State(*trainer);
  auto reply = coordinator_->Heartbeat(beat, Now());
  if (!reply.ok()) return;
  if (!reply->member) {
    if (reply->rejoin) {
      auto joined = coordinator_->Join(Request(Info(*trainer, rank), State(*trainer)), Now());
      if (joined.ok() && !joined->stale_term) return;
      if (!joined.ok() && joined.status().code() == Code::kUnavailable) return;
    }
    StartTrainer(trainer);  // its framework connects anew
    return;
  }
  SawTerm(&trainer->heard, reply->term);
  for (const auto& [id, state] : reply->versions) {
    auto it = trainer->versions.find(id);
    if (it != trainer->versions.end() && state != VersionState::kUnknown) it->second.told = state;
  }
  if (reply->stale_term) StartTrainer(trainer);
}

void Model::Beat(Receiver* receiver, uint32_t rank) {
  if (receiver->at == ReceiverAt::kJoin) return;
  HeartbeatRequest beat;
  beat.token = kToken;
  beat.incarnation = receiver->incarnation;
  beat.state = State(*receiver);
  auto reply = coordinator_->Heartbeat(beat, Now());
  if (!reply.ok()) return;
  if (reply->member) {
    SawTerm(&receiver->heard, reply->term);
    return;
  }
  if (reply->rejoin) {
    auto joined = coordinator_->Join(Request(Info(*receiver, rank), State(*receiver)), Now());
    if (joined.ok() || joined.status().code() == Code::kUnavailable) return;
  }
  receiver->core.Banish();
  StartReceiver(rank);  // its framework starts it again, empty
}

// Everybody who runs beats; everybody else has been silent for too long.
void Model::PassTime() {
  now_ms_ += kHeartbeatMs * (CoordinatorCore::kSilentHeartbeats + 1);
  if (!coordinator_) return;
  for (int round = 0; round < 2; ++round) {
    for (uint32_t rank = 0; rank < trainers_.size(); ++rank) {
      if (trainers_[rank].life == Life::kRunning) Beat(&trainers_[rank], rank);
    }
    for (uint32_t rank = 0; rank < receivers_.size(); ++rank) {
      if (receivers_[rank].life == Life::kRunning) Beat(&receivers_[rank], rank);
    }
  }
  coordinator_->Tick(Now());
}

// ---- trainers ---------------------------------------------------------------------------------

void Model::StepTrainer(uint32_t rank) {
  Trainer& trainer = trainers_[rank];
  Arena& arena = arenas_[trainer.incarnation];
  const VersionId id{trainer.term, trainer.next};
  auto publish_generation = [&](uint32_t slot) {
    arena.generation[slot] = trainer.core.slots()[slot].generation;
  };
  switch (trainer.at) {
    case TrainerAt::kJoin: {
      if (!coordinator_) return;
      auto reply = coordinator_->Join(Request(Info(trainer, rank), State(trainer)), Now());
      if (!reply.ok()) return;
      if (reply->term < highest_term_) {
        Violate(fmt::format("trainer {} joined term {} after term {} had been", rank, reply->term,
                            highest_term_));
      }
      SawTerm(&trainer.heard, reply->term);
      trainer.term = reply->term;
      trainer.at = TrainerAt::kComplete;
      return;
    }
    case TrainerAt::kComplete: {
      if (!coordinator_) return;
      auto reply = coordinator_->WaitComplete(trainer.incarnation, Now());
      if (!reply) return;
      if (reply->ok()) {
        trainer.at = TrainerAt::kBegin;
      } else if (reply->status().code() == Code::kStaleTerm) {
        StartTrainer(&trainer);
      }
      return;
    }
    case TrainerAt::kBegin: {
      if (trainer.next > trainer.last) {
        trainer.at = TrainerAt::kRest;
        return;
      }
      auto begin = trainer.core.BeginPublish(id, now_ms_, true);
      if (!begin.ok()) {
        Violate("a trainer could not begin: " + begin.status().ToString());
        return;
      }
      trainer.slot = begin->slot;
      if (begin->step == SourceCore::Step::kFill) {
        trainer.at = TrainerAt::kWrite;
      } else if (begin->step == SourceCore::Step::kRevoke) {
        publish_generation(begin->slot);
        if (coordinator_) (void)coordinator_->Revoked(trainer.incarnation, begin->revoked, Now());
        trainer.at = TrainerAt::kEndRevoke;
      }
      return;
    }
    case TrainerAt::kEndRevoke:
      trainer.core.EndRevoke(trainer.slot);
      trainer.at = TrainerAt::kBegin;
      return;
    case TrainerAt::kWrite:
      if (arena.generation[trainer.slot] % 2 == 0) Violate("a source wrote a slot that is HELD");
      arena.data[trainer.slot] = {id, true};
      trainer.at = TrainerAt::kFinish;
      return;
    case TrainerAt::kFinish: {
      arena.data[trainer.slot] = {id, false};
      trainer.core.Filled(trainer.slot);
      publish_generation(trainer.slot);
      filled_[id].insert(rank);
      HeldVersion held;
      held.id = id;
      held.replica_sums = {Sum{id.version, 1}};
      trainer.versions[id] = held;
      trainer.at = TrainerAt::kHeld;
      return;
    }
    case TrainerAt::kHeld: {
      if (!coordinator_) {  // the heartbeat reports it later
        ++trainer.next;
        trainer.at = TrainerAt::kBegin;
        return;
      }
      HeldRequest request;
      request.token = kToken;
      request.incarnation = trainer.incarnation;
      request.held = trainer.versions[id];
      auto reply = coordinator_->Held(request, Now());
      if (!reply.ok()) {
        if (reply.status().code() == Code::kStaleTerm) {
          StartTrainer(&trainer);
        } else {
          ++trainer.next;
          trainer.at = TrainerAt::kBegin;
        }
        return;
      }
      trainer.versions[id].told = reply->state;
      if (reply->state == VersionState::kAvailable && !options_.replicas &&
          filled_[id].size() < options_.trainers) {
        Violate("a version is AVAILABLE that not every source has filled");
      }
      ++trainer.next;
      trainer.at = TrainerAt::kBegin;
      return;
    }
    case TrainerAt::kRest: return;
  }
}

// ---- receivers --------------------------------------------------------------------------------

Model::Receiver* Model::Leader() {
  return receivers_[0].life == Life::kRunning ? &receivers_[0] : nullptr;
}

void Model::Poll(Receiver* receiver, uint32_t rank) {
  if (rank == 0) {
    if (!coordinator_ || receiver->core.banished()) return;
    if (options_.most_updates > 0 && receiver->key.decider == receiver->incarnation &&
        receiver->key.attempt >= options_.most_updates) {
      return;
    }
    receiver->decider->Serving(0, receiver->incarnation, receiver->core.serving());
    auto reply =
        coordinator_->Poll(receiver->incarnation, receiver->decider->CommonVersion(), false, Now());
    if (!reply.ok() || !reply->offered) return;  // as if it had not polled
    if (!options_.replicas && filled_[reply->id].size() < options_.trainers) {
      Violate("Poll offers a version that not every source has filled");
    }
    receiver->key = receiver->decider->OpenUpdate(reply->id, true);
    receiver->decider->RecordPoll({Status::Ok(), receiver->key, reply->epoch, false, 0});
    receiver->at = ReceiverAt::kStage;
    return;
  }
  Receiver* leader = Leader();
  if (leader == nullptr) return;
  if (leader->incarnation != receiver->leader) {
    receiver->at = ReceiverAt::kHello;
    return;
  }
  const auto poll = leader->decider->PollFrom(receiver->next_poll, false);
  if (!poll) return;
  receiver->next_poll = poll->number + 1;
  if (!poll->answer.key) return;
  receiver->key = *poll->answer.key;
  receiver->at = ReceiverAt::kStage;
}

void Model::CastVote(Receiver* receiver, uint32_t rank, bool ok) {
  Receiver* leader = Leader();
  if (leader == nullptr || leader->incarnation != receiver->key.decider) return;  // cannot be told
  leader->decider->Vote(receiver->key, rank, receiver->incarnation, ok, "failed");
}

void Model::FinishStage(Receiver* receiver, uint32_t rank, bool ok) {
  if (!receiver->core.EndStage(receiver->key, ok)) return;
  if (ok) {
    verified_[receiver->key].insert(rank);
    receiver->at = ReceiverAt::kVote;
  } else {
    CastVote(receiver, rank, false);
    receiver->at = ReceiverAt::kPoll;
  }
}

// Reads every source once more and checks: the landing of an in-place commit.
bool Model::Land(Receiver* receiver, Content* target) {
  for (const Opened& source : receiver->opened) {
    const Arena& arena = arenas_[source.incarnation];
    if (arena.generation[source.slot] != source.generation) return false;
    if (arena.data[source.slot] != Content{receiver->key.id, false}) {
      Violate("an unchanged, even generation covers other bytes");
      return false;
    }
  }
  *target = {receiver->key.id, false};
  return true;
}

void Model::StepReceiver(uint32_t rank, uint32_t choice) {
  Receiver& receiver = receivers_[rank];
  switch (receiver.at) {
    case ReceiverAt::kJoin: {
      if (!coordinator_) return;
      auto reply = coordinator_->Join(Request(Info(receiver, rank), State(receiver)), Now());
      if (!reply.ok()) return;
      SawTerm(&receiver.heard, reply->term);
      receiver.at = rank == 0 ? ReceiverAt::kPoll : ReceiverAt::kHello;
      return;
    }
    case ReceiverAt::kHello: {
      Receiver* leader = Leader();
      if (leader == nullptr || leader->at == ReceiverAt::kJoin) return;
      auto position = leader->decider->Hello(rank, receiver.incarnation, receiver.core.serving());
      receiver.leader = leader->incarnation;
      receiver.next_poll = position;
      receiver.at = ReceiverAt::kPoll;
      return;
    }
    case ReceiverAt::kPoll: Poll(&receiver, rank); return;
    case ReceiverAt::kStage: {
      bool landed = false;
      Status status = receiver.core.BeginStage(receiver.key, &landed);
      if (!status.ok()) {
        if (status.code() == Code::kBusy) Violate("a finished update left the rank busy");
        receiver.at = ReceiverAt::kPoll;
        return;
      }
      receiver.lives.clear();
      for (uint32_t other = 0; other < receivers_.size(); ++other) {
        receiver.lives[other] = receivers_[other].incarnation;
      }
      receiver.lives[0] = receiver.key.decider;
      receiver.opened.clear();
      receiver.source = 0;
      if (landed) verified_[receiver.key].insert(rank);
      receiver.at = landed ? ReceiverAt::kVote : ReceiverAt::kOpen;
      return;
    }
    case ReceiverAt::kOpen: {
      const Trainer& trainer = trainers_[receiver.source];
      auto slot =
          trainer.life == Life::kRunning ? trainer.core.Find(receiver.key.id) : std::nullopt;
      if (!slot) {
        FinishStage(&receiver, rank, false);
        return;
      }
      receiver.opened.push_back(
          {trainer.incarnation, *slot, trainer.core.slots()[*slot].generation, {}});
      receiver.at = ReceiverAt::kRead;
      if (!options_.in_place) return;
      receiver.at = ReceiverAt::kOpen;
      if (++receiver.source == trainers_.size()) FinishStage(&receiver, rank, true);
      return;
    }
    case ReceiverAt::kRead: {
      Opened& opened = receiver.opened.back();
      opened.read = arenas_[opened.incarnation].data[opened.slot];
      receiver.at = ReceiverAt::kReadAgain;
      return;
    }
    case ReceiverAt::kReadAgain: {
      const Opened& opened = receiver.opened.back();
      const Arena& arena = arenas_[opened.incarnation];
      const bool unchanged = arena.generation[opened.slot] == opened.generation;
      const bool whole = opened.read == arena.data[opened.slot] && !opened.read.torn &&
                         opened.read.id == receiver.key.id;
      if (unchanged && !whole) Violate("an unchanged, even generation covers other bytes");
      if (!unchanged || !whole) {
        FinishStage(&receiver, rank, false);
        return;
      }
      receiver.at = ReceiverAt::kOpen;
      if (++receiver.source < trainers_.size()) return;
      receiver.shadow = {receiver.key.id, false};
      FinishStage(&receiver, rank, true);
      return;
    }
    case ReceiverAt::kVote:
      CastVote(&receiver, rank, true);
      receiver.at = ReceiverAt::kDecide;
      return;
    case ReceiverAt::kDecide: Decide(&receiver, rank, choice); return;
    case ReceiverAt::kDoubt: AskInDoubt(&receiver, rank, choice); return;
    case ReceiverAt::kSwitch:
    case ReceiverAt::kFinishSwitch: SwitchStep(&receiver, rank); return;
    case ReceiverAt::kAnnounce: {
      Receiver* leader = Leader();
      if (leader != nullptr && leader->incarnation == receiver.leader) {
        leader->decider->Serving(rank, receiver.incarnation, receiver.core.serving());
      }
      receiver.at = ReceiverAt::kPoll;
      return;
    }
  }
}

void Model::SwitchStep(Receiver* receiver, uint32_t rank) {
  (void)rank;
  if (receiver->at == ReceiverAt::kSwitch) {
    Status status = receiver->core.BeginCommit(receiver->key, &receiver->nothing);
    if (!status.ok()) {
      receiver->at = ReceiverAt::kPoll;
      return;
    }
    if (!receiver->nothing) receiver->live = {receiver->key.id, true};
    receiver->at = ReceiverAt::kFinishSwitch;
    return;
  }
  bool ok = true;
  if (!receiver->nothing) {
    if (options_.in_place) {
      ok = Land(receiver, &receiver->live);
    } else {
      receiver->live = receiver->shadow;
    }
  }
  receiver->core.EndCommit(receiver->key, ok);
  if (!ok && receiver->core.state() != ReceiverState::kPoisoned) {
    Violate("a rank whose switch failed half way is not POISONED");
  }
  receiver->at = ReceiverAt::kAnnounce;
}

// The rank learns an outcome (or had); goes on accordingly.
void Model::Outcome_(Receiver* receiver, uint32_t rank, Outcome outcome, bool from_decider) {
  const bool learned = from_decider && rank != 0
                           ? receiver->core.LearnFromDecider(receiver->key, outcome)
                           : receiver->core.Learn(receiver->key, outcome);
  if (!learned) {
    if (from_decider) {
      receiver->core.EnterDoubt(receiver->key);
      receiver->termination.emplace(receiver->key, options_.receivers, rank,
                                    receiver->core.Refuses(receiver->key.decider));
      receiver->at = ReceiverAt::kDoubt;
    }
    return;
  }
  if (outcome == Outcome::kCommit && verified_[receiver->key].size() < options_.receivers) {
    Violate("commit was learned though not every rank had verified the version");
  }
  learned_[receiver->key].push_back({rank, receiver->incarnation, outcome});
  receiver->termination.reset();
  receiver->at = outcome == Outcome::kCommit ? ReceiverAt::kSwitch : ReceiverAt::kPoll;
}

// choice 0: ask, or try to decide; 1: the deadline came; 2: it came and the answer got lost.
void Model::Decide(Receiver* receiver, uint32_t rank, uint32_t choice) {
  const UpdateKey key = receiver->key;
  if (rank == 0) {
    if (receiver->core.banished()) return;
    Outcome outcome =
        choice == 0 ? receiver->decider->TryDecide(key) : receiver->decider->Abort(key, "deadline");
    if (outcome != Outcome::kUndecided) Outcome_(receiver, rank, outcome, true);
    return;
  }
  Receiver* leader = Leader();
  const bool reachable = leader != nullptr && leader->incarnation == key.decider;
  if (reachable && choice < 2) {
    Outcome outcome = choice == 0 ? leader->decider->OutcomeOf(key)
                                  : leader->decider->Abort(key, "a follower's deadline");
    if (outcome != Outcome::kUndecided) Outcome_(receiver, rank, outcome, true);
    return;
  }
  if (choice == 0) return;
  if (reachable) (void)leader->decider->Abort(key, "a follower's deadline");
  receiver->core.EnterDoubt(key);
  receiver->termination.emplace(key, options_.receivers, rank, receiver->core.Refuses(key.decider));
  receiver->at = ReceiverAt::kDoubt;
}

void Model::AskInDoubt(Receiver* receiver, uint32_t rank, uint32_t choice) {
  if (receiver->core.Refuses(receiver->key.decider)) receiver->termination->OnGone(0, true);
  auto questions = receiver->termination->Next();
  if (choice >= questions.size()) return;
  const Termination::Question question = questions[choice];
  const UpdateKey key = receiver->key;
  if (question.kind == Termination::Question::kAskGone) {
    if (!coordinator_) return;
    const uint64_t incarnation = receiver->lives[question.rank];
    auto gone = coordinator_->Gone(incarnation, Now());
    if (!gone.ok() || !*gone) return;
    receiver->termination->OnGone(question.rank, true);
    if (std::find(receiver->told_gone.begin(), receiver->told_gone.end(), incarnation) ==
        receiver->told_gone.end()) {
      receiver->told_gone.push_back(incarnation);
    }
    if (receiver->termination->decider_gone()) (void)receiver->core.AnswerOutcome(key, true);
  } else {
    Receiver& other = receivers_[question.rank];
    if (other.life != Life::kRunning) return;
    Outcome outcome = other.decider && other.incarnation == key.decider
                          ? other.decider->OutcomeOf(key)
                          : other.core.AnswerOutcome(key, question.decider_gone);
    receiver->termination->OnOutcome(question, outcome);
  }
  if (auto outcome = receiver->termination->outcome()) {
    Outcome_(receiver, rank, *outcome, receiver->termination->from_decider());
  }
}

// ---- steps ------------------------------------------------------------------------------------

uint32_t Model::Choices(const Receiver& receiver, uint32_t rank) const {
  if (receiver.at == ReceiverAt::kDecide) return rank == 0 ? 2 : 3;
  if (receiver.at == ReceiverAt::kDoubt) {
    return static_cast<uint32_t>(receiver.termination->Next().size());
  }
  return 1;
}

std::vector<Step> Model::Enabled() const {
  std::vector<Step> steps;
  bool somebody_away = coordinator_ && !coordinator_->settled();
  for (uint32_t i = 0; i < trainers_.size(); ++i) {
    if (trainers_[i].life == Life::kRunning) {
      if (trainers_[i].at != TrainerAt::kRest) steps.push_back({Step::kTrainer, i, 0});
    } else {
      somebody_away = true;
      steps.push_back({Step::kRestart, i, 0});
    }
  }
  const auto first_receiver = static_cast<uint32_t>(trainers_.size());
  for (uint32_t i = 0; i < receivers_.size(); ++i) {
    if (receivers_[i].life == Life::kRunning) {
      const uint32_t choices = Choices(receivers_[i], i);
      for (uint32_t choice = 0; choice < choices; ++choice) {
        steps.push_back({Step::kReceiver, i, choice});
      }
    } else {
      somebody_away = true;
      steps.push_back({Step::kRestart, first_receiver + i, 0});
    }
  }
  const auto coordinator = first_receiver + static_cast<uint32_t>(receivers_.size());
  if (!coordinator_) steps.push_back({Step::kRestart, coordinator, 0});
  // Incarnations that were replaced may still be taken for live ones.
  if (somebody_away || incarnations_ > trainers_.size() + receivers_.size()) {
    steps.push_back({Step::kTime, 0, 0});
  }
  if (faults_left_ > 0) {
    for (uint32_t i = 0; i < coordinator; ++i) {
      const bool running = i < first_receiver
                               ? trainers_[i].life == Life::kRunning
                               : receivers_[i - first_receiver].life == Life::kRunning;
      if (!running || (options_.only_leader_stops && i != first_receiver)) continue;
      if (options_.only_leader_stops) {
        steps.push_back({Step::kStop, i, 0});
        continue;
      }
      steps.push_back({Step::kKill, i, 0});
      if (options_.stops) steps.push_back({Step::kStop, i, 0});
    }
    if (coordinator_ && options_.coordinator_fails && !options_.only_leader_stops)
      steps.push_back({Step::kKill, coordinator, 0});
  }
  return steps;
}

void Model::Run(const Step& step) {
  const auto first_receiver = static_cast<uint32_t>(trainers_.size());
  auto life = [&]() -> Life* {
    if (step.actor < first_receiver) return &trainers_[step.actor].life;
    if (step.actor - first_receiver < receivers_.size()) {
      return &receivers_[step.actor - first_receiver].life;
    }
    return nullptr;
  };
  if (options_.clock_runs) ++now_ms_;
  switch (step.kind) {
    case Step::kTrainer: StepTrainer(step.actor); break;
    case Step::kReceiver: StepReceiver(step.actor, step.choice); break;
    case Step::kTime: PassTime(); break;
    case Step::kKill:
    case Step::kStop:
      --faults_left_;
      if (life() != nullptr) {
        *life() = step.kind == Step::kKill ? Life::kDead : Life::kStopped;
      } else {
        coordinator_.reset();
      }
      break;
    case Step::kRestart:
      if (life() == nullptr) {
        NewCoordinator();
      } else if (*life() == Life::kStopped) {
        *life() = Life::kRunning;
      } else if (step.actor < first_receiver) {
        StartTrainer(&trainers_[step.actor]);
      } else {
        StartReceiver(step.actor - first_receiver);
      }
      break;
  }
  Check();
}

// ---- invariants -------------------------------------------------------------------------------

void Model::Violate(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

void Model::Check() {
  // A rank that may generate holds its version whole.
  bool engine_servable = true;
  for (const Receiver& receiver : receivers_) {
    const bool servable = receiver.life == Life::kRunning && receiver.core.Servable().ok();
    if (servable && receiver.live != Content{receiver.core.serving(), false}) {
      Violate("a servable rank's live weights are not its version");
    }
    engine_servable =
        engine_servable && servable && receiver.core.serving() == receivers_[0].core.serving();
    if (receiver.core.state() == ReceiverState::kPoisoned && receiver.core.Servable().ok()) {
      Violate("a POISONED rank is servable");
    }
  }
  if (engine_servable) {
    for (const Receiver& receiver : receivers_) {
      if (receiver.live != receivers_[0].live) Violate("a servable engine mixes versions");
    }
  }
  // Incarnations that live and are members agree on every outcome.
  for (const auto& [key, all] : learned_) {
    const Learned* first = nullptr;
    for (const Learned& learned : all) {
      if (!Counts(learned)) continue;
      if (first != nullptr && first->outcome != learned.outcome && !Gone(*first) &&
          !Gone(learned)) {
        Violate(fmt::format("rank {} learned {} and rank {} learned {} of one update", first->rank,
                            static_cast<int>(first->outcome), learned.rank,
                            static_cast<int>(learned.outcome)));
      }
      first = &learned;
    }
  }
}

// Does a rank that learned an outcome still go by it?
bool Model::Counts(const Learned& learned) const {
  const Receiver& receiver = receivers_[learned.rank];
  return receiver.incarnation == learned.incarnation && !receiver.core.banished() &&
         receiver.life == Life::kRunning;
}

bool Model::Gone(const Learned& learned) const {
  if (!coordinator_) return false;
  auto gone = CoordinatorCore(*coordinator_).Gone(learned.incarnation, Now());
  return gone.ok() && *gone;
}

// ---- calm -------------------------------------------------------------------------------------

bool Model::Calm() {
  faults_left_ = 0;
  const auto everybody = static_cast<uint32_t>(trainers_.size() + receivers_.size());
  if (!coordinator_) Run({Step::kRestart, everybody, 0});
  for (uint32_t i = 0; i < everybody; ++i) {
    const Life life =
        i < trainers_.size() ? trainers_[i].life : receivers_[i - trainers_.size()].life;
    if (life != Life::kRunning) Run({Step::kRestart, i, 0});
  }
  // One more version from everybody, the same number.
  for (int round = 0; round < 400; ++round) {
    if (round % 8 == 0) Run({Step::kTime, 0, 0});
    uint64_t newest = 0;
    bool resting = true;
    for (const Trainer& trainer : trainers_) {
      newest = std::max(newest, trainer.next);
      resting = resting && trainer.at == TrainerAt::kRest;
    }
    if (round == 40 || (round > 40 && round % 60 == 0)) {
      for (Trainer& trainer : trainers_) {
        if (trainer.at == TrainerAt::kRest) trainer.at = TrainerAt::kBegin;
        trainer.next = newest;
        trainer.last = newest;
      }
    }
    for (uint32_t i = 0; i < trainers_.size(); ++i) Run({Step::kTrainer, i, 0});
    for (uint32_t i = 0; i < receivers_.size(); ++i) {
      const uint32_t choices =
          receivers_[i].at == ReceiverAt::kDoubt ? Choices(receivers_[i], i) : 1;
      for (uint32_t choice = 0; choice < choices && receivers_[i].at == ReceiverAt::kDoubt;
           ++choice) {
        Run({Step::kReceiver, i, choice});
      }
      // A decision that hangs ends by its deadline.
      const bool late = receivers_[i].at == ReceiverAt::kDecide && round % 16 == 15;
      Run({Step::kReceiver, i, late ? 1u : 0u});
    }
    if (!violation_.empty()) return false;
    const VersionId goal{trainers_[0].term, newest - 1};
    const bool served = std::all_of(receivers_.begin(), receivers_.end(), [&](const Receiver& r) {
      return r.core.Servable().ok() && r.core.serving() == goal;
    });
    if (round > 41 && resting && served) return true;
  }
  return false;
}

std::string Model::Name(const Step& step) {
  static const char* const kNames[] = {"trainer", "receiver", "time", "kill", "stop", "restart"};
  return fmt::format("{} {} {}", kNames[step.kind], step.actor, step.choice);
}

std::string Model::Describe() const {
  std::string text =
      fmt::format("coordinator {}\n", coordinator_ ? coordinator_->StatusJson(Now()) : "dead");
  for (const Trainer& t : trainers_) {
    text += fmt::format("trainer inc {} life {} at {} term {} next {} newest {}/{}\n",
                        t.incarnation, static_cast<int>(t.life), static_cast<int>(t.at), t.term,
                        t.next, t.core.newest().term, t.core.newest().version);
  }
  for (const Receiver& r : receivers_) {
    text += fmt::format("receiver inc {} life {} at {} state {} serving {}/{} key {}/{} by {}\n",
                        r.incarnation, static_cast<int>(r.life), static_cast<int>(r.at),
                        ReceiverStateName(r.core.state()), r.core.serving().term,
                        r.core.serving().version, r.key.id.term, r.key.id.version, r.key.decider);
    if (!r.termination) continue;
    for (const auto& question : r.termination->Next()) {
      text += fmt::format("  asks {} of rank {} ({})\n", static_cast<int>(question.kind),
                          question.rank, question.decider_gone ? "decider gone" : "");
    }
    if (receivers_[0].decider) {
      text += fmt::format("  rank 0 says {}\n",
                          static_cast<int>(receivers_[0].decider->OutcomeOf(r.key)));
    }
  }
  return text;
}

uint64_t Model::Fingerprint() const {
  uint64_t hash = coordinator_ ? coordinator_->Fingerprint() : 1;
  hash = Combine(hash, faults_left_);
  for (const Trainer& t : trainers_) {
    hash = Combine(hash, t.core.Fingerprint());
    hash = Combine(
        hash, t.incarnation * 64 + static_cast<uint64_t>(t.at) * 4 + static_cast<uint64_t>(t.life));
    hash = Combine(hash, t.term);
    hash = Combine(hash, t.next * 16 + t.slot);
    for (const auto& [id, version] : t.versions) {
      hash = Combine(hash, id.version * 8 + static_cast<uint64_t>(version.told));
    }
  }
  for (const Receiver& r : receivers_) {
    hash = Combine(hash, r.core.Fingerprint());
    if (r.decider) hash = Combine(hash, r.decider->Fingerprint());
    if (r.termination) hash = Combine(hash, r.termination->Fingerprint());
    hash = Combine(hash, r.incarnation * 128 + static_cast<uint64_t>(r.at) * 4 +
                             static_cast<uint64_t>(r.life));
    hash = Combine(hash, r.leader * 1024 + r.next_poll);
    hash = Combine(hash, r.key.attempt * 64 + r.key.decider);
    hash = Combine(hash, r.source * 4 + static_cast<uint64_t>(r.live.torn) * 2 +
                             static_cast<uint64_t>(r.shadow.torn));
    hash = Combine(hash, r.live.id.version * 1024 + r.shadow.id.version);
    for (const Opened& o : r.opened)
      hash = Combine(hash,
                     o.incarnation * 4096 + o.generation * 8 + o.read.id.version * 2 + o.read.torn);
  }
  for (const auto& [incarnation, arena] : arenas_) {
    for (size_t slot = 0; slot < arena.data.size(); ++slot) {
      hash = Combine(hash, incarnation * 4096 + arena.generation[slot] * 64 +
                               arena.data[slot].id.version * 2 +
                               static_cast<uint64_t>(arena.data[slot].torn));
    }
  }
  return hash;
}

}  // namespace bascule::testing
