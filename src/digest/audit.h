// The audit's walker: sums of boxes read through a layout's bindings, element run by element run.
// It knows nothing of plans or copy programs and shares no code with them but DigestRun: it is the
// second opinion.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/status.h"
#include "digest/digest.h"

namespace bascule {

// One box of a strided memory, as the audit sees it.
struct StridedBox {
  const std::byte* first = nullptr;  // address of the box's first element
  Box box;                           // checkpoint coordinates
  std::array<int64_t, kMaxDims> byte_strides{};
  DType dtype = DType::kF32;
};

// The sum of `want` (inside memory.box) in wire dtype codes: casts the memory's values to `wire` by
// the published rule. `shape` is the whole tensor's. A widened value that does not narrow back
// exactly (memory dtype wider than wire, value not representable) is counted in *inexact when given.
[[nodiscard]] Sum SumBox(const StridedBox& memory, const Box& want, std::span<const int64_t> shape,
                         DType wire, uint64_t tensor_key, uint64_t* inexact = nullptr);

// Per-tensor sums of a whole layout: sums[i] is over every binding of tensors[i] in the wire dtype
// wire_of(i) (overlapping bindings of one tensor: each element once per distinct box; bindings whose
// boxes are equal must have equal sums, else the error is kDataLoss naming the tensor). Bindings
// with a landing function are skipped. `selected(i)` false leaves a tensor out.
[[nodiscard]] Result<std::vector<Sum>> SumLayout(const Layout& layout,
                                                 const std::function<DType(uint32_t)>& wire_of,
                                                 const std::function<bool(uint32_t)>& selected,
                                                 const std::function<bool()>& cancelled = {});

// The layer a tensor belongs to, for reports and audit rows: the name up to and including the first
// all-digit component ("model.layers.12"), or the name without its last component. Stable.
[[nodiscard]] std::string LayerOf(std::string_view tensor_name);

// The tensors that version `version` audits in the background: 1/16 of the names, rotating, so that
// any 16 consecutive versions audit every tensor.
[[nodiscard]] inline bool InRotation(uint64_t tensor_key, uint64_t version) {
  return (Mix64(tensor_key) + version) % 16 == 0;
}

// Sum of the bytes that padding covers, for "a commit never changes padding".
[[nodiscard]] uint64_t SumPadding(const Layout& layout);

}  // namespace bascule
