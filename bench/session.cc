// The control plane: how many messages and how much time an update costs that moves almost nothing.
// 8 trainers and 2 engines of 4 ranks, each rank on a thread of its own, over real gRPC and shared
// memory; beside the round trip of one gRPC call in the same run.
#include "bascule/session.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bascule/layout.h"
#include "bench/report.h"

namespace bascule::bench {
namespace {

constexpr uint32_t kTrainers = 8;
constexpr uint32_t kEngines = 2;
constexpr uint32_t kEngineRanks = 4;
constexpr uint32_t kRollouts = kEngines * kEngineRanks;
constexpr int64_t kElements = 512;  // bf16: 1 KiB

Deadline Soon() { return Deadline::In(std::chrono::seconds(60)); }

double MillisecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Ends the program where a call failed.
void Must(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "session: {}\n", status.ToString());
  std::exit(1);
}
template <typename T>
T Must(Result<T> result) {
  Must(result.status());
  return std::move(*result);
}

// One rank's part of a vector, `parts` of them.
struct Memory {
  std::vector<uint16_t> values;
  Layout layout;

  Memory(uint32_t part, uint32_t parts) {
    Box box{{kElements * part / parts, kElements * (part + 1) / parts}};
    values.resize(static_cast<size_t>(box.size()));
    layout.tensors = {{"w", {kElements}, DType::kBF16, false}};
    Buffer buffer;
    buffer.name = "w";
    buffer.data = reinterpret_cast<std::byte*>(values.data());
    buffer.bytes = values.size() * 2;
    layout.buffers = {buffer};
    Binding binding;
    binding.box = box;
    binding.byte_strides[0] = 2;
    binding.dtype = DType::kBF16;
    layout.bindings = {binding};
  }
};

struct Counts {
  std::vector<double> trainer;  // control messages an update
  std::vector<double> leader;
  std::vector<double> follower;
  std::vector<double> peer;  // to sources, an update
};

class SessionBench {
 public:
  SessionBench(int rounds, Report* report) : rounds_(rounds), report_(*report) {}

  void Run() {
    Connect();
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kTrainers; ++rank) {
      threads.emplace_back([this, rank] { Train(rank); });
    }
    for (uint32_t rank = 0; rank < kRollouts; ++rank) {
      threads.emplace_back([this, rank] { RollOut(rank); });
    }
    for (std::thread& thread : threads) thread.join();
    const double round_trip = RoundTrip();
    auto most = [](const std::vector<double>& counts) {
      return *std::max_element(counts.begin(), counts.end());
    };
    auto messages = [this](const std::string& name, double value, bool bounded) {
      Row row{.bench = "session", .name = name, .value = value};
      if (bounded) {
        row.against = "limit";
        row.against_value = 6;
        row.target = 1.0;
        row.at_most = true;
      }
      report_.Add(row);
    };
    messages("control messages an update: a trainer, at most", most(counts_.trainer), true);
    messages("control messages an update: a rank 0, at most", most(counts_.leader), true);
    messages("control messages an update: another rank, at most", most(counts_.follower), true);
    messages("messages to sources an update: a rollout that reads two, at most", most(counts_.peer),
             false);
    report_.Add({"session",
                 "update of 1 KiB, 16 ranks: publish to the last commit",
                 Median(update_ms_),
                 "ms",
                 "one gRPC call",
                 round_trip,
                 {}});
    for (auto& receiver : receivers_) Must(receiver->Close(Soon()));
    while (!senders_.empty()) senders_.pop_back();
  }

 private:
  void Connect() {
    JobOptions job;
    job.name = "bench";
    for (uint32_t rank = 0; rank < kTrainers; ++rank) {
      trainer_memory_.push_back(std::make_unique<Memory>(rank, kTrainers));
      JobOptions own = job;
      own.coordinator = rank == 0 ? kHostHere : job_.coordinator;
      senders_.push_back(Must(WeightSender::Connect(own, {.rank = rank, .world_size = kTrainers},
                                                    trainer_memory_.back()->layout, Soon())));
      if (rank == 0) {
        job_ = job;
        job_.coordinator = senders_[0]->coordinator();
      }
    }
    for (uint32_t i = 0; i < kRollouts; ++i) {
      const uint32_t rank = i % kEngineRanks;
      rollout_memory_.push_back(std::make_unique<Memory>(rank, kEngineRanks));
      receivers_.push_back(
          Must(WeightReceiver::Connect(job_,
                                       {.engine = fmt::format("e{}", i / kEngineRanks),
                                        .rank = rank,
                                        .world_size = kEngineRanks,
                                        .shadow = ShadowMode::kHost},
                                       rollout_memory_.back()->layout, Soon())));
    }
  }

