#include <fmt/format.h>

#include <cstring>

#include "transport/memory/memory_endpoint.h"
#include "transport/memory/memory_hub.h"
#include "transport/transport.h"

namespace bascule {

void MemoryHub::Disconnect(std::string_view address) {
  if (auto endpoint = FindEndpoint(address)) endpoint->BreakLinks("the connection broke");
}

void MemoryHub::Kill(std::string_view address) {
  auto endpoint = FindEndpoint(address);
  if (endpoint == nullptr) return;
  RemoveEndpoint(std::string(address));
  endpoint->Die("the peer was killed");
}

void MemoryHub::AddEndpoint(const std::string& address, std::weak_ptr<memory::Endpoint> endpoint) {
  std::lock_guard lock(mutex_);
  endpoints_[address] = std::move(endpoint);
}

void MemoryHub::RemoveEndpoint(const std::string& address) {
  std::lock_guard lock(mutex_);
  endpoints_.erase(address);
}

std::shared_ptr<memory::Endpoint> MemoryHub::FindEndpoint(std::string_view address) {
  std::lock_guard lock(mutex_);
  auto it = endpoints_.find(address);
  return it == endpoints_.end() ? nullptr : it->second.lock();
}

void MemoryHub::AddRegion(uint64_t id, std::weak_ptr<memory::Region> region) {
  std::lock_guard lock(mutex_);
  regions_[id] = std::move(region);
}

void MemoryHub::RemoveRegion(uint64_t id) {
  std::lock_guard lock(mutex_);
  regions_.erase(id);
}

std::shared_ptr<memory::Region> MemoryHub::FindRegion(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto it = regions_.find(id);
  return it == regions_.end() ? nullptr : it->second.lock();
}

namespace memory {
namespace {

class MemoryPeer final : public Peer {
 public:
  MemoryPeer(std::shared_ptr<MemoryHub> hub, std::shared_ptr<Endpoint> self,
             std::shared_ptr<Link> link, std::string name, uint64_t incarnation)
      : hub_(std::move(hub)),
        self_(std::move(self)),
        link_(std::move(link)),
        name_(std::move(name)),
        incarnation_(incarnation) {}
  ~MemoryPeer() override { link_->Break("the connection was closed on this side"); }

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] bool alive() const override { return link_->alive(); }

  [[nodiscard]] Result<std::shared_ptr<ImportedRegion>> Import(std::string_view blob,
                                                               Deadline deadline) override {
    auto id = Region::ParseBlob(blob);
    if (!id.ok()) return Fail(id.status().code(), id.status().message());
    BASCULE_RETURN_IF_ERROR(CheckUsable(deadline));
    std::shared_ptr<Region> region = hub_->FindRegion(*id);
    if (region == nullptr) {
      return Fail(Code::kNotFound,
                  "the region was released by its owner; ask for its present description");
    }
    if (region->incarnation() != incarnation_) {
      return Fail(Code::kStaleTerm,
                  fmt::format("the region belongs to incarnation {:016x}, this peer is {:016x}; "
                              "ask for its present description",
                              region->incarnation(), incarnation_));
    }
    return std::shared_ptr<ImportedRegion>(self_->Open(*id, region));
  }

  [[nodiscard]] Result<std::string> Call(std::string_view request, Deadline deadline) override {
    if (request.size() > kMaxCallBytes) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("a request of {} bytes; at most {} are allowed", request.size(),
                              kMaxCallBytes));
    }
    BASCULE_RETURN_IF_ERROR(CheckUsable(deadline));
    return Named(link_->Request(request, 0, deadline));
  }

  [[nodiscard]] Status Read(const ImportedRegion& region, std::span<const ReadRun> runs,
                            Deadline deadline) override {
    const auto* imported = dynamic_cast<const Imported*>(&region);
    if (imported == nullptr) {
      return Fail(Code::kInvalidArgument, "the region was not imported by this transport");
    }
    for (const ReadRun& run : runs) {
      if (run.remote_offset > region.bytes() || run.bytes > region.bytes() - run.remote_offset) {
        return Fail(Code::kInvalidArgument,
                    fmt::format("a read of {} bytes at {} in a region of {}", run.bytes,
                                run.remote_offset, region.bytes()));
      }
    }
    bool mapped = region.data() != nullptr;
    if (!mapped) BASCULE_RETURN_IF_ERROR(CheckUsable(deadline));
    std::shared_ptr<std::byte> pages = imported->Readable();
    if (pages == nullptr) {
      return Fail(Code::kNotFound,
                  "the region was released by its owner; ask for its present description");
    }
    for (const ReadRun& run : runs) {
      std::memcpy(run.target, pages.get() + run.remote_offset, run.bytes);
    }
    return Status::Ok();
  }

