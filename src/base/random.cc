#include "base/random.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>

#include "base/unix_fd.h"

namespace bascule {
namespace {

// For sandboxes that forbid getrandom.
void FillFromDevice(std::span<std::byte> bytes) {
  UnixFd device(::open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  while (device.valid() && !bytes.empty()) {
    ssize_t n = ::read(device.get(), bytes.data(), bytes.size());
    if (n <= 0) return;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

}  // namespace

void FillRandom(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    ssize_t n = ::getrandom(bytes.data(), bytes.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FillFromDevice(bytes);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

uint64_t RandomU64() {
  uint64_t value = 0;
  FillRandom(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

std::string RandomHex(size_t bytes) {
  std::string raw(bytes, '\0');
  FillRandom(std::as_writable_bytes(std::span(raw)));
  std::string hex;
  hex.reserve(2 * bytes);
  for (char c : raw) {
    hex += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    hex += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
  }
  return hex;
}

}  // namespace bascule
