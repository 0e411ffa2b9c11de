#include "copy/cpu/executor.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

#include "copy/cpu/kernels.h"
#include "copy/cpu/op_runner.h"

namespace bascule {
namespace {

// Bytes read and written by one slice: small enough to share evenly and to cancel soon, large
// enough that dealing it out costs nothing.
constexpr int64_t kMostSliceBytes = int64_t{4} << 20;
constexpr int64_t kLeastSliceBytes = int64_t{128} << 10;
constexpr int64_t kSlicesPerThread = 8;
constexpr int64_t kAssumedCacheBytes = int64_t{2} << 20;  // of one CPU

// The number of CPUs in a list such as "0-3,8,10-11"; at least 1.
int64_t CountCpus(const std::string& list) {
  int64_t count = 0;
  std::stringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    long first = 0;
    long last = 0;
    const int read = std::sscanf(part.c_str(), "%ld-%ld", &first, &last);
    count += read == 2 ? last - first + 1 : (read == 1 ? 1 : 0);
  }
  return std::max<int64_t>(1, count);
}

// The last-level cache that one of the CPUs which share it can count on; the kernel's view first:
// in virtual machines, sysconf reports the host's cache.
int64_t CacheBytesOfOneCpu() {
  for (int index = 4; index >= 2; --index) {
    const std::string folder =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    int64_t kibibytes = 0;
    std::string cpus;
    if (!(std::ifstream(folder + "size") >> kibibytes) || kibibytes <= 0) continue;
    std::ifstream(folder + "shared_cpu_list") >> cpus;
    return (kibibytes << 10) / CountCpus(cpus);
  }
#ifdef _SC_LEVEL3_CACHE_SIZE
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const long cpus = sysconf(_SC_NPROCESSORS_CONF);
  if (bytes > 0 && cpus > 0) return bytes / cpus;
#endif
  return kAssumedCacheBytes;
}

// What is written beyond this is streamed past the caches: with plain stores each line would be
// read before it is written. Three quarters of one CPU's share, as glibc's memcpy has it.
int64_t StreamBeyondBytes() {
  static const int64_t kBytes = std::max<int64_t>(1 << 20, CacheBytesOfOneCpu() / 4 * 3);
  return kBytes;
}

// Operations [first, last), or elements [begin, end) of the one operation `first`.
struct Slice {
  uint32_t first;
  uint32_t last;
  int64_t begin;
  int64_t end;  // 0: whole operations
};

struct Job {
  const CopyProgram& program;
  std::span<const ConstMemory> sources;
  std::span<const Memory> targets;
  std::span<Sum> sums;
  RunMode mode;
  bool digest;
  bool stream = false;
  std::vector<Slice> slices{};
  std::atomic<size_t> next{0};
  std::atomic<bool> cancelled{false};
};

// Adds up the sums of operations that follow one another, so that threads seldom meet.
class SumWriter {
 public:
  explicit SumWriter(std::span<Sum> sums) : sums_(sums) {}
  ~SumWriter() { Flush(); }
  SumWriter(const SumWriter&) = delete;
  SumWriter& operator=(const SumWriter&) = delete;

  void Add(uint32_t index, const Sum& sum) {
    if (index != index_) {
      Flush();
      index_ = index;
    }
    pending_ += sum;
  }

 private:
  void Flush() {
    if (index_ != kNoSum) {
      Sum& sum = sums_[index_];
      std::atomic_ref(sum.digest).fetch_add(pending_.digest, std::memory_order_relaxed);
      std::atomic_ref(sum.elements).fetch_add(pending_.elements, std::memory_order_relaxed);
    }
    pending_ = Sum();
  }

  std::span<Sum> sums_;
  uint32_t index_ = kNoSum;
  Sum pending_;
};

int64_t ElementsOf(const CopyShape& shape) {
  int64_t elements = 1;
  for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) elements *= shape.extents[d];
  return elements;
}

int64_t ElementBytes(const CopyShape& shape, RunMode mode) {
  switch (mode) {
    case RunMode::kCopy: return DTypeSize(shape.source) + DTypeSize(shape.target);
    case RunMode::kDigestSource: return DTypeSize(shape.source);
    case RunMode::kDigestTarget: return DTypeSize(shape.target);
  }
  return 1;
}

