#include "coordinator/local_directory.h"

#include <future>
#include <utility>

namespace bascule {
namespace {

// Starts an asynchronous call and waits for its answer, which comes by the call's deadline.
template <typename T, typename Start>
Result<T> Await(Start start) {
  std::promise<Result<T>> promise;
  std::future<Result<T>> future = promise.get_future();
  start([&promise](Result<T> reply) { promise.set_value(std::move(reply)); });
  return future.get();
}

Result<Membership> Copied(Result<CoordinatorService::SharedMembership> membership) {
  if (!membership.ok()) return membership.status();
  return Membership(**membership);
}

class LocalDirectory final : public Directory {
 public:
  explicit LocalDirectory(std::shared_ptr<CoordinatorService> service)
      : service_(std::move(service)) {}

  Result<JoinReply> Join(const JoinRequest& request, Deadline deadline) override {
    return Await<JoinReply>([&](auto done) { service_->Join(request, deadline, done); });
  }
  Status Leave(uint64_t incarnation, Deadline) override { return service_->Leave(incarnation); }
  Result<HeartbeatReply> Heartbeat(const HeartbeatRequest& request, Deadline) override {
    return service_->Heartbeat(request);
  }
  Result<JoinReply> Rebind(const MemberInfo& member, Deadline) override {
    return service_->Rebind(member);
  }
  Result<Membership> Members(Deadline) override { return Copied(service_->Members()); }
  Result<Membership> MembersFor(VersionId id, uint64_t epoch, Deadline) override {
    return Copied(service_->MembersFor(id, epoch));
  }
  Result<Membership> WaitComplete(uint64_t incarnation, Deadline deadline) override {
    return Copied(Await<CoordinatorService::SharedMembership>(
        [&](auto done) { service_->WaitComplete(incarnation, deadline, done); }));
  }
  Status PutBlob(const ContentDigest& digest, const std::string& bytes, Deadline) override {
    return service_->PutBlob(digest, bytes);
  }
  Result<bool> HasBlob(const ContentDigest& digest, Deadline) override {
    return service_->HasBlob(digest);
  }
  Result<std::string> GetBlob(const ContentDigest& digest, Deadline) override {
    BASCULE_ASSIGN_OR_RETURN(const auto blob, service_->GetBlob(digest));
    return *blob;
  }
  Result<VersionReply> Held(const HeldRequest& request, Deadline) override {
    return service_->Held(request);
  }
  Status Revoked(uint64_t incarnation, VersionId id, Deadline) override {
    return service_->Revoked(incarnation, id);
  }
  Result<VersionReply> QueryVersion(uint64_t incarnation, VersionId id, bool wait,
                                    Deadline deadline) override {
    return Await<VersionReply>(
        [&](auto done) { service_->QueryVersion(incarnation, id, wait, deadline, done); });
  }
  Result<PollReply> Poll(uint64_t incarnation, VersionId newer_than, bool or_equal,
                         Deadline) override {
    return service_->Poll(incarnation, newer_than, or_equal);
  }
  Status Serving(uint64_t incarnation, VersionId id, bool servable, Deadline) override {
    return service_->Serving(incarnation, id, servable);
  }
  Result<bool> Gone(uint64_t incarnation, Deadline) override { return service_->Gone(incarnation); }
  Result<std::string> StatusJson(Deadline) override { return service_->StatusJson(); }
  [[nodiscard]] uint64_t requests() const override { return 0; }
  // The service is this directory's own: what waits in it ends.
  void Cancel() override { service_->Stop(); }

 private:
  std::shared_ptr<CoordinatorService> service_;
};

}  // namespace

std::unique_ptr<Directory> MakeLocalDirectory(std::shared_ptr<CoordinatorService> service) {
  return std::make_unique<LocalDirectory>(std::move(service));
}

}  // namespace bascule
