#include <arpa/inet.h>
#include <fmt/format.h>
#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "bascule.grpc.pb.h"
#include "base/fork_guard.h"
#include "base/unix_fd.h"
#include "coordinator/grpc_common.h"
#include "coordinator/rpc.h"

namespace bascule {
namespace {

// One call that waits for its answer. Answered once: by its handler or by Stop.
class PendingCall {
 public:
  PendingCall(grpc::ServerUnaryReactor* reactor, v1::CallReply* reply)
      : reactor_(reactor), reply_(reply) {}

  void Answer(Result<std::string> result) {
    if (answered_.exchange(true)) return;
    if (result.ok()) {
      reply_->set_reply(std::move(*result));
    } else {
      const Status status = result.status();
      v1::Error* error = reply_->mutable_error();
      error->set_code(static_cast<uint32_t>(status.code()));
      error->set_message(status.message());
      error->set_rank(status.rank());
      error->set_peer(status.peer());
      error->set_tensor(status.tensor());
    }
    reactor_->Finish(grpc::Status::OK);
  }
  void Refuse() {
    if (answered_.exchange(true)) return;
    reactor_->Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server stopped"));
  }

 private:
  grpc::ServerUnaryReactor* reactor_;
  v1::CallReply* reply_;  // valid until answered
  std::atomic<bool> answered_{false};
};

// The calls in flight. Outlives the server in handlers that are late.
class PendingCalls {
 public:
  // False: closed.
  bool Add(const std::shared_ptr<PendingCall>& call) {
    const std::lock_guard lock(mutex_);
    if (!closed_) calls_.insert(call);
    return !closed_;
  }
  void Remove(const std::shared_ptr<PendingCall>& call) {
    const std::lock_guard lock(mutex_);
    calls_.erase(call);
  }
  void Close() {
    std::set<std::shared_ptr<PendingCall>> calls;
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      calls.swap(calls_);
    }
    for (const auto& call : calls) call->Refuse();
  }

 private:
  std::mutex mutex_;
  bool closed_ = false;
  std::set<std::shared_ptr<PendingCall>> calls_;
};

class ChannelService final : public v1::Channel::CallbackService {
 public:
  ChannelService(std::string token, RpcAsyncHandler handler)
      : token_(std::move(token)), handler_(std::move(handler)) {}

  grpc::ServerUnaryReactor* Call(grpc::CallbackServerContext* context,
                                 const v1::CallRequest* request, v1::CallReply* reply) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    auto call = std::make_shared<PendingCall>(reactor, reply);
    if (!Admitted(*context)) {
      call->Answer(Status(Code::kPermissionDenied,
                          "the token does not match; check that all ranks of the job have one "
                          "token and that this is the right address"));
      return reactor;
    }
    if (!calls_->Add(call)) {
      call->Refuse();
      return reactor;
    }
    constexpr int64_t kMostNs = int64_t{1} << 62;
    const int64_t wait_ns = std::clamp<int64_t>(request->wait_ns(), 0, kMostNs);
    const gpr_timespec left =
        gpr_time_sub(context->raw_deadline(), gpr_now(context->raw_deadline().clock_type));
    const int64_t left_ns =
        left.tv_sec > (int64_t{1} << 32) ? kMostNs : left.tv_sec * 1'000'000'000 + left.tv_nsec;
    // Not later than in an hour: the sum with the clock must not overflow.
    const int64_t hour_ns = int64_t{3600} * 1'000'000'000;
    const Deadline deadline =
        Deadline::In(std::chrono::nanoseconds(std::min({wait_ns, left_ns, hour_ns})));
    handler_(request->method(), request->request(), deadline,
             [calls = calls_, call](Result<std::string> result) {
               call->Answer(std::move(result));
               calls->Remove(call);
             });
    return reactor;
  }

  // From now on calls are refused; those in flight are answered.
  void Close() { calls_->Close(); }

 private:
  bool Admitted(const grpc::CallbackServerContext& context) const {
    const auto& metadata = context.client_metadata();
    const auto [first, last] = metadata.equal_range(kTokenKey);
    if (std::distance(first, last) != 1) return false;
    const grpc::string_ref given = first->second;
    if (given.size() != token_.size()) return false;
    unsigned char difference = 0;
    for (size_t i = 0; i < token_.size(); ++i) {
      difference |= static_cast<unsigned char>(given.data()[i] ^ token_[i]);
    }
    return difference == 0;
  }

  const std::string token_;
  const RpcAsyncHandler handler_;
  const std::shared_ptr<PendingCalls> calls_ = std::make_shared<PendingCalls>();
};

// Threads for handlers that block; made when no thread is idle, up to a limit.
class HandlerPool : public std::enable_shared_from_this<HandlerPool> {
 public:
  static constexpr size_t kMaxThreads = 512;

  void Post(std::function<void()> work) {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    work_.push_back(std::move(work));
    if (idle_ < work_.size() && threads_ < kMaxThreads) {
      ++threads_;
      std::thread([self = shared_from_this()] { self->Run(); }).detach();
    }
    lock.unlock();
    wake_.notify_one();
  }

