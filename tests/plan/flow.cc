#include "tests/plan/flow.h"

#include <algorithm>
#include <queue>

namespace bascule::testing {
namespace {

// Edmonds-Karp: shortest augmenting paths. Small graphs only.
class Flow {
 public:
  explicit Flow(size_t vertices) : edges_of_(vertices) {}

  void AddEdge(size_t from, size_t to, uint64_t capacity) {
    edges_of_[from].push_back(edges_.size());
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
  }

  uint64_t Maximum(size_t from, size_t to) {
    uint64_t total = 0;
    while (true) {
      std::vector<size_t> via(edges_of_.size(), kNoEdge);
      std::queue<size_t> next;
      next.push(from);
      while (!next.empty() && via[to] == kNoEdge) {
        const size_t at = next.front();
        next.pop();
        for (size_t e : edges_of_[at]) {
          if (edges_[e].left == 0 || via[edges_[e].to] != kNoEdge || edges_[e].to == from) continue;
          via[edges_[e].to] = e;
          next.push(edges_[e].to);
        }
      }
      if (via[to] == kNoEdge) return total;
      uint64_t amount = ~uint64_t{0};
      for (size_t v = to; v != from; v = edges_[via[v] ^ 1].to) {
        amount = std::min(amount, edges_[via[v]].left);
      }
      for (size_t v = to; v != from; v = edges_[via[v] ^ 1].to) {
        edges_[via[v]].left -= amount;
        edges_[via[v] ^ 1].left += amount;
      }
      total += amount;
    }
  }

 private:
  static constexpr size_t kNoEdge = ~size_t{0};
  struct Edge {
    size_t to;
    uint64_t left;
  };
  std::vector<Edge> edges_;  // edge e and its reverse e ^ 1
  std::vector<std::vector<size_t>> edges_of_;
};

bool Feasible(const Demands& demands, uint64_t limit, uint64_t total) {
  uint32_t holders = 0;
  for (const auto& [set, bytes] : demands) holders = std::max(holders, set.back() + 1);
  const size_t source = demands.size() + holders;
  const size_t sink = source + 1;
  Flow flow(sink + 1);
  size_t d = 0;
  for (const auto& [set, bytes] : demands) {
    flow.AddEdge(source, d, bytes);
    for (uint32_t holder : set) flow.AddEdge(d, demands.size() + holder, bytes);
    ++d;
  }
  for (uint32_t h = 0; h < holders; ++h) flow.AddEdge(demands.size() + h, sink, limit);
  return flow.Maximum(source, sink) == total;
}

}  // namespace

uint64_t LeastLargestLoad(const Demands& demands) {
  uint64_t total = 0;
  for (const auto& [set, bytes] : demands) total += bytes;
  uint64_t low = 0;
  uint64_t high = total;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (Feasible(demands, middle, total)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace bascule::testing
