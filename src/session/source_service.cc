#include "session/source_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "session/audit.h"
#include "session/program_fault.h"

namespace bascule {
namespace {

constexpr uint64_t kPage = 4096;
constexpr auto kLeaseGrace = std::chrono::milliseconds(20);
constexpr auto kDirectDrain = std::chrono::milliseconds(1000);

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::vector<ConstMemory> LiveSources(const Layout& layout) {
  std::vector<ConstMemory> bases;
  bases.reserve(layout.buffers.size());
  for (const Buffer& buffer : layout.buffers) bases.push_back({buffer.data, buffer.bytes});
  return bases;
}

std::vector<uint32_t> ChunksFrom(const Part& part, uint32_t source) {
  std::vector<uint32_t> chunks;
  for (uint32_t i = 0; i < part.chunks.size(); ++i) {
    if (part.chunks[i].source == source) chunks.push_back(i);
  }
  return chunks;
}

std::array<int64_t, kMaxDims> DenseStrides(const Box& box, int element_bytes) {
  std::array<int64_t, kMaxDims> strides{};
  int64_t stride = element_bytes;
  for (int d = box.ndim() - 1; d >= 0; --d) {
    strides[static_cast<size_t>(d)] = stride;
    stride *= box[d].size();
  }
  return strides;
}

Status NotHeld(VersionId id, const std::string& name) {
  return Status(Code::kRetired, fmt::format("{} does not hold version {} of term {} (any more); "
                                            "poll again",
                                            name, id.version, id.term))
      .WithPeer(name);
}

}  // namespace

// Counts an answer as in progress on a slot, so that Drain waits for it.
class SourceService::Serve {
 public:
  Serve(SourceService* service, VersionId id) : service_(service) {
    std::lock_guard lock(service_->mutex_);
    auto found = service_->core_.Find(id);
    if (!found) return;
    slot_ = *found;
    held_ = true;
    generation_ = service_->core_.slots()[slot_].generation;
    SlotData& data = service_->slots_[slot_];
    ++data.serving;
    snapshot_ = data;
  }
  ~Serve() {
    if (!held_) return;
    std::lock_guard lock(service_->mutex_);
    --service_->slots_[slot_].serving;
    service_->changed_.notify_all();
  }
  Serve(const Serve&) = delete;
  Serve& operator=(const Serve&) = delete;

  [[nodiscard]] bool held() const { return held_; }
  [[nodiscard]] uint32_t slot() const { return slot_; }
  [[nodiscard]] uint64_t generation() const { return generation_; }
  [[nodiscard]] const SlotData& data() const { return snapshot_; }
  // True once the version is being revoked: the answer must be given up.
  [[nodiscard]] bool Revoked() const {
    std::lock_guard lock(service_->mutex_);
    return service_->core_.slots()[slot_].generation != generation_;
  }

