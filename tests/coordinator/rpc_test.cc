// The gRPC channel: deadlines, errors, tokens, stopping, and what it must not do to its process.
#include "coordinator/rpc.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "base/random.h"
#include "base/unix_fd.h"

namespace bascule {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Deadline Soon() { return Deadline::In(seconds(10)); }

RpcHandler Echo() {
  return [](const std::string& method, const std::string& request, Deadline) {
    return Result<std::string>(method + ":" + request);
  };
}

std::unique_ptr<RpcServer> Serve(RpcHandler handler, const std::string& token = "token",
                                 const std::string& listen = "127.0.0.1:0") {
  auto server = StartGrpcServer(listen, token, std::move(handler));
  EXPECT_TRUE(server.ok()) << server.status().ToString();
  return server.ok() ? std::move(*server) : nullptr;
}

template <typename Function>
int64_t MillisecondsOf(Function function) {
  const auto begin = steady_clock::now();
  function();
  return (steady_clock::now() - begin) / milliseconds(1);
}

TEST(Rpc, CarriesAnyBytes) {
  auto server = Serve(Echo());
  auto client = MakeGrpcClient(server->address(), "token");
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes.push_back(static_cast<char>(i * 7));
  EXPECT_EQ(*client->Call("m\xff", bytes, Soon()), "m\xff:" + bytes);
  EXPECT_EQ(*client->Call("", "", Soon()), ":");
}

TEST(Rpc, ErrorsComeWithAllFields) {
  auto server = Serve([](const std::string&, const std::string&, Deadline) {
    return Result<std::string>(Status(Code::kDataLoss, "wrong \xff bytes")
                                   .WithRank(3)
                                   .WithPeer("trainer 1")
                                   .WithTensor("model.norm"));
  });
  const Status status = MakeGrpcClient(server->address(), "token")->Call("m", "", Soon()).status();
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_EQ(status.message(), "wrong \xff bytes");
  EXPECT_EQ(status.rank(), 3);
  EXPECT_EQ(status.peer(), "trainer 1");
  EXPECT_EQ(status.tensor(), "model.norm");
}

TEST(Rpc, LargeMessagesPassAndTooLargeOnesAreErrors) {
  auto server = Serve([](const std::string&, const std::string& request, Deadline) {
    return Result<std::string>(request);
  });
  auto client = MakeGrpcClient(server->address(), "token");
  const std::string large(100 << 20, 'x');
  const auto reply = client->Call("m", large, Deadline::In(seconds(60)));
  ASSERT_TRUE(reply.ok()) << reply.status().ToString();
  EXPECT_EQ(reply->size(), large.size());
  const std::string too_large(size_t{kMaxMessageBytes} + 1, 'x');
  EXPECT_EQ(client->Call("m", too_large, Deadline::In(seconds(60))).status().code(),
            Code::kResourceExhausted);
  EXPECT_TRUE(client->Call("m", "x", Soon()).ok());
}

TEST(Rpc, AWrongTokenIsDeniedAtOnce) {
  const std::string secret("a\0\xff secret", 10);
  auto server = Serve(Echo(), secret);
  EXPECT_TRUE(MakeGrpcClient(server->address(), secret)->Call("m", "", Soon()).ok());
  for (const std::string& wrong :
       {std::string(), std::string("a"), secret + "x", std::string(kMaxTokenBytes, 'x'),
        std::string(kMaxTokenBytes + 1, 'x')}) {
    auto client = MakeGrpcClient(server->address(), wrong);
    const int64_t took = MillisecondsOf(
        [&] { EXPECT_EQ(client->Call("m", "", Soon()).status().code(), Code::kPermissionDenied); });
    EXPECT_LT(took, 3000);
  }
  EXPECT_EQ(
      StartGrpcServer("127.0.0.1:0", std::string(kMaxTokenBytes + 1, 'x'), Echo()).status().code(),
      Code::kInvalidArgument);
}

TEST(Rpc, AnEmptyTokenIsOneOfItsOwn) {
  auto server = Serve(Echo(), "");
  EXPECT_TRUE(MakeGrpcClient(server->address(), "")->Call("m", "", Soon()).ok());
  EXPECT_EQ(MakeGrpcClient(server->address(), "x")->Call("m", "", Soon()).status().code(),
            Code::kPermissionDenied);
}

TEST(Rpc, TheHandlerKnowsTheDeadline) {
  std::atomic<int64_t> left_ms{0};
  auto server = Serve([&](const std::string&, const std::string&, Deadline deadline) {
    left_ms = deadline.Left() / milliseconds(1);
    return Result<std::string>("");
  });
  auto client = MakeGrpcClient(server->address(), "token");
  ASSERT_TRUE(client->Call("m", "", Deadline::In(milliseconds(2000))).ok());
  EXPECT_GT(left_ms, 1000);
  EXPECT_LE(left_ms, 2000);
}

TEST(Rpc, CallsEndByTheirDeadline) {
  std::atomic<bool> stop{false};
  auto server = Serve([&](const std::string&, const std::string&, Deadline) {
    while (!stop) std::this_thread::sleep_for(milliseconds(5));  // a handler that ignores it
    return Result<std::string>("");
  });
  auto client = MakeGrpcClient(server->address(), "token");
  const int64_t took = MillisecondsOf([&] {
    EXPECT_EQ(client->Call("m", "", Deadline::In(milliseconds(300))).status().code(),
              Code::kDeadlineExceeded);
  });
  EXPECT_GE(took, 290);
  EXPECT_LT(took, 1000);
  EXPECT_EQ(client->Call("m", "", Deadline::In(milliseconds(0))).status().code(),
            Code::kDeadlineExceeded);
  stop = true;
}

TEST(Rpc, WhatCannotBeReachedIsUnavailableAtTheDeadline) {
  // A port where nobody listens; a name that does not resolve; a host that accepts and says
  // nothing.
  const UnixFd silent(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(silent.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(silent.get(), 16), 0);
  getsockname(silent.get(), reinterpret_cast<sockaddr*>(&address), &length);
  const std::string mute = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  for (const std::string& where :
       {std::string("127.0.0.1:1"), std::string("no.such.host.invalid:1"), mute}) {
    auto client = MakeGrpcClient(where, "token");
    const int64_t took = MillisecondsOf([&] {
      const Status status = client->Call("m", "", Deadline::In(milliseconds(400))).status();
      EXPECT_EQ(status.code(), Code::kUnavailable) << where << ": " << status.ToString();
      EXPECT_THAT(status.message(), HasSubstr(where));
    });
    EXPECT_GE(took, 390);
    EXPECT_LT(took, 1500);
  }
}

TEST(Rpc, AServerThatComesBackIsFoundWithinTheCall) {
  auto server = Serve(Echo());
  const std::string address = server->address();
  auto client = MakeGrpcClient(address, "token");
  ASSERT_TRUE(client->Call("m", "", Soon()).ok());
  server = nullptr;
  auto call = std::async(std::launch::async, [&] { return client->Call("m", "1", Soon()); });
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(call.wait_for(milliseconds(0)), std::future_status::timeout);
  server = Serve(Echo(), "token", address);
  const int64_t took = MillisecondsOf([&] { EXPECT_EQ(*call.get(), "m:1"); });
  EXPECT_LT(took, 2000);
}

TEST(Rpc, APortIsNeverShared) {
  auto server = Serve(Echo());
  const Status second = StartGrpcServer(server->address(), "token", Echo()).status();
  EXPECT_EQ(second.code(), Code::kUnavailable);
  EXPECT_THAT(second.message(), HasSubstr(server->address()));
  EXPECT_THAT(second.message(), HasSubstr("in use"));
  EXPECT_FALSE(StartGrpcServer("192.0.2.1:0", "token", Echo()).ok());
}

TEST(Rpc, ListensOnlyWhereItWasTold) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "is empty"},
      {":0", "has no host (0.0.0.0"},
      {"127.0.0.1", "has no port"},
      {"127.0.0.1:", "no number from 0 to 65535"},
      {"127.0.0.1:99999", "no number from 0 to 65535"},
      {"127.0.0.1:65536", "no number from 0 to 65535"},
      {"127.0.0.1:4294967296", "no number from 0 to 65535"},
      {"127.0.0.1:22x", "no number from 0 to 65535"},
      {"127.0.0.1:-1", "no number from 0 to 65535"},
      {"127.0.0.1: 5", "no number from 0 to 65535"},
      {"::1:0", "not in brackets"},
      {"unix:/tmp/socket:0", "not in brackets"},
      {"unix:/tmp/socket", "no number from 0 to 65535"}};
  for (const auto& [address, why] : wrong) {
    const Status status = StartGrpcServer(address, "token", Echo()).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << address;
    EXPECT_THAT(status.message(), AllOf(HasSubstr(fmt::format("\"{}\"", address)), HasSubstr(why)));
  }
  for (const char* open : {"0.0.0.0:0", "[::]:0", "192.0.2.1:0", "127.0.0.1.example:0"}) {
    const Status status = StartGrpcServer(open, "", Echo()).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << open;
    EXPECT_THAT(status.message(), HasSubstr("needs a job token"));
  }
  for (const char* local : {"127.0.0.1:0", "127.1.2.3:0", "localhost:0"}) {
    EXPECT_TRUE(StartGrpcServer(local, "", Echo()).ok()) << local;
  }
  auto all = Serve(Echo(), "token", "0.0.0.0:0");
  EXPECT_THAT(all->address(), StartsWith("0.0.0.0:"));
  EXPECT_EQ(*MakeGrpcClient(all->address(), "token")->Call("m", "1", Soon()), "m:1");
}

