#include "session/lander.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "session/program_fault.h"
#include "session/source_service.h"

namespace bascule {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLeaseEvery{300};
constexpr uint64_t kAlign = 4096;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

uint64_t AlignUp(uint64_t value) { return (value + kAlign - 1) / kAlign * kAlign; }

}  // namespace

Lander::Lander(Options options, const Layout& layout, Transport* transport, Agent* agent)
    : options_(std::move(options)),
      layout_(layout),
      transport_(transport),
      agent_(agent),
      commit_(BuildCommit(layout_)),
      executor_(std::max(1, options_.rollout.threads)) {}

Status Lander::Loss(std::string message, const std::string& tensor, const std::string& peer) const {
  return Status(Code::kDataLoss, std::move(message))
      .WithRank(static_cast<int>(options_.rollout.rank))
      .WithPeer(peer)
      .WithTensor(tensor);
}

Status Lander::Allocate() {
  uint64_t bytes = 0;
  shadow_offset_.clear();
  for (const Buffer& buffer : layout_.buffers) {
    shadow_offset_.push_back(bytes);
    bytes += AlignUp(buffer.bytes);
  }
  if (!options_.in_place) {
    BASCULE_ASSIGN_OR_RETURN(shadow_, transport_->Allocate(std::max(bytes, kAlign), "shadow"));
  }
  padding_sums_ = SumPadding(layout_);
  transforms_ = std::any_of(layout_.bindings.begin(), layout_.bindings.end(),
                            [](const Binding& b) { return b.function != LandingFunction::kNone; });
  return Status::Ok();
}

std::vector<Memory> Lander::LiveTargets() const {
  std::vector<Memory> targets;
  for (const Buffer& buffer : layout_.buffers) targets.push_back({buffer.data, buffer.bytes});
  return targets;
}

std::vector<Memory> Lander::ShadowTargets() const {
  std::vector<Memory> targets;
  for (size_t i = 0; i < layout_.buffers.size(); ++i) {
    targets.push_back({shadow_->data() + shadow_offset_[i], layout_.buffers[i].bytes});
  }
  return targets;
}

std::vector<MemberInfo> Lander::EngineMembers() const {
  std::vector<MemberInfo> members;
  if (!plan_) return members;
  for (const MemberInfo& info : plan_->view->infos) {
    if (info.role == Role::kRollout) members.push_back(info);
  }
  return members;
}

std::vector<LinkReport> Lander::Links() const {
  std::vector<LinkReport> links;
  if (!plan_) return links;
  for (const Source& source : plan_->sources) {
    links.push_back(
        {MemberName(plan_->view->infos[source.member]), transport_->name(), "", source.bytes});
  }
  return links;
}

// ---- planning and connecting ------------------------------------------------------------------

Status Lander::Prepare(const PlanBasis& basis, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(agent_->Settle(deadline));
  BASCULE_ASSIGN_OR_RETURN(auto view,
                           agent_->views().For(options_.rollout.engine, basis, deadline));
  const bool connected = plan_ && plan_->view == view &&
                         std::all_of(plan_->sources.begin(), plan_->sources.end(),
                                     [](const Source& source) { return source.peer->alive(); });
  if (!connected) BASCULE_RETURN_IF_ERROR(BuildPlan(std::move(view), deadline));
  plan_->basis = basis;
  return Status::Ok();
}

