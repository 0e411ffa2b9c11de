// Joining, leaving, heartbeats: who is a member.
#include "coordinator/core.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace bascule {
namespace {

constexpr size_t kMaxText = 4096;
constexpr size_t kMaxListed = 1024;  // held, told and gone versions of one member

// Takes the same time for all tokens of one length.
bool SameSecret(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

Status CheckMember(const MemberInfo& member, const CoordinatorLimits& limits) {
  auto invalid = [&member](const std::string& what) {
    return Status(Code::kInvalidArgument, what).WithRank(static_cast<int>(member.rank));
  };
  if (member.incarnation == 0) return invalid("incarnation 0 is none; draw a random one");
  if (member.world_size == 0 || member.world_size > limits.members) {
    return invalid(fmt::format("world size {} is not in 1..{}", member.world_size, limits.members));
  }
  if (member.rank >= member.world_size) {
    return invalid(fmt::format("rank {} is outside of a world of {}; ranks are global, not local",
                               member.rank, member.world_size));
  }
  if (member.role == Role::kRollout && member.engine.empty()) return invalid("engine has no name");
  if (member.role == Role::kTrainer && !member.engine.empty()) {
    return invalid("a trainer has no engine name");
  }
  bool fits = member.engine.size() <= kMaxText && member.node.size() <= kMaxText &&
              member.channel.size() <= kMaxText && member.addresses.size() <= 64 &&
              member.coordinates.size() <= 64;
  for (const TransportAddress& address : member.addresses) {
    fits = fits && address.transport.size() <= kMaxText && address.address.size() <= kMaxText;
  }
  return fits ? Status::Ok() : invalid("a name, address or list of the member is too long");
}

Status CheckState(const MemberState& state) {
  bool fits = state.held.size() <= kMaxListed && state.told.size() <= kMaxListed &&
              state.told_gone.size() <= kMaxListed && state.report.error.size() <= kMaxText;
  for (const HeldVersion& held : state.held) {
    fits = fits && held.replica_sums.size() <= kReplicaBuckets;
  }
  return fits ? Status::Ok() : Status(Code::kInvalidArgument, "the member's state is too long");
}

// The highest term that a state speaks of.
uint64_t HighestTerm(const MemberState& state) {
  uint64_t highest = std::max({state.highest_term, state.joined_term, state.serving.term});
  for (const HeldVersion& held : state.held) highest = std::max(highest, held.id.term);
  for (const HeldVersion& told : state.told) highest = std::max(highest, told.id.term);
  return highest;
}

bool SpeaksOfTerm(const MemberState& state, uint64_t term) {
  auto of_term = [term](const HeldVersion& held) { return held.id.term == term; };
  return std::any_of(state.held.begin(), state.held.end(), of_term) ||
         std::any_of(state.told.begin(), state.told.end(), of_term);
}

}  // namespace

std::string NameOf(const MemberInfo& member) {
  if (member.role == Role::kTrainer) return fmt::format("trainer {}", member.rank);
  return fmt::format("engine {} rank {}", member.engine, member.rank);
}

bool TrivialOracle::Covers(std::span<const MemberInfo* const> holders,
                           std::span<const MemberInfo* const> world) const {
  if (replicas_) return !holders.empty() || world.empty();
  std::set<uint32_t> held;
  for (const MemberInfo* member : holders) held.insert(member->rank);
  return std::all_of(world.begin(), world.end(),
                     [&held](const MemberInfo* member) { return held.count(member->rank) != 0; });
}

std::vector<MemberInfo> TrivialOracle::World(const MemberInfo& member) const {
  std::vector<MemberInfo> world(member.world_size, member);
  for (uint32_t rank = 0; rank < member.world_size; ++rank) world[rank].rank = rank;
  return world;
}

CoordinatorCore::CoordinatorCore(CoordinatorOptions options)
    : options_(std::move(options)), now_(options_.start) {
  // Lives of the coordinator share no epoch numbers, unless the clock steps back; then members'
  // told epochs lift it.
  epoch_ = static_cast<uint64_t>(std::max<int64_t>(0, options_.start.wall_ns / 1'000'000)) << 10;
}

void CoordinatorCore::Begin(CoordinatorTime now) {
  now.steady_ms = std::max(now.steady_ms, now_.steady_ms);
  now_ = now;
  if (!settled_ && GraceOver()) Settle();
}

bool CoordinatorCore::GraceOver() const {
  return now_.steady_ms - options_.start.steady_ms >= kSilentHeartbeats * options_.heartbeat_ms;
}

void CoordinatorCore::Settle() {
  settled_ = true;
  ++changes_;
  JudgeAll();
}

void CoordinatorCore::SettleIfRejoined() {
  if (settled_ || current_ == 0) return;
  const TermRecord& term = terms_[current_];
  if (term.world_size == 0 || term.filled < term.world_size) return;
  const bool live = std::all_of(term.seats.begin(), term.seats.end(), [this](const Seat& seat) {
    return members_.count(seat.incarnation) != 0;
  });
  if (live) Settle();
}

void CoordinatorCore::Event(std::string text) {
  constexpr size_t kMaxEvents = 1024;  // a caller that does not take them
  if (options_.record_events && events_.size() < kMaxEvents) events_.push_back(std::move(text));
}

std::vector<std::string> CoordinatorCore::TakeEvents() { return std::exchange(events_, {}); }

void CoordinatorCore::BumpEpoch() {
  ++epoch_;
  ++changes_;
}

void CoordinatorCore::ReportEpoch(uint64_t told) {
  if (told <= epoch_) return;
  epoch_ = told;
  BumpEpoch();
}

bool CoordinatorCore::Silent(const MemberRecord& member) const {
  return now_.steady_ms - member.last_seen_ms > kSilentHeartbeats * options_.heartbeat_ms;
}

bool CoordinatorCore::IsStale(const MemberRecord& member) const {
  return member.info->role == Role::kTrainer && member.term != current_;
}

Status CoordinatorCore::StaleTerm(const MemberRecord& member) const {
  const auto term = terms_.find(member.term);
  const std::string why =
      term == terms_.end() || term->second.over.empty() ? "a newer one opened" : term->second.over;
  return Status(Code::kStaleTerm, fmt::format("term {} is over ({}); connect anew to join term {}",
                                              member.term, why, current_))
      .WithRank(static_cast<int>(member.info->rank));
}

Result<CoordinatorCore::MemberRecord*> CoordinatorCore::Find(uint64_t incarnation) {
  if (auto member = members_.find(incarnation); member != members_.end()) {
    member->second.last_seen_ms = now_.steady_ms;
    return &member->second;
  }
  if (auto gone = gone_.find(incarnation); gone != gone_.end()) {
    const bool trainer = gone->second.role == Role::kTrainer;
    return Status(trainer ? Code::kStaleTerm : Code::kNotFound,
                  fmt::format("this incarnation of {} is no member any more ({}); connect anew",
                              gone->second.who, gone->second.why));
  }
  return Status(Code::kUnavailable,
                "not a member of this coordinator, which may have restarted; rejoin");
}

Status CoordinatorCore::CheckHandshake(const JoinRequest& request) const {
  const bool same_token = SameSecret(request.token, options_.token);
  if (request.job != options_.job || !same_token) {
    return Status(Code::kPermissionDenied,
                  "job name or token do not match those of the coordinator; check that this is the "
                  "right coordinator and that all ranks were given one token");
  }
  if (request.protocol_min > kProtocolMax || request.protocol_max < kProtocolMin) {
    return Status(
        Code::kVersionMismatch,
        fmt::format("the member speaks protocol {}..{}, the coordinator {}..{}; install "
                    "builds that overlap",
                    request.protocol_min, request.protocol_max, kProtocolMin, kProtocolMax));
  }
  if (request.planner_version != kPlannerVersion) {
    return Status(Code::kVersionMismatch,
                  fmt::format("the member's planner is version {}, the coordinator's {}; ranks of "
                              "one job must plan alike",
                              request.planner_version, kPlannerVersion));
  }
  return Status::Ok();
}

Result<JoinReply> CoordinatorCore::Join(const JoinRequest& request, CoordinatorTime now) {
  Begin(now);
  BASCULE_RETURN_IF_ERROR(CheckHandshake(request));
  const MemberInfo& member = request.member;
  BASCULE_RETURN_IF_ERROR(CheckMember(member, options_.limits));
  BASCULE_RETURN_IF_ERROR(CheckState(request.state));
  BASCULE_RETURN_IF_ERROR(options_.oracle->Check(member));
  const auto known = members_.find(member.incarnation);
  if (known != members_.end()) {
    const MemberInfo& before = *known->second.info;
    if (before.role != member.role || before.engine != member.engine ||
        before.rank != member.rank) {
      return Status(Code::kInvalidArgument,
                    fmt::format("one incarnation joined as {} and as {}; draw one for each",
                                NameOf(before), NameOf(member)));
    }
  } else if (gone_.count(member.incarnation) != 0) {
    return Find(member.incarnation).status();
  } else if (members_.size() >= options_.limits.members) {
    return Status(Code::kResourceExhausted,
                  fmt::format("the job has {} members already", members_.size()));
  }
  for (uint64_t gone : request.state.told_gone) {
    if (gone == member.incarnation) continue;
    if (members_.count(gone) != 0) Remove(gone, "a member was told so by an earlier coordinator");
    if (gone_.count(gone) == 0) RememberGone(gone, {Role::kRollout, "a rank", "declared gone"});
  }
  ReportEpoch(request.told_epoch);
  for (const HeldVersion& held : request.state.held) ReportEpoch(held.epoch);
  ReportTerm(HighestTerm(request.state), request.state.joined_term);

  Result<JoinReply> reply = member.role == Role::kRollout    ? JoinRollout(request)
                            : request.state.joined_term == 0 ? JoinTrainer(request)
                                                             : RejoinTrainer(request);
  if (!reply.ok()) return reply;
  Report(member.incarnation, request.state);
  SettleIfRejoined();
  JudgeAll();
  ForgetTerms();
  reply->epoch = epoch_;
  return reply;
}

Status CoordinatorCore::AlreadyExists(const MemberInfo& member, const MemberRecord& older) const {
  const int64_t silence = now_.steady_ms - older.last_seen_ms;
  if (older.info->world_size != member.world_size) {
    return Status(Code::kAlreadyExists,
                  fmt::format("{} says that its world has {} ranks, but {} of a world of {} lives "
                              "(heard {} ms ago). Give all ranks one world size; if that world was "
                              "stopped, it counts as gone after {} ms of silence: try again then",
                              NameOf(member), member.world_size, NameOf(*older.info),
                              older.info->world_size, silence,
                              kSilentHeartbeats * options_.heartbeat_ms))
        .WithRank(static_cast<int>(member.rank))
        .WithPeer(NameOf(*older.info));
  }
  return Status(Code::kAlreadyExists,
                fmt::format("two live ranks with one number: {} (world size {}, node \"{}\") was "
                            "heard {} ms ago. Give each rank its own global number; if the older "
                            "one died, it counts as gone after {} ms of silence: try again then",
                            NameOf(*older.info), older.info->world_size, older.info->node, silence,
                            kSilentHeartbeats * options_.heartbeat_ms))
      .WithRank(static_cast<int>(member.rank))
      .WithPeer(NameOf(*older.info));
}

CoordinatorCore::Rival CoordinatorCore::RivalOf(const MemberInfo& member) const {
  auto rival = [this, &member](uint64_t incarnation) -> Rival {
    const auto older = members_.find(incarnation);
    if (older == members_.end() || incarnation == member.incarnation) return {};
    return {incarnation, older->second.last_seen_ms};
  };
  if (member.role == Role::kTrainer) {
    const auto term = terms_.find(current_);
    if (term == terms_.end()) return {};
    const auto& seats = term->second.seats;
    if (term->second.world_size != member.world_size) {
      for (const Seat& seat : seats) {
        if (const Rival found = rival(seat.incarnation); found.incarnation != 0) return found;
      }
    }
    return member.rank < seats.size() ? rival(seats[member.rank].incarnation) : Rival{};
  }
  auto other = rollouts_.lower_bound({member.engine, 0});
  for (; other != rollouts_.end() && other->first.first == member.engine; ++other) {
    const auto record = members_.find(other->second);
    if (record == members_.end()) continue;
    const bool same_number = record->second.info->rank == member.rank;
    if (same_number || record->second.info->world_size != member.world_size) {
      if (Rival found = rival(other->second); found.incarnation != 0) return found;
    }
  }
  return {};
}

CoordinatorCore::MemberRecord& CoordinatorCore::Record(const JoinRequest& request, uint64_t term) {
  const auto [item, made] = members_.try_emplace(request.member.incarnation);
  MemberRecord& record = item->second;
  const bool moved = record.term != term;
  if (record.info == nullptr || !(*record.info == request.member) || moved) {
    record.info = std::make_shared<const MemberInfo>(request.member);
    if (moved) record.newest_held = 0;
    BumpEpoch();
  }
  if (options_.record_events && made) {
    Event(fmt::format("{} joined (node \"{}\", build \"{}\")", NameOf(*record.info),
                      record.info->node, request.build.substr(0, 256)));
  }
  record.term = term;
  record.last_seen_ms = now_.steady_ms;
  record.serving = request.state.serving;
  record.servable = request.state.servable;
  record.report = request.state.report;
  record.build = request.build.substr(0, kMaxText);
  return record;
}

JoinReply CoordinatorCore::ReplyTo(const MemberRecord& member) const {
  JoinReply reply;
  reply.term = member.info->role == Role::kTrainer ? member.term : current_;
  reply.stale_term = IsStale(member);
  reply.epoch = epoch_;
  reply.wall_ns = now_.wall_ns;
  reply.heartbeat_ms = options_.heartbeat_ms;
  reply.coordinator = options_.coordinator_id;
  return reply;
}

void CoordinatorCore::TakeSeat(uint64_t term_id, const Info& info) {
  TermRecord& term = terms_[term_id];
  if (term.world_size == 0) {
    term.world_size = info->world_size;
    term.seats.resize(term.world_size);
  }
  Seat& seat = term.seats[info->rank];
  if (seat.incarnation == 0) ++term.filled;
  seat = {info->incarnation, info, options_.oracle->ReplicaGroup(*info)};
  if (term.filled == term.world_size) term.complete = true;
  ++changes_;
}

// A first Join, or a reconnect: into the current term or, where its number was taken before or the
// world has another size, into the next.
Result<JoinReply> CoordinatorCore::JoinTrainer(const JoinRequest& request) {
  const MemberInfo& member = request.member;
  const Status wait(Code::kUnavailable,
                    "the coordinator started lately and ranks of the running term may yet rejoin; "
                    "try again");
  if (current_ == 0) {
    if (!settled_ && highest_term_ > 0) return wait;
    OpenTerm(fmt::format("{} joined", NameOf(member)));
  }
  const TermRecord& term = terms_[current_];
  if (term.world_size != 0) {
    const Seat seat = member.rank < term.seats.size() ? term.seats[member.rank] : Seat{};
    const auto older = members_.find(seat.incarnation);
    const bool same = seat.incarnation == member.incarnation;
    if (same && term.world_size != member.world_size) {
      return Status(Code::kInvalidArgument,
                    fmt::format("{} joined a world of {} and now says {}", NameOf(member),
                                term.world_size, member.world_size));
    }
    if (!same && older != members_.end()) {
      if (!Silent(older->second)) return AlreadyExists(member, older->second);
      Remove(seat.incarnation,
             fmt::format("silent for {} ms", now_.steady_ms - older->second.last_seen_ms));
    }
    const bool unknown = seat.incarnation == 0 && term.adopted;
    if (unknown && !settled_) return wait;
    if (!same && term.world_size != member.world_size) {
      // A stray rank must not end a world that lives.
      for (const Seat& other : term.seats) {
        const auto live = members_.find(other.incarnation);
        if (live == members_.end() || Silent(live->second)) continue;
        return AlreadyExists(member, live->second);
      }
    }
    if (!same && term.world_size != member.world_size) {
      OpenTerm(fmt::format("a world of {} replaces one of {}", member.world_size, term.world_size));
    } else if (!same && (seat.incarnation != 0 || unknown)) {
      // Also where nobody who lives knows of the older one: its life must not mix with this.
      OpenTerm(fmt::format("{} restarted", NameOf(member)));
    }
  }
  const auto before = members_.find(member.incarnation);
  if (before != members_.end() && before->second.term != current_) {
    // It moves on: of the old term's versions it holds what it says it holds.
    const auto old = terms_.find(before->second.term);
    if (old != terms_.end()) {
      for (auto& [number, version] : old->second.versions) {
        const VersionId id{old->first, number};
        const auto& held = request.state.held;
        const bool still = std::any_of(held.begin(), held.end(),
                                       [&id](const HeldVersion& h) { return h.id == id; });
        const auto hold = version.holds.find(member.incarnation);
        if (!still && hold != version.holds.end()) hold->second.revoked = true;
        ++losses_;
      }
    }
  }
  MemberRecord& record = Record(request, current_);
  TakeSeat(current_, record.info);
  return ReplyTo(record);
}

// A member of an earlier coordinator's life (or of this one, asking again) goes on in its term.
Result<JoinReply> CoordinatorCore::RejoinTrainer(const JoinRequest& request) {
  const MemberInfo& member = request.member;
  const uint64_t joined = request.state.joined_term;
  const Status stale =
      Status(Code::kStaleTerm,
             fmt::format("term {} is over; connect anew to join the current one", joined))
          .WithRank(static_cast<int>(member.rank));
  if (joined == current_) {
    TermRecord& term = terms_[joined];
    const bool complete = request.state.term_complete || SpeaksOfTerm(request.state, joined);
    if (complete && term.adopted) term.complete = true;
  }
  if (joined != current_) {
    if (request.state.held.empty()) return stale;
    TermRecord& term = terms_[joined];
    if (term.world_size == 0) term.adopted = term.complete = true;
    if (term.over.empty()) term.over = "a newer one opened";
  }
  TermRecord& term = terms_[joined];
  if (term.world_size != 0 && term.world_size != member.world_size) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} rejoins term {} with a world of {}, which has {} ranks",
                              NameOf(member), joined, member.world_size, term.world_size));
  }
  const Seat seat = term.world_size == 0 ? Seat{} : term.seats[member.rank];
  if (seat.incarnation != 0 && seat.incarnation != member.incarnation) {
    const auto older = members_.find(seat.incarnation);
    if (older != members_.end()) return AlreadyExists(member, older->second);
    return stale;
  }
  if (seat.incarnation == 0 && !term.adopted) return stale;
  MemberRecord& record = Record(request, joined);
  TakeSeat(joined, record.info);
  return ReplyTo(record);
}

