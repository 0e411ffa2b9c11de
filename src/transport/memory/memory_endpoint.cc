#include "transport/memory/memory_endpoint.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include "base/random.h"
#include "base/wire.h"

namespace bascule::memory {
namespace {

constexpr uint32_t kBlobMagic = 0x31524d42;  // "BMR1"
constexpr int kHandlerThreads = 2;

}  // namespace

Result<std::shared_ptr<Region>> Region::Create(std::shared_ptr<MemoryHub> hub, uint64_t incarnation,
                                               uint64_t bytes, std::string_view label,
                                               std::byte* borrowed) {
  if (bytes == 0) {
    return Status(Code::kInvalidArgument, fmt::format("region '{}' of 0 bytes", label));
  }
  std::shared_ptr<Region> region(new Region());
  if (borrowed != nullptr) {
    region->pages_ = std::shared_ptr<std::byte>(borrowed, [](std::byte*) {});
  } else {
    void* raw = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
      return Status(Code::kResourceExhausted,
                    fmt::format("cannot allocate {} bytes for '{}': out of memory or address "
                                "space; publish fewer bytes from this rank",
                                bytes, label));
    }
    region->pages_ = std::shared_ptr<std::byte>(
        static_cast<std::byte*>(raw), [bytes](std::byte* pages) { ::munmap(pages, bytes); });
  }
  region->id_ = RandomU64();
  region->incarnation_ = incarnation;
  region->bytes_ = bytes;
  region->hub_ = std::move(hub);
  region->hub_->AddRegion(region->id_, region);
  return region;
}

Region::~Region() {
  if (hub_ != nullptr) hub_->RemoveRegion(id_);
}

std::string Region::blob() const {
  WireWriter writer;
  writer.U32(kBlobMagic);
  writer.U64(id_);
  return writer.Take();
}

Result<uint64_t> Region::ParseBlob(std::string_view blob) {
  WireReader reader(blob);
  uint32_t magic = reader.U32();
  uint64_t id = reader.U64();
  if (!reader.done() || magic != kBlobMagic) {
    return Status(
        Code::kInvalidArgument,
        "not the description of a memory region; import it by the transport that made it");
  }
  return id;
}

Result<std::string> Endpoint::Listen(PeerHandler* handler) {
  BASCULE_ASSIGN_OR_RETURN(std::unique_ptr<WorkerPool> pool, WorkerPool::Start(kHandlerThreads));
  std::lock_guard lock(mutex_);
  if (service_ != nullptr) {
    return Status(Code::kInvalidArgument, "Listen was called before on this transport");
  }
  service_ = std::make_shared<Service>();
  service_->handler = handler;
  service_->pool = std::move(pool);
  address_ = "memory:" + RandomHex(8);
  return address_;
}

std::string Endpoint::address() const {
  std::lock_guard lock(mutex_);
  return address_;
}

Result<std::shared_ptr<Link>> Endpoint::Accept(const TransportIdentity& client,
                                               uint64_t incarnation) {
  auto fail = [this](Code code, std::string why) {
    return Status(code, std::move(why)).WithPeer(identity_.name);
  };
  if (client.token != identity_.token) {
    return fail(Code::kPermissionDenied, "the job token does not match; start both sides with one");
  }
  if (client.job != identity_.job) {
    return fail(Code::kPermissionDenied, fmt::format("the peer belongs to job '{}', not to '{}'",
                                                     identity_.job, client.job));
  }
  if (incarnation != identity_.incarnation) {
    return fail(Code::kStaleTerm,
                fmt::format("the address belongs to incarnation {:016x}, not to {:016x}; ask the "
                            "directory again",
                            identity_.incarnation, incarnation));
  }
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    if (dead_ || service_ == nullptr) return fail(Code::kUnavailable, "the peer is gone");
    link = std::make_shared<Link>(identity_.name + " (memory)", service_);
  }
  Remember(link);
  return link;
}

void Endpoint::Remember(const std::shared_ptr<Link>& link) {
  bool dead = false;
  {
    std::lock_guard lock(mutex_);
    dead = dead_;
    std::erase_if(links_, [](const std::weak_ptr<Link>& old) { return old.expired(); });
    links_.push_back(link);
  }
  if (dead) link->Break("the peer is gone");
}

void Endpoint::BreakLinks(const std::string& why) {
  std::vector<std::weak_ptr<Link>> links;
  {
    std::lock_guard lock(mutex_);
    links.swap(links_);
  }
  for (auto& weak : links) {
    if (auto link = weak.lock()) link->Break(why);
  }
}

void Endpoint::Die(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    dead_ = true;
  }
  BreakLinks(why);
}

Status Endpoint::CheckLiving() const {
  std::lock_guard lock(mutex_);
  return dead_ ? Status(Code::kClosed, "this transport was killed") : Status::Ok();
}

void Endpoint::StopService() {
  std::shared_ptr<Service> service;
  {
    std::lock_guard lock(mutex_);
    service = service_;
  }
  if (service != nullptr) service->pool->Stop();
}

std::shared_ptr<Imported> Endpoint::Open(uint64_t id, const std::shared_ptr<Region>& region) {
  std::lock_guard lock(mutex_);
  std::erase_if(imports_, [](const auto& item) { return item.second.expired(); });
  std::weak_ptr<Imported>& known = imports_[id];
  std::shared_ptr<Imported> imported = known.lock();
  if (imported == nullptr) {
    imported = std::make_shared<Imported>(kind_, region);
    known = imported;
  }
  return imported;
}

}  // namespace bascule::memory
