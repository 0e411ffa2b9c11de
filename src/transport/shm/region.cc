#include "transport/shm/region.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/random.h"
#include "base/wire.h"

namespace bascule::shm {
namespace {

constexpr uint32_t kBlobMagic = 0x31525342;  // "BSR1"
constexpr uint64_t kProbeSlots = 16;         // so that a few importers at once do not collide
constexpr uint64_t kMaxProbeArea = 1 << 20;
constexpr uint64_t kPage = 4096;

uint64_t ProbeAreaOffset(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::string EncodeBlob(const RegionBlob& blob) {
  WireWriter writer;
  writer.U32(kBlobMagic);
  writer.U64(blob.incarnation);
  writer.U64(blob.id);
  writer.U64(blob.bytes);
  writer.U8(blob.sealed ? 1 : 0);
  return writer.Take();
}

Result<RegionBlob> DecodeBlob(std::string_view bytes) {
  WireReader reader(bytes);
  uint32_t magic = reader.U32();
  RegionBlob blob;
  blob.incarnation = reader.U64();
  blob.id = reader.U64();
  blob.bytes = reader.U64();
  blob.sealed = reader.U8() != 0;
  if (!reader.done() || magic != kBlobMagic || blob.bytes == 0) {
    return Status(Code::kInvalidArgument,
                  "not the description of an shm region; import it by the transport that made it");
  }
  return blob;
}

void RegionRegistry::Add(uint64_t id, std::weak_ptr<OwnedRegion> region) {
  std::lock_guard lock(mutex_);
  regions_[id] = std::move(region);
}

void RegionRegistry::Remove(uint64_t id) {
  std::lock_guard lock(mutex_);
  regions_.erase(id);
}

std::shared_ptr<OwnedRegion> RegionRegistry::Find(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto it = regions_.find(id);
  return it == regions_.end() ? nullptr : it->second.lock();
}

std::shared_ptr<OwnedRegion> OwnedRegion::Register(std::shared_ptr<OwnedRegion> region) {
  region->registry_->Add(region->blob_.id, region);
  return region;
}

Result<std::shared_ptr<OwnedRegion>> OwnedRegion::Allocate(std::shared_ptr<RegionRegistry> registry,
                                                           uint64_t incarnation, uint64_t bytes,
                                                           std::string_view label,
                                                           bool huge_pages) {
  if (bytes == 0) {
    return Status(Code::kInvalidArgument, fmt::format("region '{}' of 0 bytes", label));
  }
  if (bytes > (uint64_t{1} << 56)) {
    return Status(
        Code::kResourceExhausted,
        fmt::format("region '{}' of {} bytes is larger than any address space", label, bytes));
  }
  std::shared_ptr<OwnedRegion> region(new OwnedRegion(std::move(registry)));
  uint64_t total = ProbeAreaOffset(bytes) + kProbeSlots * kProbeBytes;
  BASCULE_ASSIGN_OR_RETURN(SealedMemory memory, CreateSealedMemory(total, label, huge_pages));
  BASCULE_ASSIGN_OR_RETURN(region->file_, IdentifyFile(memory.fd.get()));
  region->fd_ = std::move(memory.fd);
  region->map_ = std::move(memory.map);
  region->data_ = region->map_.data();
  region->blob_ = {incarnation, RandomU64(), bytes, /*sealed=*/true};
  return Register(std::move(region));
}

Result<std::shared_ptr<OwnedRegion>> OwnedRegion::Export(std::shared_ptr<RegionRegistry> registry,
                                                         uint64_t incarnation,
                                                         const Buffer& buffer) {
  if (buffer.kind != MemoryKind::kShared || buffer.fd < 0 || buffer.data == nullptr ||
      buffer.bytes == 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("buffer '{}' is not shared memory with a descriptor, so peers cannot "
                              "map it; use the arena",
                              buffer.name));
  }
  BASCULE_ASSIGN_OR_RETURN(FileIdentity file, IdentifyFile(buffer.fd));
  if (buffer.fd_offset > file.bytes || buffer.bytes > file.bytes - buffer.fd_offset) {
    return Status(Code::kInvalidArgument,
                  fmt::format("buffer '{}': descriptor {} has {} bytes, fewer than offset {} + {}",
                              buffer.name, buffer.fd, file.bytes, buffer.fd_offset, buffer.bytes));
  }
  BASCULE_RETURN_IF_ERROR(CheckBufferIsMappingOf(buffer, file));
  std::shared_ptr<OwnedRegion> region(new OwnedRegion(std::move(registry)));
  region->fd_ = UnixFd(::fcntl(buffer.fd, F_DUPFD_CLOEXEC, 0));
  if (!region->fd_.valid()) {
    return Status(Code::kResourceExhausted,
                  fmt::format("buffer '{}': {}; raise the limit of open files (ulimit -n)",
                              buffer.name, ErrnoText(errno)));
  }
  region->file_ = file;
  region->fd_offset_ = buffer.fd_offset;
  region->data_ = buffer.data;
  region->blob_ = {incarnation, RandomU64(), buffer.bytes, /*sealed=*/false};
  return Register(std::move(region));
}

Opened OwnedRegion::Describe(uint64_t probe_hint) {
  Opened opened;
  opened.bytes = blob_.bytes;
  opened.fd_offset = fd_offset_;
  opened.sealed = blob_.sealed;
  opened.inode_device = file_.device;
  opened.inode = file_.inode;
  if (blob_.sealed) {
    opened.probe.resize(kProbeBytes);
    FillRandom(std::as_writable_bytes(std::span(opened.probe)));
    std::lock_guard lock(probe_mutex_);
    opened.probe_offset = ProbeAreaOffset(blob_.bytes) + (probes_++ % kProbeSlots) * kProbeBytes;
    std::memcpy(map_.At(opened.probe_offset, kProbeBytes), opened.probe.data(), kProbeBytes);
  } else {
    uint64_t size = std::min<uint64_t>(kProbeBytes, blob_.bytes);
    uint64_t at = probe_hint % (blob_.bytes - size + 1);
    opened.probe_offset = fd_offset_ + at;
    opened.probe.assign(reinterpret_cast<const char*>(data_ + at), size);
  }
  return opened;
}

Result<std::shared_ptr<MappedRegion>> MappedRegion::Map(const RegionBlob& blob,
                                                        const Opened& opened, int fd) {
  auto mismatch = [](const std::string& what) {
    return Status(Code::kUnavailable,
                  fmt::format("{}; the region cannot be trusted, use another transport", what));
  };
  if (opened.bytes != blob.bytes || opened.sealed != blob.sealed) {
    return mismatch("the peer's region is not the one that was announced");
  }
  BASCULE_ASSIGN_OR_RETURN(FileIdentity file, IdentifyFile(fd));
  if (file.device != opened.inode_device || file.inode != opened.inode) {
    return mismatch("the descriptor is not the file that the peer named");
  }
  // Everything that is mapped must be there, else reading it would be a SIGBUS.
  if (opened.fd_offset > file.bytes || opened.bytes > file.bytes - opened.fd_offset) {
    return mismatch(fmt::format("the descriptor has {} bytes, fewer than the region's {}",
                                file.bytes, opened.bytes));
  }
  // A library-owned file is the region and the pages for probes.
  uint64_t end = opened.sealed ? file.bytes : opened.fd_offset + opened.bytes;
  if (end - opened.fd_offset - opened.bytes > kMaxProbeArea) {
    return mismatch("the descriptor is much larger than the region");
  }
  if (opened.sealed && !SealedAgainstShrinking(fd)) {
    return mismatch("the descriptor is not sealed against shrinking");
  }
  auto region = std::make_shared<MappedRegion>();
  BASCULE_ASSIGN_OR_RETURN(region->map_,
                           MemoryMap::Create(fd, opened.fd_offset, end - opened.fd_offset,
                                             /*writable=*/false, /*huge_pages=*/true));
  region->bytes_ = opened.bytes;
  return region;
}

bool MappedRegion::Matches(const Opened& opened) const {
  const std::byte* here = map_.At(opened.probe_offset, opened.probe.size());
  return here != nullptr && std::memcmp(here, opened.probe.data(), opened.probe.size()) == 0;
}

Result<std::shared_ptr<MappedRegion>> ImportCache::Acquire(Key key, Deadline deadline) {
  std::unique_lock lock(mutex_);
  std::erase_if(entries_, [](const auto& item) {
    return !item.second.opening && item.second.region.expired();
  });
  if (!changed_.wait_until(lock, deadline.at(), [&] {
        auto it = entries_.find(key);
        return it == entries_.end() || !it->second.opening;
      })) {
    return Status(Code::kDeadlineExceeded, "another thread is still opening the region");
  }
  Entry& entry = entries_[key];
  if (auto region = entry.region.lock()) return region;
  entry.opening = true;
  return std::shared_ptr<MappedRegion>();
}

void ImportCache::Finish(Key key, const std::shared_ptr<MappedRegion>& region) {
  {
    std::lock_guard lock(mutex_);
    if (region == nullptr) {
      entries_.erase(key);
    } else {
      entries_[key] = {region, false};
    }
  }
  changed_.notify_all();
}

}  // namespace bascule::shm
