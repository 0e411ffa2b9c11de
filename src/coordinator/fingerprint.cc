// The hash of the coordinator's state, for model checkers.
#include "coordinator/core.h"

namespace bascule {
namespace {

class Hasher {
 public:
  explicit Hasher(int64_t now_ms) : now_ms_(now_ms) {}
  void Add(uint64_t value) { hash_ = Mix64(hash_ ^ value) + 0x9E3779B97F4A7C15u; }
  void Add(const std::string& text) {
    Add(text.size());
    Add(TensorKey(text));
  }
  void Add(VersionId id) {
    Add(id.term);
    Add(id.version);
  }
  // States that differ only in when they were reached are one.
  void AddAge(int64_t at_ms) { Add(static_cast<uint64_t>(now_ms_ - at_ms)); }
  void Add(const MemberInfo& info) {
    Add(static_cast<uint64_t>(info.role));
    Add(info.engine);
    Add(info.rank);
    Add(info.world_size);
    Add(info.incarnation);
    Add(info.layout_serial);
    Add(info.node);
    Add(info.world_template.high ^ info.world_template.low);
    Add(info.coordinates.size());
    for (uint32_t coordinate : info.coordinates) Add(coordinate);
    Add(info.addresses.size());
    for (const TransportAddress& address : info.addresses) {
      Add(address.transport);
      Add(address.address);
    }
    Add(info.channel);
  }
  [[nodiscard]] uint64_t hash() const { return hash_; }

 private:
  int64_t now_ms_;
  uint64_t hash_ = 0;
};

}  // namespace

uint64_t CoordinatorCore::Fingerprint() const {
  Hasher hasher(now_.steady_ms);
  hasher.Add(settled_ ? 1 : 0);
  if (!GraceOver()) hasher.AddAge(options_.start.steady_ms);
  hasher.Add(current_);
  hasher.Add(highest_term_);
  hasher.Add(epoch_);
  hasher.Add(members_.size());
  for (const auto& [incarnation, member] : members_) {
    hasher.Add(*member.info);
    hasher.Add(member.term);
    hasher.AddAge(member.last_seen_ms);
    hasher.Add(member.serving);
    hasher.Add(member.servable ? 1 : 0);
    hasher.Add(member.newest_held);
  }
  hasher.Add(gone_.size());
  for (const auto& [incarnation, gone] : gone_) hasher.Add(incarnation);
  hasher.Add(terms_.size());
  for (const auto& [id, term] : terms_) {
    hasher.Add(id);
    hasher.Add(term.world_size);
    hasher.Add((term.adopted ? 1 : 0) | (term.complete ? 4 : 0));
    hasher.Add(term.forgotten);
    for (const Seat& seat : term.seats) {
      hasher.Add(seat.incarnation);
      if (seat.info != nullptr) hasher.Add(seat.info->layout_serial);
    }
    hasher.Add(term.versions.size());
    for (const auto& [number, version] : term.versions) {
      hasher.Add(number);
      hasher.Add(static_cast<uint64_t>(version.state));
      hasher.Add((version.covered ? 1 : 0) | (version.mismatch.empty() ? 0 : 2) |
                 (version.inherited ? 4 : 0));
      if (version.deadline_ms.has_value()) hasher.AddAge(*version.deadline_ms);
      hasher.Add(version.holds.size());
      for (const auto& [incarnation, hold] : version.holds) {
        hasher.Add(incarnation);
        hasher.Add(hold.sums_hash);
        hasher.Add(hold.info->layout_serial);
        hasher.Add((hold.revoked ? 1 : 0) | (hold.missed << 1));
      }
    }
  }
  hasher.Add(blobs_.size());
  for (const auto& [digest, blob] : blobs_) hasher.Add(digest.high ^ digest.low);
  return hasher.hash();
}

}  // namespace bascule