Status Lander::BuildPlan(std::shared_ptr<const WorldView> view, Deadline deadline) {
  const int64_t self = view->Rollout(options_.rollout.rank);
  if (self < 0 || view->infos[static_cast<size_t>(self)].incarnation != agent_->incarnation()) {
    return Status(Code::kUnavailable, options_.name + " is not a member (any more); connect anew");
  }
  // A layout that the coordinator has and this rank has not (or the other way round) must never be
  // planned with: what does not land would be served as it was.
  const MemberInfo own = agent_->member();
  const MemberInfo& known = view->infos[static_cast<size_t>(self)];
  if (known.layout_serial != own.layout_serial || known.world_template != own.world_template ||
      known.coordinates != own.coordinates) {
    return Status(Code::kUnavailable,
                  fmt::format("the plan is made with layout {} of {}, which has layout {}; if "
                              "UpdateLayout failed, call it again",
                              known.layout_serial, options_.name, own.layout_serial))
        .WithRank(static_cast<int>(options_.rollout.rank));
  }
  BASCULE_RETURN_IF_ERROR(CheckEngineCoverage(*view));
  auto plan = std::make_unique<LandingPlan>();
  plan->part = view->planner->PartOf(static_cast<uint32_t>(self));
  std::map<uint32_t, Source> sources;
  for (uint32_t i = 0; i < plan->part.chunks.size(); ++i) {
    const Chunk& chunk = plan->part.chunks[i];
    Source& source = sources[chunk.source];
    source.member = chunk.source;
    source.chunks.push_back(i);
    source.bytes += chunk.bytes;
  }
  for (auto& [member, source] : sources) {
    BASCULE_RETURN_IF_ERROR(ConnectSource(*view, &source, deadline));
    plan->sources.push_back(std::move(source));
  }
  // Peers of earlier lives are closed with the plans that used them.
  std::set<uint64_t> used;
  for (const Source& source : plan->sources) used.insert(view->infos[source.member].incarnation);
  std::erase_if(peers_, [&used](const auto& entry) { return !used.contains(entry.first); });

  std::map<std::string, const PartTensor*> by_name;
  const Member& me = view->world().members[static_cast<size_t>(self)];
  const WorldTemplate& mine = *view->world().templates[me.world_template];
  for (const PartTensor& tensor : plan->part.tensors) {
    by_name[mine.names[tensor.destination_name]] = &tensor;
    plan->name_of_key[TensorKey(tensor.name)] = std::string(tensor.name);
  }
  for (const LogicalTensor& tensor : layout_.tensors) {
    auto it = by_name.find(tensor.name);
    plan->resolved.push_back(it == by_name.end() ? "" : std::string(it->second->name));
    plan->wire.push_back(it == by_name.end() ? tensor.dtype : it->second->wire);
  }
  plan->view = std::move(view);
  plan_ = std::move(plan);
  return Status::Ok();
}

Status Lander::ConnectSource(const WorldView& view, Source* source, Deadline deadline) {
  const MemberInfo& info = view.infos[source->member];
  const std::string name = MemberName(info);
  if (info.role != Role::kTrainer) {
    return Status(
               Code::kUnimplemented,
               fmt::format("{} would have to be read, but it is a rollout; only trainers on this "
                           "host can be sources",
                           name))
        .WithPeer(name);
  }
  auto it = peers_.find(info.incarnation);
  if (it != peers_.end() && it->second->alive()) {
    source->peer = it->second;
    return Status::Ok();
  }
  for (const TransportAddress& address : info.addresses) {
    if (address.transport != transport_->name()) continue;
    auto peer = transport_->Connect(address.address, info.incarnation, deadline);
    if (!peer.ok()) return Status(peer.status()).WithPeer(name);
    peers_[info.incarnation] = *peer;
    source->peer = *peer;
    return Status::Ok();
  }
  return Status(Code::kUnavailable,
                fmt::format("{} cannot be reached: it offers no transport that this rank has ({})",
                            name, transport_->name()))
      .WithPeer(name);
}

PeerRequest Lander::Request(PeerMethod method, VersionId id) const {
  PeerRequest request;
  request.method = method;
  request.id = id;
  request.plan = plan_->view->planner->digest();
  request.epoch = plan_->basis.epoch;
  request.own_membership = plan_->basis.own_membership;
  request.engine = options_.rollout.engine;
  request.rank = options_.rollout.rank;
  return request;
}