 private:
  SourceService* service_;
  bool held_ = false;
  uint32_t slot_ = 0;
  uint64_t generation_ = 0;
  SlotData snapshot_;
};

SourceService::SourceService(Options options)
    : options_(std::move(options)),
      core_(std::max(1u, options_.direct ? 1u : options_.trainer.versions_held)),
      slots_(core_.slots().size()),
      publisher_(std::max(1, options_.trainer.threads)),
      answerer_(1) {}

SourceService::~SourceService() = default;

// ---- layout and preparation -----------------------------------------------------------------

Result<std::shared_ptr<PreparedSource>> SourceService::PrepareLayout(
    const Layout& layout, std::shared_ptr<const WorldTemplate> world,
    std::vector<uint32_t> coordinates, uint64_t layout_serial, Transport* transport) {
  transport_ = transport;
  if (!header_) {
    const uint64_t bytes = (slots_.size() * sizeof(GenerationCell) + kPage - 1) / kPage * kPage;
    BASCULE_ASSIGN_OR_RETURN(header_, transport_->Allocate(bytes, "generations"));
    for (uint32_t slot = 0; slot < slots_.size(); ++slot) SetGeneration(slot);
  }
  auto prepared = std::make_shared<PreparedSource>();
  prepared->layout = layout;
  prepared->world = std::move(world);
  prepared->coordinates = std::move(coordinates);
  prepared->layout_serial = layout_serial;
  BASCULE_RETURN_IF_ERROR(BuildFor(prepared.get(), {}));
  if (options_.direct) {
    for (const Buffer& buffer : layout.buffers) {
      BASCULE_ASSIGN_OR_RETURN(auto region, transport_->Export(buffer));
      prepared->exports.push_back(std::move(region));
    }
    prepared->places = PlacesOfLayout(prepared->layout, *prepared->world, 0);
  }
  for (uint32_t slot = 0; !options_.direct && slot < slots_.size(); ++slot) {
    BASCULE_RETURN_IF_ERROR(EnsureRegion(slot, *prepared));
  }
  return prepared;
}

void SourceService::InstallLayout(std::shared_ptr<PreparedSource> prepared) {
  if (options_.direct) {
    for (VersionId id : Held()) (void)Release(id, Deadline::In(kDirectDrain));
  }
  std::lock_guard lock(mutex_);
  prepared_ = std::move(prepared);
}

void SourceService::Renumber(uint64_t layout_serial) {
  std::lock_guard lock(mutex_);
  auto again = std::make_shared<PreparedSource>(*prepared_);
  again->layout_serial = layout_serial;
  prepared_ = std::move(again);
}

// A slot's arena must hold the layout. A slot that holds a version keeps its region until it is
// filled again.
Status SourceService::EnsureRegion(uint32_t slot, const PreparedSource& prepared) {
  const uint64_t bytes = std::max<uint64_t>(prepared.snapshot.arena.bytes, kPage);
  {
    std::lock_guard lock(mutex_);
    const SlotData& data = slots_[slot];
    if (data.region && data.region->bytes() >= bytes) return Status::Ok();
    if (core_.slots()[slot].state == SlotState::kHeld) return Status::Ok();
  }
  BASCULE_ASSIGN_OR_RETURN(auto region, transport_->Allocate(bytes, fmt::format("arena {}", slot)));
  std::lock_guard lock(mutex_);
  slots_[slot].region = std::move(region);
  return Status::Ok();
}

Status SourceService::BuildFor(PreparedSource* prepared,
                               const std::vector<std::shared_ptr<const WorldView>>& views) const {
  std::vector<std::vector<WantedBox>> wanted;
  for (const auto& view : views) {
    int64_t self = -1;
    for (size_t i = 0; i < view->infos.size(); ++i) {
      if (view->infos[i].role == Role::kTrainer && view->infos[i].rank == options_.trainer.rank &&
          view->infos[i].layout_serial == prepared->layout_serial) {
        self = static_cast<int64_t>(i);
      }
    }
    if (self < 0) continue;
    for (uint32_t id = 0; id < view->infos.size(); ++id) {
      if (view->infos[id].role != Role::kRollout) continue;
      Part part = view->planner->PartOf(id);
      PreparedSource::Receiver receiver{view->planner->digest(), view->engine, view->infos[id].rank,
                                        ChunksFrom(part, static_cast<uint32_t>(self))};
      if (receiver.chunks.empty()) continue;
      wanted.push_back(WantedFrom(part, view->world(), static_cast<uint32_t>(self)));
      prepared->receivers.push_back(std::move(receiver));
    }
  }
  BASCULE_ASSIGN_OR_RETURN(prepared->snapshot, BuildSnapshot(prepared->layout, *prepared->world,
                                                             prepared->coordinates, wanted));
  prepared->tensor_of_entry.clear();
  for (const auto& entry : prepared->snapshot.arena.entries) {
    prepared->tensor_of_entry.push_back(entry.tensor);
  }
  return Status::Ok();
}

Status SourceService::PrepareFor(const Membership& membership, Deadline deadline) {
  std::vector<std::string> engines;
  for (const MemberInfo& member : membership.members) {
    if (member.role == Role::kRollout &&
        std::find(engines.begin(), engines.end(), member.engine) == engines.end()) {
      engines.push_back(member.engine);
    }
  }
  std::vector<std::shared_ptr<const WorldView>> views;
  for (const std::string& engine : engines) {
    // An engine that cannot be planned is told so itself when it stages; here it is left out.
    auto view = views_.load()->Newest(engine, deadline);
    if (view.ok()) views.push_back(*view);
  }
  std::shared_ptr<const PreparedSource> base;
  {
    std::lock_guard lock(mutex_);
    base = prepared_;
  }
  auto next = std::make_shared<PreparedSource>();
  next->layout = base->layout;
  next->world = base->world;
  next->coordinates = base->coordinates;
  next->layout_serial = base->layout_serial;
  next->exports = base->exports;
  next->places = base->places;
  BASCULE_RETURN_IF_ERROR(BuildFor(next.get(), views));
  std::lock_guard lock(mutex_);
  if (prepared_ == base) prepared_ = std::move(next);
  return Status::Ok();
}

uint64_t SourceService::arena_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const SlotData& slot : slots_) bytes += slot.region ? slot.region->bytes() : 0;
  return bytes;
}

