// A coordinator in a process of its own: killed and restarted under its clients' feet, and waited
// upon by a thousand of them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "bascule/session.h"
#include "base/random.h"
#include "base/unix_fd.h"
#include "coordinator/grpc_directory.h"

extern char** environ;

namespace bascule {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

Deadline Soon() { return Deadline::In(seconds(20)); }

JobOptions Job(const std::string& listen) {
  JobOptions job;
  job.name = "job";
  job.token = "secret";
  job.listen = listen;
  job.heartbeat = milliseconds(300);
  return job;
}

// Run by the tests below in a process of its own: serves until its standard input ends.
TEST(CoordinatorProcess, DISABLED_Serve) {
  const char* listen = std::getenv("TEST_LISTEN");
  ASSERT_NE(listen, nullptr);
  JobOptions job = Job(listen);
  if (const char* ms = std::getenv("TEST_HEARTBEAT_MS")) {
    job.heartbeat = milliseconds(std::atoi(ms));
  }
  auto server = CoordinatorServer::Start(job);
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  const std::string line = (*server)->address() + "\n";
  ASSERT_EQ(write(3, line.data(), line.size()), static_cast<ssize_t>(line.size()));
  char byte = 0;
  while (read(0, &byte, 1) > 0) {
  }
}

// A child process that serves.
class ServerProcess {
 public:
  explicit ServerProcess(const std::string& listen, int heartbeat_ms = 300) {
    int input[2];
    int output[2];
    EXPECT_EQ(pipe2(input, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(output, O_CLOEXEC), 0);
    const UnixFd child_in(input[0]);
    const UnixFd child_out(output[1]);
    input_ = UnixFd(input[1]);
    const UnixFd from(output[0]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, child_in.get(), 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, child_out.get(), 3);
    std::string filter = "--gtest_filter=CoordinatorProcess.DISABLED_Serve";
    std::string disabled = "--gtest_also_run_disabled_tests";
    std::string name = "serve";
    char* arguments[] = {name.data(), filter.data(), disabled.data(), nullptr};
    std::string variable = "TEST_LISTEN=" + listen;
    std::string heartbeat = "TEST_HEARTBEAT_MS=" + std::to_string(heartbeat_ms);
    std::vector<char*> environment{variable.data(), heartbeat.data()};
    for (char** item = environ; *item != nullptr; ++item) environment.push_back(*item);
    environment.push_back(nullptr);
    EXPECT_EQ(
        posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments, environment.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    char byte = 0;
    // The write end is still open here: end at the newline.
    while (read(from.get(), &byte, 1) == 1 && byte != '\n') address_.push_back(byte);
  }
  ~ServerProcess() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void Signal(int signal) const { kill(pid_, signal); }
  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] int Threads() const {
    std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
    std::string line;
    while (std::getline(status, line)) {
      if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
    }
    return -1;
  }

 private:
  pid_t pid_ = 0;
  UnixFd input_;
  std::string address_;
};

std::string ScalarTemplate() {
  WorldTemplate world;
  TemplateClass tensors;
  tensors.products = {BoxProduct()};
  world.classes = {tensors};
  world.names = {"scale"};
  world.class_of = {0};
  return world.Serialize();
}

// A member that beats and rejoins by itself, as a session does.
class Member {
 public:
  Member(const std::string& address, Role role, uint32_t rank, uint32_t world_size)
      : directory_(MakeGrpcDirectory(address, "secret")) {
    request_.job = "job";
    request_.token = "secret";
    request_.member.role = role;
    request_.member.rank = rank;
    request_.member.world_size = world_size;
    request_.member.incarnation = RandomU64() | 1;
    if (role == Role::kRollout) request_.member.engine = "e";
    request_.member.world_template = DigestOf(ScalarTemplate());
    Join();
    thread_ = std::thread([this] { Beat(); });
  }
  ~Member() {
    stop_ = true;
    thread_.join();
  }
  void Join() {
    const std::lock_guard lock(mutex_);
    const std::string bytes = ScalarTemplate();
    ASSERT_TRUE(directory_->PutBlob(DigestOf(bytes), bytes, Soon()).ok());
    const auto reply = directory_->Join(request_, Soon());
    ASSERT_TRUE(reply.ok()) << reply.status().ToString();
    ++joins_;
    ASSERT_FALSE(reply->stale_term);
    if (request_.member.role == Role::kTrainer) request_.state.joined_term = reply->term;
    term_ = reply->term;
  }
  Result<VersionReply> Held(uint64_t version) {
    HeldRequest request;
    request.token = "secret";
    request.incarnation = incarnation();
    request.held.id = {term_, version};
    {
      const std::lock_guard lock(mutex_);
      request_.state.held.push_back(request.held);
    }
    return directory_->Held(request, Soon());
  }
  [[nodiscard]] uint64_t incarnation() const { return request_.member.incarnation; }
  [[nodiscard]] uint64_t term() const { return term_; }
  [[nodiscard]] int joins() const { return joins_; }
  Directory& directory() { return *directory_; }

