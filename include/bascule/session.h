// Senders and receivers: what a trainer rank and a rollout rank hold.
//
// Every object here may be used from any thread; calls on one object that exclude each other
// return kBusy. Every call that waits takes a deadline and returns by it. Nothing throws, prints
// or installs a signal handler. After fork() the child's calls return kForked.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bascule/deadline.h"
#include "bascule/layout.h"
#include "bascule/log.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// JobOptions::coordinator: this process hosts the coordinator (at JobOptions::listen).
inline constexpr const char* kHostHere = "here";

// Identifies a published set of weights. Terms order lives of the trainer world; versions are
// strictly increasing within a term. {0, 0} means none.
struct VersionId {
  uint64_t term = 0;
  uint64_t version = 0;
  [[nodiscard]] bool none() const { return term == 0; }
  friend bool operator==(const VersionId&, const VersionId&) = default;
  friend auto operator<=>(const VersionId&, const VersionId&) = default;
};

// What names a job and its coordinator; equal on all ranks but for `coordinator`.
struct JobOptions {
  std::string name;         // of the job; ranks of another job are refused
  std::string coordinator;  // "host:port", or kHostHere
  std::string token;        // shared secret of the job; may be empty only on one host
  // For kHostHere and the engine channel: host:port, IPv6 in brackets, port 0: any. Beyond loopback
  // it needs a token.
  std::string listen = "127.0.0.1:0";
  std::chrono::milliseconds heartbeat{500};  // interval; a rank silent for 6 of them is gone
  std::string socket_directory;              // shm sockets: empty = abstract names
  // What happens: each publication and committed update (info), a coordinator that is away or back,
  // ranks declared gone, audits that failed (warning, error), and at a hosted coordinator who comes
  // and goes. Empty: quiet.
  LogSink log;
};

// Where published weights lie while peers read them.
enum class ArenaMode : uint8_t { kAuto, kDevice, kHost, kDirect };
// Where staged bytes live until commit.
enum class ShadowMode : uint8_t { kAuto, kDevice, kHost, kNone };

// Of one trainer rank.
struct TrainerOptions {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  ArenaMode arena = ArenaMode::kAuto;
  int threads = 1;             // copy threads of this rank
  uint32_t versions_held = 2;  // arenas kept; 1 or more
  bool digest = true;          // false only to measure its cost: nothing is proved then
};

// Of one rollout rank.
struct RolloutOptions {
  std::string engine;       // ranks of one engine switch together
  uint32_t rank = 0;        // in the engine
  uint32_t world_size = 1;  // of the engine
  ShadowMode shadow = ShadowMode::kAuto;
  int threads = 1;
  bool digest = true;
};

// Times of one update on one rank, in nanoseconds of the steady clock; 0 where it did not happen.
struct Phases {
  int64_t publish = 0;  // snapshot
  int64_t stage = 0;    // landing
  int64_t verify = 0;   // checks outside of the landing pass
  int64_t decide = 0;
  int64_t commit = 0;  // switch to it
  int64_t audit = 0;
  int64_t stall = 0;  // time in which this rank could neither train nor generate
};

// What one peer sent.
struct LinkReport {
  std::string peer;       // "trainer 3"
  std::string transport;  // "shm"
  std::string reason;     // why not a better one; empty when it is the best
  uint64_t bytes = 0;
};

// One publication or update on one rank.
struct Report {
  VersionId id;
  Phases phases;
  uint64_t bytes = 0;            // moved by this rank, wire dtypes
  int64_t publish_start_ns = 0;  // wall clock (CLOCK_REALTIME) of the earliest publish
  int64_t commit_end_ns = 0;     // wall clock of this rank's commit end
  int64_t ewtt_ns = 0;           // commit_end - publish_start; clocks of one host agree
  int64_t bound_ns = 0;          // 0 where rates are unknown
  std::vector<LinkReport> links;
  bool audited = false;           // the whole rank was audited against the trainers' layouts
  uint64_t peak_extra_bytes = 0;  // beyond the framework's own memory
  // Requests that this rank sent for the update so far: to the coordinator and to ranks of its
  // engine (heartbeats apart), and to sources.
  uint64_t control_messages = 0;
  uint64_t peer_messages = 0;
};

