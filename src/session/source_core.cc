#include "session/source_core.h"

#include <fmt/format.h>

#include "digest/digest.h"

namespace bascule {

Result<SourceCore::Begin> SourceCore::BeginPublish(VersionId id, int64_t now_ms, bool insist) {
  if (id <= newest_) {
    return Status(Code::kInvalidArgument,
                  fmt::format("version {} does not increase: version {} of term {} was published "
                              "before; publish a higher version",
                              id.version, newest_.version, newest_.term));
  }
  std::optional<uint32_t> free;
  std::optional<uint32_t> oldest;
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    switch (slots_[i].state) {
      case SlotState::kFilling:
      case SlotState::kRevoking: return Begin{Step::kBusy, i, {}};
      case SlotState::kFree:
        if (!free) free = i;
        break;
      case SlotState::kHeld:
        if (!oldest || slots_[i].id < slots_[*oldest].id) oldest = i;
        break;
    }
  }
  if (free) {
    slots_[*free].state = SlotState::kFilling;
    slots_[*free].id = id;
    return Begin{Step::kFill, *free, {}};
  }
  VersionId victim = slots_[*oldest].id;
  if (!insist && LeaseProgresses(victim, now_ms)) return Begin{Step::kWait, *oldest, {}};
  uint32_t slot = 0;
  (void)BeginRevoke(victim, &slot);
  return Begin{Step::kRevoke, slot, victim};
}

void SourceCore::Filled(uint32_t slot) {
  Slot& s = slots_[slot];
  s.state = SlotState::kHeld;
  ++s.generation;
  if (newest_ < s.id) newest_ = s.id;
}

void SourceCore::FillFailed(uint32_t slot) {
  slots_[slot].state = SlotState::kFree;
  slots_[slot].id = {};
}

bool SourceCore::BeginRevoke(VersionId id, uint32_t* slot) {
  auto found = Find(id);
  if (!found) return false;
  slots_[*found].state = SlotState::kRevoking;
  ++slots_[*found].generation;
  *slot = *found;
  return true;
}

void SourceCore::EndRevoke(uint32_t slot) {
  VersionId id = slots_[slot].id;
  std::erase_if(leases_, [id](const auto& lease) { return lease.first.first == id; });
  slots_[slot].state = SlotState::kFree;
  slots_[slot].id = {};
}

bool SourceCore::Lease(uint64_t reader, VersionId id, int64_t now_ms) {
  if (!Find(id)) return false;
  leases_[{id, reader}] = now_ms;
  return true;
}

void SourceCore::EndLease(uint64_t reader, VersionId id) { leases_.erase({id, reader}); }

void SourceCore::EndLeases(uint64_t reader) {
  std::erase_if(leases_, [reader](const auto& lease) { return lease.first.second == reader; });
}

bool SourceCore::Leased(VersionId id) const {
  auto it = leases_.lower_bound({id, 0});
  return it != leases_.end() && it->first.first == id;
}

bool SourceCore::LeaseProgresses(VersionId id, int64_t now_ms) const {
  for (auto it = leases_.lower_bound({id, 0}); it != leases_.end() && it->first.first == id; ++it) {
    if (now_ms - it->second < kLeaseProgressMs) return true;
  }
  return false;
}

std::optional<uint32_t> SourceCore::Find(VersionId id) const {
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state == SlotState::kHeld && slots_[i].id == id) return i;
  }
  return std::nullopt;
}

uint64_t SourceCore::Fingerprint() const {
  uint64_t hash = Mix64(newest_.term * 31 + newest_.version);
  auto mix = [&hash](uint64_t value) { hash = Mix64(hash ^ (value + 0x9E3779B97F4A7C15u)); };
  for (const Slot& slot : slots_) {
    mix(static_cast<uint64_t>(slot.state));
    mix(slot.id.term);
    mix(slot.id.version);
    mix(slot.generation);
  }
  for (const auto& [key, when] : leases_) {
    mix(key.first.version);
    mix(key.second);
  }
  return hash;
}

}  // namespace bascule
