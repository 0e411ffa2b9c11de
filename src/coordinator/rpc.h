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
// A client whose connection broke asks again, so a request may come more than once: answers must
// not depend on how often.
using RpcHandler = std::function<Result<std::string>(
    const std::string& method, const std::string& request, Deadline deadline)>;

// The same without a thread for each waiting call: returns soon, and calls `done` once, then or
// later, from any thread, by the deadline.
using RpcDone = std::function<void(Result<std::string>)>;
using RpcAsyncHandler = std::function<void(const std::string& method, const std::string& request,
                                           Deadline deadline, RpcDone done)>;

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
  // kUnavailable when the server cannot be reached by the deadline (it tries again until then);
  // errors of the handler come with all fields of their Status. kForked in a fork()ed child.
  [[nodiscard]] virtual Result<std::string> Call(const std::string& method,
                                                 const std::string& request, Deadline deadline) = 0;
  // Calls in flight, and all that come later, end at once with kClosed.
  virtual void Cancel() = 0;
};

inline constexpr size_t kMaxTokenBytes = 4096;
inline constexpr int kMaxMessageBytes = 300 << 20;

// Every call must carry the token (any bytes, at most kMaxTokenBytes); others get
// kPermissionDenied. `listen` is "host:port", port 0: any; beyond loopback it needs a token. A port
// in use is an error: it is never shared.
[[nodiscard]] Result<std::unique_ptr<RpcServer>> StartGrpcServer(const std::string& listen,
                                                                 const std::string& token,
                                                                 RpcHandler handler);
[[nodiscard]] Result<std::unique_ptr<RpcServer>> StartAsyncGrpcServer(const std::string& listen,
                                                                      const std::string& token,
                                                                      RpcAsyncHandler handler);
[[nodiscard]] std::unique_ptr<RpcClient> MakeGrpcClient(const std::string& address,
                                                        const std::string& token);

}  // namespace bascule