Result<JoinReply> CoordinatorCore::JoinRollout(const JoinRequest& request) {
  const MemberInfo& member = request.member;
  while (true) {
    const Rival rival = RivalOf(member);
    if (rival.incarnation == 0) break;
    const MemberRecord& older = members_[rival.incarnation];
    if (!Silent(older)) return AlreadyExists(member, older);
    Remove(rival.incarnation, fmt::format("silent for {} ms", now_.steady_ms - older.last_seen_ms));
  }
  MemberRecord& record = Record(request, 0);
  rollouts_[{member.engine, member.rank}] = member.incarnation;
  return ReplyTo(record);
}

void CoordinatorCore::RememberGone(uint64_t incarnation, GoneRecord record) {
  if (options_.record_events) Event(fmt::format("{} is gone: {}", record.who, record.why));
  if (!gone_.emplace(incarnation, std::move(record)).second) return;
  gone_order_.push_back(incarnation);
  if (gone_order_.size() > options_.limits.gone) {
    gone_.erase(gone_order_.front());
    gone_order_.pop_front();
  }
  ++changes_;
}

// The caller judges the versions after it.
void CoordinatorCore::Remove(uint64_t incarnation, const std::string& why) {
  const auto member = members_.find(incarnation);
  if (member == members_.end()) return;
  const MemberInfo& info = *member->second.info;
  RememberGone(incarnation, {info.role, NameOf(info), why});
  if (info.role == Role::kRollout) rollouts_.erase({info.engine, info.rank});
  members_.erase(member);
  ++losses_;
  BumpEpoch();
}

