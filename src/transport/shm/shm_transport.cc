#include "transport/shm/shm_transport.h"

#include <fmt/format.h>

#include <mutex>

#include "base/fork_guard.h"
#include "transport/shm/region.h"
#include "transport/shm/server.h"
#include "transport/shm/shm_peer.h"

namespace bascule {
namespace shm {
namespace {

// All that must not be touched in a forked child, see ~ShmTransport.
struct Parts {
  TransportIdentity identity;
  ShmOptions options;
  ShmLimits limits;
  std::shared_ptr<RegionRegistry> registry = std::make_shared<RegionRegistry>();
  std::shared_ptr<ImportCache> imports = std::make_shared<ImportCache>();
  std::mutex mutex;
  std::shared_ptr<Reactor> reactor;  // starts with the first Listen or Connect
  std::shared_ptr<Server> server;

  ~Parts() {
    if (server != nullptr) server->Stop();
  }
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
  ~ShmTransport() override {
    // A forked child has none of the threads, and shares sockets and epoll sets with its parent.
    if (!fork_guard_.forked()) return;
    [[maybe_unused]] const auto* leaked = parts_.release();
  }

  [[nodiscard]] std::string name() const override { return "shm"; }
  [[nodiscard]] TransportKind kind() const override { return TransportKind::kMapped; }

  [[nodiscard]] Result<std::string> Listen(PeerHandler* handler) override {
    BASCULE_RETURN_IF_ERROR(fork_guard_.Check());
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<Reactor> reactor, StartedReactor());
    std::lock_guard lock(parts_->mutex);
    if (parts_->server != nullptr) {
      return Status(Code::kInvalidArgument, "Listen was called before on this transport");
    }
    BASCULE_ASSIGN_OR_RETURN(parts_->server,
                             Server::Start(parts_->identity, parts_->options, parts_->limits,
                                           reactor.get(), parts_->registry, handler));
    return parts_->server->address();
  }

  [[nodiscard]] Result<std::shared_ptr<SharedRegion>> Allocate(uint64_t bytes,
                                                               std::string_view label) override {
    BASCULE_RETURN_IF_ERROR(fork_guard_.Check());
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<OwnedRegion> region,
                             OwnedRegion::Allocate(parts_->registry, parts_->identity.incarnation,
                                                   bytes, label, parts_->options.huge_pages));
    return std::shared_ptr<SharedRegion>(std::move(region));
  }

  [[nodiscard]] Result<std::shared_ptr<SharedRegion>> Export(const Buffer& buffer) override {
    BASCULE_RETURN_IF_ERROR(fork_guard_.Check());
    BASCULE_ASSIGN_OR_RETURN(
        std::shared_ptr<OwnedRegion> region,
        OwnedRegion::Export(parts_->registry, parts_->identity.incarnation, buffer));
    return std::shared_ptr<SharedRegion>(std::move(region));
  }

  [[nodiscard]] Result<std::shared_ptr<Peer>> Connect(std::string_view address,
                                                      uint64_t incarnation,
                                                      Deadline deadline) override {
    BASCULE_RETURN_IF_ERROR(fork_guard_.Check());
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<Reactor> reactor, StartedReactor());
    return ShmPeer::Connect(parts_->identity, std::string(address), incarnation, std::move(reactor),
                            parts_->imports, deadline);
  }

 private:
  [[nodiscard]] Result<std::shared_ptr<Reactor>> StartedReactor() {
    std::lock_guard lock(parts_->mutex);
    if (parts_->reactor == nullptr) {
      BASCULE_ASSIGN_OR_RETURN(parts_->reactor, Reactor::Start());
    }
    return parts_->reactor;
  }

  ForkGuard fork_guard_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace

Result<std::shared_ptr<Transport>> MakeShmTransport(TransportIdentity identity, ShmOptions options,
                                                    ShmLimits limits) {
  if (identity.job.size() > kMaxNameBytes || identity.name.size() > kMaxNameBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("job and name may have at most {} bytes", kMaxNameBytes));
  }
  if (!options.directory.empty() && !options.directory.starts_with('/')) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("ShmOptions.directory '{}' must be an absolute path", options.directory));
  }
  auto parts = std::make_unique<Parts>();
  parts->identity = std::move(identity);
  parts->options = std::move(options);
  parts->limits = limits;
  return std::shared_ptr<Transport>(std::make_shared<ShmTransport>(std::move(parts)));
}

}  // namespace shm

Result<std::shared_ptr<Transport>> MakeShmTransport(TransportIdentity identity,
                                                    ShmOptions options) {
  return shm::MakeShmTransport(std::move(identity), std::move(options), shm::ShmLimits());
}

}  // namespace bascule