std::vector<VersionId> SourceService::Held() const {
  std::lock_guard lock(mutex_);
  std::vector<VersionId> held;
  for (const auto& slot : core_.slots()) {
    if (slot.state == SlotState::kHeld) held.push_back(slot.id);
  }
  return held;
}

// ---- publishing -------------------------------------------------------------------------------

// Publishes a slot's generation to readers. Release order: bytes written before are visible to a
// reader that sees it. Under mutex_ (or before the transport listens).
void SourceService::SetGeneration(uint32_t slot) {
  auto* cells = reinterpret_cast<GenerationCell*>(header_->data());
  cells[slot].generation.store(core_.slots()[slot].generation, std::memory_order_release);
}

// Waits until no answer is computed from the slot and no leased reader progresses.
void SourceService::Drain(std::unique_lock<std::mutex>* lock, uint32_t slot, Deadline deadline) {
  changed_.wait_until(*lock, deadline.at(), [this, slot] { return slots_[slot].serving == 0; });
}

Result<SourceService::Filled> SourceService::Fill(VersionId id, Deadline deadline,
                                                  const std::function<void(VersionId)>& revoked) {
  const auto start = std::chrono::steady_clock::now();
  // Readers are spared until half of the time is gone: a slow reader never fails a publication.
  const Deadline patience(start + (deadline.at() - start) / 2);
  SourceCore::Begin begin;
  std::shared_ptr<const PreparedSource> prepared;
  for (;;) {
    std::unique_lock lock(mutex_);
    BASCULE_ASSIGN_OR_RETURN(begin, core_.BeginPublish(id, NowMs(), patience.Passed()));
    if (begin.step == SourceCore::Step::kFill) {
      prepared = prepared_;
      break;
    }
    if (deadline.Passed()) {
      return Status(Code::kDeadlineExceeded,
                    fmt::format("no arena slot became free for version {}; raise the deadline or "
                                "versions_held",
                                id.version))
          .WithRank(static_cast<int>(options_.trainer.rank));
    }
    if (begin.step == SourceCore::Step::kRevoke) {
      SetGeneration(begin.slot);
      lock.unlock();
      revoked(begin.revoked);
      lock.lock();
      Drain(&lock, begin.slot, deadline);
    } else {
      changed_.wait_for(lock, kLeaseGrace);
    }
    // A slot is only written once no answer is computed from it any more.
    const bool revoking = core_.slots()[begin.slot].state == SlotState::kRevoking;
    if (revoking && slots_[begin.slot].serving == 0) core_.EndRevoke(begin.slot);
  }

  Filled filled;
  std::vector<Sum> cells(prepared->snapshot.program.sums);
  Status status = EnsureRegion(begin.slot, *prepared);
  const int64_t copy_start = NowNs();
  if (status.ok()) status = Snapshot(begin.slot, *prepared, &cells, deadline);
  filled.publish_ns = NowNs() - copy_start;
  if (status.ok() && options_.trainer.digest) {
    bool all = false;
    {
      std::lock_guard lock(mutex_);
      all = proved_ != prepared;
    }
    status = CompareWithLive(*prepared, cells, id, all);
    filled.audit_ns = NowNs() - copy_start - filled.publish_ns;
  }
  std::lock_guard lock(mutex_);
  if (!status.ok()) {
    core_.FillFailed(begin.slot);
    changed_.notify_all();
    return status;
  }
  proved_ = prepared;
  const uint64_t names = prepared->world->names.size();
  filled.replica_sums.resize(std::min<uint64_t>(names, kReplicaBuckets));
  for (size_t entry = 0; entry < prepared->snapshot.box_cells.size(); ++entry) {
    const uint64_t bucket = prepared->tensor_of_entry[entry] * filled.replica_sums.size() /
                            std::max<uint64_t>(names, 1);
    for (uint32_t cell : prepared->snapshot.box_cells[entry]) {
      filled.replica_sums[bucket] += cells[cell];
    }
  }
  filled.bytes = prepared->snapshot.arena.bytes;
  filled.layout_serial = prepared->layout_serial;
  slots_[begin.slot].prepared = std::move(prepared);
  slots_[begin.slot].cells = std::move(cells);
  core_.Filled(begin.slot);
  SetGeneration(begin.slot);
  changed_.notify_all();
  return filled;
}