  // Waits for running handlers at most this long.
  void Close(std::chrono::nanoseconds patience) {
    std::unique_lock lock(mutex_);
    closed_ = true;
    work_.clear();
    wake_.notify_all();
    done_.wait_for(lock, patience, [this] { return threads_ == 0; });
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    while (!closed_) {
      ++idle_;
      const bool woken = wake_.wait_for(lock, std::chrono::seconds(5),
                                        [this] { return closed_ || !work_.empty(); });
      --idle_;
      if (!woken || closed_) break;
      std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
    }
    --threads_;
    done_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<std::function<void()>> work_;
  size_t idle_ = 0;
  size_t threads_ = 0;
  bool closed_ = false;
};

struct ListenAddress {
  std::string host;
  uint32_t port = 0;
  [[nodiscard]] std::string ToString() const { return fmt::format("{}:{}", host, port); }
};

// gRPC itself takes ports modulo 2^16, signs, blanks, and no port for 443.
Result<ListenAddress> ParseListenAddress(const std::string& listen) {
  auto wrong = [&listen](std::string_view why) {
    return Status(Code::kInvalidArgument,
                  fmt::format("the address \"{}\" to listen on {}; write host:port, e.g. "
                              "127.0.0.1:7070 or [::1]:0 (port 0: any)",
                              listen, why));
  };
  if (listen.empty()) return wrong("is empty");
  const size_t colon = listen.rfind(':');
  if (colon == std::string::npos) return wrong("has no port");
  ListenAddress address{listen.substr(0, colon)};
  if (address.host.empty()) return wrong("has no host (0.0.0.0 and [::] are all interfaces)");
  const bool bracketed = address.host.starts_with('[') && address.host.ends_with(']');
  if (!bracketed && address.host.find(':') != std::string::npos) {
    return wrong("has a host with colons that is not in brackets");
  }
  const char* const end = listen.data() + listen.size();
  const auto [stop, error] = std::from_chars(listen.data() + colon + 1, end, address.port);
  if (error != std::errc() || stop != end || address.port > 65535) {
    return wrong("has a port that is no number from 0 to 65535");
  }
  return address;
}

bool IsLoopback(const std::string& host) {
  in_addr address{};
  const bool ipv4 = inet_pton(AF_INET, host.c_str(), &address) == 1;
  return host == "localhost" || host == "[::1]" || (ipv4 && ntohl(address.s_addr) >> 24 == 127);
}

// Why an address cannot be listened on, by trying with a socket of our own.
std::string WhyNot(const ListenAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  std::string host = address.host;
  if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
  const int error = getaddrinfo(host.c_str(), fmt::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) return gai_strerror(error);
  std::string why = "no address";
  for (const addrinfo* item = found; item != nullptr; item = item->ai_next) {
    const UnixFd fd(socket(item->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd.get(), item->ai_addr, item->ai_addrlen) != 0 || listen(fd.get(), 1) != 0) {
      why = std::error_code(errno, std::generic_category()).message();
      break;
    }
  }
  freeaddrinfo(found);
  return why;
}

class GrpcServer final : public RpcServer {
 public:
  GrpcServer(std::string token, RpcAsyncHandler handler, std::shared_ptr<HandlerPool> pool)
      : service_(std::move(token), std::move(handler)), pool_(std::move(pool)) {}
  ~GrpcServer() override {
    if (fork_.forked()) {
      // Its threads do not exist here; closing it would wait for them.
      [[maybe_unused]] const auto* leaked = server_.release();
      return;
    }
    GrpcServer::Stop();
  }

  Status Start(const ListenAddress& listen) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(listen.ToString(), grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.SetMaxSendMessageSize(kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      server_ = nullptr;
      return Status(Code::kUnavailable,
                    fmt::format("cannot listen on {}: {}", listen.ToString(), WhyNot(listen)));
    }
    address_ = fmt::format("{}:{}", listen.host, port);
    return Status::Ok();
  }

  std::string address() const override { return address_; }

  void Stop() override {
    const std::lock_guard lock(stop_);
    if (server_ == nullptr) return;
    service_.Close();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    if (pool_ != nullptr) pool_->Close(std::chrono::seconds(1));
    server_ = nullptr;
  }

 private:
  const ForkGuard fork_;
  ChannelService service_;
  const std::shared_ptr<HandlerPool> pool_;
  std::mutex stop_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

Result<std::unique_ptr<RpcServer>> StartServer(const std::string& listen, const std::string& token,
                                               RpcAsyncHandler handler,
                                               std::shared_ptr<HandlerPool> pool) {
  if (token.size() > kMaxTokenBytes) {
    return Status(Code::kInvalidArgument, fmt::format("a token of {} bytes; the limit is {}",
                                                      token.size(), kMaxTokenBytes));
  }
  BASCULE_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(listen));
  if (token.empty() && !IsLoopback(address.host)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("listening at {} needs a job token; it may be empty only on "
                              "127.0.0.1",
                              address.ToString()));
  }
  QuietGrpc();
  auto server = std::make_unique<GrpcServer>(token, std::move(handler), std::move(pool));
  BASCULE_RETURN_IF_ERROR(server->Start(address));
  return std::unique_ptr<RpcServer>(std::move(server));
}

}  // namespace

Result<std::unique_ptr<RpcServer>> StartAsyncGrpcServer(const std::string& listen,
                                                        const std::string& token,
                                                        RpcAsyncHandler handler) {
  return StartServer(listen, token, std::move(handler), nullptr);
}

Result<std::unique_ptr<RpcServer>> StartGrpcServer(const std::string& listen,
                                                   const std::string& token, RpcHandler handler) {
  auto pool = std::make_shared<HandlerPool>();
  auto shared = std::make_shared<const RpcHandler>(std::move(handler));
  RpcAsyncHandler posting = [pool, shared](const std::string& method, const std::string& request,
                                           Deadline deadline, RpcDone done) {
    pool->Post([shared, method, request, deadline, done = std::move(done)] {
      done((*shared)(method, request, deadline));
    });
  };
  return StartServer(listen, token, std::move(posting), pool);
}

}  // namespace bascule
