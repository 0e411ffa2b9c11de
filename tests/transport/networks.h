// The transports that the contract tests run over, and a handler for them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/random.h"
#include "transport/transport.h"

namespace bascule::testing {

inline Deadline Soon() { return Deadline::In(std::chrono::seconds(20)); }

inline TransportIdentity Identity(uint64_t incarnation, std::string name,
                                  std::string token = "secret", std::string job = "job") {
  return {std::move(job), std::move(token), incarnation, std::move(name)};
}

// Answers as told; remembers who disconnected. Thread-safe.
class TestHandler : public PeerHandler {
 public:
  std::function<Result<std::string>(std::string_view)> on_call = [](std::string_view request) {
    return Result<std::string>(std::string(request));
  };
  std::function<Result<uint64_t>(std::string_view, std::span<std::byte>)> on_fetch =
      [](std::string_view, std::span<std::byte>) {
        return Result<uint64_t>(Status(Code::kUnimplemented, "no fetch"));
      };

  Result<std::string> OnCall(uint64_t connection, std::string_view request) override {
    {
      std::lock_guard lock(mutex_);
      callers_.push_back(connection);
    }
    return on_call(request);
  }
  Result<uint64_t> OnFetch(uint64_t /*connection*/, std::string_view request,
                           std::span<std::byte> slot) override {
    return on_fetch(request, slot);
  }
  void OnDisconnect(uint64_t connection) override {
    std::lock_guard lock(mutex_);
    gone_.push_back(connection);
    changed_.notify_all();
  }

  // Waits for so many disconnects; how many there were.
  size_t WaitForDisconnects(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return gone_.size() >= count; });
    return gone_.size();
  }
  std::vector<uint64_t> callers() {
    std::lock_guard lock(mutex_);
    return callers_;
  }
  std::vector<uint64_t> gone() {
    std::lock_guard lock(mutex_);
    return gone_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> callers_;
  std::vector<uint64_t> gone_;
};

// Opened and closed by a caller of another thread.
class Gate {
 public:
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder() : path_("/tmp/bascule-test-" + RandomHex(8)) {
    std::filesystem::create_directory(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Makes transports that can reach each other.
class Network {
 public:
  virtual ~Network() = default;
  virtual std::shared_ptr<Transport> Make(TransportIdentity identity) = 0;
};

class ShmNetwork : public Network {
 public:
  explicit ShmNetwork(bool files) : files_(files) {}
  std::shared_ptr<Transport> Make(TransportIdentity identity) override {
    auto made = MakeShmTransport(std::move(identity), {files_ ? folder_.path() : ""});
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    return made.ok() ? *made : nullptr;
  }

 private:
  bool files_;
  TempFolder folder_;
};

class MemoryNetwork : public Network {
 public:
  explicit MemoryNetwork(TransportKind kind) : kind_(kind) {}
  std::shared_ptr<Transport> Make(TransportIdentity identity) override {
    return MakeMemoryTransport(hub_, kind_, std::move(identity));
  }

 private:
  TransportKind kind_;
  std::shared_ptr<MemoryHub> hub_ = MakeMemoryHub();
};

class FaultNetwork : public Network {
 public:
  explicit FaultNetwork(std::unique_ptr<Network> inner) : inner_(std::move(inner)) {}
  std::shared_ptr<Transport> Make(TransportIdentity identity) override {
    return MakeFaultTransport(inner_->Make(std::move(identity)), {});
  }

 private:
  std::unique_ptr<Network> inner_;
};

inline std::unique_ptr<Network> MakeNetwork(const std::string& name) {
  if (name.starts_with("fault_"))
    return std::make_unique<FaultNetwork>(MakeNetwork(name.substr(6)));
  if (name == "shm") return std::make_unique<ShmNetwork>(false);
  if (name == "shm_files") return std::make_unique<ShmNetwork>(true);
  return std::make_unique<MemoryNetwork>(name == "memory_mapped" ? TransportKind::kMapped
                                                                 : TransportKind::kMessage);
}

}  // namespace bascule::testing
