#include "calls.h"

#include <atomic>
#include <cmath>
#include <list>

#include "errors.h"

namespace bascule::python {
namespace {

constexpr uint32_t kParked = 1U << 31;
// Threads between BeginEntry and EndEntry, and kParked. Lock-free, so that a fork cannot leave it
// locked in the child.
std::atomic<uint32_t> entries{0};
// The thread that ends the interpreter: it alone still enters.
std::atomic<unsigned long> parking_thread{0};

struct AbandonedCall {
  std::shared_ptr<BackgroundCall> call;
  nb::object keep;
};

// Guarded by the GIL. Never destroyed: the interpreter is gone when static objects are.
std::list<AbandonedCall>& AbandonedCalls() {
  static auto* calls = new std::list<AbandonedCall>;
  return *calls;
}

}  // namespace

Deadline DeadlineIn(double seconds) {
  if (std::isnan(seconds)) Raise(Status(Code::kInvalidArgument, "timeout is not a number"));
  constexpr double kLongest = 30.0 * 365 * 24 * 3600;
  seconds = seconds < 0 ? 0 : (seconds > kLongest ? kLongest : seconds);
  return Deadline::In(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
}

bool TryBeginEntry() {
  if ((entries.fetch_add(1) & kParked) == 0) return true;
  if (PyThread_get_thread_ident() == parking_thread.load()) return true;
  entries.fetch_sub(1);
  return false;
}

void BeginEntry() {
  while (!TryBeginEntry()) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

void EndEntry() { entries.fetch_sub(1); }

void ParkThreads() {
  parking_thread.store(PyThread_get_thread_ident());
  entries.fetch_or(kParked);
  // Those that are on their way in need the GIL that this thread holds.
  PyThreadState* state = PyEval_SaveThread();
  for (int i = 0; i < 1000 && entries.load() != kParked; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  PyEval_RestoreThread(state);
}

bool OnSignalThread() {
  nb::object main_thread = nb::module_::import_("threading").attr("main_thread")();
  nb::object identity = main_thread.attr("ident");
  return !identity.is_none() && nb::cast<unsigned long>(identity) == PyThread_get_thread_ident();
}

void Abandon(std::shared_ptr<BackgroundCall> call, nb::object keep) {
  WaitAbandoned(Deadline::In(std::chrono::nanoseconds(0)));
  AbandonedCalls().push_back({std::move(call), std::move(keep)});
}

bool WaitAbandoned(Deadline deadline) {
  // Other threads may come here while this one waits: each works on the calls that it took.
  std::list<AbandonedCall> taken;
  taken.swap(AbandonedCalls());
  for (auto it = taken.begin(); it != taken.end();) {
    const bool ended = WithoutGil([&] { return it->call->WaitFor(deadline.Left()); });
    it = ended ? taken.erase(it) : std::next(it);
  }
  AbandonedCalls().splice(AbandonedCalls().end(), taken);
  return AbandonedCalls().empty();
}

void ForgetAbandoned() { new std::list<AbandonedCall>(std::move(AbandonedCalls())); }

}  // namespace bascule::python
