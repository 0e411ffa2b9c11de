#include "session/engine_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "digest/digest.h"

namespace bascule {
namespace {

constexpr size_t kRemembered = 16;
constexpr uint64_t kUpdatesKept = 64;
// Ranks that step together are never this many polls apart.
constexpr uint64_t kInStep = 8;

class Hasher {
 public:
  void Mix(uint64_t value) { hash_ = Mix64(hash_ ^ (value + 0x9E3779B97F4A7C15u)); }
  void Mix(const VersionId& id) {
    Mix(id.term);
    Mix(id.version);
  }
  void Mix(const UpdateKey& key) {
    Mix(key.id);
    Mix(key.decider);
    Mix(key.attempt);
  }
  [[nodiscard]] uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0x42617363756C65;
};

template <typename T>
void Remember(std::vector<T>* list, T item) {
  if (list->size() == kRemembered) list->erase(list->begin());
  list->push_back(std::move(item));
}

std::string Describe(VersionId id) {
  return fmt::format("version {} (term {})", id.version, id.term);
}

}  // namespace

const char* ReceiverStateName(ReceiverState state) {
  switch (state) {
    case ReceiverState::kIdle: return "IDLE";
    case ReceiverState::kStaging: return "STAGING";
    case ReceiverState::kReady: return "READY";
    case ReceiverState::kVerified: return "VERIFIED";
    case ReceiverState::kInDoubt: return "IN_DOUBT";
    case ReceiverState::kDecided: return "DECIDED";
    case ReceiverState::kCommitting: return "COMMITTING";
    case ReceiverState::kPoisoned: return "POISONED";
  }
  return "UNKNOWN";
}

// ---------------------------------------------------------------------------------------------

Status RankCore::Servable() const {
  if (banished_) {
    return Status(Code::kUnavailable,
                  "the coordinator declared this rank gone; connect a new receiver");
  }
  if (poisoned_) {
    return Status(Code::kPoisoned,
                  "a commit failed half way; stage and commit a version to heal this rank");
  }
  switch (state_) {
    case ReceiverState::kInDoubt:
      return Status(Code::kInDoubt, "the outcome of the update to " + Describe(key_.id) +
                                        " is not known yet; call Decide again");
    case ReceiverState::kDecided:
    case ReceiverState::kCommitting:
      return Status(Code::kBusy, "the switch to " + Describe(key_.id) + " is decided but not done");
    case ReceiverState::kIdle:
    case ReceiverState::kStaging:
    case ReceiverState::kReady:
    case ReceiverState::kVerified:
    case ReceiverState::kPoisoned: break;
  }
  if (serving_.none())
    return Status(Code::kUnavailable, "no version was committed on this rank yet");
  return Status::Ok();
}

Status RankCore::BeginStage(const UpdateKey& key, bool* landed) {
  if (banished_) return Servable();
  if (Refuses(key.decider)) {
    return Status(Code::kAborted,
                  "this update was opened by an engine rank 0 that is gone; poll again");
  }
  if (rebinding_) {
    return Status(Code::kBusy, "the rank's layout is being replaced; stage after UpdateLayout");
  }
  if (state_ == ReceiverState::kDecided || state_ == ReceiverState::kCommitting) {
    return Status(Code::kBusy,
                  fmt::format("{} is decided and not committed on this rank; commit it (Poll gives "
                              "the update back), then poll again",
                              Describe(key_.id)));
  }
  if (state_ != ReceiverState::kIdle && state_ != ReceiverState::kPoisoned) {
    return Status(Code::kBusy,
                  fmt::format("the rank is {} for {}; finish or abort that update first",
                              ReceiverStateName(state_), Describe(key_.id)));
  }
  key_ = key;
  *landed = !poisoned_ && serving_ == key.id;
  if (*landed) {
    state_ = in_place_ ? ReceiverState::kReady : ReceiverState::kVerified;
  } else {
    state_ = ReceiverState::kStaging;
  }
  return Status::Ok();
}

Status RankCore::BeginRebind() {
  if (rebinding_) return Status(Code::kBusy, "another UpdateLayout is running");
  if (state_ != ReceiverState::kIdle && state_ != ReceiverState::kPoisoned) {
    return Status(Code::kBusy, fmt::format("the rank is {} for {}; update the layout after it",
                                           ReceiverStateName(state_), Describe(key_.id)));
  }
  rebinding_ = true;
  return Status::Ok();
}

void RankCore::EndRebind(bool rebound) {
  rebinding_ = false;
  if (rebound) serving_ = {};
}

bool RankCore::EndStage(const UpdateKey& key, bool ok) {
  if (state_ != ReceiverState::kStaging || key_ != key) return false;
  if (ok) {
    state_ = in_place_ ? ReceiverState::kReady : ReceiverState::kVerified;
  } else {
    state_ = Resting();
  }
  return true;
}

bool RankCore::GiveUp(const UpdateKey& key) {
  if (state_ != ReceiverState::kStaging || key_ != key) return false;
  state_ = Resting();
  return true;
}

bool RankCore::Refuses(uint64_t decider) const {
  return std::find(refused_.begin(), refused_.end(), decider) != refused_.end();
}

bool RankCore::LearnFromDecider(const UpdateKey& key, Outcome outcome) {
  if (Refuses(key.decider)) return false;
  return Learn(key, outcome);
}

bool RankCore::Learn(const UpdateKey& key, Outcome outcome) {
  if (outcome != Outcome::kCommit && outcome != Outcome::kAbort) return false;
  if (!Undecided() || key_ != key) return false;
  Remember(&learned_, std::pair(key, outcome));
  state_ = outcome == Outcome::kCommit ? ReceiverState::kDecided : Resting();
  return true;
}

bool RankCore::EnterDoubt(const UpdateKey& key) {
  if (!Undecided() || key_ != key) return false;
  state_ = ReceiverState::kInDoubt;
  return true;
}

Outcome RankCore::AnswerOutcome(const UpdateKey& key, bool decider_gone) {
  for (const auto& [known, outcome] : learned_) {
    if (known == key) return outcome;
  }
  if (decider_gone && !Refuses(key.decider)) Remember(&refused_, key.decider);
  return Outcome::kNotLearned;
}

Status RankCore::BeginCommit(const UpdateKey& key, bool* nothing_to_do) {
  if (banished_) return Servable();
  if (state_ != ReceiverState::kDecided || key_ != key) {
    return Status(Code::kBusy,
                  fmt::format("cannot switch to {}: the rank is {} for {}", Describe(key.id),
                              ReceiverStateName(state_), Describe(key_.id)));
  }
  *nothing_to_do = !poisoned_ && serving_ == key.id;
  state_ = ReceiverState::kCommitting;
  return Status::Ok();
}

void RankCore::EndCommit(const UpdateKey& key, bool ok) {
  if (state_ != ReceiverState::kCommitting || key_ != key) return;
  poisoned_ = !ok;
  serving_ = ok ? key.id : VersionId{};
  state_ = Resting();
}

void RankCore::Poison() {
  if (state_ == ReceiverState::kCommitting) return;  // EndCommit will tell
  poisoned_ = true;
  serving_ = {};
  if (state_ == ReceiverState::kIdle) state_ = ReceiverState::kPoisoned;
}

uint64_t RankCore::Fingerprint() const {
  Hasher hasher;
  hasher.Mix(static_cast<uint64_t>(state_));
  hasher.Mix(serving_);
  hasher.Mix(key_);
  hasher.Mix(static_cast<uint64_t>(poisoned_) * 2 + static_cast<uint64_t>(banished_));
  for (uint64_t decider : refused_) hasher.Mix(decider);
  for (const auto& [key, outcome] : learned_) {
    hasher.Mix(key);
    hasher.Mix(static_cast<uint64_t>(outcome));
  }
  return hasher.hash();
}

// ---------------------------------------------------------------------------------------------

DeciderCore::DeciderCore(uint64_t incarnation, uint32_t world_size)
    : incarnation_(incarnation), world_size_(world_size) {}

uint64_t DeciderCore::Hello(uint32_t rank, uint64_t incarnation, VersionId serving) {
  RankView& view = ranks_[rank];
  if (view.incarnation != incarnation) {
    // The votes of an earlier life of this rank count no more.
    for (auto& [key, update] : updates_) {
      if (update.outcome == Outcome::kUndecided) update.votes.erase(rank);
    }
  }
  view = {incarnation, serving};
  return polls_.count;
}

VersionId DeciderCore::CommonVersion() const {
  if (ranks_.size() < world_size_) return {};
  VersionId lowest = ranks_.begin()->second.serving;
  for (const auto& [rank, view] : ranks_) lowest = std::min(lowest, view.serving);
  return lowest;
}

bool DeciderCore::AllServe(VersionId id) const {
  if (ranks_.size() < world_size_) return false;
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [id](const auto& entry) { return entry.second.serving == id; });
}

