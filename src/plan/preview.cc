#include <algorithm>
#include <map>

#include "bascule/plan.h"
#include "layout/coverage.h"
#include "plan/plan.h"

namespace bascule {
namespace {

// Equal worlds that came in by several pointers are one template.
class Templates {
 public:
  explicit Templates(World* world) : world_(*world) {}

  uint32_t Add(const std::shared_ptr<const WorldTemplate>& shape) {
    auto [at, added] = by_pointer_.try_emplace(shape.get(), 0);
    if (!added) return at->second;
    auto known = std::find_if(world_.templates.begin(), world_.templates.end(),
                              [&](const auto& other) { return *other == *shape; });
    at->second = static_cast<uint32_t>(known - world_.templates.begin());
    if (known == world_.templates.end()) {
      // The plan's digest is told to nobody, so the content need not be hashed.
      world_.template_digests.push_back({0, at->second});
      world_.templates.push_back(shape);
    }
    return at->second;
  }

 private:
  World& world_;
  std::map<const WorldTemplate*, uint32_t> by_pointer_;
};

World WorldOfRanks(const std::vector<PlannedRank>& ranks) {
  World world;
  Templates templates(&world);
  for (const PlannedRank& rank : ranks) {
    world.members.push_back({rank.engine.empty() ? Role::kTrainer : Role::kRollout, rank.engine,
                             rank.rank, rank.node, templates.Add(rank.world), rank.coordinates});
  }
  return world;
}

class PlannerPreview final : public PlanPreview {
 public:
  PlannerPreview(std::vector<PlannedRank> ranks, std::shared_ptr<const Planner> planner)
      : ranks_(std::move(ranks)), planner_(std::move(planner)) {}

  [[nodiscard]] const std::vector<PlannedRank>& ranks() const override { return ranks_; }

  [[nodiscard]] Status CheckEngines() const override {
    std::vector<WorldMember> sources;
    std::map<std::string, std::vector<WorldMember>> engines;
    for (const PlannedRank& rank : ranks_) {
      (rank.engine.empty() ? sources : engines[rank.engine])
          .push_back({rank.world.get(), rank.coordinates});
    }
    for (const auto& [name, members] : engines) {
      BASCULE_RETURN_IF_ERROR(CheckCoverage(sources, members));
    }
    return Status::Ok();
  }

  [[nodiscard]] PlannedPart PartOf(uint32_t index) const override {
    const Part part = planner_->PartOf(index);
    std::map<uint32_t, PlannedLink> links;
    for (const Chunk& chunk : part.chunks) {
      PlannedLink& link = links[chunk.source];
      link.source = chunk.source;
      link.bytes += chunk.bytes;
      ++link.chunks;
      link.same_node = ranks_[chunk.source].node == ranks_[index].node;
    }
    PlannedPart result{part.bytes, part.pieces.size(), {}};
    for (const auto& [source, link] : links) result.links.push_back(link);
    return result;
  }

  [[nodiscard]] Bound ComputeBound(const Rates& rates) const override {
    return planner_->ComputeBound(rates);
  }

 private:
  std::vector<PlannedRank> ranks_;
  std::shared_ptr<const Planner> planner_;
};

}  // namespace

Result<std::shared_ptr<const PlanPreview>> PlanPreview::Prepare(std::vector<PlannedRank> ranks) {
  BASCULE_ASSIGN_OR_RETURN(auto planner, Planner::Prepare(WorldOfRanks(ranks)));
  return std::shared_ptr<const PlanPreview>(
      std::make_shared<PlannerPreview>(std::move(ranks), std::move(planner)));
}

RankMemory MemoryOf(const WorldTemplate& world, const std::vector<uint32_t>& coordinates) {
  std::vector<uint64_t> tensors(world.classes.size(), 0);
  for (uint32_t index : world.class_of) ++tensors[index];
  RankMemory memory;
  std::vector<Box> boxes;
  for (uint32_t c = 0; c < world.classes.size(); ++c) {
    boxes.clear();
    world.BoxesOf(c, coordinates, &boxes);
    const auto element = static_cast<uint64_t>(DTypeSize(world.classes[c].dtype));
    for (const Box& box : boxes) {
      const uint64_t bytes = static_cast<uint64_t>(box.size()) * element;
      memory.weights += tensors[c] * bytes;
      memory.arena +=
          tensors[c] * ((bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment);
    }
  }
  return memory;
}

Result<DeclaredWorld> DeclaredWorldOf(const Layout& layout) {
  if (layout.world == nullptr) {
    BASCULE_ASSIGN_OR_RETURN(WorldTemplate own, TemplateOf(layout));
    return DeclaredWorld{{}, std::make_shared<const WorldTemplate>(std::move(own))};
  }
  Mesh mesh;
  mesh.axis_sizes = layout.world->axis_sizes;
  for (size_t axis = 0; axis < mesh.axis_sizes.size(); ++axis) {
    mesh.axis_names.push_back("axis" + std::to_string(axis));
  }
  return DeclaredWorld{std::move(mesh), layout.world};
}

}  // namespace bascule
