// A small job in one process: trainers that shard every tensor by rows (or replicate it), engines
// that take it fused and split by columns or rows. Every element's value tells its tensor and
// place.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/session.h"

namespace bascule::testing {

inline Deadline Soon(int64_t ms = 10000) { return Deadline::In(std::chrono::milliseconds(ms)); }

struct TestTensor {
  std::string name;
  std::vector<int64_t> shape;
};

// Tensors of a toy model: odd sizes, a scalar-like vector, a 3-d one.
inline std::vector<TestTensor> ToyModel() {
  return {{"model.embed.weight", {37, 16}},      {"model.layers.0.q.weight", {24, 16}},
          {"model.layers.0.k.weight", {8, 16}},  {"model.layers.0.norm.weight", {16}},
          {"model.layers.1.q.weight", {24, 16}}, {"model.layers.1.k.weight", {8, 16}},
          {"model.layers.1.norm.weight", {16}},  {"model.layers.1.experts.weight", {4, 6, 16}}};
}

// The value of an element (exact in bf16's 8 bits of mantissa only by pattern: codes are compared).
inline uint16_t Code(size_t tensor, int64_t element, uint64_t version) {
  return static_cast<uint16_t>(tensor * 7919 + static_cast<uint64_t>(element) * 31 + version * 257);
}

inline Interval Part(int64_t extent, uint32_t rank, uint32_t ranks) {
  int64_t chunk = (extent + ranks - 1) / ranks;
  return {std::min<int64_t>(rank * chunk, extent), std::min<int64_t>((rank + 1) * chunk, extent)};
}

// One rank's memory and layout. `dim` picks the sharded dimension per tensor; -1 replicates.
struct RankMemory {
  std::vector<std::vector<uint16_t>> storage;
  Layout layout;
  std::vector<TestTensor> model;

  RankMemory(const std::vector<TestTensor>& tensors, uint32_t rank, uint32_t ranks, int dim)
      : model(tensors) {
    for (size_t t = 0; t < model.size(); ++t) {
      Box box = Box::Whole(model[t].shape);
      const int d = std::min<int>(dim, box.ndim() - 1);
      if (d >= 0) box[d] = Part(model[t].shape[static_cast<size_t>(d)], rank, ranks);
      layout.tensors.push_back({model[t].name, model[t].shape, DType::kBF16, false});
      storage.emplace_back(static_cast<size_t>(box.size()), uint16_t{0xABCD});
      if (box.empty()) continue;
      Buffer buffer;
      buffer.name = model[t].name;
      buffer.data = reinterpret_cast<std::byte*>(storage.back().data());
      buffer.bytes = storage.back().size() * 2;
      Binding binding;
      binding.tensor = static_cast<uint32_t>(t);
      binding.buffer = static_cast<uint32_t>(layout.buffers.size());
      binding.box = box;
      binding.dtype = DType::kBF16;
      int64_t stride = 2;
      for (int i = box.ndim() - 1; i >= 0; --i) {
        binding.byte_strides[static_cast<size_t>(i)] = stride;
        stride *= box[i].size();
      }
      layout.buffers.push_back(buffer);
      layout.bindings.push_back(binding);
    }
  }