// The one pass over the live weights: copy, cast and sums; with direct export only the sums.
Status SourceService::Snapshot(uint32_t slot, const PreparedSource& prepared,
                               std::vector<Sum>* cells, Deadline deadline) {
  CpuExecutor::Options run;
  run.digest = options_.trainer.digest;
  run.cancelled = [deadline] { return deadline.Passed(); };
  const auto sources = LiveSources(prepared.layout);
  CopyProgram damaged;
  const CopyProgram& program =
      *WithFault(ProgramKind::kSnapshot, options_.name, &prepared.snapshot.program, &damaged);
  Status status;
  if (options_.direct) {
    if (run.digest) status = publisher_.DigestSources(program, sources, *cells, run);
  } else {
    Memory target{slots_[slot].region->data(), slots_[slot].region->bytes()};
    BASCULE_RETURN_IF_ERROR(CheckProgram(program, sources, {&target, 1}, [&](uint64_t key) {
      const auto& names = prepared.world->names;
      auto it = std::find_if(names.begin(), names.end(),
                             [key](const std::string& name) { return TensorKey(name) == key; });
      return it == names.end() ? std::string() : *it;
    }));
    status = publisher_.Run(program, sources, {&target, 1}, *cells, run);
  }
  if (status.code() == Code::kAborted) {
    return Status(Code::kDeadlineExceeded, "the snapshot did not end by the deadline; raise it")
        .WithRank(static_cast<int>(options_.trainer.rank));
  }
  return status;
}

