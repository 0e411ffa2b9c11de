// Who holds what: the sets of holders, the cells over which they are constant, and how the bytes of
// a set are shared among its members.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "plan/boxes.h"

namespace bascule::plan {

// Distinct sets of members. Numbered in order of first use.
class HolderSets {
 public:
  // `members` are sorted and unique.
  uint32_t Intern(std::span<const uint32_t> members);
  [[nodiscard]] std::span<const uint32_t> MembersOf(uint32_t set) const {
    return {members_.data() + offsets_[set], members_.data() + offsets_[set + 1]};
  }
  [[nodiscard]] uint32_t size() const { return static_cast<uint32_t>(offsets_.size() - 1); }

 private:
  std::vector<uint32_t> members_;
  std::vector<size_t> offsets_{0};
  std::unordered_multimap<uint64_t, uint32_t> by_hash_;  // only looked up, never walked
};

// The cells of one source tuple.
struct HolderCells {
  BoxIndex index;
  std::vector<uint32_t> set;  // per box of the index
};

// The bytes that needers fetch from a set of holders, and each holder's share of them.
struct Shares {
  std::vector<uint32_t> holders;  // member ids, sorted; two or more
  std::vector<uint64_t> bytes;    // per holder; sums to `total`
  uint64_t total = 0;
};

// Fills each group's `bytes` so that the loads, with the fixed `load` of every member, come as near
// to equal as the sets allow. Fewest holders first, then in the order given; each pass takes a
// group's bytes back and pours them anew, from the least loaded holder up; ties by id. Ends when a
// pass moves next to nothing. `load` is updated.
void BalanceShares(std::vector<Shares>* groups, std::vector<uint64_t>* load);

}  // namespace bascule::plan
