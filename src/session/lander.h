// A rollout rank's data side: plans, connects, lands, checks, switches and audits. Knows nothing of
// decisions; receiver.cc calls it in the states that allow it. One call at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bascule/session.h"
#include "copy/cpu/executor.h"
#include "session/agent.h"
#include "session/audit.h"
#include "session/messages.h"
#include "session/programs.h"
#include "transport/transport.h"

namespace bascule {

// What is known of a version that was landed whole: enough to audit it without any trainer.
struct LandedVersion {
  VersionId id;
  AuditRows tensors;  // by name as the source has it: sums of what landed
  // As the trainers sum their own layouts, for the first version of a plan: by layer, or by tensor
  // where some have a landing function.
  AuditRows trainers;
  AuditRows transformed;  // what landing functions made, where it landed
  bool first = false;     // the first version under its plan: audited before COMMITTED
};

class Lander {
 public:
  struct Options {
    RolloutOptions rollout;
    bool in_place = false;
    std::string name;                           // "engine e0 rank 1"
    std::atomic<uint64_t>* requests = nullptr;  // counts those sent to sources
  };
  Lander(Options options, const Layout& layout, Transport* transport, Agent* agent);

  // Allocates the shadow where there is one; sums the padding.
  [[nodiscard]] Status Allocate();
  // Plans with the version's membership, connects to all sources of the part. Cheap when nothing
  // changed. Errors name what no source covers.
  [[nodiscard]] Status Prepare(const PlanBasis& basis, Deadline deadline);
  // Ranks of this engine as of the plan.
  [[nodiscard]] std::vector<MemberInfo> EngineMembers() const;

  // Opens the version at every source (takes leases), lands it (in the shadow, or live when in
  // place), and checks every chunk. `cancelled` is asked often.
  [[nodiscard]] Status Land(VersionId id, const std::function<bool()>& cancelled,
                            Deadline deadline);
  // In place: only opens the version at every source.
  [[nodiscard]] Status OpenSources(VersionId id, Deadline deadline);
  // Gives the leases back.
  void ReleaseSources(VersionId id);

  // Shadow -> live. Cannot fail but for memory faults.
  [[nodiscard]] Status Switch();
  // The live storages against what was committed, and for a plan's first version against what the
  // trainers' own layouts sum to. kDataLoss names the tensor. `cancelled` ends it with kAborted.
  [[nodiscard]] Status AuditLive(const std::function<bool()>& cancelled);
  // The trainers' rows of the rotation, against the live storages. Best effort: kRetired when the
  // trainers moved on.
  [[nodiscard]] Status AuditRotation(VersionId id, Deadline deadline);

  // Sums of boxes of the live storages.
  [[nodiscard]] std::vector<Sum> LiveSums(std::span<const WantedSum> wanted) const {
    return SumWanted(layout_, wanted, true);
  }

  [[nodiscard]] const LandedVersion& landed() const { return landed_; }
  // The live weights are now those that landed last: what AuditLive speaks of.
  void MarkLive() { live_ = landed_; }
  // The live weights are no version's.
  void MarkBroken() { live_ = {}; }
  // A version under this plan was audited whole: later ones are audited in rotation.
  void MarkProved() {
    if (plan_) plan_->proved = true;
  }
  [[nodiscard]] const Phases& phases() const { return phases_; }
  [[nodiscard]] uint64_t part_bytes() const { return plan_ ? plan_->part.bytes : 0; }
  [[nodiscard]] uint64_t shadow_bytes() const { return shadow_ ? shadow_->bytes() : 0; }
  [[nodiscard]] std::vector<LinkReport> Links() const;

