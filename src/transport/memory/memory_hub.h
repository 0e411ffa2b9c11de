// The in-process network of memory transports, with the hooks of crash tests.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace bascule {

namespace memory {
class Endpoint;
class Region;
}  // namespace memory

// Thread-safe.
class MemoryHub {
 public:
  // Breaks all connections to and from the transport that listens at `address`; new ones work.
  void Disconnect(std::string_view address);
  // The same, and it is gone for good: as if its process had been killed. Mapped imports of its
  // regions stay readable, everything else of it fails.
  void Kill(std::string_view address);

  // For the transports of the hub.
  void AddEndpoint(const std::string& address, std::weak_ptr<memory::Endpoint> endpoint);
  void RemoveEndpoint(const std::string& address);
  [[nodiscard]] std::shared_ptr<memory::Endpoint> FindEndpoint(std::string_view address);
  void AddRegion(uint64_t id, std::weak_ptr<memory::Region> region);
  void RemoveRegion(uint64_t id);
  [[nodiscard]] std::shared_ptr<memory::Region> FindRegion(uint64_t id);

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<memory::Endpoint>, std::less<>> endpoints_;
  std::map<uint64_t, std::weak_ptr<memory::Region>> regions_;
};

}  // namespace bascule
