#include "transport/shm/server_connection.h"

#include <fmt/format.h>

#include "base/random.h"
#include "transport/shm/proof.h"
#include "transport/shm/socket.h"

namespace bascule::shm {
namespace {

constexpr uint32_t kSocketTag = 0;
constexpr uint32_t kProcessTag = 1;
constexpr uint64_t kReadBudget = 1 << 20;  // a turn, so that others get theirs

std::string Nonce() {
  std::string nonce(kNonceBytes, '\0');
  FillRandom(std::as_writable_bytes(std::span(nonce)));
  return nonce;
}

}  // namespace

ServerConnection::ServerConnection(std::shared_ptr<Server> server, uint64_t id, UnixFd socket)
    : server_(std::move(server)),
      id_(id),
      socket_(std::move(socket)),
      started_(Reactor::Clock::now()),
      progress_(started_) {}

Status ServerConnection::Start() {
  std::lock_guard lock(mutex_);
  if (closed_) return Status::Ok();  // the server stopped meanwhile
  BASCULE_ASSIGN_OR_RETURN(
      socket_key_,
      server_->reactor_->Add(socket_.get(), kSocketTag, EPOLLIN | EPOLLRDHUP, shared_from_this()));
  WaitLocked();
  return Status::Ok();
}

void ServerConnection::Close() {
  std::lock_guard lock(mutex_);
  CloseLocked();
}

void ServerConnection::CloseLocked() {
  if (closed_) return;
  closed_ = true;
  if (socket_key_ != 0) server_->reactor_->Remove(socket_key_);
  if (process_key_ != 0) server_->reactor_->Remove(process_key_);
  socket_.Reset();
  process_.Reset();
  outgoing_region_.reset();
  server_->Forget(id_);
  // One call at a time: a request that is being handled reports the end itself.
  if (phase_ == Phase::kOpen && !handling_) {
    server_->pool_->Run(
        [self = shared_from_this()] { self->server_->handler_->OnDisconnect(self->id_); });
  }
}

void ServerConnection::OnEvent(uint32_t tag, uint32_t events) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  if (tag == kProcessTag) return CloseLocked();
  if ((events & EPOLLOUT) != 0) FlushLocked();
  if (!closed_ && (events & EPOLLIN) != 0) ReadLocked();
  // What came before the end was read above, unless an answer is pending: nobody waits for it.
  if (!closed_ && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) CloseLocked();
  if (!closed_) WaitLocked();
}

void ServerConnection::OnTimer() {
  std::lock_guard lock(mutex_);
  timer_ = Reactor::Clock::time_point::max();
  if (closed_) return;
  auto due = DueLocked();
  if (due && *due <= Reactor::Clock::now()) return CloseLocked();
  WaitLocked();
}

std::optional<Reactor::Clock::time_point> ServerConnection::DueLocked() const {
  if (phase_ != Phase::kOpen) return started_ + server_->limits_.handshake_timeout;
  if (assembler_.partial() || !outgoing_.empty()) {
    return progress_ + server_->limits_.stall_timeout;
  }
  return std::nullopt;
}

void ServerConnection::WaitLocked() {
  uint32_t events = EPOLLRDHUP;
  if (!outgoing_.empty()) {
    events |= EPOLLOUT;
  } else if (!handling_) {
    events |= EPOLLIN;
  }
  server_->reactor_->Modify(socket_key_, events);
  auto due = DueLocked();
  if (due && *due < timer_) {
    timer_ = *due;
    server_->reactor_->At(*due, weak_from_this());
  }
}

void ServerConnection::ReadLocked() {
  uint64_t budget = kReadBudget;
  while (!closed_ && !handling_ && outgoing_.empty() && budget > 0) {
    std::span<char> space = assembler_.Space();
    IoResult received = ReceiveSome(socket_.get(), space.first(std::min(space.size(), budget)));
    if (received.closed) return CloseLocked();
    if (received.blocked) return;
    budget -= received.bytes;
    progress_ = Reactor::Clock::now();
    if (!assembler_.Advance(received.bytes).ok()) return CloseLocked();
    if (assembler_.complete()) HandleLocked(assembler_.Take());
  }
}

void ServerConnection::HandleLocked(Frame frame) {
  if (phase_ == Phase::kHello && frame.type == FrameType::kHello) {
    HandleHelloLocked(std::move(frame));
  } else if (phase_ == Phase::kProof && frame.type == FrameType::kProof) {
    HandleProofLocked(frame);
  } else if (phase_ == Phase::kOpen && frame.type == FrameType::kOpen) {
    HandleOpenLocked(frame);
  } else if (phase_ == Phase::kOpen && frame.type == FrameType::kCall) {
    handling_ = true;
    server_->pool_->Run([self = shared_from_this(), id = frame.id,
                         request = std::move(frame.payload)] { self->RunCall(id, request); });
  } else {
    CloseLocked();
  }
}