 private:
  struct Source {
    uint32_t member = 0;
    std::shared_ptr<Peer> peer;
    uint32_t first_base = 0;
    std::vector<uint32_t> chunks;  // ascending
    uint64_t bytes = 0;
    OpenReply open;  // of the version being landed
    std::shared_ptr<ImportedRegion> header;
    std::vector<std::shared_ptr<ImportedRegion>> regions;
    // Every slot's memory stays mapped from version to version: mapping it anew costs a page fault
    // a page. By blob.
    std::map<std::string, std::shared_ptr<ImportedRegion>> mapped;
  };
  // Everything that versions under one membership share.
  struct LandingPlan {
    std::shared_ptr<const WorldView> view;
    PlanBasis basis;
    Part part;
    std::vector<Source> sources;
    LandingProgram landing;
    bool landing_built = false;
    uint32_t bases = 0;
    std::vector<uint64_t> built_for;     // layout serial of each source
    std::vector<uint32_t> slot_chunk;    // sum -> chunk
    std::vector<uint64_t> slot_key;      // sum -> tensor key
    std::vector<bool> slot_transformed;  // has a landing function: cannot be read back
    std::map<uint64_t, std::string> name_of_key;
    std::vector<std::string> resolved;  // layout tensor -> name at the source ("" = none)
    std::vector<DType> wire;            // layout tensor -> wire dtype
    bool proved = false;                // a version under this plan was audited whole
  };

  [[nodiscard]] Status BuildPlan(std::shared_ptr<const WorldView> view, Deadline deadline);
  [[nodiscard]] Status ConnectSource(const WorldView& view, Source* source, Deadline deadline);
  [[nodiscard]] Status BuildLandingProgram();
  void SplitSums();
  [[nodiscard]] Status OpenSource(Source* source, VersionId id, Deadline deadline);
  [[nodiscard]] bool Unchanged(const Source& source) const;
  [[nodiscard]] Status Ask(Source* source, const PeerRequest& request, std::string* answer,
                           Deadline deadline) const;
  [[nodiscard]] PeerRequest Request(PeerMethod method, VersionId id) const;
  [[nodiscard]] Status CheckChunks(VersionId id, const std::vector<Sum>& sums, Deadline deadline);
  [[nodiscard]] Status ReadBack(VersionId id, const LandingProgram& landing,
                                const std::vector<Sum>& sums, const std::vector<Memory>& targets,
                                const std::function<bool()>& cancelled);
  [[nodiscard]] Result<AuditRows> TrainerRows(VersionId id, AuditScope scope, Deadline deadline);
  [[nodiscard]] Result<AuditRows> LiveRows(AuditScope scope, uint64_t version,
                                           const std::function<bool()>& cancelled) const;
  // Every live row must have its equal; rows that only `expected` has are those of landing
  // functions, whose live results are compared apart.
  [[nodiscard]] Status CompareRows(const AuditRows& expected, const AuditRows& live,
                                   const char* what) const;
  // Takes rows out of `live` that do not hold all that landed of a tensor with a landing function;
  // `codes`: what landed of those tensors, summed before the function.
  void SplitTransformed(const AuditRows& landed, AuditRows* live, AuditRows* codes) const;
  [[nodiscard]] Result<AuditRows> TransformedRows(const std::vector<Memory>& targets,
                                                  const std::function<bool()>& cancelled) const;
  [[nodiscard]] std::vector<Memory> LiveTargets() const;
  [[nodiscard]] std::vector<Memory> ShadowTargets() const;
  [[nodiscard]] Status Loss(std::string message, const std::string& tensor,
                            const std::string& peer) const;

  Options options_;
  Layout layout_;
  Transport* transport_;
  Agent* agent_;
  std::shared_ptr<SharedRegion> shadow_;
  std::vector<uint64_t> shadow_offset_;  // per buffer
  CopyProgram commit_;
  std::vector<uint64_t> padding_sums_;  // per buffer, as Allocate found them
  bool transforms_ = false;             // some binding has a landing function
  std::unique_ptr<LandingPlan> plan_;
  std::map<uint64_t, std::shared_ptr<Peer>> peers_;  // by incarnation
  CpuExecutor executor_;
  LandedVersion landed_;
  LandedVersion live_;
  Phases phases_;
};

}  // namespace bascule
