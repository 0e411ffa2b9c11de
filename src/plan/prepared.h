// The state behind a Planner: everything that all parts of one membership have in common.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "bascule/status.h"
#include "plan/boxes.h"
#include "plan/holders.h"
#include "plan/joint.h"
#include "plan/placement.h"
#include "plan/plan.h"

namespace bascule::plan {

// Ranks that can map each other's memory.
struct Node {
  std::vector<uint32_t> rollouts;  // member ids, sorted
  std::vector<uint32_t> trainers;
};

// Where a region is fetched from: one holder, or several by their shares.
struct SourceChoice {
  bool on_node = false;     // mapped: read by each needer for itself
  uint32_t holder = kNone;  // member id, where there is only one
  uint32_t shares = kNone;  // index in Prepared::shares otherwise
};

struct Prepared {
  World world;
  Joint joint;
  std::vector<TemplateUsers> needers;               // per Joint::need_templates
  std::vector<std::vector<Placement>> need_places;  // per need template, per class of it
  std::vector<HolderCells> holder_cells;            // per Joint::source_tuples
  HolderSets sets;
  std::vector<Node> nodes;           // by node number
  std::vector<uint32_t> node_of;     // per member: index in `nodes`
  std::vector<uint32_t> slot_of;     // per rollout member: index in Joint::need_templates
  std::vector<uint32_t> ordinal_of;  // per rollout member: index in needers[slot].members()
  std::vector<Shares> shares;
  std::vector<uint32_t> shares_of_set;  // per set: outside of the holders' nodes; kNone for one
  std::map<std::pair<uint32_t, uint32_t>, SourceChoice> on_node;  // by (set, node)
  ContentDigest digest;

  // The boxes of a joint class that a rollout member needs; not refined.
  [[nodiscard]] const std::vector<Box>& NeedOf(uint32_t member, const JointClass& joined) const;
  // The type in which a member receives a joint class that its template stores.
  [[nodiscard]] DType WireOf(uint32_t member, const JointClass& joined) const;
  // The distinct wire types in which a node's members receive a joint class.
  [[nodiscard]] std::vector<DType> WiresOn(const Node& node, const JointClass& joined) const;
  // What the members of a node need of a joint class in one wire type; owners are member ids.
  [[nodiscard]] Cells NeedsOn(const Node& node, const JointClass& joined, DType wire) const;
  [[nodiscard]] SourceChoice ChoiceFor(uint32_t set, uint32_t node) const;
  [[nodiscard]] const HolderCells& HoldersOf(const JointClass& joined) const {
    return holder_cells[joined.source_tuple];
  }
};

[[nodiscard]] Result<Prepared> PrepareWorld(World world);

// Fills shares, shares_of_set and on_node.
void BalanceSources(Prepared* prepared);

// What one rollout member fetches.
[[nodiscard]] Part MakePart(const Prepared& prepared, uint32_t member);

[[nodiscard]] Explanation ExplainPlan(const Prepared& prepared);
[[nodiscard]] Bound BoundOf(const Prepared& prepared, const Rates& rates);

}  // namespace bascule::plan
