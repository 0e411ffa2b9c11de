// The least possible largest load, by maximum flow and binary search.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace bascule::testing {

// Bytes that any of a set of holders can serve.
using Demands = std::map<std::vector<uint32_t>, uint64_t>;

// The least L such that every demand can be split over its holders with no load above L.
uint64_t LeastLargestLoad(const Demands& demands);

}  // namespace bascule::testing
