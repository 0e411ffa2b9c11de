#include "transport/shm/memory_limit.h"

#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>

namespace bascule::shm {
namespace {

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  uint64_t value = 0;
  auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;  // "max"
  return value;
}

// The number behind `key` in a file of "key number" or "key: number kB" lines, or 0.
uint64_t ReadField(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return 0;
}

void Narrow(MemoryRoom& room, uint64_t bytes, std::string limit) {
  if (bytes < room.bytes) room = {bytes, std::move(limit)};
}

// One cgroup: its limit less what it uses; clean page cache in it can be dropped.
void NarrowByCgroup(MemoryRoom& room, const std::string& folder, const char* limit_file,
                    const char* usage_file, const char* cache_field) {
  std::optional<uint64_t> limit = ReadNumber(folder + "/" + limit_file);
  std::optional<uint64_t> used = ReadNumber(folder + "/" + usage_file);
  if (!limit || !used) return;
  uint64_t cache = ReadField(folder + "/memory.stat", cache_field);
  uint64_t busy = *used > cache ? *used - cache : 0;
  Narrow(room, *limit > busy ? *limit - busy : 0,
         fmt::format("the memory limit of {} in {}/{}", FormatBytes(*limit), folder, limit_file));
}

}  // namespace

MemoryRoom FindMemoryRoom(const std::string& proc, const std::string& cgroup) {
  MemoryRoom room;
  uint64_t available_kib = ReadField(proc + "/meminfo", "MemAvailable:");
  if (available_kib > 0) {
    Narrow(room, (available_kib + ReadField(proc + "/meminfo", "SwapFree:")) << 10,
           "the memory of this host");
  }
  std::ifstream groups(proc + "/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    // "0::/path" for version 2, "4:memory:/path" for version 1.
    size_t first = line.find(':');
    size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    bool version_2 = controllers.empty();
    if (!version_2 && controllers.find("memory") == std::string::npos) continue;
    // A group is bounded by all those above it.
    while (true) {
      if (path == "/") path.clear();
      if (version_2) {
        NarrowByCgroup(room, cgroup + path, "memory.max", "memory.current", "inactive_file");
      } else {
        std::string folder = cgroup;
        folder.append("/memory").append(path);
        NarrowByCgroup(room, folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file");
      }
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return room;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace bascule::shm