TEST(Rpc, StopEndsCallsInFlightAndWaitsForHandlersASecondAtMost) {
  std::atomic<bool> stop{false};
  std::atomic<int> running{0};
  auto server = Serve([&](const std::string&, const std::string&, Deadline) {
    ++running;
    while (!stop) std::this_thread::sleep_for(milliseconds(5));
    --running;
    return Result<std::string>("");
  });
  std::vector<std::future<Result<std::string>>> calls;
  for (int i = 0; i < 20; ++i) {
    calls.push_back(std::async(std::launch::async, [address = server->address()] {
      return MakeGrpcClient(address, "token")->Call("m", "", Deadline::In(seconds(3)));
    }));
  }
  while (running < 20) std::this_thread::sleep_for(milliseconds(5));
  const int64_t took = MillisecondsOf([&] { server->Stop(); });
  EXPECT_LT(took, 2500);
  for (auto& call : calls) EXPECT_EQ(call.get().status().code(), Code::kUnavailable);
  server->Stop();  // again
  server = nullptr;
  stop = true;
  while (running > 0) std::this_thread::sleep_for(milliseconds(5));
}

TEST(Rpc, ManyBlockingHandlersRunAtOnce) {
  std::atomic<int> inside{0};
  auto server = Serve([&](const std::string&, const std::string&, Deadline deadline) {
    ++inside;
    while (inside < 100 && !deadline.Passed()) std::this_thread::sleep_for(milliseconds(5));
    return Result<std::string>(inside >= 100 ? "together" : "alone");
  });
  auto client = MakeGrpcClient(server->address(), "token");
  std::vector<std::future<Result<std::string>>> calls;
  for (int i = 0; i < 100; ++i) {
    calls.push_back(std::async(std::launch::async, [&client] {
      return client->Call("m", "", Deadline::In(seconds(30)));
    }));
  }
  for (auto& call : calls) EXPECT_EQ(*call.get(), "together");
}

