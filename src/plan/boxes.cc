#include "plan/boxes.h"

#include <algorithm>
#include <numeric>

namespace bascule::plan {
namespace {

int64_t TrailingSize(const Box& box, int dim) {
  int64_t size = 1;
  for (int d = dim; d < box.ndim(); ++d) size *= box[d].size();
  return size;
}

// Appends [first, last) of the order of `box`, whose dimensions before `dim` have extent 1.
void AppendRangeFrom(Box box, int dim, int64_t first, int64_t last, std::vector<Box>* boxes) {
  if (first >= last) return;
  if (dim == box.ndim()) {
    boxes->push_back(box);
    return;
  }
  const int64_t inner = TrailingSize(box, dim + 1);
  const int64_t begin = box[dim].begin;
  auto fixed = [&](int64_t from, int64_t to) {
    Box part = box;
    part[dim] = {begin + from, begin + to};
    return part;
  };
  int64_t row = first / inner;
  const int64_t last_row = last / inner;
  if (row == last_row) {
    AppendRangeFrom(fixed(row, row + 1), dim + 1, first % inner, last % inner, boxes);
    return;
  }
  if (first % inner != 0) {
    AppendRangeFrom(fixed(row, row + 1), dim + 1, first % inner, inner, boxes);
    ++row;
  }
  if (row < last_row) boxes->push_back(fixed(row, last_row));
  AppendRangeFrom(fixed(last_row, last_row + 1), dim + 1, 0, last % inner, boxes);
}

// The dimension in which the boxes have most distinct begins: boxes of one sharded tensor hardly
// overlap along it. -1 where there are no dimensions.
int SweepDimension(const std::vector<Box>& boxes) {
  if (boxes.empty()) return -1;
  int best = -1;
  size_t most = 0;
  std::vector<int64_t> begins(boxes.size());
  for (int d = 0; d < boxes[0].ndim(); ++d) {
    for (size_t i = 0; i < boxes.size(); ++i) begins[i] = boxes[i][d].begin;
    std::sort(begins.begin(), begins.end());
    auto distinct = static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (distinct > most) {
      most = distinct;
      best = d;
    }
  }
  return best;
}

struct OwnersCell {
  Box box;
  std::vector<uint32_t> owners;
};

// A box of the input, clipped to the region at hand.
struct Clipped {
  Box box;
  uint32_t entry = 0;
};

struct Cut {
  int dim = -1;
  int64_t at = 0;
};

// The face that leaves the least work: both sides few boxes, few boxes on both.
Cut ChooseCut(const Box& region, const std::vector<Clipped>& boxes) {
  Cut best;
  uint64_t least = ~uint64_t{0};
  const auto n = static_cast<uint64_t>(boxes.size());
  std::vector<int64_t> begins(boxes.size());
  std::vector<int64_t> ends(boxes.size());
  for (int d = 0; d < region.ndim(); ++d) {
    for (size_t i = 0; i < boxes.size(); ++i) {
      begins[i] = boxes[i].box[d].begin;
      ends[i] = boxes[i].box[d].end;
    }
    std::sort(begins.begin(), begins.end());
    std::sort(ends.begin(), ends.end());
    auto consider = [&](int64_t at) {
      if (at <= region[d].begin || at >= region[d].end) return;
      auto right_only =
          static_cast<uint64_t>(begins.end() - std::lower_bound(begins.begin(), begins.end(), at));
      auto left_only =
          static_cast<uint64_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
      const uint64_t left = n - right_only;
      const uint64_t right = n - left_only;
      const uint64_t work = left * left + right * right;
      if (work < least) {
        least = work;
        best = {d, at};
      }
    };
    for (size_t i = 0; i < boxes.size(); ++i) {
      if (i == 0 || begins[i] != begins[i - 1]) consider(begins[i]);
      if (i == 0 || ends[i] != ends[i - 1]) consider(ends[i]);
    }
  }
  return best;
}

using OwnerLists = std::vector<std::vector<uint32_t>>;

std::vector<uint32_t> UnionOfOwners(const std::vector<Clipped>& boxes, const OwnerLists& owners) {
  std::vector<uint32_t> all;
  for (const Clipped& box : boxes) {
    all.insert(all.end(), owners[box.entry].begin(), owners[box.entry].end());
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

// Cuts a region until each part is covered wholly or not at all by every box that meets it.
void CutToCells(const Box& region, const std::vector<Clipped>& boxes, const OwnerLists& owners,
                std::vector<OwnersCell>* cells) {
  if (boxes.empty()) return;
  const bool equal = std::all_of(boxes.begin(), boxes.end(),
                                 [&](const Clipped& b) { return b.box == boxes[0].box; });
  if (equal) {
    cells->push_back({boxes[0].box, UnionOfOwners(boxes, owners)});
    return;
  }
  const Cut cut = ChooseCut(region, boxes);
  for (bool left : {true, false}) {
    Box half = region;
    if (left) {
      half[cut.dim].end = cut.at;
    } else {
      half[cut.dim].begin = cut.at;
    }
    std::vector<Clipped> inside;
    for (const Clipped& box : boxes) {
      Box common = box.box.Intersect(half);
      if (!common.empty()) inside.push_back({common, box.entry});
    }
    CutToCells(half, inside, owners, cells);
  }
}

// Joins cells that lie side by side along a dimension and have equal owners.
void MergeAlong(int dim, std::vector<OwnersCell>* cells) {
  auto same_column = [dim](const OwnersCell& a, const OwnersCell& b) {
    for (int d = 0; d < a.box.ndim(); ++d) {
      if (d != dim && a.box[d] != b.box[d]) return false;
    }
    return a.owners == b.owners;
  };
  std::sort(cells->begin(), cells->end(), [dim](const OwnersCell& a, const OwnersCell& b) {
    for (int d = 0; d < a.box.ndim(); ++d) {
      if (d != dim && a.box[d] != b.box[d]) return a.box[d] < b.box[d];
    }
    if (a.owners != b.owners) return a.owners < b.owners;
    return a.box[dim] < b.box[dim];
  });
  size_t kept = 0;
  for (size_t i = 1; i < cells->size(); ++i) {
    OwnersCell& last = (*cells)[kept];
    OwnersCell& next = (*cells)[i];
    if (same_column(last, next) && last.box[dim].end == next.box[dim].begin) {
      last.box[dim].end = next.box[dim].end;
    } else if (++kept != i) {
      (*cells)[kept] = std::move(next);
    }
  }
  if (!cells->empty()) cells->resize(kept + 1);
}

std::vector<OwnersCell> RefineOverlapping(const std::vector<Box>& boxes, const OwnerLists& owners,
                                          std::span<const uint32_t> component) {
  std::vector<Clipped> clipped;
  Box bounds = boxes[component[0]];
  for (uint32_t entry : component) {
    clipped.push_back({boxes[entry], entry});
    for (int d = 0; d < bounds.ndim(); ++d) {
      bounds[d].begin = std::min(bounds[d].begin, boxes[entry][d].begin);
      bounds[d].end = std::max(bounds[d].end, boxes[entry][d].end);
    }
  }
  std::vector<OwnersCell> cells;
  CutToCells(bounds, clipped, owners, &cells);
  for (int d = bounds.ndim() - 1; d >= 0; --d) MergeAlong(d, &cells);
  return cells;
}

// Union-find with path halving; the root of a component is its lowest index.
class Components {
 public:
  explicit Components(size_t n) : parent_(n) { std::iota(parent_.begin(), parent_.end(), 0U); }
  uint32_t Root(uint32_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }
  void Join(uint32_t a, uint32_t b) {
    a = Root(a);
    b = Root(b);
    if (a < b) parent_[b] = a;
    if (b < a) parent_[a] = b;
  }

 private:
  std::vector<uint32_t> parent_;
};

// Joins boxes that overlap. True where any do.
bool JoinOverlapping(const std::vector<Box>& boxes, Components* components) {
  const int sweep = SweepDimension(boxes);
  if (sweep < 0) return false;  // distinct boxes without dimensions: there is one at most
  std::vector<uint32_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(boxes[a][sweep].begin, a) < std::pair(boxes[b][sweep].begin, b);
  });
  bool any = false;
  std::vector<uint32_t> active;
  for (uint32_t next : order) {
    std::erase_if(active,
                  [&](uint32_t i) { return boxes[i][sweep].end <= boxes[next][sweep].begin; });
    for (uint32_t i : active) {
      if (boxes[i].Intersect(boxes[next]).empty()) continue;
      components->Join(i, next);
      any = true;
    }
    active.push_back(next);
  }
  return any;
}

void AppendCell(const Box& box, std::span<const uint32_t> owners, Cells* cells) {
  cells->boxes.push_back(box);
  cells->owners.insert(cells->owners.end(), owners.begin(), owners.end());
  cells->offsets.push_back(static_cast<uint32_t>(cells->owners.size()));
}

// Equal boxes become one with all their owners; sorted by box.
Cells MergeEqual(std::vector<OwnedBox> boxes) {
  auto less = [](const OwnedBox& a, const OwnedBox& b) {
    if (auto order = a.box <=> b.box; order != 0) return order < 0;
    return a.owner < b.owner;
  };
  if (!std::is_sorted(boxes.begin(), boxes.end(), less)) {
    std::sort(boxes.begin(), boxes.end(), less);
  }
  Cells cells;
  cells.boxes.reserve(boxes.size());
  cells.owners.reserve(boxes.size());
  cells.offsets.reserve(boxes.size() + 1);
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (i > 0 && boxes[i].box == boxes[i - 1].box) {
      if (boxes[i].owner == boxes[i - 1].owner) continue;
      cells.owners.push_back(boxes[i].owner);
      ++cells.offsets.back();
    } else {
      AppendCell(boxes[i].box, {&boxes[i].owner, 1}, &cells);
    }
  }
  return cells;
}

uint64_t HashOf(const Box& box) {
  uint64_t hash = static_cast<uint64_t>(box.ndim());
  for (int d = 0; d < box.ndim(); ++d) {
    hash = (hash ^ static_cast<uint64_t>(box[d].begin)) * 0x9E3779B97F4A7C15ULL;
    hash = (hash ^ (hash >> 29) ^ static_cast<uint64_t>(box[d].end)) * 0xBF58476D1CE4E5B9ULL;
  }
  return hash ^ (hash >> 32);
}

bool SameBox(const Box& a, const Box& b) {
  if (a.ndim() != b.ndim()) return false;
  for (int d = 0; d < a.ndim(); ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

}  // namespace

void AppendRange(const Box& box, int64_t first, int64_t last, std::vector<Box>* boxes) {
  if (first >= last) return;
  if (first == 0 && last == box.size()) {
    boxes->push_back(box);
    return;
  }
  AppendRangeFrom(box, 0, first, last, boxes);
}

int64_t CutGrain(const Box& box, int64_t limit) {
  int64_t grain = 1;
  for (int d = box.ndim() - 1; d >= 0; --d) {
    if (grain * box[d].size() > limit) break;
    grain *= box[d].size();
  }
  return grain;
}

int64_t SnapCut(const Box& box, int64_t cut, uint64_t element_bytes, uint64_t whole_bytes) {
  const int64_t size = box.size();
  const int64_t tensor = cut / size;
  const int64_t inside = cut % size;
  const int64_t off = std::min(inside, size - inside);
  if (off == 0 || 2 * static_cast<uint64_t>(off) * element_bytes < whole_bytes) {
    return (tensor + (2 * inside > size ? 1 : 0)) * size;
  }
  const int64_t grain = CutGrain(box, static_cast<int64_t>(whole_bytes / element_bytes));
  const int64_t snapped = std::min(size, (inside + grain / 2) / grain * grain);
  return tensor * size + snapped;
}

Cells Refine(std::vector<OwnedBox> owned) {
  Cells merged = MergeEqual(std::move(owned));
  if (merged.boxes.size() < 2) return merged;
  Components components(merged.boxes.size());
  if (!JoinOverlapping(merged.boxes, &components)) return merged;

  std::vector<std::vector<uint32_t>> groups(merged.boxes.size());
  OwnerLists owners(merged.boxes.size());
  for (uint32_t i = 0; i < merged.boxes.size(); ++i) {
    groups[components.Root(i)].push_back(i);
    auto list = merged.OwnersOf(i);
    owners[i].assign(list.begin(), list.end());
  }
  std::vector<OwnersCell> cells;
  for (const auto& group : groups) {
    if (group.size() == 1) {
      cells.push_back({merged.boxes[group[0]], owners[group[0]]});
    } else if (!group.empty()) {
      for (auto& cell : RefineOverlapping(merged.boxes, owners, group)) {
        cells.push_back(std::move(cell));
      }
    }
  }
  std::sort(cells.begin(), cells.end(),
            [](const OwnersCell& a, const OwnersCell& b) { return a.box < b.box; });
  Cells refined;
  for (const OwnersCell& cell : cells) AppendCell(cell.box, cell.owners, &refined);
  return refined;
}

BoxIndex::BoxIndex(std::vector<Box> boxes, std::vector<uint32_t>* order)
    : sweep_(SweepDimension(boxes)) {
  order->resize(boxes.size());
  std::iota(order->begin(), order->end(), 0U);
  if (sweep_ >= 0) {
    std::sort(order->begin(), order->end(), [&](uint32_t a, uint32_t b) {
      return std::pair(boxes[a][sweep_].begin, a) < std::pair(boxes[b][sweep_].begin, b);
    });
  }
  int64_t max_end = 0;
  boxes_.reserve(boxes.size());
  max_end_.reserve(boxes.size());
  for (uint32_t i : *order) {
    boxes_.push_back(boxes[i]);
    elements_ += boxes[i].size();
    if (sweep_ >= 0) max_end = std::max(max_end, boxes[i][sweep_].end);
    max_end_.push_back(max_end);
  }
}

std::pair<size_t, size_t> BoxIndex::Range(const Box& box) const {
  if (sweep_ < 0) return {0, boxes_.size()};
  auto first = std::upper_bound(max_end_.begin(), max_end_.end(), box[sweep_].begin);
  auto last =
      std::lower_bound(boxes_.begin(), boxes_.end(), box[sweep_].end,
                       [this](const Box& held, int64_t end) { return held[sweep_].begin < end; });
  const auto from = static_cast<size_t>(first - max_end_.begin());
  return {from, std::max(from, static_cast<size_t>(last - boxes_.begin()))};
}

uint32_t BoxTable::Intern(const Box& box) {
  if (2 * (boxes_.size() + 1) > slots_.size()) Grow();
  const size_t mask = slots_.size() - 1;
  for (size_t slot = HashOf(box) & mask;; slot = (slot + 1) & mask) {
    if (slots_[slot] == kNone) {
      slots_[slot] = static_cast<uint32_t>(boxes_.size());
      boxes_.push_back(box);
      return slots_[slot];
    }
    if (SameBox(boxes_[slots_[slot]], box)) return slots_[slot];
  }
}

void BoxTable::Grow() {
  slots_.assign(std::max<size_t>(64, slots_.size() * 2), kNone);
  const size_t mask = slots_.size() - 1;
  for (uint32_t i = 0; i < boxes_.size(); ++i) {
    size_t slot = HashOf(boxes_[i]) & mask;
    while (slots_[slot] != kNone) slot = (slot + 1) & mask;
    slots_[slot] = i;
  }
}

}  // namespace bascule::plan
