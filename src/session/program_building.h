// What the builders of copy programs share. Not for other files: see programs.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/boxes.h"
#include "session/programs.h"

namespace bascule::programs {

inline constexpr uint32_t kNone = 0xFFFFFFFF;
using Strides = std::array<int64_t, kMaxDims>;

// Strides of a dense row-major array of these extents, in units of `unit`.
template <typename ExtentOf>
Strides RowMajor(int ndim, int64_t unit, const ExtentOf& extent_of) {
  Strides strides{};
  for (int d = ndim - 1; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = unit;
    unit *= extent_of(d);
  }
  return strides;
}

inline Strides RowMajor(const Box& box, int64_t unit) {
  return RowMajor(box.ndim(), unit, [&box](int d) { return box[d].size(); });
}

inline Strides RowMajor(const std::vector<int64_t>& shape) {
  return RowMajor(static_cast<int>(shape.size()), 1,
                  [&shape](int d) { return shape[static_cast<size_t>(d)]; });
}

// Where the first element of `part` lies, relative to the first of `whole`. Unsigned inside:
// strides may come from a peer, and CheckProgram judges the outcome.
inline int64_t OffsetIn(const Box& whole, const Box& part, const Strides& strides) {
  uint64_t offset = 0;
  for (int d = 0; d < part.ndim(); ++d) {
    offset += static_cast<uint64_t>(part[d].begin - whole[d].begin) *
              static_cast<uint64_t>(strides[static_cast<size_t>(d)]);
  }
  return static_cast<int64_t>(offset);
}

inline bool Contains(const Box& whole, const Box& part) {
  if (whole.ndim() != part.ndim()) return false;
  for (int d = 0; d < part.ndim(); ++d) {
    if (part[d].begin < whole[d].begin || part[d].end > whole[d].end) return false;
  }
  return true;
}

// A tensor as the digest sees it.
struct TensorSpace {
  uint64_t key = 0;
  Strides strides{};
};

inline TensorSpace SpaceOf(const std::vector<int64_t>& shape, std::string_view name) {
  return {TensorKey(name), RowMajor(shape)};
}

inline int64_t FirstElement(const TensorSpace& space, const Box& box) {
  int64_t first = 0;
  for (int d = 0; d < box.ndim(); ++d)
    first += box[d].begin * space.strides[static_cast<size_t>(d)];
  return first;
}

// One side of a copy.
struct Place {
  uint32_t base = 0;
  int64_t offset = 0;  // bytes to the first element of `box`
  const Box& box;
  const Strides& strides;
  DType dtype = DType::kF32;
};

inline Place PlaceOf(const Binding& binding) {
  return {binding.buffer, binding.byte_offset, binding.box, binding.byte_strides, binding.dtype};
}

inline Place PlaceOf(const SourcePlace& place) {
  return {place.base, place.offset, place.box, place.byte_strides, place.dtype};
}

struct Move {
  const TensorSpace& space;
  DType wire;
  uint32_t sum = kNoSum;
  LandingFunction function = LandingFunction::kNone;
};

// Appends the copy of `box`, which lies inside both places.
inline void AddCopy(const Box& box, const Place& source, const Place& target, const Move& move,
                    CopyProgram* program) {
  CopyShape shape;
  shape.ndim = box.ndim();
  for (int d = 0; d < box.ndim(); ++d) shape.extents[static_cast<size_t>(d)] = box[d].size();
  shape.source_strides = source.strides;
  shape.target_strides = target.strides;
  shape.tensor_strides = move.space.strides;
  shape.source = source.dtype;
  shape.wire = move.wire;
  shape.target = target.dtype;
  shape.function = move.function;
  CopyOp op;
  op.source_base = source.base;
  op.target_base = target.base;
  op.sum = move.sum;
  op.source_offset = source.offset + OffsetIn(source.box, box, source.strides);
  op.target_offset = target.offset + OffsetIn(target.box, box, target.strides);
  op.tensor_key = move.space.key;
  op.first_element = FirstElement(move.space, box);
  program->Add(shape, op);
}

inline Status TensorError(std::string_view tensor, std::string message) {
  return Status(Code::kInvalidArgument, std::move(message)).WithTensor(std::string(tensor));
}

// Lists longer than this are searched by an index.
inline constexpr size_t kShortList = 8;

// Finds the item whose box holds a given box, in lists named by keys. Indexes long lists once.
template <typename Item>
class HolderFinder {
 public:
  // Index in `items`, or kNone. Equal keys must come with equal lists.
  uint32_t Find(uint64_t key, std::span<const Item> items, const Box& box) {
    if (items.size() <= kShortList) {
      for (uint32_t i = 0; i < items.size(); ++i) {
        if (Contains(items[i].box, box)) return i;
      }
      return kNone;
    }
    const Index& index = IndexOf(key, items, box.ndim());
    uint32_t found = kNone;
    index.boxes.ForEachOverlap(box, [&](uint32_t i, const Box& common) {
      if (common == box) found = std::min(found, index.order[i]);
    });
    return found;
  }

 private:
  struct Index {
    std::vector<uint32_t> order;
    plan::BoxIndex boxes;
  };

  const Index& IndexOf(uint64_t key, std::span<const Item> items, int ndim) {
    auto [at, added] = indices_.try_emplace(key);
    if (!added) return at->second;
    std::vector<Box> boxes;
    std::vector<uint32_t> numbers;
    for (uint32_t i = 0; i < items.size(); ++i) {
      if (items[i].box.ndim() != ndim) continue;
      boxes.push_back(items[i].box);
      numbers.push_back(i);
    }
    at->second.boxes = plan::BoxIndex(std::move(boxes), &at->second.order);
    for (uint32_t& i : at->second.order) i = numbers[i];
    return at->second;
  }

  std::unordered_map<uint64_t, Index> indices_;
};

// The bindings of a layout, by tensor.
class BindingsByTensor {
 public:
  explicit BindingsByTensor(const Layout& layout)
      : first_(layout.tensors.size() + 1), bindings_(layout.bindings.size()) {
    for (const Binding& binding : layout.bindings) ++first_[binding.tensor + 1];
    for (size_t t = 0; t < layout.tensors.size(); ++t) {
      first_[t + 1] += first_[t];
      tensors_.emplace(layout.tensors[t].name, static_cast<uint32_t>(t));
    }
    std::vector<size_t> next(first_.begin(), first_.end() - 1);
    for (const Binding& binding : layout.bindings) bindings_[next[binding.tensor]++] = &binding;
  }

  // Index of a tensor, or kNone.
  [[nodiscard]] uint32_t Find(std::string_view name) const {
    auto at = tensors_.find(name);
    return at == tensors_.end() ? kNone : at->second;
  }
  [[nodiscard]] std::span<const Binding* const> Of(uint32_t tensor) const {
    if (tensor == kNone) return {};
    return {bindings_.data() + first_[tensor], bindings_.data() + first_[tensor + 1]};
  }

 private:
  std::vector<size_t> first_;
  std::vector<const Binding*> bindings_;
  std::unordered_map<std::string_view, uint32_t> tensors_;
};

inline const TemplateClass& ClassOf(const WorldTemplate& world, uint32_t tensor) {
  return world.classes[world.class_of[tensor]];
}

}  // namespace bascule::programs
