#include "bascule/status.h"

#include <fmt/format.h>

namespace bascule {

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk: return "OK";
    case Code::kInvalidArgument: return "INVALID_ARGUMENT";
    case Code::kNotFound: return "NOT_FOUND";
    case Code::kAlreadyExists: return "ALREADY_EXISTS";
    case Code::kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case Code::kUnavailable: return "UNAVAILABLE";
    case Code::kStaleTerm: return "STALE_TERM";
    case Code::kRetired: return "RETIRED";
    case Code::kAborted: return "ABORTED";
    case Code::kNotDecided: return "NOT_DECIDED";
    case Code::kInDoubt: return "IN_DOUBT";
    case Code::kPoisoned: return "POISONED";
    case Code::kBusy: return "BUSY";
    case Code::kDataLoss: return "DATA_LOSS";
    case Code::kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case Code::kPermissionDenied: return "PERMISSION_DENIED";
    case Code::kVersionMismatch: return "VERSION_MISMATCH";
    case Code::kForked: return "FORKED";
    case Code::kClosed: return "CLOSED";
    case Code::kUnimplemented: return "UNIMPLEMENTED";
    case Code::kInternal: return "INTERNAL";
  }
  return "UNKNOWN";
}

std::string Status::ToString() const {
  std::string text = CodeName(code_);
  if (!message_.empty()) text += ": " + message_;
  std::string where;
  auto add = [&where](const std::string& item) { where += (where.empty() ? "" : ", ") + item; };
  if (rank_ >= 0) add(fmt::format("rank {}", rank_));
  if (!peer_.empty()) add("peer " + peer_);
  if (!tensor_.empty()) add("tensor " + tensor_);
  if (!where.empty()) text += " [" + where + "]";
  return text;
}

}  // namespace bascule
