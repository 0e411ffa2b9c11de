// The hooks of the in-process hub: peers that break or die.
#include "transport/memory/memory_hub.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/transport/networks.h"

namespace bascule::testing {
namespace {

class MemoryHubTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  void SetUp() override {
    a_ = MakeMemoryTransport(hub_, GetParam(), Identity(1, "a"));
    b_ = MakeMemoryTransport(hub_, GetParam(), Identity(2, "b"));
    a_address_ = *a_->Listen(&a_handler_);
    b_address_ = *b_->Listen(&b_handler_);
    a_to_b_ = *a_->Connect(b_address_, 2, Soon());
    b_to_a_ = *b_->Connect(a_address_, 1, Soon());
  }
  std::shared_ptr<MemoryHub> hub_ = MakeMemoryHub();
  TestHandler a_handler_, b_handler_;
  std::shared_ptr<Transport> a_, b_;
  std::string a_address_, b_address_;
  std::shared_ptr<Peer> a_to_b_, b_to_a_;
};

TEST_P(MemoryHubTest, DisconnectBreaksWhatIsAndAllowsNewOnes) {
  hub_->Disconnect(a_address_);
  EXPECT_FALSE(a_to_b_->alive());
  EXPECT_FALSE(b_to_a_->alive());
  EXPECT_EQ(b_to_a_->Call("x", Soon()).status().code(), Code::kUnavailable);
  EXPECT_EQ(a_handler_.WaitForDisconnects(1), 1u);
  EXPECT_EQ(b_handler_.WaitForDisconnects(1), 1u);
  auto again = b_->Connect(a_address_, 1, Soon());
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE((*again)->Call("x", Soon()).ok());
}

TEST_P(MemoryHubTest, KillIsForGood) {
  auto region = *a_->Allocate(4096, "arena");
  std::memset(region->data(), 7, 4096);
  auto imported = *b_to_a_->Import(region->blob(), Soon());
  hub_->Kill(a_address_);
  EXPECT_FALSE(b_to_a_->alive());
  EXPECT_FALSE(a_to_b_->alive());
  EXPECT_EQ(b_handler_.WaitForDisconnects(1), 1u);
  EXPECT_EQ(b_->Connect(a_address_, 1, Soon()).status().code(), Code::kUnavailable);
  EXPECT_EQ(a_->Connect(b_address_, 2, Soon()).status().code(), Code::kClosed);
  EXPECT_EQ(a_->Allocate(4096, "x").status().code(), Code::kClosed);
  EXPECT_EQ(b_to_a_->Import(region->blob(), Soon()).status().code(), Code::kUnavailable);
  region.reset();
  a_.reset();
  std::byte target[1] = {};
  ReadRun run{4095, target, 1};
  if (GetParam() == TransportKind::kMapped) {
    EXPECT_EQ(imported->data()[4095], std::byte{7});
  } else {
    EXPECT_EQ(b_to_a_->Read(*imported, {&run, 1}, Soon()).code(), Code::kUnavailable);
  }
}

TEST_P(MemoryHubTest, KillEndsACallInFlight) {
  Gate gate;
  a_handler_.on_call = [&](std::string_view) {
    gate.Wait();
    return std::string("too late");
  };
  std::thread caller(
      [&] { EXPECT_EQ(b_to_a_->Call("x", Soon()).status().code(), Code::kUnavailable); });
  while (a_handler_.callers().empty()) std::this_thread::yield();
  auto start = std::chrono::steady_clock::now();
  hub_->Kill(a_address_);
  caller.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  gate.Open();
  a_.reset();  // waits for the handler, which uses the gate
}

INSTANTIATE_TEST_SUITE_P(Kinds, MemoryHubTest,
                         ::testing::Values(TransportKind::kMapped, TransportKind::kMessage));

}  // namespace
}  // namespace bascule::testing
