// Clients and servers that send garbage, lies or nothing. The other side neither crashes nor hangs
// nor grows, and goes on to serve those who behave.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "tests/transport/networks.h"
#include "tests/transport/process_info.h"
#include "tests/transport/raw_client.h"
#include "transport/shm/region.h"
#include "transport/shm/shm_transport.h"

namespace bascule::testing {
namespace {

using shm::EncodeFrame;
using shm::FrameType;
using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class HostileClients : public ::testing::Test {
 protected:
  void SetUp() override {
    limits_.handshake_timeout = milliseconds(2000);
    limits_.stall_timeout = milliseconds(500);
    limits_.max_unauthenticated = 16;
    limits_.max_connections = 64;
    server_ = *shm::MakeShmTransport(Identity(11, "trainer 0"), {}, limits_);
    address_ = *server_->Listen(&handler_);
    client_ = *MakeShmTransport(Identity(22, "rollout 0"), {});
    good_ = *client_->Connect(address_, 11, Soon());
  }
  void TearDown() override {
    ExpectServed();
    good_.reset();
    client_.reset();
    server_.reset();
  }
  void ExpectServed() {
    EXPECT_TRUE(good_->Call("x", Soon()).ok());
    auto fresh = client_->Connect(address_, 11, Soon());
    ASSERT_TRUE(fresh.ok()) << fresh.status().ToString();
    EXPECT_TRUE((*fresh)->Call("x", Soon()).ok());
  }

  shm::ShmLimits limits_;
  TestHandler handler_;
  std::shared_ptr<Transport> server_;
  std::shared_ptr<Transport> client_;
  std::shared_ptr<Peer> good_;
  std::string address_;
};

TEST_F(HostileClients, GarbageClosesTheConnection) {
  SplitMix64 random(1);
  for (int i = 0; i < 300; ++i) {
    RawClient client(address_);
    std::string garbage(random.Below(300), '\0');
    for (char& c : garbage) c = static_cast<char>(random.Next());
    (void)client.Send(garbage);
    bool whole_header = garbage.size() >= shm::kHeaderBytes;
    EXPECT_TRUE(!whole_header || client.IsClosed());
  }
}

TEST_F(HostileClients, DamagedHandshakesAreRefusedOrClosed) {
  std::string good = EncodeFrame(FrameType::kHello, 0, shm::Encode(RawClient::GoodHello()));
  SplitMix64 random(2);
  for (int i = 0; i < 300; ++i) {
    RawClient client(address_);
    std::string damaged = good;
    damaged[random.Below(damaged.size())] ^= static_cast<char>(1 + random.Below(255));
    (void)client.Send(damaged);
    (void)client.Send(EncodeFrame(FrameType::kProof, 0, std::string(32, 'p')));
    while (true) {
      pollfd item{client.fd(), POLLIN | POLLRDHUP, 0};
      ASSERT_EQ(::poll(&item, 1, 5000), 1);
      auto frame = client.Receive();
      if (!frame.ok()) break;
      ASSERT_THAT(frame->type, AnyOf(FrameType::kChallenge, FrameType::kReject));
    }
  }
}

TEST_F(HostileClients, TruncatedHandshakesEndByTheirDeadline) {
  std::string hello = EncodeFrame(FrameType::kHello, 0, shm::Encode(RawClient::GoodHello()));
  std::vector<std::unique_ptr<RawClient>> clients;
  for (size_t cut : {size_t{0}, size_t{1}, size_t{23}, size_t{24}, hello.size() - 1}) {
    clients.push_back(std::make_unique<RawClient>(address_));
    ASSERT_TRUE(clients.back()->Send(std::string_view(hello).substr(0, cut)).ok());
  }
  ExpectServed();
  for (auto& client : clients) EXPECT_TRUE(client->IsClosed());
}

// One byte now and then must not keep a connection without a token alive.
TEST_F(HostileClients, TricklingDoesNotExtendTheHandshake) {
  std::string hello = EncodeFrame(FrameType::kHello, 0, shm::Encode(RawClient::GoodHello()));
  RawClient client(address_);
  size_t sent = 0;
  while (!client.IsClosed(0) && sent < hello.size()) {
    (void)client.Send(std::string_view(hello).substr(sent++, 1));
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_TRUE(client.IsClosed());
  EXPECT_LT(sent, hello.size());
}

TEST_F(HostileClients, ClaimedLengthsCostNothing) {
  auto header = [](FrameType type, uint64_t length) {
    std::string frame = EncodeFrame(type, 1, "");
    std::memcpy(frame.data() + 16, &length, sizeof(length));
    return frame;
  };
  for (uint64_t length : {shm::kMaxHandshakeBytes + 1, kMaxCallBytes, UINT64_MAX}) {
    RawClient client(address_);
    ASSERT_TRUE(client.Send(header(FrameType::kHello, length)).ok());
    EXPECT_TRUE(client.IsClosed()) << length;
  }
  for (uint64_t length : {kMaxCallBytes + 1, UINT64_MAX, uint64_t{1} << 63}) {
    RawClient client(address_);
    client.Authenticate();
    ASSERT_TRUE(client.Send(header(FrameType::kCall, length)).ok());
    EXPECT_TRUE(client.IsClosed()) << length;
  }
  // Allowed lengths that never come: no memory is taken, and they end.
  uint64_t before = ResidentBytes();
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 40; ++i) {
    clients.push_back(std::make_unique<RawClient>(address_));
    clients.back()->Authenticate();
    ASSERT_TRUE(clients.back()->Send(header(FrameType::kCall, kMaxCallBytes) + "x").ok());
  }
  EXPECT_LT(ResidentBytes(), before + (64 << 20));
  for (auto& client : clients) EXPECT_TRUE(client->IsClosed());
}

TEST_F(HostileClients, AFloodOfStrangersIsBounded) {
  std::vector<std::unique_ptr<RawClient>> clients;
  size_t before = CountDescriptors();
  for (int i = 0; i < 500; ++i) clients.push_back(std::make_unique<RawClient>(address_));
  ExpectServed();
  // 500 of the clients' own, and the few that the server keeps.
  EXPECT_LE(CountDescriptors(), before + 500 + limits_.max_unauthenticated + 8);
}

TEST_F(HostileClients, TooManyConnectionsAreTurnedAwayWithAReason) {
  std::vector<std::shared_ptr<Peer>> peers;
  Status refused;
  for (int i = 0; i < 80; ++i) {
    auto peer = client_->Connect(address_, 11, Soon());
    if (peer.ok()) {
      peers.push_back(*peer);
    } else {
      refused = peer.status();
    }
  }
  EXPECT_EQ(refused.code(), Code::kResourceExhausted) << refused.ToString();
  EXPECT_THAT(refused.message(), HasSubstr("connections"));
  peers.clear();
  handler_.WaitForDisconnects(63);
}

TEST_F(HostileClients, WrongFramesAfterTheHandshakeCloseTheConnection) {
  for (FrameType type : {FrameType::kHello, FrameType::kProof, FrameType::kWelcome,
                         FrameType::kAnswer, FrameType::kOpened, FrameType::kOpen}) {
    RawClient client(address_);
    client.Authenticate();
    (void)client.Send(EncodeFrame(type, 1, "rubbish"));
    EXPECT_TRUE(client.IsClosed());
  }
}

TEST_F(HostileClients, NothingIsAnsweredBeforeTheToken) {
  auto region = server_->Allocate(4096, "arena");
  auto blob = shm::DecodeBlob((*region)->blob());
  for (bool after_hello : {false, true}) {
    for (FrameType type : {FrameType::kCall, FrameType::kOpen}) {
      RawClient client(address_);
      if (after_hello) {
        (void)client.Send(EncodeFrame(FrameType::kHello, 0, shm::Encode(RawClient::GoodHello())));
        ASSERT_EQ(client.Receive()->type, FrameType::kChallenge);
      }
      (void)client.Send(EncodeFrame(type, 1, shm::Encode(shm::Open{.region = blob->id})));
      EXPECT_FALSE(client.Receive().ok());
    }
  }
  EXPECT_TRUE(handler_.callers().empty());
}

TEST_F(HostileClients, TheTokenDoesNotTravelAndAnOldProofIsWorthless) {
  // A proof over a challenge of another connection.
  std::string hello = shm::Encode(RawClient::GoodHello());
  RawClient first(address_);
  (void)first.Send(EncodeFrame(FrameType::kHello, 0, hello));
  std::string old_challenge = first.Receive()->payload;
  std::string old_proof = shm::ClientProof("secret", hello, old_challenge);
  RawClient second(address_);
  (void)second.Send(EncodeFrame(FrameType::kHello, 0, hello));
  (void)second.Receive();
  (void)second.Send(EncodeFrame(FrameType::kProof, 0, old_proof));
  auto answer = second.Receive();
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->type, FrameType::kReject);
  Status why = shm::DecodeStatus(answer->payload);
  EXPECT_EQ(why.code(), Code::kPermissionDenied) << why.ToString();
  EXPECT_EQ(old_proof.find("secret"), std::string::npos);
  EXPECT_TRUE(second.IsClosed());
}

TEST_F(HostileClients, AnotherProtocolVersionIsNamed) {
  RawClient client(address_);
  shm::Hello hello = RawClient::GoodHello();
  hello.protocol_min = hello.protocol_max = 99;
  auto answer = client.ShakeHands("secret", hello);
  ASSERT_TRUE(answer.ok()) << answer.status().ToString();
  EXPECT_EQ(answer->type, FrameType::kReject);
  Status why = shm::DecodeStatus(answer->payload);
  EXPECT_EQ(why.code(), Code::kVersionMismatch) << why.ToString();
  EXPECT_THAT(why.message(), HasSubstr("99"));
}

// Told by the server itself, to a client that does not look at the answer.
TEST_F(HostileClients, AnotherIncarnationOrJobIsRefused) {
  RawClient stale(address_);
  shm::Hello hello = RawClient::GoodHello();
  hello.expected_incarnation = 12;
  auto answer = stale.ShakeHands("secret", hello);
  ASSERT_TRUE(answer.ok()) << answer.status().ToString();
  ASSERT_EQ(answer->type, FrameType::kReject);
  EXPECT_EQ(shm::DecodeStatus(answer->payload).code(), Code::kStaleTerm);
  RawClient stranger(address_);
  hello = RawClient::GoodHello();
  hello.job = "other job";
  answer = stranger.ShakeHands("secret", hello);
  ASSERT_TRUE(answer.ok()) << answer.status().ToString();
  ASSERT_EQ(answer->type, FrameType::kReject);
  EXPECT_EQ(shm::DecodeStatus(answer->payload).code(), Code::kPermissionDenied);
}

TEST_F(HostileClients, DescriptorsFromClientsAreNotKept) {
  RawClient client(address_);
  client.Authenticate();
  size_t before = CountDescriptors();
  int junk = ::memfd_create("junk", MFD_CLOEXEC);
  for (int i = 0; i < 50; ++i) {
    auto sent = shm::SendSome(client.fd(), EncodeFrame(FrameType::kCall, 1, "x"), junk);
    ASSERT_GT(sent.bytes, 0u);
    ASSERT_TRUE(client.Receive().ok());
  }
  ::close(junk);
  EXPECT_EQ(CountDescriptors(), before);
}

TEST_F(HostileClients, RequestsWithoutReadingTheAnswersAreBounded) {
  handler_.on_call = [](std::string_view request) {
    return request == "large" ? std::string(4 << 20, 'l') : std::string("ok");
  };
  uint64_t before = ResidentBytes();
  RawClient client(address_);
  client.Authenticate();
  std::string requests;
  for (int i = 0; i < 1000; ++i) requests += EncodeFrame(FrameType::kCall, 1, "large");
  (void)client.Send(requests);
  ExpectServed();
  EXPECT_LT(ResidentBytes(), before + (64 << 20));
  EXPECT_TRUE(client.IsClosed());
}

// A listener that is not Bascule, or that lies. `script` runs once a client is there.
class HostileServer {
 public:
  explicit HostileServer(std::function<void(int)> script) : script_(std::move(script)) {
    address_ = shm::MakeAddress("job", "");
    listener_ = std::move(*shm::ListenOn(address_, 8));
    thread_ = std::thread([this] {
      pollfd item{listener_.get(), POLLIN, 0};
      if (::poll(&item, 1, 10'000) != 1) return;
      UnixFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      script_(socket.get());
    });
  }
  ~HostileServer() { thread_.join(); }
  [[nodiscard]] const std::string& address() const { return address_; }

  static Result<shm::Frame> Receive(int socket) {
    return shm::ReceiveFrame(socket, kMaxCallBytes, -1, Soon());
  }
  static void Send(int socket, FrameType type, uint64_t id, const std::string& payload,
                   int descriptor = -1) {
    (void)shm::SendSome(socket, EncodeFrame(type, id, payload, descriptor >= 0), descriptor);
  }
  // Goes through the handshake as one that knows `token`.
  static void Welcome(int socket, const std::string& token = "secret", uint64_t incarnation = 11) {
    auto hello = Receive(socket);
    std::string challenge = shm::Encode(shm::Challenge{.nonce = std::string(32, 'c')});
    Send(socket, FrameType::kChallenge, 0, challenge);
    if (!Receive(socket).ok()) return;
    shm::Welcome welcome{.incarnation = incarnation, .name = "liar"};
    welcome.proof = shm::ServerProof(token, hello->payload, challenge, shm::Encode(welcome));
    Send(socket, FrameType::kWelcome, 0, shm::Encode(welcome));
  }

 private:
  std::function<void(int)> script_;
  std::string address_;
  UnixFd listener_;
  std::thread thread_;
};

class HostileServers : public ::testing::Test {
 protected:
  Status Connect(const HostileServer& server, milliseconds limit = milliseconds(5000)) {
    auto peer = client_->Connect(server.address(), 11, Deadline::In(limit));
    if (peer.ok()) peer_ = *peer;
    return peer.status();
  }
  std::shared_ptr<Transport> client_ = *MakeShmTransport(Identity(22, "rollout 0"), {});
  std::shared_ptr<Peer> peer_;
};

TEST_F(HostileServers, ThatSayNothingOrGarbageOrHangUp) {
  {
    Gate gate;
    HostileServer silent([&](int) { gate.Wait(); });
    EXPECT_EQ(Connect(silent, milliseconds(50)).code(), Code::kDeadlineExceeded);
    gate.Open();
  }
  {
    HostileServer garbage([](int socket) {
      std::string bytes(100, 'g');
      (void)shm::SendSome(socket, bytes);
      (void)HostileServer::Receive(socket);
    });
    EXPECT_FALSE(Connect(garbage).ok());
  }
  {
    HostileServer closes([](int socket) { (void)HostileServer::Receive(socket); });
    EXPECT_EQ(Connect(closes).code(), Code::kUnavailable);
  }
  {
    HostileServer wrong_frame([](int socket) {
      (void)HostileServer::Receive(socket);
      HostileServer::Send(socket, FrameType::kAnswer, 0, "hello");
    });
    EXPECT_EQ(Connect(wrong_frame).code(), Code::kUnavailable);
  }
}

// A squatter on the address of a dead trainer.
TEST_F(HostileServers, ThatDoNotKnowTheToken) {
  HostileServer squatter([](int socket) { HostileServer::Welcome(socket, "guess"); });
  Status status = Connect(squatter);
  EXPECT_EQ(status.code(), Code::kPermissionDenied) << status.ToString();
}

TEST_F(HostileServers, OfAnotherIncarnation) {
  HostileServer other([](int socket) { HostileServer::Welcome(socket, "secret", 12); });
  Status status = Connect(other);
  EXPECT_EQ(status.code(), Code::kStaleTerm) << status.ToString();
}

TEST_F(HostileServers, UnknownIdsAndTooLongAnswersAndStrayDescriptors) {
  {
    HostileServer server([](int socket) {
      HostileServer::Welcome(socket);
      auto call = HostileServer::Receive(socket);
      HostileServer::Send(socket, FrameType::kAnswer, call->id + 100, "not asked for");
      HostileServer::Send(socket, FrameType::kAnswer, call->id, "asked for");
      HostileServer::Send(socket, FrameType::kAnswer, call->id, "twice");
      call = HostileServer::Receive(socket);
      HostileServer::Send(socket, FrameType::kError, call->id, "unreadable");
      call = HostileServer::Receive(socket);
      std::string header = EncodeFrame(FrameType::kAnswer, call->id, "");
      uint64_t length = kMaxCallBytes + 1;
      std::memcpy(header.data() + 16, &length, sizeof(length));
      (void)shm::SendSome(socket, header);
      (void)HostileServer::Receive(socket);
    });
    ASSERT_TRUE(Connect(server).ok());
    EXPECT_EQ(*peer_->Call("x", Soon()), "asked for");
    EXPECT_EQ(peer_->Call("x", Soon()).status().code(), Code::kInternal);
    EXPECT_EQ(peer_->Call("x", Soon()).status().code(), Code::kUnavailable);
    EXPECT_FALSE(peer_->alive());
  }
  size_t before = CountDescriptors();
  {
    HostileServer server([](int socket) {
      HostileServer::Welcome(socket);
      auto call = HostileServer::Receive(socket);
      UnixFd junk(::memfd_create("junk", MFD_CLOEXEC));
      (void)shm::SendSome(socket, EncodeFrame(FrameType::kAnswer, call->id, "x"), junk.get());
      (void)HostileServer::Receive(socket);
    });
    ASSERT_TRUE(Connect(server).ok());
    EXPECT_EQ(peer_->Call("x", Soon()).status().code(), Code::kUnavailable);
    peer_.reset();
  }
  EXPECT_EQ(CountDescriptors(), before);
}

// What an importer must not believe. Each row answers Open with a file and a description of it.
TEST_F(HostileServers, RegionsThatAreNotWhatTheySay) {
  constexpr uint64_t kBytes = 8192;
  struct Row {
    const char* name;
    uint64_t file_bytes = kBytes + 16 * shm::kProbeBytes;
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    std::function<void(shm::Opened&)> lie = [](shm::Opened&) {};
    bool accepted = false;
    bool no_descriptor = false;
  };
  std::vector<Row> rows = {
      {.name = "honest", .accepted = true},
      {.name = "unsealed", .seals = 0},
      {.name = "sealed against growing only", .seals = F_SEAL_GROW},
      {.name = "short", .file_bytes = kBytes - 1},
      {.name = "empty", .file_bytes = 0},
      {.name = "huge", .file_bytes = uint64_t{1} << 40},
      {.name = "another file", .lie = [](shm::Opened& opened) { ++opened.inode; }},
      {.name = "another device", .lie = [](shm::Opened& opened) { ++opened.inode_device; }},
      {.name = "other bytes", .lie = [](shm::Opened& opened) { opened.probe[5] ^= 1; }},
      {.name = "probe beyond the end",
       .lie = [](shm::Opened& opened) { opened.probe_offset = uint64_t{1} << 40; }},
      {.name = "probe overflows", .lie = [](shm::Opened& o) { o.probe_offset = UINT64_MAX - 10; }},
      {.name = "offset overflows", .lie = [](shm::Opened& o) { o.fd_offset = UINT64_MAX - 100; }},
      {.name = "another size", .lie = [](shm::Opened& opened) { opened.bytes = kBytes / 2; }},
      {.name = "claims to be an export", .lie = [](shm::Opened& opened) { opened.sealed = false; }},
      {.name = "no descriptor", .no_descriptor = true},
  };
  std::string blob = shm::EncodeBlob({.incarnation = 11, .id = 5, .bytes = kBytes, .sealed = true});
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    HostileServer server([&](int socket) {
      HostileServer::Welcome(socket);
      UnixFd file(::memfd_create("lie", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      ASSERT_EQ(::ftruncate(file.get(), static_cast<off_t>(row.file_bytes)), 0);
      ::fcntl(file.get(), F_ADD_SEALS, row.seals);
      auto identity = shm::IdentifyFile(file.get());
      shm::Opened opened{.bytes = kBytes,
                         .sealed = true,
                         .inode_device = identity->device,
                         .inode = identity->inode,
                         .probe_offset = kBytes,
                         .probe = std::string(shm::kProbeBytes, '\0')};
      row.lie(opened);
      while (true) {
        auto open = HostileServer::Receive(socket);
        if (!open.ok()) return;
        HostileServer::Send(socket, FrameType::kOpened, open->id, shm::Encode(opened),
                            row.no_descriptor ? -1 : file.get());
      }
    });
    ASSERT_TRUE(Connect(server).ok());
    auto region = peer_->Import(blob, Soon());
    EXPECT_EQ(region.ok(), row.accepted) << region.status().ToString();
    if (!region.ok()) {
      EXPECT_EQ(region.status().peer(), "liar (shm)");
    }
    peer_.reset();
  }
}

}  // namespace
}  // namespace bascule::testing
