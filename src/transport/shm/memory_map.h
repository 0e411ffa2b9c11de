// Pages behind a descriptor: making them, mapping them, checking them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "bascule/layout.h"
#include "bascule/status.h"
#include "base/unix_fd.h"

namespace bascule::shm {

// A shared mapping of part of a file; unmapped by the destructor. Move-only.
class MemoryMap {
 public:
  MemoryMap() = default;
  MemoryMap(MemoryMap&& other) noexcept { *this = std::move(other); }
  MemoryMap& operator=(MemoryMap&& other) noexcept;
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;
  ~MemoryMap();

  // Maps [offset, offset + bytes) of `fd`, which may begin and end inside a page. Where it is large
  // and huge_pages is set, it is placed and advised so that huge pages can be used.
  [[nodiscard]] static Result<MemoryMap> Create(int fd, uint64_t offset, uint64_t bytes,
                                                bool writable, bool huge_pages);

  // The byte at `offset` of the file.
  [[nodiscard]] std::byte* data() const { return data_; }
  // Address of another byte of the file inside this mapping's pages, or null.
  [[nodiscard]] std::byte* At(uint64_t file_offset, uint64_t bytes) const;

 private:
  std::byte* base_ = nullptr;
  size_t length_ = 0;
  uint64_t base_offset_ = 0;  // of base_ in the file
  std::byte* data_ = nullptr;
};

// A memfd that can neither shrink nor grow and that nobody else can map writable.
struct SealedMemory {
  UnixFd fd;
  MemoryMap map;
};

// All pages are reserved now, by several threads where it is large: a full memory is an error here
// and not a SIGBUS later. kResourceExhausted names size, limit and remedy.
[[nodiscard]] Result<SealedMemory> CreateSealedMemory(uint64_t bytes, std::string_view label,
                                                      bool huge_pages);

struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};
[[nodiscard]] Result<FileIdentity> IdentifyFile(int fd);

// The file can never get smaller, so a mapping of it can never fault.
[[nodiscard]] bool SealedAgainstShrinking(int fd);

// Checks that [data, data + bytes) of this process really is a shared mapping of `fd` at
// `fd_offset`, by the kernel's own list. Names the buffer in errors.
[[nodiscard]] Status CheckBufferIsMappingOf(const Buffer& buffer, const FileIdentity& file);

// "Permission denied (errno 13)".
[[nodiscard]] std::string ErrnoText(int error);

}  // namespace bascule::shm
