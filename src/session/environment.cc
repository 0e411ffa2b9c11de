#include "session/environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <string_view>

extern char** environ;

namespace bascule {

Status CheckEnvironment() {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with("BASCULE_")) continue;
    if (name.starts_with("BASCULE_SERVICE_") || name.starts_with("BASCULE_PORT")) continue;
    return Status(Code::kInvalidArgument,
                  fmt::format("the environment variable {} is not one that this version knows; "
                              "unset it",
                              name));
  }
  return Status::Ok();
}

Status CheckHostMemory(const Layout& layout) {
  for (const Buffer& buffer : layout.buffers) {
    if (buffer.kind != MemoryKind::kDevice) continue;
    return Status(Code::kUnimplemented,
                  fmt::format("buffer {} is device memory, and this build has no CUDA; give CPU "
                              "tensors",
                              buffer.name));
  }
  return Status::Ok();
}

Result<std::shared_ptr<const WorldTemplate>> WorldOf(const Layout& layout) {
  if (layout.world) {
    BASCULE_RETURN_IF_ERROR(CheckAgainstTemplate(layout, *layout.world, layout.coordinates));
    return layout.world;
  }
  BASCULE_ASSIGN_OR_RETURN(WorldTemplate own, TemplateOf(layout));
  return std::shared_ptr<const WorldTemplate>(std::make_shared<WorldTemplate>(std::move(own)));
}

}  // namespace bascule
