// One connection between two memory transports of a hub.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "bascule/deadline.h"
#include "transport/transport.h"
#include "transport/worker_pool.h"

namespace bascule::memory {

// What a listening transport answers with. Lives as long as any link to it.
struct Service {
  PeerHandler* handler = nullptr;
  std::unique_ptr<WorkerPool> pool;
};

// Requests are handled in order, one at a time, on the service's threads. Thread-safe.
class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(std::string peer, std::shared_ptr<Service> service);

  [[nodiscard]] bool alive() const;
  // Both sides see it broken; the handler hears of it once, after a call that is running.
  void Break(std::string why);
  // A Call, or with slot_bytes > 0 a Fetch whose payload is returned.
  [[nodiscard]] Result<std::string> Request(std::string_view request, uint64_t slot_bytes,
                                            Deadline deadline);

 private:
  struct Pending {
    std::string request;
    uint64_t slot_bytes = 0;
    bool started = false;
    bool done = false;
    Result<std::string> answer = std::string();
  };

  void Work();  // on a worker: handles what is queued
  [[nodiscard]] Result<std::string> Handle(const Pending& pending);
  [[nodiscard]] Status BrokenLocked() const;

  const uint64_t id_;
  const std::string peer_;
  const std::shared_ptr<Service> service_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool alive_ = true;
  bool working_ = false;
  std::string broken_;
  std::deque<std::shared_ptr<Pending>> queue_;
};

}  // namespace bascule::memory
