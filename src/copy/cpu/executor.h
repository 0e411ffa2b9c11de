// Runs copy programs on the CPU.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bascule/deadline.h"
#include "bascule/status.h"
#include "copy/program.h"

namespace bascule {

// A fixed team of threads that runs copy programs, split by bytes. Every method may be called
// from one thread at a time; Run uses the caller's thread as one of the team. Threads sleep when
// idle and are joined by the destructor.
class CpuExecutor {
 public:
  // threads >= 1; 1 starts none beside the caller. Where the system gives fewer, the team is
  // smaller.
  explicit CpuExecutor(int threads);
  ~CpuExecutor();
  CpuExecutor(const CpuExecutor&) = delete;
  CpuExecutor& operator=(const CpuExecutor&) = delete;

  struct Options {
    bool digest = true;  // false: sums are left alone
    // Operations [first, last) of the program only.
    uint32_t first_op = 0;
    uint32_t last_op = 0xFFFFFFFF;
    // Asked between slices of a few MiB, on the caller's thread only; true ends the run early with
    // kAborted.
    std::function<bool()> cancelled;
  };

  // Copies, casts and digests. sums[i] += the sum of the wire codes read for operation sum i
  // (the caller zeroes). Programs must have passed CheckProgram with the same bases. Source and
  // target must not overlap. Non-temporal stores are used where the run's total exceeds the
  // last-level cache.
  [[nodiscard]] Status Run(const CopyProgram& program, std::span<const ConstMemory> sources,
                           std::span<const Memory> targets, std::span<Sum> sums,
                           const Options& options);
  [[nodiscard]] Status Run(const CopyProgram& program, std::span<const ConstMemory> sources,
                           std::span<const Memory> targets, std::span<Sum> sums) {
    return Run(program, sources, targets, sums, Options());
  }

  // Reads only: sums of the wire codes that the *source* side holds (an arena being digested).
  [[nodiscard]] Status DigestSources(const CopyProgram& program,
                                     std::span<const ConstMemory> sources, std::span<Sum> sums,
                                     const Options& options);

  // Reads only: sums of what the *target* side holds, narrowed back to wire codes (NaN bits too:
  // the widening cast is undone, unlike by the published narrowing). Widened values that do not
  // narrow back exactly change the sum: they are left out of its element count. Operations with a
  // landing function are skipped.
  [[nodiscard]] Status DigestTargets(const CopyProgram& program, std::span<const Memory> targets,
                                     std::span<Sum> sums, const Options& options);

  [[nodiscard]] int threads() const;

 private:
  class Team;
  std::unique_ptr<Team> team_;
};

// Casts one value by the published rule (dtype.h); codes are in the low bits. For tests and tools.
[[nodiscard]] uint32_t CastCode(uint32_t code, DType from, DType to);

}  // namespace bascule
