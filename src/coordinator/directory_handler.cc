// The server half of the directory: one control message in, one answer out.
#include <fmt/format.h>

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "coordinator/grpc_directory.h"
#include "coordinator/messages.h"

namespace bascule {
namespace {

// A membership of thousands of ranks is encoded once, not once for each rank that asks.
class MembershipCache {
 public:
  Result<std::string> Encoded(Result<CoordinatorService::SharedMembership> membership) {
    if (!membership.ok()) return membership.status();
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [known, bytes] : recent_) {
        if (known == *membership) return bytes;
      }
    }
    std::string bytes = Encode(**membership);
    const std::lock_guard lock(mutex_);
    recent_.emplace_back(*membership, bytes);
    if (recent_.size() > 4) recent_.pop_front();
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<CoordinatorService::SharedMembership, std::string>> recent_;
};

template <typename T>
Result<std::string> Encoded(const Result<T>& reply) {
  if (!reply.ok()) return reply.status();
  return Encode(*reply);
}

Result<std::string> Encoded(const Status& status) {
  if (!status.ok()) return status;
  return std::string();
}

class DirectoryHandler {
 public:
  explicit DirectoryHandler(std::shared_ptr<CoordinatorService> service)
      : service_(std::move(service)) {}

  void Answer(const std::string& method, const std::string& request, Deadline deadline,
              const RpcDone& done) {
    if (method == "Join") {
      const auto message = Decode<JoinRequest>(request);
      if (!message.ok()) return done(message.status());
      return service_->Join(*message, deadline,
                            [done](const Result<JoinReply>& reply) { done(Encoded(reply)); });
    }
    if (method == "Heartbeat") {
      const auto message = Decode<HeartbeatRequest>(request);
      return done(message.ok() ? Encoded(service_->Heartbeat(*message)) : message.status());
    }
    if (method == "Rebind") {
      const auto message = Decode<MemberInfo>(request);
      return done(message.ok() ? Encoded(service_->Rebind(*message)) : message.status());
    }
    if (method == "Held") {
      const auto message = Decode<HeldRequest>(request);
      return done(message.ok() ? Encoded(service_->Held(*message)) : message.status());
    }
    if (method == "Members") return done(cache_->Encoded(service_->Members()));
    if (method == "Status") return done(service_->StatusJson());
    auto query = Decode<ControlQuery>(request);
    if (!query.ok()) return done(query.status());
    AnswerQuery(method, *query, deadline, done);
  }

 private:
  void AnswerQuery(const std::string& method, ControlQuery& query, Deadline deadline,
                   const RpcDone& done) {
    if (method == "WaitComplete") {
      return service_->WaitComplete(
          query.incarnation, deadline,
          [done, cache = cache_](const Result<CoordinatorService::SharedMembership>& reply) {
            done(cache->Encoded(reply));
          });
    }
    if (method == "QueryVersion") {
      return service_->QueryVersion(
          query.incarnation, query.id, query.flag, deadline,
          [done](const Result<VersionReply>& reply) { done(Encoded(reply)); });
    }
    if (method == "GetBlob") {
      const auto blob = service_->GetBlob(query.digest);
      return done(blob.ok() ? Result<std::string>(**blob) : blob.status());
    }
    done(AnswerNow(method, query));
  }

  Result<std::string> AnswerNow(const std::string& method, ControlQuery& query) {
    if (method == "MembersFor") {
      return cache_->Encoded(service_->MembersFor(query.id, query.epoch));
    }
    if (method == "Poll") {
      return Encoded(service_->Poll(query.incarnation, query.id, query.flag));
    }
    if (method == "Revoked") return Encoded(service_->Revoked(query.incarnation, query.id));
    if (method == "Serving") {
      return Encoded(service_->Serving(query.incarnation, query.id, query.flag));
    }
    if (method == "Leave") return Encoded(service_->Leave(query.incarnation));
    if (method == "Gone") return Encoded(service_->Gone(query.incarnation));
    if (method == "HasBlob") return Encoded(service_->HasBlob(query.digest));
    if (method == "PutBlob") {
      return Encoded(service_->PutBlob(query.digest, std::move(query.bytes)));
    }
    return Status(Code::kUnimplemented,
                  fmt::format("the coordinator knows no method {}; its build may be older",
                              method.substr(0, 64)));
  }

  const std::shared_ptr<CoordinatorService> service_;
  const std::shared_ptr<MembershipCache> cache_ = std::make_shared<MembershipCache>();
};

}  // namespace

RpcAsyncHandler MakeDirectoryHandler(std::shared_ptr<CoordinatorService> service) {
  auto handler = std::make_shared<DirectoryHandler>(std::move(service));
  return [handler](const std::string& method, const std::string& request, Deadline deadline,
                   const RpcDone& done) { handler->Answer(method, request, deadline, done); };
}

Result<std::unique_ptr<RpcServer>> ServeDirectory(std::shared_ptr<CoordinatorService> service,
                                                  const std::string& listen,
                                                  const std::string& token) {
  return StartAsyncGrpcServer(listen, token, MakeDirectoryHandler(std::move(service)));
}

}  // namespace bascule
