// What a receiver says to a source on a peer's control channel (docs/protocol.md, "peer calls").
// Plain values; Encode and Decode are inverse; Decode of anything else gives kInvalidArgument.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bascule/session.h"
#include "bascule/status.h"
#include "digest/digest.h"
#include "layout/world_template.h"
#include "session/programs.h"

namespace bascule {

enum class PeerMethod : uint8_t {
  kOpen = 1,
  kChecks = 2,
  kAudit = 3,
  kLease = 4,
  kDone = 5,
  kSums = 6,  // asked by who is no member, of trainers and rollouts alike
};

// Which sums an audit wants.
enum class AuditScope : uint8_t {
  kAllByLayer = 0,       // every tensor the receiver holds, summed per layer
  kRotationByLayer = 1,  // InRotation(tensor, version) only, per layer
  kAllByTensor = 2,      // drill-down; a tensor whose arena was damaged has no row
  kRotationByTensor = 3,
};

// kSums: a box of a tensor whose sum is wanted, in codes of `wire`.
struct WantedSum {
  std::string tensor;
  Box box;
  DType wire = DType::kF32;
};

struct PeerRequest {
  PeerMethod method = PeerMethod::kOpen;
  VersionId id;
  ContentDigest plan;  // of the engine's planner
  uint64_t epoch = 0;  // what it was planned with (PlanBasis)
  bool own_membership = false;
  std::string engine;
  uint32_t rank = 0;  // in the engine
  AuditScope scope = AuditScope::kAllByLayer;
  // kOpen: 1 + the layout serial whose places the receiver has; 0: none.
  uint64_t known_layout = 0;
  std::vector<uint32_t> live;     // kAudit: trainer ranks that are counted, ascending
  std::vector<WantedSum> wanted;  // kSums
};
[[nodiscard]] std::string Encode(const PeerRequest& request);
[[nodiscard]] Result<PeerRequest> DecodePeerRequest(std::string_view bytes);

// Where a version lies on its source.
struct OpenReply {
  uint64_t generation = 0;
  std::string header;                // region blob of the generation page
  uint64_t header_offset = 0;        // of this version's cell in it
  std::vector<std::string> regions;  // one arena, or with direct export one per buffer
  uint64_t data_offset = 0;          // of the arena in its region
  bool direct = false;
  uint64_t layout_serial = 0;
  // Direct export only: where each box lies (source_base counts regions), per tensor of the
  // source's template. Empty where the receiver has them.
  std::vector<std::vector<SourcePlace>> places;
  // The answer to kChecks where it is at hand; empty where it has to be asked for.
  std::vector<Sum> checks;
};
[[nodiscard]] std::string Encode(const OpenReply& reply);
[[nodiscard]] Result<OpenReply> DecodeOpenReply(std::string_view bytes);

// Sums by chunk (of the receiver's part, those of this source, ascending), by audit row, or by
// wanted box (with the elements of it that could be read).
struct SumsReply {
  VersionId id;                    // kSums: what was summed
  std::vector<std::string> names;  // kAudit: layers or tensors; else empty
  std::vector<Sum> sums;
};
[[nodiscard]] std::string Encode(const SumsReply& reply);
[[nodiscard]] Result<SumsReply> DecodeSumsReply(std::string_view bytes);

}  // namespace bascule
