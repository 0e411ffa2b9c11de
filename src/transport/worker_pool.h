// The few threads on which a transport calls its PeerHandler, so that a slow handler holds up
// neither the transport's I/O nor other connections.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "bascule/status.h"

namespace bascule {

class WorkerPool {
 public:
  [[nodiscard]] static Result<std::unique_ptr<WorkerPool>> Start(int threads);
  ~WorkerPool() { Stop(); }

  // Runs `task` soon on some thread of the pool. Dropped after Stop.
  void Run(std::function<void()> task);
  // Waits for running tasks and drops waiting ones. Idempotent; not from a task.
  void Stop();

 private:
  WorkerPool() = default;
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace bascule
