// Parses bytes as a world template. What is taken must be canonical, and what it promises must
// hold: boxes inside their shapes, an arena that fits them.
#include "layout/world_template.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bascule;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto world = WorldTemplate::Parse(bytes);
  if (!world.ok()) {
    const Code code = world.status().code();
    if (code != Code::kInvalidArgument && code != Code::kVersionMismatch) std::abort();
    return 0;
  }
  if (world->Serialize() != bytes || !world->Validate().ok()) std::abort();
  const std::vector<uint32_t> coordinates = world->CoordinatesOf(world->ranks() - 1);
  size_t total = 0;
  for (uint32_t c = 0; c < world->classes.size(); ++c) {
    // Millions of boxes are legal and slow; not what is looked for here.
    size_t most = 0;
    for (const BoxProduct& product : world->classes[c].products) {
      size_t boxes = 1;
      for (const DimSelect& select : product.dims) {
        boxes *= world->lists[select.list].Entry(world->EntryOf(select, coordinates)).size();
        if (boxes > 4096) return 0;
      }
      most += boxes;
    }
    if (most > 4096) return 0;
    std::vector<Box> boxes;
    world->BoxesOf(c, coordinates, &boxes);
    for (const Box& box : boxes) {
      if (Box::Whole(world->classes[c].shape).Intersect(box) != box) std::abort();
    }
    total += boxes.size();
  }
  if (total * world->names.size() > 65536) return 0;
  const ArenaMap map = MapArena(*world, coordinates);
  if (map.first_entry.size() != world->names.size() + 1) std::abort();
  for (const ArenaMap::Entry& entry : map.entries) {
    if (entry.offset % kArenaAlignment != 0 || entry.offset > map.bytes) std::abort();
  }
  return 0;
}
