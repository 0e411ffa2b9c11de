// Deadlines. Every call that can wait takes one.
#pragma once

#include <chrono>

#pragma GCC visibility push(default)
namespace bascule {

// A point on the steady clock. Value type.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Deadline(Clock::time_point at) : at_(at) {}
  static Deadline In(std::chrono::nanoseconds duration) {
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(duration));
  }
  [[nodiscard]] Clock::time_point at() const { return at_; }
  [[nodiscard]] bool Passed() const { return Clock::now() >= at_; }
  // Never negative.
  [[nodiscard]] std::chrono::nanoseconds Left() const {
    auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now());
    return left.count() > 0 ? left : std::chrono::nanoseconds(0);
  }
  [[nodiscard]] Deadline Earlier(Deadline other) const { return at_ < other.at_ ? *this : other; }

 private:
  Clock::time_point at_;
};

}  // namespace bascule
#pragma GCC visibility pop
