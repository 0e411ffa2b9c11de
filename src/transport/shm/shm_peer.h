// The connecting side of the shm transport.
#pragma once

#include <memory>
#include <string>

#include "base/fork_guard.h"
#include "transport/shm/client_connection.h"
#include "transport/shm/region.h"
#include "transport/transport.h"

namespace bascule::shm {

class ShmPeer final : public Peer {
 public:
  // Connects and shakes hands; both sides have proven the token when it returns.
  [[nodiscard]] static Result<std::shared_ptr<Peer>> Connect(
      const TransportIdentity& identity, const std::string& address, uint64_t incarnation,
      std::shared_ptr<Reactor> reactor, std::shared_ptr<ImportCache> imports, Deadline deadline);
  ~ShmPeer() override;

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] bool alive() const override;
  [[nodiscard]] Result<std::shared_ptr<ImportedRegion>> Import(std::string_view blob,
                                                               Deadline deadline) override;
  [[nodiscard]] Result<std::string> Call(std::string_view request, Deadline deadline) override;
  [[nodiscard]] Status Read(const ImportedRegion& region, std::span<const ReadRun> runs,
                            Deadline deadline) override;
  [[nodiscard]] Result<uint64_t> Fetch(std::string_view request, std::span<std::byte> slot,
                                       Deadline deadline) override;

 private:
  ShmPeer() = default;
  // Opens `region`, or probes it again where it is mapped already.
  [[nodiscard]] Result<std::shared_ptr<MappedRegion>> OpenAndProbe(
      const RegionBlob& blob, std::shared_ptr<MappedRegion> region, Deadline deadline);
  [[nodiscard]] Status Fail(Code code, std::string message) const {
    return Status(code, std::move(message)).WithPeer(name_);
  }

  ForkGuard fork_guard_;
  std::string name_;
  uint64_t incarnation_ = 0;
  std::shared_ptr<Reactor> reactor_;
  std::shared_ptr<ImportCache> imports_;
  std::shared_ptr<ClientConnection> connection_;
};

}  // namespace bascule::shm
