#include "transport/shm/reactor.h"

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <vector>

#include "transport/shm/memory_map.h"

namespace bascule::shm {
namespace {

constexpr uint64_t kWakeKey = 0;

Status OutOfDescriptors(const char* what, int error) {
  return {Code::kResourceExhausted,
          fmt::format("{}: {}; raise the limit of open files (ulimit -n)", what, ErrnoText(error))};
}

}  // namespace

Result<std::shared_ptr<Reactor>> Reactor::Start() {
  std::shared_ptr<Reactor> reactor(new Reactor());
  reactor->epoll_ = UnixFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!reactor->epoll_.valid()) return OutOfDescriptors("epoll_create1", errno);
  reactor->wake_ = UnixFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!reactor->wake_.valid()) return OutOfDescriptors("eventfd", errno);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeKey}};
  if (::epoll_ctl(reactor->epoll_.get(), EPOLL_CTL_ADD, reactor->wake_.get(), &event) != 0) {
    return OutOfDescriptors("epoll_ctl", errno);
  }
  try {
    reactor->thread_ = std::thread([raw = reactor.get()] { raw->Loop(); });
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted,
                  fmt::format("cannot start a thread ({}); raise the process limit (ulimit -u, "
                              "pids cgroup)",
                              error.what()));
  }
  return reactor;
}

Reactor::~Reactor() {
  stopping_ = true;
  if (!thread_.joinable()) return;
  Wake();
  thread_.join();
}

Result<uint64_t> Reactor::Add(int fd, uint32_t tag, uint32_t events,
                              std::shared_ptr<EventHandler> handler) {
  std::lock_guard lock(mutex_);
  uint64_t key = next_key_++;
  watches_.emplace(key, Watch{fd, tag, events, std::move(handler)});
  epoll_event event{.events = events, .data = {.u64 = key}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    int error = errno;
    watches_.erase(key);
    return Status(Code::kResourceExhausted,
                  fmt::format("epoll_ctl: {}; raise fs.epoll.max_user_watches", ErrnoText(error)));
  }
  return key;
}

void Reactor::Modify(uint64_t key, uint32_t events) {
  std::lock_guard lock(mutex_);
  auto it = watches_.find(key);
  if (it == watches_.end() || it->second.events == events) return;
  it->second.events = events;
  epoll_event event{.events = events, .data = {.u64 = key}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, it->second.fd, &event);
}

void Reactor::Remove(uint64_t key) {
  std::shared_ptr<EventHandler> released;  // destroyed outside the lock
  std::lock_guard lock(mutex_);
  auto it = watches_.find(key);
  if (it == watches_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->second.fd, nullptr);
  released = std::move(it->second.handler);
  watches_.erase(it);
}

void Reactor::At(Clock::time_point when, std::weak_ptr<EventHandler> handler) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    auto it = timers_.emplace(when, std::move(handler));
    first = it == timers_.begin();
  }
  if (first) Wake();
}

void Reactor::Wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

int Reactor::RunTimers() {
  std::vector<std::shared_ptr<EventHandler>> due;
  {
    std::lock_guard lock(mutex_);
    Clock::time_point now = Clock::now();
    while (!timers_.empty() && timers_.begin()->first <= now) {
      if (auto handler = timers_.begin()->second.lock()) due.push_back(std::move(handler));
      timers_.erase(timers_.begin());
    }
  }
  for (auto& handler : due) handler->OnTimer();
  due.clear();
  std::lock_guard lock(mutex_);
  if (timers_.empty()) return -1;
  auto left = std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

void Reactor::Dispatch(const epoll_event& event) {
  if (event.data.u64 == kWakeKey) {
    uint64_t count = 0;
    [[maybe_unused]] ssize_t n = ::read(wake_.get(), &count, sizeof(count));
    return;
  }
  std::shared_ptr<EventHandler> handler;
  uint32_t tag = 0;
  {
    std::lock_guard lock(mutex_);
    auto it = watches_.find(event.data.u64);
    if (it == watches_.end()) return;  // removed since epoll_wait
    handler = it->second.handler;
    tag = it->second.tag;
  }
  handler->OnEvent(tag, event.events);
}

void Reactor::Loop() {
  std::array<epoll_event, 64> events{};
  while (!stopping_) {
    int timeout_ms = RunTimers();
    int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
    for (int i = 0; i < count && !stopping_; ++i) Dispatch(events[static_cast<size_t>(i)]);
  }
}

}  // namespace bascule::shm
