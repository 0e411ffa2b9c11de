// Two-sided coverage: does what the sources hold fill what an engine needs, and does the engine
// want what the sources hold? Checked for each engine when it connects.
//
// Names are resolved by the source's aliases: a destination tensor that the source knows as an
// alias is read from its target. What the engine ties (an alias and its target) the sources must
// tie too, or not know by both names: else one of two different tensors would be dropped.
#pragma once

#include <span>
#include <vector>

#include "bascule/status.h"
#include "layout/world_template.h"

namespace bascule {

// A rank's place in a world. `world` is borrowed, valid, and outlives the call.
struct WorldMember {
  const WorldTemplate* world = nullptr;
  std::vector<uint32_t> coordinates;
};

// Checks one engine's members against all source members:
//   NotFound         a tensor that no source holds or aliases
//   InvalidArgument  shapes differ, or the publish dtype cannot be cast to the destination's; an
//                    element that no source holds; a name that the engine ties to another, while
//                    the sources hold two tensors; a source tensor that no member of the engine
//                    wants and that is not declared unused
// The error names up to five tensors of the first kind that occurs, and how many there are.
// Cost: a comparison of boxes for each pair of classes, not for each tensor.
[[nodiscard]] Status CheckCoverage(std::span<const WorldMember> sources,
                                   std::span<const WorldMember> engine);

// Whether a pattern names a tensor: equal, or equal up to a trailing '*'.
[[nodiscard]] bool MatchesPattern(std::string_view pattern, std::string_view name);

}  // namespace bascule
