// The shm transport between real processes, including ones that die or stop.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <fstream>
#include <set>
#include <thread>

#include "base/unix_fd.h"
#include "tests/transport/child_process.h"
#include "tests/transport/networks.h"
#include "tests/transport/process_info.h"
#include "transport/shm/shm_transport.h"

namespace bascule::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

std::string ToHex(const std::string& bytes) {
  std::string hex;
  for (unsigned char c : bytes) {
    hex += "0123456789abcdef"[c >> 4];
    hex += "0123456789abcdef"[c & 15];
  }
  return hex;
}
std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

constexpr uint64_t kRegionBytes = 3 << 20;

// A process that echoes, sleeps on "sleep", and owns a region of sevens. Says its address and blob.
int ServeUntilEnd(Pipe& pipe, shm::ShmLimits limits = {}) {
  TestHandler handler;
  handler.on_call = [](std::string_view request) -> Result<std::string> {
    if (request == "sleep") std::this_thread::sleep_for(std::chrono::seconds(60));
    if (request == "large") return std::string(8 << 20, 'l');
    if (request == "descriptors") return std::to_string(CountDescriptors());
    if (request == "cpu") return std::to_string(CpuSeconds());
    return std::string(request);
  };
  auto transport = shm::MakeShmTransport(Identity(11, "trainer 0"), {}, limits);
  if (!transport.ok()) return 1;
  auto region = (*transport)->Allocate(kRegionBytes, "arena");
  if (!region.ok()) return 2;
  std::memset((*region)->data(), 7, kRegionBytes);
  auto address = (*transport)->Listen(&handler);
  if (!address.ok()) return 3;
  pipe.Say(*address);
  pipe.Say(ToHex((*region)->blob()));
  pipe.WaitForEnd();
  return 0;
}

std::shared_ptr<Transport> MakeClient(uint64_t incarnation = 22, std::string token = "secret") {
  auto made = MakeShmTransport(Identity(incarnation, "rollout 0", std::move(token)), {});
  EXPECT_TRUE(made.ok());
  return *made;
}

bool WaitUntilDead(const Peer& peer, milliseconds limit = milliseconds(10'000)) {
  Deadline deadline = Deadline::In(limit);
  while (peer.alive() && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(1));
  return !peer.alive();
}

class ShmProcesses : public ::testing::Test {
 protected:
  void Start(const std::function<int(Pipe&)>& body = [](Pipe& pipe) {
    return ServeUntilEnd(pipe);
  }) {
    child_ = std::make_unique<ChildProcess>(body);
    address_ = child_->pipe().Hear();
    blob_ = FromHex(child_->pipe().Hear());
    ASSERT_FALSE(blob_.empty());
    client_ = MakeClient();
  }
  std::shared_ptr<Peer> Connected() {
    auto peer = client_->Connect(address_, 11, Soon());
    EXPECT_TRUE(peer.ok()) << peer.status().ToString();
    return *peer;
  }
  std::unique_ptr<ChildProcess> child_;
  std::string address_;
  std::string blob_;
  std::shared_ptr<Transport> client_;
};

// Fault 8. The region stays readable: a landing that runs ends, and its checks decide.
TEST_F(ShmProcesses, AKilledPeerIsNoticedInMidCallAndItsRegionStays) {
  Start();
  auto peer = Connected();
  auto region = peer->Import(blob_, Soon());
  ASSERT_TRUE(region.ok()) << region.status().ToString();
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    child_->Signal(SIGKILL);
  });
  auto start = std::chrono::steady_clock::now();
  Status status = peer->Call("sleep", Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
  killer.join();
  EXPECT_TRUE(WaitUntilDead(*peer));
  EXPECT_EQ(child_->Wait(), -SIGKILL);
  for (uint64_t i = 0; i < kRegionBytes; ++i) ASSERT_EQ((*region)->data()[i], std::byte{7});
  EXPECT_EQ(peer->Import(blob_, Soon()).status().code(), Code::kUnavailable);
  status = client_->Connect(address_, 11, Soon()).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
}

