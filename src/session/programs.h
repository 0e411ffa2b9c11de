// Copy programs made from layouts and plans. Pure: no I/O, no devices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/status.h"
#include "copy/program.h"
#include "digest/digest.h"
#include "layout/world_template.h"
#include "plan/plan.h"

namespace bascule {

// A set of boxes of one rank's source tensors, with the chunk that each belongs to: what one
// receiver fetches from this source.
struct WantedBox {
  uint32_t tensor = 0;  // index in the source template's names
  Box box;              // inside the boxes this source holds
  DType wire = DType::kF32;
  uint32_t chunk = 0;  // index in Part::chunks of that receiver
};

// The boxes that `part` fetches from member `source`, in chunk order.
[[nodiscard]] std::vector<WantedBox> WantedFrom(const Part& part, const World& world,
                                                uint32_t source);

// The snapshot of live bindings into the arena, cut so that the sums of every wanted box of known
// receivers fall out of the same pass.
//
// Cells: each arena box is cut, where wanted boxes overlap it in part, into boxes over which the
// set of (receiver, chunk) that want them is constant; one sum per cell. Where that would give more
// than `max_cells_per_box` cells, the smaller wanted boxes of that arena box are left out, and so
// are the checks of their chunks: those sums come from the arena later (BuildArenaDigest).
struct SnapshotProgram {
  CopyProgram program;  // sources: layout.buffers in order; target base 0: the arena
  ArenaMap arena;
  // Which sums add up to a chunk's: `cells` index sums of the program.
  struct Check {
    uint32_t receiver = 0;  // index in the receivers given
    uint32_t chunk = 0;
    std::vector<uint32_t> cells;
  };
  std::vector<Check> checks;  // one per (receiver, chunk) that is fully cut, in that order
  std::vector<std::vector<uint32_t>> box_cells;  // per arena entry: its cells in the class dtype
};
// wanted[i] is what receiver i fetches from this source. Wanted boxes whose wire dtype is not the
// publish dtype are left out too (their sums come from a digest pass over the arena).
[[nodiscard]] Result<SnapshotProgram> BuildSnapshot(const Layout& layout,
                                                    const WorldTemplate& world,
                                                    std::span<const uint32_t> coordinates,
                                                    std::span<const std::vector<WantedBox>> wanted,
                                                    uint32_t max_cells_per_box = 4096);

// Reads wanted boxes in the arena (base 0) and sums them per chunk: for DigestSources. Targets are
// unused. sum index = WantedBox::chunk.
[[nodiscard]] Result<CopyProgram> BuildArenaDigest(const ArenaMap& arena,
                                                   const WorldTemplate& world,
                                                   std::span<const WantedBox> wanted,
                                                   uint32_t chunks);

// The landing of a part: source base = member id of the source (its arena, or with direct export
// its buffers), target base = index in layout.buffers. Sum i is chunk i's. Operations are in chunk
// order; first_op[i] .. first_op[i + 1] are those of chunk i. A piece with two bindings lands twice
// and is summed once. Errors name tensor and box: no place holds it, bindings do not take all of
// it, or (direct export) it is stored, published and wanted in three dtypes, which would round
// twice.
struct LandingProgram {
  CopyProgram program;
  std::vector<uint32_t> first_op;
};
// Where the elements of one source tensor's box lie, for direct export: filled from the peer.
struct SourcePlace {
  uint32_t base = 0;   // source base to use
  int64_t offset = 0;  // bytes to the first element of `box`
  Box box;
  std::array<int64_t, kMaxDims> byte_strides{};
  DType dtype = DType::kF32;
};
// places(member, source tensor name index) gives every box of that tensor on that source. The
// answer need only live until the next call; members are asked for in the order of the part's
// chunks, so that one member's places at a time are enough.
using PlaceLookup =
    std::function<std::span<const SourcePlace>(uint32_t member, uint32_t source_tensor)>;
[[nodiscard]] Result<LandingProgram> BuildLanding(const Part& part, const World& world,
                                                  const Layout& layout, const PlaceLookup& places);
// The places of an arena: base = `base`.
[[nodiscard]] std::vector<std::vector<SourcePlace>> PlacesOfArena(const ArenaMap& arena,
                                                                  const WorldTemplate& world,
                                                                  uint32_t base);
// The same made one tensor at a time, where all at once would be too much: 256 sources of 70,000
// tensors are gigabytes of places.
class ArenaPlaces {
 public:
  // `world` must outlive this.
  ArenaPlaces(const WorldTemplate& world, std::span<const uint32_t> coordinates, uint32_t base);
  // Valid until the next call.
  [[nodiscard]] std::span<const SourcePlace> Of(uint32_t tensor);

 private:
  const WorldTemplate& world_;
  std::vector<std::vector<SourcePlace>> class_places_;  // offsets from the tensor's first box
  std::vector<int64_t> offsets_;                        // of each tensor's first box
  std::vector<SourcePlace> answer_;
};
// The places of live bindings in a layout (direct export; bindings with a landing function are left
// out): base = first_base + buffer index.
[[nodiscard]] std::vector<std::vector<SourcePlace>> PlacesOfLayout(const Layout& layout,
                                                                   const WorldTemplate& world,
                                                                   uint32_t first_base);

// The switch: copies every byte that bindings cover from the shadow (source base i = copy of buffer
// i, same offsets) to the live buffers (target base i). Bytes that no binding covers are not
// touched. Few, long runs; the key is that of the first tensor in the buffer.
[[nodiscard]] CopyProgram BuildCommit(const Layout& layout);

}  // namespace bascule
