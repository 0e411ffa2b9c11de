// The engine's protocol: the rank's state machine, and the decider's (rank 0). Pure: events in,
// values out; no I/O, no clocks, no threads. The runtime (receiver.cc) and the model checker
// (tests/session) drive the same code.
//
// Rank:    IDLE(c) -> STAGING(v) -> VERIFIED(v) | READY(v) -> DECIDED(v) -> COMMITTING(v) ->
// IDLE(v)
//          VERIFIED/READY -> IN_DOUBT(v) -> DECIDED(v) | IDLE(c);  COMMITTING -> POISONED
// Decider: per update key: undecided -> commit | abort, recorded once, first write wins.
//
// Termination: while the decider's incarnation lives, only it knows the outcome, and ranks in doubt
// keep asking it (and may learn *commit* from a rank that learned it). Once the directory has
// declared that incarnation gone, which is final, ranks ask each other: whoever answers "not
// learned" from then on refuses the old decider's outcome, so when every other rank has answered so
// or is gone itself, abort is the outcome.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bascule/session.h"
#include "bascule/status.h"

namespace bascule {

// One attempt of one engine at one version.
struct UpdateKey {
  VersionId id;
  uint64_t decider = 0;  // incarnation of rank 0 that opened it
  uint64_t attempt = 0;  // counted by that incarnation
  friend bool operator==(const UpdateKey&, const UpdateKey&) = default;
  friend auto operator<=>(const UpdateKey&, const UpdateKey&) = default;
};

enum class Outcome : uint8_t {
  kUndecided,  // the decider: neither recorded
  kCommit,
  kAbort,
  kNotLearned,  // another rank: has not learned it (and, when asked so, never will from the
                // decider)
};

// ---------------------------------------------------------------------------------------------

// One rank's own machine.
class RankCore {
 public:
  explicit RankCore(bool in_place) : in_place_(in_place) {}

  [[nodiscard]] ReceiverState state() const { return state_; }
  [[nodiscard]] VersionId serving() const { return serving_; }
  [[nodiscard]] const UpdateKey& key() const { return key_; }
  // May generate: serves a version whole and no outcome is pending.
  [[nodiscard]] Status Servable() const;

  // IDLE or POISONED -> STAGING. `landed` true: the rank serves this version, it is VERIFIED at
  // once. A POISONED rank stages too. kBusy: an update is undecided or committing.
  [[nodiscard]] Status BeginStage(const UpdateKey& key, bool* landed);
  // STAGING -> VERIFIED / READY, or back on failure. False: this staging was given up meanwhile.
  bool EndStage(const UpdateKey& key, bool ok);
  // Gives up an update that this rank has not voted for (STAGING -> IDLE). False otherwise.
  bool GiveUp(const UpdateKey& key);

  // The outcome as told by the decider. Refused (state unchanged, false) once pledged.
  bool LearnFromDecider(const UpdateKey& key, Outcome outcome);
  // The outcome as concluded by termination, or told by a rank that learned it.
  bool Learn(const UpdateKey& key, Outcome outcome);
  // The call's deadline came before the outcome: VERIFIED/READY -> IN_DOUBT.
  bool EnterDoubt(const UpdateKey& key);
  // Another rank asks. `decider_gone`: the directory declared the decider's incarnation gone; a
  // "not learned" answer then is a pledge.
  [[nodiscard]] Outcome AnswerOutcome(const UpdateKey& key, bool decider_gone);
  // This rank has pledged to refuse whatever that decider's incarnation says.
  [[nodiscard]] bool Refuses(uint64_t decider) const;

  // DECIDED -> COMMITTING. `nothing_to_do`: the rank serves the version already.
  [[nodiscard]] Status BeginCommit(const UpdateKey& key, bool* nothing_to_do);
  // COMMITTING -> IDLE(v) or POISONED.
  void EndCommit(const UpdateKey& key, bool ok);
  // A background audit failed, or a hook: IDLE(v) -> POISONED.
  void Poison();
  // The rank's memory is described anew: kBusy unless IDLE or POISONED; no update is staged until
  // EndRebind. `rebound`: what the new memory holds is no version.
  [[nodiscard]] Status BeginRebind();
  void EndRebind(bool rebound);
  // This incarnation was declared gone by the directory: never servable again.
  void Banish() { banished_ = true; }
  [[nodiscard]] bool banished() const { return banished_; }

