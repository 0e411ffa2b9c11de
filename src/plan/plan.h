// The planner: who fetches which chunk from whom. Pure: no I/O, no clocks, no devices, integers
// only, no order that depends on hashes or addresses. Every rank computes its own part by the same
// function of the same inputs; nobody is told a plan.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/plan.h"
#include "bascule/status.h"
#include "layout/world_template.h"

namespace bascule {

// Part of the handshake: ranks whose planners differ must not share a plan.
inline constexpr uint32_t kPlannerVersion = 1;

enum class Role : uint8_t { kTrainer = 0, kRollout = 1 };

// One rank as the planner sees it.
struct Member {
  Role role = Role::kTrainer;
  std::string engine;           // of a rollout; empty for trainers
  uint32_t rank = 0;            // in the trainer world, or in the engine
  uint32_t node = 0;            // ranks with equal numbers can map each other's memory
  uint32_t world_template = 0;  // index in World::templates
  std::vector<uint32_t> coordinates;
};

// One membership. Members are sorted by (role, engine, rank); a member's index is its id.
struct World {
  std::vector<Member> members;
  std::vector<std::shared_ptr<const WorldTemplate>> templates;
  std::vector<ContentDigest> template_digests;  // of templates[i]->Serialize()
  uint64_t chunk_bytes = 4 << 20;               // aimed at; chunks are between 1/4 and 2 of it
  uint64_t whole_bytes = 64 << 10;              // below this a region is never split among members
};

// One box of one tensor, from one source. Row-major in checkpoint coordinates inside its chunk.
struct Piece {
  uint32_t tensor = 0;  // index in Part::tensors
  uint32_t box = 0;     // index in Part::boxes
};

// The unit that is fetched, pipelined and checked: pieces[first_piece .. + piece_count).
struct Chunk {
  // Member id: a trainer, or a rollout of the receiver's node that fetches these elements from a
  // trainer itself, in the same wire dtype. Chunks from rollouts come last.
  uint32_t source = 0;
  uint32_t first_piece = 0;
  uint32_t piece_count = 0;
  uint64_t bytes = 0;  // in wire dtypes
  uint64_t elements = 0;
};

// A tensor as it appears in a part.
struct PartTensor {
  // As trainers store it: the target of an alias of theirs. Lives as long as the Planner.
  std::string_view name;
  uint32_t destination_class = 0;  // class in the receiver's own template
  uint32_t destination_name = 0;   // index in the receiver's template's names
  // Per World::templates index: index in its names, or ~0u. Rollouts' templates too.
  std::vector<uint32_t> source_names;
  DType published = DType::kF32;
  DType wire = DType::kF32;
  DType destination = DType::kF32;
};

// One rank's share of the plan: everything that it must fetch. Every needed element is in exactly
// one piece (two bindings of one box are one need with two landings).
struct Part {
  uint32_t member = 0;
  std::vector<PartTensor> tensors;
  std::vector<Box> boxes;
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;  // in the order in which to ask; sources rotated by rank
  uint64_t bytes = 0;         // in wire dtypes
};

// Content digest of a part, for golden tests: the same by any compiler.
[[nodiscard]] ContentDigest PartDigest(const Part& part);

// Bytes on one link of the plan.
struct LinkUse {
  uint32_t source = 0;  // member ids
  uint32_t target = 0;
  uint64_t bytes = 0;
  uint64_t chunks = 0;
  bool same_node = false;
};

struct Explanation {
  std::vector<LinkUse> links;           // sorted by (source, target); none with 0 bytes
  std::vector<uint64_t> fetched_bytes;  // per member
  std::vector<uint64_t> served_bytes;   // per member
  std::vector<uint64_t> from_outside;   // per member: fetched from other nodes
  uint64_t worst_source_bytes = 0;      // largest served_bytes of a trainer
};

// The prepared plan of one membership. Immutable after Prepare; const methods are thread-safe.
class Planner {
 public:
  // Joins classes, refines holders, balances loads. Errors: shapes that disagree between sides,
  // dtypes that cannot be cast, needed elements that no trainer holds (the tensor is named), more
  // than one dtype published for a tensor.
  [[nodiscard]] static Result<std::shared_ptr<const Planner>> Prepare(World world);
  virtual ~Planner() = default;

  [[nodiscard]] virtual const World& world() const = 0;
  // Digest of planner version, membership, templates, options and shares. Requests carry it.
  [[nodiscard]] virtual ContentDigest digest() const = 0;
  // What this rollout member fetches, from whom. Trainers have empty parts.
  [[nodiscard]] virtual Part PartOf(uint32_t member) const = 0;
  // Bytes and chunks by link and rank over all members (runs PartOf for each).
  [[nodiscard]] virtual Explanation Explain() const = 0;
  [[nodiscard]] virtual Bound ComputeBound(const Rates& rates) const = 0;
};

}  // namespace bascule
