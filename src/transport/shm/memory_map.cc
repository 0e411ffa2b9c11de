#include "transport/shm/memory_map.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <system_error>
#include <thread>
#include <vector>

#include "transport/shm/memory_limit.h"

// Newer than some C libraries that this must build with.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace bascule::shm {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kPopulateStep = 32 << 20;
constexpr uint64_t kPopulateInParallel = 512 << 20;

uint64_t MapAlignment(int fd) {
  struct statfs info {};
  if (::fstatfs(fd, &info) == 0 && info.f_type == HUGETLBFS_MAGIC) {
    return static_cast<uint64_t>(info.f_bsize);
  }
  return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Address space in which a mapping of `length` bytes can begin at a multiple of kHugePage.
std::byte* ReserveAligned(size_t length) {
  size_t total = length + kHugePage;
  void* raw = ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto begin = reinterpret_cast<uintptr_t>(raw);
  uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) ::munmap(raw, aligned - begin);
  size_t tail = begin + total - (aligned + length);
  if (tail > 0) ::munmap(reinterpret_cast<void*>(aligned + length), tail);
  return reinterpret_cast<std::byte*>(aligned);
}

Status Exhausted(uint64_t bytes, std::string_view label, const std::string& why) {
  return {Code::kResourceExhausted, fmt::format("cannot allocate {} of shared memory for '{}': {}",
                                                FormatBytes(bytes), label, why)};
}

// The limits that would kill the process instead of failing a call.
Status CheckLimits(uint64_t bytes, std::string_view label) {
  struct rlimit file_size {};
  if (::getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY &&
      bytes > file_size.rlim_cur) {
    return Exhausted(bytes, label,
                     fmt::format("the file size limit is {}; raise it (ulimit -f unlimited)",
                                 FormatBytes(file_size.rlim_cur)));
  }
  MemoryRoom room = FindMemoryRoom();
  if (bytes > room.bytes) {
    return Exhausted(bytes, label,
                     fmt::format("only {} are free under {}; shared memory counts against it: "
                                 "raise it, or publish fewer bytes from this rank",
                                 FormatBytes(room.bytes), room.limit));
  }
  return Status::Ok();
}

Result<UnixFd> CreateMemfd(std::string_view label, uint64_t bytes) {
  // The kernel takes at most 249 bytes.
  std::string name = fmt::format("bascule:{}", label.substr(0, 200));
  int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) {
    fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);  // Linux before 6.3
  }
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
    return Exhausted(bytes, label, "out of file descriptors; raise the limit (ulimit -n)");
  }
  if (fd < 0) return Exhausted(bytes, label, "memfd_create: " + ErrnoText(errno));
  return UnixFd(fd);
}

