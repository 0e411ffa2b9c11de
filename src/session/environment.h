// Small things that both ends do when they connect.
#pragma once

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "bascule/layout.h"
#include "bascule/status.h"
#include "layout/world_template.h"

namespace bascule {

// Every BASCULE_* variable must be known (none is yet, beside those that Kubernetes injects for a
// service of that name): a mistyped setting must not be ignored in silence.
[[nodiscard]] Status CheckEnvironment();

// gRPC ends the process where it gets no descriptors while it starts: kResourceExhausted before.
[[nodiscard]] Status CheckDescriptors();

// 1 .. 1024.
[[nodiscard]] Status CheckThreads(int threads);

// Runs `connect`; what it throws for want of memory or threads becomes kResourceExhausted.
template <typename T>
Result<T> Guarded(const std::function<Result<T>()>& connect) {
  try {
    return connect();
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "memory is used up; raise the limit or free some");
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted, std::string("no thread could be started (") +
                                                error.what() +
                                                "); raise the limits of processes and memory");
  }
}

// Every buffer is CPU memory: this build has no CUDA.
[[nodiscard]] Status CheckHostMemory(const Layout& layout);

// The layout's template: the declared one (checked against its boxes), or one made of its boxes.
[[nodiscard]] Result<std::shared_ptr<const WorldTemplate>> WorldOf(const Layout& layout);

}  // namespace bascule