UpdateKey DeciderCore::OpenUpdate(VersionId id, bool available) {
  // One update at a time: ranks that still hold to an earlier one must be able to learn its end.
  for (auto& [earlier, update] : updates_) {
    if (update.outcome != Outcome::kUndecided) continue;
    if (earlier.id == id) {
      update.available = update.available || available;
      return earlier;
    }
    (void)Abort(earlier, "a newer update was opened");
  }
  UpdateKey key{id, incarnation_, ++attempts_};
  updates_[key].available = available;
  Trim();
  return key;
}

UpdateKey DeciderCore::AttemptAt(VersionId id) {
  const UpdateKey* latest = nullptr;
  for (const auto& [key, update] : updates_) {
    if (key.id == id && update.outcome == Outcome::kUndecided) latest = &key;
  }
  if (latest != nullptr) return *latest;
  return OpenUpdate(id, false);
}

void DeciderCore::SetAvailable(VersionId id) {
  for (auto& [key, update] : updates_) {
    if (key.id == id) update.available = true;
  }
}

bool DeciderCore::available(const UpdateKey& key) const {
  auto it = updates_.find(key);
  return it != updates_.end() && it->second.available;
}

uint64_t DeciderCore::RecordPoll(PollAnswer answer) {
  polls_.Add(std::move(answer), [](const PollAnswer& a, const PollAnswer& b) {
    return a.status.ok() && b.status.ok() && !a.key && !b.key;
  });
  return polls_.count - 1;
}