class Slicer {
 public:
  Slicer(const CopyProgram& program, RunMode mode, uint32_t first_op, uint32_t last_op)
      : program_(program), mode_(mode), first_op_(first_op), last_op_(last_op) {}

  void Cut(int threads, Job* job) {
    int64_t total = 0;
    int64_t written = 0;
    for (uint32_t i = first_op_; i < last_op_; ++i) {
      const CopyShape& shape = program_.shapes[program_.ops[i].shape];
      const int64_t elements = ElementsOf(shape);
      total += elements * ElementBytes(shape, mode_);
      written += elements * DTypeSize(shape.target);
    }
    job->stream = mode_ == RunMode::kCopy && written > StreamBeyondBytes();
    slice_bytes_ =
        std::clamp(total / (threads * kSlicesPerThread), kLeastSliceBytes, kMostSliceBytes);
    for (uint32_t i = first_op_; i < last_op_; ++i) Take(i, job);
    Close(last_op_, job);
  }

 private:
  void Take(uint32_t index, Job* job) {
    const CopyShape& shape = program_.shapes[program_.ops[index].shape];
    const int64_t elements = ElementsOf(shape);
    const int64_t element_bytes = ElementBytes(shape, mode_);
    const int64_t bytes = elements * element_bytes;
    if (bytes < 2 * slice_bytes_) {
      open_bytes_ += bytes;
      if (open_bytes_ >= slice_bytes_) Close(index + 1, job);
      return;
    }
    Close(index, job);
    const int64_t unit = PlanOf(shape, mode_).unit;
    const int64_t units = std::max<int64_t>(1, slice_bytes_ / (unit * element_bytes));
    const int64_t step = units * unit;
    for (int64_t begin = 0; begin < elements; begin += step) {
      job->slices.push_back({index, index + 1, begin, std::min(elements, begin + step)});
    }
    first_op_ = index + 1;
  }

  void Close(uint32_t end, Job* job) {
    if (end > first_op_) job->slices.push_back({first_op_, end, 0, 0});
    first_op_ = end;
    open_bytes_ = 0;
  }

  const CopyProgram& program_;
  const RunMode mode_;
  uint32_t first_op_;  // of the slice that is open
  const uint32_t last_op_;
  int64_t slice_bytes_ = 0;
  int64_t open_bytes_ = 0;
};

class JobWorker {
 public:
  explicit JobWorker(Job& job)
      : job_(job), runner_(job.program, job.mode, job.stream), sums_(job.sums) {}

  void Run(const std::function<bool()>* cancelled) {
    while (!job_.cancelled.load(std::memory_order_relaxed)) {
      if (cancelled != nullptr && *cancelled && (*cancelled)()) {
        job_.cancelled.store(true, std::memory_order_relaxed);
        break;
      }
      const size_t index = job_.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= job_.slices.size()) break;
      RunSlice(job_.slices[index]);
    }
    if (job_.stream) FlushStores();
  }

 private:
  void RunSlice(const Slice& slice) {
    uint32_t next = slice.first + 1;  // the first operation that is not prefetched yet
    int64_t ahead = 0;                // bytes that are prefetched and not used yet
    for (uint32_t i = slice.first; i < slice.last; ++i) {
      const CopyOp& op = job_.program.ops[i];
      for (; next < slice.last && ahead < kAheadBytes; ++next) {
        const CopyOp& later = job_.program.ops[next];
        fetched_[next % kAheadOps] =
            static_cast<int32_t>(runner_.Prefetch(later, ReadFrom(later), kAheadBytes));
        ahead += fetched_[next % kAheadOps];
      }
      if (i > slice.first) ahead -= fetched_[i % kAheadOps];
      const CopyShape& shape = job_.program.shapes[op.shape];
      const bool digest = job_.digest && op.sum != kNoSum;
      if (job_.mode == RunMode::kDigestTarget && shape.function != LandingFunction::kNone) continue;
      if (job_.mode != RunMode::kCopy && !digest) continue;
      const int64_t end = slice.end == 0 ? runner_.PlanFor(op.shape).elements : slice.end;
      const Sum sum = runner_.Run(op, ReadFrom(op), WriteTo(op), slice.begin, end, digest);
      if (digest) sums_.Add(op.sum, sum);
    }
  }

  const std::byte* ReadFrom(const CopyOp& op) const {
    if (job_.mode == RunMode::kDigestTarget) {
      return job_.targets[op.target_base].data + op.target_offset;
    }
    return job_.sources[op.source_base].data + op.source_offset;
  }

  std::byte* WriteTo(const CopyOp& op) const {
    if (job_.mode != RunMode::kCopy) return nullptr;
    return job_.targets[op.target_base].data + op.target_offset;
  }

  // Operations that follow one another may lie anywhere, which no hardware prefetcher foresees.
  static constexpr int64_t kAheadBytes = 8192;
  static constexpr size_t kAheadOps = 256;  // more than fit: each counts a cache line at least

  Job& job_;
  OpRunner runner_;
  SumWriter sums_;
  std::array<int32_t, kAheadOps> fetched_{};
};

}  // namespace

