#include "transport/shm/stale_sockets.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/random.h"
#include "base/unix_fd.h"

namespace bascule::shm {
namespace {

constexpr std::string_view kPrefix = "bascule-";
constexpr std::string_view kSuffix = ".sock";
constexpr size_t kMarkDigits = 8;
constexpr size_t kRandomBytes = 12;
constexpr std::string_view kNoMark = "00000000";

bool IsHex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

// The first digits of the kernel's boot id, which hosts and reboots have their own of.
std::string BootMark() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  id = id.substr(0, kMarkDigits);
  const bool good = id.size() == kMarkDigits && std::all_of(id.begin(), id.end(), IsHex);
  return good ? id : std::string(kNoMark);
}

bool IsOurs(std::string_view name, std::string_view mark) {
  constexpr size_t kDigits = kMarkDigits + 2 * kRandomBytes;
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return false;
  name.remove_suffix(kSuffix.size());
  if (name.size() < kPrefix.size() + 1 + kDigits) return false;
  const std::string_view digits = name.substr(name.size() - kDigits);
  return name[name.size() - kDigits - 1] == '-' && digits.starts_with(mark) &&
         std::all_of(digits.begin(), digits.end(), IsHex);
}

// A socket of this user that was made a while ago.
bool IsOldSocket(const std::string& path) {
  struct stat file {};
  if (::lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const int64_t age_ms =
      (now.tv_sec - file.st_mtim.tv_sec) * 1000 + (now.tv_nsec - file.st_mtim.tv_nsec) / 1'000'000;
  return file.st_uid == ::geteuid() && age_ms > kYoungestStaleMs;
}

bool Refuses(const std::string& path, int type) {
  sockaddr_un address{};
  if (path.size() >= sizeof(address.sun_path)) return false;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const UnixFd probe(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return false;
  return ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
             0 &&
         errno == ECONNREFUSED;
}

// Linux tells a datagram socket that a stream socket lives there (EPROTOTYPE), without bothering
// its owner. Kernels that refuse it nevertheless are asked again by a stream socket.
bool HasNoOwner(const std::string& path) {
  return Refuses(path, SOCK_DGRAM) && Refuses(path, SOCK_STREAM);
}

}  // namespace

std::string MakeSocketName(const std::string& prefix) {
  return fmt::format("{}-{}{}", prefix, BootMark(), RandomHex(kRandomBytes));
}

void RemoveStaleSockets(const std::string& directory) {
  const std::string mark = BootMark();
  if (mark == kNoMark) return;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string path = entry->path().string();
    if (!IsOurs(entry->path().filename().string(), mark)) continue;
    if (IsOldSocket(path) && HasNoOwner(path)) ::unlink(path.c_str());
  }
}

}  // namespace bascule::shm
