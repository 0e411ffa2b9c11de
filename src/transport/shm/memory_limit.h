// How much memory this process may still take: the host's, and that of each cgroup it is in (memfd
// pages are charged to the cgroup, and exceeding it kills the process instead of failing a call).
#pragma once

#include <cstdint>
#include <string>

#include "bascule/status.h"

namespace bascule::shm {

struct MemoryRoom {
  uint64_t bytes = UINT64_MAX;  // unlimited or unknown
  std::string limit;            // what bounds it, for messages
};

// The roots are parameters for tests.
[[nodiscard]] MemoryRoom FindMemoryRoom(const std::string& proc = "/proc",
                                        const std::string& cgroup = "/sys/fs/cgroup");

// "64.0 GiB".
[[nodiscard]] std::string FormatBytes(uint64_t bytes);

}  // namespace bascule::shm