  [[nodiscard]] uint64_t Fingerprint() const;

 private:
  bool Undecided() const {
    return state_ == ReceiverState::kVerified || state_ == ReceiverState::kReady ||
           state_ == ReceiverState::kInDoubt;
  }
  ReceiverState Resting() const {
    return poisoned_ ? ReceiverState::kPoisoned : ReceiverState::kIdle;
  }

  bool in_place_;
  ReceiverState state_ = ReceiverState::kIdle;
  VersionId serving_;
  UpdateKey key_;
  bool poisoned_ = false;
  bool banished_ = false;
  bool rebinding_ = false;
  std::vector<uint64_t>
      refused_;  // incarnations of deciders that are gone; newest last, at most 16
  // Outcomes learned lately, for ranks that ask late. Newest last, at most 16.
  std::vector<std::pair<UpdateKey, Outcome>> learned_;
};

// ---------------------------------------------------------------------------------------------

// The engine's leader (rank 0): numbering of polls, votes and decisions.
class DeciderCore {
 public:
  DeciderCore(uint64_t incarnation, uint32_t world_size);

  struct PollAnswer {
    Status status;                 // an error is an answer too: one for all ranks
    std::optional<UpdateKey> key;  // null: nothing to update to
    uint64_t epoch = 0;
    bool own_membership = false;
    int64_t publish_start_ns = 0;
  };
  // Returns the number of the rank's next poll.
  uint64_t Hello(uint32_t rank, uint64_t incarnation, VersionId serving);
  // Has a rank introduced itself to this leader?
  [[nodiscard]] bool Knows(uint32_t rank) const { return ranks_.contains(rank); }
  [[nodiscard]] bool KnowsAll() const { return ranks_.size() >= world_size_; }
  // The lowest version that all ranks serve; none() when any is unknown. Poll asks for newer ones.
  [[nodiscard]] VersionId CommonVersion() const;
  // True when every rank is known and serves `id`.
  [[nodiscard]] bool AllServe(VersionId id) const;

  // The undecided attempt at `id`, or a new one. Undecided attempts at other versions are aborted.
  UpdateKey OpenUpdate(VersionId id, bool available);
  // The undecided attempt at `id`, or a new one.
  UpdateKey AttemptAt(VersionId id);
  void SetAvailable(VersionId id);
  [[nodiscard]] bool available(const UpdateKey& key) const;

  // Numbered answers: the leader's own call makes them, ranks fetch them. Runs of "nothing new" are
  // one record; the last 64 records are kept.
  uint64_t RecordPoll(PollAnswer answer);
  struct NumberedPoll {
    uint64_t number = 0;
    PollAnswer answer;
  };
  // Answer number `next`, or null where it is not made yet. Offers of updates that were given up
  // meanwhile are passed over where there is a later answer, so that a rank which fell behind is in
  // step again. All but the last are, where it is further behind than ranks that step together can
  // be, and with `newest`, for a rank that lost count.
  [[nodiscard]] std::optional<NumberedPoll> PollFrom(uint64_t next, bool newest) const;
  // The same for Ready, numbered for each update apart, from 0; null: not made yet, or (`lost` set)
  // of an update that is known no more. A rank that is further behind than ranks that step together
  // can be gets the newest answer; it still has as many calls to make.
  void RecordReady(const UpdateKey& key, bool answer);
  [[nodiscard]] std::optional<bool> ReadyAt(const UpdateKey& key, uint64_t index, bool* lost) const;