Status Lander::Ask(Source* source, const PeerRequest& request, std::string* answer,
                   Deadline deadline) const {
  ++*options_.requests;
  auto reply = source->peer->Call(Encode(request), deadline);
  if (!reply.ok()) {
    return Status(reply.status()).WithPeer(MemberName(plan_->view->infos[source->member]));
  }
  *answer = std::move(*reply);
  return Status::Ok();
}

Status Lander::OpenSource(Source* source, VersionId id, Deadline deadline) {
  const MemberInfo& info = plan_->view->infos[source->member];
  std::string bytes;
  PeerRequest request = Request(PeerMethod::kOpen, id);
  if (!source->open.places.empty()) request.known_layout = source->open.layout_serial + 1;
  BASCULE_RETURN_IF_ERROR(Ask(source, request, &bytes, deadline));
  BASCULE_ASSIGN_OR_RETURN(OpenReply open, DecodeOpenReply(bytes));
  if (request.known_layout == open.layout_serial + 1) open.places = std::move(source->open.places);
  source->open = std::move(open);
  if (source->open.layout_serial != info.layout_serial) {
    return Status(Code::kUnavailable,
                  fmt::format("version {} was published under another layout of {} than its "
                              "newest; wait for the next version",
                              id.version, MemberName(info)))
        .WithPeer(MemberName(info));
  }
  BASCULE_ASSIGN_OR_RETURN(source->header, source->peer->Import(source->open.header, deadline));
  if (source->open.header_offset + sizeof(GenerationCell) > source->header->bytes()) {
    return Status(Code::kInvalidArgument, "the source's generation page is too small")
        .WithPeer(MemberName(info));
  }
  source->regions.clear();
  // Memory of earlier layouts is let go once there is more of it than two versions need.
  if (source->mapped.size() > 4 * source->open.regions.size() + 4) source->mapped.clear();
  for (const std::string& blob : source->open.regions) {
    auto known = source->mapped.find(blob);
    if (known != source->mapped.end()) {
      source->regions.push_back(known->second);
      continue;
    }
    BASCULE_ASSIGN_OR_RETURN(auto region, source->peer->Import(blob, deadline));
    source->mapped[blob] = region;
    if (region->data() == nullptr) {
      return Status(Code::kUnimplemented, "the transport gives no address for the arena")
          .WithPeer(MemberName(info));
    }
    source->regions.push_back(std::move(region));
  }
  return Status::Ok();
}

Status Lander::OpenSources(VersionId id, Deadline deadline) {
  for (Source& source : plan_->sources) {
    BASCULE_RETURN_IF_ERROR(OpenSource(&source, id, deadline));
  }
  return BuildLandingProgram();
}

void Lander::ReleaseSources(VersionId id) {
  if (!plan_) return;
  for (Source& source : plan_->sources) {
    if (!source.peer->alive()) continue;
    std::string ignored;
    (void)Ask(&source, Request(PeerMethod::kDone, id), &ignored, Deadline::In(milliseconds(200)));
  }
}

bool Lander::Unchanged(const Source& source) const {
  const auto* cell =
      reinterpret_cast<const GenerationCell*>(source.header->data() + source.open.header_offset);
  return cell->generation.load(std::memory_order_acquire) == source.open.generation;
}

