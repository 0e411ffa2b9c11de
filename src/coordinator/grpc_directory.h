// The directory over gRPC: server and client halves.
#pragma once

#include <memory>
#include <string>

#include "bascule/status.h"
#include "coordinator/directory.h"
#include "coordinator/rpc.h"
#include "coordinator/service.h"

namespace bascule {

// A Directory at "host:port". Thread-safe; connects at the first call and again whenever the
// connection breaks. Calls try again on kUnavailable until their deadline (a coordinator that is
// being restarted, or one that this rank has yet to rejoin).
[[nodiscard]] std::unique_ptr<Directory> MakeGrpcDirectory(const std::string& address,
                                                           const std::string& token);

// Answers control messages by the service; for any RpcServer. Waiting calls hold no thread.
[[nodiscard]] RpcAsyncHandler MakeDirectoryHandler(std::shared_ptr<CoordinatorService> service);

// Serves the service at `listen`. The server does not stop the service.
[[nodiscard]] Result<std::unique_ptr<RpcServer>> ServeDirectory(
    std::shared_ptr<CoordinatorService> service, const std::string& listen,
    const std::string& token);

}  // namespace bascule
