// One host: real trainer and rollout processes, Qwen3-8B shapes (fewer layers, so that it fits),
// 4 FSDP ranks -> 2 engines of TP 2. Each phase beside memcpy by as many processes between memory
// of the same kind (memfd pages, transparent huge pages), measured in the same run, in turns.
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "bascule/layout.h"
#include "bascule/mesh.h"
#include "bascule/session.h"
#include "bench/report.h"

namespace bascule::bench {
namespace {

constexpr uint32_t kTrainers = 4;
constexpr uint32_t kEngines = 2;
constexpr uint32_t kTensorParallel = 2;
constexpr uint32_t kRollouts = kEngines * kTensorParallel;
constexpr uint32_t kProcesses = kTrainers + kRollouts;
constexpr int kMostRounds = 64;

struct Options {
  int layers = 3;
  int64_t vocabulary = 151936 / 8;
  int rounds = 5;
  std::string json;
};

// Who measured what; in memory that all processes share.
enum Phase : uint8_t { kPublish, kStage, kCommit, kPublishCopy, kStageCopy, kCommitCopy, kPhases };
struct Shared {
  pthread_barrier_t barrier;
  std::atomic<bool> failed;
  char coordinator[64];
  int64_t start[kPhases][kProcesses];
  int64_t end[kPhases][kProcesses];
  int64_t landing[kProcesses];  // the pass alone, ns
  int64_t digest[kProcesses];   // direct: the source's digest pass, ns
  uint64_t trainer_bytes;       // one copy of the model
  uint64_t rollout_bytes[kRollouts];
  double seconds[kPhases][kMostRounds];
  double landing_seconds[kMostRounds];
  double digest_seconds[kMostRounds];
  double ewtt[kMostRounds];
};

int64_t WallNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Memory as arenas are made of.
Buffer Allocate(const std::string& name, uint64_t bytes) {
  const uint64_t huge = 2u << 20;
  const uint64_t size = (bytes + huge - 1) / huge * huge;
  Buffer buffer;
  buffer.name = name;
  buffer.bytes = bytes;
  buffer.kind = MemoryKind::kShared;
  buffer.fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (buffer.fd < 0 || ftruncate(buffer.fd, static_cast<off_t>(size)) != 0) return buffer;
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, buffer.fd, 0);
  if (data == MAP_FAILED) return buffer;
  (void)madvise(data, size, MADV_HUGEPAGE);
  std::memset(data, 1, size);
  buffer.data = static_cast<std::byte*>(data);
  return buffer;
}

LogicalTensor Tensor(const std::string& name, std::vector<int64_t> shape) {
  return {name, std::move(shape), DType::kBF16, false};
}

// Checkpoint tensors of one layer, as a trainer shards them: by rows.
std::vector<LogicalTensor> Checkpoint(const Options& options) {
  std::vector<LogicalTensor> tensors = {
      Tensor("model.embed_tokens.weight", {options.vocabulary, 4096}),
      Tensor("lm_head.weight", {options.vocabulary, 4096}), Tensor("model.norm.weight", {4096})};
  for (int i = 0; i < options.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    tensors.push_back(Tensor(layer + "self_attn.q_proj.weight", {4096, 4096}));
    tensors.push_back(Tensor(layer + "self_attn.k_proj.weight", {1024, 4096}));
    tensors.push_back(Tensor(layer + "self_attn.v_proj.weight", {1024, 4096}));
    tensors.push_back(Tensor(layer + "self_attn.o_proj.weight", {4096, 4096}));
    tensors.push_back(Tensor(layer + "self_attn.q_norm.weight", {128}));
    tensors.push_back(Tensor(layer + "self_attn.k_norm.weight", {128}));
    tensors.push_back(Tensor(layer + "mlp.gate_proj.weight", {12288, 4096}));
    tensors.push_back(Tensor(layer + "mlp.up_proj.weight", {12288, 4096}));
    tensors.push_back(Tensor(layer + "mlp.down_proj.weight", {4096, 12288}));
    tensors.push_back(Tensor(layer + "input_layernorm.weight", {4096}));
    tensors.push_back(Tensor(layer + "post_attention_layernorm.weight", {4096}));
  }
  return tensors;
}

// How an engine of tensor parallelism holds them: fused QKV and gate_up, the rest by rows or
// columns.
std::vector<Block> EngineBlocks(const Options& options) {
  const Placements rows = {{"tp", Shard(0)}};
  const Placements columns = {{"tp", Shard(1)}};
  std::vector<Block> blocks = {
      Block::Of(Tensor("model.embed_tokens.weight", {options.vocabulary, 4096}), rows),
      Block::Of(Tensor("lm_head.weight", {options.vocabulary, 4096}), rows),
      Block::Of(Tensor("model.norm.weight", {4096}))};
  for (int i = 0; i < options.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    blocks.push_back(FusedQkv(Tensor(layer + "self_attn.q_proj.weight", {4096, 4096}),
                              Tensor(layer + "self_attn.k_proj.weight", {1024, 4096}),
                              Tensor(layer + "self_attn.v_proj.weight", {1024, 4096}), 8, "tp"));
    blocks.push_back(Block::Of(Tensor(layer + "self_attn.o_proj.weight", {4096, 4096}), columns));
    blocks.push_back(Block::Of(Tensor(layer + "self_attn.q_norm.weight", {128})));
    blocks.push_back(Block::Of(Tensor(layer + "self_attn.k_norm.weight", {128})));
    blocks.push_back(FusedGateUp(Tensor(layer + "mlp.gate_proj.weight", {12288, 4096}),
                                 Tensor(layer + "mlp.up_proj.weight", {12288, 4096}), rows));
    blocks.push_back(Block::Of(Tensor(layer + "mlp.down_proj.weight", {4096, 12288}), columns));
    blocks.push_back(Block::Of(Tensor(layer + "input_layernorm.weight", {4096})));
    blocks.push_back(Block::Of(Tensor(layer + "post_attention_layernorm.weight", {4096})));
  }
  return blocks;
}

Result<Layout> BuildLayout(const Mesh& mesh, std::vector<uint32_t> coordinates,
                           const std::vector<Block>& blocks) {
  BASCULE_ASSIGN_OR_RETURN(LayoutBuilder builder, LayoutBuilder::Create(mesh, coordinates));
  for (size_t i = 0; i < blocks.size(); ++i) {
    BASCULE_ASSIGN_OR_RETURN(std::vector<int64_t> shape, builder.LocalShape(blocks[i]));
    uint64_t bytes = 2;
    for (int64_t extent : shape) bytes *= static_cast<uint64_t>(extent);
    Buffer buffer = Allocate(fmt::format("block{}", i), bytes);
    if (buffer.data == nullptr) return Status(Code::kResourceExhausted, "no memory for a tensor");
    LocalMemory memory;
    memory.buffer = builder.AddBuffer(buffer);
    BASCULE_RETURN_IF_ERROR(builder.Add(blocks[i], memory));
  }
  return builder.BuildLayout();
}

uint64_t BytesOf(const Layout& layout) {
  uint64_t bytes = 0;
  for (const Buffer& buffer : layout.buffers) bytes += buffer.bytes;
  return bytes;
}

struct Setting {
  std::string name;
  bool direct = false;  // direct export and in place
  bool digest = true;
};

// One process's view of the run.
class Process {
 public:
  Process(const Options& options, const Setting& setting, Shared* shared, uint32_t index)
      : options_(options), setting_(setting), shared_(shared), index_(index) {}

