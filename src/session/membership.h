// From the directory's membership to the planner's world.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bascule/deadline.h"
#include "bascule/status.h"
#include "coordinator/directory.h"
#include "plan/plan.h"

namespace bascule {

// One membership seen by one engine: the trainers and that engine's ranks, planned. Immutable.
//
// Engines are planned one by one, so that a rank with a wrong layout can only stop its own engine.
struct WorldView {
  Membership membership;
  std::string engine;
  std::vector<MemberInfo> infos;  // parallel to the planner's members
  std::shared_ptr<const Planner> planner;

  [[nodiscard]] const World& world() const { return planner->world(); }
  // Member id of a rank, or -1.
  [[nodiscard]] int64_t Trainer(uint32_t rank) const;
  [[nodiscard]] int64_t Rollout(uint32_t rank) const;
};

// Which membership a version is planned with. epoch 0: the newest.
struct PlanBasis {
  VersionId id;
  uint64_t epoch = 0;
  bool own_membership = false;  // PollReply
};

// "trainer 3" or "engine e0 rank 1", for messages.
[[nodiscard]] std::string MemberName(const MemberInfo& member);

// Two-sided coverage of the view's engine (layout/coverage.h); OK while some of its ranks have not
// joined: what they want is not known.
[[nodiscard]] Status CheckEngineCoverage(const WorldView& view);

// Fetches and keeps what the planner needs. Thread-safe.
class ViewCache {
 public:
  explicit ViewCache(Directory* directory) : directory_(directory) {}

  // The view of the newest membership for an engine; templates and plans that did not change are
  // not fetched or made again.
  [[nodiscard]] Result<std::shared_ptr<const WorldView>> Newest(const std::string& engine,
                                                                Deadline deadline);
  // The view that a version is planned with (Directory::MembersFor): one for all ranks of an
  // engine. Asks nobody where a view of that epoch is at hand.
  [[nodiscard]] Result<std::shared_ptr<const WorldView>> For(const std::string& engine,
                                                             const PlanBasis& basis,
                                                             Deadline deadline);
  // A view made lately whose planner has this digest, or null.
  [[nodiscard]] std::shared_ptr<const WorldView> Find(const ContentDigest& plan) const;

 private:
  [[nodiscard]] Result<std::shared_ptr<const WorldView>> Plan(const std::string& engine,
                                                              Membership membership,
                                                              Deadline deadline);
  [[nodiscard]] Result<std::shared_ptr<const WorldTemplate>> Template(const ContentDigest& digest,
                                                                      Deadline deadline);

  Directory* directory_;
  mutable std::mutex mutex_;
  std::map<ContentDigest, std::shared_ptr<const WorldTemplate>> templates_;
  std::vector<std::shared_ptr<const WorldView>> views_;  // newest last, bounded
  // Views by (engine, epoch), of plain memberships only.
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<const WorldView>> by_epoch_;
};

// Equal for ranks that should be able to map each other's memory: the kernel's boot id and network
// namespace (abstract sockets are per namespace), or the socket directory. A hint only; the
// transport's probe decides.
[[nodiscard]] std::string NodeHint(const std::string& socket_directory);

}  // namespace bascule
