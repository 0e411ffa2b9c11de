// The digest of wire codes, and the audit's walk of a layout, beside a plain read of the same
// memory (a sum of its 64-bit words) by as many threads, in the same run and in turns.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/pages.h"
#include "bench/report.h"
#include "copy/cpu/executor.h"
#include "digest/audit.h"

namespace bascule::bench {
namespace {

constexpr uint64_t kKey = 0x1234567;

class DigestBench {
 public:
  DigestBench(uint64_t bytes, int repeats, Report* report)
      : memory_(bytes), repeats_(repeats), report_(report) {}

  void Run(int threads) {
    threads_ = threads;
    executor_ = std::make_unique<CpuExecutor>(threads);
    Measure("the executor's pass over an arena", 1.0, [this] {
      Sum sum;
      const ConstMemory from{memory_.data(), memory_.bytes()};
      if (!executor_->DigestSources(arena_, {&from, 1}, {&sum, 1}, {}).ok()) std::exit(1);
    });
    if (threads > 1) return;  // an audit has one thread
    Measure("the audit's walk, contiguous", 1.0, [this] { Walk(DType::kBF16, 0, 2); });
    Measure("the audit's walk, rows of 4 KiB in 8 KiB", 0, [this] { Walk(DType::kBF16, 4096, 2); });
    Measure("the audit's walk, fp32 as bf16", 0, [this] { Walk(DType::kF32, 0, 4); });
  }

  // Bytes of one row of the walk in `memory`; 0: all in one.
  void Walk(DType dtype, int64_t row, int64_t element) {
    const auto bytes = static_cast<int64_t>(memory_.bytes());
    const int64_t columns = row == 0 ? 1 << 20 : row / element;
    const int64_t pitch = row == 0 ? columns * element : 2 * row;
    // Half of the memory lies between the rows: twice the rows would not fit.
    const int64_t rows = bytes / pitch;
    const Box box = Box::Whole({rows, columns});
    StridedBox memory{memory_.data(), box, {pitch, element}, dtype};
    const std::vector<int64_t> shape{rows, columns};
    read_bytes_ = static_cast<double>(rows * columns * element);
    if (SumBox(memory, box, shape, DType::kBF16, kKey).elements == 0) std::exit(1);
  }

 private:
  void Measure(const std::string& name, double target, const std::function<void()>& body) {
    std::vector<double> rates;
    std::vector<double> reads;
    for (int i = 0; i <= repeats_; ++i) {
      read_bytes_ = static_cast<double>(memory_.bytes());
      const double seconds = Seconds(body);
      const double rate = read_bytes_ / 1e9 / seconds;
      const double read = static_cast<double>(memory_.bytes()) / 1e9 / Seconds([this] { Read(); });
      if (i == 0) continue;  // warms pages and threads
      rates.push_back(rate);
      reads.push_back(read);
    }
    const std::string threads = fmt::format(", {} thread{}", threads_, threads_ > 1 ? "s" : "");
    report_->Add(
        {"digest", name + threads, Median(rates), "GB/s", "plain read", Median(reads), {}});
    if (target > 0) {
      report_->Add({"digest", name + threads + ", a core", Median(rates) / threads_, "GB/s",
                    "10 GB/s", 10.0, target});
    }
  }

  void Read() {
    std::vector<std::thread> team;
    std::vector<uint64_t> sums(static_cast<size_t>(threads_));
    for (int t = 0; t < threads_; ++t) {
      team.emplace_back([this, t, &sums] {
        const auto* words = reinterpret_cast<const uint64_t*>(memory_.data());
        const auto all = static_cast<int64_t>(memory_.bytes() / 8);
        uint64_t sum = 0;
        for (int64_t i = all * t / threads_; i < all * (t + 1) / threads_; ++i) sum += words[i];
        sums[static_cast<size_t>(t)] = sum;
      });
    }
    for (std::thread& thread : team) thread.join();
    for (uint64_t sum : sums) kept_ = kept_ + sum;
  }

  SharedPages memory_;
  const int repeats_;
  Report* report_;
  int threads_ = 1;
  std::unique_ptr<CpuExecutor> executor_;
  const CopyProgram arena_ = [this] {
    CopyShape shape;
    shape.ndim = 1;
    shape.extents[0] = static_cast<int64_t>(memory_.bytes() / 2);
    shape.source_strides[0] = shape.target_strides[0] = 2;
    shape.tensor_strides[0] = 1;
    shape.source = shape.target = shape.wire = DType::kBF16;
    CopyProgram program;
    program.sums = 1;
    CopyOp op;
    op.sum = 0;
    op.tensor_key = kKey;
    program.Add(shape, op);
    return program;
  }();
  double read_bytes_ = 0;
  volatile uint64_t kept_ = 0;  // so that the reads are made
};

}  // namespace
}  // namespace bascule::bench

int main(int argc, char** argv) {
  CLI::App app("Digests and the audit's walk beside a plain read of the same memory");
  std::string json;
  uint64_t mebibytes = 512;
  int repeats = 7;
  std::vector<int> threads{1, 2};
  app.add_option("--json", json, "Write the rows to this file");
  app.add_option("--mib", mebibytes, "Size of the memory")->check(CLI::Range(64, 1 << 16));
  app.add_option("--repeats", repeats, "Measurements of each case")->check(CLI::Range(1, 1000));
  app.add_option("--threads", threads, "Team sizes");
  CLI11_PARSE(app, argc, argv);
  bascule::bench::Report report;
  bascule::bench::DigestBench bench(mebibytes << 20, repeats, &report);
  for (int team : threads) bench.Run(team);
  if (!json.empty() && !report.WriteJson(json)) {
    fmt::print("cannot write {}\n", json);
    return 1;
  }
  return report.AllPassed() ? 0 : 2;
}
