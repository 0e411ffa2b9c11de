// Feeds control messages, cut from the input, to a coordinator: parsing must not crash, what was
// parsed says the same when it is encoded again, and the state machine must take any sequence.
// Run: fuzz_control_messages -max_len=8192 CORPUS_FOLDER
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "coordinator/core.h"
#include "coordinator/messages.h"

namespace {

using namespace bascule;

// Decoded: encoding it and decoding that changes nothing more.
template <typename T>
std::optional<T> Parse(std::string_view bytes) {
  Result<T> message = Decode<T>(bytes);
  if (!message.ok()) {
    if (message.status().code() != Code::kInvalidArgument) std::abort();
    return std::nullopt;
  }
  const std::string again = Encode(*message);
  const Result<T> second = Decode<T>(again);
  if (!second.ok() || Encode(*second) != again) std::abort();
  return std::move(*message);
}

void Feed(CoordinatorCore& core, uint8_t method, std::string_view bytes, CoordinatorTime now) {
  switch (method % 8) {
    case 0:
      // Worlds of a hundred thousand ranks are legal and slow; not what is looked for here.
      if (auto join = Parse<JoinRequest>(bytes); join && join->member.world_size < 64) {
        (void)core.Join(*join, now);
      }
      return;
    case 1:
      if (auto beat = Parse<HeartbeatRequest>(bytes)) (void)core.Heartbeat(*beat, now);
      return;
    case 2:
      if (auto held = Parse<HeldRequest>(bytes)) (void)core.Held(*held, now);
      return;
    case 3:
      if (auto member = Parse<MemberInfo>(bytes)) (void)core.Rebind(*member, now);
      return;
    case 4:
      // Answers, as a client parses them.
      (void)Parse<Membership>(bytes);
      (void)Parse<JoinReply>(bytes);
      (void)Parse<HeartbeatReply>(bytes);
      (void)Parse<VersionReply>(bytes);
      (void)Parse<PollReply>(bytes);
      (void)Parse<bool>(bytes);
      return;
    default: break;
  }
  const auto query = Parse<ControlQuery>(bytes);
  if (!query) return;
  (void)core.Poll(query->incarnation, query->id, query->flag, now);
  (void)core.QueryVersion(query->incarnation, query->id, query->flag, now);
  (void)core.MembersFor(query->id, query->epoch, now);
  (void)core.WaitComplete(query->incarnation, now);
  (void)core.Gone(query->incarnation, now);
  (void)core.PutBlob(query->digest, std::make_shared<const std::string>(query->bytes), now);
  if (method % 8 == 5) (void)core.Revoked(query->incarnation, query->id, now);
  if (method % 8 == 6) (void)core.Serving(query->incarnation, query->id, query->flag, now);
  if (method % 8 == 7) (void)core.Leave(query->incarnation, now);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  CoordinatorOptions options;
  options.oracle = std::make_shared<TrivialOracle>(size % 2 == 0);
  options.heartbeat_ms = 10;
  CoordinatorCore core(options);
  CoordinatorTime now;
  while (size >= 4) {
    const uint8_t method = data[0];
    const size_t bytes = std::min<size_t>(size - 4, data[1] | (data[2] << 8));
    now.steady_ms += data[3];
    now.wall_ns += (static_cast<int64_t>(data[3]) - 100) * 1'000'000;  // may step back
    Feed(core, method, {reinterpret_cast<const char*>(data) + 4, bytes}, now);
    core.Tick(now);
    data += 4 + bytes;
    size -= 4 + bytes;
  }
  const CoordinatorCore copy = core;
  if (copy.Fingerprint() != core.Fingerprint()) std::abort();
  if (core.StatusJson(now).empty()) std::abort();
  (void)core.Members(now);
  return 0;
}
