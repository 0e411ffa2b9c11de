// Terms, memberships and blobs of the coordinator.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "coordinator/core.h"

namespace bascule {

// A member speaks of term `highest`; `joined` is the one that it rejoins, or 0.
void CoordinatorCore::ReportTerm(uint64_t highest, uint64_t joined) {
  const bool newest = highest > current_ && highest >= highest_term_;
  highest_term_ = std::max(highest_term_, highest);
  if (highest <= current_) return;
  const auto current = terms_.find(current_);
  const bool continued = current == terms_.end() || current->second.adopted;
  if (joined == highest && newest && continued) {
    // The term of an earlier coordinator's life goes on here.
    if (current != terms_.end()) current->second.over = fmt::format("term {} is newer", joined);
    current_ = joined;
    terms_[joined].adopted = true;
    BumpEpoch();
    JudgeAll();
  } else if (continued && !settled_) {
    // There was a newer term than the one adopted so far; its ranks may yet rejoin.
    if (current_ == 0) return;
    current->second.over = fmt::format("a member reported the newer term {}", highest);
    current_ = 0;
    BumpEpoch();
  } else if (current_ != 0) {
    OpenTerm(fmt::format("a member reported the higher term {}", highest));
  }
}

void CoordinatorCore::OpenTerm(const std::string& why) {
  if (auto current = terms_.find(current_); current != terms_.end()) {
    current->second.over = why;
    if (current->second.world_size == 0 && current->second.versions.empty()) terms_.erase(current);
  }
  // Milliseconds, then random bits: two lives of a coordinator whose clock stepped back do not meet
  // on one number.
  const auto wall_ms = static_cast<uint64_t>(std::max<int64_t>(0, now_.wall_ns / 1'000'000));
  const uint64_t random = Mix64(options_.seed + ++draws_ * 0x9E3779B97F4A7C15u) & 1023;
  current_ = std::max((wall_ms << 10) | random, highest_term_ + 1);
  highest_term_ = current_;
  terms_[current_] = TermRecord();
  if (options_.record_events) Event(fmt::format("term {} opens: {}", current_, why));
  BumpEpoch();
  JudgeAll();
}

// Old terms go when nobody holds anything of them any more; the last few are kept to tell what
// became of their versions.
void CoordinatorCore::ForgetTerms() {
  constexpr size_t kKeptAnyway = 4;
  size_t old = terms_.size() - terms_.count(current_);
  for (auto term = terms_.begin(); term != terms_.end();) {
    bool needed = term->first == current_ || old <= kKeptAnyway;
    if (!needed && old <= options_.limits.old_terms) {
      needed = !settled_;
      for (const auto& [number, version] : term->second.versions) {
        needed = needed || version.state == VersionState::kOpen ||
                 version.state == VersionState::kAvailable;
      }
      for (const Seat& seat : term->second.seats) {
        const auto member = members_.find(seat.incarnation);
        needed = needed || (member != members_.end() && member->second.term == term->first);
      }
    }
    if (needed) {
      ++term;
    } else {
      term = terms_.erase(term);
      --old;
      ++changes_;
    }
  }
}

Membership CoordinatorCore::Snapshot(VersionId id) const {
  Membership past;
  past.epoch = epoch_;
  past.term = id.term;
  if (const auto found = terms_.find(id.term); found != terms_.end()) {
    const TermRecord& term = found->second;
    past.complete = term.complete;
    const auto version = term.versions.find(id.version);
    for (const Seat& seat : term.seats) {
      if (members_.count(seat.incarnation) == 0) continue;
      const MemberInfo* info = seat.info.get();
      if (version != term.versions.end()) {
        const auto hold = version->second.holds.find(seat.incarnation);
        if (hold != version->second.holds.end()) info = hold->second.info.get();
      }
      past.members.push_back(*info);
    }
  }
  for (const auto& [key, incarnation] : rollouts_) {
    past.members.push_back(*members_.at(incarnation).info);
  }
  return past;
}

bool CoordinatorCore::HasOwnMembership(VersionId id) const {
  if (id.term != current_) return true;
  if (id.version == 0) return false;
  const auto term = terms_.find(id.term);  // none before the first Join
  if (term == terms_.end()) return false;
  const auto version = term->second.versions.find(id.version);
  if (version == term->second.versions.end()) return false;
  const auto& seats = term->second.seats;
  return std::any_of(seats.begin(), seats.end(), [&](const Seat& seat) {
    const auto hold = version->second.holds.find(seat.incarnation);
    return hold != version->second.holds.end() && !hold->second.revoked &&
           hold->second.info->layout_serial != seat.info->layout_serial &&
           members_.count(seat.incarnation) != 0;
  });
}

CoordinatorCore::SharedMembership CoordinatorCore::Keep(VersionId id) {
  if (!HasOwnMembership(id)) id.version = 0;
  const PastKey key{epoch_, id};
  if (const auto past = past_.find(key); past != past_.end()) return past->second;
  auto made = std::make_shared<const Membership>(Snapshot(id));
  past_[key] = made;
  past_order_.push_back(key);
  if (past_order_.size() > options_.limits.memberships) {
    past_.erase(past_order_.front());
    past_order_.pop_front();
  }
  return made;
}

CoordinatorCore::SharedMembership CoordinatorCore::Members(CoordinatorTime now) {
  Begin(now);
  return Keep({current_, 0});
}

Result<CoordinatorCore::SharedMembership> CoordinatorCore::MembersFor(VersionId id, uint64_t epoch,
                                                                      CoordinatorTime now) {
  Begin(now);
  if (id.term != current_ && terms_.count(id.term) == 0) {
    return Status(Code::kNotFound, fmt::format("nobody holds versions of term {}", id.term));
  }
  if (epoch == 0) epoch = epoch_;
  // Its own one first: what Poll answered at that epoch.
  for (const PastKey& key : {PastKey{epoch, id}, PastKey{epoch, {id.term, 0}}}) {
    if (const auto past = past_.find(key); past != past_.end()) return past->second;
  }
  if (epoch == epoch_) return Keep(id);
  return Status(Code::kNotFound,
                fmt::format("the membership of epoch {} is kept no more (now {}); poll again",
                            epoch, epoch_));
}

std::optional<Result<CoordinatorCore::SharedMembership>> CoordinatorCore::WaitComplete(
    uint64_t incarnation, CoordinatorTime now) {
  Begin(now);
  const Result<MemberRecord*> member = Find(incarnation);
  if (!member.ok()) return Result<SharedMembership>(member.status());
  if (IsStale(**member)) return Result<SharedMembership>(StaleTerm(**member));
  const auto term = terms_.find(current_);
  if (term == terms_.end() || !term->second.complete || !settled_) return std::nullopt;
  return Result<SharedMembership>(Keep({current_, 0}));
}

Status CoordinatorCore::NotComplete() const {
  const auto term = terms_.find(current_);
  if (term == terms_.end() || term->second.world_size == 0) {
    return Status(Code::kDeadlineExceeded, "no trainer rank has joined");
  }
  std::string missing;
  int named = 0;
  for (uint32_t rank = 0; rank < term->second.world_size && named <= 8; ++rank) {
    if (term->second.seats[rank].incarnation != 0) continue;
    missing += missing.empty() ? "" : ", ";
    missing += ++named > 8 ? "..." : std::to_string(rank);
  }
  if (missing.empty())
    missing = "none, but the coordinator restarted and waits for others to rejoin";
  return Status(Code::kDeadlineExceeded,
                fmt::format("{} of {} trainer ranks have joined; missing: {}", term->second.filled,
                            term->second.world_size, missing));
}

Status CoordinatorCore::NotEnded(VersionId id) const {
  const auto term = terms_.find(id.term);
  if (term == terms_.end() || term->second.versions.count(id.version) == 0) {
    return Status(Code::kDeadlineExceeded,
                  fmt::format("nobody has reported version {} of term {}", id.version, id.term));
  }
  const VersionRecord& version = term->second.versions.at(id.version);
  return Status(Code::kDeadlineExceeded,
                fmt::format("version {} is open still; waiting for {}{}", id.version,
                            Seats(Part::kMayHold, id, term->second, version),
                            settled_ ? "" : " (the coordinator restarted lately)"));
}

Status CoordinatorCore::PutBlob(const ContentDigest& digest,
                                std::shared_ptr<const std::string> bytes, CoordinatorTime now) {
  Begin(now);
  const CoordinatorLimits& limits = options_.limits;
  if (bytes->size() > limits.blob_bytes) {
    return Status(Code::kResourceExhausted, fmt::format("a blob of {} bytes; the limit is {}",
                                                        bytes->size(), limits.blob_bytes));
  }
  const auto found = blobs_.find(digest);
  if (found != blobs_.end()) {
    found->second.unused_since_ms = now_.steady_ms;
    found->second.unused_since_epoch = epoch_;
    return Status::Ok();
  }
  if (blobs_.size() >= limits.blobs || blob_bytes_ + bytes->size() > limits.all_blob_bytes) {
    return Status(Code::kResourceExhausted,
                  fmt::format("the coordinator keeps {} blobs of {} bytes already", blobs_.size(),
                              blob_bytes_));
  }
  blob_bytes_ += bytes->size();
  blobs_[digest] = {std::move(bytes), now_.steady_ms, epoch_, false};
  collected_ = ~uint64_t{0};
  return Status::Ok();
}

bool CoordinatorCore::HasBlob(const ContentDigest& digest) const {
  return blobs_.count(digest) != 0;
}

Result<std::shared_ptr<const std::string>> CoordinatorCore::GetBlob(
    const ContentDigest& digest) const {
  const auto blob = blobs_.find(digest);
  if (blob != blobs_.end()) return blob->second.bytes;
  return Status(Code::kNotFound, fmt::format("no blob {}", digest.ToString()));
}

std::vector<ContentDigest> CoordinatorCore::StoredBlobs() const {
  std::vector<ContentDigest> digests;
  for (const auto& [digest, blob] : blobs_) digests.push_back(digest);
  return digests;
}

// Drops blobs that no member and no version has referred to for a while and at least one epoch.
void CoordinatorCore::CollectBlobs() {
  constexpr int64_t kGraceHeartbeats = 60;
  if (blobs_.empty()) return;
  if (collected_ != changes_) {
    collected_ = changes_;
    std::set<ContentDigest> used;
    for (const auto& [incarnation, member] : members_) used.insert(member.info->world_template);
    for (const auto& [id, term] : terms_) {
      for (const Seat& seat : term.seats) {
        if (seat.info != nullptr) used.insert(seat.info->world_template);
      }
      for (const auto& [number, version] : term.versions) {
        for (const auto& [incarnation, hold] : version.holds) {
          used.insert(hold.info->world_template);
        }
      }
    }
    for (auto& [digest, blob] : blobs_) {
      const bool in_use = used.count(digest) != 0;
      if (blob.used && !in_use) {
        blob.unused_since_ms = now_.steady_ms;
        blob.unused_since_epoch = epoch_;
      }
      blob.used = in_use;
    }
  }
  for (auto blob = blobs_.begin(); blob != blobs_.end();) {
    const Blob& item = blob->second;
    const int64_t age = now_.steady_ms - item.unused_since_ms;
    if (!item.used && epoch_ > item.unused_since_epoch &&
        age > kGraceHeartbeats * options_.heartbeat_ms) {
      blob_bytes_ -= item.bytes->size();
      blob = blobs_.erase(blob);
    } else {
      ++blob;
    }
  }
}

}  // namespace bascule