// Takes pages for the whole range: 0, or an errno. Huge ones where they were advised.
int Populate(std::byte* data, uint64_t bytes, int fd) {
  std::atomic<uint64_t> next = 0;
  std::atomic<int> failure = 0;
  auto work = [&] {
    while (failure == 0) {
      uint64_t begin = next.fetch_add(kPopulateStep);
      if (begin >= bytes) return;
      uint64_t step = std::min(kPopulateStep, bytes - begin);
      while (::madvise(data + begin, step, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        int error = errno;
        if (error == EINVAL) {  // Linux before 5.14
          error = ::posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(step));
          if (error == EINTR) continue;
          if (error == 0) break;
        }
        failure = error;
        return;
      }
    }
  };
  std::vector<std::thread> helpers;
  if (bytes >= kPopulateInParallel) {
    unsigned threads = std::min(8u, std::max(1u, std::thread::hardware_concurrency()));
    try {
      for (unsigned i = 1; i < threads; ++i) helpers.emplace_back(work);
    } catch (const std::system_error&) {
      threads = static_cast<unsigned>(helpers.size()) + 1;  // fewer: slower, nothing else
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return failure;
}

}  // namespace

std::string ErrnoText(int error) {
  return fmt::format("{} (errno {})", std::generic_category().message(error), error);
}

MemoryMap& MemoryMap::operator=(MemoryMap&& other) noexcept {
  if (this != &other) {
    if (base_ != nullptr) ::munmap(base_, length_);
    base_ = std::exchange(other.base_, nullptr);
    length_ = std::exchange(other.length_, 0);
    base_offset_ = std::exchange(other.base_offset_, 0);
    data_ = std::exchange(other.data_, nullptr);
  }
  return *this;
}

MemoryMap::~MemoryMap() {
  if (base_ != nullptr) ::munmap(base_, length_);
}

std::byte* MemoryMap::At(uint64_t file_offset, uint64_t bytes) const {
  if (file_offset < base_offset_ || file_offset - base_offset_ > length_ ||
      bytes > length_ - (file_offset - base_offset_)) {
    return nullptr;
  }
  return base_ + (file_offset - base_offset_);
}

Result<MemoryMap> MemoryMap::Create(int fd, uint64_t offset, uint64_t bytes, bool writable,
                                    bool huge_pages) {
  uint64_t alignment = MapAlignment(fd);
  uint64_t begin = offset / alignment * alignment;
  uint64_t end = (offset + bytes + alignment - 1) / alignment * alignment;
  if (offset + bytes < offset || end <= begin || end > static_cast<uint64_t>(INT64_MAX)) {
    return Status(Code::kInvalidArgument, fmt::format("cannot map {} bytes", bytes));
  }
  size_t length = end - begin;
  bool huge = huge_pages && length >= kHugePage && begin % kHugePage == 0;
  std::byte* place = huge ? ReserveAligned(length) : nullptr;
  void* raw =
      ::mmap(place, length, writable ? PROT_READ | PROT_WRITE : PROT_READ,
             MAP_SHARED | (place != nullptr ? MAP_FIXED : 0), fd, static_cast<off_t>(begin));
  if (raw == MAP_FAILED) {
    int error = errno;
    if (place != nullptr) ::munmap(place, length);
    return Status(Code::kResourceExhausted,
                  fmt::format("cannot map {} of shared memory: {}; check ulimit -v and "
                              "vm.max_map_count",
                              FormatBytes(length), ErrnoText(error)));
  }
  if (huge) ::madvise(raw, length, MADV_HUGEPAGE);  // advice: may be refused
  MemoryMap map;
  map.base_ = static_cast<std::byte*>(raw);
  map.length_ = length;
  map.base_offset_ = begin;
  map.data_ = map.base_ + (offset - begin);
  return map;
}

Result<SealedMemory> CreateSealedMemory(uint64_t bytes, std::string_view label, bool huge_pages) {
  BASCULE_RETURN_IF_ERROR(CheckLimits(bytes, label));
  SealedMemory memory;
  BASCULE_ASSIGN_OR_RETURN(memory.fd, CreateMemfd(label, bytes));
  int fd = memory.fd.get();
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return Exhausted(bytes, label, ErrnoText(errno));
  }
  auto map = MemoryMap::Create(fd, 0, bytes, /*writable=*/true, huge_pages);
  if (!map.ok()) return Exhausted(bytes, label, map.status().message());
  memory.map = std::move(map).value();
  if (int error = Populate(memory.map.data(), bytes, fd); error != 0) {
    return Exhausted(
        bytes, label,
        fmt::format("{}; only {} are free under {}: raise it, or publish fewer bytes "
                    "from this rank",
                    ErrnoText(error), FormatBytes(FindMemoryRoom().bytes), FindMemoryRoom().limit));
  }
  // FUTURE_WRITE: this mapping stays writable, no other one can become so (Linux 5.1 and later).
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(fd, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE) != 0 &&
      ::fcntl(fd, F_ADD_SEALS, seals) != 0) {
    return Status(Code::kInternal, "cannot seal shared memory: " + ErrnoText(errno));
  }
  return memory;
}

Result<FileIdentity> IdentifyFile(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    return Status(Code::kInvalidArgument, fmt::format("descriptor {}: {}", fd, ErrnoText(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("descriptor {} is no memory file (mode {:o})", fd, info.st_mode));
  }
  return FileIdentity{info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size)};
}

bool SealedAgainstShrinking(int fd) {
  int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

Status CheckBufferIsMappingOf(const Buffer& buffer, const FileIdentity& file) {
  uint64_t at = reinterpret_cast<uintptr_t>(buffer.data);
  const uint64_t end = at + buffer.bytes;
  const uint64_t first = at;
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (at < end && std::getline(maps, line)) {
    uint64_t begin = 0;
    uint64_t stop = 0;
    uint64_t offset = 0;
    uint64_t inode = 0;
    unsigned major_id = 0;
    unsigned minor_id = 0;
    char mode[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &begin,
                    &stop, mode, &offset, &major_id, &minor_id, &inode) != 7) {
      continue;
    }
    if (stop <= at) continue;
    if (begin > at) break;  // a hole
    bool same_file = inode == file.inode && makedev(major_id, minor_id) == file.device;
    bool same_place = offset + (at - begin) == buffer.fd_offset + (at - first);
    if (!same_file || !same_place || mode[3] != 's') break;
    at = std::min(stop, end);
  }
  if (at >= end) return Status::Ok();
  return {Code::kInvalidArgument,
          fmt::format("buffer '{}': byte {} is not a shared mapping of descriptor {} at offset {}; "
                      "pass the descriptor and offset that the memory was mapped from, or use the "
                      "arena",
                      buffer.name, at - first, buffer.fd, buffer.fd_offset + (at - first))};
}

}  // namespace bascule::shm