void ServerConnection::HandleHelloLocked(Frame frame) {
  auto hello = DecodeHello(frame.payload);
  if (!hello.ok()) return RejectLocked(hello.status());
  hello_ = std::move(frame.payload);
  job_ = hello->job;
  expected_incarnation_ = hello->expected_incarnation;
  challenge_ =
      Encode(Challenge{.protocol = std::min(hello->protocol_max, kProtocolMax), .nonce = Nonce()});
  phase_ = Phase::kProof;
  SendLocked(FrameType::kChallenge, 0, challenge_);
}

void ServerConnection::HandleProofLocked(const Frame& frame) {
  const TransportIdentity& me = server_->identity_;
  // Nothing about this process is told before the token is proven.
  if (!SameProof(frame.payload, ClientProof(me.token, hello_, challenge_))) {
    PeerCredentials who = GetPeerCredentials(socket_.get());
    return RejectLocked(Status(
        Code::kPermissionDenied,
        fmt::format("process {} (user {}) did not prove the job token; start both sides with the "
                    "same token",
                    who.pid, who.uid)));
  }
  if (job_ != me.job) {
    return RejectLocked(
        Status(Code::kPermissionDenied,
               fmt::format("this process belongs to job '{}', not to '{}'", me.job, job_)));
  }
  if (expected_incarnation_ != me.incarnation) {
    return RejectLocked(Status(
        Code::kStaleTerm,
        fmt::format("the address belongs to incarnation {:016x}, not to {:016x}; ask the directory "
                    "again",
                    me.incarnation, expected_incarnation_)));
  }
  Welcome welcome{.incarnation = me.incarnation, .name = me.name};
  std::string rest = Encode(welcome);
  welcome.proof = ServerProof(me.token, hello_, challenge_, rest);
  phase_ = Phase::kOpen;
  assembler_.set_max_payload(kMaxCallBytes);
  server_->Authenticated(id_);
  process_ = OpenPeerProcess(socket_.get());
  if (process_.valid()) {
    auto key = server_->reactor_->Add(process_.get(), kProcessTag, EPOLLIN, shared_from_this());
    if (key.ok()) process_key_ = *key;
  }
  SendLocked(FrameType::kWelcome, 0, Encode(welcome));
}

void ServerConnection::HandleOpenLocked(const Frame& frame) {
  auto open = DecodeOpen(frame.payload);
  if (!open.ok()) return CloseLocked();
  std::shared_ptr<OwnedRegion> region = server_->registry_->Find(open->region);
  if (region == nullptr) {
    return SendLocked(FrameType::kError, frame.id,
                      Encode(Status(Code::kNotFound,
                                    "the region was released by its owner; ask for its present "
                                    "description")
                                 .WithPeer(server_->identity_.name)));
  }
  std::string payload = Encode(region->Describe(open->probe_hint));
  SendLocked(FrameType::kOpened, frame.id, payload, open->mapped ? nullptr : std::move(region));
}

void ServerConnection::RejectLocked(const Status& why) {
  close_when_sent_ = true;
  SendLocked(FrameType::kReject, 0, Encode(Status(why).WithPeer(server_->identity_.name)));
}

void ServerConnection::SendLocked(FrameType type, uint64_t id, std::string_view payload,
                                  std::shared_ptr<OwnedRegion> region) {
  outgoing_ = EncodeFrame(type, id, payload, region != nullptr);
  sent_ = 0;
  outgoing_region_ = std::move(region);
  progress_ = Reactor::Clock::now();
  FlushLocked();
}

void ServerConnection::FlushLocked() {
  while (sent_ < outgoing_.size()) {
    int descriptor = sent_ == 0 && outgoing_region_ != nullptr ? outgoing_region_->fd() : -1;
    IoResult sent = SendSome(socket_.get(), std::string_view(outgoing_).substr(sent_), descriptor);
    if (sent.closed) return CloseLocked();
    if (sent.blocked) return;
    sent_ += sent.bytes;
    progress_ = Reactor::Clock::now();
  }
  outgoing_ = std::string();  // gives the memory back
  outgoing_region_.reset();
  if (close_when_sent_) CloseLocked();
}

void ServerConnection::RunCall(uint64_t frame_id, const std::string& request) {
  Result<std::string> answer = server_->handler_->OnCall(id_, request);
  if (answer.ok() && answer->size() > kMaxCallBytes) {
    answer = Status(Code::kInternal, fmt::format("the handler's answer of {} bytes exceeds {}",
                                                 answer->size(), kMaxCallBytes))
                 .WithPeer(server_->identity_.name);
  }
  bool gone = false;
  {
    std::lock_guard lock(mutex_);
    handling_ = false;
    gone = closed_;
    if (!gone) {
      if (answer.ok()) {
        SendLocked(FrameType::kAnswer, frame_id, *answer);
      } else {
        SendLocked(FrameType::kError, frame_id, Encode(answer.status()));
      }
      if (!closed_) WaitLocked();
    }
  }
  if (gone) server_->handler_->OnDisconnect(id_);
}

}  // namespace bascule::shm
