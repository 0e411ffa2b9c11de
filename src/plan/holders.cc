#include "plan/holders.h"

#include <algorithm>
#include <numeric>

namespace bascule::plan {
namespace {

constexpr int kMaxPasses = 64;

uint64_t HashOf(std::span<const uint32_t> members) {
  uint64_t hash = members.size();
  for (uint32_t member : members) {
    hash = (hash ^ member) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 32;
  }
  return hash;
}

// Pours `shares->total` over its holders: those with the least load are raised to one level.
void Pour(Shares* shares, const std::vector<uint64_t>& load) {
  std::vector<uint32_t> order(shares->holders.size());
  std::iota(order.begin(), order.end(), 0U);
  auto load_of = [&](uint32_t i) { return load[shares->holders[i]]; };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(load_of(a), a) < std::pair(load_of(b), b);
  });
  // Raise the first `wet` holders to the load of the next while the bytes last.
  uint64_t left = shares->total;
  size_t wet = 1;
  uint64_t level = load_of(order[0]);
  for (; wet < order.size(); ++wet) {
    const uint64_t rise = load_of(order[wet]) - level;
    if (rise > left / wet) break;
    left -= rise * wet;
    level = load_of(order[wet]);
  }
  level += left / wet;
  const uint64_t rest = left % wet;
  std::fill(shares->bytes.begin(), shares->bytes.end(), 0);
  for (size_t i = 0; i < wet; ++i) {
    shares->bytes[order[i]] = level - load_of(order[i]) + (i < rest ? 1 : 0);
  }
}

// Returns how many bytes moved from one holder to another.
uint64_t PourAgain(Shares* shares, std::vector<uint64_t>* load) {
  const std::vector<uint64_t> before = shares->bytes;
  for (size_t i = 0; i < before.size(); ++i) (*load)[shares->holders[i]] -= before[i];
  Pour(shares, *load);
  uint64_t moved = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    (*load)[shares->holders[i]] += shares->bytes[i];
    if (shares->bytes[i] > before[i]) moved += shares->bytes[i] - before[i];
  }
  return moved;
}

}  // namespace

uint32_t HolderSets::Intern(std::span<const uint32_t> members) {
  const uint64_t hash = HashOf(members);
  auto [first, last] = by_hash_.equal_range(hash);
  for (auto at = first; at != last; ++at) {
    auto known = MembersOf(at->second);
    if (std::equal(known.begin(), known.end(), members.begin(), members.end())) return at->second;
  }
  const uint32_t set = size();
  members_.insert(members_.end(), members.begin(), members.end());
  offsets_.push_back(members_.size());
  by_hash_.emplace(hash, set);
  return set;
}

void BalanceShares(std::vector<Shares>* groups, std::vector<uint64_t>* load) {
  std::vector<uint32_t> order(groups->size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return (*groups)[a].holders.size() < (*groups)[b].holders.size();
  });
  for (Shares& shares : *groups) shares.bytes.assign(shares.holders.size(), 0);
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    uint64_t moved = 0;
    for (uint32_t i : order) moved += PourAgain(&(*groups)[i], load);
    const uint64_t worst = load->empty() ? 0 : *std::max_element(load->begin(), load->end());
    if (moved <= worst / 4096) break;
  }
}

}  // namespace bascule::plan