TEST(Rpc, AsyncHandlersMayAnswerLateOrAfterTheServer) {
  std::mutex mutex;
  std::vector<RpcDone> kept;
  auto started = StartAsyncGrpcServer(
      "127.0.0.1:0", "token", [&](const std::string&, const std::string&, Deadline, RpcDone done) {
        const std::lock_guard lock(mutex);
        kept.push_back(std::move(done));
      });
  ASSERT_TRUE(started.ok());
  std::unique_ptr<RpcServer> server = std::move(*started);
  auto client = MakeGrpcClient(server->address(), "token");
  auto call = std::async(std::launch::async, [&] { return client->Call("m", "", Soon()); });
  auto count = [&] {
    const std::lock_guard lock(mutex);
    return kept.size();
  };
  while (count() == 0) std::this_thread::sleep_for(milliseconds(5));
  kept[0](std::string("late"));
  EXPECT_EQ(*call.get(), "late");
  kept[0](std::string("twice"));  // has no effect
  auto second = std::async(std::launch::async,
                           [&] { return client->Call("m", "", Deadline::In(milliseconds(600))); });
  while (count() == 1) std::this_thread::sleep_for(milliseconds(5));
  server = nullptr;
  kept[1](std::string("after the server"));
  EXPECT_EQ(second.get().status().code(), Code::kUnavailable);
}

