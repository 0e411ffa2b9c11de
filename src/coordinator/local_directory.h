// A Directory over a coordinator in the same process.
#pragma once

#include <memory>

#include "coordinator/directory.h"
#include "coordinator/service.h"

namespace bascule {

// Thread-safe. Calls after the service stopped return kUnavailable.
[[nodiscard]] std::unique_ptr<Directory> MakeLocalDirectory(
    std::shared_ptr<CoordinatorService> service);

}  // namespace bascule
