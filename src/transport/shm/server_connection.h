// One client of a Server: handshake, then one request at a time. While a request is being answered
// nothing more is read from that client, so one that does not read its answers holds up only itself
// and costs at most one request and one answer.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/unix_fd.h"
#include "transport/shm/frame.h"
#include "transport/shm/reactor.h"
#include "transport/shm/server.h"

namespace bascule::shm {

class ServerConnection final : public EventHandler,
                               public std::enable_shared_from_this<ServerConnection> {
 public:
  ServerConnection(std::shared_ptr<Server> server, uint64_t id, UnixFd socket);
  // Begins to listen to the client.
  [[nodiscard]] Status Start();
  void Close();

  void OnEvent(uint32_t tag, uint32_t events) override;
  void OnTimer() override;

 private:
  enum class Phase { kHello, kProof, kOpen };

  // All under mutex_.
  void CloseLocked();
  void ReadLocked();
  void HandleLocked(Frame frame);
  void HandleHelloLocked(Frame frame);
  void HandleProofLocked(const Frame& frame);
  void HandleOpenLocked(const Frame& frame);
  void RejectLocked(const Status& why);
  void SendLocked(FrameType type, uint64_t id, std::string_view payload,
                  std::shared_ptr<OwnedRegion> region = nullptr);
  void FlushLocked();
  // Watches for what the connection waits for now, and sets the timer for it.
  void WaitLocked();
  [[nodiscard]] std::optional<Reactor::Clock::time_point> DueLocked() const;

  // On a worker.
  void RunCall(uint64_t frame_id, const std::string& request);

  const std::shared_ptr<Server> server_;
  const uint64_t id_;

  std::mutex mutex_;
  UnixFd socket_;
  UnixFd process_;  // see OpenPeerProcess
  uint64_t socket_key_ = 0;
  uint64_t process_key_ = 0;
  bool closed_ = false;
  bool close_when_sent_ = false;
  bool handling_ = false;  // a worker has a request of this client
  Phase phase_ = Phase::kHello;
  Reactor::Clock::time_point timer_ = Reactor::Clock::time_point::max();  // the earliest set
  Reactor::Clock::time_point started_;
  Reactor::Clock::time_point progress_;
  FrameAssembler assembler_{kMaxHandshakeBytes};
  std::string hello_;  // as received, for the proofs
  std::string challenge_;
  uint64_t expected_incarnation_ = 0;
  std::string job_;
  std::string outgoing_;
  size_t sent_ = 0;
  std::shared_ptr<OwnedRegion> outgoing_region_;  // its descriptor goes along
};

}  // namespace bascule::shm
