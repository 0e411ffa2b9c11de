// Runs ranges of single copy operations. One per thread; the executor deals the ranges out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/cpu/kernels.h"
#include "copy/program.h"
#include "digest/digest.h"

namespace bascule {

// What is read and written.
enum class RunMode : uint8_t {
  kCopy,
  kDigestSource,
  kDigestTarget,  // reads the target side
};

// A shape, made ready for the kernels.
struct OpPlan {
  // One more than a shape may have: where the last dimension is not consecutive in the tensor (a
  // single column), runs are single elements.
  static constexpr size_t kDims = kMaxDims + 1;
  size_t ndim = 0;  // >= 1
  std::array<int64_t, kDims> extents{};
  std::array<int64_t, kDims> source_strides{};
  std::array<int64_t, kDims> target_strides{};
  std::array<int64_t, kDims> tensor_strides{};
  int64_t elements = 0;
  int64_t source_bytes = 0;  // of an element
  int64_t wire_bytes = 0;
  int64_t target_bytes = 0;
  DType wire = DType::kF32;
  DType target = DType::kF32;
  LandingFunction function = LandingFunction::kNone;
  bool in_two = false;        // wire codes are made first, then landed: a function, or two casts
  bool source_dense = false;  // runs are consecutive in memory
  bool target_dense = false;
  bool narrow_back = false;
  bool store = true;
  int64_t tile_rows = 1;  // where runs are not dense
  int64_t tile_columns = 1;
  int64_t unit = 1;  // elements that a range should be a multiple of
  RowKernel digesting = nullptr;
  RowKernel plain = nullptr;    // null where nothing is stored
  RowKernel landing = nullptr;  // from wire codes, where there are two casts
  int64_t inner() const { return extents[ndim - 1]; }
};

[[nodiscard]] OpPlan PlanOf(const CopyShape& shape, RunMode mode);

class OpRunner {
 public:
  OpRunner(const CopyProgram& program, RunMode mode, bool stream);

  // Elements [begin, end) of the operation, in the order of its plan. Returns their sum: zero
  // where `digest` is false.
  [[nodiscard]] Sum Run(const CopyOp& op, const std::byte* source, std::byte* target, int64_t begin,
                        int64_t end, bool digest);
  [[nodiscard]] const OpPlan& PlanFor(uint32_t shape);

  // Prefetches what the operation reads first, at most `most_bytes`; returns how much that is.
  int64_t Prefetch(const CopyOp& op, const std::byte* source, int64_t most_bytes) const;

 private:
  struct Position {
    const std::byte* source;
    std::byte* target;
    int64_t first;
  };
  [[nodiscard]] Position At(const CopyOp& op, const std::byte* source, std::byte* target,
                            int64_t row, int64_t column, int64_t* rows_left) const;
  [[nodiscard]] Sum Rows(const Position& at, int64_t rows, int64_t run, uint64_t tensor_key);
  [[nodiscard]] Sum DenseRows(const RowBlock& block);
  [[nodiscard]] Position TileAt(const Position& at, int64_t row, int64_t column) const;
  void PrefetchTileAt(const Position& at, int64_t rows, int64_t columns) const;
  [[nodiscard]] Sum Tile(const Position& at, int64_t rows, int64_t run, uint64_t tensor_key);
  void Gather(RowBlock* block);
  void Scatter(const RowBlock& block, std::byte* target);
  [[nodiscard]] RowBlock Turned(const RowBlock& block, int64_t width, int64_t line_stride);
  [[nodiscard]] Sum InTwo(const RowBlock& block);
  void LandRow(const std::byte* wire, std::byte* target, int64_t count) const;

  const CopyProgram& program_;
  const RunMode mode_;
  const bool stream_;
  bool digest_ = false;
  uint32_t planned_ = kNoSum;
  OpPlan plan_;
  RowKernel turning_ = nullptr;  // copies lines of transposed tiles
  std::vector<std::byte> turned_;
  std::vector<std::byte> gathered_;   // a tile in the source's dtype
  std::vector<std::byte> wire_;       // ... in wire codes, where in_two
  std::vector<std::byte> scattered_;  // ... in the target's dtype
};

}  // namespace bascule
