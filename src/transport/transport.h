// The one transport interface (design section 3.3). A transport moves bytes between two processes
// and knows nothing of tensors, plans or versions.
//
// Two kinds:
//  - mapped: an imported region has an address here; the receiver's copy program reads it directly.
//  - message: an imported region has no address; bytes come by Read (one-sided runs) or Fetch (the
//    peer packs an answer to an opaque request into the caller's slot).
// Requests and notices travel on the peer's control channel (Call), which every transport has.
//
// Thread-safety: Transport and Peer methods may be called from any thread. Callbacks run on the
// transport's own thread and must not block. No method waits beyond its deadline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bascule/deadline.h"
#include "bascule/layout.h"
#include "bascule/status.h"

namespace bascule {

enum class TransportKind : uint8_t { kMapped, kMessage };

// Memory that peers may read: library-owned, page-aligned. Unmapped when the last reference goes.
class SharedRegion {
 public:
  virtual ~SharedRegion() = default;
  [[nodiscard]] virtual std::byte* data() const = 0;
  [[nodiscard]] virtual uint64_t bytes() const = 0;
  [[nodiscard]] virtual MemoryKind kind() const = 0;
  // Opaque description that a peer imports. Small (<= 256 bytes), plain bytes, versioned.
  [[nodiscard]] virtual std::string blob() const = 0;
};

// A peer's region as seen here.
class ImportedRegion {
 public:
  virtual ~ImportedRegion() = default;
  // Readable address for mapped transports, else null.
  [[nodiscard]] virtual const std::byte* data() const = 0;
  [[nodiscard]] virtual uint64_t bytes() const = 0;
};

struct ReadRun {
  uint64_t remote_offset = 0;
  std::byte* target = nullptr;
  uint64_t bytes = 0;
};

// A connection to one incarnation of one peer. Closed by the destructor.
class Peer {
 public:
  virtual ~Peer() = default;
  // "trainer 3 (shm)": for messages.
  [[nodiscard]] virtual std::string name() const = 0;
  // False once the other process is gone or the connection broke; never becomes true again.
  [[nodiscard]] virtual bool alive() const = 0;

  // Opens a region by its blob. One open per (incarnation, allocation): a second import of the same
  // region shares the first. Mapped transports probe before trust, each time: a random KiB that the
  // peer names must read the same through the mapping. kNotFound: the owner released it;
  // kStaleTerm: it belongs to another incarnation; kUnavailable: the probe failed, use another
  // transport. A mapped import stays readable after the owner releases the region, exits or is
  // killed.
  [[nodiscard]] virtual Result<std::shared_ptr<ImportedRegion>> Import(std::string_view blob,
                                                                       Deadline deadline) = 0;
  // Control channel: sends a request (<= kMaxCallBytes) and waits for the peer's answer. An error
  // of the peer's handler comes as it is (with this peer's name where it names none). kUnavailable
  // as soon as the connection breaks; kDeadlineExceeded: the peer may or may not have acted, and a
  // late answer is dropped. Calls on one peer are answered in order, those on different peers
  // apart.
  [[nodiscard]] virtual Result<std::string> Call(std::string_view request, Deadline deadline) = 0;

  // Batched one-sided reads; returns when all have landed or one failed. Meant for message
  // transports; mapped ones copy, without looking at the deadline.
  [[nodiscard]] virtual Status Read(const ImportedRegion& region, std::span<const ReadRun> runs,
                                    Deadline deadline) = 0;
  // Message transports: the peer's handler answers `request` with a payload that lands in `slot`.
  // Returns the payload's size. The slot is untouched after an error, now and later. Mapped ones:
  // kUnimplemented.
  [[nodiscard]] virtual Result<uint64_t> Fetch(std::string_view request, std::span<std::byte> slot,
                                               Deadline deadline) = 0;
};

inline constexpr uint64_t kMaxCallBytes = 64u << 20;

// What a listening process does for its peers. Called on transport threads, one call at a time per
// connection; different connections may run at once, but the threads are few (2): a handler that
// waits long holds up others. The transport's destructor waits for calls that are running, so it
// must not hold a lock that a handler takes.
class PeerHandler {
 public:
  virtual ~PeerHandler() = default;
  // Answers a Call. An error reaches the caller as is. `connection` is unique in this process.
  virtual Result<std::string> OnCall(uint64_t connection, std::string_view request) = 0;
  // Packs the answer to a Fetch into `slot`; returns its size.
  virtual Result<uint64_t> OnFetch(uint64_t connection, std::string_view request,
                                   std::span<std::byte> slot) = 0;
  // The peer closed or died; once per connection, after its last call. Not called for connections
  // that this process closes by destroying its transport.
  virtual void OnDisconnect(uint64_t connection) = 0;
};

// Who may connect, and under which names.
struct TransportIdentity {
  std::string job;
  std::string token;         // both sides must show it before anything is handed out
  uint64_t incarnation = 0;  // of this process's rank
  std::string name;          // e.g. "trainer 0"
};

class Transport {
 public:
  virtual ~Transport() = default;
  [[nodiscard]] virtual std::string name() const = 0;  // "shm", "memory", "fault(shm)"
  [[nodiscard]] virtual TransportKind kind() const = 0;