std::optional<DeciderCore::NumberedPoll> DeciderCore::PollFrom(uint64_t next, bool newest) const {
  if (next >= polls_.count) return std::nullopt;
  if (newest || polls_.count - next > kInStep)
    return NumberedPoll{polls_.count - 1, polls_.runs.rbegin()->second};
  auto run = polls_.runs.upper_bound(next);
  if (run != polls_.runs.begin()) {
    --run;
  } else {
    next = run->first;  // what was before is kept no more
  }
  auto given_up = [this](const PollAnswer& answer) {
    return answer.key && OutcomeOf(*answer.key) == Outcome::kAbort;
  };
  for (auto later = std::next(run); later != polls_.runs.end() && given_up(run->second);
       run = later++) {
    next = later->first;
  }
  return NumberedPoll{next, run->second};
}

void DeciderCore::RecordReady(const UpdateKey& key, bool answer) {
  auto it = updates_.find(key);
  if (it != updates_.end()) it->second.ready.Add(answer, std::equal_to<bool>());
}

std::optional<bool> DeciderCore::ReadyAt(const UpdateKey& key, uint64_t index, bool* lost) const {
  auto it = updates_.find(key);
  *lost = it == updates_.end();
  if (*lost || index >= it->second.ready.count) return std::nullopt;
  const auto& [count, runs] = it->second.ready;
  auto after = runs.upper_bound(index);
  const bool behind = count - index > kInStep || after == runs.begin();
  return behind ? runs.rbegin()->second : std::prev(after)->second;
}

void DeciderCore::Vote(const UpdateKey& key, uint32_t rank, uint64_t incarnation, bool ok,
                       const std::string& why) {
  auto it = updates_.find(key);
  if (it == updates_.end() || it->second.outcome != Outcome::kUndecided) return;
  auto view = ranks_.find(rank);
  if (view != ranks_.end() && view->second.incarnation != incarnation) return;  // an earlier life
  it->second.votes[rank] = {incarnation, ok};
  if (!ok) (void)Abort(key, fmt::format("rank {} failed to stage: {}", rank, why));
}

bool DeciderCore::AllVoted(const UpdateKey& key) const {
  auto it = updates_.find(key);
  if (it == updates_.end() || it->second.votes.size() < world_size_) return false;
  return std::all_of(it->second.votes.begin(), it->second.votes.end(),
                     [](const auto& vote) { return vote.second.ok; });
}

std::string DeciderCore::Missing(const UpdateKey& key) const {
  auto it = updates_.find(key);
  if (it == updates_.end()) return "the update is not known to rank 0";
  std::string missing;
  for (uint32_t rank = 0; rank < world_size_; ++rank) {
    auto vote = it->second.votes.find(rank);
    if (vote != it->second.votes.end() && vote->second.ok) continue;
    missing += fmt::format("{}{}{}", missing.empty() ? "" : ", ", rank,
                           vote == it->second.votes.end() ? "" : " (failed)");
  }
  if (!missing.empty()) return "not staged on rank(s) " + missing;
  return it->second.available ? "" : "the version is not known to be available";
}

Outcome DeciderCore::TryDecide(const UpdateKey& key) {
  if (key.decider != incarnation_) return Outcome::kNotLearned;
  auto it = updates_.find(key);
  if (it == updates_.end()) return OutcomeOf(key);
  Decision& update = it->second;
  if (update.outcome != Outcome::kUndecided) return update.outcome;
  if (AllVoted(key) && update.available) {
    update.outcome = Outcome::kCommit;
    committed_.push_back(key.attempt);
    std::sort(committed_.begin(), committed_.end());
  }
  return update.outcome;
}

Outcome DeciderCore::Abort(const UpdateKey& key, std::string why) {
  if (key.decider != incarnation_) return Outcome::kNotLearned;
  auto it = updates_.find(key);
  if (it == updates_.end()) return OutcomeOf(key);
  if (it->second.outcome == Outcome::kUndecided) {
    it->second.outcome = Outcome::kAbort;
    it->second.why = std::move(why);
  }
  return it->second.outcome;
}

