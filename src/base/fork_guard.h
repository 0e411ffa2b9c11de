// Tells whether the process is a fork()ed child of the one that made the object. Threads do not
// exist in the child, and sockets and epoll sets are shared with the parent: nothing may be used.
#pragma once

#include <unistd.h>

#include "bascule/status.h"

namespace bascule {

class ForkGuard {
 public:
  [[nodiscard]] bool forked() const { return ::getpid() != pid_; }
  [[nodiscard]] Status Check() const {
    if (!forked()) return Status::Ok();
    return {Code::kForked, "made before fork() by the parent process; connect anew in the child"};
  }

 private:
  pid_t pid_ = ::getpid();
};

// kForked in the child of a process that had connected or served. Before anything of gRPC is used.
[[nodiscard]] Status CheckNotForked();

}  // namespace bascule
