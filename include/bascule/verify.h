// Compares what live ranks hold, by digests that each computes itself: two ranks with each other,
// or a rank with a checkpoint. For tools; nothing of a session changes. The caller is no member of
// the job. It reaches ranks of its own host.
//
// Functions are thread-safe; they read the ranks' memory in steps of about 64 MiB, so that a rank
// that lands or publishes waits for one step at most.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bascule/deadline.h"
#include "bascule/dtype.h"
#include "bascule/layout.h"
#include "bascule/session.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// Which rank of the job.
struct RankName {
  std::string engine;  // empty: a trainer
  uint32_t rank = 0;
  [[nodiscard]] std::string ToString() const;  // "trainer 3", "engine e0 rank 1"
};
// "trainer:3" or "e0:1"; also as ToString writes them. kInvalidArgument says so.
[[nodiscard]] Result<RankName> ParseRankName(std::string_view text);

// What was compared, and what differs.
struct Comparison {
  VersionId version;
  uint64_t tensors = 0;   // compared, in whole or in part
  uint64_t elements = 0;  // compared
  uint64_t bytes = 0;     // of them, in the dtype that was compared
  // Names, sorted.
  std::vector<std::string> different;
  std::vector<std::string> only_left;   // the right side has no element of them in common
  std::vector<std::string> only_right;  // the same the other way round
  std::vector<std::string> unreadable;  // with landing functions, or dtypes that do not compare
  [[nodiscard]] bool equal() const { return different.empty() && elements > 0; }
};

// How to compare.
struct CompareOptions {
  // Compare as values rounded to this dtype; else in the dtype that crosses: the narrower one.
  std::optional<DType> dtype;
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes; on the calling thread
};

// The boxes that both ranks hold of one version: what a rollout serves and a trainer still holds,
// what two rollouts serve, what `left` holds newest of two trainers. kRetired: they are not at
// one version, or moved on meanwhile. kNotFound: no such member. kUnavailable: the rank cannot be
// reached from here, or serves nothing. kBusy: it was landing until the deadline.
[[nodiscard]] Result<Comparison> CompareRanks(const JobOptions& job, const RankName& left,
                                              const RankName& right, const CompareOptions& options,
                                              Deadline deadline);

// What the rank holds or serves, with a layout of memory here (bascule/safetensors.h makes one of
// checkpoint files). The right side is the checkpoint.
[[nodiscard]] Result<Comparison> CompareWithLayout(const JobOptions& job, const RankName& left,
                                                   const Layout& checkpoint,
                                                   const CompareOptions& options,
                                                   Deadline deadline);

}  // namespace bascule
#pragma GCC visibility pop
