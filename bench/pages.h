// Memory of the kind that arenas have, and a stopwatch.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "digest/digest.h"

namespace bascule::bench {

// Shared pages of a memfd, touched.
class SharedPages {
 public:
  explicit SharedPages(uint64_t bytes) : bytes_(bytes) {
    const int fd = memfd_create("bascule bench", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) Fail("memfd");
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (data == MAP_FAILED) Fail("mmap");
    madvise(data, bytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(data);
    for (uint64_t i = 0; i < bytes; i += 8) {
      const uint64_t value = Mix64(i) & 0xBFFFBFFFBFFFBFFF;  // finite codes
      std::memcpy(data_ + i, &value, 8);
    }
  }
  ~SharedPages() { munmap(data_, bytes_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

 private:
  [[noreturn]] static void Fail(const char* what) {
    std::perror(what);
    std::exit(1);
  }
  std::byte* data_ = nullptr;
  uint64_t bytes_;
};

inline double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace bascule::bench
