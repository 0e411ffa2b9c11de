// Plans of published models: time, memory, metadata, bytes and balance.
#include "plan/plan.h"

#include <fmt/format.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "bascule/mesh.h"
#include "bench/model_shapes.h"
#include "bench/report.h"

namespace bascule::bench {
namespace {

constexpr uint32_t kRanksPerNode = 8;
// What the directory hands out a member beside its template: rank, node, template index, digest of
// the incarnation and a few coordinates.
constexpr uint64_t kMemberBytes = 40;

struct Setup {
  std::string name;
  uint32_t replicas = 1;  // HSDP; shards are trainers / replicas
  uint32_t trainers = 256;
  uint32_t engines = 4;
  uint32_t engine_ranks = 32;    // experts over all of them
  uint32_t tensor_parallel = 1;  // of dense parts; the rest is data-parallel attention
  bool flat = false;             // FSDP1: a layer is one buffer, cut at any element
  bool colocated = false;        // rollouts on the trainers' nodes
  bool balance = false;          // measure loads over all ranks
};

const std::vector<Setup> kSetups = {
    {.name = "FSDP 256 -> 4 EP32"},
    {.name = "FSDP 256 -> 4 EP32 TP8", .tensor_parallel = 8},
    {.name = "flat 256 -> 4 EP32", .flat = true},
    {.name = "HSDP 4x64 -> 4 EP32", .replicas = 4, .balance = true},
    {.name = "HSDP 8x32 -> 3 EP32 TP8",
     .replicas = 8,
     .engines = 3,
     .tensor_parallel = 8,
     .balance = true},
    {.name = "HSDP 4x64 = 8 EP32 TP8",
     .replicas = 4,
     .engines = 8,
     .tensor_parallel = 8,
     .colocated = true},
    {.name = "FSDP 4096 -> 128 EP32", .trainers = 4096, .engines = 128},
    {.name = "HSDP 16x256 -> 128 EP32 TP8",
     .replicas = 16,
     .trainers = 4096,
     .engines = 128,
     .tensor_parallel = 8},
    {.name = "HSDP 16x256 = 128 EP32 TP8",
     .replicas = 16,
     .trainers = 4096,
     .engines = 128,
     .tensor_parallel = 8,
     .colocated = true},
};

template <typename T>
T Must(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  fmt::print(stderr, "{}\n", result.status().ToString());
  std::exit(1);
}
void Must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "{}\n", status.ToString());
  std::exit(1);
}

// FSDP1: one flat buffer a layer (and one for what is in no layer), in the order of the checkpoint.
void AddFlatLayers(const Model& model, LayoutBuilder* builder) {
  std::map<std::string, FlatBuffer> layers;
  for (const ModelTensor& t : model.tensors) {
    const std::string& name = t.tensor.name;
    const size_t dot = name.find('.', std::string("model.layers.").size());
    FlatBuffer& flat = layers[name.starts_with("model.layers.") ? name.substr(0, dot) : ""];
    flat.axes = {"shard"};
    flat.tensors.push_back({t.tensor});
  }
  for (const auto& [layer, flat] : layers) Must(builder->AddFlat(flat));
}

// FSDP2: every parameter is cut in dimension 0, over the shards of each replica.
std::shared_ptr<const WorldTemplate> TrainerTemplate(const Model& model, const Mesh& mesh,
                                                     bool flat) {
  auto builder = Must(LayoutBuilder::Create(mesh));
  if (flat) {
    AddFlatLayers(model, &builder);
    return Must(builder.BuildWorld());
  }
  for (const ModelTensor& t : model.tensors) {
    Must(builder.Add(Block::Of(t.tensor, {{"shard", Shard(0)}})));
  }
  return Must(builder.BuildWorld());
}

// Experts lie on one rank of the engine each; dense parts are cut over "tp" and replicated over
// "dp". That gate and up are stacked in memory (w13) does not change which boxes a rank needs.
Placements RolloutPlacements(const Model& model, const ModelTensor& t, const Setup& setup) {
  if (t.expert >= 0) {
    const auto rank = static_cast<uint32_t>(t.expert * setup.engine_ranks / model.experts);
    return {{"dp", At(rank / setup.tensor_parallel)}, {"tp", At(rank % setup.tensor_parallel)}};
  }
  switch (t.cut) {
    case Cut::kNone: return {};
    case Cut::kRows: return {{"tp", Shard(0)}};
    case Cut::kColumns: return {{"tp", Shard(1)}};
    case Cut::kKeyHeads: return {{"tp", ShardParts(0, model.key_heads)}};
  }
  return {};
}

