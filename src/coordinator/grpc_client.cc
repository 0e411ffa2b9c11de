#include <fmt/format.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "bascule.grpc.pb.h"
#include "base/fork_guard.h"
#include "coordinator/grpc_common.h"
#include "coordinator/rpc.h"

namespace bascule {
namespace {

Status StatusOf(const v1::Error& error) {
  const auto highest = static_cast<uint32_t>(Code::kInternal);
  const Code code = error.code() == 0 || error.code() > highest ? Code::kInternal
                                                                : static_cast<Code>(error.code());
  return Status(code, error.message())
      .WithRank(error.rank())
      .WithPeer(error.peer())
      .WithTensor(error.tensor());
}

// Errors that gRPC itself found.
Status StatusOf(const grpc::Status& status, const std::string& address) {
  switch (status.error_code()) {
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return Status(Code::kResourceExhausted,
                    fmt::format("{}: {}", address, status.error_message()));
    case grpc::StatusCode::UNIMPLEMENTED:
      return Status(
          Code::kUnimplemented,
          fmt::format("{} is a gRPC server, but not one of Bascule; check the address", address));
    default:
      return Status(Code::kInternal,
                    fmt::format("{}: gRPC error {}: {}", address,
                                static_cast<int>(status.error_code()), status.error_message()));
  }
}

class GrpcClient final : public RpcClient {
 public:
  GrpcClient(std::string address, std::string token)
      : address_(std::move(address)), token_(std::move(token)) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(kMaxMessageBytes);
    // The minimum is also how long a connection may take to come up.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
    arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 500);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
    arguments.SetServiceConfigJSON("{}");
    channel_ = grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::Channel::NewStub(channel_);
  }
  ~GrpcClient() override {
    if (!fork_.forked()) return;
    // gRPC's threads do not exist in a forked child; tearing the channel down would wait for them.
    [[maybe_unused]] const auto* channel =
        new (std::nothrow) std::shared_ptr<grpc::Channel>(channel_);
    [[maybe_unused]] const auto* stub = stub_.release();
  }

  Result<std::string> Call(const std::string& method, const std::string& request,
                           Deadline deadline) override {
    BASCULE_RETURN_IF_ERROR(fork_.Check());
    if (token_.size() > kMaxTokenBytes) {
      return Status(Code::kPermissionDenied, "the token is too long to be the right one");
    }
    v1::CallRequest message;
    message.set_method(method);
    message.set_request(request);
    std::string unreachable;
    while (true) {
      if (cancelled_) return Status(Code::kClosed, "the session is closed").WithPeer(address_);
      const std::chrono::nanoseconds left = deadline.Left();
      if (left.count() == 0) break;
      // The handler ends a little earlier, so that its own answer, which says more, arrives.
      const int64_t margin = std::clamp<int64_t>(left.count() / 10, 0, 50'000'000);
      message.set_wait_ns(left.count() - margin);
      v1::CallReply reply;
      const grpc::Status status = CallOnce(message, left, &reply);
      if (status.ok()) {
        if (reply.has_error()) return StatusOf(reply.error());
        return std::move(*reply.mutable_reply());
      }
      if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
        if (channel_->GetState(false) != GRPC_CHANNEL_READY && unreachable.empty()) {
          unreachable = "no connection";
        }
        continue;
      }
      // CANCELLED: by Cancel(), or by a server that is going down.
      if (status.error_code() != grpc::StatusCode::UNAVAILABLE &&
          status.error_code() != grpc::StatusCode::CANCELLED) {
        return StatusOf(status, address_);
      }
      unreachable = status.error_message();
      std::unique_lock lock(mutex_);
      changed_.wait_for(
          lock, std::min<std::chrono::nanoseconds>(deadline.Left(), std::chrono::milliseconds(50)),
          [this] { return cancelled_.load(); });
    }
    if (!unreachable.empty()) {
      return Status(Code::kUnavailable,
                    fmt::format("{} cannot be reached: {}", address_, unreachable))
          .WithPeer(address_);
    }
    return Status(Code::kDeadlineExceeded,
                  fmt::format("{} did not answer {} in time", address_, method))
        .WithPeer(address_);
  }

  void Cancel() override {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (grpc::ClientContext* call : calls_) call->TryCancel();
    changed_.notify_all();
  }

 private:
  grpc::Status CallOnce(const v1::CallRequest& message, std::chrono::nanoseconds left,
                        v1::CallReply* reply) {
    grpc::ClientContext context;
    context.AddMetadata(kTokenKey, token_);
    // On the monotonic clock: a step of the wall clock must not move it.
    context.set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                      gpr_time_from_nanos(left.count(), GPR_TIMESPAN)));
    {
      std::lock_guard lock(mutex_);
      if (cancelled_) return grpc::Status(grpc::StatusCode::CANCELLED, "closed");
      calls_.insert(&context);
    }
    grpc::Status status = stub_->Call(&context, message, reply);
    std::lock_guard lock(mutex_);
    calls_.erase(&context);
    return status;
  }

  const ForkGuard fork_;
  const std::string address_;
  const std::string token_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Channel::Stub> stub_;

  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;  // guards calls_, and the setting of cancelled_
  std::condition_variable changed_;
  std::set<grpc::ClientContext*> calls_;  // in flight
};

}  // namespace

void QuietGrpc() {
  static std::once_flag once;
  std::call_once(once, [] { gpr_set_log_function([](gpr_log_func_args*) {}); });
}

std::unique_ptr<RpcClient> MakeGrpcClient(const std::string& address, const std::string& token) {
  QuietGrpc();
  return std::make_unique<GrpcClient>(address, token);
}

}  // namespace bascule
