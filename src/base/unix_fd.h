// Owns one Unix file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

namespace bascule {

// Move-only; closes on destruction. Thread-compatible.
class UnixFd {
 public:
  UnixFd() = default;
  explicit UnixFd(int fd) : fd_(fd) {}
  UnixFd(UnixFd&& other) noexcept : fd_(other.Release()) {}
  UnixFd& operator=(UnixFd&& other) noexcept {
    if (this != &other) Reset(other.Release());
    return *this;
  }
  UnixFd(const UnixFd&) = delete;
  UnixFd& operator=(const UnixFd&) = delete;
  ~UnixFd() { Reset(); }

  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  // Gives up ownership.
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }
  void Reset(int fd = -1) {
    int old = std::exchange(fd_, fd);
    if (old >= 0) ::close(old);
  }

 private:
  int fd_ = -1;
};

}  // namespace bascule