class CpuExecutor::Team {
 public:
  explicit Team(int threads) {
    threads_.reserve(static_cast<size_t>(threads));
    // A system that gives no more threads gives a smaller team.
    try {
      for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Serve(); });
    } catch (const std::system_error&) {
      return;
    }
  }

  ~Team() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  [[nodiscard]] int size() const { return static_cast<int>(threads_.size()) + 1; }

  Status Run(Job& job, uint32_t first_op, uint32_t last_op,
             const std::function<bool()>& cancelled) {
    const bool sums_missing = job.digest && job.sums.size() < job.program.sums;
    if (sums_missing) return Status(Code::kInvalidArgument, "copy program needs more sums");
    last_op = std::min(last_op, static_cast<uint32_t>(job.program.ops.size()));
    Slicer(job.program, job.mode, std::min(first_op, last_op), last_op).Cut(size(), &job);
    const bool alone = threads_.empty() || job.slices.size() < 2;
    if (!alone) Start(&job);
    JobWorker(job).Run(&cancelled);
    if (!alone) Join();
    if (job.cancelled.load()) return Status(Code::kAborted, "copy program cancelled");
    return Status::Ok();
  }

 private:
  void Start(Job* job) {
    {
      std::lock_guard lock(mutex_);
      job_ = job;
      ++generation_;
      busy_ = threads_.size();
    }
    wake_.notify_all();
  }

  void Join() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

  void Serve() {
    uint64_t served = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return closing_ || generation_ != served; });
      if (closing_) return;
      served = generation_;
      Job* const job = job_;
      lock.unlock();
      JobWorker(*job).Run(nullptr);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  size_t busy_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

CpuExecutor::CpuExecutor(int threads) : team_(std::make_unique<Team>(std::max(1, threads))) {}
CpuExecutor::~CpuExecutor() = default;

int CpuExecutor::threads() const { return team_->size(); }

Status CpuExecutor::Run(const CopyProgram& program, std::span<const ConstMemory> sources,
                        std::span<const Memory> targets, std::span<Sum> sums,
                        const Options& options) {
  Job job{program, sources, targets, sums, RunMode::kCopy, options.digest};
  return team_->Run(job, options.first_op, options.last_op, options.cancelled);
}

Status CpuExecutor::DigestSources(const CopyProgram& program, std::span<const ConstMemory> sources,
                                  std::span<Sum> sums, const Options& options) {
  Job job{program, sources, {}, sums, RunMode::kDigestSource, options.digest};
  return team_->Run(job, options.first_op, options.last_op, options.cancelled);
}

Status CpuExecutor::DigestTargets(const CopyProgram& program, std::span<const Memory> targets,
                                  std::span<Sum> sums, const Options& options) {
  Job job{program, {}, targets, sums, RunMode::kDigestTarget, options.digest};
  return team_->Run(job, options.first_op, options.last_op, options.cancelled);
}

}  // namespace bascule
