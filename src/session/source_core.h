// The source rank's state machine: which arena slot holds which version. Pure: no I/O, no clock
// (times are given), no threads. The runtime and the model checker drive the same code.
//
//   FREE -> FILLING(v) -> HELD(v) -> REVOKING -> FREE
//
// A slot's generation is even exactly while HELD. A reader notes it before it reads and compares
// after: equal and even means that nothing was written in between. Leases never decide safety;
// they only let a publisher spare a reader that is making progress.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "bascule/session.h"
#include "bascule/status.h"

namespace bascule {

enum class SlotState : uint8_t { kFree, kFilling, kHeld, kRevoking };

inline constexpr int64_t kLeaseProgressMs = 1000;

class SourceCore {
 public:
  struct Slot {
    SlotState state = SlotState::kFree;
    VersionId id;
    uint64_t generation = 1;
  };

  explicit SourceCore(uint32_t slots) : slots_(slots) {}

  // What Publish must do next.
  enum class Step : uint8_t {
    kFill,    // write the version into `slot`; it is FILLING now
    kRevoke,  // `slot` is REVOKING now: tell the directory, drain, EndRevoke, ask again
    kWait,    // a live lease progresses on the oldest version; ask again
    kBusy,    // another publish is filling, or a revocation has not ended
  };
  struct Begin {
    Step step = Step::kBusy;
    uint32_t slot = 0;
    VersionId revoked;
  };
  // `insist`: revoke the oldest version whatever its leases.
  // kInvalidArgument: the version does not increase within its term.
  [[nodiscard]] Result<Begin> BeginPublish(VersionId id, int64_t now_ms, bool insist);
  void Filled(uint32_t slot);
  void FillFailed(uint32_t slot);
  // False when the version is not HELD here.
  [[nodiscard]] bool BeginRevoke(VersionId id, uint32_t* slot);
  void EndRevoke(uint32_t slot);

  // A reader reads (or goes on reading) a version. False when it is not HELD.
  bool Lease(uint64_t reader, VersionId id, int64_t now_ms);
  void EndLease(uint64_t reader, VersionId id);
  void EndLeases(uint64_t reader);
  [[nodiscard]] bool Leased(VersionId id) const;
  [[nodiscard]] bool LeaseProgresses(VersionId id, int64_t now_ms) const;

  // The slot that holds the version.
  [[nodiscard]] std::optional<uint32_t> Find(VersionId id) const;
  [[nodiscard]] const std::vector<Slot>& slots() const { return slots_; }
  [[nodiscard]] VersionId newest() const { return newest_; }
  [[nodiscard]] uint64_t Fingerprint() const;

 private:
  std::vector<Slot> slots_;
  VersionId newest_;  // highest version whose publication began and did not fail
  std::map<std::pair<VersionId, uint64_t>, int64_t> leases_;  // (version, reader) -> last progress
};

}  // namespace bascule