// The second opinion: sums of the live bindings, walked by the layout, against the sums of the
// snapshot pass. All tensors on the first version of a preparation, then a rotating sixteenth.
Status SourceService::CompareWithLive(const PreparedSource& prepared, const std::vector<Sum>& cells,
                                      VersionId id, bool all) const {
  const WorldTemplate& world = *prepared.world;
  std::vector<Sum> snapshot(world.names.size());
  for (size_t entry = 0; entry < prepared.snapshot.box_cells.size(); ++entry) {
    for (uint32_t cell : prepared.snapshot.box_cells[entry]) {
      snapshot[prepared.tensor_of_entry[entry]] += cells[cell];
    }
  }
  auto index_of = [&world](const std::string& name) -> int64_t {
    auto it = std::lower_bound(world.names.begin(), world.names.end(), name);
    return it != world.names.end() && *it == name ? it - world.names.begin() : -1;
  };
  const Layout& layout = prepared.layout;
  auto selected = [&](uint32_t tensor) {
    return index_of(layout.tensors[tensor].name) >= 0 &&
           (all || InRotation(TensorKey(layout.tensors[tensor].name), id.version));
  };
  BASCULE_ASSIGN_OR_RETURN(
      std::vector<Sum> live,
      SumLayout(
          layout, [&](uint32_t tensor) { return layout.tensors[tensor].dtype; }, selected, {},
          Side::kSource));
  for (uint32_t tensor = 0; tensor < layout.tensors.size(); ++tensor) {
    if (!selected(tensor)) continue;
    const auto index = static_cast<size_t>(index_of(layout.tensors[tensor].name));
    if (live[tensor] == snapshot[index]) continue;
    return Status(Code::kDataLoss,
                  fmt::format("the snapshot of version {} is not what the live weights hold: they "
                              "were written during Publish, or memory is faulty; nothing was "
                              "published",
                              id.version))
        .WithRank(static_cast<int>(options_.trainer.rank))
        .WithTensor(layout.tensors[tensor].name);
  }
  return Status::Ok();
}

Status SourceService::Release(VersionId id, Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!core_.Find(id)) return Status::Ok();
  // Readers that progress may finish; then the generation turns odd and stops the rest.
  while (!deadline.Passed() && core_.LeaseProgresses(id, NowMs())) {
    changed_.wait_for(lock, kLeaseGrace);
  }
  uint32_t slot = 0;
  if (!core_.BeginRevoke(id, &slot)) return Status::Ok();
  SetGeneration(slot);
  // Answers that are being computed notice and end within a slice.
  Drain(&lock, slot, Deadline::In(std::chrono::seconds(1)).Earlier(deadline));
  if (slots_[slot].serving == 0) core_.EndRevoke(slot);  // else the next publication ends it
  changed_.notify_all();
  return Status::Ok();
}

// ---- answering --------------------------------------------------------------------------------

Result<std::string> SourceService::OnCall(uint64_t connection, std::string_view bytes) {
  BASCULE_ASSIGN_OR_RETURN(PeerRequest request, DecodePeerRequest(bytes));
  switch (request.method) {
    case PeerMethod::kOpen: return AnswerOpen(connection, request);
    case PeerMethod::kChecks: return AnswerChecks(request);
    case PeerMethod::kAudit: return AnswerAudit(request);
    case PeerMethod::kSums: return AnswerSums(request);
    case PeerMethod::kLease: {
      std::lock_guard lock(mutex_);
      if (!core_.Lease(connection, request.id, NowMs())) return NotHeld(request.id, options_.name);
      return std::string();
    }
    case PeerMethod::kDone: {
      std::lock_guard lock(mutex_);
      core_.EndLease(connection, request.id);
      changed_.notify_all();
      return std::string();
    }
  }
  return Status(Code::kInvalidArgument, "unknown peer method");
}

Result<uint64_t> SourceService::OnFetch(uint64_t, std::string_view, std::span<std::byte>) {
  return Status(Code::kUnimplemented, "this source serves mapped peers only; use shared memory");
}

void SourceService::OnDisconnect(uint64_t connection) {
  std::lock_guard lock(mutex_);
  core_.EndLeases(connection);
  changed_.notify_all();
}

