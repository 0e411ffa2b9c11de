#include "session/environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <string_view>

extern char** environ;

namespace bascule {

// gRPC's threads do not survive a fork, and a child that goes on with it hangs: remember which
// process used it first. (The one thing here that is global, because gRPC is.)
Status CheckNotForked() {
  static std::atomic<pid_t> first_user{0};
  pid_t expected = 0;
  if (first_user.compare_exchange_strong(expected, getpid()) || expected == getpid()) {
    return Status::Ok();
  }
  return Status(
      Code::kForked,
      "this process was forked from one that had connected; start it with spawn (or exec) "
      "instead of fork, or fork before the parent connects");
}

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