Outcome DeciderCore::AbortAsked(const UpdateKey& key, const std::string& why) {
  const std::string missing = Missing(key);
  return Abort(key, missing.empty() ? why : why + "; " + missing);
}

Outcome DeciderCore::OutcomeOf(const UpdateKey& key) const {
  if (key.decider != incarnation_) return Outcome::kNotLearned;
  auto it = updates_.find(key);
  if (it != updates_.end()) return it->second.outcome;
  // Trimmed long ago: what was not committed was given up.
  bool committed = std::binary_search(committed_.begin(), committed_.end(), key.attempt);
  return committed ? Outcome::kCommit : Outcome::kAbort;
}

std::string DeciderCore::WhyAborted(const UpdateKey& key) const {
  auto it = updates_.find(key);
  return it == updates_.end() ? "given up" : it->second.why;
}

void DeciderCore::Serving(uint32_t rank, uint64_t incarnation, VersionId id) {
  auto it = ranks_.find(rank);
  if (it != ranks_.end() && it->second.incarnation == incarnation) it->second.serving = id;
}

// Forgets all but the last 64 updates (their commits stay known).
void DeciderCore::Trim() {
  while (updates_.size() > kUpdatesKept) {
    auto oldest = std::min_element(
        updates_.begin(), updates_.end(),
        [](const auto& a, const auto& b) { return a.first.attempt < b.first.attempt; });
    updates_.erase(oldest);
  }
}

uint64_t DeciderCore::Fingerprint() const {
  Hasher hasher;
  hasher.Mix(incarnation_);
  hasher.Mix(polls_.count);
  for (const auto& [key, update] : updates_) {
    hasher.Mix(key);
    hasher.Mix(static_cast<uint64_t>(update.outcome) * 2 + static_cast<uint64_t>(update.available));
    for (const auto& [rank, vote] : update.votes) {
      hasher.Mix(rank);
      hasher.Mix(static_cast<uint64_t>(vote.ok));
      hasher.Mix(vote.incarnation);
    }
  }
  for (const auto& [rank, view] : ranks_) {
    hasher.Mix(rank);
    hasher.Mix(view.incarnation);
    hasher.Mix(view.serving);
  }
  return hasher.hash();
}

// ---------------------------------------------------------------------------------------------

std::vector<Termination::Question> Termination::Next() const {
  std::vector<Question> questions;
  if (outcome_) return questions;
  const bool decider_is_gone = gone_[0];
  if (!decider_is_gone) {
    questions.push_back({Question::kAskDecider, 0, false});
    questions.push_back({Question::kAskGone, 0, false});
  }
  for (uint32_t rank = 1; rank < gone_.size(); ++rank) {
    if (rank == self_ || gone_[rank] || not_learned_[rank]) continue;
    questions.push_back({Question::kAskRank, rank, decider_is_gone});
    if (decider_is_gone) questions.push_back({Question::kAskGone, rank, false});
  }
  return questions;
}

void Termination::OnOutcome(const Question& question, Outcome outcome) {
  if (outcome_) return;
  if (outcome == Outcome::kCommit || outcome == Outcome::kAbort) {
    // What the decider says after it was declared gone is refused.
    if (question.kind == Question::kAskDecider && gone_[0]) return;
    outcome_ = outcome;
    from_decider_ = question.kind == Question::kAskDecider;
    return;
  }
  if (outcome == Outcome::kNotLearned && question.decider_gone) not_learned_[question.rank] = true;
  Conclude();
}

void Termination::OnGone(uint32_t rank, bool gone) {
  if (!gone) return;
  if (outcome_) {
    if (rank != 0 || !from_decider_) return;
    // The decider's word was refused: it counts no more.
    outcome_.reset();
    from_decider_ = false;
  }
  gone_[rank] = true;
  Conclude();
}

void Termination::Conclude() {
  if (!gone_[0]) return;
  for (uint32_t rank = 1; rank < gone_.size(); ++rank) {
    if (rank != self_ && !gone_[rank] && !not_learned_[rank]) return;
  }
  outcome_ = Outcome::kAbort;
}

uint64_t Termination::Fingerprint() const {
  Hasher hasher;
  hasher.Mix(key_);
  hasher.Mix(self_);
  for (size_t rank = 0; rank < gone_.size(); ++rank) {
    hasher.Mix(static_cast<uint64_t>(gone_[rank]) * 2 + static_cast<uint64_t>(not_learned_[rank]));
  }
  hasher.Mix(outcome_ ? static_cast<uint64_t>(*outcome_) + 1 : 0);
  return hasher.hash();
}

}  // namespace bascule