// The copy program depends on where the sources hold things, not on the version: built once.
Status Lander::BuildLandingProgram() {
  std::vector<uint64_t> serials;
  for (const Source& source : plan_->sources) serials.push_back(source.open.layout_serial);
  if (plan_->landing_built && plan_->built_for == serials) return Status::Ok();
  const World& world = plan_->view->world();
  std::map<uint32_t, const Source*> source_of;
  uint32_t next_base = 0;
  for (Source& source : plan_->sources) {
    source.first_base = next_base;
    next_base += static_cast<uint32_t>(std::max<size_t>(source.regions.size(), 1));
    source_of[source.member] = &source;
  }
  // One source's places at a time: members are asked for one after the other.
  std::optional<ArenaPlaces> arena;
  int64_t arena_member = -1;
  std::vector<SourcePlace> direct;
  auto lookup = [&](uint32_t member, uint32_t tensor) -> std::span<const SourcePlace> {
    auto it = source_of.find(member);
    if (it == source_of.end()) return {};
    const Source& source = *it->second;
    if (!source.open.direct) {
      const Member& theirs = world.members[member];
      if (arena_member != member) {
        arena.emplace(*world.templates[theirs.world_template], theirs.coordinates,
                      source.first_base);
        arena_member = member;
      }
      return arena->Of(tensor);
    }
    if (tensor >= source.open.places.size()) return {};
    direct = source.open.places[tensor];
    for (SourcePlace& place : direct) place.base += source.first_base;
    return direct;
  };
  BASCULE_ASSIGN_OR_RETURN(plan_->landing, BuildLanding(plan_->part, world, layout_, lookup));
  plan_->bases = next_base;
  plan_->built_for = std::move(serials);
  plan_->landing_built = true;
  SplitSums();
  return Status::Ok();
}

// One sum per (chunk, tensor) instead of per chunk: it costs nothing and names the tensor of a
// damaged chunk, and adds up to the sum of every tensor that landed.
void Lander::SplitSums() {
  LandingProgram& landing = plan_->landing;
  plan_->slot_chunk.clear();
  plan_->slot_key.clear();
  plan_->slot_transformed.clear();
  for (uint32_t chunk = 0; chunk + 1 < landing.first_op.size(); ++chunk) {
    std::map<uint64_t, uint32_t> slot_of;
    for (uint32_t i = landing.first_op[chunk]; i < landing.first_op[chunk + 1]; ++i) {
      CopyOp& op = landing.program.ops[i];
      if (op.sum == kNoSum) continue;
      auto [it, added] =
          slot_of.emplace(op.tensor_key, static_cast<uint32_t>(plan_->slot_chunk.size()));
      if (added) {
        plan_->slot_chunk.push_back(chunk);
        plan_->slot_key.push_back(op.tensor_key);
        plan_->slot_transformed.push_back(landing.program.shapes[op.shape].function !=
                                          LandingFunction::kNone);
      }
      op.sum = it->second;
    }
  }
  landing.program.sums = static_cast<uint32_t>(plan_->slot_chunk.size());
}

// ---- landing ----------------------------------------------------------------------------------

