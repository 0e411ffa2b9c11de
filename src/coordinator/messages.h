// Control messages to bytes (protobuf, proto/bascule.proto) and back.
#pragma once

#include <string>
#include <string_view>

#include "bascule/status.h"
#include "coordinator/directory.h"

namespace bascule {

// One message for the calls that name a version, a member or a blob.
struct ControlQuery {
  uint64_t incarnation = 0;
  VersionId id;
  uint64_t epoch = 0;
  bool flag = false;  // QueryVersion: wait; Poll: or_equal; Serving: servable
  ContentDigest digest;
  std::string bytes;
};

[[nodiscard]] std::string Encode(const JoinRequest& message);
[[nodiscard]] std::string Encode(const JoinReply& message);
[[nodiscard]] std::string Encode(const MemberInfo& message);
[[nodiscard]] std::string Encode(const Membership& message);
[[nodiscard]] std::string Encode(const HeartbeatRequest& message);
[[nodiscard]] std::string Encode(const HeartbeatReply& message);
[[nodiscard]] std::string Encode(const HeldRequest& message);
[[nodiscard]] std::string Encode(const VersionReply& message);
[[nodiscard]] std::string Encode(const PollReply& message);
[[nodiscard]] std::string Encode(const ControlQuery& message);
[[nodiscard]] std::string Encode(bool message);

// Of untrusted bytes: kInvalidArgument for bytes that are no such message and for values out of
// their range. Defined for the types above.
template <typename T>
[[nodiscard]] Result<T> Decode(std::string_view bytes);

}  // namespace bascule
