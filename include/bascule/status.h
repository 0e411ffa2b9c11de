// Errors as values. No function of the library throws, aborts or prints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#pragma GCC visibility push(default)
namespace bascule {

// What kind of error, if any; Python has an exception for each.
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,    // the caller's input is wrong; the message says how
  kNotFound,           // a name that nobody knows
  kAlreadyExists,      // e.g. a second live rank with one number
  kDeadlineExceeded,   // the call's deadline passed; state is as before the call
  kUnavailable,        // a peer or the coordinator cannot be reached; try again
  kStaleTerm,          // the trainer world restarted; reconnect
  kRetired,            // the version has no live holders any more; poll again
  kAborted,            // the version or the update was aborted
  kNotDecided,         // the engine's update was recorded as aborted
  kInDoubt,            // the outcome of a decision cannot be learned yet; not servable
  kPoisoned,           // a commit failed half way; only a dense commit heals the rank
  kBusy,               // another call on this object is in progress
  kDataLoss,           // bytes failed a digest check
  kResourceExhausted,  // memory, descriptors, shared memory
  kPermissionDenied,   // the job token does not match
  kVersionMismatch,    // protocol or planner versions do not overlap
  kForked,             // the object, or the process, was forked from one that had connected
  kClosed,             // the object was closed
  kUnimplemented,
  kInternal,
};

// The identifier of a code, e.g. "DATA_LOSS". Never null.
[[nodiscard]] const char* CodeName(Code code);

// What happened, to whom, and what to do about it (in the message). Value type; thread-compatible.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status Ok() { return {}; }

  [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }
  // The global rank the error speaks of, or -1.
  [[nodiscard]] int rank() const { return rank_; }
  // The other side, e.g. "trainer 3" or "engine e0 rank 1"; empty where there is none.
  [[nodiscard]] const std::string& peer() const { return peer_; }
  // The logical tensor, or empty.
  [[nodiscard]] const std::string& tensor() const { return tensor_; }

  Status&& WithRank(int rank) && {
    rank_ = rank;
    return std::move(*this);
  }
  Status&& WithPeer(std::string peer) && {
    peer_ = std::move(peer);
    return std::move(*this);
  }
  Status&& WithTensor(std::string tensor) && {
    tensor_ = std::move(tensor);
    return std::move(*this);
  }

  // "CODE: message [rank 3, peer trainer 1, tensor model.norm.weight]".
  [[nodiscard]] std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
  int rank_ = -1;
  std::string peer_;
  std::string tensor_;
};

// A value or the Status that explains its absence. Result<T> of an OK Status is a programming
// error.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : value_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] bool ok() const { return std::holds_alternative<T>(value_); }
  [[nodiscard]] Status status() const { return ok() ? Status() : std::get<Status>(value_); }
  [[nodiscard]] T& value() & { return std::get<T>(value_); }
  [[nodiscard]] const T& value() const& { return std::get<T>(value_); }
  [[nodiscard]] T&& value() && { return std::get<T>(std::move(value_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> value_;
};

#define BASCULE_CONCAT_INNER_(a, b) a##b
#define BASCULE_CONCAT_(a, b) BASCULE_CONCAT_INNER_(a, b)
// Returns from the enclosing function when the expression's Status is an error.
#define BASCULE_RETURN_IF_ERROR(expr) \
  BASCULE_RETURN_IF_ERROR_INNER_(BASCULE_CONCAT_(bascule_status_, __COUNTER__), expr)
#define BASCULE_RETURN_IF_ERROR_INNER_(status, expr) \
  do {                                               \
    ::bascule::Status status = (expr);               \
    if (!status.ok()) return status;                 \
  } while (false)
// Declares `lhs` from a Result, or returns its error.
#define BASCULE_ASSIGN_OR_RETURN(lhs, expr) \
  BASCULE_ASSIGN_OR_RETURN_INNER_(BASCULE_CONCAT_(bascule_result_, __COUNTER__), lhs, expr)
#define BASCULE_ASSIGN_OR_RETURN_INNER_(result, lhs, expr) \
  auto result = (expr);                                    \
  if (!result.ok()) return result.status();                \
  lhs = std::move(result).value()

}  // namespace bascule
#pragma GCC visibility pop
