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
  // One per logical dimension. A scalar has none (every rank holds it) or one that only says who
  // holds it: its entries are [0, 1) or nothing; its box has no dimensions either way.
  std::vector<DimSelect> dims;
  friend bool operator==(const BoxProduct&, const BoxProduct&) = default;
};

// Tensors with equal shape, dtype and boxes.
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
  std::vector<std::string> names;   // sorted, unique
  std::vector<uint32_t> class_of;   // class index of each name
  std::vector<Alias> aliases;       // sorted by name
  std::vector<std::string> unused;  // patterns, sorted (destinations)

  // The boxes of a class at coordinates, in canonical order (products in order, then row-major
  // over the intervals), a box that several products give only once. Appends to `boxes`.
  void BoxesOf(uint32_t class_index, std::span<const uint32_t> coordinates,
               std::vector<Box>* boxes) const;
  // The entry of `select`'s list at coordinates; `coordinates` has one number per axis.
  [[nodiscard]] uint32_t EntryOf(const DimSelect& select,
                                 std::span<const uint32_t> coordinates) const;
  // Number of ranks: the product of the axis sizes.
  [[nodiscard]] uint64_t ranks() const;
  // Index in `names`, or -1. Binary search.
  [[nodiscard]] int64_t Find(std::string_view name) const;
  // The coordinates of the rank with a row-major number (last axis fastest), as torch's DeviceMesh
  // numbers ranks. `rank` < ranks().
  [[nodiscard]] std::vector<uint32_t> CoordinatesOf(uint64_t rank) const;

  // Checks everything that the other functions rely on: indices, sizes, order, overflow, and that
  // no rank has more than kMaxBoxes boxes. Parse and the builders return only valid templates.
  [[nodiscard]] Status Validate() const;
  static constexpr uint64_t kMaxBoxes = uint64_t{1} << 24;
  static constexpr uint64_t kMaxRanks = uint64_t{1} << 24;
  static constexpr size_t kMaxAxes = 16;

  // Merges equal lists and classes, drops unused ones, sorts and renumbers by first use. What it
  // means does not change. Names, aliases and unused may come in any order.
  void Canonicalize();

  // Canonical bytes: classes and lists interned and in order of first use by sorted names. Equal
  // for templates that are equal once canonicalized. The template must be valid.
  [[nodiscard]] std::string Serialize() const;
  // Parses untrusted bytes: every index is checked, allocations stay within a small multiple of the
  // input's length, and only canonical bytes are taken, so that one template has one digest.
  [[nodiscard]] static Result<WorldTemplate> Parse(std::string_view bytes);

  friend bool operator==(const WorldTemplate&, const WorldTemplate&) = default;
};

// The template of one rank's own boxes, where nothing was declared: tensors are grouped to classes
// by equality; coordinates are empty.
[[nodiscard]] Result<WorldTemplate> TemplateOf(const Layout& layout);

// The layout's boxes must be those of its template at its coordinates, as sets a tensor; so must
// shapes and dtypes.
[[nodiscard]] Status CheckAgainstTemplate(const Layout& layout, const WorldTemplate& world,
                                          std::span<const uint32_t> coordinates);

// Every box of an arena begins at a multiple of this many bytes.
inline constexpr uint64_t kArenaAlignment = 256;

// Where each box of a rank lies in its arena: tensors in name order, boxes in canonical order, each
// box dense row-major in the class dtype and aligned to kArenaAlignment. A pure function of
// template and coordinates, so that every peer computes the same offsets. Gaps of alignment are
// never read.
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