TEST(Rpc, GarbageOnThePortIsNoHarm) {
  auto server = Serve(Echo());
  auto client = MakeGrpcClient(server->address(), "token");
  ASSERT_TRUE(client->Call("m", "", Soon()).ok());
  const std::string address = server->address();
  const auto port = static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  SplitMix64 random(1);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  for (int i = 0; i < 60; ++i) {
    const UnixFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(port);
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    std::string bytes = i % 3 == 0 ? preface : i % 3 == 1 ? "GET / HTTP/1.1\r\n\r\n" : "";
    // After the preface: an empty SETTINGS frame, then frames of random content.
    if (i % 3 == 0) bytes += std::string("\0\0\0\4\0\0\0\0\0", 9);
    const uint64_t more = random.Below(20000);
    for (uint64_t b = 0; b < more; ++b) bytes.push_back(static_cast<char>(random.Next()));
    (void)!send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (i % 2 == 0) std::this_thread::sleep_for(milliseconds(2));
  }
  EXPECT_EQ(*client->Call("m", "x", Soon()), "m:x");
  EXPECT_TRUE(MakeGrpcClient(address, "token")->Call("m", "", Soon()).ok());
}

TEST(Rpc, AForkedChildGetsAnErrorAndExits) {
  auto server = Serve(Echo());
  auto client = MakeGrpcClient(server->address(), "token");
  ASSERT_TRUE(client->Call("m", "", Soon()).ok());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const bool forked = client->Call("m", "", Soon()).status().code() == Code::kForked;
    client = nullptr;
    server = nullptr;
    _exit(forked ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(client->Call("m", "", Soon()).ok());
}

TEST(Rpc, PrintsNothingAndInstallsNoSignalHandlers) {
  std::fflush(stderr);
  char name[] = "/tmp/bascule-stderr-XXXXXX";
  const UnixFd file(mkstemp(name));
  unlink(name);
  const UnixFd saved(dup(2));
  dup2(file.get(), 2);
  {
    auto server = Serve(Echo());
    (void)StartGrpcServer(server->address(), "token", Echo()).status();
    (void)MakeGrpcClient(server->address(), "other")->Call("m", "", Soon());
    (void)MakeGrpcClient("127.0.0.1:1", "token")->Call("m", "", Deadline::In(milliseconds(300)));
    (void)MakeGrpcClient("no.such.host.invalid:1", "t")
        ->Call("m", "", Deadline::In(milliseconds(300)));
    (void)MakeGrpcClient("://", "t")->Call("m", "", Deadline::In(milliseconds(100)));
  }
  std::fflush(stderr);
  dup2(saved.get(), 2);
  EXPECT_EQ(lseek(file.get(), 0, SEEK_END), 0) << "something was printed";
  for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGSEGV, SIGABRT, SIGCHLD}) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    if (signal == SIGSEGV) continue;  // the sanitizer's own
#endif
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    EXPECT_EQ(action.sa_handler, SIG_DFL) << signal;
  }
}

}  // namespace
}  // namespace bascule
