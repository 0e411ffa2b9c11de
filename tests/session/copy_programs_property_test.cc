// Copy programs of random layouts: snapshot, landing, read-back, audit and commit against values
// that are computed element by element from patterns; and damage, which one of the checks must see.
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "copy/cpu/executor.h"
#include "digest/audit.h"
#include "gtest/gtest.h"
#include "layout/world_template.h"
#include "plan/plan.h"
#include "session/programs.h"

namespace bascule {
namespace {

constexpr std::byte kFill{0xCD};

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t n) { return Between(1, n) == 1; }
  template <typename T>
  const T& Of(const std::vector<T>& items) {
    return items[static_cast<size_t>(Between(0, static_cast<int64_t>(items.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

using Coordinates = std::vector<int64_t>;

// Calls visit(coordinates) for each element, row-major.
template <typename Visit>
void ForEachElement(const Box& box, const Visit& visit) {
  if (box.empty()) return;
  Coordinates at;
  for (int d = 0; d < box.ndim(); ++d) at.push_back(box[d].begin);
  while (true) {
    visit(at);
    int d = box.ndim() - 1;
    for (; d >= 0; --d) {
      if (++at[static_cast<size_t>(d)] < box[d].end) break;
      at[static_cast<size_t>(d)] = box[d].begin;
    }
    if (d < 0) return;
  }
}

int64_t IndexIn(const std::vector<int64_t>& shape, const Coordinates& at) {
  int64_t index = 0;
  for (size_t d = 0; d < at.size(); ++d) index = index * shape[d] + at[d];
  return index;
}

size_t ByteOf(const Binding& binding, const Coordinates& at) {
  int64_t byte = binding.byte_offset;
  for (size_t d = 0; d < at.size(); ++d) {
    byte += (at[d] - binding.box[static_cast<int>(d)].begin) * binding.byte_strides[d];
  }
  return static_cast<size_t>(byte);
}

struct TestTensor {
  std::string name;
  std::vector<int64_t> shape;
  DType published = DType::kBF16;
  DType live = DType::kBF16;
};

bool IsReal(DType dtype) { return Castable(dtype, DType::kF32); }

// The live code of an element: tells the tensor and the element; finite.
uint64_t LiveCode(const TestTensor& tensor, int64_t element) {
  const uint64_t mixed = Mix64(TensorKey(tensor.name) + static_cast<uint64_t>(element));
  if (tensor.live == DType::kF32) return mixed & 0xBFFFFFFF;
  if (IsReal(tensor.live)) return mixed & 0xBFFF;
  const int bits = 8 * DTypeSize(tensor.live);
  return bits == 64 ? mixed : mixed & ((uint64_t{1} << bits) - 1);
}

uint64_t Cast(uint64_t code, DType from, DType to) {
  return from == to ? code : CastCode(static_cast<uint32_t>(code), from, to);
}

uint64_t WireCode(const TestTensor& tensor, int64_t element, DType wire) {
  return Cast(Cast(LiveCode(tensor, element), tensor.live, tensor.published), tensor.published,
              wire);
}

uint64_t LandedCode(const TestTensor& tensor, int64_t element, const Binding& binding) {
  const DType wire = WireDType(tensor.published, binding.dtype);
  const uint64_t code = WireCode(tensor, element, wire);
  if (binding.function == LandingFunction::kNone) return Cast(code, wire, binding.dtype);
  const auto bits = static_cast<uint32_t>(Cast(code, wire, DType::kF32));
  const float result = -std::exp(std::bit_cast<float>(bits));
  return Cast(std::bit_cast<uint32_t>(result), DType::kF32, binding.dtype);
}

// One rank with memory of its own.
struct Rank {
  Layout layout;
  std::vector<std::vector<std::byte>> storage;

  void PointBuffers() {
    for (size_t i = 0; i < storage.size(); ++i) {
      layout.buffers[i].data = storage[i].data();
      layout.buffers[i].bytes = storage[i].size();
    }
  }
  void Fill(std::byte value) {
    for (auto& bytes : storage) std::fill(bytes.begin(), bytes.end(), value);
  }
  [[nodiscard]] std::vector<Memory> Targets() {
    std::vector<Memory> targets;
    for (auto& bytes : storage) targets.push_back({bytes.data(), bytes.size()});
    return targets;
  }
  [[nodiscard]] std::vector<ConstMemory> Sources() const {
    std::vector<ConstMemory> sources;
    for (const auto& bytes : storage) sources.push_back({bytes.data(), bytes.size()});
    return sources;
  }
};

uint32_t TensorIn(Rank* rank, const TestTensor& tensor, DType dtype) {
  int64_t index = rank->layout.FindTensor(tensor.name);
  if (index < 0) {
    index = static_cast<int64_t>(rank->layout.tensors.size());
    rank->layout.tensors.push_back({tensor.name, tensor.shape, dtype});
  }
  return static_cast<uint32_t>(index);
}

// Gives a box memory: dense or with gaps, its dimensions in any order, in a buffer of its own or
// behind what is there.
void Bind(Rank* rank, const TestTensor& tensor, const Box& box, DType tensor_dtype, DType dtype,
          Dice* dice) {
  Binding binding;
  binding.tensor = TensorIn(rank, tensor, tensor_dtype);
  binding.box = box;
  binding.dtype = dtype;
  std::vector<size_t> order(static_cast<size_t>(box.ndim()));
  std::iota(order.begin(), order.end(), size_t{0});
  if (dice->OneIn(3) && order.size() > 1) {
    std::swap(order.front(), order[static_cast<size_t>(dice->Between(0, box.ndim() - 1))]);
  }
  const int64_t width = DTypeSize(dtype);
  int64_t stride = width * (dice->OneIn(6) ? 2 : 1);
  for (size_t i = order.size(); i-- > 0;) {
    binding.byte_strides[order[i]] = stride;
    stride = stride * box[static_cast<int>(order[i])].size();
    if (dice->OneIn(5)) stride += width * dice->Between(1, 3);
  }
  if (rank->storage.empty() || dice->OneIn(4)) {
    rank->storage.emplace_back();
    rank->layout.buffers.push_back({"buffer" + std::to_string(rank->storage.size())});
  }
  std::vector<std::byte>& bytes = rank->storage.back();
  if (dice->OneIn(4)) bytes.resize(bytes.size() + static_cast<size_t>(dice->Between(1, 40)));
  const auto align = static_cast<size_t>(width);
  binding.byte_offset = static_cast<int64_t>((bytes.size() + align - 1) / align * align);
  bytes.resize(static_cast<size_t>(binding.byte_offset + stride));
  binding.buffer = static_cast<uint32_t>(rank->storage.size() - 1);
  rank->layout.bindings.push_back(binding);
}

void CutRandomly(const Box& box, Dice* dice, std::vector<Box>* parts) {
  const int dim = box.ndim() == 0 ? -1 : static_cast<int>(dice->Between(0, box.ndim() - 1));
  if (dim < 0 || box[dim].size() < 2 || dice->OneIn(3)) return parts->push_back(box);
  Box low = box;
  Box high = box;
  low[dim].end = high[dim].begin = dice->Between(box[dim].begin + 1, box[dim].end - 1);
  CutRandomly(low, dice, parts);
  CutRandomly(high, dice, parts);
}

Box RandomPart(const Box& box, Dice* dice) {
  Box part = box;
  for (int d = 0; d < box.ndim(); ++d) {
    if (dice->OneIn(2)) continue;
    part[d].begin = dice->Between(box[d].begin, box[d].end - 1);
    part[d].end = dice->Between(part[d].begin + 1, box[d].end);
  }
  return part;
}

// What a source holds of a tensor, and the lowest-numbered rank that does.
struct Shard {
  Box box;
  uint32_t trainer = 0;
};

// A random job: trainers, rollouts, their memory and the plan. Trainers are members 0, 1, ...
struct Job {
  std::vector<TestTensor> tensors;
  std::vector<std::vector<Shard>> shards;  // per tensor
  std::vector<Rank> ranks;                 // by member id
  uint32_t trainers = 0;
  std::shared_ptr<const Planner> planner;
  std::vector<Part> parts;  // by member id

  [[nodiscard]] const World& world() const { return planner->world(); }
  [[nodiscard]] const WorldTemplate& TemplateOfMember(uint32_t id) const {
    return *world().templates[world().members[id].world_template];
  }
  [[nodiscard]] const TestTensor& Named(std::string_view name) const {
    for (const TestTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return tensors[0];
  }
};

struct JobOptions {
  bool apart = false;      // every rank on a node of its own
  bool functions = false;  // needs `apart`
};

TestTensor RandomTensor(size_t index, Dice* dice) {
  TestTensor tensor{"model.layers." + std::to_string(index / 3) + ".t" + std::to_string(index), {}};
  const int64_t ndim = dice->Between(0, 4);
  const int64_t most = ndim == 1 ? 700 : ndim == 2 ? 40 : ndim == 3 ? 9 : 5;
  for (int64_t d = 0; d < ndim; ++d) tensor.shape.push_back(dice->Between(1, most));
  tensor.published = dice->Of<DType>(
      {DType::kBF16, DType::kBF16, DType::kF16, DType::kF32, DType::kU8, DType::kI64});
  const bool narrow = tensor.published == DType::kBF16 || tensor.published == DType::kF16;
  tensor.live = narrow && dice->OneIn(2) ? DType::kF32 : tensor.published;
  return tensor;
}

DType RandomDestination(const TestTensor& tensor, Dice* dice) {
  if (!IsReal(tensor.published) || dice->OneIn(2)) return tensor.published;
  // Live memory that is cast to be published is audited only in the publish dtype.
  if (tensor.live != tensor.published) return DType::kF32;
  return dice->Of<DType>({DType::kF32, DType::kBF16, DType::kF16});
}

void MakeTrainers(Job* job, Dice* dice) {
  job->shards.resize(job->tensors.size());
  for (size_t t = 0; t < job->tensors.size(); ++t) {
    const TestTensor& tensor = job->tensors[t];
    std::vector<Box> parts;
    CutRandomly(Box::Whole(tensor.shape), dice, &parts);
    for (const Box& box : parts) {
      const auto owner = static_cast<uint32_t>(dice->Between(0, job->trainers - 1));
      job->shards[t].push_back({box, owner});
      for (uint32_t trainer = 0; trainer < job->trainers; ++trainer) {
        if (trainer != owner && !(trainer > owner && dice->OneIn(4))) continue;
        Bind(&job->ranks[trainer], tensor, box, tensor.published, tensor.live, dice);
      }
    }
  }
  for (uint32_t trainer = 0; trainer < job->trainers; ++trainer) {
    Rank& rank = job->ranks[trainer];
    for (const Binding& binding : rank.layout.bindings) {
      const TestTensor& tensor = job->Named(rank.layout.tensors[binding.tensor].name);
      ForEachElement(binding.box, [&](const Coordinates& at) {
        const uint64_t code = LiveCode(tensor, IndexIn(tensor.shape, at));
        std::memcpy(&rank.storage[binding.buffer][ByteOf(binding, at)], &code,
                    static_cast<size_t>(DTypeSize(binding.dtype)));
      });
    }
  }
}

void MakeRollout(Job* job, Rank* rank, bool functions, Dice* dice) {
  for (const TestTensor& tensor : job->tensors) {
    if (dice->OneIn(4)) continue;
    const DType dtype = RandomDestination(tensor, dice);
    const Box whole = Box::Whole(tensor.shape);
    std::vector<Box> boxes;
    if (dice->OneIn(3)) {
      CutRandomly(whole, dice, &boxes);
    } else {
      boxes.push_back(dice->OneIn(2) ? whole : RandomPart(whole, dice));
      if (dice->OneIn(3)) boxes.push_back(RandomPart(whole, dice));  // may overlap
      if (dice->OneIn(4)) boxes.push_back(boxes[0]);
    }
    for (const Box& box : boxes) {
      Bind(rank, tensor, box, dtype, dtype, dice);
      if (functions && IsReal(dtype) && dice->OneIn(4)) {
        rank->layout.bindings.back().function = LandingFunction::kNegExp;
      }
    }
  }
}

Job MakeJob(uint64_t seed, const JobOptions& options = {}) {
  Dice dice(seed);
  Job job;
  const int64_t count = dice.Between(1, 8);
  for (int64_t i = 0; i < count; ++i) {
    job.tensors.push_back(RandomTensor(static_cast<size_t>(i), &dice));
  }
  job.trainers = static_cast<uint32_t>(dice.Between(1, 4));
  const auto engines = static_cast<uint32_t>(dice.Between(1, 3));
  World world;
  for (uint32_t i = 0; i < job.trainers; ++i) world.members.push_back({Role::kTrainer, "", i});
  for (uint32_t e = 0; e < engines; ++e) {
    const auto size = static_cast<uint32_t>(dice.Between(1, 3));
    for (uint32_t r = 0; r < size; ++r) {
      world.members.push_back({Role::kRollout, "e" + std::to_string(e), r});
    }
  }
  job.ranks.resize(world.members.size());
  MakeTrainers(&job, &dice);
  for (size_t id = job.trainers; id < job.ranks.size(); ++id) {
    MakeRollout(&job, &job.ranks[id], options.functions, &dice);
  }
  for (uint32_t id = 0; id < job.ranks.size(); ++id) {
    Rank& rank = job.ranks[id];
    rank.PointBuffers();
    const Side side = id < job.trainers ? Side::kSource : Side::kDestination;
    EXPECT_TRUE(ValidateLayout(rank.layout, side).ok())
        << ValidateLayout(rank.layout, side).ToString();
    auto shape = TemplateOf(rank.layout);
    EXPECT_TRUE(shape.ok()) << shape.status().ToString();
    world.members[id].world_template = id;
    world.members[id].node = options.apart ? id : static_cast<uint32_t>(dice.Between(0, 3));
    world.template_digests.push_back(DigestOf(shape->Serialize()));
    world.templates.push_back(std::make_shared<const WorldTemplate>(std::move(*shape)));
  }
  world.chunk_bytes = static_cast<uint64_t>(dice.Between(64, 4096));
  world.whole_bytes = static_cast<uint64_t>(dice.OneIn(3) ? 0 : dice.Between(1, 512));
  auto planner = Planner::Prepare(std::move(world));
  EXPECT_TRUE(planner.ok()) << planner.status().ToString();
  job.planner = *planner;
  for (uint32_t id = 0; id < job.ranks.size(); ++id) job.parts.push_back(job.planner->PartOf(id));
  return job;
}

// What a chunk's sum must be, element by element.
Sum ExpectedSum(const Job& job, const Part& part, const Chunk& chunk) {
  Sum sum;
  for (uint32_t i = 0; i < chunk.piece_count; ++i) {
    const Piece& piece = part.pieces[chunk.first_piece + i];
    const PartTensor& part_tensor = part.tensors[piece.tensor];
    const TestTensor& tensor = job.Named(part_tensor.name);
    ForEachElement(part.boxes[piece.box], [&](const Coordinates& at) {
      const int64_t element = IndexIn(tensor.shape, at);
      const uint64_t code = WireCode(tensor, element, part_tensor.wire);
      sum += {DigestRun(&code, element, 1, DTypeSize(part_tensor.wire), TensorKey(tensor.name)), 1};
    });
  }
  return sum;
}

// A source's arena after its snapshot, and the sums that came with it.
struct Published {
  SnapshotProgram snapshot;
  std::vector<std::byte> arena;
  std::vector<Sum> cells;
  // By (receiver's member id, chunk): cell sums where there are, else from the arena.
  std::map<std::pair<uint32_t, uint32_t>, Sum> checks;
  size_t cut = 0;  // how many of the checks came from cells
};

class Runner {
 public:
  Runner(Job* job, int threads) : job_(*job), executor_(threads) {}

  std::vector<WantedBox> Wanted(uint32_t receiver, uint32_t trainer) const {
    return WantedFrom(job_.parts[receiver], job_.world(), trainer);
  }

  Result<SnapshotProgram> Snapshot(uint32_t trainer, uint32_t max_cells) const {
    std::vector<std::vector<WantedBox>> wanted;
    for (uint32_t id = job_.trainers; id < job_.ranks.size(); ++id) {
      wanted.push_back(Wanted(id, trainer));
    }
    return BuildSnapshot(job_.ranks[trainer].layout, job_.TemplateOfMember(trainer), {}, wanted,
                         max_cells);
  }

  Published Publish(uint32_t trainer, SnapshotProgram snapshot) {
    Published published;
    published.arena.assign(snapshot.arena.bytes, kFill);
    published.cells.resize(snapshot.program.sums);
    const Memory target{published.arena.data(), published.arena.size()};
    const auto sources = job_.ranks[trainer].Sources();
    Status status = CheckProgram(snapshot.program, sources, {&target, 1});
    EXPECT_TRUE(status.ok()) << status.ToString();
    status = executor_.Run(snapshot.program, sources, {&target, 1}, published.cells);
    EXPECT_TRUE(status.ok()) << status.ToString();
    for (const auto& check : snapshot.checks) {
      Sum& sum = published.checks[{job_.trainers + check.receiver, check.chunk}];
      for (uint32_t cell : check.cells) sum += published.cells[cell];
    }
    published.cut = published.checks.size();
    published.snapshot = std::move(snapshot);
    for (uint32_t id = job_.trainers; id < job_.ranks.size(); ++id) {
      AddArenaSums(trainer, id, &published);
    }
    return published;
  }

  // Sums from the arena: for chunks without cells; equal where there are cells, if the arena is
  // what the snapshot wrote.
  void AddArenaSums(uint32_t trainer, uint32_t receiver, Published* published) {
    const Part& part = job_.parts[receiver];
    auto program =
        BuildArenaDigest(published->snapshot.arena, job_.TemplateOfMember(trainer),
                         Wanted(receiver, trainer), static_cast<uint32_t>(part.chunks.size()));
    ASSERT_TRUE(program.ok()) << program.status().ToString();
    const ConstMemory source{published->arena.data(), published->arena.size()};
    std::vector<Sum> sums(program->sums);
    ASSERT_TRUE(executor_.DigestSources(*program, {&source, 1}, sums, {}).ok());
    for (uint32_t chunk = 0; chunk < part.chunks.size(); ++chunk) {
      if (part.chunks[chunk].source == trainer) {
        published->checks.try_emplace({receiver, chunk}, sums[chunk]);
      }
    }
  }

  // Places of every member: of trainers the arenas (base = member id) or, direct, the bindings.
  void OpenPlaces(const std::vector<Published>& published, bool direct) {
    places_.clear();
    sources_.assign(job_.ranks.size(), {});
    for (uint32_t id = 0; id < job_.ranks.size(); ++id) {
      if (id < job_.trainers && !direct) {
        sources_[id] = {published[id].arena.data(), published[id].arena.size()};
        places_.push_back(
            PlacesOfArena(published[id].snapshot.arena, job_.TemplateOfMember(id), id));
        continue;
      }
      places_.push_back(PlacesOfLayout(job_.ranks[id].layout, job_.TemplateOfMember(id),
                                       static_cast<uint32_t>(sources_.size())));
      for (const ConstMemory& memory : job_.ranks[id].Sources()) sources_.push_back(memory);
    }
  }

  Result<LandingProgram> Landing(uint32_t receiver) const {
    return BuildLanding(job_.parts[receiver], job_.world(), job_.ranks[receiver].layout,
                        [this](uint32_t member, uint32_t tensor) {
                          return std::span<const SourcePlace>(places_[member][tensor]);
                        });
  }

  Status Check(uint32_t receiver, const CopyProgram& program) {
    return CheckProgram(program, sources_, job_.ranks[receiver].Targets());
  }

  std::vector<Sum> Land(uint32_t receiver, const CopyProgram& program) {
    std::vector<Sum> sums(program.sums);
    LandOps(receiver, program, {}, &sums);
    return sums;
  }

  void LandOps(uint32_t receiver, const CopyProgram& program, const CpuExecutor::Options& options,
               std::vector<Sum>* sums) {
    const auto targets = job_.ranks[receiver].Targets();
    EXPECT_TRUE(executor_.Run(program, sources_, targets, *sums, options).ok());
  }

  std::vector<Sum> ReadBack(uint32_t receiver, const CopyProgram& program) {
    std::vector<Sum> sums(program.sums);
    EXPECT_TRUE(executor_.DigestTargets(program, job_.ranks[receiver].Targets(), sums, {}).ok());
    return sums;
  }

  void Run(const CopyProgram& program, std::span<const ConstMemory> sources,
           std::span<const Memory> targets) {
    const Status status = CheckProgram(program, sources, targets);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(executor_.Run(program, sources, targets, {}).ok());
  }

 private:
  Job& job_;
  CpuExecutor executor_;
  std::vector<std::vector<std::vector<SourcePlace>>> places_;
  std::vector<ConstMemory> sources_;
};

std::vector<std::vector<std::byte>> ExpectedBuffers(const Job& job, const Rank& rank) {
  std::vector<std::vector<std::byte>> expected = rank.storage;
  for (auto& bytes : expected) std::fill(bytes.begin(), bytes.end(), kFill);
  for (const Binding& binding : rank.layout.bindings) {
    const TestTensor& tensor = job.Named(rank.layout.tensors[binding.tensor].name);
    ForEachElement(binding.box, [&](const Coordinates& at) {
      const uint64_t code = LandedCode(tensor, IndexIn(tensor.shape, at), binding);
      std::memcpy(&expected[binding.buffer][ByteOf(binding, at)], &code,
                  static_cast<size_t>(DTypeSize(binding.dtype)));
    });
  }
  return expected;
}

StridedBox MemoryOf(const Rank& rank, const Binding& binding) {
  return {rank.storage[binding.buffer].data() + binding.byte_offset, binding.box,
          binding.byte_strides, binding.dtype};
}

// The sum over sources of (shard x a box of the destination).
Sum SourceSum(const Job& job, size_t t, const Box& box, DType wire) {
  Sum sum;
  const TestTensor& tensor = job.tensors[t];
  for (const Shard& shard : job.shards[t]) {
    const Box common = shard.box.Intersect(box);
    if (common.empty()) continue;
    const Rank& rank = job.ranks[shard.trainer];
    for (const Binding& binding : rank.layout.bindings) {
      if (rank.layout.tensors[binding.tensor].name != tensor.name || binding.box != shard.box) {
        continue;
      }
      sum += SumBox(MemoryOf(rank, binding), common, tensor.shape, wire, TensorKey(tensor.name));
    }
  }
  return sum;
}

// The same over all that a destination binds of a tensor, each element once.
Sum SourceSumOf(const Job& job, size_t t, const Rank& rank, DType wire) {
  std::set<Box> boxes;
  bool overlap = false;
  for (const Binding& binding : rank.layout.bindings) {
    if (rank.layout.tensors[binding.tensor].name != job.tensors[t].name) continue;
    if (binding.function != LandingFunction::kNone) continue;
    for (const Box& box : boxes) {
      overlap = overlap || (box != binding.box && !box.Intersect(binding.box).empty());
    }
    boxes.insert(binding.box);
  }
  Sum sum;
  if (!overlap) {
    for (const Box& box : boxes) sum += SourceSum(job, t, box, wire);
    return sum;
  }
  std::set<Coordinates> elements;
  for (const Box& box : boxes) {
    ForEachElement(box, [&](const Coordinates& at) { elements.insert(at); });
  }
  for (const Coordinates& at : elements) {
    Box one = Box::Whole(job.tensors[t].shape);
    for (size_t d = 0; d < at.size(); ++d) one[static_cast<int>(d)] = {at[d], at[d] + 1};
    sum += SourceSum(job, t, one, wire);
  }
  return sum;
}

// The audit, drilled down: tensors of the receiver whose live sums are not those of the sources.
std::set<std::string> DamagedTensors(const Job& job, uint32_t receiver) {
  const Rank& rank = job.ranks[receiver];
  std::map<std::string, DType> wires;
  for (const PartTensor& tensor : job.parts[receiver].tensors) {
    wires[std::string(tensor.name)] = tensor.wire;
  }
  std::set<std::string> damaged;
  for (uint32_t i = 0; i < rank.layout.tensors.size(); ++i) {
    const std::string& name = rank.layout.tensors[i].name;
    auto sums = SumLayout(
        rank.layout, [&](uint32_t tensor) { return wires[rank.layout.tensors[tensor].name]; },
        [i](uint32_t tensor) { return tensor == i; });
    if (!sums.ok()) {
      EXPECT_EQ(sums.status().code(), Code::kDataLoss) << sums.status().ToString();
      damaged.insert(sums.status().tensor());
      continue;
    }
    for (size_t t = 0; t < job.tensors.size(); ++t) {
      if (job.tensors[t].name != name) continue;
      if ((*sums)[i] != SourceSumOf(job, t, rank, wires[name])) damaged.insert(name);
    }
  }
  return damaged;
}

// Both ways to find a box in an arena give one answer.
void CheckPlaces(const WorldTemplate& world, const ArenaMap& arena) {
  const auto all = PlacesOfArena(arena, world, 3);
  ArenaPlaces places(world, {}, 3);
  for (uint32_t tensor = 0; tensor < world.names.size(); ++tensor) {
    const auto some = places.Of(tensor);
    ASSERT_EQ(some.size(), all[tensor].size());
    for (size_t i = 0; i < some.size(); ++i) {
      EXPECT_EQ(some[i].base, all[tensor][i].base);
      EXPECT_EQ(some[i].offset, all[tensor][i].offset);
      EXPECT_EQ(some[i].box, all[tensor][i].box);
      EXPECT_EQ(some[i].byte_strides, all[tensor][i].byte_strides);
      EXPECT_EQ(some[i].dtype, all[tensor][i].dtype);
    }
  }
}

void CheckArena(const Job& job, uint32_t trainer, const Published& published) {
  const WorldTemplate& world = job.TemplateOfMember(trainer);
  CheckPlaces(world, published.snapshot.arena);
  std::vector<std::byte> expected(published.arena.size(), kFill);
  for (size_t i = 0; i < published.snapshot.arena.entries.size(); ++i) {
    const ArenaMap::Entry& entry = published.snapshot.arena.entries[i];
    const TestTensor& tensor = job.Named(world.names[entry.tensor]);
    const auto width = static_cast<size_t>(DTypeSize(tensor.published));
    size_t at_byte = entry.offset;
    Sum whole;
    ForEachElement(entry.box, [&](const Coordinates& at) {
      const int64_t element = IndexIn(tensor.shape, at);
      const uint64_t code = WireCode(tensor, element, tensor.published);
      std::memcpy(&expected[at_byte], &code, width);
      at_byte += width;
      whole += {DigestRun(&code, element, 1, static_cast<int>(width), TensorKey(tensor.name)), 1};
    });
    Sum cells;
    for (uint32_t cell : published.snapshot.box_cells[i]) cells += published.cells[cell];
    EXPECT_EQ(cells, whole) << tensor.name << " " << entry.box.ToString();
  }
  EXPECT_EQ(published.arena, expected);
}

void CheckCommit(Job* job, uint32_t receiver, Runner* runner) {
  Rank& shadow = job->ranks[receiver];
  std::vector<std::vector<std::byte>> live = shadow.storage;
  std::vector<std::vector<std::byte>> expected = shadow.storage;
  uint64_t covered = 0;
  for (size_t b = 0; b < live.size(); ++b) {
    std::set<size_t> bytes;
    for (const Binding& binding : shadow.layout.bindings) {
      if (binding.buffer != b) continue;
      ForEachElement(binding.box, [&](const Coordinates& at) {
        const size_t first = ByteOf(binding, at);
        for (int i = 0; i < DTypeSize(binding.dtype); ++i) {
          bytes.insert(first + static_cast<size_t>(i));
        }
      });
    }
    covered += bytes.size();
    for (size_t i = 0; i < live[b].size(); ++i) {
      live[b][i] = static_cast<std::byte>(~static_cast<uint8_t>(live[b][i]));
      if (!bytes.contains(i)) expected[b][i] = live[b][i];
    }
  }
  std::vector<Memory> targets;
  for (auto& bytes : live) targets.push_back({bytes.data(), bytes.size()});
  const CopyProgram commit = BuildCommit(shadow.layout);
  runner->Run(commit, shadow.Sources(), targets);
  EXPECT_EQ(live, expected);
  EXPECT_EQ(commit.Bytes(), 2 * covered);
}

bool HasFunction(const LandingProgram& landing, uint32_t chunk) {
  for (uint32_t op = landing.first_op[chunk]; op < landing.first_op[chunk + 1]; ++op) {
    const CopyOp& copy = landing.program.ops[op];
    if (copy.sum != kNoSum &&
        landing.program.shapes[copy.shape].function != LandingFunction::kNone) {
      return true;
    }
  }
  return false;
}

// Chunks of trainers first, on every receiver: ranks of a node read the rest from each other.
void LandAll(Job* job, Runner* runner, const std::vector<LandingProgram>& landings,
             std::vector<std::vector<Sum>>* sums) {
  for (bool from_trainers : {true, false}) {
    for (uint32_t id = job->trainers; id < job->ranks.size(); ++id) {
      const LandingProgram& landing = landings[id - job->trainers];
      for (uint32_t chunk = 0; chunk < job->parts[id].chunks.size(); ++chunk) {
        if ((job->parts[id].chunks[chunk].source < job->trainers) != from_trainers) continue;
        CpuExecutor::Options options;
        options.first_op = landing.first_op[chunk];
        options.last_op = landing.first_op[chunk + 1];
        runner->LandOps(id, landing.program, options, &(*sums)[id]);
      }
    }
  }
}

void CheckLanding(Job* job, Runner* runner, const std::vector<Published>& published, bool direct) {
  SCOPED_TRACE(direct ? "direct" : "arena");
  runner->OpenPlaces(published, direct);
  std::vector<LandingProgram> landings;
  std::vector<std::vector<Sum>> sums(job->ranks.size());
  for (uint32_t id = job->trainers; id < job->ranks.size(); ++id) {
    job->ranks[id].Fill(kFill);
    auto landing = runner->Landing(id);
    ASSERT_TRUE(landing.ok()) << landing.status().ToString();
    const Status status = runner->Check(id, landing->program);
    ASSERT_TRUE(status.ok()) << status.ToString();
    sums[id].resize(landing->program.sums);
    landings.push_back(std::move(*landing));
  }
  LandAll(job, runner, landings, &sums);
  for (uint32_t id = job->trainers; id < job->ranks.size(); ++id) {
    SCOPED_TRACE("member " + std::to_string(id));
    const Part& part = job->parts[id];
    const LandingProgram& landing = landings[id - job->trainers];
    const std::vector<Sum> back = runner->ReadBack(id, landing.program);
    for (uint32_t chunk = 0; chunk < part.chunks.size(); ++chunk) {
      EXPECT_EQ(sums[id][chunk], ExpectedSum(*job, part, part.chunks[chunk])) << chunk;
      if (!HasFunction(landing, chunk)) {
        EXPECT_EQ(back[chunk], sums[id][chunk]) << chunk;
      }
    }
    EXPECT_EQ(job->ranks[id].storage, ExpectedBuffers(*job, job->ranks[id]));
    EXPECT_EQ(DamagedTensors(*job, id), std::set<std::string>());
    CheckCommit(job, id, runner);
  }
}

void CheckJob(Job* job, uint64_t seed) {
  Runner runner(job, 1 + static_cast<int>(seed % 2));
  const std::vector<uint32_t> limits{4096, 1, 3, 17};
  const uint32_t max_cells = limits[seed % limits.size()];
  std::vector<Published> published;
  for (uint32_t trainer = 0; trainer < job->trainers; ++trainer) {
    auto snapshot = runner.Snapshot(trainer, max_cells);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status().ToString();
    for (const auto& cells : snapshot->box_cells) EXPECT_LE(cells.size(), max_cells);
    published.push_back(runner.Publish(trainer, std::move(*snapshot)));
    CheckArena(*job, trainer, published.back());
    for (const auto& [key, sum] : published.back().checks) {
      const Part& part = job->parts[key.first];
      EXPECT_EQ(sum, ExpectedSum(*job, part, part.chunks[key.second]))
          << "member " << key.first << " chunk " << key.second;
    }
    if (max_cells == 4096) {
      size_t same_dtype = 0;
      for (uint32_t id = job->trainers; id < job->ranks.size(); ++id) {
        std::map<uint32_t, bool> chunks;
        for (const WantedBox& box : runner.Wanted(id, trainer)) {
          auto [at, added] = chunks.try_emplace(box.chunk, true);
          const TestTensor& tensor = job->Named(job->TemplateOfMember(trainer).names[box.tensor]);
          at->second = at->second && box.wire == tensor.published;
        }
        for (const auto& [chunk, same] : chunks) same_dtype += same ? 1 : 0;
      }
      EXPECT_EQ(published.back().cut, same_dtype);
    }
  }
  CheckLanding(job, &runner, published, /*direct=*/false);
  CheckLanding(job, &runner, published, /*direct=*/true);
}

TEST(CopyPrograms, LandWhatLayoutsSay) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Job job = MakeJob(seed);
    CheckJob(&job, seed);
    if (HasFailure()) return;
  }
}

TEST(CopyPrograms, ApplyLandingFunctions) {
  for (uint64_t seed = 1000; seed < 1030; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Job job = MakeJob(seed, {.apart = true, .functions = true});
    CheckJob(&job, seed);
    if (HasFailure()) return;
  }
}

// ---- damage ----------------------------------------------------------------------------------

// Jobs whose ranks have nodes of their own, published, with the first receiver's landing program.
class Damage : public ::testing::Test {
 protected:
  // Calls body(dice) for many jobs; false where the job has nothing that it could damage.
  template <typename Body>
  void ForEachJob(const Body& body) {
    int damaged = 0;
    for (uint64_t seed = 5000; seed < 5060; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      job_ = MakeJob(seed, {.apart = true});
      receiver_ = job_.trainers;
      runner_.emplace(&job_, 1);
      PublishAll();
      if (HasFatalFailure()) return;
      Dice dice(seed);
      if (body(dice)) ++damaged;
      if (HasFailure()) return;
    }
    EXPECT_GT(damaged, 20);
  }

  void PublishAll() {
    published_.clear();
    for (uint32_t trainer = 0; trainer < job_.trainers; ++trainer) {
      auto snapshot = runner_->Snapshot(trainer, 4096);
      ASSERT_TRUE(snapshot.ok()) << snapshot.status().ToString();
      published_.push_back(runner_->Publish(trainer, std::move(*snapshot)));
    }
    runner_->OpenPlaces(published_, false);
    auto landing = runner_->Landing(receiver_);
    ASSERT_TRUE(landing.ok()) << landing.status().ToString();
    landing_ = std::move(*landing);
    job_.ranks[receiver_].Fill(kFill);
  }

  // An operation of some elements that is summed.
  CopyOp* PickOp(CopyProgram* program, Dice* dice) {
    std::vector<size_t> large;
    for (size_t i = 0; i < program->ops.size(); ++i) {
      if (program->ops[i].sum == kNoSum) continue;
      const CopyShape& shape = program->shapes[program->ops[i].shape];
      int64_t elements = 1;
      for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) elements *= shape.extents[d];
      if (elements >= 5) large.push_back(i);
    }
    return large.empty() ? nullptr : &program->ops[dice->Of(large)];
  }

  std::string TensorOf(const CopyOp& op) {
    for (const TestTensor& tensor : job_.tensors) {
      if (TensorKey(tensor.name) == op.tensor_key) return tensor.name;
    }
    return "";
  }

  // Chunks whose landing sum is not the origin's.
  std::set<uint32_t> Land(const CopyProgram& program) {
    const std::vector<Sum> sums = runner_->Land(receiver_, program);
    return Mismatches(sums);
  }

  std::set<uint32_t> Mismatches(const std::vector<Sum>& sums) {
    std::set<uint32_t> wrong;
    for (uint32_t chunk = 0; chunk < sums.size(); ++chunk) {
      const uint32_t source = job_.parts[receiver_].chunks[chunk].source;
      if (sums[chunk] != published_[source].checks.at({receiver_, chunk})) wrong.insert(chunk);
    }
    return wrong;
  }

  bool Runs(const CopyProgram& program) { return runner_->Check(receiver_, program).ok(); }

  // The audit names the tensor and no other.
  void ExpectDamaged(const std::string& tensor) {
    EXPECT_EQ(DamagedTensors(job_, receiver_), std::set<std::string>{tensor});
  }

  Job job_;
  uint32_t receiver_ = 0;
  std::optional<Runner> runner_;
  std::vector<Published> published_;
  LandingProgram landing_;
};

using Chunks = std::set<uint32_t>;

TEST_F(Damage, NoneIsNoAlarm) {
  ForEachJob([&](Dice&) {
    EXPECT_EQ(Land(landing_.program), Chunks());
    EXPECT_EQ(Mismatches(runner_->ReadBack(receiver_, landing_.program)), Chunks());
    EXPECT_EQ(DamagedTensors(job_, receiver_), std::set<std::string>());
    return true;
  });
}

// The chunk check sees the codes that were read, and the read-back reads where they were written:
// only the audit, which walks the layout, can tell.
TEST_F(Damage, AWrongDestinationIsForTheAudit) {
  ForEachJob([&](Dice& dice) {
    CopyOp* op = PickOp(&landing_.program, &dice);
    if (op == nullptr) return false;
    op->target_offset += 16;
    if (!Runs(landing_.program)) op->target_offset -= 32;
    if (!Runs(landing_.program)) return false;
    EXPECT_EQ(Land(landing_.program), Chunks());
    EXPECT_TRUE(DamagedTensors(job_, receiver_).contains(TensorOf(*op)));
    return true;
  });
}

// Moves an operation's source by one step of its outermost dimension.
bool ShiftSource(CopyProgram* program, CopyOp* op) {
  const CopyShape& shape = program->shapes[op->shape];
  if (shape.ndim == 0) return false;
  op->source_offset += shape.source_strides[0];
  return true;
}

TEST_F(Damage, AWrongSourceRowOfALandingFailsTheChunkCheck) {
  ForEachJob([&](Dice& dice) {
    CopyOp* op = PickOp(&landing_.program, &dice);
    if (op == nullptr || !ShiftSource(&landing_.program, op) || !Runs(landing_.program)) {
      return false;
    }
    EXPECT_EQ(Land(landing_.program), Chunks{op->sum});
    ExpectDamaged(TensorOf(*op));
    return true;
  });
}

// The snapshot is then wrong and consistent: its sums are those of what it read.
TEST_F(Damage, AWrongSourceRowOfASnapshotIsForTheAudit) {
  ForEachJob([&](Dice& dice) {
    const CopyOp* landed = PickOp(&landing_.program, &dice);
    if (landed == nullptr) return false;
    const std::string name = TensorOf(*landed);
    SnapshotProgram snapshot = published_[landed->source_base].snapshot;
    bool shifted = false;
    for (CopyOp& op : snapshot.program.ops) {
      if (op.tensor_key == landed->tensor_key && op.target_offset <= landed->source_offset) {
        CopyOp before = op;
        const Memory arena{nullptr, snapshot.arena.bytes};
        shifted =
            ShiftSource(&snapshot.program, &op) &&
            CheckProgram(snapshot.program, job_.ranks[landed->source_base].Sources(), {&arena, 1})
                .ok();
        if (!shifted) op = before;
      }
      if (shifted) break;
    }
    if (!shifted) return false;
    published_[landed->source_base] = runner_->Publish(landed->source_base, std::move(snapshot));
    runner_->OpenPlaces(published_, false);
    EXPECT_EQ(Land(landing_.program), Chunks());
    // The moved operation may be one that this receiver does not read.
    const auto damaged = DamagedTensors(job_, receiver_);
    if (damaged.empty()) return false;
    EXPECT_EQ(damaged, std::set<std::string>{name});
    return true;
  });
}

TEST_F(Damage, ADroppedOperationFailsTheChunkCheck) {
  ForEachJob([&](Dice& dice) {
    CopyOp* op = PickOp(&landing_.program, &dice);
    if (op == nullptr) return false;
    const CopyOp dropped = *op;
    landing_.program.ops.erase(landing_.program.ops.begin() + (op - landing_.program.ops.data()));
    EXPECT_EQ(Land(landing_.program), Chunks{dropped.sum});
    ExpectDamaged(TensorOf(dropped));
    return true;
  });
}

TEST_F(Damage, ADroppedOperationOfASnapshotFailsTheChunkCheck) {
  ForEachJob([&](Dice& dice) {
    const CopyOp* landed = PickOp(&landing_.program, &dice);
    if (landed == nullptr) return false;
    const uint32_t trainer = landed->source_base;
    // Whatever was cut out of the check: it has fewer elements than the chunk.
    SnapshotProgram snapshot = published_[trainer].snapshot;
    std::set<uint32_t> cells;
    for (const auto& check : snapshot.checks) {
      if (check.receiver == 0 && check.chunk == landed->sum) {
        cells.insert(check.cells.begin(), check.cells.end());
      }
    }
    auto at = std::find_if(snapshot.program.ops.begin(), snapshot.program.ops.end(),
                           [&](const CopyOp& op) { return cells.contains(op.sum); });
    if (at == snapshot.program.ops.end()) return false;
    snapshot.program.ops.erase(at);
    published_[trainer] = runner_->Publish(trainer, std::move(snapshot));
    runner_->OpenPlaces(published_, false);
    EXPECT_TRUE(Land(landing_.program).contains(landed->sum));
    return true;
  });
}

TEST_F(Damage, ADoubledOperationFailsTheChunkCheck) {
  ForEachJob([&](Dice& dice) {
    CopyOp* op = PickOp(&landing_.program, &dice);
    if (op == nullptr) return false;
    const CopyOp doubled = *op;
    landing_.program.ops.push_back(doubled);
    EXPECT_EQ(Land(landing_.program), Chunks{doubled.sum});
    return true;
  });
}

TEST_F(Damage, AFlippedArenaBitFailsTheChunkCheck) {
  ForEachJob([&](Dice& dice) {
    CopyOp* op = PickOp(&landing_.program, &dice);
    if (op == nullptr) return false;
    std::byte& damaged = published_[op->source_base].arena[static_cast<size_t>(op->source_offset)];
    damaged ^= static_cast<std::byte>(1 << dice.Between(0, 7));
    // A cast to a narrower wire dtype may round a low bit away.
    const CopyShape& shape = landing_.program.shapes[op->shape];
    if (shape.wire != shape.source) return false;
    EXPECT_EQ(Land(landing_.program), Chunks{op->sum});
    ExpectDamaged(TensorOf(*op));
    return true;
  });
}

TEST_F(Damage, AFlippedDestinationBitFailsReadBackAndAudit) {
  ForEachJob([&](Dice& dice) {
    CopyOp* op = PickOp(&landing_.program, &dice);
    if (op == nullptr) return false;
    EXPECT_EQ(Land(landing_.program), Chunks());
    job_.ranks[receiver_].storage[op->target_base][static_cast<size_t>(op->target_offset)] ^=
        static_cast<std::byte>(1 << dice.Between(0, 7));
    EXPECT_EQ(Mismatches(runner_->ReadBack(receiver_, landing_.program)), Chunks{op->sum});
    ExpectDamaged(TensorOf(*op));
    return true;
  });
}

}  // namespace
}  // namespace bascule
