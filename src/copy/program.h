// Copy programs: a batch of strided N-d copies with casts and digests, run in one go.
//
// The format is what every executor (cpu/ here, cuda/ later) takes. Building a program is pure;
// running it is the executor's part.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bascule/dtype.h"
#include "bascule/layout.h"
#include "bascule/status.h"
#include "digest/digest.h"

namespace bascule {

inline constexpr uint32_t kNoSum = 0xFFFFFFFF;

// What many operations share. Dimensions are those of a box in checkpoint coordinates, row-major,
// outermost first. Dimensions of extent 1 may be dropped; adjacent ones merged (Normalize).
struct CopyShape {
  int32_t ndim = 0;
  std::array<int64_t, kMaxDims> extents{};         // elements
  std::array<int64_t, kMaxDims> source_strides{};  // bytes
  std::array<int64_t, kMaxDims> target_strides{};  // bytes
  std::array<int64_t, kMaxDims> tensor_strides{};  // elements of the logical tensor, row-major
  DType source = DType::kF32;
  DType wire = DType::kF32;  // the digest is over these codes
  DType target = DType::kF32;
  LandingFunction function = LandingFunction::kNone;  // applied between wire and target, in fp32
  friend bool operator==(const CopyShape&, const CopyShape&) = default;
};

// One strided copy: target = function(cast(source)).
struct CopyOp {
  uint32_t shape = 0;        // index in CopyProgram::shapes
  uint32_t source_base = 0;  // index in the bases given at run time
  uint32_t target_base = 0;
  uint32_t sum = kNoSum;      // index of the sum that the codes of this operation are added to
  int64_t source_offset = 0;  // bytes from the base to the box's first element
  int64_t target_offset = 0;
  uint64_t tensor_key = 0;
  int64_t first_element = 0;  // of the box, in checkpoint order
};

struct CopyProgram {
  std::vector<CopyShape> shapes;
  std::vector<CopyOp> ops;
  uint32_t sums = 0;  // how many sums the operations write to

  // Appends an operation, normalizing (dropping extents of 1, merging dimensions that are
  // contiguous in source, target and tensor alike) and interning its shape. Empty boxes vanish.
  void Add(const CopyShape& shape, CopyOp op);
  // Bytes read plus bytes written by one run.
  [[nodiscard]] uint64_t Bytes() const;

 private:
  [[nodiscard]] uint32_t Intern(const CopyShape& shape);
  void RebuildIndex(size_t slots);

  // Add's open-addressed hash table of shape indices; rebuilt when `shapes` was changed by hand.
  std::vector<uint32_t> index_;
  size_t indexed_ = 0;
};

// A base with its size, so that a program can be checked before it runs.
struct ConstMemory {
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
};
struct Memory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

// Every operation lies inside its bases, dtypes are castable, sums are in range. The error names
// the tensor where `name_of` tells the name that goes with a key.
[[nodiscard]] Status CheckProgram(const CopyProgram& program, std::span<const ConstMemory> sources,
                                  std::span<const Memory> targets,
                                  const std::function<std::string(uint64_t)>& name_of = {});

}  // namespace bascule
