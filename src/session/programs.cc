// The landing of a part, and the places of what it reads.
#include "session/programs.h"

#include <algorithm>
#include <optional>

#include "plan/boxes.h"
#include "session/program_building.h"

namespace bascule {
namespace programs {
namespace {

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
    // What can be read back is counted rather than what a function changed.
    std::stable_partition(landings_.begin(), landings_.end(), [](const Landing& landing) {
      return landing.binding->function == LandingFunction::kNone;
    });
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

class LandingBuilder {
 public:
  LandingBuilder(const Part& part, const World& world, const Layout& layout,
                 const PlaceLookup& places)
      : part_(part), world_(world), places_(places), bindings_(layout) {
    const WorldTemplate& own = *world.templates[world.members[part.member].world_template];
    for (const PartTensor& tensor : part.tensors) {
      tensors_.push_back(
          {SpaceOf(own.classes[tensor.destination_class].shape, tensor.name),
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
    const uint32_t source = part_.chunks[chunk].source;
    const PartTensor& tensor = part_.tensors[piece.tensor];
    const Box& box = part_.boxes[piece.box];
    const uint32_t name = tensor.source_names[world_.members[source].world_template];
    if (name == kNone) return NoPlace(source, tensor, box);
    const std::span<const SourcePlace> places = places_(source, name);
    const uint32_t found = finder_.Find(uint64_t{source} << 32 | name, places, box);
    if (found != kNone) return AddPart(chunk, piece.tensor, box, places[found]);
    return AddScattered(chunk, piece, places);
  }

  // A rollout may hold a piece in several boxes.
  Status AddScattered(uint32_t chunk, const Piece& piece, std::span<const SourcePlace> places) {
    const Box& box = part_.boxes[piece.box];
    std::vector<Box> rest{box};
    for (const SourcePlace& place : places) {
      if (place.box.ndim() != box.ndim()) continue;
      for (const Box& part : rest) {
        const Box common = part.Intersect(place.box);
        if (common.empty()) continue;
        BASCULE_RETURN_IF_ERROR(AddPart(chunk, piece.tensor, common, place));
      }
      SubtractFrom(&rest, place.box);
      if (rest.empty()) return Status::Ok();
    }
    return NoPlace(part_.chunks[chunk].source, part_.tensors[piece.tensor], rest[0]);
  }

  static Status NoPlace(uint32_t source, const PartTensor& tensor, const Box& box) {
    return TensorError(tensor.name, "no place of member " + std::to_string(source) + " holds box " +
                                        box.ToString());
  }

  // A part of a piece that lies in one place.
  Status AddPart(uint32_t chunk, uint32_t index, const Box& box, const SourcePlace& place) {
    const PartTensor& tensor = part_.tensors[index];
    const Target& target = tensors_[index];
    BASCULE_RETURN_IF_ERROR(CheckCasts(part_.chunks[chunk].source, tensor, place, box));
    int64_t landed = 0;
    target.landings.ForEachOverlap(box, [&](const Landing& landing, const Box& common) {
      const Move move{target.space, tensor.wire, landing.counted ? chunk : kNoSum,
                      landing.binding->function};
      AddCopy(common, PlaceOf(place), PlaceOf(*landing.binding), move, &landing_.program);
      if (landing.counted) landed += common.size();
    });
    if (landed == box.size()) return Status::Ok();
    return TensorError(tensor.name, "bindings take " + std::to_string(landed) + " of the " +
                                        std::to_string(box.size()) + " elements of box " +
                                        box.ToString());
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

}  // namespace
}  // namespace programs

Result<LandingProgram> BuildLanding(const Part& part, const World& world, const Layout& layout,
                                    const PlaceLookup& places) {
  return programs::LandingBuilder(part, world, layout, places).Build();
}

std::vector<std::vector<SourcePlace>> PlacesOfArena(const ArenaMap& arena,
                                                    const WorldTemplate& world, uint32_t base) {
  std::vector<std::vector<SourcePlace>> places(world.names.size());
  for (const ArenaMap::Entry& entry : arena.entries) {
    const DType dtype = programs::ClassOf(world, entry.tensor).dtype;
    places[entry.tensor].push_back({base, static_cast<int64_t>(entry.offset), entry.box,
                                    programs::RowMajor(entry.box, DTypeSize(dtype)), dtype});
  }
  return places;
}

ArenaPlaces::ArenaPlaces(const WorldTemplate& world, std::span<const uint32_t> coordinates,
                         uint32_t base)
    : world_(world), class_places_(world.classes.size()) {
  std::vector<int64_t> class_bytes;
  std::vector<Box> boxes;
  for (uint32_t c = 0; c < world.classes.size(); ++c) {
    boxes.clear();
    world.BoxesOf(c, coordinates, &boxes);
    const DType dtype = world.classes[c].dtype;
    int64_t offset = 0;
    for (const Box& box : boxes) {
      class_places_[c].push_back(
          {base, offset, box, programs::RowMajor(box, DTypeSize(dtype)), dtype});
      constexpr auto kAlign = static_cast<int64_t>(kArenaAlignment);
      offset += (box.size() * DTypeSize(dtype) + kAlign - 1) / kAlign * kAlign;
    }
    class_bytes.push_back(offset);
  }
  int64_t offset = 0;
  offsets_.reserve(world.names.size());
  for (uint32_t c : world.class_of) {
    offsets_.push_back(offset);
    offset += class_bytes[c];
  }
}

std::span<const SourcePlace> ArenaPlaces::Of(uint32_t tensor) {
  answer_ = class_places_[world_.class_of[tensor]];
  for (SourcePlace& place : answer_) place.offset += offsets_[tensor];
  return answer_;
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

}  // namespace bascule
