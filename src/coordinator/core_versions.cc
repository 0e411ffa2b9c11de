// Versions of the coordinator: OPEN -> AVAILABLE -> RETIRED, or OPEN -> ABORTED.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "coordinator/core.h"

namespace bascule {
namespace {

uint64_t HashOf(const std::vector<Sum>& sums) {
  uint64_t hash = Mix64(sums.size() + 1);
  for (const Sum& sum : sums) hash = Mix64(Mix64(hash ^ sum.digest) + sum.elements);
  return hash;
}

}  // namespace

CoordinatorCore::VersionRecord* CoordinatorCore::FindVersion(VersionId id) {
  const auto term = terms_.find(id.term);
  if (term == terms_.end()) return nullptr;
  const auto version = term->second.versions.find(id.version);
  return version == term->second.versions.end() ? nullptr : &version->second;
}

VersionReply CoordinatorCore::ReplyOf(const VersionRecord& version) const {
  return {version.state, version.reason, version.publish_start_ns, version.epoch};
}

CoordinatorCore::VersionRecord* CoordinatorCore::Ensure(VersionId id) {
  const auto [found, made] = terms_.try_emplace(id.term);
  TermRecord& term = found->second;
  if (made) {
    // Only members of an earlier coordinator's life know of it.
    term.adopted = term.complete = true;
    term.over = "a newer one opened";
  }
  if (id.version <= term.forgotten) return nullptr;
  VersionRecord& version = term.versions[id.version];
  while (term.versions.size() > options_.limits.versions_a_term) {
    const auto oldest = term.versions.begin();
    term.forgotten = oldest->first;
    term.versions.erase(oldest);
    ++changes_;
    if (term.forgotten == id.version) return nullptr;
  }
  return &version;
}

void CoordinatorCore::End(VersionRecord& version, VersionState state, std::string reason) {
  version.state = state;
  version.reason = std::move(reason);
  if (options_.record_events && state != VersionState::kAvailable) {
    Event((state == VersionState::kAborted ? "a version is aborted: " : "a version is retired: ") +
          version.reason);
  }
  version.covered = state == VersionState::kAvailable;
  version.judged_losses = losses_;
  if (state == VersionState::kAvailable) {
    for (auto& [incarnation, hold] : version.holds) hold.sums = nullptr;
  } else {
    version.holds.clear();
    version.first_of_group.clear();
  }
  ++changes_;
}

// What a member was told in an earlier coordinator's life stays true.
void CoordinatorCore::ApplyTold(VersionRecord& version, VersionState told, const std::string& by) {
  if (version.state != VersionState::kOpen) return;
  switch (told) {
    case VersionState::kUnknown:
    case VersionState::kOpen: return;
    case VersionState::kAvailable:
      End(version, told, "");
      version.covered = false;  // judged when the ranks have rejoined
      return;
    case VersionState::kAborted:
    case VersionState::kRetired:
      End(version, told, fmt::format("{} was told so before the coordinator restarted", by));
      return;
  }
}

void CoordinatorCore::Report(uint64_t incarnation, const MemberState& state) {
  MemberRecord& member = members_.at(incarnation);
  const MemberInfo& info = *member.info;
  const std::string by = NameOf(info);
  for (const HeldVersion& told : state.told) {
    if (told.id.none()) continue;
    // A term that nobody else knows of is not worth a record once all could have spoken of it.
    if (settled_ && terms_.count(told.id.term) == 0) continue;
    if (told.told < VersionState::kAvailable || told.told > VersionState::kRetired) continue;
    VersionRecord* version = Ensure(told.id);
    if (version == nullptr) continue;
    version->inherited = true;
    ApplyTold(*version, told.told, by);
  }
  if (info.role == Role::kRollout) {
    const VersionId serving = state.serving;
    if (serving.none() || (settled_ && terms_.count(serving.term) == 0)) return;
    if (VersionRecord* version = Ensure(serving)) ApplyTold(*version, VersionState::kAvailable, by);
    return;
  }
  for (const HeldVersion& held : state.held) {
    if (held.id.none()) continue;
    VersionRecord* version = Ensure(held.id);
    if (version == nullptr) continue;
    version->inherited = true;
    ApplyTold(*version, held.told, by);
    TermRecord& term = terms_.at(held.id.term);
    if (held.id.term == member.term) {
      member.newest_held = std::max(member.newest_held, held.id.version);
    } else if (term.world_size == 0 ||
               (term.world_size == info.world_size && term.seats[info.rank].incarnation == 0)) {
      TakeSeat(held.id.term, member.info);
    }
    const bool seated =
        term.world_size > info.rank && term.seats[info.rank].incarnation == incarnation;
    // Of a layout that it has since left nothing is known here: no holder.
    if (!seated || held.layout_serial != info.layout_serial) continue;
    if (version->state == VersionState::kAborted || version->state == VersionState::kRetired) {
      continue;
    }
    const Status added = AddHold(member, held, term, *version);
    if (!added.ok() && version->state == VersionState::kOpen) version->mismatch = added.message();
  }
}

Status CoordinatorCore::CompareReplicas(const Hold& hold, const Hold& other,
                                        const std::vector<Sum>& sums) const {
  if (hold.sums_hash == other.sums_hash) return Status::Ok();
  std::string tensor;
  std::string where = "in a tensor that is not known any more";
  if (other.sums != nullptr && (other.sums->empty() || sums.empty())) return Status::Ok();
  if (other.sums != nullptr && other.sums->size() == sums.size()) {
    const auto differ = std::mismatch(sums.begin(), sums.end(), other.sums->begin()).first;
    const auto bucket = static_cast<size_t>(differ - sums.begin());
    where = "in " + options_.oracle->BucketName(*hold.info, bucket, sums.size(), &tensor);
  }
  return Status(Code::kDataLoss,
                fmt::format("replicas differ: {} and {} hold the same boxes but not the same "
                            "values, {}; see that data-parallel ranks apply the same update",
                            NameOf(*other.info), NameOf(*hold.info), where))
      .WithRank(static_cast<int>(hold.info->rank))
      .WithPeer(NameOf(*other.info))
      .WithTensor(tensor);
}

// Records that a member holds a version; an error where its replicas hold other values (OPEN: it is
// recorded all the same).
Status CoordinatorCore::AddHold(const MemberRecord& member, const HeldVersion& held,
                                TermRecord& term, VersionRecord& version) {
  const uint64_t incarnation = member.info->incarnation;
  Hold hold;
  hold.info = member.info;
  hold.sums_hash = HashOf(held.replica_sums);
  if (const auto known = version.holds.find(incarnation); known != version.holds.end()) {
    if (known->second.sums_hash == hold.sums_hash) return Status::Ok();
    return Status(Code::kInvalidArgument,
                  fmt::format("{} reported version {} twice, with different sums",
                              NameOf(*member.info), held.id.version))
        .WithRank(static_cast<int>(member.info->rank));
  }
  const uint64_t group = term.seats[member.info->rank].group;
  const auto [first, is_first] = version.first_of_group.try_emplace(group, incarnation);
  Status same;
  if (!is_first) same = CompareReplicas(hold, version.holds.at(first->second), held.replica_sums);
  if (!same.ok() && version.state != VersionState::kOpen) return same;
  if (is_first && version.state == VersionState::kOpen) {
    const auto peers = std::count_if(term.seats.begin(), term.seats.end(),
                                     [group](const Seat& seat) { return seat.group == group; });
    if (peers > 1 || term.filled < term.world_size) {
      hold.sums = std::make_shared<const std::vector<Sum>>(held.replica_sums);
    }
  }
  if (version.holds.empty() && version.epoch == 0) version.epoch = held.epoch;
  if (version.publish_start_ns == 0 ||
      (held.publish_start_ns != 0 && held.publish_start_ns < version.publish_start_ns)) {
    version.publish_start_ns = held.publish_start_ns;
  }
  if (held.deadline_ns != 0) {
    const int64_t deadline = now_.steady_ms + (held.deadline_ns - now_.wall_ns) / 1'000'000;
    version.deadline_ms = std::max(version.deadline_ms.value_or(deadline), deadline);
  }
  version.holds[incarnation] = std::move(hold);
  ++changes_;
  return same;
}

Result<VersionReply> CoordinatorCore::Held(const HeldRequest& request, CoordinatorTime now) {
  Begin(now);
  if (request.token != options_.token) {
    return Status(Code::kPermissionDenied, "the job token does not match");
  }
  BASCULE_ASSIGN_OR_RETURN(MemberRecord * member, Find(request.incarnation));
  const VersionId id = request.held.id;
  const MemberInfo& info = *member->info;
  auto invalid = [&info](const std::string& what) {
    return Status(Code::kInvalidArgument, what).WithRank(static_cast<int>(info.rank));
  };
  if (info.role != Role::kTrainer) return invalid("only trainers publish");
  if (IsStale(*member)) return StaleTerm(*member);
  if (id.term != current_) {
    return Status(Code::kStaleTerm, fmt::format("version {} is of term {}; the term is {}",
                                                id.version, id.term, current_))
        .WithRank(static_cast<int>(info.rank));
  }
  if (id.version == 0) return invalid("version 0 is none; number versions from 1");
  if (request.held.replica_sums.size() > kReplicaBuckets) {
    return invalid(fmt::format("{} replica sums; the limit is {}", request.held.replica_sums.size(),
                               kReplicaBuckets));
  }
  TermRecord& term = terms_.at(current_);
  if (!term.complete && !term.adopted) {
    return Status(
        Code::kUnavailable,
        fmt::format("{} of {} trainer ranks have joined; the term publishes once all have",
                    term.filled, term.world_size));
  }
  if (request.held.layout_serial != info.layout_serial) {
    return invalid(fmt::format("{} reports version {} under its layout {}, but its layout is {}",
                               NameOf(info), id.version, request.held.layout_serial,
                               info.layout_serial));
  }
  VersionRecord* version = FindVersion(id);
  const bool ended = version != nullptr && (version->state == VersionState::kAborted ||
                                            version->state == VersionState::kRetired);
  if (ended) {
    member->newest_held = std::max(member->newest_held, id.version);
    return ReplyOf(*version);
  }
  const bool repeated = version != nullptr && version->holds.count(request.incarnation) != 0;
  if (!repeated && (id.version < member->newest_held || id.version <= term.forgotten)) {
    return invalid(fmt::format("{} publishes version {} after {}; versions must rise within a term",
                               NameOf(info), id.version,
                               std::max(member->newest_held, term.forgotten)));
  }
  if (version == nullptr) version = Ensure(id);
  if (version == nullptr) return invalid("too many versions are open");
  member->newest_held = std::max(member->newest_held, id.version);
  HeldVersion held = request.held;
  if (held.deadline_ns == 0) held.deadline_ns = request.deadline_ns;
  const Status added = AddHold(*member, held, term, *version);
  if (!added.ok()) {
    if (added.code() != Code::kDataLoss || version->state != VersionState::kOpen) return added;
    version->mismatch = added.message();
  }
  Judge(id);
  return ReplyOf(*version);
}

Status CoordinatorCore::Revoked(uint64_t incarnation, VersionId id, CoordinatorTime now) {
  Begin(now);
  // A rank of an old term, too, must be able to take its memory back.
  BASCULE_RETURN_IF_ERROR(Find(incarnation).status());
  VersionRecord* version = FindVersion(id);
  if (version == nullptr) return Status::Ok();
  const auto hold = version->holds.find(incarnation);
  if (hold == version->holds.end() || hold->second.revoked) return Status::Ok();
  hold->second.revoked = true;
  ++losses_;
  ++changes_;
  Judge(id);
  return Status::Ok();
}

std::optional<Result<VersionReply>> CoordinatorCore::QueryVersion(uint64_t incarnation,
                                                                  VersionId id, bool wait,
                                                                  CoordinatorTime now) {
  Begin(now);
  const Result<MemberRecord*> member = Find(incarnation);
  if (!member.ok()) return Result<VersionReply>(member.status());
  const VersionRecord* version = FindVersion(id);
  if (version != nullptr && version->state != VersionState::kOpen) {
    return Result<VersionReply>(ReplyOf(*version));
  }
  const auto term = terms_.find(id.term);
  const bool forgotten =
      version == nullptr && settled_ &&
      (id.term < current_ || (term != terms_.end() && id.version <= term->second.forgotten));
  if (wait && !forgotten) return std::nullopt;
  if (version != nullptr) return Result<VersionReply>(ReplyOf(*version));
  VersionReply reply;
  if (forgotten) reply.reason = "the version is too old to be known";
  return Result<VersionReply>(reply);
}

Result<PollReply> CoordinatorCore::Poll(uint64_t incarnation, VersionId newer_than, bool or_equal,
                                        CoordinatorTime now) {
  Begin(now);
  BASCULE_RETURN_IF_ERROR(Find(incarnation).status());
  PollReply reply;
  reply.epoch = epoch_;
  for (auto term = terms_.rbegin(); term != terms_.rend(); ++term) {
    const auto& versions = term->second.versions;
    for (auto version = versions.rbegin(); version != versions.rend(); ++version) {
      const VersionId id{term->first, version->first};
      if (id < newer_than || (id == newer_than && !or_equal)) return reply;
      if (version->second.state != VersionState::kAvailable || !version->second.covered) continue;
      reply.offered = true;
      reply.id = id;
      reply.own_membership = HasOwnMembership(id);
      reply.publish_start_ns = version->second.publish_start_ns;
      Keep(id);
      return reply;
    }
  }
  return reply;
}

CoordinatorCore::Part CoordinatorCore::PartOfSeat(const Seat& seat, VersionId id,
                                                  const VersionRecord& version) const {
  const auto member = members_.find(seat.incarnation);
  if (member == members_.end()) return Part::kLost;
  if (const auto hold = version.holds.find(seat.incarnation); hold != version.holds.end()) {
    return hold->second.revoked ? Part::kLost : Part::kHolds;
  }
  // One that moved on to another term or a newer version will never hold it.
  const bool passed = member->second.term != id.term || member->second.newest_held > id.version;
  return passed ? Part::kLost : Part::kMayHold;
}

bool CoordinatorCore::Covered(VersionId id, const TermRecord& term, const VersionRecord& version,
                              bool may_hold) const {
  std::vector<const MemberInfo*> world;
  std::vector<const MemberInfo*> holders;
  bool known = term.world_size != 0;
  for (const Seat& seat : term.seats) {
    if (seat.incarnation == 0) {
      known = false;
      continue;
    }
    const auto hold = version.holds.find(seat.incarnation);
    const MemberInfo* info =
        hold != version.holds.end() ? hold->second.info.get() : seat.info.get();
    world.push_back(info);
    const Part part = PartOfSeat(seat, id, version);
    // Rollouts that serve the version (MemberRecord::serving) become holders here.
    if (part == Part::kHolds || (may_hold && part == Part::kMayHold)) holders.push_back(info);
  }
  if (known) return options_.oracle->Covers(holders, world);
  // Ranks that this coordinator never saw: what they held is known only if templates tell.
  std::map<ContentDigest, std::vector<MemberInfo>> expanded;
  for (const MemberInfo* info : world) {
    if (expanded.count(info->world_template) == 0) {
      expanded[info->world_template] = options_.oracle->World(*info);
    }
  }
  size_t ranks = 0;
  for (const auto& [digest, members] : expanded) {
    ranks += members.size();
    for (const MemberInfo& member : members) world.push_back(&member);
  }
  return term.world_size != 0 && ranks >= term.world_size &&
         options_.oracle->Covers(holders, world);
}

std::string CoordinatorCore::Seats(Part part, VersionId id, const TermRecord& term,
                                   const VersionRecord& version) const {
  std::string text;
  int named = 0;
  for (uint32_t rank = 0; rank < term.seats.size(); ++rank) {
    const Seat& seat = term.seats[rank];
    if (PartOfSeat(seat, id, version) != part) continue;
    if (++named > 8) return text + ", ...";
    const auto gone = gone_.find(seat.incarnation);
    std::string why;
    if (seat.incarnation == 0) {
      why = "did not rejoin";
    } else if (gone != gone_.end()) {
      why = gone->second.why;
    } else if (version.holds.count(seat.incarnation) != 0) {
      why = part == Part::kHolds ? "holds it" : "revoked it";
    } else {
      why = part == Part::kMayHold ? "has not reported it" : "passed it by";
    }
    text += fmt::format("{}trainer {} ({})", text.empty() ? "" : ", ", rank, why);
  }
  return text.empty() ? "none" : text;
}

void CoordinatorCore::JudgeOpen(VersionId id, const TermRecord& term, VersionRecord& version) {
  if (version.inherited && !GraceOver()) return;
  if (id.term != current_) {
    return End(version, VersionState::kAborted,
               fmt::format("term {} is over: {}", id.term, term.over));
  }
  if (!version.mismatch.empty()) return End(version, VersionState::kAborted, version.mismatch);
  if (version.deadline_ms.has_value() && now_.steady_ms >= *version.deadline_ms) {
    return End(version, VersionState::kAborted,
               fmt::format("its deadline passed while waiting for {}",
                           Seats(Part::kMayHold, id, term, version)));
  }
  size_t waiting = 0;
  size_t lost = 0;
  for (const Seat& seat : term.seats) {
    const Part part = PartOfSeat(seat, id, version);
    waiting += part == Part::kMayHold ? 1 : 0;
    lost += part == Part::kLost ? 1 : 0;
  }
  if (waiting > 0 && (lost == 0 || Covered(id, term, version, true))) return;
  if (waiting == 0 && Covered(id, term, version, false)) {
    return End(version, VersionState::kAvailable, "");
  }
  End(version, VersionState::kAborted,
      fmt::format("live ranks cannot cover it any more; lost: {}",
                  Seats(Part::kLost, id, term, version)));
}

void CoordinatorCore::JudgeVersion(VersionId id, const TermRecord& term, VersionRecord& version) {
  if (!settled_) return;
  switch (version.state) {
    case VersionState::kOpen: return JudgeOpen(id, term, version);
    case VersionState::kAvailable:
      if (version.covered && version.judged_losses == losses_) return;
      version.judged_losses = losses_;
      if (Covered(id, term, version, false)) {
        if (!version.covered) ++changes_;
        version.covered = true;
      } else {
        End(version, VersionState::kRetired,
            fmt::format("live holders do not cover it any more; lost: {}",
                        Seats(Part::kLost, id, term, version)));
      }
      return;
    case VersionState::kUnknown:
    case VersionState::kAborted:
    case VersionState::kRetired: return;
  }
}

void CoordinatorCore::Judge(VersionId id) {
  const auto term = terms_.find(id.term);
  VersionRecord* version = FindVersion(id);
  if (version != nullptr) JudgeVersion(id, term->second, *version);
}

void CoordinatorCore::JudgeAll() {
  for (auto& [id, term] : terms_) {
    for (auto& [number, version] : term.versions) JudgeVersion({id, number}, term, version);
  }
}

}  // namespace bascule
