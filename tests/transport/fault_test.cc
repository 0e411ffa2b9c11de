// The transport that misbehaves: each fault does what it says, and the same seed does the same.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "tests/transport/networks.h"

namespace bascule::testing {
namespace {

using std::chrono::milliseconds;

class Faults : public ::testing::Test {
 protected:
  std::shared_ptr<Peer> Connected(FaultOptions options,
                                  TransportKind kind = TransportKind::kMessage) {
    hub_ = MakeMemoryHub();
    server_ = MakeMemoryTransport(hub_, kind, Identity(11, "trainer 0"));
    std::string address = *server_->Listen(&handler_);
    client_ =
        MakeFaultTransport(MakeMemoryTransport(hub_, kind, Identity(22, "rollout 0")), options);
    EXPECT_EQ(client_->name(), "fault(memory)");
    return *client_->Connect(address, 11, Soon());
  }
  static int BitsChanged(std::string_view a, std::string_view b) {
    int bits = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      bits += __builtin_popcount(static_cast<unsigned char>(a[i] ^ b[i]));
    }
    return bits;
  }
  void FillFetches(size_t bytes) {
    handler_.on_fetch = [bytes](std::string_view, std::span<std::byte> slot) -> Result<uint64_t> {
      std::memset(slot.data(), 3, bytes);
      return bytes;
    };
  }

  TestHandler handler_;
  std::shared_ptr<MemoryHub> hub_;
  std::shared_ptr<Transport> server_, client_;
  const std::string text_ = std::string(1000, 't');
  std::vector<std::byte> slot_ = std::vector<std::byte>(100, std::byte{1});
};

TEST_F(Faults, DroppedCallsEndByTheirDeadlineAndNeverArrive) {
  auto peer = Connected({.drop = 1000});
  FillFetches(50);
  EXPECT_EQ(peer->Call("x", Deadline::In(milliseconds(20))).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_EQ(peer->Fetch("x", slot_, Deadline::In(milliseconds(20))).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_TRUE(handler_.callers().empty());
  EXPECT_TRUE(peer->alive());
}

TEST_F(Faults, DelaysAreBounded) {
  auto peer = Connected({.delay = 1000, .delay_ms = 5});
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(peer->Call("x", Soon()).ok());
  EXPECT_GT(std::chrono::steady_clock::now() - start, milliseconds(10));
}

TEST_F(Faults, DuplicatesAreCarriedOutTwice) {
  std::atomic<int> calls = 0;
  handler_.on_call = [&](std::string_view) { return std::to_string(++calls); };
  auto peer = Connected({.duplicate = 1000});
  EXPECT_EQ(*peer->Call("x", Soon()), "1");
  EXPECT_EQ(calls, 2);
}

TEST_F(Faults, TruncatedAnswersAreShorter) {
  auto peer = Connected({.truncate = 1000});
  FillFetches(50);
  EXPECT_LT(peer->Call(text_, Soon())->size(), text_.size());
  auto bytes = peer->Fetch("x", slot_, Soon());
  ASSERT_TRUE(bytes.ok());
  ASSERT_LT(*bytes, 50u);
  for (size_t i = 0; i < slot_.size(); ++i) EXPECT_EQ(slot_[i], std::byte(i < *bytes ? 3 : 1));
}

TEST_F(Faults, CorruptionIsOneBit) {
  auto peer = Connected({.corrupt = 1000});
  FillFetches(100);
  EXPECT_EQ(BitsChanged(*peer->Call(text_, Soon()), text_), 1);
  ASSERT_EQ(*peer->Fetch("x", slot_, Soon()), 100u);
  std::string threes(100, 3);
  EXPECT_EQ(BitsChanged({reinterpret_cast<char*>(slot_.data()), 100}, threes), 1);
  auto region = *server_->Allocate(1000, "arena");
  std::memset(region->data(), 't', 1000);
  auto imported = *peer->Import(region->blob(), Soon());
  std::string target(1000, '\0');
  ReadRun run{0, reinterpret_cast<std::byte*>(target.data()), 1000};
  ASSERT_TRUE(peer->Read(*imported, {&run, 1}, Soon()).ok());
  EXPECT_EQ(BitsChanged(target, text_), 1);
}

TEST_F(Faults, CorruptedRegionsAreCopiesOfTheRegionAsItIs) {
  auto peer = Connected({.corrupt = 1000}, TransportKind::kMapped);
  auto region = *server_->Allocate(1000, "arena");
  auto imported = *peer->Import(region->blob(), Soon());
  for (char fill : {'a', 'b'}) {
    std::memset(region->data(), fill, 1000);
    std::string_view seen(reinterpret_cast<const char*>(imported->data()), 1000);
    EXPECT_EQ(BitsChanged(seen, std::string(1000, fill)), 1);
  }
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(region->data()[i], std::byte{'b'});
}

TEST_F(Faults, StalledPeersStayStalled) {
  auto peer = Connected({.stall = 1000});
  EXPECT_EQ(peer->Call("x", Deadline::In(milliseconds(10))).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_EQ(peer->Import("x", Deadline::In(milliseconds(10))).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_TRUE(peer->alive());
}

TEST_F(Faults, KilledConnectionsAreDeadOnBothSides) {
  auto peer = Connected({.kill = 1000});
  Status status = peer->Call("x", Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_EQ(status.peer(), "trainer 0 (memory)");
  EXPECT_FALSE(peer->alive());
  EXPECT_EQ(handler_.WaitForDisconnects(1), 1u);
}

TEST_F(Faults, TheSameSeedMisbehavesInTheSameWay) {
  auto trace = [&](uint64_t seed) {
    auto peer =
        Connected({.seed = seed, .duplicate = 100, .truncate = 200, .corrupt = 200, .kill = 5});
    std::string outcomes;
    for (int i = 0; i < 100; ++i) {
      auto answer = peer->Call(text_, Soon());
      outcomes += answer.ok() ? std::to_string(std::hash<std::string>()(*answer))
                              : CodeName(answer.status().code());
    }
    return outcomes;
  };
  std::string first = trace(1);
  EXPECT_EQ(first, trace(1));
  EXPECT_NE(first, trace(2));
}

}  // namespace
}  // namespace bascule::testing
