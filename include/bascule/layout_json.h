// Layouts and worlds as JSON; the schema is in docs/layout-json.md.
//
// Reading takes untrusted text: an error is InvalidArgument and gives the path of the value
// ("$.bindings[3].box[0]") or the line of a syntax error. Unknown and repeated keys are errors.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "bascule/layout.h"
#include "bascule/mesh.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// A mesh and what its ranks hold.
struct DeclaredWorld {
  Mesh mesh;
  std::shared_ptr<const WorldTemplate> world;
};

// One rank's layout. Buffers go by name and size: names must be unique; data pointers and
// descriptors are not written. `indent`: spaces a level, negative for one line.
[[nodiscard]] Result<std::string> LayoutToJson(const Layout& layout, int indent = -1);
// The buffers have no data: set `data` (and `fd`) of each, then call ValidateLayout, which checks
// what the layout means.
[[nodiscard]] Result<Layout> LayoutFromJson(std::string_view text);

// A world, in the expanded form (lists, classes, names).
[[nodiscard]] Result<std::string> WorldToJson(const DeclaredWorld& world, int indent = -1);
// A world in the expanded form, or declared by placements and flat buffers.
[[nodiscard]] Result<DeclaredWorld> WorldFromJson(std::string_view text);

}  // namespace bascule
#pragma GCC visibility pop
