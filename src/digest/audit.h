// The audit's walker: sums of boxes read through a layout's bindings, element run by element run.
// It knows nothing of plans or copy programs and shares no code with them but DigestRun: it is the
// second opinion.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
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

// The sum of `want` (inside memory.box) in wire dtype codes; `shape` is the whole tensor's. Types
// must be castable (dtype.h). Reads host memory only.
//  - Without `inexact`, values are cast to `wire` by the published rule: what a source publishes.
//  - With `inexact`, the memory is what a destination landed: where its dtype holds every value of
//    `wire`, the cast that undoes widening is used (NaN bits are kept), and values that are not
//    values of `wire` are added to *inexact. Their digest then says nothing: a count above 0 is a
//    mismatch.
[[nodiscard]] Sum SumBox(const StridedBox& memory, const Box& want, std::span<const int64_t> shape,
                         DType wire, uint64_t tensor_key, uint64_t* inexact = nullptr);

// Per-tensor sums of a whole layout: sums[i] is over the bindings of tensors[i] in the wire dtype
// wire_of(i), keyed by tensors[i].name. Each element counts once: what several bindings hold must
// be equal in all of them, else the error is kDataLoss naming the tensor. Bindings with a landing
// function are skipped. `selected(i)` false leaves a tensor out. `side` tells how SumBox casts; a
// destination's values that are not values of the wire dtype are kDataLoss too. `cancelled` is
// asked every few MiB; true ends the walk with kAborted. Buffers in device memory are
// kUnimplemented.
[[nodiscard]] Result<std::vector<Sum>> SumLayout(const Layout& layout,
                                                 const std::function<DType(uint32_t)>& wire_of,
                                                 const std::function<bool(uint32_t)>& selected,
                                                 const std::function<bool()>& cancelled = {},
                                                 Side side = Side::kDestination);

// The layer a tensor belongs to, for reports and audit rows: the name up to and including the first
// all-digit component ("model.layers.12"), else the name without its last component ("model" of
// "model.norm"), else, of a name of one component, the name. Stable.
[[nodiscard]] std::string LayerOf(std::string_view tensor_name);

// The tensors that version `version` audits in the background: 1/16 of the names, rotating, so that
// any 16 consecutive versions audit every tensor.
[[nodiscard]] inline bool InRotation(uint64_t tensor_key, uint64_t version) {
  return (Mix64(tensor_key) + version) % 16 == 0;
}

// Sum of the bytes that padding covers in each buffer, for "a commit never changes padding". Host
// memory only.
[[nodiscard]] std::vector<uint64_t> SumPadding(const Layout& layout);

}  // namespace bascule
