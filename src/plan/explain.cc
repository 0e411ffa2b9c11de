#include <algorithm>
#include <map>
#include <set>

#include "plan/prepared.h"

namespace bascule::plan {

Explanation ExplainPlan(const Prepared& prepared) {
  const auto& members = prepared.world.members;
  Explanation explanation;
  explanation.fetched_bytes.assign(members.size(), 0);
  explanation.served_bytes.assign(members.size(), 0);
  explanation.from_outside.assign(members.size(), 0);
  for (uint32_t target = 0; target < members.size(); ++target) {
    std::map<uint32_t, LinkUse> links;
    for (const Chunk& chunk : MakePart(prepared, target).chunks) {
      LinkUse& link = links[chunk.source];
      link.bytes += chunk.bytes;
      ++link.chunks;
    }
    for (auto& [source, link] : links) {
      link.source = source;
      link.target = target;
      link.same_node = prepared.node_of[source] == prepared.node_of[target];
      explanation.fetched_bytes[target] += link.bytes;
      explanation.served_bytes[source] += link.bytes;
      if (!link.same_node) explanation.from_outside[target] += link.bytes;
      explanation.links.push_back(link);
    }
  }
  std::sort(explanation.links.begin(), explanation.links.end(),
            [](const LinkUse& a, const LinkUse& b) {
              return std::pair(a.source, a.target) < std::pair(b.source, b.target);
            });
  for (uint32_t id = 0; id < members.size(); ++id) {
    if (members[id].role != Role::kTrainer) continue;
    explanation.worst_source_bytes =
        std::max(explanation.worst_source_bytes, explanation.served_bytes[id]);
  }
  return explanation;
}

namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// Nanoseconds, rounded down so that a bound stays one; 0 where the rate is unknown.
int64_t TimeOf(uint64_t bytes, uint64_t rate) {
  __extension__ using Wide = unsigned __int128;
  return rate == 0 ? 0 : static_cast<int64_t>(static_cast<Wide>(bytes) * kSecond / rate);
}

// The bytes that cross between nodes, however they are routed.
class Crossing {
 public:
  explicit Crossing(const Prepared& prepared)
      : prepared_(prepared), into_node_(prepared.nodes.size(), 0) {
    for (const JointClass& joined : prepared.joint.classes) {
      std::map<DType, std::vector<OwnedBox>> outside;
      for (uint32_t n = 0; n < prepared.nodes.size(); ++n) AddNode(joined, n, &outside);
      for (auto& [wire, boxes] : outside) AddUnique(joined, wire, std::move(boxes));
    }
  }

  // Per node: what its ranks need and no trainer of it holds, once.
  [[nodiscard]] const std::vector<uint64_t>& into_node() const { return into_node_; }
  // What some node needs from outside, once.
  [[nodiscard]] uint64_t unique() const { return unique_; }
  // The same by the nodes that hold it.
  [[nodiscard]] const std::map<std::vector<uint32_t>, uint64_t>& by_holder_nodes() const {
    return by_holder_nodes_;
  }

 private:
  void AddNode(const JointClass& joined, uint32_t n, std::map<DType, std::vector<OwnedBox>>* all) {
    const Node& node = prepared_.nodes[n];
    const HolderCells& holders = prepared_.HoldersOf(joined);
    for (DType wire : prepared_.WiresOn(node, joined)) {
      const auto element_bytes = static_cast<uint64_t>(DTypeSize(wire)) * joined.items;
      const Cells needs = prepared_.NeedsOn(node, joined, wire);
      for (const Box& need : needs.boxes) {
        holders.index.ForEachOverlap(need, [&](uint32_t cell, const Box& common) {
          if (prepared_.ChoiceFor(holders.set[cell], n).on_node) return;
          into_node_[n] += static_cast<uint64_t>(common.size()) * element_bytes;
          (*all)[wire].push_back({common, 0});
        });
      }
    }
  }

