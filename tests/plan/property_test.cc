// Parts of random worlds, against an owner map of every element.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/plan/worlds.h"

namespace bascule::testing {
namespace {

// Who fetches an element from whom: [member][name][element] -> source.
using Fetches = std::vector<std::map<std::string, std::vector<uint32_t>>>;
constexpr uint32_t kNobody = ~0U;

bool Contains(const std::vector<uint32_t>& members, uint32_t id) {
  return std::find(members.begin(), members.end(), id) != members.end();
}

class Checker {
 public:
  Checker(const World& world, const Planner& planner)
      : world_(world), map_(MapElements(world)), fetches_(world.members.size()) {
    for (uint32_t id = 0; id < world.members.size(); ++id) parts_.push_back(planner.PartOf(id));
  }

  void Check() {
    for (const Part& part : parts_) {
      CheckChunks(part);
      Record(part);
    }
    for (auto& [name, needers] : map_.needers) CheckTensor(name, needers);
  }

 private:
  // Sums, order and sizes of chunks; every box is used once.
  void CheckChunks(const Part& part) {
    std::set<Box> boxes(part.boxes.begin(), part.boxes.end());
    EXPECT_EQ(boxes.size(), part.boxes.size()) << "boxes are distinct";
    uint32_t next = 0;
    uint64_t total = 0;
    std::map<uint32_t, int> chunks_from;
    for (const Chunk& chunk : part.chunks) ++chunks_from[chunk.source];
    uint32_t last_source = kNobody;
    std::set<uint32_t> seen;
    for (const Chunk& chunk : part.chunks) {
      EXPECT_EQ(chunk.first_piece, next);
      EXPECT_GT(chunk.piece_count, 0U);
      next += chunk.piece_count;
      uint64_t bytes = 0;
      uint64_t elements = 0;
      for (uint32_t p = chunk.first_piece; p < next; ++p) {
        const Piece& piece = part.pieces[p];
        const auto size = static_cast<uint64_t>(part.boxes[piece.box].size());
        EXPECT_GT(size, 0U);
        elements += size;
        bytes += size * static_cast<uint64_t>(DTypeSize(part.tensors[piece.tensor].wire));
      }
      EXPECT_EQ(chunk.bytes, bytes);
      EXPECT_EQ(chunk.elements, elements);
      EXPECT_LE(bytes, 2 * world_.chunk_bytes);
      if (chunks_from[chunk.source] > 1) {
        EXPECT_GE(4 * bytes, world_.chunk_bytes);
      }
      if (chunk.source != last_source) {
        EXPECT_TRUE(seen.insert(chunk.source).second) << "chunks of a source lie together";
      }
      last_source = chunk.source;
      total += bytes;
    }
    EXPECT_EQ(next, part.pieces.size());
    EXPECT_EQ(part.bytes, total);
  }

  void Record(const Part& part) {
    const Member& member = world_.members[part.member];
    const WorldTemplate& own = *world_.templates[member.world_template];
    if (member.role == Role::kTrainer) {
      EXPECT_TRUE(part.chunks.empty());
    }
    for (const Chunk& chunk : part.chunks) {
      for (uint32_t p = chunk.first_piece; p < chunk.first_piece + chunk.piece_count; ++p) {
        const PartTensor& tensor = part.tensors[part.pieces[p].tensor];
        const std::string& name = own.names[tensor.destination_name];
        EXPECT_EQ(own.class_of[tensor.destination_name], tensor.destination_class);
        CheckTypes(tensor, own, chunk.source);
        auto& sources = fetches_[part.member][name];
        sources.resize(map_.needers[name].size(), kNobody);
        ForEachElement(part.boxes[part.pieces[p].box], ClassNamed(own, name).shape, [&](size_t e) {
          EXPECT_EQ(sources[e], kNobody) << name << " element " << e << " comes twice";
          sources[e] = chunk.source;
        });
      }
    }
  }

  void CheckTypes(const PartTensor& tensor, const WorldTemplate& own, uint32_t source) {
    EXPECT_EQ(tensor.destination, own.classes[tensor.destination_class].dtype);
    EXPECT_EQ(tensor.wire, WireDType(tensor.published, tensor.destination));
    const uint32_t source_template = world_.members[source].world_template;
    const uint32_t index = tensor.source_names[source_template];
    ASSERT_LT(index, world_.templates[source_template]->names.size());
    EXPECT_EQ(world_.templates[source_template]->names[index], tensor.name);
  }

  uint32_t NodeOf(uint32_t id) const { return world_.members[id].node; }
  DType TypeOf(uint32_t id, const std::string& name) const {
    return ClassNamed(*world_.templates[world_.members[id].world_template], name).dtype;
  }
  uint32_t SourceOf(uint32_t id, const std::string& name, size_t e) const {
    auto at = fetches_[id].find(name);
    return at == fetches_[id].end() || at->second.empty() ? kNobody : at->second[e];
  }

  void CheckTensor(const std::string& name, const std::vector<std::vector<uint32_t>>& needers) {
    for (size_t e = 0; e < needers.size(); ++e) {
      std::map<std::pair<uint32_t, DType>, int> entries;  // into a node, by wire type
      for (uint32_t id = 0; id < world_.members.size(); ++id) {
        const uint32_t source = SourceOf(id, name, e);
        if (!Contains(needers[e], id)) {
          EXPECT_EQ(source, kNobody) << "member " << id << " does not need it";
          continue;
        }
        ASSERT_NE(source, kNobody) << name << " element " << e << " of member " << id;
        CheckSource(name, e, id, source);
        if (NodeOf(source) != NodeOf(id)) {
          ++entries[{NodeOf(id), WireDType(DType::kBF16, TypeOf(id, name))}];
        }
      }
      for (const auto& [node, count] : entries) EXPECT_EQ(count, 1) << "enters a node once";
    }
  }

  void CheckSource(const std::string& name, size_t e, uint32_t id, uint32_t source) {
    const auto& holders = map_.holders[name][e];
    bool held_here = false;
    for (uint32_t holder : holders) held_here = held_here || NodeOf(holder) == NodeOf(id);
    if (world_.members[source].role == Role::kTrainer) {
      EXPECT_TRUE(Contains(holders, source));
      if (held_here) {
        EXPECT_EQ(NodeOf(source), NodeOf(id));
      }
      return;
    }
    EXPECT_FALSE(held_here);
    EXPECT_EQ(NodeOf(source), NodeOf(id));
    EXPECT_EQ(TypeOf(source, name), TypeOf(id, name));
    const uint32_t origin = SourceOf(source, name, e);
    ASSERT_NE(origin, kNobody);
    EXPECT_EQ(world_.members[origin].role, Role::kTrainer) << "a peer fetches what it gives";
  }

  const World& world_;
  ElementMap map_;
  Fetches fetches_;
  std::vector<Part> parts_;
};

TEST(PlanProperty, EveryElementOnceFromAHolderAndIntoANodeOnce) {
  int planned = 0;
  int refused = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const World world = RandomWorld(seed);
    auto planner = Planner::Prepare(world);
    const ElementMap map = MapElements(world);
    ASSERT_EQ(planner.ok(), map.complete) << planner.status().ToString();
    if (!planner.ok()) {
      EXPECT_EQ(planner.status().code(), Code::kNotFound);
      EXPECT_FALSE(planner.status().tensor().empty());
      ++refused;
      continue;
    }
    Checker(world, **planner).Check();
    ++planned;
    if (HasFailure()) return;
  }
  // Both kinds are common enough to mean something.
  EXPECT_GT(planned, 2000);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace bascule::testing
