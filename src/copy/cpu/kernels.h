// The inner loops of the CPU executor: rows of consecutive elements, copied, cast and digested in
// one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bascule/dtype.h"

namespace bascule {

// `rows` runs of `run` elements. Within a run, source, target and tensor are all consecutive.
struct RowBlock {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;  // not used by kernels that only digest
  int64_t run = 0;              // elements
  int64_t element_bytes = 1;    // of the source; for kernels that do not cast
  int64_t rows = 1;
  int64_t source_stride = 0;  // bytes from row to row
  int64_t target_stride = 0;  // bytes
  int64_t tensor_stride = 0;  // elements
  int64_t first = 0;          // of the first row, in checkpoint order
  uint64_t tensor_key = 0;
  bool stream = false;  // non-temporal stores, where the target's alignment allows
};

// Returns the digest of the wire codes (0 where the kernel does not digest).
using RowKernel = uint64_t (*)(const RowBlock&);

struct KernelSpec {
  DType source = DType::kF32;
  DType wire = DType::kF32;
  DType target = DType::kF32;
  bool digest = true;
  bool store = true;  // false: only digest
  // The source holds landed values of the wire dtype widened to `source`: undo exactly that, which
  // for NaNs is not the published narrowing cast. Only with store == false.
  bool narrow_back = false;
};

// The kernel for this machine, or null where a cast is not defined. A kernel casts once: storing
// with a wire dtype that is neither the source's nor the target's takes two.
[[nodiscard]] RowKernel FindRowKernel(const KernelSpec& spec);

// How many of `count` consecutive fp32 values are not values of `narrow` (bf16 or fp16).
[[nodiscard]] int64_t CountInexact(const std::byte* values, int64_t count, DType narrow);

// After the last row of a slice: makes non-temporal stores visible before what follows.
void FlushStores();

}  // namespace bascule
