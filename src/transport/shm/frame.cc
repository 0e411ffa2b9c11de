#include "transport/shm/frame.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/wire.h"

namespace bascule::shm {
namespace {

constexpr uint32_t kMagic = 0x31534342;  // "BCS1"
constexpr uint8_t kHasDescriptor = 1;
constexpr uint64_t kGrowthBytes = 64 << 10;

Status Garbage(const char* what) {
  return {Code::kInvalidArgument, fmt::format("malformed {} on an shm connection", what)};
}

}  // namespace

std::string EncodeFrame(FrameType type, uint64_t id, std::string_view payload,
                        bool has_descriptor) {
  WireWriter writer;
  writer.U32(kMagic);
  writer.U8(static_cast<uint8_t>(type));
  writer.U8(has_descriptor ? kHasDescriptor : 0);
  writer.U8(0);
  writer.U8(0);
  writer.U64(id);
  writer.U64(payload.size());
  std::string frame = writer.Take();
  frame.append(payload);
  return frame;
}

std::span<char> FrameAssembler::Space() {
  if (!header_ok_) return std::span(header_).subspan(header_received_);
  uint64_t have = frame_.payload.size();
  if (have == received_) {
    // As much again as came so far: a claimed length alone costs nothing.
    frame_.payload.resize(std::min(length_, have + std::max(have, kGrowthBytes)));
  }
  return std::span(frame_.payload).subspan(received_);
}

Status FrameAssembler::Advance(size_t bytes) {
  if (header_ok_) {
    received_ += bytes;
    return Status::Ok();
  }
  header_received_ += bytes;
  return header_received_ == kHeaderBytes ? ParseHeader() : Status::Ok();
}

Status FrameAssembler::ParseHeader() {
  WireReader reader(std::string_view(header_.data(), header_.size()));
  uint32_t magic = reader.U32();
  uint8_t type = reader.U8();
  uint8_t flags = reader.U8();
  uint8_t zeros = reader.U8() | reader.U8();
  frame_.id = reader.U64();
  length_ = reader.U64();
  if (magic != kMagic || zeros != 0 || flags > kHasDescriptor) return Garbage("frame header");
  if (type < static_cast<uint8_t>(FrameType::kHello) ||
      type > static_cast<uint8_t>(FrameType::kOpened)) {
    return Garbage("frame type");
  }
  if (length_ > max_payload_) {
    return {Code::kInvalidArgument,
            fmt::format("a frame of {} bytes on an shm connection; at most {} are allowed here",
                        length_, max_payload_)};
  }
  frame_.type = static_cast<FrameType>(type);
  frame_.has_descriptor = flags == kHasDescriptor;
  header_ok_ = true;
  return Status::Ok();
}

Frame FrameAssembler::Take() {
  Frame frame = std::move(frame_);
  frame_ = Frame();
  header_received_ = 0;
  header_ok_ = false;
  length_ = received_ = 0;
  return frame;
}

std::string Encode(const Hello& hello) {
  WireWriter writer;
  writer.U32(hello.protocol_min);
  writer.U32(hello.protocol_max);
  writer.U64(hello.expected_incarnation);
  writer.U64(hello.incarnation);
  writer.Bytes(hello.job);
  writer.Bytes(hello.name);
  writer.Bytes(hello.nonce);
  return writer.Take();
}

std::string Encode(const Challenge& challenge) {
  WireWriter writer;
  writer.U32(challenge.protocol);
  writer.Bytes(challenge.nonce);
  return writer.Take();
}

std::string Encode(const Welcome& welcome) {
  WireWriter writer;
  writer.Bytes(welcome.proof);
  writer.U64(welcome.incarnation);
  writer.Bytes(welcome.name);
  return writer.Take();
}

std::string Encode(const Open& open) {
  WireWriter writer;
  writer.U64(open.region);
  writer.U8(open.mapped ? 1 : 0);
  writer.U64(open.probe_hint);
  return writer.Take();
}

std::string Encode(const Opened& opened) {
  WireWriter writer;
  writer.U64(opened.bytes);
  writer.U64(opened.fd_offset);
  writer.U8(opened.sealed ? 1 : 0);
  writer.U64(opened.inode_device);
  writer.U64(opened.inode);
  writer.U64(opened.probe_offset);
  writer.Bytes(opened.probe);
  return writer.Take();
}

std::string Encode(const Status& status) {
  WireWriter writer;
  writer.U8(static_cast<uint8_t>(status.code()));
  writer.I64(status.rank());
  writer.Bytes(status.message());
  writer.Bytes(status.peer());
  writer.Bytes(status.tensor());
  return writer.Take();
}

Result<Hello> DecodeHello(std::string_view payload) {
  WireReader reader(payload);
  Hello hello;
  hello.protocol_min = reader.U32();
  hello.protocol_max = reader.U32();
  if (!reader.ok()) return Garbage("Hello");
  if (hello.protocol_min > kProtocolMax || hello.protocol_max < kProtocolMin) {
    return Status(Code::kVersionMismatch,
                  fmt::format("the connecting side speaks shm protocol {}-{}, this side {}-{}; "
                              "install Bascule versions whose ranges overlap",
                              hello.protocol_min, hello.protocol_max, kProtocolMin, kProtocolMax));
  }
  hello.expected_incarnation = reader.U64();
  hello.incarnation = reader.U64();
  hello.job = reader.Bytes();
  hello.name = reader.Bytes();
  hello.nonce = reader.Bytes();
  if (!reader.done() || hello.job.size() > kMaxNameBytes || hello.name.size() > kMaxNameBytes ||
      hello.nonce.size() != kNonceBytes) {
    return Garbage("Hello");
  }
  return hello;
}

Result<Challenge> DecodeChallenge(std::string_view payload) {
  WireReader reader(payload);
  Challenge challenge;
  challenge.protocol = reader.U32();
  challenge.nonce = reader.Bytes();
  if (!reader.done() || challenge.nonce.size() != kNonceBytes) return Garbage("Challenge");
  return challenge;
}

Result<Welcome> DecodeWelcome(std::string_view payload) {
  WireReader reader(payload);
  Welcome welcome;
  welcome.proof = reader.Bytes();
  welcome.incarnation = reader.U64();
  welcome.name = reader.Bytes();
  if (!reader.done() || welcome.proof.size() != kProofBytes ||
      welcome.name.size() > kMaxNameBytes) {
    return Garbage("Welcome");
  }
  return welcome;
}

Result<Open> DecodeOpen(std::string_view payload) {
  WireReader reader(payload);
  Open open;
  open.region = reader.U64();
  open.mapped = reader.U8() != 0;
  open.probe_hint = reader.U64();
  if (!reader.done()) return Garbage("Open");
  return open;
}

Result<Opened> DecodeOpened(std::string_view payload) {
  WireReader reader(payload);
  Opened opened;
  opened.bytes = reader.U64();
  opened.fd_offset = reader.U64();
  opened.sealed = reader.U8() != 0;
  opened.inode_device = reader.U64();
  opened.inode = reader.U64();
  opened.probe_offset = reader.U64();
  opened.probe = reader.Bytes();
  if (!reader.done() || opened.probe.empty() || opened.probe.size() > kProbeBytes) {
    return Garbage("Opened");
  }
  return opened;
}

Status DecodeStatus(std::string_view payload) {
  WireReader reader(payload);
  uint8_t code = reader.U8();
  auto rank = static_cast<int>(reader.I64());
  std::string message = reader.Bytes();
  std::string peer = reader.Bytes();
  std::string tensor = reader.Bytes();
  if (!reader.done() || code == 0 || code > static_cast<uint8_t>(Code::kInternal)) {
    return {Code::kInternal, "the peer answered with an error that cannot be read"};
  }
  return Status(static_cast<Code>(code), std::move(message))
      .WithRank(rank)
      .WithPeer(std::move(peer))
      .WithTensor(std::move(tensor));
}

}  // namespace bascule::shm
