// Parses bytes as each message of the peer calls. What is taken comes back as it was.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "session/messages.h"

namespace {

template <typename Message>
void Check(bascule::Result<Message> (*decode)(std::string_view), std::string_view bytes) {
  const auto message = decode(bytes);
  if (!message.ok()) {
    if (message.status().code() != bascule::Code::kInvalidArgument) std::abort();
    return;
  }
  const std::string written = Encode(*message);
  const auto again = decode(written);
  if (!again.ok() || Encode(*again) != written) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0: Check(&bascule::DecodePeerRequest, bytes); break;
    case 1: Check(&bascule::DecodeOpenReply, bytes); break;
    default: Check(&bascule::DecodeSumsReply, bytes); break;
  }
  return 0;
}
