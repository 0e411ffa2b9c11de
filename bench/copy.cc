// The CPU executor beside libc memcpy by as many threads, between memfd pages with huge pages asked
// for, in the same run: measurements of the two alternate and medians are compared.
//
// Bandwidth counts the mean of bytes read and written, so that a cast's bound is memcpy's rate.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

#include "bench/pages.h"
#include "bench/report.h"
#include "copy/cpu/executor.h"

namespace bascule::bench {
namespace {

std::string Size(int64_t bytes) {
  if (bytes >= 1 << 20) return fmt::format("{} MiB", bytes >> 20);
  if (bytes >= 1 << 10) return fmt::format("{} KiB", bytes >> 10);
  return fmt::format("{} B", bytes);
}

struct Types {
  DType source = DType::kBF16;
  DType target = DType::kBF16;
};

class CopyBench {
 public:
  CopyBench(uint64_t bytes, int repeats, std::string filter, Report* report)
      : bytes_(static_cast<int64_t>(bytes)),
        source_(bytes),
        target_(bytes),
        repeats_(repeats),
        filter_(std::move(filter)),
        report_(report) {}

  void Run(int threads) {
    executor_ = std::make_unique<CpuExecutor>(threads);
    Copy(Contiguous({}, bytes_ / 2), "one operation", 0.95);
    Copy(Contiguous({}, bytes_ / 2, 1), "one operation, words and vectors apart", 0.90);
    for (int64_t run = 64; run <= 16 << 20; run *= run < 65536 ? 2 : 16) {
      const double target = run < 256 ? 0.0 : (run < 4096 ? 0.5 : 0.9);
      Copy(Rows(run, run, 2 * run), Size(run) + " runs, dense -> strided", target);
      Copy(Rows(run, 2 * run, run), Size(run) + " runs, strided -> dense", target);
    }
    for (int64_t run : {512, 4096, 65536}) {
      Copy(Operations(run), "one operation a run of " + Size(run), run < 65536 ? 0 : 0.9);
    }
    Casts();
    Copy(Transpose(DType::kBF16), "transpose of bf16", 0);
    Copy(Transpose(DType::kF32), "transpose of fp32", 0);
  }

 private:
  static constexpr uint64_t kKey = 0x1234567;

  void Casts() {
    constexpr Types kCasts[] = {{DType::kF32, DType::kBF16},
                                {DType::kBF16, DType::kF32},
                                {DType::kF32, DType::kF16},
                                {DType::kF16, DType::kF32},
                                {DType::kBF16, DType::kF16}};
    for (const Types& types : kCasts) {
      Copy(Contiguous(types, bytes_ / 4),
           fmt::format("{} -> {}", DTypeName(types.source), DTypeName(types.target)),
           Holds(types.target, types.source) || types.source == DType::kF32 ? 0.9 : 0);
    }
  }

  static CopyShape ShapeOf(const Types& types) {
    CopyShape shape;
    shape.source = types.source;
    shape.target = types.target;
    shape.wire = WireDType(types.source, types.target);
    return shape;
  }

  static CopyProgram Contiguous(const Types& types, int64_t elements, int64_t first = 0) {
    CopyShape shape = ShapeOf(types);
    shape.ndim = 1;
    shape.extents = {elements};
    shape.source_strides = {DTypeSize(types.source)};
    shape.target_strides = {DTypeSize(types.target)};
    shape.tensor_strides = {1};
    CopyProgram program;
    program.sums = 1;
    program.Add(shape, {.sum = 0, .tensor_key = kKey, .first_element = first});
    return program;
  }

  CopyProgram Rows(int64_t run, int64_t source_pitch, int64_t target_pitch) const {
    CopyShape shape = ShapeOf({});
    shape.ndim = 2;
    shape.extents = {bytes_ / 2 / run, run / 2};
    shape.source_strides = {source_pitch, 2};
    shape.target_strides = {target_pitch, 2};
    shape.tensor_strides = {run, 1};  // half of each tensor row
    CopyProgram program;
    program.sums = 1;
    program.Add(shape, {.sum = 0, .tensor_key = kKey});
    return program;
  }

  CopyProgram Operations(int64_t run) const {
    CopyShape shape = ShapeOf({});
    shape.ndim = 1;
    shape.extents = {run / 2};
    shape.source_strides = shape.target_strides = {2};
    shape.tensor_strides = {1};
    CopyProgram program;
    program.sums = 16;
    const int64_t count = bytes_ / 2 / run;
    for (int64_t i = 0; i < count; ++i) {
      CopyOp op{.sum = static_cast<uint32_t>(i * 16 / count), .tensor_key = kKey};
      op.source_offset = i * run;
      op.target_offset = i * 2 * run;
      op.first_element = i * run;
      program.Add(shape, op);
    }
    return program;
  }

