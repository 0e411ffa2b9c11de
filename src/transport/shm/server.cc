#include "transport/shm/server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/random.h"
#include "transport/shm/server_connection.h"
#include "transport/shm/socket.h"
#include "transport/shm/stale_sockets.h"

namespace bascule::shm {
namespace {

constexpr int kAcceptsATurn = 64;
constexpr auto kPauseWithoutDescriptors = std::chrono::milliseconds(100);

UnixFd OpenSpare() { return UnixFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

void TurnAway(int socket, const std::string& why) {
  std::string payload = Encode(Status(Code::kResourceExhausted, why));
  // Best effort: a client that gets nothing sees the connection close.
  (void)SendSome(socket, EncodeFrame(FrameType::kReject, 0, payload));
}

}  // namespace

Result<std::shared_ptr<Server>> Server::Start(const TransportIdentity& identity,
                                              const ShmOptions& options, const ShmLimits& limits,
                                              Reactor* reactor,
                                              std::shared_ptr<RegionRegistry> registry,
                                              PeerHandler* handler) {
  std::shared_ptr<Server> server(new Server());
  server->identity_ = identity;
  server->limits_ = limits;
  server->reactor_ = reactor;
  server->registry_ = std::move(registry);
  server->handler_ = handler;
  BASCULE_ASSIGN_OR_RETURN(server->pool_, WorkerPool::Start(limits.handler_threads));
  server->spare_ = OpenSpare();
  if (!options.directory.empty()) RemoveStaleSockets(options.directory);
  std::string address = MakeAddress(identity.job, options.directory);
  BASCULE_ASSIGN_OR_RETURN(server->listener_, ListenOn(address, SOMAXCONN));
  server->address_ = address;
  auto key = reactor->Add(server->listener_.get(), 0, EPOLLIN, server);
  if (!key.ok()) {
    server->Stop();
    return key.status();
  }
  std::lock_guard lock(server->mutex_);
  server->listener_key_ = *key;
  return server;
}

void Server::Stop() {
  std::vector<std::shared_ptr<ServerConnection>> open;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    if (listener_key_ != 0) reactor_->Remove(listener_key_);
    for (auto& [id, connection] : connections_) open.push_back(connection);
  }
  if (std::string file = SocketFile(address_); !file.empty()) ::unlink(file.c_str());
  pool_->Stop();  // first, so that closing below reports nothing
  for (auto& connection : open) connection->Close();
  std::lock_guard lock(mutex_);
  listener_.Reset();
}

void Server::OnEvent(uint32_t /*tag*/, uint32_t /*events*/) {
  for (int i = 0; i < kAcceptsATurn; ++i) {
    UnixFd socket;
    int error = 0;
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return;
      socket = UnixFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      error = errno;
    }
    if (socket.valid()) {
      Accept(std::move(socket));
      continue;
    }
    if (error == EINTR || error == ECONNABORTED) continue;
    // accept4 wants a descriptor before it looks whether anyone waits.
    if (error == EMFILE || error == ENFILE) error = TurnAwayOne();
    if (error == 0) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return;
    // Without a descriptor the listener stays readable: look away instead of spinning.
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    reactor_->Modify(listener_key_, 0);
    reactor_->At(Reactor::Clock::now() + kPauseWithoutDescriptors, weak_from_this());
    return;
  }
}

void Server::OnTimer() {
  std::lock_guard lock(mutex_);
  if (!stopped_) reactor_->Modify(listener_key_, EPOLLIN);
}

int Server::TurnAwayOne() {
  std::lock_guard lock(mutex_);
  if (stopped_) return EAGAIN;
  if (!spare_.valid()) {
    spare_ = OpenSpare();
    return EMFILE;
  }
  spare_.Reset();
  UnixFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  int error = socket.valid() ? 0 : errno;
  if (socket.valid()) {
    TurnAway(socket.get(), fmt::format("{} is out of file descriptors; raise its limit (ulimit -n)",
                                       identity_.name));
  }
  socket.Reset();
  spare_ = OpenSpare();
  return error;
}

void Server::Accept(UnixFd socket) {
  std::shared_ptr<ServerConnection> connection;
  std::shared_ptr<ServerConnection> dropped;
  uint64_t id = RandomU64();
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    if (connections_.size() >= limits_.max_connections) {
      return TurnAway(socket.get(), fmt::format("{} has {} connections already", identity_.name,
                                                connections_.size()));
    }
    if (unauthenticated_.size() >= limits_.max_unauthenticated) {
      auto oldest = connections_.find(unauthenticated_.front());
      if (oldest != connections_.end()) dropped = oldest->second;
    }
    connection = std::make_shared<ServerConnection>(shared_from_this(), id, std::move(socket));
    connections_.emplace(id, connection);
    unauthenticated_.push_back(id);
  }
  if (dropped != nullptr) dropped->Close();
  if (!connection->Start().ok()) connection->Close();
}

void Server::Forget(uint64_t id) {
  std::shared_ptr<ServerConnection> released;  // destroyed outside the lock
  std::lock_guard lock(mutex_);
  std::erase(unauthenticated_, id);
  auto it = connections_.find(id);
  if (it == connections_.end()) return;
  released = std::move(it->second);
  connections_.erase(it);
}

void Server::Authenticated(uint64_t id) {
  std::lock_guard lock(mutex_);
  std::erase(unauthenticated_, id);
}

}  // namespace bascule::shm