std::shared_ptr<const WorldTemplate> RolloutTemplate(const Model& model, const Mesh& mesh,
                                                     const Setup& setup) {
  auto builder = Must(LayoutBuilder::Create(mesh));
  for (const ModelTensor& t : model.tensors) {
    Must(builder.Add(Block::Of(t.tensor, RolloutPlacements(model, t, setup))));
  }
  return Must(builder.BuildWorld());
}

struct Job {
  World world;
  uint64_t metadata = 0;
};

Job MakeJob(const Model& model, const Setup& setup) {
  const Mesh trainers{{"replica", "shard"}, {setup.replicas, setup.trainers / setup.replicas}};
  const Mesh rollouts{{"dp", "tp"},
                      {setup.engine_ranks / setup.tensor_parallel, setup.tensor_parallel}};
  Job job;
  job.world.templates = {TrainerTemplate(model, trainers, setup.flat),
                         RolloutTemplate(model, rollouts, setup)};
  for (const auto& shape : job.world.templates) {
    const std::string bytes = shape->Serialize();
    job.metadata += bytes.size();
    job.world.template_digests.push_back(DigestOf(bytes));
  }
  for (uint32_t rank = 0; rank < setup.trainers; ++rank) {
    job.world.members.push_back(
        {Role::kTrainer, "", rank, rank / kRanksPerNode, 0, trainers.CoordinatesOf(rank)});
  }
  const uint32_t first_node = setup.colocated ? 0 : setup.trainers / kRanksPerNode;
  for (uint32_t id = 0; id < setup.engines * setup.engine_ranks; ++id) {
    const uint32_t rank = id % setup.engine_ranks;
    job.world.members.push_back({Role::kRollout, fmt::format("e{:03}", id / setup.engine_ranks),
                                 rank, first_node + id / kRanksPerNode, 1,
                                 rollouts.CoordinatesOf(rank)});
  }
  job.metadata += kMemberBytes * job.world.members.size();
  return job;
}

// Heap in use. (Resident memory hides what an earlier run has freed.)
uint64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

double MillisecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Bytes that a rank must own: its boxes of all tensors, in its own dtype (here the wire dtype).
uint64_t OwnedBytes(const World& world, uint32_t member) {
  const Member& rank = world.members[member];
  const WorldTemplate& shape = *world.templates[rank.world_template];
  std::vector<uint64_t> tensors(shape.classes.size(), 0);
  for (uint32_t c : shape.class_of) ++tensors[c];
  uint64_t bytes = 0;
  std::vector<Box> boxes;
  for (uint32_t c = 0; c < shape.classes.size(); ++c) {
    boxes.clear();
    shape.BoxesOf(c, rank.coordinates, &boxes);
    for (const Box& box : boxes) bytes += static_cast<uint64_t>(box.size()) * 2 * tensors[c];
  }
  return bytes;
}

// The least possible largest load: replicas of one shard hold the same, so the bytes of each shard
// are spread evenly over its replicas at best, and shards have no holder in common.
uint64_t LeastLargestLoad(const Setup& setup, const Explanation& explained) {
  const uint32_t shards = setup.trainers / setup.replicas;
  uint64_t worst = 0;
  for (uint32_t shard = 0; shard < shards; ++shard) {
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < setup.replicas; ++r)
      bytes += explained.served_bytes[r * shards + shard];
    worst = std::max(worst, (bytes + setup.replicas - 1) / setup.replicas);
  }
  return worst;
}

class PlanBench {
 public:
  PlanBench(Report* report, int samples) : report_(*report), samples_(samples) {}

  void Run(const Model& model, const Setup& setup) {
    prefix_ = fmt::format("{} {}: ", model.name, setup.name);
    const Job job = MakeJob(model, setup);
    const bool large = setup.trainers > 1000;
    MeasureTime(job, setup, large ? 1000 : 100);
    AddRow("metadata a rank", static_cast<double>(job.metadata) / 1e6, "MB", "limit",
           large ? 64 : 16, 1.0);
    if (setup.balance) MeasureBalance(job, setup);
  }