void CoordinatorCore::RemoveSilent() {
  std::vector<uint64_t> silent;
  for (const auto& [incarnation, member] : members_) {
    if (Silent(member)) silent.push_back(incarnation);
  }
  for (uint64_t incarnation : silent) {
    const int64_t age = now_.steady_ms - members_[incarnation].last_seen_ms;
    Remove(incarnation, fmt::format("silent for {} ms", age));
  }
}

Status CoordinatorCore::Leave(uint64_t incarnation, CoordinatorTime now) {
  Begin(now);
  if (incarnation == 0) return Status(Code::kInvalidArgument, "incarnation 0 is none");
  if (members_.count(incarnation) != 0) {
    Remove(incarnation, "it left");
    JudgeAll();
  } else if (gone_.count(incarnation) == 0) {
    RememberGone(incarnation, {Role::kRollout, "a rank", "it left"});
  }
  return Status::Ok();
}

Result<HeartbeatReply> CoordinatorCore::Heartbeat(const HeartbeatRequest& request,
                                                  CoordinatorTime now) {
  Begin(now);
  if (!SameSecret(request.token, options_.token)) {
    return Status(Code::kPermissionDenied, "the job token does not match");
  }
  BASCULE_RETURN_IF_ERROR(CheckState(request.state));
  HeartbeatReply reply;
  reply.term = current_;
  reply.epoch = epoch_;
  reply.coordinator = options_.coordinator_id;
  reply.wall_ns = now_.wall_ns;
  const auto found = members_.find(request.incarnation);
  if (found == members_.end()) {
    reply.rejoin = gone_.count(request.incarnation) == 0;
    return reply;
  }
  MemberRecord& member = found->second;
  member.last_seen_ms = now_.steady_ms;
  const uint64_t joined = request.state.joined_term;
  if (joined != 0 && member.info->role == Role::kTrainer && joined != member.term) {
    reply.rejoin = true;  // what is recorded here is of another of its Joins
    return reply;
  }
  member.serving = request.state.serving;
  member.servable = request.state.servable;
  member.report = request.state.report;
  ReportEpoch(request.told_epoch);
  ReportTerm(HighestTerm(request.state), 0);

  // A Revoked that got lost: two heartbeats in a row (the second was made after the first was
  // answered) that do not list a version mean that it is held no more. A heartbeat never adds a
  // hold: an old one may arrive late.
  std::map<VersionId, VersionState> states;
  for (const HeldVersion& held : request.state.held) states[held.id] = VersionState::kUnknown;
  for (auto& [term_id, term] : terms_) {
    for (auto& [number, version] : term.versions) {
      const auto hold = version.holds.find(request.incarnation);
      if (hold == version.holds.end() || hold->second.revoked) continue;
      const VersionId id{term_id, number};
      if (states.count(id) != 0) {
        hold->second.missed = 0;
      } else if (++hold->second.missed >= 2) {
        hold->second.revoked = true;
        ++losses_;
        Judge(id);
      }
    }
  }
  if (const auto term = terms_.find(current_); term != terms_.end()) {
    int recent = 0;
    for (auto v = term->second.versions.rbegin(); v != term->second.versions.rend(); ++v) {
      if (++recent > 8) break;
      states[{current_, v->first}] = v->second.state;
    }
  }
  for (auto& [id, state] : states) {
    if (const VersionRecord* version = FindVersion(id); version != nullptr) state = version->state;
  }
  reply.member = true;
  reply.stale_term = IsStale(member);
  reply.term = current_;
  const auto current = terms_.find(current_);
  reply.term_complete = current != terms_.end() && current->second.complete;
  reply.epoch = epoch_;
  reply.versions.assign(states.begin(), states.end());
  return reply;
}