  Status Run() { return index_ < kTrainers ? RunTrainer() : RunRollout(); }

 private:
  void Meet() { pthread_barrier_wait(&shared_->barrier); }
  template <typename F>
  Status Timed(Phase phase, F&& f) {
    Meet();
    shared_->start[phase][index_] = WallNs();
    Status status = f();
    shared_->end[phase][index_] = WallNs();
    Meet();
    return status;
  }
  // Takes part in a phase of the other side.
  void Idle() {
    Meet();
    Meet();
  }
  static void Copy(const Layout& layout, std::byte* target) {
    for (const Buffer& buffer : layout.buffers) {
      std::memcpy(target, buffer.data, buffer.bytes);
      target += buffer.bytes;
    }
  }
  JobOptions Job() const {
    JobOptions job;
    job.name = "one_host";
    job.token = "bench";
    job.coordinator = index_ == 0 ? kHostHere : shared_->coordinator;
    return job;
  }
  static Deadline Soon() { return Deadline::In(std::chrono::seconds(120)); }

  Status RunTrainer();
  Status RunRollout();
  void Collect(int round);

  const Options& options_;
  const Setting& setting_;
  Shared* shared_;
  uint32_t index_;
};

Status Process::RunTrainer() {
  Mesh mesh{{"fsdp"}, {kTrainers}};
  std::vector<Block> blocks;
  for (const LogicalTensor& tensor : Checkpoint(options_)) {
    blocks.push_back(Block::Of(tensor, {{"fsdp", Shard(0)}}));
  }
  BASCULE_ASSIGN_OR_RETURN(Layout layout, BuildLayout(mesh, {index_}, blocks));
  const uint64_t bytes = BytesOf(layout);
  Buffer scratch = Allocate("scratch", bytes);
  TrainerOptions trainer{.rank = index_, .world_size = kTrainers};
  trainer.arena = setting_.direct ? ArenaMode::kDirect : ArenaMode::kHost;
  trainer.digest = setting_.digest;
  if (index_ != 0) Meet();
  BASCULE_ASSIGN_OR_RETURN(auto sender, WeightSender::Connect(Job(), trainer, layout, Soon()));
  if (index_ == 0) {
    std::strncpy(shared_->coordinator, sender->coordinator().c_str(),
                 sizeof(shared_->coordinator) - 1);
    Meet();
  }
  Meet();  // everybody is connected
  for (int round = 0; round < options_.rounds + 1; ++round) {
    std::shared_ptr<Publication> publication;
    BASCULE_RETURN_IF_ERROR(Timed(kPublish, [&]() -> Status {
      BASCULE_ASSIGN_OR_RETURN(publication,
                               sender->Publish(static_cast<uint64_t>(round) + 1, Soon()));
      return Status::Ok();
    }));
    shared_->digest[index_] = publication->report().phases.publish;
    Status available = publication->Wait(Soon());
    Meet();
    BASCULE_RETURN_IF_ERROR(available);
    Idle();  // stage
    Idle();  // commit
    if (setting_.direct) BASCULE_RETURN_IF_ERROR(publication->Release(Soon()));
    BASCULE_RETURN_IF_ERROR(Timed(kPublishCopy, [&] {
      Copy(layout, scratch.data);
      return Status::Ok();
    }));
    Idle();
    Idle();
    if (index_ == 0) Collect(round);
    Meet();
  }
  return sender->Close(Soon());
}

Status Process::RunRollout() {
  const uint32_t rollout = index_ - kTrainers;
  const uint32_t rank = rollout % kTensorParallel;
  Mesh mesh{{"tp"}, {kTensorParallel}};
  BASCULE_ASSIGN_OR_RETURN(Layout layout, BuildLayout(mesh, {rank}, EngineBlocks(options_)));
  const uint64_t bytes = BytesOf(layout);
  shared_->rollout_bytes[rollout] = bytes;
  Buffer scratch = Allocate("scratch", bytes);
  RolloutOptions options{.engine = fmt::format("e{}", rollout / kTensorParallel),
                         .rank = rank,
                         .world_size = kTensorParallel};
  options.shadow = setting_.direct ? ShadowMode::kNone : ShadowMode::kHost;
  options.digest = setting_.digest;
  Meet();
  BASCULE_ASSIGN_OR_RETURN(auto receiver, WeightReceiver::Connect(Job(), options, layout, Soon()));
  Meet();
  for (int round = 0; round < options_.rounds + 1; ++round) {
    Idle();  // publish
    Meet();  // available
    std::shared_ptr<Update> update;
    BASCULE_RETURN_IF_ERROR(Timed(kStage, [&]() -> Status {
      BASCULE_ASSIGN_OR_RETURN(update, receiver->Poll(Soon()));
      if (!update) return Status(Code::kInternal, "nothing was offered");
      BASCULE_RETURN_IF_ERROR(update->Stage(Soon()));
      return update->WaitStaged(Soon());
    }));
    BASCULE_RETURN_IF_ERROR(Timed(kCommit, [&] { return update->Commit(Soon()); }));
    shared_->landing[index_] = update->report().phases.stage;
    Idle();
    BASCULE_RETURN_IF_ERROR(Timed(kStageCopy, [&] {
      Copy(layout, scratch.data);
      return Status::Ok();
    }));
    BASCULE_RETURN_IF_ERROR(Timed(kCommitCopy, [&] {
      std::byte* from = scratch.data;
      for (const Buffer& buffer : layout.buffers) {
        std::memcpy(buffer.data, from, buffer.bytes);
        from += buffer.bytes;
      }
      return Status::Ok();
    }));
    Meet();
  }
  return receiver->Close(Soon());
}

// From the first start to the last end of a phase, over its processes.
void Process::Collect(int round) {
  if (round == 0) return;  // the first version plans, connects and audits whole
  auto span = [&](Phase phase, uint32_t first, uint32_t last) {
    int64_t start = INT64_MAX;
    int64_t end = 0;
    for (uint32_t i = first; i < last; ++i) {
      start = std::min(start, shared_->start[phase][i]);
      end = std::max(end, shared_->end[phase][i]);
    }
    return static_cast<double>(end - start) / 1e9;
  };
  for (Phase phase : {kPublish, kPublishCopy}) {
    shared_->seconds[phase][round - 1] = span(phase, 0, kTrainers);
  }
  for (Phase phase : {kStage, kCommit, kStageCopy, kCommitCopy}) {
    shared_->seconds[phase][round - 1] = span(phase, kTrainers, kProcesses);
  }
  shared_->landing_seconds[round - 1] =
      static_cast<double>(
          *std::max_element(shared_->landing + kTrainers, shared_->landing + kProcesses)) /
      1e9;
  shared_->digest_seconds[round - 1] =
      static_cast<double>(*std::max_element(shared_->digest, shared_->digest + kTrainers)) / 1e9;
  // From the first publish start to the last commit end, waits between the phases included.
  const int64_t first =
      *std::min_element(shared_->start[kPublish], shared_->start[kPublish] + kTrainers);
  const int64_t last =
      *std::max_element(shared_->end[kCommit] + kTrainers, shared_->end[kCommit] + kProcesses);
  shared_->ewtt[round - 1] = static_cast<double>(last - first) / 1e9;
}

Shared* MakeShared() {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* shared = new (memory) Shared();
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->barrier, &attributes, kProcesses);
  return shared;
}

