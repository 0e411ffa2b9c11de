// The coordinator's rules: membership, terms and versions (design 3.5, docs/protocol.md).
//
// A pure state machine: no I/O, no threads, no clocks, no randomness but a seed. The caller gives
// the time with each request; CoordinatorService (service.h) is the thread-safe runtime. Copies are
// independent and cheap enough for a model checker (large parts are shared, immutable).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/directory.h"

namespace bascule {

// What the core must know of layouts. Answers depend on the arguments only.
class CoverageOracle {
 public:
  virtual ~CoverageOracle() = default;
  // OK when the member's template is known and its coordinates fit; kNotFound: store its blob.
  [[nodiscard]] virtual Status Check(const MemberInfo& member) const = 0;
  // Do `holders` together hold every region that some member of `world` holds?
  [[nodiscard]] virtual bool Covers(std::span<const MemberInfo* const> holders,
                                    std::span<const MemberInfo* const> world) const = 0;
  // Equal for members that have the same tensor names and, of each tensor, the same boxes.
  [[nodiscard]] virtual uint64_t ReplicaGroup(const MemberInfo& member) const = 0;
  // The tensor, or the range of tensors, of a replica bucket (HeldRequest); `tensor` is set where
  // it is one.
  [[nodiscard]] virtual std::string BucketName(const MemberInfo& member, size_t bucket,
                                               size_t buckets, std::string* tensor) const = 0;
  // One member for each rank of the template that `member` is of (itself, where nothing more is
  // declared). For ranks that a restarted coordinator never saw.
  [[nodiscard]] virtual std::vector<MemberInfo> World(const MemberInfo& member) const {
    return {member};
  }
};

// For simulators: no templates, no geometry.
class TrivialOracle final : public CoverageOracle {
 public:
  // replicas: every member holds the whole model. Else each rank holds a part that nobody else has.
  explicit TrivialOracle(bool replicas) : replicas_(replicas) {}
  [[nodiscard]] Status Check(const MemberInfo&) const override { return Status::Ok(); }
  [[nodiscard]] bool Covers(std::span<const MemberInfo* const> holders,
                            std::span<const MemberInfo* const> world) const override;
  [[nodiscard]] uint64_t ReplicaGroup(const MemberInfo& member) const override {
    return replicas_ ? 1 : member.rank + 2;
  }
  [[nodiscard]] std::string BucketName(const MemberInfo&, size_t bucket, size_t,
                                       std::string*) const override {
    return "bucket " + std::to_string(bucket);
  }
  [[nodiscard]] std::vector<MemberInfo> World(const MemberInfo& member) const override;

 private:
  bool replicas_;
};

// The caller's clocks. The steady one never goes back; the wall clock may do anything.
struct CoordinatorTime {
  int64_t steady_ms = 0;
  int64_t wall_ns = 0;
};

struct CoordinatorLimits {
  size_t members = 1 << 17;
  size_t versions_a_term = 64;
  size_t old_terms = 16;
  size_t gone = 1 << 16;    // incarnations remembered as gone
  size_t memberships = 16;  // past ones kept for MembersFor
  uint64_t blob_bytes = 256u << 20;
  uint64_t all_blob_bytes = uint64_t{8} << 30;
  size_t blobs = 1 << 17;
};

struct CoordinatorOptions {
  std::string job;
  std::string token;
  uint64_t coordinator_id = 1;  // random, of this life
  int64_t heartbeat_ms = 500;
  uint64_t seed = 0;  // of the random bits in terms
  CoordinatorTime start;
  std::shared_ptr<const CoverageOracle> oracle;  // never null
  CoordinatorLimits limits;
  bool record_events = false;  // see TakeEvents
};

// Thread-compatible. Methods are those of Directory; a waiting one returns nullopt for "not yet:
// ask again when changes() moved".
class CoordinatorCore {
 public:
  explicit CoordinatorCore(CoordinatorOptions options);

  // A rank silent for this many heartbeats is gone; a coordinator this old trusts absence.
  static constexpr int64_t kSilentHeartbeats = 6;

  // kUnavailable: ask again (it started lately and ranks of a term may yet rejoin).
  [[nodiscard]] Result<JoinReply> Join(const JoinRequest& request, CoordinatorTime now);
  [[nodiscard]] Status Leave(uint64_t incarnation, CoordinatorTime now);
  [[nodiscard]] Result<HeartbeatReply> Heartbeat(const HeartbeatRequest& request,
                                                 CoordinatorTime now);
  [[nodiscard]] Result<JoinReply> Rebind(const MemberInfo& member, CoordinatorTime now);
  using SharedMembership = std::shared_ptr<const Membership>;
  [[nodiscard]] SharedMembership Members(CoordinatorTime now);
  [[nodiscard]] Result<SharedMembership> MembersFor(VersionId id, uint64_t epoch,
                                                    CoordinatorTime now);
  [[nodiscard]] std::optional<Result<SharedMembership>> WaitComplete(uint64_t incarnation,
                                                                     CoordinatorTime now);
  // The digest was checked by the caller.
  [[nodiscard]] Status PutBlob(const ContentDigest& digest,
                               std::shared_ptr<const std::string> bytes, CoordinatorTime now);
  [[nodiscard]] bool HasBlob(const ContentDigest& digest) const;
  [[nodiscard]] Result<std::shared_ptr<const std::string>> GetBlob(
      const ContentDigest& digest) const;
  [[nodiscard]] Result<VersionReply> Held(const HeldRequest& request, CoordinatorTime now);
  [[nodiscard]] Status Revoked(uint64_t incarnation, VersionId id, CoordinatorTime now);
  [[nodiscard]] std::optional<Result<VersionReply>> QueryVersion(uint64_t incarnation, VersionId id,
                                                                 bool wait, CoordinatorTime now);
  [[nodiscard]] Result<PollReply> Poll(uint64_t incarnation, VersionId newer_than, bool or_equal,
                                       CoordinatorTime now);
  [[nodiscard]] Status Serving(uint64_t incarnation, VersionId id, bool servable,
                               CoordinatorTime now);
  [[nodiscard]] Result<bool> Gone(uint64_t incarnation, CoordinatorTime now);