// What became of a version (docs/protocol.md).
enum class PublicationState : uint8_t { kOpen, kAvailable, kAborted, kRetired, kUnknown };

// A published version as its source sees it. Copyable handle; outlives nothing: calls after the
// sender closed return kClosed.
class Publication {
 public:
  virtual ~Publication() = default;
  [[nodiscard]] virtual VersionId id() const = 0;
  // Waits until the version is available (OK), or aborted or retired (an error that says why).
  [[nodiscard]] virtual Status Wait(Deadline deadline) = 0;
  [[nodiscard]] virtual Result<PublicationState> State(Deadline deadline) = 0;
  // Ends serving this version: REVOKING until readers have drained or the deadline passed. In
  // direct mode the weights may change only after this returned (whatever it returned).
  [[nodiscard]] virtual Status Release(Deadline deadline) = 0;
  [[nodiscard]] virtual Report report() const = 0;
};

// One trainer rank.
class WeightSender {
 public:
  // Joins the job and registers the layout (copied; its buffers must outlive the sender). Returns
  // once joined, not once all ranks have. LogicalTensor::dtype is the publish dtype.
  [[nodiscard]] static Result<std::unique_ptr<WeightSender>> Connect(const JobOptions& job,
                                                                     const TrainerOptions& options,
                                                                     const Layout& layout,
                                                                     Deadline deadline);
  virtual ~WeightSender() = default;

  // Makes `version` (> every earlier one of the term) available: snapshots the live weights into
  // the arena. The weights may change when it returns (not in direct mode: see
  // Publication::Release). Waits for all ranks of the term to have joined. kStaleTerm: the world
  // restarted; connect anew.
  [[nodiscard]] virtual Result<std::shared_ptr<Publication>> Publish(uint64_t version,
                                                                     Deadline deadline) = 0;
  // Replaces the layout (parameters rebound, experts moved). kBusy while publishing.
  [[nodiscard]] virtual Status UpdateLayout(const Layout& layout, Deadline deadline) = 0;
  [[nodiscard]] virtual uint64_t term() const = 0;
  // host:port of the coordinator, for the other ranks when it is hosted here.
  [[nodiscard]] virtual std::string coordinator() const = 0;
  // Leaves the job. Waits for no peer beyond the deadline. The destructor closes with 1 second.
  [[nodiscard]] virtual Status Close(Deadline deadline) = 0;
};

// Where a rollout rank is in an update (docs/protocol.md).
enum class ReceiverState : uint8_t {
  kIdle,
  kStaging,
  kReady,  // shadow none: planned and connected; stands for VERIFIED in the decision
  kVerified,
  kInDoubt,
  kDecided,
  kCommitting,
  kPoisoned,
};
// "IDLE" and so on. Never null.
[[nodiscard]] const char* ReceiverStateName(ReceiverState state);

// One update of one engine as a rank of it sees it. Steps may be called apart, by the framework's
// own RPC, on every rank with the same explicit version (WeightReceiver::Open).
class Update {
 public:
  virtual ~Update() = default;
  [[nodiscard]] virtual VersionId id() const = 0;
  // Starts to land the version away from the live weights, in the background; returns at once.
  // Landing fails by the deadline (the rank is then idle again and nothing changed).
  [[nodiscard]] virtual Status Stage(Deadline deadline) = 0;
  // Waits until this rank's staging ended; its outcome.
  [[nodiscard]] virtual Status WaitStaged(Deadline deadline) = 0;
  // True once every rank of the engine is VERIFIED or READY, for ranks that step together: the k-th
  // call of an update on each rank gives one answer, so that all may branch on it; a rank that is
  // early waits, by the deadline. Ranks that do not step together need not call it: Commit waits.
  [[nodiscard]] virtual Result<bool> Ready(Deadline deadline) = 0;
  // Rank 0 decides (all ranks verified, version available): records commit, or abort when the
  // deadline passes first. Other ranks learn the outcome. OK: commit was recorded. kNotDecided:
  // abort was recorded. kInDoubt: neither can be learned; not servable until it is.
  [[nodiscard]] virtual Status Decide(Deadline deadline) = 0;
  // Decide (unless decided), which waits for every rank to have staged, then switch this rank's
  // live weights to the version. The engine must be paused. OK: the rank serves the version.
  // kPoisoned: see WeightReceiver.
  [[nodiscard]] virtual Status Commit(Deadline deadline) = 0;
  // Gives the update up before it is decided.
  [[nodiscard]] virtual Status Abort(Deadline deadline) = 0;
  [[nodiscard]] virtual Report report() const = 0;
};

