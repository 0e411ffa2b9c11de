// The shm transport with its limits open to tests; users call MakeShmTransport (transport.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "transport/transport.h"

namespace bascule::shm {

// What one listening process grants, so that a slow or hostile client costs it little.
struct ShmLimits {
  size_t max_connections = 4096;
  // Connections that have not shown the token; beyond it the oldest is dropped.
  size_t max_unauthenticated = 128;
  // From accept to a proven token.
  std::chrono::milliseconds handshake_timeout{5'000};
  // Without any progress on a half-received request or a half-sent answer.
  std::chrono::milliseconds stall_timeout{30'000};
  int handler_threads = 2;
};

[[nodiscard]] Result<std::shared_ptr<Transport>> MakeShmTransport(TransportIdentity identity,
                                                                  ShmOptions options,
                                                                  ShmLimits limits);

}  // namespace bascule::shm