  // Declares silent ranks gone, aborts versions past their deadline, drops unused blobs. To be
  // called a few times a heartbeat.
  void Tick(CoordinatorTime now);

  // Moves with every change that an answer of a waiting call can depend on.
  [[nodiscard]] uint64_t changes() const { return changes_; }
  // Hash of the state; times count relative to the last request's.
  [[nodiscard]] uint64_t Fingerprint() const;
  // Members, term, epoch, versions and ages as JSON (docs/protocol.md). status_json.cc.
  [[nodiscard]] std::string StatusJson(CoordinatorTime now) const;

  [[nodiscard]] uint64_t term() const { return current_; }
  [[nodiscard]] uint64_t epoch() const { return epoch_; }
  // False: started lately; declares nothing yet. What ranks report of an earlier coordinator's life
  // and were not told the end of is judged even later: after kSilentHeartbeats, when everybody has
  // had the time to say what it was told.
  [[nodiscard]] bool settled() const { return settled_; }
  // Of whom a Join with kAlreadyExists speaks, and when it was last heard; 0: of nobody live.
  struct Rival {
    uint64_t incarnation = 0;
    int64_t last_seen_ms = 0;
  };
  [[nodiscard]] Rival RivalOf(const MemberInfo& member) const;
  // What happened since the last call, in words, for a log: ranks that came (with their build) and
  // went, terms that opened, versions that ended badly. Nothing unless options.record_events.
  [[nodiscard]] std::vector<std::string> TakeEvents();
  // What a call whose deadline passed was waiting for.
  [[nodiscard]] Status NotComplete() const;
  [[nodiscard]] Status NotEnded(VersionId id) const;
  // The blobs kept; the oracle may forget others.
  [[nodiscard]] std::vector<ContentDigest> StoredBlobs() const;

 private:
  using Info = std::shared_ptr<const MemberInfo>;

  struct MemberRecord {
    Info info;
    uint64_t term = 0;  // trainers
    int64_t last_seen_ms = 0;
    VersionId serving;
    bool servable = true;
    uint64_t newest_held = 0;  // version, in its term
    std::string build;
    MemberReport report;
  };
  struct Hold {
    Info info;  // the layout it was published under
    uint64_t sums_hash = 0;
    // Kept while OPEN, of the first holder of a group that has other ranks.
    std::shared_ptr<const std::vector<Sum>> sums;
    bool revoked = false;
    uint8_t missed = 0;  // consecutive heartbeats that did not list it
  };
  struct VersionRecord {
    VersionState state = VersionState::kOpen;
    std::string reason;
    uint64_t epoch = 0;
    int64_t publish_start_ns = 0;
    std::optional<int64_t> deadline_ms;           // steady
    bool covered = false;                         // AVAILABLE: live, non-revoking holders cover it
    std::string mismatch;                         // replicas that differ; aborts once settled
    std::map<uint64_t, Hold> holds;               // by incarnation
    std::map<uint64_t, uint64_t> first_of_group;  // replica group -> incarnation
    uint64_t judged_losses = 0;
    // Reported by ranks that rejoined: somebody who has not may have been told what became of it.
    bool inherited = false;
  };
  struct Seat {
    uint64_t incarnation = 0;  // 0: nobody joined as this rank in this coordinator's life
    Info info;
    uint64_t group = 0;  // replica group of info
  };
  struct TermRecord {
    uint32_t world_size = 0;  // 0: nobody joined yet
    uint32_t filled = 0;      // seats with an incarnation
    bool adopted = false;     // opened in an earlier coordinator's life: takes only who rejoins
    bool complete = false;    // all ranks had joined, now or in an earlier life
    std::string over;         // why it is over
    std::vector<Seat> seats;
    std::map<uint64_t, VersionRecord> versions;
    uint64_t forgotten = 0;  // versions up to this one were dropped
  };
  struct GoneRecord {
    Role role = Role::kTrainer;
    std::string who;
    std::string why;
  };
  struct Blob {
    std::shared_ptr<const std::string> bytes;
    int64_t unused_since_ms = 0;
    uint64_t unused_since_epoch = 0;
    bool used = false;
  };
  using PastKey = std::pair<uint64_t, VersionId>;

