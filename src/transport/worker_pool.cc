#include "transport/worker_pool.h"

#include <fmt/format.h>

#include <system_error>

namespace bascule {

Result<std::unique_ptr<WorkerPool>> WorkerPool::Start(int threads) {
  std::unique_ptr<WorkerPool> pool(new WorkerPool());
  try {
    for (int i = 0; i < threads; ++i) {
      pool->threads_.emplace_back([raw = pool.get()] { raw->Loop(); });
    }
  } catch (const std::system_error& error) {
    return Status(Code::kResourceExhausted,
                  fmt::format("cannot start a thread ({}); raise the process limit (ulimit -u, "
                              "pids cgroup)",
                              error.what()));
  }
  return pool;
}

void WorkerPool::Run(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void WorkerPool::Stop() {
  std::deque<std::function<void()>> dropped;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void WorkerPool::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (stopping_) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds is released outside the lock
    lock.lock();
  }
}

}  // namespace bascule
