// A forked process that runs a function: the other side of two-process tests. Fork before any
// thread of this process starts.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace bascule::testing {

// What the child says and hears, by lines.
class Pipe {
 public:
  Pipe(int in, int out) : in_(in), out_(out) {}
  void Say(const std::string& line) {
    std::string text = line + "\n";
    [[maybe_unused]] ssize_t n = ::write(out_, text.data(), text.size());
  }
  // Empty at the end of the stream.
  std::string Hear() {
    std::string line;
    char c = 0;
    while (::read(in_, &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  // Until the other side hangs up.
  void WaitForEnd() {
    while (!Hear().empty()) {
    }
  }

 private:
  int in_;
  int out_;
};

class ChildProcess {
 public:
  explicit ChildProcess(const std::function<int(Pipe&)>& body) {
    int down[2];
    int up[2];
    if (::pipe2(down, O_CLOEXEC) != 0 || ::pipe2(up, O_CLOEXEC) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(down[1]);
      ::close(up[0]);
      Pipe pipe(down[0], up[1]);
      ::_exit(body(pipe));
    }
    ::close(down[0]);
    ::close(up[1]);
    write_ = down[1];
    read_ = up[0];
  }
  ~ChildProcess() {
    if (pid_ > 0) {
      Signal(SIGKILL);
      Wait();
    }
    ::close(write_);
    ::close(read_);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  [[nodiscard]] Pipe pipe() const { return {read_, write_}; }
  [[nodiscard]] pid_t pid() const { return pid_; }
  void Signal(int number) const { ::kill(pid_, number); }
  // Returns once it does stand still.
  void Stop() const {
    Signal(SIGSTOP);
    int status = 0;
    ::waitpid(pid_, &status, WUNTRACED);
  }
  // The exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    if (::waitpid(pid_, &status, 0) != pid_) return -1000;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  int read_ = -1;
  int write_ = -1;
};

}  // namespace bascule::testing
