// The Directory: what ranks ask of the coordinator. gRPC is one implementation (grpc_directory.h);
// MakeLocalDirectory (local_directory.h) calls a core in the same process. Other metadata services
// can implement it.
//
// All requests are idempotent by (incarnation, content): a caller that got no answer asks again.
// The coordinator is passive: it answers and never calls a rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bascule/deadline.h"
#include "bascule/session.h"
#include "bascule/status.h"
#include "digest/digest.h"
#include "layout/world_template.h"
#include "plan/plan.h"

namespace bascule {

inline constexpr uint32_t kProtocolMin = 1;
inline constexpr uint32_t kProtocolMax = 1;

enum class VersionState : uint8_t { kUnknown = 0, kOpen, kAvailable, kAborted, kRetired };

// Where a rank can be reached by one transport.
struct TransportAddress {
  std::string transport;  // "shm"
  std::string address;    // opaque
  friend bool operator==(const TransportAddress&, const TransportAddress&) = default;
};

struct MemberInfo {
  Role role = Role::kTrainer;
  std::string engine;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t incarnation = 0;    // random, never 0
  uint64_t layout_serial = 0;  // counts UpdateLayout of this incarnation
  std::string node;            // equal for ranks that should be able to map each other's memory
  ContentDigest world_template;
  std::vector<uint32_t> coordinates;
  std::vector<TransportAddress> addresses;
  std::string channel;  // "host:port" of its engine channel; rollouts only
  friend bool operator==(const MemberInfo&, const MemberInfo&) = default;
};

// What a member last was told and holds; lets a restarted coordinator rebuild its state.
struct HeldVersion {
  VersionId id;
  VersionState told = VersionState::kUnknown;  // last state of it that this rank was told
  uint64_t epoch = 0;                          // under which it was published
  uint64_t layout_serial = 0;
  std::vector<Sum> replica_sums;  // see HeldRequest
  int64_t publish_start_ns = 0;   // wall clock
  int64_t deadline_ns = 0;        // as HeldRequest's; only looked at in Join
};
// What a member last did, for status displays. Nothing is decided by it.
struct MemberReport {
  VersionId id;          // of its last publication (trainers) or commit (rollouts)
  uint64_t done = 0;     // how many there were in this life
  uint64_t bytes = 0;    // published, landed
  int64_t took_ns = 0;   // the snapshot; EWTT
  int64_t stall_ns = 0;  // of the last one
  std::string error;     // the last one in this life, at most 512 bytes
  int64_t error_wall_ns = 0;
};

struct MemberState {
  std::vector<HeldVersion> held;  // HELD and not revoking (trainers)
  VersionId serving;              // rollouts: committed version, or none
  bool servable = true;
  uint64_t highest_term = 0;  // highest term this process has seen
  // Trainers: the term that Join put this incarnation in and that it means to go on with. 0 asks
  // for a place in the current term (a first Join, or a reconnect after kStaleTerm).
  uint64_t joined_term = 0;
  bool term_complete = false;  // it knows that all ranks of joined_term had joined
  // Incarnations that it was told are gone and that it acted upon (the rule of IN_DOUBT), so that a
  // restarted coordinator does not take them back.
  std::vector<uint64_t> told_gone;
  std::vector<HeldVersion>
      told;  // versions not held any more whose ABORTED or AVAILABLE it was told
  MemberReport report;
};

struct JoinRequest {
  std::string job;
  std::string token;
  uint32_t protocol_min = kProtocolMin;
  uint32_t protocol_max = kProtocolMax;
  uint32_t planner_version = kPlannerVersion;
  std::string build;  // logged only
  MemberInfo member;
  MemberState state;
  uint64_t told_epoch = 0;
};
struct JoinReply {
  // Trainers: the term that the member is in. Rollouts: the current one (0: none opened yet).
  uint64_t term = 0;
  // Trainers: `term` is over. The member stays a holder of the old term's versions that it holds;
  // to publish it must connect anew.
  bool stale_term = false;
  uint64_t epoch = 0;
  int64_t wall_ns = 0;  // coordinator's clock
  int64_t heartbeat_ms = 0;
  uint64_t coordinator = 0;  // random id of this coordinator life
};

struct Membership {
  uint64_t epoch = 0;
  uint64_t term = 0;
  bool complete = false;            // all trainer ranks of the term have joined
  std::vector<MemberInfo> members;  // sorted by (role, engine, rank); only live ones
};

struct HeartbeatRequest {
  std::string token;
  uint64_t incarnation = 0;
  uint64_t layout_serial = 0;
  MemberState state;
  uint64_t told_epoch = 0;
};
struct HeartbeatReply {
  // False: this incarnation is not (or no longer) a member: declared gone, superseded, or the
  // coordinator is new. `rejoin` says whether it may join again as it is.
  bool member = false;
  bool rejoin = false;
  bool stale_term = false;     // trainers: see JoinReply; calls get kStaleTerm
  uint64_t term = 0;           // the current one
  bool term_complete = false;  // all trainer ranks of it have joined
  uint64_t epoch = 0;
  uint64_t coordinator = 0;
  int64_t wall_ns = 0;
  std::vector<std::pair<VersionId, VersionState>> versions;  // recent ones
};

// A source is HELD for a version. `replica_sums` are sums over the source's own boxes in at most
// kReplicaBuckets buckets of consecutive tensors (template name order): bucket i of n names is
// i * min(n, kReplicaBuckets) / n. Sources with equal (template, boxes) must report equal sums.
inline constexpr uint32_t kReplicaBuckets = 1024;
struct HeldRequest {
  std::string token;
  uint64_t incarnation = 0;
  HeldVersion held;
  int64_t deadline_ns = 0;  // wall clock of the coordinator: abort when not available by then
};

struct VersionReply {
  VersionState state = VersionState::kUnknown;
  std::string reason;  // why aborted or retired: names ranks and tensor
  int64_t publish_start_ns = 0;
  uint64_t epoch = 0;
};

struct PollReply {
  bool offered = false;
  VersionId id;
  uint64_t epoch = 0;  // membership to plan with: MembersFor(id, epoch)
  // False: MembersFor(id, epoch) is what Members() said at that epoch, so a cached one serves.
  // True: the version is of an older term, or some holder published it under a layout it has since
  // left.
  bool own_membership = false;
  int64_t publish_start_ns = 0;
};

class Directory {
 public:
  virtual ~Directory() = default;
  [[nodiscard]] virtual Result<JoinReply> Join(const JoinRequest& request, Deadline deadline) = 0;
  [[nodiscard]] virtual Status Leave(uint64_t incarnation, Deadline deadline) = 0;
  [[nodiscard]] virtual Result<HeartbeatReply> Heartbeat(const HeartbeatRequest& request,
                                                         Deadline deadline) = 0;
  // UpdateLayout: replaces template, coordinates and addresses; opens an epoch.
  [[nodiscard]] virtual Result<JoinReply> Rebind(const MemberInfo& member, Deadline deadline) = 0;
  // The live ranks: trainers of the current term, and rollouts.
  [[nodiscard]] virtual Result<Membership> Members(Deadline deadline) = 0;
  // The membership to plan `id` with: the live trainers of its term, each under the layout with
  // which it published `id`, and the rollouts. As of the epoch that Poll gave (kept for the last
  // few epochs, then kNotFound), so that all ranks of an engine get one answer; 0: now.
  [[nodiscard]] virtual Result<Membership> MembersFor(VersionId id, uint64_t epoch,
                                                      Deadline deadline) = 0;
  // Waits until all trainer ranks of the caller's term have joined.
  [[nodiscard]] virtual Result<Membership> WaitComplete(uint64_t incarnation,
                                                        Deadline deadline) = 0;
  [[nodiscard]] virtual Status PutBlob(const ContentDigest& digest, const std::string& bytes,
                                       Deadline deadline) = 0;
  [[nodiscard]] virtual Result<bool> HasBlob(const ContentDigest& digest, Deadline deadline) = 0;
  [[nodiscard]] virtual Result<std::string> GetBlob(const ContentDigest& digest,
                                                    Deadline deadline) = 0;
  // Reports HELD; the reply is the version's state after it.
  [[nodiscard]] virtual Result<VersionReply> Held(const HeldRequest& request,
                                                  Deadline deadline) = 0;
  // A source begins to revoke a version: it is a holder no more.
  [[nodiscard]] virtual Status Revoked(uint64_t incarnation, VersionId id, Deadline deadline) = 0;
  // The state now, or (wait) once it is no longer OPEN or unknown.
  [[nodiscard]] virtual Result<VersionReply> QueryVersion(uint64_t incarnation, VersionId id,
                                                          bool wait, Deadline deadline) = 0;
  // The newest AVAILABLE version newer than `newer_than` (or equal to it with `or_equal`) that
  // live, non-revoking holders cover.
  [[nodiscard]] virtual Result<PollReply> Poll(uint64_t incarnation, VersionId newer_than,
                                               bool or_equal, Deadline deadline) = 0;
  // Tells the coordinator what a rollout serves now (also in heartbeats).
  [[nodiscard]] virtual Status Serving(uint64_t incarnation, VersionId id, bool servable,
                                       Deadline deadline) = 0;
  // Is this incarnation gone for good (declared gone, superseded or left)?
  [[nodiscard]] virtual Result<bool> Gone(uint64_t incarnation, Deadline deadline) = 0;
  // What StatusJson says.
  [[nodiscard]] virtual Result<std::string> StatusJson(Deadline deadline) = 0;
  // Requests sent so far; heartbeats are not counted.
  [[nodiscard]] virtual uint64_t requests() const = 0;
  // Calls that wait, and all that come later, end at once with kClosed.
  virtual void Cancel() = 0;
};

}  // namespace bascule
