// Transposing small tiles of elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bascule {

// Element i of each of `lines` source lines becomes line i of the target: target line i consists of
// `lines` elements. Both lines are consecutive in memory, and `source_stride` and `target_stride`
// bytes apart; elements have `width` (1, 2, 4 or 8) bytes.
void TransposeTile(int64_t width, const std::byte* source, int64_t source_stride, int64_t lines,
                   int64_t length, std::byte* target, int64_t target_stride);

}  // namespace bascule
