#include "transport/memory/memory_link.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/random.h"

namespace bascule::memory {

Link::Link(std::string peer, std::shared_ptr<Service> service)
    : id_(RandomU64()), peer_(std::move(peer)), service_(std::move(service)) {}

bool Link::alive() const {
  std::lock_guard lock(mutex_);
  return alive_;
}

Status Link::BrokenLocked() const {
  return Status(Code::kUnavailable,
                fmt::format("{}; connect again, or use another holder", broken_))
      .WithPeer(peer_);
}

void Link::Break(std::string why) {
  std::lock_guard lock(mutex_);
  if (!alive_) return;
  alive_ = false;
  broken_ = std::move(why);
  queue_.clear();
  changed_.notify_all();
  if (!working_) {
    service_->pool->Run(
        [self = shared_from_this()] { self->service_->handler->OnDisconnect(self->id_); });
  }
}

Result<std::string> Link::Request(std::string_view request, uint64_t slot_bytes,
                                  Deadline deadline) {
  auto pending = std::make_shared<Pending>();
  pending->request = request;
  pending->slot_bytes = slot_bytes;
  std::unique_lock lock(mutex_);
  if (!alive_) return BrokenLocked();
  queue_.push_back(pending);
  if (!working_) {
    working_ = true;
    service_->pool->Run([self = shared_from_this()] { self->Work(); });
  }
  changed_.wait_until(lock, deadline.at(), [&] { return pending->done || !alive_; });
  if (pending->done) return std::move(pending->answer);
  if (!alive_) return BrokenLocked();
  std::erase(queue_, pending);
  return Status(Code::kDeadlineExceeded,
                pending->started ? "the peer took the request and did not answer in time"
                                 : "the peer did not read the request in time")
      .WithPeer(peer_);
}

void Link::Work() {
  std::unique_lock lock(mutex_);
  while (alive_ && !queue_.empty()) {
    std::shared_ptr<Pending> pending = queue_.front();
    queue_.pop_front();
    pending->started = true;
    lock.unlock();
    Result<std::string> answer = Handle(*pending);
    lock.lock();
    if (!alive_) break;
    pending->answer = std::move(answer);
    pending->done = true;
    changed_.notify_all();
  }
  working_ = false;
  bool broken = !alive_;
  lock.unlock();
  if (broken) service_->handler->OnDisconnect(id_);
}

Result<std::string> Link::Handle(const Pending& pending) {
  if (pending.slot_bytes == 0) {
    Result<std::string> answer = service_->handler->OnCall(id_, pending.request);
    if (answer.ok() && answer->size() > kMaxCallBytes) {
      return Status(Code::kInternal, fmt::format("the handler's answer of {} bytes exceeds {}",
                                                 answer->size(), kMaxCallBytes));
    }
    return answer;
  }
  // Into memory of its own: the caller's slot is the caller's again once its deadline has passed.
  std::string payload(pending.slot_bytes, '\0');
  Result<uint64_t> bytes =
      service_->handler->OnFetch(id_, pending.request, std::as_writable_bytes(std::span(payload)));
  if (!bytes.ok()) return bytes.status();
  if (*bytes > payload.size()) {
    return Status(Code::kInternal, fmt::format("the handler packed {} bytes into a slot of {}",
                                               *bytes, payload.size()));
  }
  payload.resize(*bytes);
  return payload;
}

}  // namespace bascule::memory