  // Starts to answer peers. The address is opaque and goes to the directory. Once per transport.
  // The handler must outlive the transport.
  [[nodiscard]] virtual Result<std::string> Listen(PeerHandler* handler) = 0;
  // Memory that peers can read. kResourceExhausted names the limit and the remedy.
  [[nodiscard]] virtual Result<std::shared_ptr<SharedRegion>> Allocate(uint64_t bytes,
                                                                       std::string_view label) = 0;
  // Makes existing memory readable for peers, where the transport can (kShared buffers for shm).
  [[nodiscard]] virtual Result<std::shared_ptr<SharedRegion>> Export(const Buffer& buffer) = 0;
  // Connects to a listening peer of the expected incarnation. kUnavailable where the peer cannot be
  // reached by this transport (another node, or gone): the caller tries its next transport.
  // kPermissionDenied: token or job differ; kStaleTerm: another incarnation listens there;
  // kVersionMismatch: the protocols do not overlap; kResourceExhausted: descriptors, on either
  // side. The peer may outlive the transport that made it.
  [[nodiscard]] virtual Result<std::shared_ptr<Peer>> Connect(std::string_view address,
                                                              uint64_t incarnation,
                                                              Deadline deadline) = 0;
};

// Shared memory of one host: sealed memfd regions passed over Unix sockets. `directory` empty:
// abstract socket names, which are seen within one network namespace; else sockets are files there
// (mode 0600, removed at the end; those of a killed process by the next Listen in that folder), for
// containers that mount one volume.
// Allocate takes all pages at once, so that a full memory is an error and no later SIGBUS; the
// pages lie on the NUMA node of the thread that calls it. Export hands out the buffer's own
// descriptor: whoever else has it could still shrink the file, which a sealed region rules out.
struct ShmOptions {
  std::string directory;
  bool huge_pages = true;  // advise transparent huge pages
};
[[nodiscard]] Result<std::shared_ptr<Transport>> MakeShmTransport(TransportIdentity identity,
                                                                  ShmOptions options);

// In one process, for tests. Transports made from one hub reach each other. `kind` chooses whether
// imports have addresses (mapped) or only Read and Fetch work (message). memory/memory_hub.h has
// the hooks that disconnect and kill peers.
class MemoryHub;
[[nodiscard]] std::shared_ptr<MemoryHub> MakeMemoryHub();
[[nodiscard]] std::shared_ptr<Transport> MakeMemoryTransport(std::shared_ptr<MemoryHub> hub,
                                                             TransportKind kind,
                                                             TransportIdentity identity);

// Wraps any transport and misbehaves by a seed: what happens to the n-th operation (Call, Read,
// Fetch, Import, and data() of an import) depends on seed and n only. Wrap the connecting side.
// Probabilities in 1/1000 per operation.
struct FaultOptions {
  uint64_t seed = 0;
  uint32_t drop = 0;   // a Call, Read or Fetch never completes (ends by its deadline)
  uint32_t delay = 0;  // is late by up to delay_ms
  uint32_t delay_ms = 20;
  uint32_t duplicate = 0;  // a Call or Fetch is carried out twice
  uint32_t truncate = 0;   // an answer or payload is cut short (size told truthfully for Fetch)
  uint32_t corrupt = 0;    // one bit of an answer or payload, or of an imported region, is flipped
  uint32_t stall = 0;      // the peer answers nothing from then on
  uint32_t kill = 0;       // the connection dies
};
[[nodiscard]] std::shared_ptr<Transport> MakeFaultTransport(std::shared_ptr<Transport> inner,
                                                            FaultOptions options);

}  // namespace bascule
