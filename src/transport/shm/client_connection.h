// The socket of a ShmPeer: requests of many threads at once, each with its own deadline, told apart
// by id. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "bascule/deadline.h"
#include "base/unix_fd.h"
#include "transport/shm/frame.h"
#include "transport/shm/reactor.h"

namespace bascule::shm {

struct Reply {
  Frame frame;
  UnixFd descriptor;
  bool descriptor_lost = false;  // one came, but this process had no room for it
};

class ClientConnection final : public EventHandler,
                               public std::enable_shared_from_this<ClientConnection> {
 public:
  // `socket` has been through the handshake. The reactor must outlive all calls.
  ClientConnection(std::string peer, UnixFd socket, UnixFd process, Reactor* reactor);
  [[nodiscard]] Status Start();
  void Close();

  [[nodiscard]] bool alive() const { return alive_; }
  // Sends a request and waits for the answer to it. A request whose deadline passes is withdrawn if
  // no byte of it was sent, else finished by the reactor; its answer is dropped.
  [[nodiscard]] Result<Reply> Request(FrameType type, std::string_view payload, Deadline deadline);

  void OnEvent(uint32_t tag, uint32_t events) override;

 private:
  struct Waiter {
    std::condition_variable changed;
    bool done = false;
    Reply reply;
  };
  struct Outgoing {
    uint64_t id = 0;
    std::string bytes;
    size_t sent = 0;
  };

  // All under mutex_.
  void BreakLocked(std::string why);
  void ReadLocked();
  void DeliverLocked();
  void FlushLocked();
  [[nodiscard]] Status BrokenLocked() const;

  const std::string peer_;
  Reactor* const reactor_;
  std::atomic<bool> alive_ = true;

  std::mutex mutex_;
  UnixFd socket_;
  UnixFd process_;
  uint64_t socket_key_ = 0;
  uint64_t process_key_ = 0;
  std::string broken_;  // why
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Waiter*> waiters_;
  std::deque<Outgoing> outgoing_;
  FrameAssembler assembler_;
  UnixFd descriptor_;  // came with the frame that is being received
  bool descriptor_lost_ = false;
};

}  // namespace bascule::shm
