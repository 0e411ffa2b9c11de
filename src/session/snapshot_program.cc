// The snapshot of a source, cut so that the sums of what receivers fetch fall out of it; and those
// sums from the arena.
#include <algorithm>
#include <map>
#include <set>

#include "plan/boxes.h"
#include "session/program_building.h"
#include "session/programs.h"

namespace bascule {
namespace programs {
namespace {

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
    const std::set<uint32_t> repeats = Repeats(cells, wanted);
    for (size_t i = 0; i < cells.boxes.size(); ++i) {
      const Box& cell = cells.boxes[i];
      const uint32_t sum = snapshot_.program.sums++;
      snapshot_.box_cells[index].push_back(sum);
      for (uint32_t owner : cells.OwnersOf(i)) {
        if (owner == kNone) continue;
        // A chunk that wants elements for two names (tied here, apart there) sums them twice.
        const auto times =
            !repeats.contains(owner)
                ? 1
                : std::count_if(wanted.begin(), wanted.end(), [&](const WantedPart& w) {
                    return w.part.owner == owner && w.part.box.Intersect(cell) == cell;
                  });
        owners_[owner].check.cells.insert(owners_[owner].check.cells.end(),
                                          static_cast<size_t>(times), sum);
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

  // Owners that want an element more than once: they want more than their cells hold.
  static std::set<uint32_t> Repeats(const plan::Cells& cells, std::span<const WantedPart> wanted) {
    std::map<uint32_t, int64_t> surplus;
    for (const WantedPart& part : wanted) surplus[part.part.owner] += part.part.box.size();
    for (size_t i = 0; i < cells.boxes.size(); ++i) {
      for (uint32_t owner : cells.OwnersOf(i)) surplus[owner] -= cells.boxes[i].size();
    }
    std::set<uint32_t> repeats;
    for (const auto& [owner, elements] : surplus) {
      if (owner != kNone && elements > 0) repeats.insert(owner);
    }
    return repeats;
  }

  static plan::Cells WholeCell(const Box& box, std::span<const WantedPart> wanted) {
    plan::Cells cells;
    cells.boxes.push_back(box);
    for (const WantedPart& part : wanted) cells.owners.push_back(part.part.owner);
    std::sort(cells.owners.begin(), cells.owners.end());
    cells.owners.erase(std::unique(cells.owners.begin(), cells.owners.end()), cells.owners.end());
    cells.offsets.push_back(static_cast<uint32_t>(cells.owners.size()));
    return cells;
  }

  // The box cut to cells by the wanted boxes in it, the largest of them where all would give too
  // many cells. The entry itself is an owner (kNone), so that the cells fill it.
  plan::Cells CutEntry(const Box& box, std::span<const WantedPart> wanted) {
    const bool whole = std::all_of(wanted.begin(), wanted.end(),
                                   [&box](const WantedPart& w) { return w.part.box == box; });
    if (whole) return WholeCell(box, wanted);
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
}  // namespace programs

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
  return programs::SnapshotBuilder(layout, world, coordinates, max_cells_per_box).Build(wanted);
}

Result<CopyProgram> BuildArenaDigest(const ArenaMap& arena, const WorldTemplate& world,
                                     std::span<const WantedBox> wanted, uint32_t chunks) {
  using namespace programs;  // NOLINT(google-build-using-namespace)
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

}  // namespace bascule
