#include "transport/shm/shm_peer.h"

#include <fmt/format.h>

#include <cstring>

#include "base/random.h"
#include "transport/shm/proof.h"
#include "transport/shm/socket.h"

namespace bascule::shm {
namespace {

constexpr int kProbeTries = 3;  // importers at the same moment may overwrite each other's probe

Result<std::string> Expect(Result<Frame> frame, FrameType type) {
  if (!frame.ok()) return frame.status();
  if (frame->type == FrameType::kReject) return DecodeStatus(frame->payload);
  if (frame->type != type) {
    return Status(Code::kUnavailable, "whoever listens there does not speak the shm protocol");
  }
  return std::move(frame->payload);
}

// The client's half of the handshake (frame.h); the peer's name and incarnation.
Result<Welcome> ShakeHands(int socket, int process, const TransportIdentity& identity,
                           uint64_t incarnation, Deadline deadline) {
  Hello hello{.expected_incarnation = incarnation,
              .incarnation = identity.incarnation,
              .job = identity.job,
              .name = identity.name.substr(0, kMaxNameBytes),
              .nonce = std::string(kNonceBytes, '\0')};
  FillRandom(std::as_writable_bytes(std::span(hello.nonce)));
  std::string hello_bytes = Encode(hello);
  BASCULE_RETURN_IF_ERROR(
      SendAll(socket, EncodeFrame(FrameType::kHello, 0, hello_bytes), process, deadline));
  BASCULE_ASSIGN_OR_RETURN(
      std::string challenge,
      Expect(ReceiveFrame(socket, kMaxHandshakeBytes, process, deadline), FrameType::kChallenge));
  BASCULE_ASSIGN_OR_RETURN(Challenge parsed, DecodeChallenge(challenge));
  if (parsed.protocol < kProtocolMin || parsed.protocol > kProtocolMax) {
    return Status(Code::kVersionMismatch,
                  fmt::format("the peer chose shm protocol {}, this side speaks {}-{}",
                              parsed.protocol, kProtocolMin, kProtocolMax));
  }
  std::string proof = ClientProof(identity.token, hello_bytes, challenge);
  BASCULE_RETURN_IF_ERROR(
      SendAll(socket, EncodeFrame(FrameType::kProof, 0, proof), process, deadline));
  BASCULE_ASSIGN_OR_RETURN(
      std::string welcome_bytes,
      Expect(ReceiveFrame(socket, kMaxHandshakeBytes, process, deadline), FrameType::kWelcome));
  BASCULE_ASSIGN_OR_RETURN(Welcome welcome, DecodeWelcome(welcome_bytes));
  Welcome rest{.incarnation = welcome.incarnation, .name = welcome.name};
  if (!SameProof(welcome.proof,
                 ServerProof(identity.token, hello_bytes, challenge, Encode(rest)))) {
    return Status(Code::kPermissionDenied,
                  "whoever listens there did not prove the job token; start both sides with the "
                  "same token");
  }
  if (welcome.incarnation != incarnation) {
    return Status(Code::kStaleTerm,
                  fmt::format("the address belongs to incarnation {:016x}, not to {:016x}; ask the "
                              "directory again",
                              welcome.incarnation, incarnation));
  }
  return welcome;
}

}  // namespace

Result<std::shared_ptr<Peer>> ShmPeer::Connect(const TransportIdentity& identity,
                                               const std::string& address, uint64_t incarnation,
                                               std::shared_ptr<Reactor> reactor,
                                               std::shared_ptr<ImportCache> imports,
                                               Deadline deadline) {
  auto fail = [&address](Status status) {
    return status.peer().empty() ? std::move(status).WithPeer(address) : std::move(status);
  };
  if (deadline.Passed()) {
    return fail(Status(Code::kDeadlineExceeded, "called after its deadline"));
  }
  auto socket = ConnectTo(address, deadline);
  if (!socket.ok()) return fail(socket.status());
  UnixFd process = OpenPeerProcess(socket->get());
  auto welcome = ShakeHands(socket->get(), process.get(), identity, incarnation, deadline);
  if (!welcome.ok()) return fail(welcome.status());

  std::shared_ptr<ShmPeer> peer(new ShmPeer());
  peer->name_ = welcome->name + " (shm)";
  peer->incarnation_ = incarnation;
  peer->reactor_ = std::move(reactor);
  peer->imports_ = std::move(imports);
  peer->connection_ = std::make_shared<ClientConnection>(peer->name_, std::move(*socket),
                                                         std::move(process), peer->reactor_.get());
  if (Status status = peer->connection_->Start(); !status.ok()) return fail(std::move(status));
  return std::shared_ptr<Peer>(std::move(peer));
}

ShmPeer::~ShmPeer() {
  if (!fork_guard_.forked()) {
    if (connection_ != nullptr) connection_->Close();
    return;
  }
  // In a forked child locks may be held by threads that do not exist, and the epoll set is the
  // parent's. What belongs to them is left alone.
  new (std::nothrow) std::shared_ptr<Reactor>(reactor_);
  new (std::nothrow) std::shared_ptr<ClientConnection>(connection_);
  new (std::nothrow) std::shared_ptr<ImportCache>(imports_);
}

bool ShmPeer::alive() const { return !fork_guard_.forked() && connection_->alive(); }

Result<std::string> ShmPeer::Call(std::string_view request, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(fork_guard_.Check());
  if (request.size() > kMaxCallBytes) {
    return Fail(Code::kInvalidArgument, fmt::format("a request of {} bytes; at most {} are allowed",
                                                    request.size(), kMaxCallBytes));
  }
  if (deadline.Passed()) return Fail(Code::kDeadlineExceeded, "called after its deadline");
  BASCULE_ASSIGN_OR_RETURN(Reply reply, connection_->Request(FrameType::kCall, request, deadline));
  if (reply.frame.type == FrameType::kAnswer) return std::move(reply.frame.payload);
  if (reply.frame.type != FrameType::kError) {
    return Fail(Code::kInternal, "the peer answered a call with another kind of frame");
  }
  Status error = DecodeStatus(reply.frame.payload);
  return error.peer().empty() ? std::move(error).WithPeer(name_) : std::move(error);
}

Result<std::shared_ptr<ImportedRegion>> ShmPeer::Import(std::string_view blob, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(fork_guard_.Check());
  auto description = DecodeBlob(blob);
  if (!description.ok()) {
    return Fail(description.status().code(), description.status().message());
  }
  if (description->incarnation != incarnation_) {
    return Fail(Code::kStaleTerm,
                fmt::format("the region belongs to incarnation {:016x}, this peer is {:016x}; ask "
                            "for its present description",
                            description->incarnation, incarnation_));
  }
  ImportCache::Key key{incarnation_, description->id};
  auto cached = imports_->Acquire(key, deadline);
  if (!cached.ok()) return Fail(cached.status().code(), cached.status().message());
  bool first = *cached == nullptr;
  auto region = OpenAndProbe(*description, *cached, deadline);
  if (first) imports_->Finish(key, region.ok() ? *region : nullptr);
  if (!region.ok()) return region.status();
  return std::shared_ptr<ImportedRegion>(*region);
}

Result<std::shared_ptr<MappedRegion>> ShmPeer::OpenAndProbe(const RegionBlob& blob,
                                                            std::shared_ptr<MappedRegion> region,
                                                            Deadline deadline) {
  for (int i = 0; i < kProbeTries; ++i) {
    if (deadline.Passed()) return Fail(Code::kDeadlineExceeded, "opening a region took too long");
    Open open{.region = blob.id, .mapped = region != nullptr, .probe_hint = RandomU64()};
    BASCULE_ASSIGN_OR_RETURN(Reply reply,
                             connection_->Request(FrameType::kOpen, Encode(open), deadline));
    if (reply.frame.type == FrameType::kError) return DecodeStatus(reply.frame.payload);
    if (reply.frame.type != FrameType::kOpened) {
      return Fail(Code::kInternal, "the peer answered with another kind of frame");
    }
    auto opened = DecodeOpened(reply.frame.payload);
    if (!opened.ok()) return Fail(Code::kInternal, opened.status().message());
    if (reply.descriptor_lost) {
      return Fail(Code::kResourceExhausted,
                  "out of file descriptors for a region; raise the limit (ulimit -n)");
    }
    if (region == nullptr) {
      auto mapped = MappedRegion::Map(blob, *opened, reply.descriptor.get());
      if (!mapped.ok()) return Fail(mapped.status().code(), mapped.status().message());
      region = std::move(*mapped);
    }
    if (region->Matches(*opened)) return region;
  }
  return Fail(Code::kUnavailable,
              "what the peer wrote does not read the same through the mapping (or the weights "
              "change while they are exported); use another transport");
}

Status ShmPeer::Read(const ImportedRegion& region, std::span<const ReadRun> runs,
                     Deadline /*deadline*/) {
  for (const ReadRun& run : runs) {
    if (run.remote_offset > region.bytes() || run.bytes > region.bytes() - run.remote_offset) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("a read of {} bytes at {} in a region of {}", run.bytes,
                              run.remote_offset, region.bytes()));
    }
  }
  for (const ReadRun& run : runs) {
    std::memcpy(run.target, region.data() + run.remote_offset, run.bytes);
  }
  return Status::Ok();
}

Result<uint64_t> ShmPeer::Fetch(std::string_view /*request*/, std::span<std::byte> /*slot*/,
                                Deadline /*deadline*/) {
  return Fail(Code::kUnimplemented, "shm is a mapped transport: read the region's address");
}

}  // namespace bascule::shm
