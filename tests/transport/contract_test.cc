// What every transport must do, run over each of them.
#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "tests/transport/networks.h"

namespace bascule::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class TransportContract : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    network_ = MakeNetwork(GetParam());
    server_ = network_->Make(Identity(11, "trainer 0"));
    client_ = network_->Make(Identity(22, "rollout 0"));
    auto address = server_->Listen(&handler_);
    ASSERT_TRUE(address.ok()) << address.status().ToString();
    address_ = *address;
  }
  void TearDown() override {
    client_.reset();
    server_.reset();
  }

  std::shared_ptr<Peer> Connected() {
    auto peer = client_->Connect(address_, 11, Soon());
    EXPECT_TRUE(peer.ok()) << peer.status().ToString();
    return peer.ok() ? *peer : nullptr;
  }
  bool mapped() const { return server_->kind() == TransportKind::kMapped; }

  // The bytes of an imported region, by address or by Read.
  static std::string Bytes(Peer& peer, const ImportedRegion& region) {
    std::string bytes(region.bytes(), '\0');
    if (region.data() != nullptr) {
      std::memcpy(bytes.data(), region.data(), bytes.size());
      return bytes;
    }
    ReadRun run{0, reinterpret_cast<std::byte*>(bytes.data()), bytes.size()};
    Status status = peer.Read(region, {&run, 1}, Soon());
    EXPECT_TRUE(status.ok()) << status.ToString();
    return bytes;
  }

  TestHandler handler_;
  std::unique_ptr<Network> network_;
  std::shared_ptr<Transport> server_;
  std::shared_ptr<Transport> client_;
  std::string address_;
};