// A data loader that was forked from the trainer keeps a copy of its sockets open.
TEST_F(ShmProcesses, AKilledPeerIsNoticedAlthoughAForkOfItLives) {
  Start([](Pipe& pipe) {
    TestHandler handler;
    auto transport = MakeShmTransport(Identity(11, "trainer 0"), {});
    auto address = (*transport)->Listen(&handler);
    pipe.Say(*address);
    pipe.Say("00");
    pipe.Hear();
    pid_t fork_of_it = ::fork();
    if (fork_of_it == 0) {
      ::sleep(60);
      ::_exit(0);
    }
    pipe.Say(std::to_string(fork_of_it));
    pipe.WaitForEnd();
    return 0;
  });
  auto peer = Connected();
  ASSERT_TRUE(peer->Call("x", Soon()).ok());
  child_->pipe().Say("fork");
  pid_t fork_of_it = std::stoi(child_->pipe().Hear());
  child_->Signal(SIGKILL);
  EXPECT_TRUE(WaitUntilDead(*peer));
  ::kill(fork_of_it, SIGKILL);
}

TEST_F(ShmProcesses, AStoppedPeerCostsADeadlineAndNoMore) {
  Start();
  auto peer = Connected();
  ASSERT_TRUE(peer->Call("x", Soon()).ok());
  child_->Stop();
  EXPECT_EQ(peer->Call("y", Deadline::In(milliseconds(50))).status().code(),
            Code::kDeadlineExceeded);
  // More than the socket holds: one stays half sent and is finished later, the others are
  // withdrawn.
  for (int i = 0; i < 5; ++i) {
    Status status = peer->Call(std::string(4 << 20, 'z'), Deadline::In(milliseconds(50))).status();
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  }
  EXPECT_EQ(peer->Import(blob_, Deadline::In(milliseconds(50))).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_EQ(client_->Connect(address_, 11, Deadline::In(milliseconds(50))).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_TRUE(peer->alive());
  child_->Signal(SIGCONT);
  auto answer = peer->Call("after", Soon());
  ASSERT_TRUE(answer.ok()) << answer.status().ToString();
  EXPECT_EQ(*answer, "after");
  EXPECT_TRUE(peer->Import(blob_, Soon()).ok());
}

TEST_F(ShmProcesses, AKilledClientIsReported) {
  TestHandler handler;
  // The client is forked first, while this process has no threads.
  ChildProcess child([](Pipe& pipe) {
    std::string address = pipe.Hear();
    auto client = MakeClient();
    auto peer = client->Connect(address, 11, Soon());
    if (!peer.ok() || !(*peer)->Call("x", Soon()).ok()) return 1;
    pipe.Say("connected");
    pipe.WaitForEnd();
    return 0;
  });
  auto server = MakeShmTransport(Identity(11, "trainer 0"), {});
  ASSERT_TRUE(server.ok());
  auto address = (*server)->Listen(&handler);
  ASSERT_TRUE(address.ok());
  child.pipe().Say(*address);
  ASSERT_EQ(child.pipe().Hear(), "connected");
  child.Signal(SIGKILL);
  EXPECT_EQ(handler.WaitForDisconnects(1), 1u);
}

// Fault 8: credits of a peer that never reads.
TEST_F(ShmProcesses, AClientThatDoesNotReadIsDroppedAndOthersAreServed) {
  ChildProcess reader([](Pipe& pipe) {
    std::string address = pipe.Hear();
    auto client = MakeClient(33);
    auto peer = client->Connect(address, 11, Soon());
    if (!peer.ok()) return 1;
    pipe.Say("connected");
    Result<std::string> answer = (*peer)->Call("large", Deadline::In(std::chrono::seconds(60)));
    pipe.Say(CodeName(answer.status().code()));
    pipe.WaitForEnd();
    return 0;
  });
  TestHandler handler;
  Gate stopped;
  handler.on_call = [&](std::string_view request) {
    if (request == "large") {
      stopped.Wait();
      return std::string(8 << 20, 'l');
    }
    return std::string(request);
  };
  shm::ShmLimits limits;
  limits.stall_timeout = milliseconds(300);
  auto server = shm::MakeShmTransport(Identity(11, "trainer 0"), {}, limits);
  auto address = (*server)->Listen(&handler);
  reader.pipe().Say(*address);
  ASSERT_EQ(reader.pipe().Hear(), "connected");
  while (handler.callers().empty()) std::this_thread::sleep_for(milliseconds(1));
  reader.Stop();
  stopped.Open();
  auto client = MakeClient();
  auto peer = client->Connect(*address, 11, Soon());
  ASSERT_TRUE(peer.ok());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE((*peer)->Call("x", Soon()).ok());
  EXPECT_EQ(handler.WaitForDisconnects(1), 1u);
  reader.Signal(SIGCONT);
  EXPECT_EQ(reader.pipe().Hear(), "UNAVAILABLE");
}

TEST_F(ShmProcesses, TheWrongTokenOrIncarnationGetsNothing) {
  Start();
  EXPECT_EQ(MakeClient(22, "wrong")->Connect(address_, 11, Soon()).status().code(),
            Code::kPermissionDenied);
  EXPECT_EQ(client_->Connect(address_, 12, Soon()).status().code(), Code::kStaleTerm);
  EXPECT_TRUE(Connected()->Call("x", Soon()).ok());
}

// Fault 20: leaked handles.
TEST_F(ShmProcesses, AThousandCyclesLeakNothing) {
  Start();
  auto watcher = Connected();
  auto cycle = [&] {
    auto peer = Connected();
    auto region = peer->Import(blob_, Soon());
    ASSERT_TRUE(region.ok()) << region.status().ToString();
    ASSERT_EQ((*region)->data()[kRegionBytes - 1], std::byte{7});
  };
  auto server_descriptors = [&] { return std::stoul(*watcher->Call("descriptors", Soon())); };
  for (int i = 0; i < 10; ++i) cycle();
  std::this_thread::sleep_for(milliseconds(50));
  size_t descriptors = CountDescriptors();
  size_t mappings = CountRegionMappings();
  size_t theirs = server_descriptors();
  for (int i = 0; i < 1000; ++i) cycle();
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(CountDescriptors(), descriptors);
  EXPECT_EQ(CountRegionMappings(), mappings);
  EXPECT_EQ(server_descriptors(), theirs);
}

TEST_F(ShmProcesses, AServerOutOfDescriptorsSaysSoAndRecovers) {
  Start([](Pipe& pipe) {
    rlimit limit{40, 40};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    return ServeUntilEnd(pipe);
  });
  auto first = Connected();
  std::vector<std::shared_ptr<Peer>> peers;
  Status refused;
  for (int i = 0; i < 60; ++i) {
    auto peer = client_->Connect(address_, 11, Soon());
    if (peer.ok()) {
      peers.push_back(*peer);
    } else {
      refused = peer.status();
    }
  }
  EXPECT_EQ(refused.code(), Code::kResourceExhausted) << refused.ToString();
  EXPECT_THAT(refused.message(), HasSubstr("ulimit -n"));
  // It neither spins nor forgets those that it has.
  double before = std::stod(*first->Call("cpu", Soon()));
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_LT(std::stod(*first->Call("cpu", Soon())) - before, 0.1);
  EXPECT_TRUE(first->Import(blob_, Soon()).ok());
  peers.clear();
  Result<std::shared_ptr<Peer>> again = Status(Code::kUnavailable, "");
  for (int i = 0; i < 100 && !again.ok(); ++i) {
    again = client_->Connect(address_, 11, Soon());
    if (!again.ok()) std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_TRUE(again.ok()) << again.status().ToString();
}

TEST_F(ShmProcesses, AClientOutOfDescriptorsGetsAnError) {
#if defined(__SANITIZE_ADDRESS__)
  // The sanitizer's check of virtual calls needs a pipe of its own and takes its absence for a
  // fault.
  GTEST_SKIP() << "needs descriptors that the sanitizer uses itself";
#endif
  ChildProcess client_process([](Pipe& pipe) {
    std::string address = pipe.Hear();
    std::string blob = FromHex(pipe.Hear());
    auto client = MakeClient();
    auto peer = client->Connect(address, 11, Soon());
    if (!peer.ok()) return 1;
    rlimit limit{static_cast<rlim_t>(CountDescriptors()), 1000};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    while (::dup(0) >= 0) {
    }
    Status import = (*peer)->Import(blob, Soon()).status();
    if (import.code() != Code::kResourceExhausted) return 2;
    if (client->Connect(address, 11, Soon()).status().code() != Code::kResourceExhausted) return 3;
    if (client->Allocate(4096, "arena").status().code() != Code::kResourceExhausted) return 4;
    limit.rlim_cur = 1000;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    // The connection survived it.
    if (!(*peer)->Import(blob, Soon()).ok()) return 5;
    return 0;
  });
  Start();
  client_process.pipe().Say(address_);
  client_process.pipe().Say(ToHex(blob_));
  EXPECT_EQ(client_process.Wait(), 0);
}

// Fault 20: no memory is an error with a remedy, not a signal.
TEST_F(ShmProcesses, AFileSizeLimitIsAnErrorAndNotASignal) {
  ChildProcess child([](Pipe&) {
    rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    auto transport = MakeClient();
    if (!transport->Allocate(64 << 10, "small").ok()) return 1;
    Status status = transport->Allocate(2 << 20, "arena").status();
    if (status.code() != Code::kResourceExhausted) return 2;
    return status.message().find("ulimit -f") == std::string::npos ? 3 : 0;
  });
  EXPECT_EQ(child.Wait(), 0);
}

// Fault 10: an exec-less child neither hangs nor disturbs its parent.
TEST_F(ShmProcesses, AForkedChildGetsErrorsAndLeavesTheParentAlone) {
  TempFolder folder;
  ChildProcess parent([&](Pipe&) {
    TestHandler handler;
    auto server = MakeShmTransport(Identity(11, "trainer 0"), {folder.path()});
    auto address = (*server)->Listen(&handler);
    auto region = (*server)->Allocate(4096, "arena");
    auto client = MakeClient();
    auto peer = client->Connect(*address, 11, Soon());
    if (!peer.ok() || !(*peer)->Call("x", Soon()).ok()) return 1;
    pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(20);
      if ((*peer)->alive()) ::_exit(1);
      if ((*peer)->Call("x", Soon()).status().code() != Code::kForked) ::_exit(2);
      if ((*server)->Allocate(4096, "a").status().code() != Code::kForked) ::_exit(3);
      if (client->Connect(*address, 11, Soon()).status().code() != Code::kForked) ::_exit(4);
      peer = Status(Code::kClosed, "");
      region = Status(Code::kClosed, "");
      client.reset();
      server = Status(Code::kClosed, "");
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (status != 0) return 10 + WEXITSTATUS(status);
    if (!(*peer)->Call("x", Soon()).ok()) return 2;
    if (!(*peer)->Import((*region)->blob(), Soon()).ok()) return 3;
    auto second = client->Connect(*address, 11, Soon());  // the socket file is still there
    return second.ok() ? 0 : 4;
  });
  EXPECT_EQ(parent.Wait(), 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()) || !std::filesystem::exists(folder.path()));
}

TEST_F(ShmProcesses, SocketFilesAreForTheOwnerAndGoAway) {
  TempFolder folder;
  TestHandler handler;
  auto server = MakeShmTransport(Identity(11, "trainer 0"), {folder.path()});
  auto address = (*server)->Listen(&handler);
  ASSERT_TRUE(address.ok());
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++files;
    EXPECT_EQ(entry.status().permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }
  EXPECT_EQ(files, 1);
  server = Status(Code::kClosed, "");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  auto nowhere = MakeShmTransport(Identity(11, "trainer 0"), {"/nonexistent/folder"});
  Status status = (*nowhere)->Listen(&handler).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
  auto deep = MakeShmTransport(Identity(11, "trainer 0"), {"/" + std::string(200, 'd')});
  EXPECT_EQ((*deep)->Listen(&handler).status().code(), Code::kInvalidArgument);
}

std::set<std::string> FilesIn(const std::string& folder) {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.insert(entry.path().filename().string());
  }
  return files;
}

// Makes a file look like one of an hour ago.
void Backdate(const std::string& path) {
  const timespec times[2] = {{::time(nullptr) - 3600, 0}, {::time(nullptr) - 3600, 0}};
  EXPECT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
}

void LeaveSocket(const std::string& path) {
  const UnixFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

TEST_F(ShmProcesses, ListeningRemovesFilesOfTheDeadAndNoOthers) {
  TempFolder folder;
  auto listen = [&folder](Pipe& pipe) {
    TestHandler handler;
    auto transport = MakeShmTransport(Identity(11, "trainer 0"), {folder.path()});
    auto address = (*transport)->Listen(&handler);
    pipe.Say(address.ok() ? *address : "none");
    pipe.WaitForEnd();
    return 0;
  };
  ChildProcess stopped(listen);
  stopped.pipe().Hear();
  const std::string live = *FilesIn(folder.path()).begin();
  stopped.Stop();
  std::string dead;
  {
    ChildProcess killed(listen);
    killed.pipe().Hear();
    for (const std::string& file : FilesIn(folder.path())) {
      if (file != live) dead = file;
    }
    killed.Signal(SIGKILL);
    killed.Wait();
  }
  std::set<std::string> others = {live};
  auto leave = [&](const std::string& name) {
    LeaveSocket(folder.path() + "/" + name);
    others.insert(name);
  };
  const size_t mark = dead.rfind('-') + 1;
  std::string name = dead;
  name[mark] = name[mark] == 'a' ? 'b' : 'a';
  leave(name);  // of another boot or host
  leave("other-" + dead.substr(8));
  leave("bascule.sock");
  name = dead;
  name[mark + 9] = name[mark + 9] == 'a' ? 'b' : 'a';
  std::ofstream(folder.path() + "/" + name) << "a file";
  others.insert(name);
  for (const std::string& file : FilesIn(folder.path())) Backdate(folder.path() + "/" + file);
  name[mark + 9] = name[mark + 9] == 'c' ? 'd' : 'c';
  leave(name);  // young: it may be about to listen

  TestHandler handler;
  auto server = MakeShmTransport(Identity(12, "trainer 1"), {folder.path()});
  auto address = (*server)->Listen(&handler);
  ASSERT_TRUE(address.ok());
  others.insert(std::filesystem::path(*address).filename().string());
  EXPECT_EQ(FilesIn(folder.path()), others);
  stopped.Signal(SIGCONT);
}

TEST_F(ShmProcesses, AnIdleTransportUsesNoCpu) {
  Start();
  auto peer = Connected();
  ASSERT_TRUE(peer->Call("x", Soon()).ok());
  double before = CpuSeconds();
  double theirs = std::stod(*peer->Call("cpu", Soon()));
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_LT(std::stod(*peer->Call("cpu", Soon())) - theirs, 0.05);
  EXPECT_LT(CpuSeconds() - before, 0.1);
}

}  // namespace
}  // namespace bascule::testing
