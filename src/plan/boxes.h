// Box algebra of the planner: ranges of a box's row-major order, refinement of overlapping boxes to
// cells, lookup of the cells that a box meets, and a table of distinct boxes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bascule/layout.h"

namespace bascule::plan {

inline constexpr uint32_t kNone = 0xFFFFFFFF;

// Appends the elements [first, last) of the box's row-major order as boxes, in that order: at most
// 2 * ndim - 1 of them.
void AppendRange(const Box& box, int64_t first, int64_t last, std::vector<Box>* boxes);

// The largest product of trailing extents that is at most `limit` elements; at least 1. A cut at a
// multiple of it leaves few boxes.
[[nodiscard]] int64_t CutGrain(const Box& box, int64_t limit);

// A line is `box` of several tensors, one after the other. Moves a cut (an element of the line) to
// the nearest tensor boundary where that is nearer than whole_bytes / 2, else to a multiple of a
// grain of at most whole_bytes. So boxes below whole_bytes are never cut. Monotone in `cut`.
[[nodiscard]] int64_t SnapCut(const Box& box, int64_t cut, uint64_t element_bytes,
                              uint64_t whole_bytes);

struct OwnedBox {
  Box box;
  uint32_t owner = 0;
};

// Disjoint boxes; the set of owners is constant over each. Owners of cell i are
// owners[offsets[i] .. offsets[i + 1]), sorted and unique.
struct Cells {
  std::vector<Box> boxes;
  std::vector<uint32_t> offsets{0};
  std::vector<uint32_t> owners;
  [[nodiscard]] std::span<const uint32_t> OwnersOf(size_t cell) const {
    return {owners.data() + offsets[cell], owners.data() + offsets[cell + 1]};
  }
};

// The common refinement of non-empty boxes of equal ndim. Boxes that are equal or disjoint stay as
// they are; only groups of boxes that overlap each other are cut.
[[nodiscard]] Cells Refine(std::vector<OwnedBox> boxes);

// Finds the boxes of a disjoint set that meet a given box. Takes them in any order and reorders.
class BoxIndex {
 public:
  BoxIndex() = default;
  // `order[i]` is where the i-th box stood in `boxes`.
  explicit BoxIndex(std::vector<Box> boxes, std::vector<uint32_t>* order);

  [[nodiscard]] const std::vector<Box>& boxes() const { return boxes_; }
  [[nodiscard]] int64_t elements() const { return elements_; }
  // Calls visit(index, common part) for each box that meets `box`, in index order.
  template <typename Visit>
  void ForEachOverlap(const Box& box, Visit&& visit) const {
    auto [first, last] = Range(box);
    for (size_t i = first; i < last; ++i) {
      Box common = boxes_[i].Intersect(box);
      if (!common.empty()) visit(static_cast<uint32_t>(i), common);
    }
  }

 private:
  // Indices outside of the range cannot meet the box.
  [[nodiscard]] std::pair<size_t, size_t> Range(const Box& box) const;

  int sweep_ = -1;  // boxes are sorted by their begin in this dimension; -1: no dimensions
  std::vector<Box> boxes_;
  std::vector<int64_t> max_end_;  // of boxes 0..i, in the sweep dimension
  int64_t elements_ = 0;
};

// Distinct boxes, numbered in order of first use.
class BoxTable {
 public:
  uint32_t Intern(const Box& box);
  [[nodiscard]] const Box& operator[](uint32_t index) const { return boxes_[index]; }
  [[nodiscard]] size_t size() const { return boxes_.size(); }
  [[nodiscard]] std::vector<Box> Take() && { return std::move(boxes_); }

 private:
  void Grow();
  std::vector<Box> boxes_;
  std::vector<uint32_t> slots_;  // open addressing; kNone is empty
};

}  // namespace bascule::plan
