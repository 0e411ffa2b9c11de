#include <algorithm>
#include <map>

#include "plan/prepared.h"

namespace bascule::plan {
namespace {

// Nodes whose ranks need the same and that map no trainer: counted once, with a multiplicity.
struct NodeGroup {
  uint32_t node = 0;  // one of them
  uint64_t count = 0;
};

std::vector<NodeGroup> GroupNodes(const Prepared& prepared) {
  std::vector<NodeGroup> groups;
  std::map<std::vector<uint32_t>, size_t> known;
  for (uint32_t n = 0; n < prepared.nodes.size(); ++n) {
    const Node& node = prepared.nodes[n];
    if (node.rollouts.empty()) continue;
    std::vector<uint32_t> key;
    // Nodes with trainers differ in what they hold.
    if (!node.trainers.empty()) key = {n + 1};
    for (uint32_t member : node.rollouts) {
      const auto& coordinates = prepared.world.members[member].coordinates;
      key.push_back(prepared.slot_of[member]);
      key.insert(key.end(), coordinates.begin(), coordinates.end());
    }
    if (node.trainers.empty()) key.push_back(kNone);
    auto [at, added] = known.try_emplace(std::move(key), groups.size());
    if (added) groups.push_back({n, 0});
    ++groups[at->second].count;
  }
  return groups;
}

class Balancer {
 public:
  explicit Balancer(Prepared* prepared)
      : prepared_(*prepared),
        outside_load_(prepared->world.members.size(), 0),
        on_node_load_(prepared->world.members.size(), 0),
        outside_bytes_(prepared->sets.size(), 0) {}

  void Run() {
    FindChoices();
    if (outside_.empty() && on_node_.empty()) return;
    for (const NodeGroup& group : GroupNodes(prepared_)) AddNode(group);
    AddOutsideTotals();
    BalanceShares(&outside_, &outside_load_);
    BalanceShares(&on_node_, &on_node_load_);
    prepared_.shares = std::move(outside_);
    prepared_.shares.insert(prepared_.shares.end(), on_node_.begin(), on_node_.end());
  }

 private:
  // Sets of several holders get shares, and so does what a node with rollouts holds of a set.
  void FindChoices() {
    prepared_.shares_of_set.assign(prepared_.sets.size(), kNone);
    for (uint32_t set = 0; set < prepared_.sets.size(); ++set) {
      auto holders = prepared_.sets.MembersOf(set);
      if (holders.size() > 1) prepared_.shares_of_set[set] = NewShares(holders, &outside_);
    }
    for (uint32_t set = 0; set < prepared_.sets.size(); ++set) FindChoicesOnNodes(set);
    // Shares on nodes come after those of whole sets.
    for (auto& [key, choice] : prepared_.on_node) {
      if (choice.shares != kNone) choice.shares += static_cast<uint32_t>(outside_.size());
    }
  }

  void FindChoicesOnNodes(uint32_t set) {
    std::map<uint32_t, std::vector<uint32_t>> holders_on;
    for (uint32_t member : prepared_.sets.MembersOf(set)) {
      const uint32_t node = prepared_.node_of[member];
      if (!prepared_.nodes[node].rollouts.empty()) holders_on[node].push_back(member);
    }
    for (const auto& [node, holders] : holders_on) {
      SourceChoice choice;
      choice.on_node = true;
      if (holders.size() == 1) {
        choice.holder = holders[0];
      } else {
        choice.shares = NewShares(holders, &on_node_);
      }
      prepared_.on_node[{set, node}] = choice;
    }
  }

  static uint32_t NewShares(std::span<const uint32_t> holders, std::vector<Shares>* shares) {
    shares->push_back({{holders.begin(), holders.end()}, {}, 0});
    return static_cast<uint32_t>(shares->size() - 1);
  }

  void AddNode(const NodeGroup& group) {
    const Node& node = prepared_.nodes[group.node];
    for (const JointClass& joined : prepared_.joint.classes) {
      for (DType wire : prepared_.WiresOn(node, joined)) {
        const Cells cells = prepared_.NeedsOn(node, joined, wire);
        const auto bytes = static_cast<uint64_t>(DTypeSize(wire)) * joined.items;
        for (size_t cell = 0; cell < cells.boxes.size(); ++cell) {
          AddNeed(group, joined, cells.boxes[cell], cells.OwnersOf(cell).size(), bytes);
        }
      }
    }
  }

  void AddNeed(const NodeGroup& group, const JointClass& joined, const Box& box, uint64_t needers,
               uint64_t element_bytes) {
    const HolderCells& holders = prepared_.HoldersOf(joined);
    holders.index.ForEachOverlap(box, [&](uint32_t cell, const Box& common) {
      const uint64_t bytes = static_cast<uint64_t>(common.size()) * element_bytes;
      const uint32_t set = holders.set[cell];
      const SourceChoice choice = prepared_.ChoiceFor(set, group.node);
      if (!choice.on_node) {
        outside_bytes_[set] += bytes * group.count;
      } else if (choice.shares == kNone) {
        on_node_load_[choice.holder] += bytes * needers;
      } else {
        on_node_[choice.shares - outside_.size()].total += bytes * needers;
      }
    });
  }

  void AddOutsideTotals() {
    for (uint32_t set = 0; set < prepared_.sets.size(); ++set) {
      const uint32_t shares = prepared_.shares_of_set[set];
      if (shares != kNone) {
        outside_[shares].total = outside_bytes_[set];
      } else {
        outside_load_[prepared_.sets.MembersOf(set)[0]] += outside_bytes_[set];
      }
    }
  }

  Prepared& prepared_;
  std::vector<Shares> outside_;
  std::vector<Shares> on_node_;
  std::vector<uint64_t> outside_load_;   // bytes that each member serves to other nodes
  std::vector<uint64_t> on_node_load_;   // bytes that ranks of its node map
  std::vector<uint64_t> outside_bytes_;  // per set
};

}  // namespace

void BalanceSources(Prepared* prepared) { Balancer(prepared).Run(); }

}  // namespace bascule::plan
