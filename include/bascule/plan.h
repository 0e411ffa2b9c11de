// What moving weights from trainers to rollouts takes, told from their declared worlds alone:
// no ranks, memory or network. For tools such as "bascule plan".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/layout_json.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// A rank of a job that need not exist.
struct PlannedRank {
  std::string engine;  // of a rollout; empty for trainers
  uint32_t rank = 0;   // in the trainer world, or in the engine
  uint32_t node = 0;   // ranks with equal numbers can map each other's memory
  std::shared_ptr<const WorldTemplate> world;
  std::vector<uint32_t> coordinates;
};

// What one rank fetches from another.
struct PlannedLink {
  uint32_t source = 0;  // index in PlanPreview::ranks()
  uint64_t bytes = 0;   // in wire dtypes
  uint64_t chunks = 0;
  bool same_node = false;
};

// What one rank fetches in all.
struct PlannedPart {
  uint64_t bytes = 0;
  uint64_t pieces = 0;
  std::vector<PlannedLink> links;  // by source; none with 0 bytes
};

// Bytes per second. 0 = unknown or not on any path (no bound from it).
struct Rates {
  uint64_t node_memory = 0;      // what a node can copy in all (bytes copied, not read + written)
  uint64_t trainer_egress = 0;   // per trainer node
  uint64_t rollout_egress = 0;   // per rollout node
  uint64_t rollout_ingress = 0;  // per rollout node
};

// The lower bound of EWTT, with its terms in nanoseconds.
struct Bound {
  int64_t nanoseconds = 0;
  int64_t sole_source = 0;     // bytes that only one set of sources holds / that set's egress
  int64_t trainer_egress = 0;  // unique bytes / trainer egress
  int64_t all_egress = 0;      // all nodes' needs / (trainer + rollout egress)
  int64_t node_ingress = 0;    // worst node: unique bytes it needs from outside / its ingress
  int64_t memory = 0;          // worst node: publish + stage copies / its memory bandwidth
  [[nodiscard]] const char* binding_term() const;
};

// Memory of one rank for one version.
struct RankMemory {
  uint64_t weights = 0;  // its boxes in the world's dtypes: a shadow, but for buffers' padding
  uint64_t arena = 0;    // one arena of a trainer
};

// The plan of one membership. Immutable; thread-safe.
class PlanPreview {
 public:
  // `ranks` are sorted by (role, engine, rank), trainers first. Errors: what an engine needs and no
  // trainer holds, shapes and dtypes that do not fit.
  [[nodiscard]] static Result<std::shared_ptr<const PlanPreview>> Prepare(
      std::vector<PlannedRank> ranks);
  virtual ~PlanPreview() = default;

  [[nodiscard]] virtual const std::vector<PlannedRank>& ranks() const = 0;
  // What ranks check beside when they connect: is every source tensor wanted by each engine, or
  // listed as unused by it?
  [[nodiscard]] virtual Status CheckEngines() const = 0;
  // What a rank fetches; nothing for a trainer.
  [[nodiscard]] virtual PlannedPart PartOf(uint32_t index) const = 0;
  [[nodiscard]] virtual Bound ComputeBound(const Rates& rates) const = 0;
};

// Of the rank at these coordinates of a world.
[[nodiscard]] RankMemory MemoryOf(const WorldTemplate& world,
                                  const std::vector<uint32_t>& coordinates);

// The world of a layout: the one that it declares, with axes called axis0, axis1, ...; else the
// rank alone.
[[nodiscard]] Result<DeclaredWorld> DeclaredWorldOf(const Layout& layout);

}  // namespace bascule
#pragma GCC visibility pop
