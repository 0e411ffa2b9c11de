// The listening side of the shm transport.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/unix_fd.h"
#include "transport/shm/reactor.h"
#include "transport/shm/region.h"
#include "transport/shm/shm_transport.h"
#include "transport/worker_pool.h"

namespace bascule::shm {

class ServerConnection;

// Accepts connections and answers them. The reactor must outlive it. Thread-safe.
class Server final : public EventHandler, public std::enable_shared_from_this<Server> {
 public:
  [[nodiscard]] static Result<std::shared_ptr<Server>> Start(
      const TransportIdentity& identity, const ShmOptions& options, const ShmLimits& limits,
      Reactor* reactor, std::shared_ptr<RegionRegistry> registry, PeerHandler* handler);
  // Closes all connections and waits for handler calls that are running. No OnDisconnect for
  // connections that this closes.
  void Stop();

  [[nodiscard]] const std::string& address() const { return address_; }

  void OnEvent(uint32_t tag, uint32_t events) override;
  void OnTimer() override;

 private:
  friend class ServerConnection;

  Server() = default;
  void Accept(UnixFd socket);
  // Out of descriptors: takes one waiting client and tells it so. 0, EAGAIN where nobody waits, or
  // another errno where even that fails.
  int TurnAwayOne();
  void Forget(uint64_t id);
  void Authenticated(uint64_t id);

  TransportIdentity identity_;
  ShmLimits limits_;
  Reactor* reactor_ = nullptr;
  std::shared_ptr<RegionRegistry> registry_;
  PeerHandler* handler_ = nullptr;
  std::string address_;
  std::unique_ptr<WorkerPool> pool_;
  UnixFd listener_;
  uint64_t listener_key_ = 0;
  UnixFd spare_;  // given up to accept and refuse a client when descriptors run out

  std::mutex mutex_;
  bool stopped_ = false;
  std::unordered_map<uint64_t, std::shared_ptr<ServerConnection>> connections_;
  std::deque<uint64_t> unauthenticated_;  // oldest first
};

}  // namespace bascule::shm
