// World templates: the part of a layout that all ranks of one declared mesh share.
//
// A template says, per class of tensors, which boxes the rank at given coordinates holds. It is
// interned, serialized canonically (equal templates have equal bytes) and addressed by content.
// The memory side (buffers, offsets, strides) is the rank's own affair and is not in it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bascule/layout.h"
#include "bascule/status.h"

namespace bascule {

// 128-bit content address (XXH3-128 of the canonical bytes). Not cryptographic: only members that
// showed the job token may store blobs.
struct ContentDigest {
  uint64_t high = 0;
  uint64_t low = 0;
  [[nodiscard]] std::string ToString() const;  // 32 hex digits
  friend bool operator==(const ContentDigest&, const ContentDigest&) = default;
  friend auto operator<=>(const ContentDigest&, const ContentDigest&) = default;
};
[[nodiscard]] ContentDigest DigestOf(std::string_view bytes);

// For each index, the intervals of one logical dimension: entry i is
// intervals[offsets[i] .. offsets[i + 1]), sorted, disjoint, none empty.
struct IntervalList {
  std::vector<Interval> intervals;
  std::vector<uint32_t> offsets{0};
  [[nodiscard]] uint32_t size() const { return static_cast<uint32_t>(offsets.size() - 1); }
  [[nodiscard]] std::span<const Interval> Entry(uint32_t index) const {
    return {intervals.data() + offsets[index], intervals.data() + offsets[index + 1]};
  }
  friend bool operator==(const IntervalList&, const IntervalList&) = default;
};

// Picks an entry of an interval list by coordinates: the index is the mixed-radix number of the
// coordinates along `axes`, first axis most significant; no axes: index 0.
struct DimSelect {
  uint32_t list = 0;  // index in WorldTemplate::lists
  std::vector<uint32_t> axes;
  friend bool operator==(const DimSelect&, const DimSelect&) = default;
};

// The boxes at given coordinates are all products of one interval of each dimension's entry.
struct BoxProduct {
  std::vector<DimSelect> dims;  // one per logical dimension
  friend bool operator==(const BoxProduct&, const BoxProduct&) = default;
};

// Tensors with equal shape, dtype and boxes. A scalar's product has no dims and one box.
struct TemplateClass {
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;  // publish dtype of a source, memory dtype of a destination
  bool derived = false;
  std::vector<BoxProduct> products;
  friend bool operator==(const TemplateClass&, const TemplateClass&) = default;
};

class WorldTemplate {
 public:
  std::vector<uint32_t> axis_sizes;  // of the mesh; empty: one rank
  std::vector<IntervalList> lists;
  std::vector<TemplateClass> classes;
  std::vector<std::string> names;     // sorted, unique
  std::vector<uint32_t> class_of;     // class index of each name
  std::vector<Alias> aliases;         // sorted by name
  std::vector<std::string> unused;    // patterns, sorted (destinations)

  // The boxes of a class at coordinates, in canonical order (products in order, then row-major
  // over the intervals), empty ones left out. Appends to `boxes`.
  void BoxesOf(uint32_t class_index, std::span<const uint32_t> coordinates,
               std::vector<Box>* boxes) const;
  // Number of ranks: the product of the axis sizes.
  [[nodiscard]] uint64_t ranks() const;

  // Canonical bytes: classes and lists interned and in order of first use by sorted names.
  [[nodiscard]] std::string Serialize() const;
  // Parses untrusted bytes. Every index is checked; sizes are bounded by the input's length.
  [[nodiscard]] static Result<WorldTemplate> Parse(std::string_view bytes);

  friend bool operator==(const WorldTemplate&, const WorldTemplate&) = default;
};

// The template of one rank's own boxes, where nothing was declared: tensors are grouped to classes
// by equality; coordinates are empty.
[[nodiscard]] Result<WorldTemplate> TemplateOf(const Layout& layout);

// The layout's boxes must be those of its template at its coordinates.
[[nodiscard]] Status CheckAgainstTemplate(const Layout& layout, const WorldTemplate& world,
                                          std::span<const uint32_t> coordinates);

// Where each box of a rank lies in its arena: tensors in name order, boxes in canonical order, each
// box dense row-major in the class dtype and aligned to 256 bytes. A pure function of template and
// coordinates, so that every peer computes the same offsets.
struct ArenaMap {
  struct Entry {
    uint32_t tensor;  // index in WorldTemplate::names
    Box box;
    uint64_t offset;  // bytes
  };
  std::vector<Entry> entries;         // by tensor, then canonical order
  std::vector<uint32_t> first_entry;  // per tensor; size names.size() + 1
  uint64_t bytes = 0;
};
[[nodiscard]] ArenaMap MapArena(const WorldTemplate& world, std::span<const uint32_t> coordinates);

}  // namespace bascule
