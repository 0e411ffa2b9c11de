// A source rank's data side: arenas, snapshots, sums, and the answers to its peers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bascule/session.h"
#include "copy/cpu/executor.h"
#include "digest/audit.h"
#include "session/membership.h"
#include "session/messages.h"
#include "session/programs.h"
#include "session/source_core.h"
#include "transport/transport.h"

namespace bascule {

// The arena's generation page: one cell of 64 bytes a slot.
struct GenerationCell {
  std::atomic<uint64_t> generation;
  uint64_t padding[7];
};
static_assert(sizeof(GenerationCell) == 64);

// Everything about one layout that publications of it share. Immutable once made.
struct PreparedSource {
  Layout layout;
  std::shared_ptr<const WorldTemplate> world;
  std::vector<uint32_t> coordinates;
  uint64_t layout_serial = 0;
  SnapshotProgram snapshot;
  // Which of snapshot.checks' receivers a rank of an engine is, under which plan.
  struct Receiver {
    ContentDigest plan;
    std::string engine;
    uint32_t rank = 0;
    std::vector<uint32_t> chunks;  // those that come from here, ascending
  };
  std::vector<Receiver> receivers;
  // Direct export: one region a buffer, and the places in them.
  std::vector<std::shared_ptr<SharedRegion>> exports;
  std::vector<std::vector<SourcePlace>> places;
  std::vector<uint32_t> tensor_of_entry;  // arena entry -> template name
};

class SourceService final : public PeerHandler {
 public:
  struct Options {
    TrainerOptions trainer;
    bool direct = false;
    std::string name;  // "trainer 0"
  };
  explicit SourceService(Options options);
  ~SourceService() override;
  // Where plans are found. Set once; peers that ask before are told to ask again.
  void SetViews(ViewCache* views) { views_ = views; }

  // Makes everything that versions under a layout need; changes nothing.
  [[nodiscard]] Result<std::shared_ptr<PreparedSource>> PrepareLayout(
      const Layout& layout, std::shared_ptr<const WorldTemplate> world,
      std::vector<uint32_t> coordinates, uint64_t layout_serial, Transport* transport);
  // Versions are published under it from now on. With direct export held versions end: their
  // memory is the old layout's. Not while one is being filled.
  void InstallLayout(std::shared_ptr<PreparedSource> prepared);
  // The same layout under another number.
  void Renumber(uint64_t layout_serial);
  // Cuts the snapshot to the plans of the engines that are members now. Off the publishing path;
  // publications use what was prepared last.
  [[nodiscard]] Status PrepareFor(const Membership& membership, Deadline deadline);

  struct Filled {
    std::vector<Sum> replica_sums;
    int64_t publish_ns = 0;
    int64_t audit_ns = 0;
    uint64_t bytes = 0;
    uint64_t layout_serial = 0;
  };
  // Snapshots the live weights as `id`. `revoked(v)` is called for a version that makes room.
  [[nodiscard]] Result<Filled> Fill(VersionId id, Deadline deadline,
                                    const std::function<void(VersionId)>& revoked);
  // REVOKING until readers have drained or the deadline passed, then FREE.
  [[nodiscard]] Status Release(VersionId id, Deadline deadline);
  [[nodiscard]] std::vector<VersionId> Held() const;
  [[nodiscard]] uint64_t arena_bytes() const;

  Result<std::string> OnCall(uint64_t connection, std::string_view request) override;
  Result<uint64_t> OnFetch(uint64_t connection, std::string_view request,
                           std::span<std::byte> slot) override;
  void OnDisconnect(uint64_t connection) override;

 private:
  // One slot's memory and what it holds.
  struct SlotData {
    std::shared_ptr<SharedRegion> region;            // arena mode
    std::shared_ptr<const PreparedSource> prepared;  // of the version in it
    std::vector<Sum> cells;
    uint32_t serving = 0;  // answers being computed from it
  };
  // Keeps a HELD slot from being overwritten while an answer is computed from it.
  class Serve;

  [[nodiscard]] Status BuildFor(PreparedSource* prepared,
                                const std::vector<std::shared_ptr<const WorldView>>& views) const;
  [[nodiscard]] Status EnsureRegion(uint32_t slot, const PreparedSource& prepared);
  [[nodiscard]] Status Snapshot(uint32_t slot, const PreparedSource& prepared,
                                std::vector<Sum>* cells, Deadline deadline);
  [[nodiscard]] Status CompareWithLive(const PreparedSource& prepared,
                                       const std::vector<Sum>& cells, VersionId id, bool all) const;
  void SetGeneration(uint32_t slot);
  void Drain(std::unique_lock<std::mutex>* lock, uint32_t slot, Deadline deadline);

  [[nodiscard]] Result<std::string> AnswerOpen(uint64_t connection, const PeerRequest& request);
  [[nodiscard]] Result<std::string> AnswerChecks(const PeerRequest& request);
  // The chunk checks that the snapshot of a slot made for the asking receiver, by chunk; `all`:
  // none is missing.
  [[nodiscard]] static std::map<uint32_t, Sum> KnownChecks(const SlotData& slot,
                                                           const PeerRequest& request, bool* all);
  [[nodiscard]] Result<std::string> AnswerAudit(const PeerRequest& request);
  [[nodiscard]] Result<std::string> AnswerSums(const PeerRequest& request);
  // Where a tensor of a held version lies.
  [[nodiscard]] std::vector<StridedBox> PlacesOf(const SlotData& slot, uint32_t tensor) const;
  [[nodiscard]] Result<std::shared_ptr<const WorldView>> ViewOf(const PeerRequest& request);
  [[nodiscard]] bool ArenaIntact(const SlotData& slot, uint32_t tensor) const;
  [[nodiscard]] Result<std::vector<Sum>> DigestChunks(const SlotData& slot, const Part& part,
                                                      const World& world, uint32_t self,
                                                      const std::function<bool()>& cancelled);

  Options options_;
  std::atomic<ViewCache*> views_{nullptr};
  Transport* transport_ = nullptr;
  std::shared_ptr<SharedRegion> header_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  SourceCore core_;
  std::vector<SlotData> slots_;
  std::shared_ptr<const PreparedSource> prepared_;
  std::shared_ptr<const PreparedSource> proved_;  // compared with the live weights in full once
  CpuExecutor publisher_;                         // used by one publication at a time
  std::mutex answering_;
  CpuExecutor answerer_;  // for sums that no snapshot made; under answering_
};

}  // namespace bascule
