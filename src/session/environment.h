// Small things that both ends do when they connect.
#pragma once

#include <memory>

#include "bascule/layout.h"
#include "bascule/status.h"
#include "layout/world_template.h"

namespace bascule {

// Every BASCULE_* variable must be known (none is yet, beside those that Kubernetes injects for a
// service of that name): a mistyped setting must not be ignored in silence.
[[nodiscard]] Status CheckEnvironment();

// Every buffer is CPU memory: this build has no CUDA.
[[nodiscard]] Status CheckHostMemory(const Layout& layout);

// The layout's template: the declared one (checked against its boxes), or one made of its boxes.
[[nodiscard]] Result<std::shared_ptr<const WorldTemplate>> WorldOf(const Layout& layout);

}  // namespace bascule