  // A rank staged the update, or failed to: then abort is recorded at once.
  void Vote(const UpdateKey& key, uint32_t rank, uint64_t incarnation, bool ok,
            const std::string& why);
  [[nodiscard]] bool AllVoted(const UpdateKey& key) const;
  // Why not all voted: names the ranks.
  [[nodiscard]] std::string Missing(const UpdateKey& key) const;
  // Records commit if all voted and the version is available. Returns what is recorded, or
  // kUndecided. Keys of another incarnation are kNotLearned.
  Outcome TryDecide(const UpdateKey& key);
  // Records abort if undecided. Returns what is recorded.
  Outcome Abort(const UpdateKey& key, std::string why);
  // The same on behalf of another rank, which cannot know who holds the update up: adds that.
  Outcome AbortAsked(const UpdateKey& key, const std::string& why);
  [[nodiscard]] Outcome OutcomeOf(const UpdateKey& key) const;
  [[nodiscard]] std::string WhyAborted(const UpdateKey& key) const;
  void Serving(uint32_t rank, uint64_t incarnation, VersionId id);

  [[nodiscard]] uint64_t incarnation() const { return incarnation_; }
  [[nodiscard]] uint64_t Fingerprint() const;

 private:
  struct Ballot {
    uint64_t incarnation = 0;
    bool ok = false;
  };
  // Answers by number; equal neighbours are one entry, at the number of the first.
  template <typename T>
  struct Numbered {
    uint64_t count = 0;
    std::map<uint64_t, T> runs;

    template <typename Same>
    void Add(T answer, Same same) {
      if (runs.empty() || !same(runs.rbegin()->second, answer)) {
        runs.emplace(count, std::move(answer));
        if (runs.size() > kRunsKept) runs.erase(runs.begin());
      }
      ++count;
    }
  };
  static constexpr size_t kRunsKept = 64;
  struct Decision {
    Numbered<bool> ready;
    std::map<uint32_t, Ballot> votes;
    Outcome outcome = Outcome::kUndecided;
    bool available = false;
    std::string why;
  };
  struct RankView {
    uint64_t incarnation = 0;
    VersionId serving;
  };
  void Trim();

  uint64_t incarnation_;
  uint32_t world_size_;
  uint64_t attempts_ = 0;
  std::map<UpdateKey, Decision> updates_;
  std::vector<uint64_t> committed_;  // attempts, ascending; never forgotten (8 bytes an update)
  std::map<uint32_t, RankView> ranks_;
  Numbered<PollAnswer> polls_;
};

// ---------------------------------------------------------------------------------------------

// How a rank that is not the decider learns the outcome of an update it has voted for. A driver
// asks what Next() says, feeds the answers, until outcome() is set or the deadline passes.
class Termination {
 public:
  // ranks: the engine's world size; self: the asking rank.
  // refuses: the rank has pledged to refuse the decider (RankCore::Refuses), which is gone then.
  Termination(const UpdateKey& key, uint32_t ranks, uint32_t self, bool refuses)
      : key_(key), self_(self), not_learned_(ranks, false), gone_(ranks, false) {
    gone_[0] = refuses;
  }

  struct Question {
    enum Kind : uint8_t { kAskDecider, kAskGone, kAskRank } kind = kAskDecider;
    uint32_t rank = 0;
    bool decider_gone = false;  // for kAskRank
  };
  // The questions of the next round; they may be asked in any order or at once.
  [[nodiscard]] std::vector<Question> Next() const;
  // The answer to a question of this round: a "not learned" counts only as the answer to one that
  // asked for the pledge.
  void OnOutcome(const Question& question, Outcome outcome);
  void OnGone(uint32_t rank, bool gone);
  [[nodiscard]] std::optional<Outcome> outcome() const { return outcome_; }
  // The outcome is the decider's word: the rank may have pledged meanwhile, so it must go through
  // RankCore::LearnFromDecider; refused, the termination goes on with OnGone(0, true).
  [[nodiscard]] bool from_decider() const { return from_decider_; }
  [[nodiscard]] bool decider_gone() const { return gone_[0]; }
  [[nodiscard]] const UpdateKey& key() const { return key_; }
  [[nodiscard]] uint64_t Fingerprint() const;

 private:
  void Conclude();
  UpdateKey key_;
  uint32_t self_;
  std::vector<bool> not_learned_;  // answered so after the decider was gone
  std::vector<bool> gone_;
  std::optional<Outcome> outcome_;
  bool from_decider_ = false;
};

}  // namespace bascule
