// A minimal request/answer channel of byte strings: the engine channel, and what the gRPC directory
// is carried by. gRPC is one implementation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "bascule/deadline.h"
#include "bascule/status.h"

namespace bascule {

// Answers one request; runs on the server's threads, several at once; must return by the deadline.
using RpcHandler =
    std::function<Result<std::string>(const std::string& method, const std::string& request,
                                      Deadline deadline)>;

class RpcServer {
 public:
  virtual ~RpcServer() = default;
  [[nodiscard]] virtual std::string address() const = 0;  // "host:port" as bound
  // Ends at once: calls in flight get kUnavailable. Waits for handlers at most 1 second.
  virtual void Stop() = 0;
};

// One connection to a server; reconnects by itself, resolving names anew.
class RpcClient {
 public:
  virtual ~RpcClient() = default;
  // kUnavailable when the server cannot be reached by the deadline; errors of the handler come with
  // all fields of their Status.
  [[nodiscard]] virtual Result<std::string> Call(const std::string& method,
                                                 const std::string& request,
                                                 Deadline deadline) = 0;
};

// Every call must carry the token; others get kPermissionDenied.
[[nodiscard]] Result<std::unique_ptr<RpcServer>> StartGrpcServer(const std::string& listen,
                                                                 const std::string& token,
                                                                 RpcHandler handler);
[[nodiscard]] std::unique_ptr<RpcClient> MakeGrpcClient(const std::string& address,
                                                        const std::string& token);

}  // namespace bascule
