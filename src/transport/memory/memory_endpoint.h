// One memory transport's side of the hub: its regions, connections and identity.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/memory/memory_hub.h"
#include "transport/memory/memory_link.h"
#include "transport/transport.h"

namespace bascule::memory {

class Region final : public SharedRegion {
 public:
  // Owned memory, or with `borrowed` that of a buffer.
  [[nodiscard]] static Result<std::shared_ptr<Region>> Create(std::shared_ptr<MemoryHub> hub,
                                                              uint64_t incarnation, uint64_t bytes,
                                                              std::string_view label,
                                                              std::byte* borrowed = nullptr);
  ~Region() override;

  [[nodiscard]] std::byte* data() const override { return pages_.get(); }
  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] MemoryKind kind() const override { return MemoryKind::kHost; }
  [[nodiscard]] std::string blob() const override;
  [[nodiscard]] uint64_t incarnation() const { return incarnation_; }
  // Mapped imports hold the pages, as a mapping would.
  [[nodiscard]] std::shared_ptr<std::byte> pages() const { return pages_; }

  // The region's id in a blob.
  [[nodiscard]] static Result<uint64_t> ParseBlob(std::string_view blob);

 private:
  Region() = default;

  std::shared_ptr<MemoryHub> hub_;
  uint64_t id_ = 0;
  uint64_t incarnation_ = 0;
  uint64_t bytes_ = 0;
  std::shared_ptr<std::byte> pages_;
};

class Imported final : public ImportedRegion {
 public:
  Imported(TransportKind kind, const std::shared_ptr<Region>& region)
      : bytes_(region->bytes()), region_(region) {
    if (kind == TransportKind::kMapped) pages_ = region->pages();
  }
  [[nodiscard]] const std::byte* data() const override { return pages_.get(); }
  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  // Readable pages, or null when the owner released a region that is not mapped here.
  [[nodiscard]] std::shared_ptr<std::byte> Readable() const {
    if (pages_ != nullptr) return pages_;
    auto region = region_.lock();
    return region == nullptr ? nullptr : region->pages();
  }

 private:
  uint64_t bytes_;
  std::weak_ptr<Region> region_;
  std::shared_ptr<std::byte> pages_;
};

// Thread-safe.
class Endpoint {
 public:
  Endpoint(TransportKind kind, TransportIdentity identity)
      : kind_(kind), identity_(std::move(identity)) {}

  [[nodiscard]] TransportKind kind() const { return kind_; }
  [[nodiscard]] const TransportIdentity& identity() const { return identity_; }

  [[nodiscard]] Result<std::string> Listen(PeerHandler* handler);
  // A connection to this endpoint by `client`, or why not.
  [[nodiscard]] Result<std::shared_ptr<Link>> Accept(const TransportIdentity& client,
                                                     uint64_t incarnation);
  void Remember(const std::shared_ptr<Link>& link);
  void BreakLinks(const std::string& why);
  // Killed or destroyed: nothing works from now on.
  void Die(const std::string& why);
  [[nodiscard]] Status CheckLiving() const;
  void StopService();
  [[nodiscard]] std::string address() const;

  // One open per region.
  [[nodiscard]] std::shared_ptr<Imported> Open(uint64_t id, const std::shared_ptr<Region>& region);

 private:
  const TransportKind kind_;
  const TransportIdentity identity_;
  mutable std::mutex mutex_;
  bool dead_ = false;
  std::string address_;
  std::shared_ptr<Service> service_;
  std::vector<std::weak_ptr<Link>> links_;  // to and from this endpoint
  std::map<uint64_t, std::weak_ptr<Imported>> imports_;
};

}  // namespace bascule::memory