  void Meet() { meeting_.arrive_and_wait(); }

  void Train(uint32_t rank) {
    for (int round = 0; round <= rounds_; ++round) {
      std::fill(trainer_memory_[rank]->values.begin(), trainer_memory_[rank]->values.end(),
                static_cast<uint16_t>(0x3F80 + round));
      Meet();
      if (rank == 0) start_ = std::chrono::steady_clock::now();
      auto publication = Must(senders_[rank]->Publish(static_cast<uint64_t>(round) + 1, Soon()));
      Must(publication->Wait(Soon()));
      Meet();  // rollouts poll what is there
      Meet();  // they have committed
      Meet();  // and audited
      if (round < 2) continue;
      const std::lock_guard lock(mutex_);
      counts_.trainer.push_back(static_cast<double>(publication->report().control_messages));
      if (rank == 0) update_ms_.push_back(took_ms_);
    }
  }

  void RollOut(uint32_t index) {
    const bool leads = index % kEngineRanks == 0;
    for (int round = 0; round <= rounds_; ++round) {
      Meet();
      Meet();
      auto update = Must(receivers_[index]->Poll(Soon()));
      Must(update->Stage(Soon()));
      Must(update->WaitStaged(Soon()));
      // The ranks of an engine step together: each asks once a step.
      steps_.arrive_and_wait();
      if (!Must(update->Ready(Soon()))) Must(Status(Code::kInternal, "not ready"));
      Must(update->Commit(Soon()));
      {
        const std::lock_guard lock(mutex_);
        took_ms_ = MillisecondsSince(start_);
      }
      Meet();
      // The audit in the background ends before the next update is staged; give it the time.
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      Meet();
      if (round < 2) continue;  // plans, connects and audits whole
      const bascule::Report report = update->report();
      const std::lock_guard lock(mutex_);
      (leads ? counts_.leader : counts_.follower)
          .push_back(static_cast<double>(report.control_messages));
      counts_.peer.push_back(static_cast<double>(report.peer_messages));
    }
  }

  // Of the smallest call that a coordinator answers.
  double RoundTrip() {
    std::vector<double> times;
    for (int i = 0; i < 50; ++i) {
      const auto start = std::chrono::steady_clock::now();
      (void)Must(receivers_[0]->Poll(Soon()));
      times.push_back(MillisecondsSince(start));
      for (uint32_t other = 1; other < kEngineRanks; ++other) {
        (void)Must(receivers_[other]->Poll(Soon()));
      }
    }
    return Median(times);
  }

  const int rounds_;
  Report& report_;
  JobOptions job_;
  std::vector<std::unique_ptr<Memory>> trainer_memory_;
  std::vector<std::unique_ptr<Memory>> rollout_memory_;
  std::vector<std::unique_ptr<WeightSender>> senders_;
  std::vector<std::unique_ptr<WeightReceiver>> receivers_;
  std::barrier<> meeting_{kTrainers + kRollouts};
  std::barrier<> steps_{kRollouts};
  std::mutex mutex_;
  Counts counts_;
  std::chrono::steady_clock::time_point start_;
  double took_ms_ = 0;
  std::vector<double> update_ms_;
};

}  // namespace
}  // namespace bascule::bench

int main(int argc, char** argv) {
  CLI::App app("Control messages and time of an update of 1 KiB with 16 ranks");
  std::string json;
  int rounds = 20;
  app.add_option("--json", json, "Write the rows to this file");
  app.add_option("--rounds", rounds, "Updates; the first two are not counted")
      ->check(CLI::Range(3, 1000));
  CLI11_PARSE(app, argc, argv);
  bascule::bench::Report report;
  bascule::bench::SessionBench(rounds, &report).Run();
  if (!json.empty() && !report.WriteJson(json)) {
    fmt::print("cannot write {}\n", json);
    return 1;
  }
  return report.AllPassed() ? 0 : 2;
}