  CopyProgram Transpose(DType dtype) const {
    const int64_t width = DTypeSize(dtype);
    constexpr int64_t kRows = 4096;
    const int64_t columns = bytes_ / 2 / kRows / width;
    CopyShape shape = ShapeOf({dtype, dtype});
    shape.ndim = 2;
    shape.extents = {kRows, columns};
    shape.source_strides = {columns * width, width};
    shape.target_strides = {width, kRows * width};
    shape.tensor_strides = {columns, 1};
    CopyProgram program;
    program.sums = 1;
    program.Add(shape, {.sum = 0, .tensor_key = kKey});
    return program;
  }

  [[nodiscard]] bool Wanted(const std::string& name) const {
    return name.find(filter_) != std::string::npos;
  }

  void Execute(const CopyProgram& program, bool digest) {
    const ConstMemory from{source_.data(), source_.bytes()};
    const Memory to{target_.data(), target_.bytes()};
    std::vector<Sum> sums(program.sums);
    CpuExecutor::Options options;
    options.digest = digest;
    if (!executor_->Run(program, {&from, 1}, {&to, 1}, sums, options).ok()) std::exit(1);
  }

  // By as many threads, a contiguous part each.
  void Memcpy(int64_t bytes) {
    const int threads = executor_->threads();
    const int64_t part = bytes / threads;
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; ++i) {
      helpers.emplace_back([this, i, part] {
        std::memcpy(target_.data() + i * part, source_.data() + i * part,
                    static_cast<size_t>(part));
      });
    }
    std::memcpy(target_.data(), source_.data(), static_cast<size_t>(part));
    for (std::thread& helper : helpers) helper.join();
  }

  void Copy(const CopyProgram& program, std::string name, double target) {
    name += fmt::format(", {} thread{}", executor_->threads(), executor_->threads() > 1 ? "s" : "");
    if (!Wanted(name)) return;
    const ConstMemory from{source_.data(), source_.bytes()};
    const Memory to{target_.data(), target_.bytes()};
    const Status checked = CheckProgram(program, {&from, 1}, {&to, 1});
    if (!checked.ok()) {
      fmt::print("{}: {}\n", name, checked.ToString());
      std::exit(1);
    }
    const auto moved = static_cast<int64_t>(program.Bytes() / 2);
    std::vector<double> with;
    std::vector<double> without;
    std::vector<double> memcpy_rates;
    for (int i = 0; i <= repeats_; ++i) {
      const double memcpy_seconds = Seconds([&] { Memcpy(moved); });
      const double with_seconds = Seconds([&] { Execute(program, true); });
      const double without_seconds = Seconds([&] { Execute(program, false); });
      if (i == 0) continue;  // warms pages and threads
      const double gigabytes = static_cast<double>(moved) / 1e9;
      memcpy_rates.push_back(gigabytes / memcpy_seconds);
      with.push_back(gigabytes / with_seconds);
      without.push_back(gigabytes / without_seconds);
    }
    Row row{.bench = "copy", .name = name, .value = Median(with), .unit = "GB/s"};
    row.against = "memcpy";
    row.against_value = Median(memcpy_rates);
    if (target > 0) row.target = target;
    report_->Add(row);
    row.name += ", no digest";
    row.value = Median(without);
    row.target.reset();
    report_->Add(row);
  }

  const int64_t bytes_;
  SharedPages source_;
  SharedPages target_;
  const int repeats_;
  const std::string filter_;
  Report* report_;
  std::unique_ptr<CpuExecutor> executor_;
};

}  // namespace
}  // namespace bascule::bench

int main(int argc, char** argv) {
  CLI::App app("Copies and casts of the CPU executor beside libc memcpy, with and without digest");
  std::string json;
  std::string filter;
  uint64_t mebibytes = 512;
  int repeats = 7;
  std::vector<int> threads{1, 2};
  app.add_option("--json", json, "Write the rows to this file");
  app.add_option("--filter", filter, "Only cases whose name contains this");
  app.add_option("--mib", mebibytes, "Size of source and target each")
      ->check(CLI::Range(64, 1 << 16));
  app.add_option("--repeats", repeats, "Measurements of each case")->check(CLI::Range(1, 1000));
  app.add_option("--threads", threads, "Team sizes");
  CLI11_PARSE(app, argc, argv);
  bascule::bench::Report report;
  bascule::bench::CopyBench bench(mebibytes << 20, repeats, filter, &report);
  for (int team : threads) bench.Run(team);
  if (!json.empty() && !report.WriteJson(json)) {
    fmt::print("cannot write {}\n", json);
    return 1;
  }
  return report.AllPassed() ? 0 : 2;
}