TEST_P(TransportContract, CallsAreAnswered) {
  auto peer = Connected();
  EXPECT_THAT(peer->name(), HasSubstr("trainer 0"));
  EXPECT_TRUE(peer->alive());
  for (size_t size : {size_t{0}, size_t{1}, size_t{70'000}, size_t{9} << 20}) {
    std::string request(size, 'x');
    for (size_t i = 0; i < size; ++i) request[i] = static_cast<char>(i * 7 + i / 256);
    auto answer = peer->Call(request, Soon());
    ASSERT_TRUE(answer.ok()) << answer.status().ToString();
    EXPECT_TRUE(*answer == request) << size;
  }
}

TEST_P(TransportContract, ErrorsOfTheHandlerArriveWhole) {
  handler_.on_call = [](std::string_view) {
    return Status(Code::kRetired, "gone").WithRank(3).WithPeer("trainer 3").WithTensor("a.weight");
  };
  Status status = Connected()->Call("x", Soon()).status();
  EXPECT_EQ(status.ToString(), "RETIRED: gone [rank 3, peer trainer 3, tensor a.weight]");
  handler_.on_call = [](std::string_view) { return Status(Code::kBusy, "later"); };
  EXPECT_THAT(Connected()->Call("x", Soon()).status().peer(), HasSubstr("trainer 0"));
}

TEST_P(TransportContract, RequestsAndAnswersThatAreTooLargeAreRefused) {
  auto peer = Connected();
  std::string large(kMaxCallBytes + 1, 'x');
  EXPECT_EQ(peer->Call(large, Soon()).status().code(), Code::kInvalidArgument);
  handler_.on_call = [&](std::string_view) { return large; };
  EXPECT_EQ(peer->Call("x", Soon()).status().code(), Code::kInternal);
  handler_.on_call = [](std::string_view) { return std::string("ok"); };
  EXPECT_TRUE(peer->Call("x", Soon()).ok());
}

// Fault 12 of field.md: a retry must not read the answer to what came before it.
TEST_P(TransportContract, ACallThatTimedOutDoesNotPoisonLaterOnes) {
  Gate gate;
  handler_.on_call = [&](std::string_view request) {
    if (request == "slow") gate.Wait();
    return std::string(request);
  };
  auto peer = Connected();
  auto start = std::chrono::steady_clock::now();
  Status status = peer->Call("slow", Deadline::In(milliseconds(50))).status();
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(status.peer(), HasSubstr("trainer 0"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
  // Queued behind the slow one on this connection: also ends by its own deadline.
  EXPECT_EQ(peer->Call("queued", Deadline::In(milliseconds(50))).status().code(),
            Code::kDeadlineExceeded);
  gate.Open();
  for (int i = 0; i < 10; ++i) {
    std::string request = "after" + std::to_string(i);
    auto answer = peer->Call(request, Soon());
    ASSERT_TRUE(answer.ok()) << answer.status().ToString();
    EXPECT_EQ(*answer, request);
  }
}

TEST_P(TransportContract, ADeadlineThatHasPassedSendsNothing) {
  auto peer = Connected();
  Deadline past = Deadline::In(milliseconds(0));
  EXPECT_EQ(peer->Call("x", past).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(client_->Connect(address_, 11, past).status().code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(handler_.callers().empty());
}

TEST_P(TransportContract, ThreadsShareAPeer) {
  auto peer = Connected();
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        std::string request(static_cast<size_t>(1 + (t * 131 + i * 977) % 5000),
                            static_cast<char>('a' + t));
        auto answer = peer->Call(request, Soon());
        if (!answer.ok() || *answer != request) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Fault 8: one slow rank blocks everyone.
TEST_P(TransportContract, ASlowCallHoldsUpOnlyItsOwnConnection) {
  Gate gate;
  handler_.on_call = [&](std::string_view request) {
    if (request == "slow") gate.Wait();
    return std::string(request);
  };
  auto slow = Connected();
  auto fast = Connected();
  std::thread thread([&] { EXPECT_TRUE(slow->Call("slow", Soon()).ok()); });
  std::this_thread::sleep_for(milliseconds(20));
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(fast->Call("fast", Soon()).ok());
  gate.Open();
  thread.join();
}

TEST_P(TransportContract, OnlyTheRightTokenJobAndIncarnationGetIn) {
  auto stranger = network_->Make(Identity(33, "stranger", "wrong token"));
  Status status = stranger->Connect(address_, 11, Soon()).status();
  EXPECT_EQ(status.code(), Code::kPermissionDenied) << status.ToString();
  EXPECT_FALSE(status.peer().empty());
  EXPECT_THAT(status.message(), ::testing::Not(HasSubstr("secret")));

  auto other_job = network_->Make(Identity(33, "other", "secret", "other job"));
  status = other_job->Connect(address_, 11, Soon()).status();
  EXPECT_EQ(status.code(), Code::kPermissionDenied) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("other job"));

  // Fault 13: the address of a dead incarnation is still listed, or was taken over.
  status = client_->Connect(address_, 12, Soon()).status();
  EXPECT_EQ(status.code(), Code::kStaleTerm) << status.ToString();
  EXPECT_TRUE(Connected()->Call("x", Soon()).ok());
}

TEST_P(TransportContract, NobodyListensIsUnavailable) {
  Status status = client_->Connect("shm1:@bascule-nobody", 11, Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  server_.reset();
  status = client_->Connect(address_, 11, Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  EXPECT_FALSE(status.peer().empty());
}

TEST_P(TransportContract, ListenOnce) {
  EXPECT_EQ(server_->Listen(&handler_).status().code(), Code::kInvalidArgument);
}

TEST_P(TransportContract, RegionsShowWhatTheOwnerWrites) {
  auto region = server_->Allocate(10'000, "arena");
  ASSERT_TRUE(region.ok()) << region.status().ToString();
  EXPECT_EQ((*region)->bytes(), 10'000u);
  EXPECT_LE((*region)->blob().size(), 256u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*region)->data()) % 4096, 0u);
  auto peer = Connected();
  auto imported = peer->Import((*region)->blob(), Soon());
  ASSERT_TRUE(imported.ok()) << imported.status().ToString();
  EXPECT_EQ((*imported)->bytes(), 10'000u);
  EXPECT_EQ((*imported)->data() != nullptr, mapped());
  for (int version = 1; version < 4; ++version) {
    std::memset((*region)->data(), version, 10'000);
    EXPECT_TRUE(Bytes(*peer, **imported) == std::string(10'000, static_cast<char>(version)));
  }
}

TEST_P(TransportContract, ReadsRunsAndRefusesWhatIsOutside) {
  auto region = server_->Allocate(4096, "arena");
  ASSERT_TRUE(region.ok());
  for (int i = 0; i < 4096; ++i) (*region)->data()[i] = static_cast<std::byte>(i % 251);
  auto peer = Connected();
  auto imported = peer->Import((*region)->blob(), Soon());
  ASSERT_TRUE(imported.ok());
  std::byte a[10], b[20];
  ReadRun runs[] = {{100, a, 10}, {4076, b, 20}, {4096, a, 0}};
  ASSERT_TRUE(peer->Read(**imported, runs, Soon()).ok());
  EXPECT_EQ(a[3], static_cast<std::byte>(103));
  EXPECT_EQ(b[19], static_cast<std::byte>(4095 % 251));
  for (ReadRun bad : {ReadRun{4090, b, 7}, ReadRun{5000, b, 1}, ReadRun{UINT64_MAX, b, 2},
                      ReadRun{1, b, UINT64_MAX}}) {
    EXPECT_EQ(peer->Read(**imported, {&bad, 1}, Soon()).code(), Code::kInvalidArgument);
  }
}

// Fault 20: a handle opened twice.
TEST_P(TransportContract, OneOpenPerRegion) {
  auto region = server_->Allocate(4096, "arena");
  ASSERT_TRUE(region.ok());
  auto peer = Connected();
  auto second = Connected();
  auto a = peer->Import((*region)->blob(), Soon());
  auto b = peer->Import((*region)->blob(), Soon());
  auto c = second->Import((*region)->blob(), Soon());
  ASSERT_TRUE(a.ok() && b.ok() && c.ok());
  EXPECT_EQ((*a)->data(), (*b)->data());
  EXPECT_EQ((*a)->data(), (*c)->data());
}

TEST_P(TransportContract, ThreadsImportTheSameRegion) {
  auto region = server_->Allocate(4096, "arena");
  ASSERT_TRUE(region.ok());
  auto peer = Connected();
  std::vector<std::shared_ptr<ImportedRegion>> imported(8);
  std::vector<std::thread> threads;
  for (auto& slot : imported) {
    threads.emplace_back([&] {
      auto result = peer->Import((*region)->blob(), Soon());
      ASSERT_TRUE(result.ok()) << result.status().ToString();
      slot = *result;
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& slot : imported) EXPECT_EQ(slot->data(), imported[0]->data());
}

// Faults 13 and 14: descriptions that outlived what they describe.
TEST_P(TransportContract, StaleDescriptionsAreRefused) {
  auto peer = Connected();
  auto region = server_->Allocate(4096, "arena");
  ASSERT_TRUE(region.ok());
  std::string blob = (*region)->blob();
  auto held = peer->Import(blob, Soon());
  ASSERT_TRUE(held.ok());
  region = Status(Code::kClosed, "released");
  Status status = peer->Import(blob, Soon()).status();
  EXPECT_EQ(status.code(), Code::kNotFound) << status.ToString();
  if (!mapped()) {
    std::byte target[1];
    ReadRun run{0, target, 1};
    EXPECT_EQ(peer->Read(**held, {&run, 1}, Soon()).code(), Code::kNotFound);
  }
  auto next_life = network_->Make(Identity(99, "trainer 0"));
  auto foreign = next_life->Allocate(4096, "arena");
  ASSERT_TRUE(foreign.ok());
  status = peer->Import((*foreign)->blob(), Soon()).status();
  EXPECT_EQ(status.code(), Code::kStaleTerm) << status.ToString();
  for (const char* garbage : {"", "x", "garbage that is longer than a header of a blob is"}) {
    status = peer->Import(garbage, Soon()).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    EXPECT_FALSE(status.peer().empty());
  }
}

TEST_P(TransportContract, AllocationsThatCannotBeAreErrors) {
  EXPECT_EQ(server_->Allocate(0, "arena").status().code(), Code::kInvalidArgument);
  for (uint64_t bytes : {uint64_t{1} << 50, uint64_t{1} << 62, UINT64_MAX}) {
    Status status = server_->Allocate(bytes, "arena").status();
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("arena"));
  }
}

TEST_P(TransportContract, TheHandlerHearsOfEachDisconnectOnce) {
  {
    auto a = Connected();
    auto b = Connected();
    ASSERT_TRUE(a->Call("x", Soon()).ok());
    ASSERT_TRUE(b->Call("x", Soon()).ok());
  }
  EXPECT_EQ(handler_.WaitForDisconnects(2), 2u);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_THAT(handler_.gone(), ::testing::UnorderedElementsAreArray(handler_.callers()));
}

// Fault 10: one side is torn down first.
TEST_P(TransportContract, TheListenerMayGoFirst) {
  auto region = server_->Allocate(4096, "arena");
  ASSERT_TRUE(region.ok());
  std::memset((*region)->data(), 7, 4096);
  auto peer = Connected();
  auto imported = peer->Import((*region)->blob(), Soon());
  ASSERT_TRUE(imported.ok());
  region = Status(Code::kClosed, "released");
  server_.reset();
  for (int i = 0; i < 2000 && peer->alive(); ++i) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(peer->alive());
  Status status = peer->Call("x", Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  EXPECT_THAT(status.peer(), HasSubstr("trainer 0"));
  if ((*imported)->data() != nullptr) {
    EXPECT_EQ((*imported)->data()[4095], std::byte{7});
  }
}

TEST_P(TransportContract, ThePeerMayOutliveItsTransport) {
  auto peer = Connected();
  auto region = server_->Allocate(4096, "arena");
  ASSERT_TRUE(region.ok());
  client_.reset();
  if (peer->alive()) {
    (void)peer->Call("x", Soon());
    (void)peer->Import((*region)->blob(), Soon());
  }
  peer.reset();
}

TEST_P(TransportContract, ACallInFlightEndsWhenTheListenerGoes) {
  Gate gate;
  handler_.on_call = [&](std::string_view) {
    gate.Wait();
    return std::string();
  };
  auto peer = Connected();
  std::thread thread([&] {
    Status status = peer->Call("x", Soon()).status();
    // The handler may still have answered before the connection was closed.
    EXPECT_TRUE(status.ok() || status.code() == Code::kUnavailable) << status.ToString();
  });
  std::this_thread::sleep_for(milliseconds(20));
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(50));
    gate.Open();
  });
  server_.reset();
  thread.join();
  opener.join();
}

TEST_P(TransportContract, FetchLandsInTheSlot) {
  handler_.on_fetch = [](std::string_view request, std::span<std::byte> slot) -> Result<uint64_t> {
    if (request == "error") return Status(Code::kRetired, "gone");
    if (request == "overrun") return slot.size() + 1;
    std::memset(slot.data(), request[0], slot.size() / 2);
    return slot.size() / 2;
  };
  auto peer = Connected();
  std::vector<std::byte> slot(1000, std::byte{1});
  auto bytes = peer->Fetch("abc", slot, Soon());
  if (mapped()) {
    EXPECT_EQ(bytes.status().code(), Code::kUnimplemented);
    return;
  }
  ASSERT_TRUE(bytes.ok()) << bytes.status().ToString();
  EXPECT_EQ(*bytes, 500u);
  EXPECT_EQ(slot[499], std::byte{'a'});
  EXPECT_EQ(slot[500], std::byte{1});
  EXPECT_EQ(peer->Fetch("error", slot, Soon()).status().code(), Code::kRetired);
  EXPECT_EQ(peer->Fetch("overrun", slot, Soon()).status().code(), Code::kInternal);
}

// Fault 14: a slot is written under a request that was given up.
TEST_P(TransportContract, ALateFetchDoesNotTouchTheSlot) {
  if (mapped()) GTEST_SKIP() << "no Fetch";
  Gate gate;
  handler_.on_fetch = [&](std::string_view, std::span<std::byte> slot) -> Result<uint64_t> {
    gate.Wait();
    std::memset(slot.data(), 9, slot.size());
    return slot.size();
  };
  auto peer = Connected();
  std::vector<std::byte> slot(1000, std::byte{1});
  EXPECT_EQ(peer->Fetch("abc", slot, Deadline::In(milliseconds(20))).status().code(),
            Code::kDeadlineExceeded);
  gate.Open();
  EXPECT_TRUE(peer->Call("x", Soon()).ok());
  EXPECT_EQ(slot, std::vector<std::byte>(1000, std::byte{1}));
}

TEST_P(TransportContract, HandlersMayCallOtherPeers) {
  auto back_peer = Connected();
  TestHandler other_handler;
  auto other = network_->Make(Identity(44, "relay"));
  other_handler.on_call = [&](std::string_view request) {
    return back_peer->Call("relayed " + std::string(request), Soon());
  };
  auto address = other->Listen(&other_handler);
  ASSERT_TRUE(address.ok());
  auto peer = client_->Connect(*address, 44, Soon());
  ASSERT_TRUE(peer.ok());
  auto answer = (*peer)->Call("x", Soon());
  ASSERT_TRUE(answer.ok()) << answer.status().ToString();
  EXPECT_EQ(*answer, "relayed x");
  peer = Status(Code::kClosed, "");
  other.reset();
}

INSTANTIATE_TEST_SUITE_P(All, TransportContract,
                         ::testing::Values("shm", "shm_files", "memory_mapped", "memory_message",
                                           "fault_shm", "fault_memory_mapped",
                                           "fault_memory_message"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace bascule::testing