Status Lander::Land(VersionId id, const std::function<bool()>& cancelled, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(OpenSources(id, deadline));
  std::vector<ConstMemory> bases(plan_->bases);
  for (const Source& source : plan_->sources) {
    for (size_t r = 0; r < source.regions.size(); ++r) {
      const uint64_t skip = source.open.direct ? 0 : source.open.data_offset;
      bases[source.first_base + r] = {source.regions[r]->data() + skip,
                                      source.regions[r]->bytes() - skip};
    }
  }
  const std::vector<Memory> targets = options_.in_place ? LiveTargets() : ShadowTargets();
  LandingProgram damaged;
  if (HasProgramFault()) {
    damaged = plan_->landing;
    ApplyProgramFault(ProgramKind::kLanding, options_.name, &damaged.program, &damaged.first_op);
  }
  const LandingProgram& landing = HasProgramFault() ? damaged : plan_->landing;
  BASCULE_RETURN_IF_ERROR(CheckProgram(landing.program, bases, targets,
                                       [this](uint64_t key) { return plan_->name_of_key[key]; }));

  const bool digest = options_.rollout.digest;
  std::vector<Sum> sums(landing.program.sums);
  CpuExecutor::Options run;
  run.digest = digest;
  auto last_lease = std::chrono::steady_clock::now();
  run.cancelled = [&] {
    if (cancelled() || deadline.Passed()) return true;
    for (const Source& source : plan_->sources) {
      if (!Unchanged(source)) return true;
    }
    return false;
  };
  // Leases are renewed between batches of chunks; they spare the version, they do not protect it.
  const int64_t start = NowNs();
  Status status;
  const auto chunks = static_cast<uint32_t>(plan_->part.chunks.size());
  const uint32_t batch = 64;
  for (uint32_t first = 0; first < chunks && status.ok(); first += batch) {
    run.first_op = landing.first_op[first];
    run.last_op = landing.first_op[std::min(first + batch, chunks)];
    status = executor_.Run(landing.program, bases, targets, sums, run);
    auto now = std::chrono::steady_clock::now();
    if (now - last_lease < kLeaseEvery) continue;
    last_lease = now;
    for (Source& source : plan_->sources) {
      std::string ignored;
      if (source.peer->alive()) {
        (void)Ask(&source, Request(PeerMethod::kLease, id), &ignored,
                  Deadline::In(milliseconds(50)));
      }
    }
  }
  phases_.stage = NowNs() - start;
  std::atomic_thread_fence(std::memory_order_acquire);
  for (const Source& source : plan_->sources) {
    if (Unchanged(source)) continue;
    const std::string peer = MemberName(plan_->view->infos[source.member]);
    return Status(Code::kRetired, fmt::format("{} revoked version {} while it was landing (it "
                                              "published newer ones); poll again",
                                              peer, id.version))
        .WithPeer(peer);
  }
  if (status.code() == Code::kAborted) {
    if (cancelled()) return Status(Code::kAborted, "staging was given up");
    return Status(Code::kDeadlineExceeded,
                  fmt::format("version {} did not land by the deadline; raise it", id.version))
        .WithRank(static_cast<int>(options_.rollout.rank));
  }
  BASCULE_RETURN_IF_ERROR(status);

  landed_ = {};
  landed_.id = id;
  landed_.first = !plan_->proved;
  if (!digest) return Status::Ok();
  const int64_t verify_start = NowNs();
  BASCULE_RETURN_IF_ERROR(CheckChunks(id, sums, deadline));
  BASCULE_RETURN_IF_ERROR(ReadBack(id, landing, sums, targets, cancelled));
  for (size_t slot = 0; slot < sums.size(); ++slot) {
    landed_.tensors[plan_->name_of_key[plan_->slot_key[slot]]] += sums[slot];
  }
  BASCULE_ASSIGN_OR_RETURN(landed_.transformed, TransformedRows(targets, cancelled));
  if (landed_.first) {
    // While the leases hold: what the trainers' own layouts say this rank must hold.
    const AuditScope scope = transforms_ ? AuditScope::kAllByTensor : AuditScope::kAllByLayer;
    BASCULE_ASSIGN_OR_RETURN(landed_.trainers, TrainerRows(id, scope, deadline));
  }
  phases_.verify = NowNs() - verify_start;
  return Status::Ok();
}

