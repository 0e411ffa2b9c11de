// One thread that waits in epoll for all sockets of a transport. Never spins.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "bascule/status.h"
#include "base/unix_fd.h"

namespace bascule::shm {

// Called on the reactor's thread; must not block. The reactor keeps it alive meanwhile; a call may
// still come in while Remove returns on another thread.
class EventHandler {
 public:
  virtual ~EventHandler() = default;
  // `tag` as given to Add; `events` of epoll.
  virtual void OnEvent(uint32_t tag, uint32_t events) = 0;
  virtual void OnTimer() {}
};

// Thread-safe. The destructor joins the thread and must run elsewhere.
class Reactor {
 public:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] static Result<std::shared_ptr<Reactor>> Start();
  ~Reactor();

  // Watches `fd` (level-triggered). The key is for Modify and Remove; never 0, never used again.
  [[nodiscard]] Result<uint64_t> Add(int fd, uint32_t tag, uint32_t events,
                                     std::shared_ptr<EventHandler> handler);
  void Modify(uint64_t key, uint32_t events);
  // Before `fd` is closed.
  void Remove(uint64_t key);
  // Calls OnTimer once, at `when` or soon after, if the handler still exists.
  void At(Clock::time_point when, std::weak_ptr<EventHandler> handler);

 private:
  struct Watch {
    int fd;
    uint32_t tag;
    uint32_t events;
    std::shared_ptr<EventHandler> handler;
  };

  Reactor() = default;
  void Loop();
  void Wake();
  void Dispatch(const epoll_event& event);
  // Runs timers that are due; the milliseconds until the next one, or -1.
  int RunTimers();

  UnixFd epoll_;
  UnixFd wake_;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  uint64_t next_key_ = 1;
  std::unordered_map<uint64_t, Watch> watches_;
  std::multimap<Clock::time_point, std::weak_ptr<EventHandler>> timers_;
  std::thread thread_;
};

}  // namespace bascule::shm