  [[nodiscard]] Result<uint64_t> Fetch(std::string_view request, std::span<std::byte> slot,
                                       Deadline deadline) override {
    if (self_->kind() == TransportKind::kMapped) {
      return Fail(Code::kUnimplemented,
                  "this memory transport is mapped: read the region's address");
    }
    if (request.size() > kMaxCallBytes || slot.empty()) {
      return Fail(Code::kInvalidArgument, "a Fetch with a request too large or an empty slot");
    }
    BASCULE_RETURN_IF_ERROR(CheckUsable(deadline));
    BASCULE_ASSIGN_OR_RETURN(std::string payload,
                             Named(link_->Request(request, slot.size(), deadline)));
    std::memcpy(slot.data(), payload.data(), payload.size());
    return payload.size();
  }

 private:
  [[nodiscard]] Status Fail(Code code, std::string message) const {
    return Status(code, std::move(message)).WithPeer(name_);
  }
  [[nodiscard]] Status CheckUsable(Deadline deadline) const {
    if (!alive()) {
      return Fail(Code::kUnavailable,
                  "the connection is broken; connect again, or use another holder");
    }
    return deadline.Passed() ? Fail(Code::kDeadlineExceeded, "called after its deadline")
                             : Status::Ok();
  }
  [[nodiscard]] Result<std::string> Named(Result<std::string> answer) const {
    if (answer.ok() || !answer.status().peer().empty()) return answer;
    return answer.status().WithPeer(name_);
  }

  const std::shared_ptr<MemoryHub> hub_;
  const std::shared_ptr<Endpoint> self_;
  const std::shared_ptr<Link> link_;
  const std::string name_;
  const uint64_t incarnation_;
};

class MemoryTransport final : public Transport {
 public:
  MemoryTransport(std::shared_ptr<MemoryHub> hub, TransportKind kind, TransportIdentity identity)
      : hub_(std::move(hub)), self_(std::make_shared<Endpoint>(kind, std::move(identity))) {}
  ~MemoryTransport() override {
    hub_->RemoveEndpoint(self_->address());
    self_->StopService();  // first, so that closing below reports nothing here
    self_->Die("the peer closed");
  }

  [[nodiscard]] std::string name() const override { return "memory"; }
  [[nodiscard]] TransportKind kind() const override { return self_->kind(); }

  [[nodiscard]] Result<std::string> Listen(PeerHandler* handler) override {
    BASCULE_RETURN_IF_ERROR(self_->CheckLiving());
    BASCULE_ASSIGN_OR_RETURN(std::string address, self_->Listen(handler));
    hub_->AddEndpoint(address, self_);
    return address;
  }

  [[nodiscard]] Result<std::shared_ptr<SharedRegion>> Allocate(uint64_t bytes,
                                                               std::string_view label) override {
    BASCULE_RETURN_IF_ERROR(self_->CheckLiving());
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<Region> region,
                             Region::Create(hub_, self_->identity().incarnation, bytes, label));
    return std::shared_ptr<SharedRegion>(std::move(region));
  }

  [[nodiscard]] Result<std::shared_ptr<SharedRegion>> Export(const Buffer& buffer) override {
    BASCULE_RETURN_IF_ERROR(self_->CheckLiving());
    if (buffer.kind == MemoryKind::kDevice || buffer.data == nullptr) {
      return Status(Code::kInvalidArgument,
                    fmt::format("buffer '{}' is not CPU memory", buffer.name));
    }
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<Region> region,
                             Region::Create(hub_, self_->identity().incarnation, buffer.bytes,
                                            buffer.name, buffer.data));
    return std::shared_ptr<SharedRegion>(std::move(region));
  }

  [[nodiscard]] Result<std::shared_ptr<Peer>> Connect(std::string_view address,
                                                      uint64_t incarnation,
                                                      Deadline deadline) override {
    BASCULE_RETURN_IF_ERROR(self_->CheckLiving());
    if (deadline.Passed()) {
      return Status(Code::kDeadlineExceeded, "called after its deadline")
          .WithPeer(std::string(address));
    }
    std::shared_ptr<Endpoint> peer = hub_->FindEndpoint(address);
    if (peer == nullptr) {
      return Status(Code::kUnavailable, "nobody listens there in this process")
          .WithPeer(std::string(address));
    }
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<Link> link,
                             peer->Accept(self_->identity(), incarnation));
    self_->Remember(link);
    return std::shared_ptr<Peer>(std::make_shared<MemoryPeer>(
        hub_, self_, std::move(link), peer->identity().name + " (memory)", incarnation));
  }

 private:
  const std::shared_ptr<MemoryHub> hub_;
  const std::shared_ptr<Endpoint> self_;
};

}  // namespace
}  // namespace memory

std::shared_ptr<MemoryHub> MakeMemoryHub() { return std::make_shared<MemoryHub>(); }

std::shared_ptr<Transport> MakeMemoryTransport(std::shared_ptr<MemoryHub> hub, TransportKind kind,
                                               TransportIdentity identity) {
  return std::make_shared<memory::MemoryTransport>(std::move(hub), kind, std::move(identity));
}

}  // namespace bascule