Status Lander::CheckChunks(VersionId id, const std::vector<Sum>& sums, Deadline deadline) {
  std::vector<Sum> landed(plan_->part.chunks.size());
  for (size_t slot = 0; slot < sums.size(); ++slot) landed[plan_->slot_chunk[slot]] += sums[slot];
  for (Source& source : plan_->sources) {
    const std::string peer = MemberName(plan_->view->infos[source.member]);
    SumsReply reply;
    reply.sums = source.open.checks;
    if (reply.sums.empty()) {
      std::string bytes;
      BASCULE_RETURN_IF_ERROR(Ask(&source, Request(PeerMethod::kChecks, id), &bytes, deadline));
      BASCULE_ASSIGN_OR_RETURN(reply, DecodeSumsReply(bytes));
    }
    if (reply.sums.size() != source.chunks.size()) {
      return Status(Code::kVersionMismatch,
                    fmt::format("{} has {} chunk checks for this rank, {} are planned; the two "
                                "planned differently",
                                peer, reply.sums.size(), source.chunks.size()))
          .WithPeer(peer);
    }
    for (size_t i = 0; i < source.chunks.size(); ++i) {
      const uint32_t chunk = source.chunks[i];
      if (landed[chunk] == reply.sums[i]) continue;
      // Name the tensor: of those in the chunk, the first whose whole sum is not the trainers'.
      std::string tensor;
      auto rows = TrainerRows(id, AuditScope::kAllByTensor, deadline);
      AuditRows mine;
      for (size_t slot = 0; slot < sums.size(); ++slot) {
        mine[plan_->name_of_key[plan_->slot_key[slot]]] += sums[slot];
      }
      for (size_t slot = 0; slot < sums.size() && tensor.empty(); ++slot) {
        if (plan_->slot_chunk[slot] != chunk) continue;
        const std::string& name = plan_->name_of_key[plan_->slot_key[slot]];
        if (!rows.ok() || (*rows)[name] != mine[name]) tensor = name;
      }
      return Loss(fmt::format("chunk {} of version {} arrived damaged (its digest is not its "
                              "source's); the update was given up, live weights are untouched",
                              chunk, id.version),
                  tensor, peer);
    }
  }
  return Status::Ok();
}

// Reads the destination again: all chunks of a plan's first version, then a rotating sixteenth.
Status Lander::ReadBack(VersionId id, const LandingProgram& landing, const std::vector<Sum>& sums,
                        const std::vector<Memory>& targets,
                        const std::function<bool()>& cancelled) {
  std::vector<Sum> again(sums.size());
  CpuExecutor::Options run;
  run.cancelled = cancelled;
  const auto chunks = static_cast<uint32_t>(plan_->part.chunks.size());
  auto selected = [&](uint32_t chunk) { return landed_.first || (chunk + id.version) % 16 == 0; };
  for (uint32_t chunk = 0; chunk < chunks;) {
    if (!selected(chunk)) {
      ++chunk;
      continue;
    }
    uint32_t last = chunk + 1;
    while (last < chunks && selected(last)) ++last;
    run.first_op = landing.first_op[chunk];
    run.last_op = landing.first_op[last];
    BASCULE_RETURN_IF_ERROR(executor_.DigestTargets(landing.program, targets, again, run));
    chunk = last;
  }
  for (size_t slot = 0; slot < sums.size(); ++slot) {
    if (!selected(plan_->slot_chunk[slot]) || plan_->slot_transformed[slot]) continue;
    if (again[slot] == sums[slot]) continue;
    return Loss(
        fmt::format("chunk {} of version {} reads back otherwise than it landed; the update "
                    "was given up",
                    plan_->slot_chunk[slot], id.version),
        plan_->name_of_key[plan_->slot_key[slot]], "");
  }
  return Status::Ok();
}

// ---- switching and auditing -------------------------------------------------------------------

Status Lander::Switch() {
  std::vector<ConstMemory> sources;
  for (size_t i = 0; i < layout_.buffers.size(); ++i) {
    sources.push_back({shadow_->data() + shadow_offset_[i], layout_.buffers[i].bytes});
  }
  CpuExecutor::Options run;
  run.digest = false;
  const std::vector<Memory> targets = LiveTargets();
  CopyProgram damaged;
  const CopyProgram& program = *WithFault(ProgramKind::kCommit, options_.name, &commit_, &damaged);
  BASCULE_RETURN_IF_ERROR(CheckProgram(program, sources, targets, [this](uint64_t key) {
    auto it =
        std::find_if(layout_.tensors.begin(), layout_.tensors.end(),
                     [key](const LogicalTensor& tensor) { return TensorKey(tensor.name) == key; });
    return it == layout_.tensors.end() ? std::string() : it->name;
  }));
  return executor_.Run(program, sources, targets, {}, run);
}