  template <typename F>
  void ForEach(F&& f) {
    for (const Binding& binding : layout.bindings) {
      const auto& shape = model[binding.tensor].shape;
      const int64_t n = binding.box.size();
      for (int64_t i = 0; i < n; ++i) {
        int64_t rest = i;
        int64_t flat = 0;
        int64_t scale = 1;
        for (int d = binding.box.ndim() - 1; d >= 0; --d) {
          const int64_t c = binding.box[d].begin + rest % binding.box[d].size();
          rest /= binding.box[d].size();
          flat += c * scale;
          scale *= shape[static_cast<size_t>(d)];
        }
        f(binding.tensor, flat, storage[binding.tensor][static_cast<size_t>(i)]);
      }
    }
  }
  void Fill(uint64_t version) {
    ForEach([version](uint32_t tensor, int64_t element, uint16_t& value) {
      value = Code(tensor, element, version);
    });
  }
  // Number of elements that are not those of `version`.
  int64_t Wrong(uint64_t version) {
    int64_t wrong = 0;
    ForEach([&](uint32_t tensor, int64_t element, uint16_t& value) {
      wrong += value != Code(tensor, element, version) ? 1 : 0;
    });
    return wrong;
  }
};

// Connected trainers and one engine.
struct ToyJob {
  JobOptions job;
  std::vector<std::unique_ptr<RankMemory>> trainer_memory;
  std::vector<std::unique_ptr<WeightSender>> senders;
  std::vector<std::unique_ptr<RankMemory>> rollout_memory;
  std::vector<std::unique_ptr<WeightReceiver>> receivers;

  static JobOptions NewJob() {
    static int counter = 0;
    JobOptions options;
    options.name = "toy" + std::to_string(++counter);
    options.token = "secret";
    options.heartbeat = std::chrono::milliseconds(100);
    return options;
  }

  ToyJob() : job(NewJob()) {}
  ~ToyJob() {
    receivers.clear();
    while (!senders.empty()) senders.pop_back();  // the coordinator's host leaves last
  }

  void AddTrainers(uint32_t ranks, int dim = 0, uint32_t versions_held = 2) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      trainer_memory.push_back(std::make_unique<RankMemory>(ToyModel(), rank, ranks, dim));
      JobOptions options = job;
      options.coordinator = rank == 0 && job.coordinator.empty() ? kHostHere : job.coordinator;
      auto sender = WeightSender::Connect(
          options, {.rank = rank, .world_size = ranks, .versions_held = versions_held},
          trainer_memory.back()->layout, Soon());
      ASSERT_TRUE(sender.ok()) << sender.status().ToString();
      if (rank == 0 && job.coordinator.empty()) job.coordinator = (*sender)->coordinator();
      senders.push_back(std::move(*sender));
    }
  }
  void AddEngine(const std::string& name, uint32_t ranks, int dim,
                 ShadowMode shadow = ShadowMode::kHost) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      rollout_memory.push_back(std::make_unique<RankMemory>(ToyModel(), rank, ranks, dim));
      auto receiver = WeightReceiver::Connect(
          job, {.engine = name, .rank = rank, .world_size = ranks, .shadow = shadow},
          rollout_memory.back()->layout, Soon());
      ASSERT_TRUE(receiver.ok()) << receiver.status().ToString();
      receivers.push_back(std::move(*receiver));
    }
  }
  void Publish(uint64_t version) {
    for (size_t rank = 0; rank < senders.size(); ++rank) {
      trainer_memory[rank]->Fill(version);
      auto publication = senders[rank]->Publish(version, Soon());
      ASSERT_TRUE(publication.ok()) << publication.status().ToString();
    }
  }
  // Polls, stages and commits on all receivers (of one engine), in rank order.
  void Update(uint64_t version) {
    std::vector<std::shared_ptr<bascule::Update>> updates;
    for (auto& receiver : receivers) {
      auto update = receiver->Poll(Soon());
      ASSERT_TRUE(update.ok()) << update.status().ToString();
      ASSERT_NE(*update, nullptr) << "nothing is offered";
      EXPECT_EQ((*update)->id().version, version);
      updates.push_back(*update);
    }
    for (auto& update : updates) {
      Status status = update->Stage(Soon());
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    for (auto& update : updates) {
      Status status = update->WaitStaged(Soon());
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    for (auto& update : updates) {
      auto ready = update->Ready(Soon());
      ASSERT_TRUE(ready.ok()) << ready.status().ToString();
      EXPECT_TRUE(*ready);
    }
    for (auto& update : updates) {
      Status status = update->Commit(Soon());
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
};

}  // namespace bascule::testing
