#include "session/environment.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <string_view>
#include <vector>

#include "base/unix_fd.h"

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

Status CheckDescriptors() {
  // What gRPC, the sockets and the regions of one rank take, with some to spare.
  constexpr size_t kNeeded = 32;
  std::vector<UnixFd> taken;
  while (taken.size() < kNeeded) {
    taken.emplace_back(eventfd(0, EFD_CLOEXEC));
    if (taken.back().valid()) continue;
    return Status(Code::kResourceExhausted,
                  fmt::format("only {} more descriptors can be opened, a rank needs {}; raise "
                              "RLIMIT_NOFILE (ulimit -n)",
                              taken.size() - 1, kNeeded));
  }
  return Status::Ok();
}

Status CheckThreads(int threads) {
  if (threads >= 1 && threads <= 1024) return Status::Ok();
  return Status(Code::kInvalidArgument,
                fmt::format("threads is {}; 1 to 1024 are allowed", threads));
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