// The sources of this rank count, each element once: every element that it needs is in a box of one
// of them, whatever the plan made of that.
Result<AuditRows> Lander::TrainerRows(VersionId id, AuditScope scope, Deadline deadline) {
  PeerRequest request = Request(PeerMethod::kAudit, id);
  request.scope = scope;
  for (const Source& source : plan_->sources) {
    request.live.push_back(plan_->view->infos[source.member].rank);
  }
  std::sort(request.live.begin(), request.live.end());
  AuditRows rows;
  for (Source& source : plan_->sources) {
    std::string bytes;
    BASCULE_RETURN_IF_ERROR(Ask(&source, request, &bytes, deadline));
    BASCULE_ASSIGN_OR_RETURN(SumsReply reply, DecodeSumsReply(bytes));
    for (size_t i = 0; i < reply.names.size(); ++i) rows[reply.names[i]] += reply.sums[i];
  }
  return rows;
}

Result<AuditRows> Lander::LiveRows(AuditScope scope, uint64_t version,
                                   const std::function<bool()>& cancelled) const {
  // Tensors go by the source's name: digests are keyed by it.
  Layout layout = layout_;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    if (!plan_->resolved[i].empty()) layout.tensors[i].name = plan_->resolved[i];
  }
  BASCULE_ASSIGN_OR_RETURN(std::vector<Sum> sums,
                           SumLayout(
                               layout, [this](uint32_t tensor) { return plan_->wire[tensor]; },
                               [&](uint32_t tensor) {
                                 return !plan_->resolved[tensor].empty() &&
                                        InScope(plan_->resolved[tensor], scope, version);
                               },
                               cancelled));
  AuditRows rows;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i].elements > 0) rows[RowOf(plan_->resolved[i], scope)] += sums[i];
  }
  return rows;
}

Status Lander::CompareRows(const AuditRows& expected, const AuditRows& live,
                           const char* what) const {
  for (const auto& [name, sum] : live) {
    auto it = expected.find(name);
    if (it != expected.end() && it->second == sum) continue;
    return Loss(fmt::format("the live weights of {} are not {}", name, what), name, "");
  }
  return Status::Ok();
}

void Lander::SplitTransformed(const AuditRows& landed, AuditRows* live, AuditRows* codes) const {
  for (const Binding& binding : layout_.bindings) {
    const std::string& name = plan_->resolved[binding.tensor];
    if (binding.function == LandingFunction::kNone || name.empty()) continue;
    auto sum = landed.find(name);
    if (sum == landed.end()) continue;
    (*codes)[name] = sum->second;
    auto row = live->find(name);
    if (row != live->end() && row->second.elements != sum->second.elements) live->erase(row);
  }
}

Result<AuditRows> Lander::TransformedRows(const std::vector<Memory>& targets,
                                          const std::function<bool()>& cancelled) const {
  AuditRows rows;
  if (!transforms_) return rows;
  Layout results = layout_;
  for (size_t i = 0; i < targets.size(); ++i) results.buffers[i].data = targets[i].data;
  std::erase_if(results.bindings,
                [](const Binding& b) { return b.function == LandingFunction::kNone; });
  std::vector<DType> dtype(results.tensors.size());
  std::vector<bool> bound(results.tensors.size());
  for (Binding& binding : results.bindings) {
    binding.function = LandingFunction::kNone;
    dtype[binding.tensor] = binding.dtype;
    bound[binding.tensor] = true;
  }
  BASCULE_ASSIGN_OR_RETURN(std::vector<Sum> sums,
                           SumLayout(
                               results, [&dtype](uint32_t tensor) { return dtype[tensor]; },
                               [&bound](uint32_t tensor) { return bound[tensor]; }, cancelled));
  for (size_t i = 0; i < sums.size(); ++i) {
    if (bound[i]) rows[results.tensors[i].name] = sums[i];
  }
  return rows;
}

