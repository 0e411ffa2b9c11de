// Parses text as a layout and as a world. What is taken can be written and comes back as it was.
#include "bascule/layout_json.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "layout/world_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bascule;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (auto layout = LayoutFromJson(text); layout.ok()) {
    (void)ValidateLayout(*layout);
    if (const auto written = LayoutToJson(*layout); written.ok()) {
      const auto again = LayoutFromJson(*written);
      if (!again.ok() || *LayoutToJson(*again) != *written) std::abort();
    }
  }
  if (auto world = WorldFromJson(text); world.ok()) {
    const auto written = WorldToJson(*world);
    if (!written.ok()) std::abort();
    const auto again = WorldFromJson(*written);
    if (!again.ok() || *again->world != *world->world) std::abort();
  }
  return 0;
}