  void AddUnique(const JointClass& joined, DType wire, std::vector<OwnedBox> boxes) {
    const auto element_bytes = static_cast<uint64_t>(DTypeSize(wire)) * joined.items;
    const HolderCells& holders = prepared_.HoldersOf(joined);
    for (const Box& box : Refine(std::move(boxes)).boxes) {
      holders.index.ForEachOverlap(box, [&](uint32_t cell, const Box& common) {
        const uint64_t bytes = static_cast<uint64_t>(common.size()) * element_bytes;
        std::set<uint32_t> nodes;
        for (uint32_t id : prepared_.sets.MembersOf(holders.set[cell])) {
          nodes.insert(prepared_.node_of[id]);
        }
        unique_ += bytes;
        by_holder_nodes_[{nodes.begin(), nodes.end()}] += bytes;
      });
    }
  }

  const Prepared& prepared_;
  std::vector<uint64_t> into_node_;
  uint64_t unique_ = 0;
  std::map<std::vector<uint32_t>, uint64_t> by_holder_nodes_;
};

// Bytes of a rank's boxes of all tensors of its template.
uint64_t OwnBytes(const Prepared& prepared, const Member& member) {
  const WorldTemplate& own = *prepared.world.templates[member.world_template];
  std::vector<uint64_t> tensors(own.classes.size(), 0);
  for (uint32_t c : own.class_of) ++tensors[c];
  uint64_t bytes = 0;
  std::vector<Box> boxes;
  for (uint32_t c = 0; c < own.classes.size(); ++c) {
    boxes.clear();
    own.BoxesOf(c, member.coordinates, &boxes);
    const auto element_bytes = static_cast<uint64_t>(DTypeSize(own.classes[c].dtype));
    for (const Box& box : boxes) {
      bytes += static_cast<uint64_t>(box.size()) * element_bytes * tensors[c];
    }
  }
  return bytes;
}

// Publish copies what trainers hold, stage what rollouts need; the worst node.
uint64_t WorstCopiedBytes(const Prepared& prepared) {
  std::vector<uint64_t> copied(prepared.nodes.size(), 0);
  for (uint32_t id = 0; id < prepared.world.members.size(); ++id) {
    copied[prepared.node_of[id]] += OwnBytes(prepared, prepared.world.members[id]);
  }
  return copied.empty() ? 0 : *std::max_element(copied.begin(), copied.end());
}

}  // namespace

Bound BoundOf(const Prepared& prepared, const Rates& rates) {
  const Crossing crossing(prepared);
  uint64_t trainer_nodes = 0;
  uint64_t rollout_nodes = 0;
  for (const Node& node : prepared.nodes) {
    trainer_nodes += node.trainers.empty() ? 0 : 1;
    rollout_nodes += node.rollouts.empty() ? 0 : 1;
  }
  uint64_t total = 0;
  uint64_t worst_node = 0;
  for (uint64_t bytes : crossing.into_node()) {
    total += bytes;
    worst_node = std::max(worst_node, bytes);
  }
  Bound bound;
  for (const auto& [nodes, bytes] : crossing.by_holder_nodes()) {
    bound.sole_source =
        std::max(bound.sole_source, TimeOf(bytes, nodes.size() * rates.trainer_egress));
  }
  bound.trainer_egress = TimeOf(crossing.unique(), trainer_nodes * rates.trainer_egress);
  if (rates.trainer_egress != 0 && rates.rollout_egress != 0) {
    bound.all_egress =
        TimeOf(total, trainer_nodes * rates.trainer_egress + rollout_nodes * rates.rollout_egress);
  }
  bound.node_ingress = TimeOf(worst_node, rates.rollout_ingress);
  bound.memory = TimeOf(WorstCopiedBytes(prepared), rates.node_memory);
  bound.nanoseconds = std::max({bound.sole_source, bound.trainer_egress, bound.all_egress,
                                bound.node_ingress, bound.memory});
  return bound;
}

}  // namespace bascule::plan