Result<std::string> SourceService::AnswerOpen(uint64_t connection, const PeerRequest& request) {
  std::lock_guard lock(mutex_);
  auto slot = core_.Find(request.id);
  if (!slot || !core_.Lease(connection, request.id, NowMs())) {
    return NotHeld(request.id, options_.name);
  }
  const SlotData& data = slots_[*slot];
  OpenReply reply;
  reply.generation = core_.slots()[*slot].generation;
  reply.header = header_->blob();
  reply.header_offset = *slot * sizeof(GenerationCell);
  reply.direct = options_.direct;
  reply.layout_serial = data.prepared->layout_serial;
  if (options_.direct) {
    for (const auto& region : data.prepared->exports) reply.regions.push_back(region->blob());
    if (request.known_layout != reply.layout_serial + 1) reply.places = data.prepared->places;
  } else {
    reply.regions.push_back(data.region->blob());
  }
  bool all = false;
  const auto known = KnownChecks(data, request, &all);
  if (all) {
    for (const auto& [chunk, sum] : known) reply.checks.push_back(sum);
  }
  return Encode(reply);
}

std::map<uint32_t, Sum> SourceService::KnownChecks(const SlotData& slot, const PeerRequest& request,
                                                   bool* all) {
  const PreparedSource& prepared = *slot.prepared;
  std::map<uint32_t, Sum> known;
  *all = false;
  for (uint32_t i = 0; i < prepared.receivers.size(); ++i) {
    const auto& receiver = prepared.receivers[i];
    if (receiver.plan != request.plan || receiver.engine != request.engine ||
        receiver.rank != request.rank) {
      continue;
    }
    for (const auto& check : prepared.snapshot.checks) {
      if (check.receiver != i) continue;
      Sum sum;
      for (uint32_t cell : check.cells) sum += slot.cells[cell];
      known.emplace(check.chunk, sum);
    }
    *all = known.size() == receiver.chunks.size();
  }
  return known;
}

// The plan that the receiver speaks of. It may be newer than what this rank has seen.
Result<std::shared_ptr<const WorldView>> SourceService::ViewOf(const PeerRequest& request) {
  ViewCache* views = views_;
  if (views == nullptr) {
    return Status(Code::kUnavailable, options_.name + " is still connecting; ask again")
        .WithPeer(options_.name);
  }
  auto view = views->Find(request.plan);
  if (view) return view;
  auto newest = views->For(request.engine, {request.id, request.epoch, request.own_membership},
                           Deadline::In(std::chrono::seconds(5)));
  if (!newest.ok()) return newest.status();
  if ((*newest)->planner->digest() == request.plan) return *newest;
  return Status(Code::kUnavailable,
                fmt::format("{} does not know plan {} of engine {}: the membership changed; plan "
                            "again",
                            options_.name, request.plan.ToString(), request.engine))
      .WithPeer(options_.name);
}

Result<std::string> SourceService::AnswerChecks(const PeerRequest& request) {
  Serve serve(this, request.id);
  if (!serve.held()) return NotHeld(request.id, options_.name);
  SumsReply reply;
  bool all = false;
  const auto known = KnownChecks(serve.data(), request, &all);
  if (all) {
    for (const auto& [chunk, sum] : known) reply.sums.push_back(sum);
    return Encode(reply);
  }
  // A plan that the snapshot did not know (a late engine), or chunks whose wire dtype differs from
  // the arena's: read the arena once.
  BASCULE_ASSIGN_OR_RETURN(auto view, ViewOf(request));
  const int64_t self = view->Trainer(options_.trainer.rank);
  const int64_t reader = view->Rollout(request.rank);
  if (self < 0 || reader < 0) return NotHeld(request.id, options_.name);
  Part part = view->planner->PartOf(static_cast<uint32_t>(reader));
  BASCULE_ASSIGN_OR_RETURN(
      std::vector<Sum> sums,
      DigestChunks(serve.data(), part, view->world(), static_cast<uint32_t>(self),
                   [&serve] { return serve.Revoked(); }));
  for (uint32_t chunk : ChunksFrom(part, static_cast<uint32_t>(self))) {
    auto it = known.find(chunk);
    reply.sums.push_back(it == known.end() ? sums[chunk] : it->second);
  }
  return Encode(reply);
}