// One rollout rank.
class WeightReceiver {
 public:
  // Joins the job and registers the layout (copied; its buffers must outlive the receiver).
  [[nodiscard]] static Result<std::unique_ptr<WeightReceiver>> Connect(
      const JobOptions& job, const RolloutOptions& options, const Layout& layout,
      Deadline deadline);
  virtual ~WeightReceiver() = default;

  // The newest available version that some rank of the engine does not serve, or null. Rank 0 asks;
  // the k-th call on each rank gives one answer, so that ranks which step together may branch on
  // it. A rank that is early waits; one that fell behind passes over offers that were given up. An
  // update that was decided and not committed on this rank is given back first.
  [[nodiscard]] virtual Result<std::shared_ptr<Update>> Poll(Deadline deadline) = 0;
  // The update to an explicit version, where the framework's RPC tells all ranks.
  [[nodiscard]] virtual Result<std::shared_ptr<Update>> Open(VersionId id) = 0;

  [[nodiscard]] virtual ReceiverState state() const = 0;
  // What the live weights are; none() before the first commit and when poisoned.
  [[nodiscard]] virtual VersionId serving() const = 0;
  // OK when this rank may generate: it serves a version whole. Else says why not.
  [[nodiscard]] virtual Status Servable() const = 0;
  // OK when every rank of the engine serves one version (asks the engine's ranks).
  [[nodiscard]] virtual Status EngineServable(Deadline deadline) = 0;

  // Runs after each commit on the committing thread, before Commit returns (caches, derived
  // state). An error makes the rank POISONED.
  virtual void SetPostCommitHook(std::function<Status(VersionId)> hook) = 0;
  // Reads the live storages and compares with what was committed: kDataLoss names the tensor.
  [[nodiscard]] virtual Status Audit(Deadline deadline) = 0;
  // Replaces the layout on a live rank: opens an epoch, aborts this engine's undecided update.
  // kBusy in DECIDED and COMMITTING.
  [[nodiscard]] virtual Status UpdateLayout(const Layout& layout, Deadline deadline) = 0;
  [[nodiscard]] virtual Status Close(Deadline deadline) = 0;
};

// The coordinator alone ("bascule serve").
class CoordinatorServer {
 public:
  // job.listen: the address to bind. heartbeat as in JobOptions.
  [[nodiscard]] static Result<std::unique_ptr<CoordinatorServer>> Start(const JobOptions& job);
  virtual ~CoordinatorServer() = default;
  [[nodiscard]] virtual std::string address() const = 0;  // "host:port" as bound
  // Members, term and versions as JSON (docs/protocol.md), for status displays.
  [[nodiscard]] virtual std::string StatusJson() const = 0;
  virtual void Stop() = 0;
};

// The same asked of a coordinator anywhere, by a process that is no member. kUnavailable when
// nothing answers at `address` by the deadline, kPermissionDenied for another token.
[[nodiscard]] Result<std::string> CoordinatorStatusJson(const std::string& address,
                                                        const std::string& token,
                                                        Deadline deadline);

}  // namespace bascule
#pragma GCC visibility pop
