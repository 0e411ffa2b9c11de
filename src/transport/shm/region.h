// Regions of the shm transport: the owner's side, the importer's side, and the blob between them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/fork_guard.h"
#include "transport/shm/frame.h"
#include "transport/shm/memory_map.h"
#include "transport/transport.h"

namespace bascule::shm {

struct RegionBlob {
  uint64_t incarnation = 0;  // of the owner
  uint64_t id = 0;           // random; never used again
  uint64_t bytes = 0;
  bool sealed = false;
};
[[nodiscard]] std::string EncodeBlob(const RegionBlob& blob);
[[nodiscard]] Result<RegionBlob> DecodeBlob(std::string_view bytes);

class OwnedRegion;

// The regions that this process's peers may open. Thread-safe.
class RegionRegistry {
 public:
  void Add(uint64_t id, std::weak_ptr<OwnedRegion> region);
  void Remove(uint64_t id);
  [[nodiscard]] std::shared_ptr<OwnedRegion> Find(uint64_t id);

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::weak_ptr<OwnedRegion>> regions_;
};

class OwnedRegion final : public SharedRegion {
 public:
  [[nodiscard]] static Result<std::shared_ptr<OwnedRegion>> Allocate(
      std::shared_ptr<RegionRegistry> registry, uint64_t incarnation, uint64_t bytes,
      std::string_view label, bool huge_pages);
  [[nodiscard]] static Result<std::shared_ptr<OwnedRegion>> Export(
      std::shared_ptr<RegionRegistry> registry, uint64_t incarnation, const Buffer& buffer);
  ~OwnedRegion() override {
    if (!fork_guard_.forked()) registry_->Remove(blob_.id);
  }

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] uint64_t bytes() const override { return blob_.bytes; }
  [[nodiscard]] MemoryKind kind() const override { return MemoryKind::kShared; }
  [[nodiscard]] std::string blob() const override { return EncodeBlob(blob_); }

  [[nodiscard]] int fd() const { return fd_.get(); }
  // What an importer needs, with a fresh probe. Library-owned regions have a few KiB of their own
  // for probes; exported ones are read where `probe_hint` says.
  [[nodiscard]] Opened Describe(uint64_t probe_hint);

 private:
  explicit OwnedRegion(std::shared_ptr<RegionRegistry> registry) : registry_(std::move(registry)) {}
  [[nodiscard]] static std::shared_ptr<OwnedRegion> Register(std::shared_ptr<OwnedRegion> region);

  ForkGuard fork_guard_;
  std::shared_ptr<RegionRegistry> registry_;
  RegionBlob blob_;
  UnixFd fd_;
  MemoryMap map_;  // library-owned memory only
  FileIdentity file_;
  uint64_t fd_offset_ = 0;
  std::byte* data_ = nullptr;
  std::mutex probe_mutex_;
  uint64_t probes_ = 0;
};

class MappedRegion final : public ImportedRegion {
 public:
  // Checks the descriptor against the description and maps it read-only.
  [[nodiscard]] static Result<std::shared_ptr<MappedRegion>> Map(const RegionBlob& blob,
                                                                 const Opened& opened, int fd);
  [[nodiscard]] const std::byte* data() const override { return map_.data(); }
  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  // The owner's probe reads the same through this mapping.
  [[nodiscard]] bool Matches(const Opened& opened) const;

 private:
  uint64_t bytes_ = 0;
  MemoryMap map_;
};

// One open per (incarnation, region) in this process. Thread-safe.
class ImportCache {
 public:
  using Key = std::pair<uint64_t, uint64_t>;  // incarnation, region

  // The region if it is mapped already, else null: then the caller must open it and call Finish.
  // Waits while another thread opens the same one.
  [[nodiscard]] Result<std::shared_ptr<MappedRegion>> Acquire(Key key, Deadline deadline);
  // Null when opening failed.
  void Finish(Key key, const std::shared_ptr<MappedRegion>& region);

 private:
  struct Entry {
    std::weak_ptr<MappedRegion> region;
    bool opening = false;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Entry> entries_;
};

}  // namespace bascule::shm