Result<std::vector<Sum>> SourceService::DigestChunks(const SlotData& slot, const Part& part,
                                                     const World& world, uint32_t self,
                                                     const std::function<bool()>& cancelled) {
  const PreparedSource& prepared = *slot.prepared;
  const auto wanted = WantedFrom(part, world, self);
  const auto chunks = static_cast<uint32_t>(part.chunks.size());
  std::vector<Sum> sums(chunks);
  CpuExecutor::Options run;
  run.cancelled = cancelled;
  std::lock_guard lock(answering_);
  if (options_.direct) {
    // The live bindings are the arena: walk them by the layout.
    for (const WantedBox& want : wanted) {
      for (const SourcePlace& place : prepared.places[want.tensor]) {
        Box common = place.box.Intersect(want.box);
        if (common.empty()) continue;
        StridedBox memory{prepared.layout.buffers[place.base].data + place.offset, place.box,
                          place.byte_strides, place.dtype};
        const auto& name = prepared.world->names[want.tensor];
        const auto& shape = prepared.world->classes[prepared.world->class_of[want.tensor]].shape;
        sums[want.chunk] += SumBox(memory, common, shape, want.wire, TensorKey(name));
      }
    }
    return sums;
  }
  // These sums are made from the arena, so it must still be what was snapshotted.
  std::vector<bool> seen(prepared.world->names.size());
  for (const WantedBox& want : wanted) {
    if (seen[want.tensor]) continue;
    seen[want.tensor] = true;
    if (cancelled() || ArenaIntact(slot, want.tensor)) continue;
    return Status(Code::kDataLoss,
                  "the arena no longer holds what was snapshotted; memory of this "
                  "source is faulty; publish a newer version")
        .WithPeer(options_.name)
        .WithTensor(prepared.world->names[want.tensor]);
  }
  BASCULE_ASSIGN_OR_RETURN(CopyProgram program, BuildArenaDigest(prepared.snapshot.arena,
                                                                 *prepared.world, wanted, chunks));
  ConstMemory arena{slot.region->data(), slot.region->bytes()};
  Status status = answerer_.DigestSources(program, {&arena, 1}, sums, run);
  if (status.code() == Code::kAborted) {
    return Status(Code::kRetired, "the version was revoked while its sums were made; poll again")
        .WithPeer(options_.name);
  }
  if (!status.ok()) return status;
  return sums;
}

// Does the arena still hold what was snapshotted of a tensor?
bool SourceService::ArenaIntact(const SlotData& slot, uint32_t tensor) const {
  if (options_.direct || !options_.trainer.digest) return true;
  const WorldTemplate& world = *slot.prepared->world;
  const TemplateClass& tensor_class = world.classes[world.class_of[tensor]];
  const SnapshotProgram& snapshot = slot.prepared->snapshot;
  for (uint32_t i = snapshot.arena.first_entry[tensor]; i < snapshot.arena.first_entry[tensor + 1];
       ++i) {
    const ArenaMap::Entry& entry = snapshot.arena.entries[i];
    Sum expected;
    for (uint32_t cell : snapshot.box_cells[i]) expected += slot.cells[cell];
    StridedBox memory{slot.region->data() + entry.offset, entry.box,
                      DenseStrides(entry.box, DTypeSize(tensor_class.dtype)), tensor_class.dtype};
    if (SumBox(memory, entry.box, tensor_class.shape, tensor_class.dtype,
               TensorKey(world.names[tensor])) != expected) {
      return false;
    }
  }
  return true;
}