Result<JoinReply> CoordinatorCore::Rebind(const MemberInfo& member, CoordinatorTime now) {
  Begin(now);
  BASCULE_RETURN_IF_ERROR(CheckMember(member, options_.limits));
  BASCULE_ASSIGN_OR_RETURN(MemberRecord * record, Find(member.incarnation));
  if (IsStale(*record)) return StaleTerm(*record);
  BASCULE_RETURN_IF_ERROR(options_.oracle->Check(member));
  const MemberInfo& before = *record->info;
  if (before.role != member.role || before.engine != member.engine || before.rank != member.rank ||
      before.world_size != member.world_size) {
    return Status(Code::kInvalidArgument,
                  fmt::format("Rebind of {} as {}: it may change the layout only", NameOf(before),
                              NameOf(member)));
  }
  if (before == member) return ReplyTo(*record);
  if (member.layout_serial <= before.layout_serial) {
    return Status(Code::kInvalidArgument,
                  fmt::format("layout {} of {} came after layout {}", member.layout_serial,
                              NameOf(member), before.layout_serial));
  }
  record->info = std::make_shared<const MemberInfo>(member);
  if (member.role == Role::kTrainer) TakeSeat(record->term, record->info);
  BumpEpoch();
  return ReplyTo(*record);
}

Status CoordinatorCore::Serving(uint64_t incarnation, VersionId id, bool servable,
                                CoordinatorTime now) {
  Begin(now);
  BASCULE_ASSIGN_OR_RETURN(MemberRecord * member, Find(incarnation));
  member->serving = id;
  member->servable = servable;
  ReportTerm(id.term, 0);
  return Status::Ok();
}

Result<bool> CoordinatorCore::Gone(uint64_t incarnation, CoordinatorTime now) {
  Begin(now);
  if (incarnation == 0) return Status(Code::kInvalidArgument, "incarnation 0 is none");
  if (gone_.count(incarnation) != 0) return true;
  if (members_.count(incarnation) != 0 || !settled_) return false;
  // It had the time to rejoin. Whoever is told so acts upon it, so from now on it is true.
  RememberGone(incarnation, {Role::kRollout, "a rank", "it did not rejoin in time"});
  return true;
}

void CoordinatorCore::Tick(CoordinatorTime now) {
  Begin(now);
  RemoveSilent();
  JudgeAll();
  ForgetTerms();
  CollectBlobs();
}

}  // namespace bascule
