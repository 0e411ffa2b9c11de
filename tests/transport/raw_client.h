// A client that speaks the shm protocol by hand, and badly where told.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <string>

#include "tests/transport/networks.h"
#include "transport/shm/frame.h"
#include "transport/shm/proof.h"
#include "transport/shm/socket.h"

namespace bascule::testing {

class RawClient {
 public:
  explicit RawClient(const std::string& address) {
    auto socket = shm::ConnectTo(address, Soon());
    EXPECT_TRUE(socket.ok()) << socket.status().ToString();
    if (socket.ok()) socket_ = std::move(*socket);
  }
  [[nodiscard]] int fd() const { return socket_.get(); }

  Status Send(std::string_view bytes) {
    return shm::SendAll(socket_.get(), bytes, -1, Deadline::In(std::chrono::seconds(5)));
  }
  Result<shm::Frame> Receive() {
    return shm::ReceiveFrame(socket_.get(), kMaxCallBytes, -1,
                             Deadline::In(std::chrono::seconds(5)));
  }
  // The server hung up within the time.
  [[nodiscard]] bool IsClosed(int timeout_ms = 10'000) const {
    pollfd item{socket_.get(), POLLRDHUP, 0};
    return ::poll(&item, 1, timeout_ms) == 1 && (item.revents & (POLLRDHUP | POLLHUP)) != 0;
  }

  // Sends Hello and answers the challenge with `token`; what the server says to that.
  Result<shm::Frame> ShakeHands(const std::string& token, shm::Hello hello) {
    std::string hello_bytes = shm::Encode(hello);
    BASCULE_RETURN_IF_ERROR(Send(shm::EncodeFrame(shm::FrameType::kHello, 0, hello_bytes)));
    BASCULE_ASSIGN_OR_RETURN(shm::Frame challenge, Receive());
    if (challenge.type != shm::FrameType::kChallenge) return challenge;
    std::string proof = shm::ClientProof(token, hello_bytes, challenge.payload);
    BASCULE_RETURN_IF_ERROR(Send(shm::EncodeFrame(shm::FrameType::kProof, 0, proof)));
    return Receive();
  }
  static shm::Hello GoodHello() {
    return {.expected_incarnation = 11,
            .incarnation = 22,
            .job = "job",
            .name = "raw",
            .nonce = std::string(shm::kNonceBytes, 'n')};
  }
  void Authenticate() {
    auto welcome = ShakeHands("secret", GoodHello());
    ASSERT_TRUE(welcome.ok()) << welcome.status().ToString();
    ASSERT_EQ(welcome->type, shm::FrameType::kWelcome);
  }

 private:
  UnixFd socket_;
};

}  // namespace bascule::testing
