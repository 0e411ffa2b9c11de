// Frames on the Unix socket of the shm transport, and the messages in them. Pure: bytes in, frames
// out. Everything that arrives is untrusted.
//
// A frame is a 24-byte header (magic u32, type u8, flags u8, two zeros, id u64, length u64; little
// endian) and `length` bytes. The header and the first eight bytes of Hello never change between
// protocol versions, so that a mismatch can be told.
//
//   client                        server
//   Hello    ------------------>           who, which protocol versions, nonce
//            <------------------ Challenge the version chosen, nonce
//   Proof    ------------------>           HMAC-SHA256(token, "bascule shm client", Hello,
//   Challenge)
//            <------------------ Welcome   HMAC-SHA256(token, "bascule shm server", Hello,
//            Challenge, ...)
//   Call(id) ------------------>
//            <------------------ Answer(id) or Error(id)
//   Open(id) ------------------>           a region
//            <------------------ Opened(id) with the region's descriptor, or Error(id)
// Reject replaces any of the server's handshake frames. The token itself never travels.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "bascule/status.h"

namespace bascule::shm {

inline constexpr uint32_t kProtocolMin = 1;
inline constexpr uint32_t kProtocolMax = 1;
inline constexpr size_t kHeaderBytes = 24;
inline constexpr uint64_t kMaxHandshakeBytes = 4096;
inline constexpr size_t kMaxNameBytes = 512;  // of a job or a process in Hello and Welcome
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kProofBytes = 32;
inline constexpr size_t kProbeBytes = 1024;

enum class FrameType : uint8_t {
  kHello = 1,
  kChallenge,
  kProof,
  kWelcome,
  kReject,
  kCall,
  kAnswer,
  kError,
  kOpen,
  kOpened,
};

struct Frame {
  FrameType type = FrameType::kHello;
  bool has_descriptor = false;  // one descriptor came with the frame's first byte
  uint64_t id = 0;
  std::string payload;
};

// Header and payload, ready to send.
[[nodiscard]] std::string EncodeFrame(FrameType type, uint64_t id, std::string_view payload,
                                      bool has_descriptor = false);

// Puts frames together from a byte stream without ever asking for a byte beyond the current frame.
// Memory grows with the bytes that came, not with the length that a header claims.
class FrameAssembler {
 public:
  explicit FrameAssembler(uint64_t max_payload) : max_payload_(max_payload) {}
  void set_max_payload(uint64_t bytes) { max_payload_ = bytes; }

  // Where the next bytes go; never empty until a frame is complete. Valid until Advance.
  [[nodiscard]] std::span<char> Space();
  // `bytes` of Space() were filled. An error means that the stream is garbage: close it.
  [[nodiscard]] Status Advance(size_t bytes);
  [[nodiscard]] bool complete() const { return header_ok_ && received_ == length_; }
  // Some but not all bytes of a frame are here.
  [[nodiscard]] bool partial() const { return header_received_ > 0 && !complete(); }
  // The complete frame; the next one begins.
  [[nodiscard]] Frame Take();

 private:
  [[nodiscard]] Status ParseHeader();

  uint64_t max_payload_;
  std::array<char, kHeaderBytes> header_{};
  size_t header_received_ = 0;
  bool header_ok_ = false;
  uint64_t length_ = 0;
  uint64_t received_ = 0;
  Frame frame_;
};

struct Hello {
  uint32_t protocol_min = kProtocolMin;
  uint32_t protocol_max = kProtocolMax;
  uint64_t expected_incarnation = 0;
  uint64_t incarnation = 0;  // the client's own
  std::string job;
  std::string name;
  std::string nonce;
};
struct Challenge {
  uint32_t protocol = kProtocolMax;
  std::string nonce;
};
struct Welcome {
  std::string proof;
  uint64_t incarnation = 0;
  std::string name;
};
struct Open {
  uint64_t region = 0;
  bool mapped = false;      // the client has it mapped and wants the probe only
  uint64_t probe_hint = 0;  // random; picks the place where an exported region is probed
};
struct Opened {
  uint64_t bytes = 0;
  uint64_t fd_offset = 0;
  bool sealed = false;
  uint64_t inode_device = 0;
  uint64_t inode = 0;
  uint64_t probe_offset = 0;  // in the descriptor, in bytes
  std::string probe;          // what is there
};

[[nodiscard]] std::string Encode(const Hello& hello);
[[nodiscard]] std::string Encode(const Challenge& challenge);
[[nodiscard]] std::string Encode(const Welcome& welcome);
[[nodiscard]] std::string Encode(const Open& open);
[[nodiscard]] std::string Encode(const Opened& opened);
[[nodiscard]] std::string Encode(const Status& status);

// kVersionMismatch when the ranges do not overlap, kInvalidArgument for garbage.
[[nodiscard]] Result<Hello> DecodeHello(std::string_view payload);
[[nodiscard]] Result<Challenge> DecodeChallenge(std::string_view payload);
[[nodiscard]] Result<Welcome> DecodeWelcome(std::string_view payload);
[[nodiscard]] Result<Open> DecodeOpen(std::string_view payload);
[[nodiscard]] Result<Opened> DecodeOpened(std::string_view payload);
// Never OK: what cannot be read becomes kInternal.
[[nodiscard]] Status DecodeStatus(std::string_view payload);

}  // namespace bascule::shm