  // core.cc: joining and membership.
  void Begin(CoordinatorTime now);
  [[nodiscard]] Status CheckHandshake(const JoinRequest& request) const;
  [[nodiscard]] Result<JoinReply> JoinTrainer(const JoinRequest& request);
  [[nodiscard]] Result<JoinReply> RejoinTrainer(const JoinRequest& request);
  [[nodiscard]] Result<JoinReply> JoinRollout(const JoinRequest& request);
  [[nodiscard]] Status AlreadyExists(const MemberInfo& member, const MemberRecord& older) const;
  [[nodiscard]] JoinReply ReplyTo(const MemberRecord& member) const;
  MemberRecord& Record(const JoinRequest& request, uint64_t term);
  void TakeSeat(uint64_t term, const Info& info);
  void Remove(uint64_t incarnation, const std::string& why);
  void RememberGone(uint64_t incarnation, GoneRecord record);
  void RemoveSilent();
  void BumpEpoch();
  void ReportEpoch(uint64_t told);
  void Settle();
  void SettleIfRejoined();
  [[nodiscard]] bool Silent(const MemberRecord& member) const;
  // Has everybody who lives had the time to rejoin?
  [[nodiscard]] bool GraceOver() const;
  // The member, or why it is none.
  [[nodiscard]] Result<MemberRecord*> Find(uint64_t incarnation);
  [[nodiscard]] Status StaleTerm(const MemberRecord& member) const;
  [[nodiscard]] bool IsStale(const MemberRecord& member) const;

  // core_terms.cc
  void ReportTerm(uint64_t highest, uint64_t joined);
  void OpenTerm(const std::string& why);
  void ForgetTerms();
  void CollectBlobs();
  // Of a term; under the layouts of version `number` where it is not 0.
  [[nodiscard]] Membership Snapshot(VersionId id) const;
  // Does `id` need a membership of its own (PollReply)?
  [[nodiscard]] bool HasOwnMembership(VersionId id) const;
  // Remembers the membership of now for MembersFor(id, epoch_).
  SharedMembership Keep(VersionId id);

  // core_versions.cc
  void Report(uint64_t incarnation, const MemberState& state);
  void ApplyTold(VersionRecord& version, VersionState told, const std::string& by);
  // The record, made where there is none; null where it is too old to be kept.
  VersionRecord* Ensure(VersionId id);
  [[nodiscard]] Status AddHold(const MemberRecord& member, const HeldVersion& held,
                               TermRecord& term, VersionRecord& version);
  [[nodiscard]] Status CompareReplicas(const Hold& hold, const Hold& other,
                                       const std::vector<Sum>& sums) const;
  void Judge(VersionId id);
  void JudgeAll();
  void JudgeVersion(VersionId id, const TermRecord& term, VersionRecord& version);
  void JudgeOpen(VersionId id, const TermRecord& term, VersionRecord& version);
  void End(VersionRecord& version, VersionState state, std::string reason);
  // A seat's part in a version: holds it, may yet, or is lost to it.
  enum class Part : uint8_t { kHolds, kMayHold, kLost };
  [[nodiscard]] Part PartOfSeat(const Seat& seat, VersionId id, const VersionRecord& version) const;
  // Do the live holders (with `may_hold`: and those that may yet hold it) cover it?
  [[nodiscard]] bool Covered(VersionId id, const TermRecord& term, const VersionRecord& version,
                             bool may_hold) const;
  // "trainer 3 (silent for 3100 ms), trainer 5 (revoked)", of the seats with this part.
  [[nodiscard]] std::string Seats(Part part, VersionId id, const TermRecord& term,
                                  const VersionRecord& version) const;
  [[nodiscard]] VersionRecord* FindVersion(VersionId id);
  [[nodiscard]] VersionReply ReplyOf(const VersionRecord& version) const;

  void Event(std::string text);

  CoordinatorOptions options_;
  std::vector<std::string> events_;
  CoordinatorTime now_;
  bool settled_ = false;
  uint64_t changes_ = 0;
  uint64_t losses_ = 0;  // moves when a holder is lost
  uint64_t draws_ = 0;
  uint64_t collected_ = ~uint64_t{0};  // changes_ at the last look at the blobs
  uint64_t current_ = 0;               // term; 0: none
  uint64_t highest_term_ = 0;          // of all terms heard of
  uint64_t epoch_ = 0;
  std::map<uint64_t, MemberRecord> members_;  // by incarnation; live ones
  std::map<std::pair<std::string, uint32_t>, uint64_t> rollouts_;
  std::map<uint64_t, TermRecord> terms_;
  std::map<uint64_t, GoneRecord> gone_;
  std::deque<uint64_t> gone_order_;
  std::map<ContentDigest, Blob> blobs_;
  uint64_t blob_bytes_ = 0;
  std::map<PastKey, SharedMembership> past_;
  std::deque<PastKey> past_order_;
};

// "trainer 3" or "engine e0 rank 1".
[[nodiscard]] std::string NameOf(const MemberInfo& member);

}  // namespace bascule
