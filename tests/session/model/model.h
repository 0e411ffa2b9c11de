// A model of a whole job that drives the cores that ship: CoordinatorCore, SourceCore, RankCore,
// DeciderCore and Termination. Only the bytes and the procedures around the cores (which the
// runtime has as blocking code) are modelled: a step is what one process does between two points at
// which others may run, die or stop.
//
// Bytes: an arena slot, a shadow and a rank's live weights each hold one Content: a version, or
// torn. A digest check is "the content is the version that was asked for".
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core.h"
#include "session/engine_core.h"
#include "session/source_core.h"

namespace bascule::testing {

struct ModelOptions {
  uint32_t trainers = 2;
  uint32_t receivers = 2;
  uint32_t versions = 2;  // published in each term
  uint32_t slots = 2;
  uint32_t faults = 1;  // crashes or stops, in all
  bool stops = true;    // a fault may stop a process instead of killing it
  bool coordinator_fails = true;
  bool in_place = false;
  bool only_leader_stops = false;  // every fault stops the engine's rank 0
  bool clock_runs = true;          // each step takes a millisecond; false: equal states hash alike
  uint32_t most_updates = 0;       // that one life of rank 0 opens; 0: any number
  bool replicas = false;           // every trainer holds the whole model
};

struct Content {
  VersionId id;
  bool torn = false;
  friend bool operator==(const Content&, const Content&) = default;
};

struct Step {
  enum Kind : uint8_t {
    kTrainer,   // one step of trainer `actor`
    kReceiver,  // one step of receiver `actor`, with `choice`
    kTime,      // long enough for everybody silent to be declared gone
    kKill,      // actor: trainers, then receivers, then the coordinator
    kStop,
    kRestart,  // a killed one starts again; a stopped one goes on
  } kind = kTime;
  uint32_t actor = 0;
  uint32_t choice = 0;
};

class Model {
 public:
  Model(const ModelOptions& options, uint64_t seed);

  // Steps that may change something. Deterministic order.
  [[nodiscard]] std::vector<Step> Enabled() const;
  void Run(const Step& step);
  // What broke; empty when every invariant holds.
  [[nodiscard]] const std::string& violation() const { return violation_; }
  [[nodiscard]] uint64_t Fingerprint() const;
  // No more faults: restarts everybody, publishes once more and runs fairly. True when the engine
  // then serves the newest version on all ranks.
  [[nodiscard]] bool Calm();
  [[nodiscard]] std::string Describe() const;
  [[nodiscard]] static std::string Name(const Step& step);

 private:
  enum class Life : uint8_t { kRunning, kStopped, kDead };

  // A trainer's memory as others map it: it outlives the process.
  struct Arena {
    std::vector<Content> data;
    std::vector<uint64_t> generation;
  };
  enum class TrainerAt : uint8_t {
    kJoin,
    kComplete,
    kBegin,
    kEndRevoke,
    kWrite,
    kFinish,
    kHeld,
    kRest
  };
  struct Trainer {
    Life life = Life::kRunning;
    uint64_t incarnation = 0;
    uint64_t term = 0;
    uint64_t heard = 0;  // highest term
    SourceCore core{1};
    uint32_t slot = 0;
    uint64_t next = 1;  // version
    uint64_t last = 0;  // version to stop at
    std::map<VersionId, HeldVersion> versions;
    TrainerAt at = TrainerAt::kJoin;
  };
  enum class ReceiverAt : uint8_t {
    kJoin,
    kHello,
    kPoll,
    kStage,
    kOpen,
    kRead,
    kReadAgain,
    kVote,
    kDecide,
    kDoubt,
    kSwitch,
    kFinishSwitch,
    kAnnounce
  };
  struct Opened {
    uint64_t incarnation = 0;
    uint32_t slot = 0;
    uint64_t generation = 0;
    Content read;
    friend bool operator==(const Opened&, const Opened&) = default;
  };
  struct Receiver {
    Life life = Life::kRunning;
    uint64_t incarnation = 0;
    uint64_t heard = 0;
    RankCore core{false};
    std::optional<DeciderCore> decider;
    uint64_t leader = 0;
    uint64_t next_poll = 0;
    UpdateKey key;
    uint32_t source = 0;  // trainer being read
    std::vector<Opened> opened;
    Content shadow;
    Content live;
    bool nothing = false;
    std::optional<Termination> termination;
    std::map<uint32_t, uint64_t> lives;  // incarnations of the engine's ranks when it staged
    std::vector<uint64_t> told_gone;
    ReceiverAt at = ReceiverAt::kJoin;
  };

  [[nodiscard]] CoordinatorTime Now() const;
  void NewCoordinator();
  void StartTrainer(Trainer* trainer);
  void StartReceiver(uint32_t rank);
  [[nodiscard]] MemberInfo Info(const Trainer& trainer, uint32_t rank) const;
  [[nodiscard]] MemberInfo Info(const Receiver& receiver, uint32_t rank) const;
  [[nodiscard]] MemberState State(const Trainer& trainer) const;
  [[nodiscard]] MemberState State(const Receiver& receiver) const;
  [[nodiscard]] JoinRequest Request(const MemberInfo& info, MemberState state) const;

  void StepTrainer(uint32_t rank);
  void StepReceiver(uint32_t rank, uint32_t choice);
  void Beat(Trainer* trainer, uint32_t rank);
  void Beat(Receiver* receiver, uint32_t rank);
  void PassTime();
  void Poll(Receiver* receiver, uint32_t rank);
  void FinishStage(Receiver* receiver, uint32_t rank, bool ok);
  void CastVote(Receiver* receiver, uint32_t rank, bool ok);
  void Decide(Receiver* receiver, uint32_t rank, uint32_t choice);
  void AskInDoubt(Receiver* receiver, uint32_t rank, uint32_t choice);
  void Outcome_(Receiver* receiver, uint32_t rank, Outcome outcome, bool from_decider);
  void SwitchStep(Receiver* receiver, uint32_t rank);
  [[nodiscard]] bool Land(Receiver* receiver, Content* target);
  [[nodiscard]] Receiver* Leader();
  [[nodiscard]] uint32_t Choices(const Receiver& receiver, uint32_t rank) const;

  void Check();
  void Violate(const std::string& what);
  void SawTerm(uint64_t* heard, uint64_t term);

  ModelOptions options_;
  int64_t now_ms_ = 1'000'000;
  uint64_t incarnations_ = 0;
  uint32_t faults_left_;
  std::optional<CoordinatorCore> coordinator_;  // null: dead
  uint64_t coordinators_ = 0;
  std::vector<Trainer> trainers_;
  std::vector<Receiver> receivers_;
  std::map<uint64_t, Arena> arenas_;

  // What really happened, for the invariants; not part of any core.
  std::map<VersionId, std::set<uint32_t>> filled_;
  std::map<UpdateKey, std::set<uint32_t>> verified_;
  struct Learned {
    uint32_t rank;
    uint64_t incarnation;
    Outcome outcome;
  };
  [[nodiscard]] bool Counts(const Learned& learned) const;
  [[nodiscard]] bool Gone(const Learned& learned) const;
  std::map<UpdateKey, std::vector<Learned>> learned_;
  uint64_t highest_term_ = 0;
  std::string violation_;
};

}  // namespace bascule::testing
