#include "logs.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"

namespace bascule::python {
namespace {

using Line = std::pair<int, std::string>;

class Queue {
 public:
  void Add(LogLevel level, std::string_view text) {
    // Python's own classes tell of these, with fields.
    for (const char* told : {": published version ", ": committed version "}) {
      if (level == LogLevel::kInfo && text.find(told) != std::string_view::npos) return;
    }
    const std::lock_guard lock(mutex_);
    if (lines_.size() == kMost) lines_.pop_front();
    lines_.emplace_back(static_cast<int>(level), text);
    added_.notify_one();
  }
  std::vector<Line> Take(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    added_.wait_for(lock, patience, [this] { return !lines_.empty(); });
    std::vector<Line> taken(std::make_move_iterator(lines_.begin()),
                            std::make_move_iterator(lines_.end()));
    lines_.clear();
    return taken;
  }

 private:
  static constexpr size_t kMost = 1000;
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<Line> lines_;
};

// Never destroyed: threads of the core may log while the process exits.
Queue& TheQueue() {
  static auto* const queue = new Queue();
  return *queue;
}

}  // namespace

LogSink QueueingSink() {
  return [](LogLevel level, std::string_view text) { TheQueue().Add(level, text); };
}

void BindLogs(nanobind::module_& m) {
  m.def(
      "take_logs",
      [](double timeout) {
        const auto patience = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3));
        return WithoutGil([patience] { return TheQueue().Take(patience); });
      },
      nanobind::arg("timeout"),
      "Lines of the core's log since the last call, as (level, text); waits for one.");
}

}  // namespace bascule::python
