#include "session/programs.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "layout/runs.h"
#include "plan/boxes.h"

namespace bascule {
namespace {

constexpr uint32_t kNone = 0xFFFFFFFF;
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

Strides RowMajor(const Box& box, int64_t unit) {
  return RowMajor(box.ndim(), unit, [&box](int d) { return box[d].size(); });
}

Strides RowMajor(const std::vector<int64_t>& shape) {
  return RowMajor(static_cast<int>(shape.size()), 1,
                  [&shape](int d) { return shape[static_cast<size_t>(d)]; });
}

// Where the first element of `part` lies, relative to the first of `whole`. Unsigned inside:
// strides may come from a peer, and CheckProgram judges the outcome.
int64_t OffsetIn(const Box& whole, const Box& part, const Strides& strides) {
  uint64_t offset = 0;
  for (int d = 0; d < part.ndim(); ++d) {
    offset += static_cast<uint64_t>(part[d].begin - whole[d].begin) *
              static_cast<uint64_t>(strides[static_cast<size_t>(d)]);
  }
  return static_cast<int64_t>(offset);
}

bool Contains(const Box& whole, const Box& part) {
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

TensorSpace SpaceOf(const std::vector<int64_t>& shape, std::string_view name) {
  return {TensorKey(name), RowMajor(shape)};
}

int64_t FirstElement(const TensorSpace& space, const Box& box) {
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

Place PlaceOf(const Binding& binding) {
  return {binding.buffer, binding.byte_offset, binding.box, binding.byte_strides, binding.dtype};
}

Place PlaceOf(const SourcePlace& place) {
  return {place.base, place.offset, place.box, place.byte_strides, place.dtype};
}

struct Move {
  const TensorSpace& space;
  DType wire;
  uint32_t sum = kNoSum;
  LandingFunction function = LandingFunction::kNone;
};

// Appends the copy of `box`, which lies inside both places.
void AddCopy(const Box& box, const Place& source, const Place& target, const Move& move,
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

Status TensorError(std::string_view tensor, std::string message) {
  return Status(Code::kInvalidArgument, std::move(message)).WithTensor(std::string(tensor));
}

// Lists longer than this are searched by an index.
constexpr size_t kShortList = 8;

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

// Appends the boxes of a \ b.
void Subtract(const Box& a, const Box& b, std::vector<Box>* out) {
  Box rest = a;
  const Box common = a.Intersect(b);
  if (common.empty()) return out->push_back(a);
  for (int d = 0; d < a.ndim(); ++d) {
    Box before = rest;
    before[d].end = common[d].begin;
    if (!before[d].empty()) out->push_back(before);
    Box after = rest;
    after[d].begin = common[d].end;
    if (!after[d].empty()) out->push_back(after);
    rest[d] = common[d];
  }
}

void SubtractFrom(std::vector<Box>* boxes, const Box& hole) {
  std::vector<Box> rest;
  for (const Box& box : *boxes) Subtract(box, hole, &rest);
  *boxes = std::move(rest);
}

// A part of a binding's box. Over all landings of a tensor, each element is counted once.
struct Landing {
  Box box;
  const Binding* binding = nullptr;
  bool counted = true;
};

// Where the elements of one destination tensor land.
class Landings {
 public:
  explicit Landings(std::span<const Binding* const> bindings) {
    for (const Binding* binding : bindings) {
      if (!binding->box.empty()) landings_.push_back({binding->box, binding, true});
    }
    if (landings_.size() > 1) CountOnce();
    if (landings_.size() > kShortList) index_ = IndexOf(landings_, &order_);
  }

  // Calls visit(landing, common part), counted landings first.
  template <typename Visit>
  void ForEachOverlap(const Box& box, const Visit& visit) const {
    const auto visit_one = [&](const Landing& landing, const Box& common, bool counted) {
      if (landing.counted == counted && !common.empty()) visit(landing, common);
    };
    for (bool counted : {true, false}) {
      if (!counted && !repeats_) break;
      if (index_) {
        index_->ForEachOverlap(box, [&](uint32_t i, const Box& common) {
          visit_one(landings_[order_[i]], common, counted);
        });
      } else {
        for (const Landing& landing : landings_) {
          visit_one(landing, landing.box.Intersect(box), counted);
        }
      }
    }
  }

 private:
  static plan::BoxIndex IndexOf(const std::vector<Landing>& landings,
                                std::vector<uint32_t>* order) {
    std::vector<Box> boxes;
    for (const Landing& landing : landings) boxes.push_back(landing.box);
    return plan::BoxIndex(std::move(boxes), order);
  }

  // Cuts off each box what earlier boxes hold; it lands too, uncounted.
  void CountOnce() {
    std::vector<uint32_t> order;
    const plan::BoxIndex index = IndexOf(landings_, &order);
    std::vector<Landing> cut;
    for (uint32_t i = 0; i < landings_.size(); ++i) {
      std::vector<Box> counted{landings_[i].box};
      index.ForEachOverlap(landings_[i].box, [&](uint32_t other, const Box& common) {
        if (order[other] < i) SubtractFrom(&counted, common);
      });
      std::vector<Box> repeated{landings_[i].box};
      for (const Box& box : counted) SubtractFrom(&repeated, box);
      for (const Box& box : counted) cut.push_back({box, landings_[i].binding, true});
      for (const Box& box : repeated) cut.push_back({box, landings_[i].binding, false});
      repeats_ = repeats_ || !repeated.empty();
    }
    landings_ = std::move(cut);
  }

  std::vector<Landing> landings_;
  bool repeats_ = false;
  std::optional<plan::BoxIndex> index_;
  std::vector<uint32_t> order_;
};

// The name under which trainers publish a tensor: digests on both sides are keyed by it.
std::string_view PublishedName(const PartTensor& tensor, const World& world) {
  for (const Member& member : world.members) {
    if (member.role != Role::kTrainer) continue;
    const uint32_t name = tensor.source_names[member.world_template];
    if (name != kNone) return world.templates[member.world_template]->names[name];
  }
  return tensor.name;
}

class LandingBuilder {
 public:
  LandingBuilder(const Part& part, const World& world, const Layout& layout,
                 const PlaceLookup& places)
      : part_(part), world_(world), places_(places), bindings_(layout) {
    const WorldTemplate& own = *world.templates[world.members[part.member].world_template];
    for (const PartTensor& tensor : part.tensors) {
      tensors_.push_back(
          {SpaceOf(own.classes[tensor.destination_class].shape, PublishedName(tensor, world)),
           Landings(bindings_.Of(bindings_.Find(own.names[tensor.destination_name])))});
    }
  }

  Result<LandingProgram> Build() {
    landing_.program.sums = static_cast<uint32_t>(part_.chunks.size());
    landing_.program.ops.reserve(part_.pieces.size());
    for (uint32_t chunk = 0; chunk < part_.chunks.size(); ++chunk) {
      landing_.first_op.push_back(static_cast<uint32_t>(landing_.program.ops.size()));
      const Chunk& pieces = part_.chunks[chunk];
      for (uint32_t i = 0; i < pieces.piece_count; ++i) {
        BASCULE_RETURN_IF_ERROR(AddPiece(chunk, part_.pieces[pieces.first_piece + i]));
      }
    }
    landing_.first_op.push_back(static_cast<uint32_t>(landing_.program.ops.size()));
    return std::move(landing_);
  }

 private:
  struct Target {
    TensorSpace space;
    Landings landings;
  };

  Status AddPiece(uint32_t chunk, const Piece& piece) {
    const PartTensor& tensor = part_.tensors[piece.tensor];
    const Target& target = tensors_[piece.tensor];
    const Box& box = part_.boxes[piece.box];
    const SourcePlace* place = nullptr;
    BASCULE_RETURN_IF_ERROR(FindPlace(part_.chunks[chunk].source, tensor, box, &place));
    int64_t landed = 0;
    target.landings.ForEachOverlap(box, [&](const Landing& landing, const Box& common) {
      const Move move{target.space, tensor.wire, landing.counted ? chunk : kNoSum,
                      landing.binding->function};
      AddCopy(common, PlaceOf(*place), PlaceOf(*landing.binding), move, &landing_.program);
      if (landing.counted) landed += common.size();
    });
    if (landed == box.size()) return Status::Ok();
    return TensorError(tensor.name, "bindings take " + std::to_string(landed) + " of the " +
                                        std::to_string(box.size()) + " elements of box " +
                                        box.ToString());
  }

  Status FindPlace(uint32_t source, const PartTensor& tensor, const Box& box,
                   const SourcePlace** place) {
    const uint32_t name = tensor.source_names[world_.members[source].world_template];
    uint32_t found = kNone;
    std::span<const SourcePlace> places;
    if (name != kNone) {
      places = places_(source, name);
      found = finder_.Find(uint64_t{source} << 32 | name, places, box);
    }
    if (found == kNone) {
      return TensorError(tensor.name, "no place of member " + std::to_string(source) +
                                          " holds box " + box.ToString());
    }
    *place = &places[found];
    return CheckCasts(source, tensor, **place, box);
  }

  // A copy casts once on its source side. What a trainer stores otherwise than it publishes crosses
  // as published or not at all, else it would be rounded once here and twice by way of an arena.
  Status CheckCasts(uint32_t source, const PartTensor& tensor, const SourcePlace& place,
                    const Box& box) const {
    const bool live = world_.members[source].role == Role::kTrainer;
    const bool once = !live || place.dtype == tensor.published || tensor.wire == tensor.published;
    if (once && Castable(place.dtype, tensor.wire)) return Status::Ok();
    return TensorError(tensor.name, "box " + box.ToString() + " is stored as " +
                                        std::string(DTypeName(place.dtype)) + ", published as " +
                                        std::string(DTypeName(tensor.published)) +
                                        " and crosses as " + std::string(DTypeName(tensor.wire)) +
                                        ": it cannot be read directly; use an arena");
  }

  const Part& part_;
  const World& world_;
  const PlaceLookup& places_;
  BindingsByTensor bindings_;
  std::vector<Target> tensors_;
  HolderFinder<SourcePlace> finder_;
  LandingProgram landing_;
};

const TemplateClass& ClassOf(const WorldTemplate& world, uint32_t tensor) {
  return world.classes[world.class_of[tensor]];
}

std::span<const ArenaMap::Entry> EntriesOf(const ArenaMap& arena, uint32_t tensor) {
  if (tensor + 1 >= arena.first_entry.size()) return {};
  return {arena.entries.data() + arena.first_entry[tensor],
          arena.entries.data() + arena.first_entry[tensor + 1]};
}

// Index in arena.entries of the box that holds `wanted`, or kNone.
uint32_t FindEntry(const ArenaMap& arena, const WantedBox& wanted,
                   HolderFinder<ArenaMap::Entry>* finder) {
  const uint32_t found = finder->Find(wanted.tensor, EntriesOf(arena, wanted.tensor), wanted.box);
  return found == kNone ? kNone : arena.first_entry[wanted.tensor] + found;
}

Status NotInArena(const WorldTemplate& world, const WantedBox& wanted) {
  if (wanted.tensor >= world.names.size()) {
    return Status(Code::kInvalidArgument, "wanted tensor " + std::to_string(wanted.tensor) +
                                              " of " + std::to_string(world.names.size()));
  }
  return TensorError(world.names[wanted.tensor],
                     "wanted box " + wanted.box.ToString() + " is in no box of this source");
}

class SnapshotBuilder {
 public:
  SnapshotBuilder(const Layout& layout, const WorldTemplate& world,
                  std::span<const uint32_t> coordinates, uint32_t max_cells)
      : world_(world), bindings_(layout), max_cells_(max_cells) {
    snapshot_.arena = MapArena(world, coordinates);
    snapshot_.box_cells.resize(snapshot_.arena.entries.size());
  }

  Result<SnapshotProgram> Build(std::span<const std::vector<WantedBox>> wanted) {
    BASCULE_RETURN_IF_ERROR(CollectWanted(wanted));
    size_t next = 0;
    for (uint32_t entry = 0; entry < snapshot_.arena.entries.size(); ++entry) {
      const size_t first = next;
      while (next < wanted_.size() && wanted_[next].entry == entry) ++next;
      BASCULE_RETURN_IF_ERROR(AddEntry(entry, std::span(wanted_).subspan(first, next - first)));
    }
    for (Owner& owner : owners_) {
      if (owner.cut) snapshot_.checks.push_back(std::move(owner.check));
    }
    return std::move(snapshot_);
  }

 private:
  // A chunk of a receiver.
  struct Owner {
    SnapshotProgram::Check check;
    bool cut = true;
  };
  struct WantedPart {
    uint32_t entry;
    plan::OwnedBox part;  // owner: index in owners_
  };

  Status CollectWanted(std::span<const std::vector<WantedBox>> wanted) {
    HolderFinder<ArenaMap::Entry> finder;
    for (uint32_t receiver = 0; receiver < wanted.size(); ++receiver) {
      const size_t first_owner = owners_.size();
      AddOwners(receiver, wanted[receiver]);
      for (const WantedBox& box : wanted[receiver]) {
        if (box.box.empty()) continue;
        const uint32_t entry = FindEntry(snapshot_.arena, box, &finder);
        if (entry == kNone) return NotInArena(world_, box);
        const uint32_t owner = OwnerOf(first_owner, box.chunk);
        wanted_.push_back({entry, {box.box, owner}});
        if (box.wire != ClassOf(world_, box.tensor).dtype) owners_[owner].cut = false;
      }
    }
    std::erase_if(wanted_, [this](const WantedPart& w) { return !owners_[w.part.owner].cut; });
    std::stable_sort(wanted_.begin(), wanted_.end(),
                     [](const WantedPart& a, const WantedPart& b) { return a.entry < b.entry; });
    return Status::Ok();
  }

  void AddOwners(uint32_t receiver, const std::vector<WantedBox>& wanted) {
    std::vector<uint32_t> chunks;
    for (const WantedBox& box : wanted) {
      if (chunks.empty() || chunks.back() != box.chunk) chunks.push_back(box.chunk);
    }
    std::sort(chunks.begin(), chunks.end());
    chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
    for (uint32_t chunk : chunks) owners_.push_back({{receiver, chunk, {}}, true});
  }

  uint32_t OwnerOf(size_t first_owner, uint32_t chunk) const {
    auto at = std::lower_bound(
        owners_.begin() + static_cast<std::ptrdiff_t>(first_owner), owners_.end(), chunk,
        [](const Owner& owner, uint32_t wanted) { return owner.check.chunk < wanted; });
    return static_cast<uint32_t>(at - owners_.begin());
  }

  Status AddEntry(uint32_t index, std::span<const WantedPart> wanted) {
    const ArenaMap::Entry& entry = snapshot_.arena.entries[index];
    const TemplateClass& tensor_class = ClassOf(world_, entry.tensor);
    const std::string& name = world_.names[entry.tensor];
    const TensorSpace space = SpaceOf(tensor_class.shape, name);
    const Strides strides = RowMajor(entry.box, DTypeSize(tensor_class.dtype));
    const Place target{0, static_cast<int64_t>(entry.offset), entry.box, strides,
                       tensor_class.dtype};
    const auto bindings = bindings_.Of(bindings_.Find(name));
    const plan::Cells cells = CutEntry(entry.box, wanted);
    for (size_t i = 0; i < cells.boxes.size(); ++i) {
      const Box& cell = cells.boxes[i];
      const uint32_t sum = snapshot_.program.sums++;
      snapshot_.box_cells[index].push_back(sum);
      for (uint32_t owner : cells.OwnersOf(i)) {
        if (owner != kNone) owners_[owner].check.cells.push_back(sum);
      }
      BASCULE_RETURN_IF_ERROR(
          AddCell(cell, bindings, target, {space, tensor_class.dtype, sum}, name));
    }
    return Status::Ok();
  }

  Status AddCell(const Box& cell, std::span<const Binding* const> bindings, const Place& target,
                 const Move& move, const std::string& name) {
    int64_t bound = 0;
    for (const Binding* binding : bindings) {
      if (binding->box.ndim() != cell.ndim()) continue;
      const Box common = binding->box.Intersect(cell);
      if (common.empty()) continue;
      if (!Castable(binding->dtype, move.wire)) {
        return TensorError(name,
                           "box " + common.ToString() + " cannot be cast to the publish dtype");
      }
      bound += common.size();
      AddCopy(common, PlaceOf(*binding), target, move, &snapshot_.program);
    }
    if (bound == cell.size()) return Status::Ok();
    return TensorError(name, "bindings hold " + std::to_string(bound) + " of the " +
                                 std::to_string(cell.size()) + " elements of box " +
                                 cell.ToString());
  }

  // The box cut to cells by the wanted boxes in it, the largest of them where all would give too
  // many cells. The entry itself is an owner (kNone), so that the cells fill it.
  plan::Cells CutEntry(const Box& box, std::span<const WantedPart> wanted) {
    std::vector<plan::OwnedBox> parts;
    for (const WantedPart& part : wanted) parts.push_back(part.part);
    std::stable_sort(parts.begin(), parts.end(),
                     [](const plan::OwnedBox& a, const plan::OwnedBox& b) {
                       return std::pair(-a.box.size(), a.box) < std::pair(-b.box.size(), b.box);
                     });
    const auto refine = [&](size_t count) {
      std::vector<plan::OwnedBox> used(parts.begin(),
                                       parts.begin() + static_cast<std::ptrdiff_t>(count));
      used.push_back({box, kNone});
      return plan::Refine(std::move(used));
    };
    // By doubling, so that hopeless grids are never made.
    plan::Cells cells = refine(0);
    size_t cut = 0;
    size_t over = parts.size() + 1;  // too many, as far as known
    while (cut + 1 < over) {
      const size_t count = over > parts.size()
                               ? std::min(parts.size(), std::max<size_t>(64, 2 * cut))
                               : (cut + over) / 2;
      plan::Cells finer = refine(count);
      if (finer.boxes.size() > max_cells_) {
        over = count;
      } else {
        cut = count;
        cells = std::move(finer);
      }
    }
    for (size_t i = cut; i < parts.size(); ++i) owners_[parts[i].owner].cut = false;
    return cells;
  }

  const WorldTemplate& world_;
  BindingsByTensor bindings_;
  const uint32_t max_cells_;
  std::vector<Owner> owners_;  // by receiver, then chunk
  std::vector<WantedPart> wanted_;
  SnapshotProgram snapshot_;
};

}  // namespace

std::vector<WantedBox> WantedFrom(const Part& part, const World& world, uint32_t source) {
  const uint32_t source_template = world.members[source].world_template;
  std::vector<WantedBox> wanted;
  for (uint32_t chunk = 0; chunk < part.chunks.size(); ++chunk) {
    if (part.chunks[chunk].source != source) continue;
    const auto pieces =
        std::span(part.pieces)
            .subspan(part.chunks[chunk].first_piece, part.chunks[chunk].piece_count);
    for (const Piece& piece : pieces) {
      const PartTensor& tensor = part.tensors[piece.tensor];
      wanted.push_back(
          {tensor.source_names[source_template], part.boxes[piece.box], tensor.wire, chunk});
    }
  }
  return wanted;
}

Result<SnapshotProgram> BuildSnapshot(const Layout& layout, const WorldTemplate& world,
                                      std::span<const uint32_t> coordinates,
                                      std::span<const std::vector<WantedBox>> wanted,
                                      uint32_t max_cells_per_box) {
  return SnapshotBuilder(layout, world, coordinates, max_cells_per_box).Build(wanted);
}

Result<CopyProgram> BuildArenaDigest(const ArenaMap& arena, const WorldTemplate& world,
                                     std::span<const WantedBox> wanted, uint32_t chunks) {
  CopyProgram program;
  program.sums = chunks;
  HolderFinder<ArenaMap::Entry> finder;
  for (const WantedBox& box : wanted) {
    if (box.box.empty()) continue;
    const uint32_t index = FindEntry(arena, box, &finder);
    if (index == kNone) return NotInArena(world, box);
    const TemplateClass& tensor_class = ClassOf(world, box.tensor);
    const std::string& name = world.names[box.tensor];
    if (box.chunk >= chunks) return TensorError(name, "wanted by a chunk that does not exist");
    if (!Castable(tensor_class.dtype, box.wire)) {
      return TensorError(name, "wanted in a dtype that it cannot be cast to");
    }
    const ArenaMap::Entry& entry = arena.entries[index];
    const Strides strides = RowMajor(entry.box, DTypeSize(tensor_class.dtype));
    const Place source{0, static_cast<int64_t>(entry.offset), entry.box, strides,
                       tensor_class.dtype};
    AddCopy(box.box, source, source, {SpaceOf(tensor_class.shape, name), box.wire, box.chunk},
            &program);
  }
  return program;
}

Result<LandingProgram> BuildLanding(const Part& part, const World& world, const Layout& layout,
                                    const PlaceLookup& places) {
  return LandingBuilder(part, world, layout, places).Build();
}

std::vector<std::vector<SourcePlace>> PlacesOfArena(const ArenaMap& arena,
                                                    const WorldTemplate& world, uint32_t base) {
  std::vector<std::vector<SourcePlace>> places(world.names.size());
  for (const ArenaMap::Entry& entry : arena.entries) {
    const DType dtype = ClassOf(world, entry.tensor).dtype;
    places[entry.tensor].push_back({base, static_cast<int64_t>(entry.offset), entry.box,
                                    RowMajor(entry.box, DTypeSize(dtype)), dtype});
  }
  return places;
}

std::vector<std::vector<SourcePlace>> PlacesOfLayout(const Layout& layout,
                                                     const WorldTemplate& world,
                                                     uint32_t first_base) {
  std::vector<std::vector<SourcePlace>> places(world.names.size());
  std::vector<int64_t> names;
  for (const LogicalTensor& tensor : layout.tensors) names.push_back(world.Find(tensor.name));
  for (const Binding& binding : layout.bindings) {
    const int64_t name = names[binding.tensor];
    if (name < 0 || binding.box.empty() || binding.function != LandingFunction::kNone) continue;
    places[static_cast<size_t>(name)].push_back({first_base + binding.buffer, binding.byte_offset,
                                                 binding.box, binding.byte_strides, binding.dtype});
  }
  return places;
}

namespace {

bool SameDims(const StridedMemory& a, const StridedMemory& b, int dims) {
  for (int d = 0; d < dims; ++d) {
    if (a.dim(d).extent != b.dim(d).extent || a.dim(d).stride != b.dim(d).stride) return false;
  }
  return true;
}

// `memory` with a longer run, or with `more` added to the extent of dimension `grown`.
StridedMemory Grown(const StridedMemory& memory, int64_t run, int grown, int64_t more) {
  StridedMemory result(memory.offset(), run);
  for (int d = 0; d < memory.dims(); ++d) {
    result.AddDim(memory.dim(d).extent + (d == grown ? more : 0), memory.dim(d).stride);
  }
  result.Finish();
  return result;
}

// a and b as one, where b goes on where each run of `a` ends, or where the last run of `a` ends.
std::optional<StridedMemory> Joined(const StridedMemory& a, const StridedMemory& b) {
  if (a.dims() == b.dims() && SameDims(a, b, a.dims())) {
    if (a.offset() == b.offset() && a.run_bytes() == b.run_bytes()) return a;
    if (a.offset() + a.run_bytes() == b.offset()) {
      return Grown(a, a.run_bytes() + b.run_bytes(), -1, 0);
    }
  }
  const int dims = std::max(a.dims(), b.dims());
  const int shared = dims - 1;
  if (a.run_bytes() != b.run_bytes() || dims == 0 || std::min(a.dims(), b.dims()) < shared ||
      !SameDims(a, b, shared)) {
    return std::nullopt;
  }
  // One that lacks the outermost dimension has extent 1 in it.
  const StridedDim& outer = a.dims() == dims ? a.dim(shared) : b.dim(shared);
  if (b.dims() == dims && b.dim(shared).stride != outer.stride) return std::nullopt;
  const int64_t a_extent = a.dims() == dims ? outer.extent : 1;
  const int64_t b_extent = b.dims() == dims ? b.dim(shared).extent : 1;
  if (a.offset() + a_extent * outer.stride != b.offset()) return std::nullopt;
  StridedMemory result(a.offset(), a.run_bytes());
  for (int d = 0; d < shared; ++d) result.AddDim(a.dim(d).extent, a.dim(d).stride);
  result.AddDim(a_extent + b_extent, outer.stride);
  result.Finish();
  return result;
}

// Joins neighbours of the order at hand until none are left to join.
void JoinNeighbours(std::vector<StridedMemory>* memories) {
  std::vector<StridedMemory> joined;
  for (const StridedMemory& memory : *memories) {
    joined.push_back(memory);
    while (joined.size() > 1) {
      const auto both = Joined(joined[joined.size() - 2], joined.back());
      if (!both) break;
      joined.pop_back();
      joined.back() = *both;
    }
  }
  *memories = std::move(joined);
}

// Orders by what is beside each other in one row of the outermost dimension, then down the rows.
auto ColumnKey(const StridedMemory& memory) {
  const int64_t stride = memory.dims() == 0 ? 1 : memory.dim(memory.dims() - 1).stride;
  return std::tuple(memory.run_bytes(), memory.dims(), stride,
                    stride == 0 ? 0 : memory.offset() % stride, memory.offset());
}

// The same bytes in as few and as long runs as neighbours give.
void JoinAll(std::vector<StridedMemory>* memories) {
  size_t before = 0;
  do {
    before = memories->size();
    std::stable_sort(memories->begin(), memories->end(),
                     [](const auto& a, const auto& b) { return a.offset() < b.offset(); });
    JoinNeighbours(memories);
    std::stable_sort(memories->begin(), memories->end(),
                     [](const auto& a, const auto& b) { return ColumnKey(a) < ColumnKey(b); });
    JoinNeighbours(memories);
  } while (memories->size() < before);
}

// Appends copies of the innermost `dims` of the memory. Where a shape has no room for all
// dimensions, the outermost becomes several operations.
void AddBytes(uint32_t buffer, const StridedMemory& memory, int dims, int64_t offset,
              CopyProgram* program) {
  if (dims + 1 > kMaxDims) {
    const StridedDim& outer = memory.dim(dims - 1);
    for (int64_t i = 0; i < outer.extent; ++i) {
      AddBytes(buffer, memory, dims - 1, offset + i * outer.stride, program);
    }
    return;
  }
  CopyShape shape;
  shape.ndim = dims + 1;
  for (int d = 0; d < dims; ++d) {
    const auto at = static_cast<size_t>(dims - 1 - d);
    shape.extents[at] = memory.dim(d).extent;
    shape.source_strides[at] = memory.dim(d).stride;
  }
  shape.extents[static_cast<size_t>(dims)] = memory.run_bytes();
  shape.source_strides[static_cast<size_t>(dims)] = 1;
  shape.target_strides = shape.source_strides;
  shape.tensor_strides =
      RowMajor(shape.ndim, 1, [&shape](int d) { return shape.extents[static_cast<size_t>(d)]; });
  shape.source = shape.wire = shape.target = DType::kU8;
  CopyOp op;
  op.source_base = op.target_base = buffer;
  op.source_offset = op.target_offset = offset;
  program->Add(shape, op);
}

}  // namespace

CopyProgram BuildCommit(const Layout& layout) {
  std::vector<std::vector<StridedMemory>> memories(layout.buffers.size());
  for (const Binding& binding : layout.bindings) {
    const StridedMemory memory = MemoryOf(binding);
    if (!memory.empty()) memories[binding.buffer].push_back(memory);
  }
  CopyProgram program;
  for (uint32_t buffer = 0; buffer < memories.size(); ++buffer) {
    JoinAll(&memories[buffer]);
    for (const StridedMemory& memory : memories[buffer]) {
      AddBytes(buffer, memory, memory.dims(), memory.offset(), &program);
    }
  }
  return program;
}

}  // namespace bascule
