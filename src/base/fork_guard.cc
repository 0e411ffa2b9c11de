#include "base/fork_guard.h"

#include <atomic>

namespace bascule {

// gRPC's threads do not survive a fork, and a child that goes on with it hangs: remember which
// process used it first. (The one thing here that is global, because gRPC is.)
Status CheckNotForked() {
  static std::atomic<pid_t> first_user{0};
  pid_t expected = 0;
  if (first_user.compare_exchange_strong(expected, getpid()) || expected == getpid()) {
    return Status::Ok();
  }
  return Status(
      Code::kForked,
      "this process was forked from one that had connected; start it with spawn (or exec) "
      "instead of fork, or fork before the parent connects");
}

}  // namespace bascule