// Forks the job; false when a process failed.
bool RunJob(const Options& options, const Setting& setting, Shared* shared) {
  std::vector<pid_t> children;
  for (uint32_t index = 0; index < kProcesses; ++index) {
    pid_t pid = fork();
    if (pid == 0) {
      Status status = Process(options, setting, shared, index).Run();
      if (!status.ok()) fmt::print(stderr, "process {}: {}\n", index, status.ToString());
      std::fflush(stderr);
      _exit(status.ok() ? 0 : 1);
    }
    children.push_back(pid);
  }
  bool ok = true;
  for (size_t left = children.size(); left > 0; --left) {
    int status = 0;
    pid_t pid = wait(&status);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    ok = false;
    for (pid_t child : children) {
      if (child != pid) kill(child, SIGKILL);
    }
  }
  return ok;
}

double MedianOf(const double* values, int rounds) {
  return Median(std::vector<double>(values, values + rounds));
}

void AddRows(const Options& options, const Setting& setting, const Shared& shared, Report* report) {
  const int n = options.rounds;
  uint64_t model = 0;
  for (uint32_t i = 0; i < kTensorParallel; ++i) model += shared.rollout_bytes[i];
  uint64_t unique = 0;
  for (const LogicalTensor& tensor : Checkpoint(options)) {
    uint64_t bytes = 2;
    for (int64_t extent : tensor.shape) bytes *= static_cast<uint64_t>(extent);
    unique += bytes;
  }
  const double landed = static_cast<double>(model) * kEngines;
  const double published = static_cast<double>(unique);
  auto rate = [n](double bytes, const double* seconds) {
    return bytes / MedianOf(seconds, n) / 1e9;
  };
  auto add = [&](const std::string& name, double value, double against,
                 std::optional<double> target) {
    report->Add({"one_host", setting.name + ": " + name, value, "GB/s", "memcpy", against, target});
  };
  const double publish_copy = rate(published, shared.seconds[kPublishCopy]);
  const double stage_copy = rate(landed, shared.seconds[kStageCopy]);
  const double commit_copy = rate(landed, shared.seconds[kCommitCopy]);
  if (setting.direct) {
    add("digest pass of the source", rate(published, shared.digest_seconds), publish_copy, {});
    add("landing pass, in place", rate(landed, shared.landing_seconds), stage_copy, 0.70);
    add("commit, whole (landing, checks)", rate(landed, shared.seconds[kCommit]), stage_copy, {});
    return;
  }
  const bool targets = setting.digest;
  auto target = [targets](double value) { return targets ? std::optional(value) : std::nullopt; };
  add("publish", rate(published, shared.seconds[kPublish]), publish_copy, target(0.80));
  add("stage", rate(landed, shared.seconds[kStage]), stage_copy, target(0.80));
  add("stage, the landing pass alone", rate(landed, shared.landing_seconds), stage_copy, {});
  add("commit", rate(landed, shared.seconds[kCommit]), commit_copy, target(0.80));
  std::vector<double> copies;
  for (int i = 0; i < n; ++i) {
    copies.push_back(shared.seconds[kPublishCopy][i] + shared.seconds[kStageCopy][i] +
                     shared.seconds[kCommitCopy][i]);
  }
  report->Add({"one_host", setting.name + ": EWTT", MedianOf(shared.ewtt, n), "s",
               "the three copies", Median(copies), target(1.25), true});
}