Status Lander::AuditLive(const std::function<bool()>& cancelled) {
  if (!plan_ || live_.tensors.empty()) return Status::Ok();
  const std::vector<uint64_t> padding = SumPadding(layout_);
  const auto [changed, was] = std::ranges::mismatch(padding, padding_sums_);
  if (changed != padding.end()) {
    const auto& name = layout_.buffers[static_cast<size_t>(changed - padding.begin())].name;
    return Loss(fmt::format("bytes of buffer '{}' that no tensor covers (padding) have changed "
                            "since the layout was given; find what writes there, bind a tensor to "
                            "them, or update the layout, which takes them as they are",
                            name),
                "", "");
  }
  BASCULE_ASSIGN_OR_RETURN(AuditRows transformed, TransformedRows(LiveTargets(), cancelled));
  BASCULE_RETURN_IF_ERROR(
      CompareRows(live_.transformed, transformed, "what their landing function made"));
  BASCULE_ASSIGN_OR_RETURN(AuditRows live, LiveRows(AuditScope::kAllByTensor, 0, cancelled));
  AuditRows codes;
  SplitTransformed(live_.tensors, &live, &codes);
  BASCULE_RETURN_IF_ERROR(CompareRows(live_.tensors, live, "what was committed"));
  if (live_.trainers.empty()) return Status::Ok();
  if (transforms_) {
    BASCULE_RETURN_IF_ERROR(CompareRows(live_.trainers, codes, "what the trainers hold"));
    return CompareRows(live_.trainers, live, "what the trainers hold");
  }
  AuditRows layers;
  for (const auto& [name, sum] : live) layers[RowOf(name, AuditScope::kAllByLayer)] += sum;
  Status status = CompareRows(live_.trainers, layers, "what the trainers hold");
  if (status.code() != Code::kDataLoss) return status;
  // Drill down to the tensor, as long as the trainers still hold the version.
  auto rows =
      TrainerRows(live_.id, AuditScope::kAllByTensor, Deadline::In(std::chrono::seconds(10)));
  if (!rows.ok()) return status;
  Status named = CompareRows(*rows, live, "what the trainers hold");
  return named.ok() ? status : named;
}

Status Lander::AuditRotation(VersionId id, Deadline deadline) {
  const AuditScope scope =
      transforms_ ? AuditScope::kRotationByTensor : AuditScope::kRotationByLayer;
  BASCULE_ASSIGN_OR_RETURN(AuditRows expected, TrainerRows(id, scope, deadline));
  BASCULE_ASSIGN_OR_RETURN(AuditRows live, LiveRows(scope, id.version, {}));
  if (transforms_) {
    AuditRows codes;
    SplitTransformed(live_.tensors, &live, &codes);
    std::erase_if(codes, [&](const auto& row) { return !InScope(row.first, scope, id.version); });
    live.insert(codes.begin(), codes.end());
    BASCULE_ASSIGN_OR_RETURN(AuditRows transformed, TransformedRows(LiveTargets(), {}));
    BASCULE_RETURN_IF_ERROR(
        CompareRows(live_.transformed, transformed, "what their landing function made"));
  }
  for (const auto& [name, sum] : live) {
    auto it = expected.find(name);
    const uint64_t counted = it == expected.end() ? 0 : it->second.elements;
    if (counted < sum.elements) {
      return Status(Code::kRetired, "the trainers no longer hold the whole version");
    }
  }
  Status status = CompareRows(expected, live, "what the trainers hold");
  if (status.code() != Code::kDataLoss || transforms_) return status;
  // Drill down, as long as the trainers still hold the version.
  auto rows = TrainerRows(id, AuditScope::kRotationByTensor, deadline);
  auto named = LiveRows(AuditScope::kRotationByTensor, id.version, {});
  if (!rows.ok() || !named.ok()) return status;
  Status tensor = CompareRows(*rows, *named, "what the trainers hold");
  return tensor.code() == Code::kDataLoss ? tensor : status;
}

}  // namespace bascule