 private:
  void Beat() {
    while (!stop_) {
      HeartbeatRequest request;
      request.token = "secret";
      request.incarnation = incarnation();
      {
        const std::lock_guard lock(mutex_);
        request.state = request_.state;
      }
      const auto reply = directory_->Heartbeat(request, Deadline::In(milliseconds(500)));
      if (reply.ok() && !reply->member && reply->rejoin) Join();
      std::this_thread::sleep_for(milliseconds(50));
    }
  }

  std::unique_ptr<Directory> directory_;
  std::mutex mutex_;
  JoinRequest request_;
  std::atomic<uint64_t> term_{0};
  std::atomic<int> joins_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST(CoordinatorProcess, KilledAndRestartedWhileTheWorldAssembles) {
  auto server = std::make_unique<ServerProcess>("127.0.0.1:0");
  const std::string address = server->address();
  ASSERT_FALSE(address.empty());
  Member first(address, Role::kTrainer, 0, 2);
  auto complete = std::async(std::launch::async, [&] {
    return first.directory().WaitComplete(first.incarnation(), Soon());
  });
  std::this_thread::sleep_for(milliseconds(200));
  server->Kill();
  std::this_thread::sleep_for(milliseconds(300));
  server = std::make_unique<ServerProcess>(address);
  ASSERT_EQ(server->address(), address);
  for (int i = 0; i < 500 && first.joins() < 2; ++i) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  ASSERT_EQ(first.joins(), 2);
  // The new coordinator cannot know whether a trainer 1 had been in the first one's term.
  Member second(address, Role::kTrainer, 1, 2);
  EXPECT_EQ(complete.get().status().code(), Code::kStaleTerm);
  EXPECT_GT(second.term(), first.term());
}

TEST(CoordinatorProcess, KilledAndRestartedWhileClientsWait) {
  // Members have six of these to rejoin, on a machine that may be slow; they beat more often.
  constexpr int kHeartbeatMs = 2000;
  auto server = std::make_unique<ServerProcess>("127.0.0.1:0", kHeartbeatMs);
  const std::string address = server->address();
  ASSERT_FALSE(address.empty());
  Member first(address, Role::kTrainer, 0, 2);
  Member second(address, Role::kTrainer, 1, 2);
  ASSERT_TRUE(first.directory().WaitComplete(first.incarnation(), Soon()).ok());
  Member rollout(address, Role::kRollout, 0, 1);
  ASSERT_TRUE(first.Held(1).ok());
  const VersionId id{first.term(), 1};
  std::vector<std::future<Result<VersionReply>>> waits;
  for (int i = 0; i < 8; ++i) {
    waits.push_back(std::async(std::launch::async, [&] {
      return rollout.directory().QueryVersion(rollout.incarnation(), id, true, Soon());
    }));
  }
  std::this_thread::sleep_for(milliseconds(200));
  server->Kill();
  server = std::make_unique<ServerProcess>(address, kHeartbeatMs);
  // It is tried again until this rank has rejoined.
  const auto held = second.Held(1);
  ASSERT_TRUE(held.ok()) << held.status().ToString();
  for (auto& wait : waits) {
    const auto reply = wait.get();
    ASSERT_TRUE(reply.ok()) << reply.status().ToString();
    EXPECT_EQ(reply->state, VersionState::kAvailable) << reply->reason;
  }
  EXPECT_EQ(first.term(), id.term);
  const auto offer = rollout.directory().Poll(rollout.incarnation(), {}, false, Soon());
  ASSERT_TRUE(offer.ok());
  EXPECT_EQ(offer->id, id);
}

TEST(CoordinatorProcess, TimeInWhichItWasSuspendedIsNotTheMembersSilence) {
  const ServerProcess server("127.0.0.1:0", 200);
  Member trainer(server.address(), Role::kTrainer, 0, 1);
  Member rollout(server.address(), Role::kRollout, 0, 1);
  const uint64_t epoch = trainer.directory().Members(Soon())->epoch;
  server.Signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(2000));  // ten heartbeats
  server.Signal(SIGCONT);
  for (int i = 0; i < 20; ++i) {
    const auto members = trainer.directory().Members(Soon());
    ASSERT_TRUE(members.ok());
    ASSERT_EQ(members->epoch, epoch);
    ASSERT_EQ(members->members.size(), 2u);
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_EQ(trainer.joins(), 1);
}

TEST(CoordinatorProcess, AThousandWaitsCostItFewThreads) {
  // A thousand threads start here at once: nobody is to seem silent meanwhile.
  const ServerProcess server("127.0.0.1:0", 5000);
  Member trainer(server.address(), Role::kTrainer, 0, 2);
  constexpr int kWaits = 1200;
  std::atomic<int> done{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kWaits; ++i) {
    threads.emplace_back([&] {
      const auto reply =
          trainer.directory().WaitComplete(trainer.incarnation(), Deadline::In(seconds(60)));
      if (!reply.ok() && wrong++ == 0) ADD_FAILURE() << reply.status().ToString();
      ++done;
    });
  }
  std::this_thread::sleep_for(seconds(2));
  EXPECT_EQ(done, 0);
  EXPECT_LT(server.Threads(), 100);
  Member other(server.address(), Role::kTrainer, 1, 2);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(CoordinatorProcess, AWrongTokenOrJobIsRefusedAtOnce) {
  const ServerProcess server("127.0.0.1:0");
  const auto begin = std::chrono::steady_clock::now();
  auto directory = MakeGrpcDirectory(server.address(), "wrong");
  EXPECT_EQ(directory->Members(Soon()).status().code(), Code::kPermissionDenied);
  JoinRequest request;
  request.job = "other";
  request.token = "secret";
  EXPECT_EQ(MakeGrpcDirectory(server.address(), "secret")->Join(request, Soon()).status().code(),
            Code::kPermissionDenied);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(5));
}

TEST(CoordinatorServerTest, TellsItsStatusAndStops) {
  auto server = CoordinatorServer::Start(Job("127.0.0.1:0"));
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  {
    Member trainer((*server)->address(), Role::kTrainer, 0, 1);
    const auto status = nlohmann::json::parse((*server)->StatusJson());
    EXPECT_EQ(status["members"].size(), 1u);
    EXPECT_EQ(status["complete"], true);
    const Status second = CoordinatorServer::Start(Job((*server)->address())).status();
    EXPECT_EQ(second.code(), Code::kUnavailable);
    EXPECT_THAT(second.message(), HasSubstr("in use"));
  }
  (*server)->Stop();
  (*server)->Stop();
}

TEST(CoordinatorServiceTest, TellsItsLogWhatHappens) {
  std::mutex mutex;
  std::string all;
  CoordinatorServiceOptions options;
  options.heartbeat = milliseconds(50);
  options.log = [&](LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    all += std::string(text) + "\n";
  };
  auto service = CoordinatorService::Create(options);
  EXPECT_TRUE(service->Leave(77).ok());
  auto said = [&] {
    const std::lock_guard lock(mutex);
    return all.find("a rank is gone: it left") != std::string::npos;
  };
  for (int i = 0; i < 200 && !said(); ++i) std::this_thread::sleep_for(milliseconds(20));
  EXPECT_TRUE(said());
}

TEST(CoordinatorServerTest, NeedsATokenUnlessOnOneHost) {
  JobOptions job = Job("0.0.0.0:0");
  job.token.clear();
  EXPECT_EQ(CoordinatorServer::Start(job).status().code(), Code::kInvalidArgument);
  job.listen = "127.0.0.1:0";
  EXPECT_TRUE(CoordinatorServer::Start(job).ok());
  job.heartbeat = milliseconds(0);
  EXPECT_EQ(CoordinatorServer::Start(job).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace bascule
