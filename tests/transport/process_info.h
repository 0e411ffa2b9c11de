// What the kernel says of a process, to see that nothing leaks and nothing spins.
#pragma once

#include <dirent.h>
#include <time.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace bascule::testing {

inline size_t CountDescriptors() {
  size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// Mappings of shared memory of this library.
inline size_t CountRegionMappings() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  size_t count = 0;
  while (std::getline(maps, line)) count += line.find("memfd:bascule") != std::string::npos;
  return count;
}

inline uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t total = 0;
  uint64_t resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

inline double CpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace bascule::testing