std::vector<StridedBox> SourceService::PlacesOf(const SlotData& slot, uint32_t tensor) const {
  const PreparedSource& prepared = *slot.prepared;
  std::vector<StridedBox> places;
  if (options_.direct) {
    for (const SourcePlace& place : prepared.places[tensor]) {
      places.push_back({prepared.layout.buffers[place.base].data + place.offset, place.box,
                        place.byte_strides, place.dtype});
    }
    return places;
  }
  const DType dtype = prepared.world->classes[prepared.world->class_of[tensor]].dtype;
  const ArenaMap& arena = prepared.snapshot.arena;
  for (uint32_t i = arena.first_entry[tensor]; i < arena.first_entry[tensor + 1]; ++i) {
    const ArenaMap::Entry& entry = arena.entries[i];
    places.push_back({slot.region->data() + entry.offset, entry.box,
                      DenseStrides(entry.box, DTypeSize(dtype)), dtype});
  }
  return places;
}

// For whoever compares this rank with another one: no plan, no membership.
Result<std::string> SourceService::AnswerSums(const PeerRequest& request) {
  VersionId id = request.id;
  if (id.none()) {
    const auto held = Held();
    if (held.empty()) {
      return Status(Code::kRetired, fmt::format("{} holds no version; publish one", options_.name))
          .WithPeer(options_.name);
    }
    id = *std::max_element(held.begin(), held.end());
  }
  Serve serve(this, id);
  if (!serve.held()) return NotHeld(id, options_.name);
  const WorldTemplate& world = *serve.data().prepared->world;
  SumsReply reply;
  reply.id = id;
  for (const WantedSum& wanted : request.wanted) {
    if (serve.Revoked()) return NotHeld(id, options_.name);
    std::string name = wanted.tensor;
    for (const Alias& alias : world.aliases) {
      if (alias.name == name) name = alias.target;
    }
    auto found = std::lower_bound(world.names.begin(), world.names.end(), name);
    if (found == world.names.end() || *found != name) {
      reply.sums.emplace_back();
      continue;
    }
    const auto tensor = static_cast<uint32_t>(found - world.names.begin());
    reply.sums.push_back(SumWanted(wanted, PlacesOf(serve.data(), tensor),
                                   world.classes[world.class_of[tensor]].shape, false));
  }
  return Encode(reply);
}

Result<std::string> SourceService::AnswerAudit(const PeerRequest& request) {
  Serve serve(this, request.id);
  if (!serve.held()) return NotHeld(request.id, options_.name);
  BASCULE_ASSIGN_OR_RETURN(auto view, ViewOf(request));
  const int64_t self = view->Trainer(options_.trainer.rank);
  const int64_t reader = view->Rollout(request.rank);
  if (self < 0 || reader < 0) return NotHeld(request.id, options_.name);
  const PreparedSource& prepared = *serve.data().prepared;
  const WorldTemplate& world = *prepared.world;
  AuditRows rows;
  const auto counted = CountedFor(view->world(), static_cast<uint32_t>(self),
                                  static_cast<uint32_t>(reader), request.live);
  for (const CountedBox& box : counted) {
    const std::string& name = world.names[box.tensor];
    if (!InScope(name, request.scope, request.id.version)) continue;
    if (serve.Revoked()) {
      return Status(Code::kRetired, "the version was revoked during the audit; poll again")
          .WithPeer(options_.name);
    }
    const TemplateClass& tensor_class = world.classes[world.class_of[box.tensor]];
    if (request.scope == AuditScope::kAllByTensor && !ArenaIntact(serve.data(), box.tensor)) {
      continue;  // a row that is missing names the tensor
    }
    Sum& row = rows[RowOf(name, request.scope)];
    row += SumWanted({name, box.box, box.wire}, PlacesOf(serve.data(), box.tensor),
                     tensor_class.shape, false);
  }
  SumsReply reply;
  for (const auto& [name, sum] : rows) {
    reply.names.push_back(name);
    reply.sums.push_back(sum);
  }
  return Encode(reply);
}

}  // namespace bascule
