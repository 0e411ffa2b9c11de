// Feeds a byte stream, cut as the input says, to the parser of the shm socket and decodes whatever
// frames come out. Run: fuzz_transport_frames -max_len=8192 CORPUS_FOLDER
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "transport/shm/frame.h"

namespace {

using namespace bascule::shm;

void Decode(const Frame& frame) {
  // What was decoded says the same when it is encoded again.
  auto check = [&frame](const auto& message) {
    if (message.ok() && Encode(*message) != frame.payload) std::abort();
  };
  check(DecodeHello(frame.payload));
  check(DecodeChallenge(frame.payload));
  check(DecodeWelcome(frame.payload));
  (void)DecodeOpen(frame.payload);  // any byte but 0 means true
  (void)DecodeOpened(frame.payload);
  if (DecodeStatus(frame.payload).ok()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  size_t step = 1 + data[0] * size_t{17};
  FrameAssembler assembler(uint64_t{16} * data[1]);
  data += 2;
  size -= 2;
  while (size > 0) {
    std::span<char> space = assembler.Space();
    size_t n = std::min({space.size(), size, step});
    if (n == 0) std::abort();  // no space although no frame is complete
    std::memcpy(space.data(), data, n);
    data += n;
    size -= n;
    if (!assembler.Advance(n).ok()) return 0;
    if (assembler.complete()) Decode(assembler.Take());
  }
  return 0;
}