 private:
  void MeasureTime(const Job& job, const Setup& setup, double limit_ms) {
    const auto first = static_cast<uint32_t>(setup.trainers);
    const auto rollouts = static_cast<uint32_t>(job.world.members.size()) - first;
    std::vector<double> prepare;
    std::vector<double> total;
    Part part;
    uint64_t state = 0;
    for (int i = 0; i < samples_; ++i) {
      const auto member = first + static_cast<uint32_t>(i) * (rollouts - 1) /
                                      static_cast<uint32_t>(std::max(1, samples_ - 1));
      // The better of two: "worst" is to tell of ranks, not of the machine.
      double best = std::numeric_limits<double>::infinity();
      for (int again = 0; again < 2; ++again) {
        World world = job.world;
        const uint64_t before = HeapBytes();
        const auto start = std::chrono::steady_clock::now();
        auto planner = Must(Planner::Prepare(std::move(world)));
        prepare.push_back(MillisecondsSince(start));
        const uint64_t after = HeapBytes();
        state = std::max(state, after > before ? after - before : 0);
        part = planner->PartOf(member);
        best = std::min(best, MillisecondsSince(start));
      }
      total.push_back(best);
    }
    AddRow("Prepare", Median(prepare), "ms");
    AddRow("Prepare + PartOf", Median(total), "ms", "limit", limit_ms, 1.0);
    AddRow("Prepare + PartOf, worst rank", *std::max_element(total.begin(), total.end()), "ms",
           "limit", limit_ms, 1.0);
    AddRow("pieces a rank", static_cast<double>(part.pieces.size()), "");
    AddRow("chunks a rank", static_cast<double>(part.chunks.size()), "");
    AddRow("bytes fetched", static_cast<double>(part.bytes) / 1e9, "GB", "owned",
           static_cast<double>(OwnedBytes(job.world, part.member)) / 1e9, 1.0);
    AddRow("planner state", static_cast<double>(state) / 1e6, "MB", "limit", 500, 1.0);
  }

  void MeasureBalance(const Job& job, const Setup& setup) {
    auto planner = Must(Planner::Prepare(job.world));
    const Explanation explained = planner->Explain();
    AddRow("largest source load", static_cast<double>(explained.worst_source_bytes) / 1e9, "GB",
           "optimum", static_cast<double>(LeastLargestLoad(setup, explained)) / 1e9, 1.01);
    // Node-once: together the ranks of a node fetch each byte from outside once.
    uint64_t least = ~uint64_t{0};
    uint64_t most = 0;
    for (uint32_t id = setup.trainers; id < job.world.members.size(); ++id) {
      least = std::min(least, explained.from_outside[id]);
      most = std::max(most, explained.from_outside[id]);
    }
    AddRow("from outside, most of a rank", static_cast<double>(most) / 1e9, "GB", "least",
           static_cast<double>(least) / 1e9);
  }

  void AddRow(const std::string& name, double value, const std::string& unit,
              const std::string& against = "", double against_value = 0,
              std::optional<double> target = std::nullopt) {
    report_.Add({.bench = "plan",
                 .name = prefix_ + name,
                 .value = value,
                 .unit = unit,
                 .against = against,
                 .against_value = against_value,
                 .target = target,
                 .at_most = true});
  }

  Report& report_;
  int samples_;
  std::string prefix_;
};

}  // namespace
}  // namespace bascule::bench

int main(int argc, char** argv) {
  using namespace bascule::bench;
  CLI::App app("Plans of published models: time a rank, pieces, metadata, memory, balance");
  std::string json;
  std::string models_json = BASCULE_MODELS_JSON;
  std::string filter;
  std::vector<std::string> models{"kimi-k2", "glm-5.2", "qwen3-235b-a22b", "deepseek-v3"};
  int samples = 7;
  app.add_option("--json", json, "Write the rows to this file");
  app.add_option("--models-json", models_json, "Dimensions of models");
  app.add_option("--models", models, "Models to plan");
  app.add_option("--filter", filter, "Only setups whose name contains this");
  app.add_option("--samples", samples, "Rollout ranks whose parts are timed")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  Report report;
  PlanBench bench(&report, samples);
  for (const std::string& name : models) {
    const Model model = Must(LoadModel(models_json, name));
    fmt::print("{}: {} tensors, {:.1f} GB in bf16\n", name, model.tensors.size(),
               static_cast<double>(model.bytes()) / 1e9);
    for (const Setup& setup : kSetups) {
      if (setup.name.find(filter) != std::string::npos) bench.Run(model, setup);
    }
  }
  if (!json.empty() && !report.WriteJson(json)) {
    fmt::print("cannot write {}\n", json);
    return 1;
  }
  return 0;
}
