// What a plan takes, for the command line: worlds from JSON, the planner, memory and the bound.
#include "bascule/plan.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bascule/layout_json.h"
#include "bind.h"
#include "calls.h"
#include "errors.h"

namespace bascule::python {
namespace {

using Nodes = std::vector<uint32_t>;
using Engines = std::vector<std::pair<std::string, Nodes>>;
// Source, bytes, chunks, same node.
using Link = std::tuple<uint32_t, uint64_t, uint64_t, bool>;

// A world, or a layout as the world that it belongs to.
Result<DeclaredWorld> ReadWorld(const std::string& text) {
  auto layout = LayoutFromJson(text);
  if (layout.ok()) return DeclaredWorldOf(*layout);
  // Which of the two it is meant to be decides whose error is told.
  auto world = WorldFromJson(text);
  if (!world.ok() && text.find("\"bascule_layout\"") != std::string::npos) return layout.status();
  return world;
}

void AddRanks(const DeclaredWorld& world, const std::string& engine, const Nodes& nodes,
              std::vector<PlannedRank>* ranks) {
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) {
    ranks->push_back({engine, rank, nodes[rank], world.world, world.mesh.CoordinatesOf(rank)});
  }
}

std::shared_ptr<const PlanPreview> Prepare(const DeclaredWorld& trainers, const Nodes& nodes,
                                           const DeclaredWorld& rollouts, const Engines& engines) {
  auto check = [](const DeclaredWorld& world, const Nodes& nodes) {
    if (nodes.size() == world.mesh.ranks()) return;
    Raise(Status(Code::kInvalidArgument, "as many nodes as ranks are needed"));
  };
  check(trainers, nodes);
  for (const auto& [name, engine_nodes] : engines) check(rollouts, engine_nodes);
  return Unwrap(WithoutGil([&] {
    std::vector<PlannedRank> ranks;
    AddRanks(trainers, "", nodes, &ranks);
    for (const auto& [name, engine_nodes] : engines) {
      AddRanks(rollouts, name, engine_nodes, &ranks);
    }
    return PlanPreview::Prepare(std::move(ranks));
  }));
}

nb::dict ToDict(const Bound& bound) {
  nb::dict dict;
  dict["sole_source"] = bound.sole_source;
  dict["trainer_egress"] = bound.trainer_egress;
  dict["all_egress"] = bound.all_egress;
  dict["node_ingress"] = bound.node_ingress;
  dict["memory"] = bound.memory;
  return dict;
}

}  // namespace

void BindPlan(nb::module_& m) {
  nb::class_<DeclaredWorld>(m, "World", "A mesh and what its ranks hold.")
      .def_static(
          "from_json",
          [](const std::string& text) {
            return Unwrap(WithoutGil([&] { return ReadWorld(text); }));
          },
          nb::arg("text"), "A world document, or a layout as the world that it belongs to.")
      .def_prop_ro("mesh", [](const DeclaredWorld& self) { return self.mesh; })
      .def(
          "memory_of",
          [](const DeclaredWorld& self, uint64_t rank) {
            if (rank >= self.mesh.ranks()) {
              Raise(Status(Code::kInvalidArgument, "there is no such rank"));
            }
            const RankMemory memory =
                WithoutGil([&] { return MemoryOf(*self.world, self.mesh.CoordinatesOf(rank)); });
            return std::pair(memory.weights, memory.arena);
          },
          nb::arg("rank"), "Bytes of the rank's weights, and of one arena.");
  nb::class_<PlanPreview>(m, "PlanPreview",
                          "The plan of trainers and engines. Ranks are numbered trainers first, "
                          "then engine by engine.")
      .def_static("prepare", &Prepare, nb::arg("trainers"), nb::arg("trainer_nodes"),
                  nb::arg("rollouts"), nb::arg("engines"),
                  "Engines are (name, node of each rank), sorted by name.")
      .def(
          "check_engines",
          [](const PlanPreview& self) { Check(WithoutGil([&] { return self.CheckEngines(); })); },
          "Raise where an engine neither wants nor lists as unused what trainers publish.")
      .def(
          "part_of",
          [](const PlanPreview& self, uint32_t index) {
            if (index >= self.ranks().size()) {
              Raise(Status(Code::kInvalidArgument, "there is no such rank"));
            }
            const PlannedPart part = WithoutGil([&] { return self.PartOf(index); });
            std::vector<Link> links;
            for (const PlannedLink& link : part.links) {
              links.emplace_back(link.source, link.bytes, link.chunks, link.same_node);
            }
            return std::pair(part.pieces, std::move(links));
          },
          nb::arg("index"),
          "What a rank fetches: pieces, and links of (source, bytes, chunks, same node).")
      .def(
          "bound",
          [](const PlanPreview& self, uint64_t node_memory, uint64_t trainer_egress,
             uint64_t rollout_egress, uint64_t rollout_ingress) {
            const Rates rates{node_memory, trainer_egress, rollout_egress, rollout_ingress};
            return ToDict(WithoutGil([&] { return self.ComputeBound(rates); }));
          },
          nb::kw_only(), nb::arg("node_memory"), nb::arg("trainer_egress"),
          nb::arg("rollout_egress"), nb::arg("rollout_ingress"),
          nb::sig("def bound(self, *, node_memory: int, trainer_egress: int, rollout_egress: int, "
                  "rollout_ingress: int) -> dict[str, int]"),
          "The terms of the lower bound of EWTT in nanoseconds, from bytes a second; 0: unknown.");
}

}  // namespace bascule::python
