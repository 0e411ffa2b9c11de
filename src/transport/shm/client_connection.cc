#include "transport/shm/client_connection.h"

#include <fmt/format.h>

#include <algorithm>

#include "transport/shm/socket.h"
#include "transport/transport.h"

namespace bascule::shm {
namespace {

constexpr uint32_t kSocketTag = 0;
constexpr uint32_t kProcessTag = 1;
constexpr uint64_t kReadBudget = 1 << 20;  // a turn, so that others get theirs

}  // namespace

ClientConnection::ClientConnection(std::string peer, UnixFd socket, UnixFd process,
                                   Reactor* reactor)
    : peer_(std::move(peer)),
      reactor_(reactor),
      socket_(std::move(socket)),
      process_(std::move(process)),
      assembler_(kMaxCallBytes) {}

Status ClientConnection::Start() {
  std::lock_guard lock(mutex_);
  BASCULE_ASSIGN_OR_RETURN(socket_key_,
                           reactor_->Add(socket_.get(), kSocketTag, EPOLLIN, shared_from_this()));
  if (process_.valid()) {
    auto key = reactor_->Add(process_.get(), kProcessTag, EPOLLIN, shared_from_this());
    if (key.ok()) process_key_ = *key;  // else the socket alone must tell
  }
  return Status::Ok();
}

void ClientConnection::Close() {
  std::lock_guard lock(mutex_);
  BreakLocked("the connection was closed on this side");
}

Status ClientConnection::BrokenLocked() const {
  return Status(Code::kUnavailable,
                fmt::format("{}; connect again, or use another holder", broken_))
      .WithPeer(peer_);
}

void ClientConnection::BreakLocked(std::string why) {
  if (!alive_) return;
  alive_ = false;
  broken_ = std::move(why);
  if (socket_key_ != 0) reactor_->Remove(socket_key_);
  if (process_key_ != 0) reactor_->Remove(process_key_);
  socket_.Reset();
  process_.Reset();
  descriptor_.Reset();
  outgoing_.clear();
  for (auto& [id, waiter] : waiters_) waiter->changed.notify_one();
}

Result<Reply> ClientConnection::Request(FrameType type, std::string_view payload,
                                        Deadline deadline) {
  Waiter waiter;
  std::unique_lock lock(mutex_);
  if (!alive_) return BrokenLocked();
  uint64_t id = next_id_++;
  waiters_.emplace(id, &waiter);
  outgoing_.push_back({id, EncodeFrame(type, id, payload), 0});
  FlushLocked();
  waiter.changed.wait_until(lock, deadline.at(), [&] { return waiter.done || !alive_; });
  waiters_.erase(id);
  if (waiter.done) return std::move(waiter.reply);
  if (!alive_) return BrokenLocked();
  auto unsent = std::find_if(outgoing_.begin(), outgoing_.end(),
                             [id](const Outgoing& item) { return item.id == id; });
  bool taken = unsent == outgoing_.end();
  if (!taken && unsent->sent == 0) outgoing_.erase(unsent);
  return Status(Code::kDeadlineExceeded,
                taken ? "the peer took the request and did not answer in time"
                      : "the peer did not read the request in time; is it stopped or overloaded?")
      .WithPeer(peer_);
}

void ClientConnection::OnEvent(uint32_t tag, uint32_t events) {
  std::lock_guard lock(mutex_);
  if (!alive_) return;
  if ((events & EPOLLOUT) != 0) FlushLocked();
  // Also for other events: answers that were sent before the end are still there.
  ReadLocked();
  if (tag == kProcessTag) BreakLocked("its process ended");
}

void ClientConnection::ReadLocked() {
  uint64_t budget = kReadBudget;
  while (alive_ && budget > 0) {
    std::span<char> space = assembler_.Space();
    IoResult received = ReceiveSomeWithDescriptor(
        socket_.get(), space.first(std::min(space.size(), budget)), descriptor_, descriptor_lost_);
    if (received.closed) return BreakLocked("its process ended or it closed the connection");
    if (received.blocked) return;
    budget -= received.bytes;
    if (Status status = assembler_.Advance(received.bytes); !status.ok()) {
      return BreakLocked(status.message());
    }
    if (assembler_.complete()) DeliverLocked();
  }
}

void ClientConnection::DeliverLocked() {
  Reply reply;
  reply.frame = assembler_.Take();
  reply.descriptor = std::move(descriptor_);
  reply.descriptor_lost = std::exchange(descriptor_lost_, false);
  if (reply.frame.has_descriptor != (reply.descriptor.valid() || reply.descriptor_lost)) {
    return BreakLocked("it sent a descriptor where none belongs, or none where one does");
  }
  auto it = waiters_.find(reply.frame.id);
  if (it == waiters_.end() || it->second->done) return;  // too late: dropped
  it->second->reply = std::move(reply);
  it->second->done = true;
  it->second->changed.notify_one();
}

void ClientConnection::FlushLocked() {
  while (!outgoing_.empty()) {
    Outgoing& head = outgoing_.front();
    IoResult sent = SendSome(socket_.get(), std::string_view(head.bytes).substr(head.sent));
    // A broken connection is told by the reactor, after the answers that are still in it.
    if (sent.closed || sent.blocked) break;
    head.sent += sent.bytes;
    if (head.sent == head.bytes.size()) outgoing_.pop_front();
  }
  reactor_->Modify(socket_key_, outgoing_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

}  // namespace bascule::shm
