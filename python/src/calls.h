// How Python threads enter the core and come back: without the GIL, open to Ctrl-C, and safe when
// the interpreter exits meanwhile.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "bascule/deadline.h"

namespace bascule::python {

namespace nb = nanobind;

// A deadline `seconds` from now. Negative is now; more than 30 years, infinity included, is 30
// years. Raises bascule.InvalidArgument for NaN. Needs the GIL.
[[nodiscard]] Deadline DeadlineIn(double seconds);

// Between BeginEntry and EndEntry a thread takes the GIL. Once ParkThreads ran, BeginEntry never
// returns: CPython would end such a thread by unwinding it through frames that may not throw.
void BeginEntry();
void EndEntry();
// BeginEntry, but false instead of waiting for ever.
[[nodiscard]] bool TryBeginEntry();
// Called once at interpreter exit, with the GIL; the calling thread may go on to call the core.
void ParkThreads();

// Runs `call`, which must not touch Python or throw, without the GIL.
template <typename Call>
auto WithoutGil(Call&& call) {
  PyThreadState* state = PyEval_SaveThread();
  auto result = call();
  BeginEntry();
  PyEval_RestoreThread(state);
  EndEntry();
  return result;
}

// A call that runs on a thread of its own.
class BackgroundCall {
 public:
  virtual ~BackgroundCall() = default;
  // False when it has not ended within `duration`.
  [[nodiscard]] bool WaitFor(std::chrono::nanoseconds duration) {
    std::unique_lock lock(mutex_);
    return ended_condition_.wait_for(lock, duration, [this] { return ended_; });
  }

 protected:
  void SetEnded() {
    std::lock_guard lock(mutex_);
    ended_ = true;
    ended_condition_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_condition_;
  bool ended_ = false;
};

template <typename T>
class BackgroundResult final : public BackgroundCall {
 public:
  template <typename Call>
  void Run(Call& call) {
    result_.emplace(call());
    SetEnded();
  }
  [[nodiscard]] T Take() { return std::move(*result_); }

 private:
  std::optional<T> result_;
};

// True on the thread that Python delivers signals to.
[[nodiscard]] bool OnSignalThread();

// Lets a background call go on after its caller was interrupted; `keep` (what its memory belongs
// to) lives until it ends. Needs the GIL.
void Abandon(std::shared_ptr<BackgroundCall> call, nb::object keep);
// Forgets abandoned calls that ended; waits for the others by the deadline. False when some go on.
bool WaitAbandoned(Deadline deadline);
// In a child after fork: their threads are not there, so nothing of them can be released.
void ForgetAbandoned();

// Like WithoutGil; on the main thread a signal's exception (Ctrl-C) is raised within 50 ms. The
// call itself cannot be cut short: it goes on in the background to its own deadline.
template <typename Call>
auto Interruptibly(nb::handle keep, Call call) {
  using T = decltype(call());
  if (!OnSignalThread()) return WithoutGil(call);
  auto background = std::make_shared<BackgroundResult<T>>();
  std::thread thread;
  try {
    thread = std::thread([background, call]() mutable { background->Run(call); });
  } catch (const std::system_error&) {
    return WithoutGil(call);  // no thread to be had: then without Ctrl-C
  }
  while (!WithoutGil([&] { return background->WaitFor(std::chrono::milliseconds(50)); })) {
    if (PyErr_CheckSignals() != 0) {
      thread.detach();
      Abandon(background, nb::borrow(keep));
      throw nb::python_error();
    }
  }
  thread.join();
  return background->Take();
}

}  // namespace bascule::python