// Phases over the copies of the same round, so that a machine which slows down for a while does not
// count.
struct OverCopies {
  std::vector<double> publish;
  std::vector<double> stage;
  std::vector<double> ewtt;

  void Collect(const Shared& shared, int rounds) {
    for (int i = 0; i < rounds; ++i) {
      const double publish_copy = shared.seconds[kPublishCopy][i];
      const double stage_copy = shared.seconds[kStageCopy][i];
      publish.push_back(shared.seconds[kPublish][i] / publish_copy);
      stage.push_back(shared.seconds[kStage][i] / stage_copy);
      ewtt.push_back(shared.ewtt[i] / (publish_copy + stage_copy + shared.seconds[kCommitCopy][i]));
    }
  }
};

// What the digest and the checks cost: the same job with and without them.
void AddDigestCost(const OverCopies& on, const OverCopies& off, Report* report) {
  auto add = [&](const std::string& name, const std::vector<double>& with,
                 const std::vector<double>& without) {
    report->Add({"one_host", "digest and checks: " + name, Median(with), "copies", "digest off",
                 Median(without), 1.10, true});
  };
  add("publish", on.publish, off.publish);
  add("stage", on.stage, off.stage);
  add("EWTT", on.ewtt, off.ewtt);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("One host: publish, stage and commit beside memcpy, over shared memory");
  app.add_option("--layers", options.layers, "Layers of Qwen3-8B to move (its own: 36)")
      ->check(CLI::Range(1, 36));
  app.add_option("--vocabulary", options.vocabulary, "Rows of the embeddings (its own: 151936)");
  app.add_option("--rounds", options.rounds, "Updates measured, after one that is not")
      ->check(CLI::Range(1, kMostRounds));
  app.add_option("--json", options.json, "Write the rows to this file");
  CLI11_PARSE(app, argc, argv);

  Report report;
  const Setting arena{"arena, shadow", false, true};
  const Setting no_digest{"arena, shadow, digest off", false, false};
  const Setting direct{"direct, in place", true, true};
  OverCopies on;
  OverCopies off;
  // With and without digest by turns; only the first of each is shown.
  for (const auto& [setting, over, shown] :
       std::vector<std::tuple<const Setting*, OverCopies*, bool>>{{&arena, &on, true},
                                                                  {&no_digest, &off, true},
                                                                  {&arena, &on, false},
                                                                  {&no_digest, &off, false},
                                                                  {&direct, nullptr, true}}) {
    Shared* shared = MakeShared();
    if (shared == nullptr || !RunJob(options, *setting, shared)) {
      fmt::print(stderr, "one_host: the job \"{}\" failed\n", setting->name);
      return 1;
    }
    if (shown) AddRows(options, *setting, *shared, &report);
    if (over != nullptr) over->Collect(*shared, options.rounds);
    munmap(shared, sizeof(Shared));
  }
  AddDigestCost(on, off, &report);
  if (!options.json.empty() && !report.WriteJson(options.json)) return 1;
  return report.AllPassed() ? 0 : 2;
}

}  // namespace
}  // namespace bascule::bench

int main(int argc, char** argv) { return bascule::bench::Main(argc, argv); }
