#include "coordinator/grpc_directory.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "coordinator/messages.h"

namespace bascule {
namespace {

class GrpcDirectory final : public Directory {
 public:
  GrpcDirectory(const std::string& address, const std::string& token)
      : client_(MakeGrpcClient(address, token)) {}

  Result<JoinReply> Join(const JoinRequest& request, Deadline deadline) override {
    return Ask<JoinReply>("Join", Encode(request), deadline);
  }
  Status Leave(uint64_t incarnation, Deadline deadline) override {
    return Tell("Leave", {.incarnation = incarnation}, deadline);
  }
  Result<HeartbeatReply> Heartbeat(const HeartbeatRequest& request, Deadline deadline) override {
    return Ask<HeartbeatReply>("Heartbeat", Encode(request), deadline);
  }
  Result<JoinReply> Rebind(const MemberInfo& member, Deadline deadline) override {
    return Ask<JoinReply>("Rebind", Encode(member), deadline);
  }
  Result<Membership> Members(Deadline deadline) override {
    return Ask<Membership>("Members", "", deadline);
  }
  Result<Membership> MembersFor(VersionId id, uint64_t epoch, Deadline deadline) override {
    return Ask<Membership>("MembersFor", Encode(ControlQuery{.id = id, .epoch = epoch}), deadline);
  }
  Result<Membership> WaitComplete(uint64_t incarnation, Deadline deadline) override {
    return AskLong<Membership>("WaitComplete", Encode(ControlQuery{.incarnation = incarnation}),
                               deadline);
  }
  Status PutBlob(const ContentDigest& digest, const std::string& bytes,
                 Deadline deadline) override {
    return Tell("PutBlob", {.digest = digest, .bytes = bytes}, deadline);
  }
  Result<bool> HasBlob(const ContentDigest& digest, Deadline deadline) override {
    return Ask<bool>("HasBlob", Encode(ControlQuery{.digest = digest}), deadline);
  }
  Result<std::string> GetBlob(const ContentDigest& digest, Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(std::string bytes,
                             Call("GetBlob", Encode(ControlQuery{.digest = digest}), deadline));
    if (DigestOf(bytes) != digest) {
      return Status(Code::kDataLoss, fmt::format("blob {} arrived damaged", digest.ToString()));
    }
    return bytes;
  }
  Result<VersionReply> Held(const HeldRequest& request, Deadline deadline) override {
    return Ask<VersionReply>("Held", Encode(request), deadline);
  }
  Status Revoked(uint64_t incarnation, VersionId id, Deadline deadline) override {
    return Tell("Revoked", {.incarnation = incarnation, .id = id}, deadline);
  }
  Result<VersionReply> QueryVersion(uint64_t incarnation, VersionId id, bool wait,
                                    Deadline deadline) override {
    const ControlQuery query{.incarnation = incarnation, .id = id, .flag = wait};
    return AskLong<VersionReply>("QueryVersion", Encode(query), deadline);
  }
  Result<PollReply> Poll(uint64_t incarnation, VersionId newer_than, bool or_equal,
                         Deadline deadline) override {
    const ControlQuery query{.incarnation = incarnation, .id = newer_than, .flag = or_equal};
    return Ask<PollReply>("Poll", Encode(query), deadline);
  }
  Status Serving(uint64_t incarnation, VersionId id, bool servable, Deadline deadline) override {
    return Tell("Serving", {.incarnation = incarnation, .id = id, .flag = servable}, deadline);
  }
  Result<bool> Gone(uint64_t incarnation, Deadline deadline) override {
    return Ask<bool>("Gone", Encode(ControlQuery{.incarnation = incarnation}), deadline);
  }
  Result<std::string> StatusJson(Deadline deadline) override {
    return Call("Status", "", deadline);
  }
  [[nodiscard]] uint64_t requests() const override { return requests_; }
  void Cancel() override { client_->Cancel(); }

 private:
  // The channel itself tries again while the server cannot be reached; this, while the answer is
  // kUnavailable.
  Result<std::string> Call(const std::string& method, const std::string& request,
                           Deadline deadline) {
    while (true) {
      if (method != "Heartbeat") ++requests_;
      Result<std::string> reply = client_->Call(method, request, deadline);
      if (reply.status().code() != Code::kUnavailable || deadline.Passed()) return reply;
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(deadline.Left(), std::chrono::milliseconds(50)));
      if (deadline.Passed()) return reply;
    }
  }
  template <typename T>
  Result<T> Ask(const std::string& method, const std::string& request, Deadline deadline) {
    BASCULE_ASSIGN_OR_RETURN(const std::string reply, Call(method, request, deadline));
    return Decode<T>(reply);
  }
  // A call that may wait long, in slices: a server that lost its clients forgets them soon.
  template <typename T>
  Result<T> AskLong(const std::string& method, const std::string& request, Deadline deadline) {
    while (true) {
      const Deadline slice = deadline.Earlier(Deadline::In(std::chrono::seconds(10)));
      Result<T> reply = Ask<T>(method, request, slice);
      const Code code = reply.status().code();
      const bool again = code == Code::kDeadlineExceeded || code == Code::kUnavailable;
      if (!again || slice.at() == deadline.at()) return reply;
    }
  }
  Status Tell(const std::string& method, const ControlQuery& query, Deadline deadline) {
    return Call(method, Encode(query), deadline).status();
  }

  const std::unique_ptr<RpcClient> client_;
  std::atomic<uint64_t> requests_{0};
};

}  // namespace

std::unique_ptr<Directory> MakeGrpcDirectory(const std::string& address, const std::string& token) {
  return std::make_unique<GrpcDirectory>(address, token);
}

}  // namespace bascule
