#include "session/membership.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "layout/coverage.h"

namespace bascule {
namespace {

constexpr size_t kViewsKept = 32;

bool SameMembers(const std::vector<MemberInfo>& a, const std::vector<MemberInfo>& b) {
  return a == b;
}

// Node names to dense numbers, in sorted order, so that every rank numbers alike.
std::map<std::string, uint32_t> NumberNodes(const std::vector<MemberInfo>& members) {
  std::map<std::string, uint32_t> nodes;
  for (const MemberInfo& member : members) nodes.emplace(member.node, 0);
  uint32_t next = 0;
  for (auto& [name, number] : nodes) number = next++;
  return nodes;
}

}  // namespace

int64_t WorldView::Trainer(uint32_t rank) const {
  for (size_t i = 0; i < infos.size(); ++i) {
    if (infos[i].role == Role::kTrainer && infos[i].rank == rank) return static_cast<int64_t>(i);
  }
  return -1;
}

int64_t WorldView::Rollout(uint32_t rank) const {
  for (size_t i = 0; i < infos.size(); ++i) {
    if (infos[i].role == Role::kRollout && infos[i].rank == rank) return static_cast<int64_t>(i);
  }
  return -1;
}

std::string MemberName(const MemberInfo& member) {
  if (member.role == Role::kTrainer) return fmt::format("trainer {}", member.rank);
  return fmt::format("engine {} rank {}", member.engine, member.rank);
}

Status CheckEngineCoverage(const WorldView& view) {
  std::vector<WorldMember> sources;
  std::vector<WorldMember> targets;
  size_t expected = 0;
  const World& world = view.world();
  for (size_t i = 0; i < world.members.size(); ++i) {
    const Member& member = world.members[i];
    auto& side = member.role == Role::kTrainer ? sources : targets;
    side.push_back({world.templates[member.world_template].get(), member.coordinates});
    if (member.role == Role::kRollout) expected = view.infos[i].world_size;
  }
  if (!view.membership.complete || targets.size() < expected) return Status::Ok();
  return CheckCoverage(sources, targets);
}

Result<std::shared_ptr<const WorldTemplate>> ViewCache::Template(const ContentDigest& digest,
                                                                 Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    auto it = templates_.find(digest);
    if (it != templates_.end()) return it->second;
  }
  auto blob = directory_->GetBlob(digest, deadline);
  if (blob.status().code() == Code::kNotFound) {
    return Status(Code::kUnavailable,
                  "the coordinator was restarted and a rank has not told it its layout again yet; "
                  "try again");
  }
  BASCULE_ASSIGN_OR_RETURN(std::string bytes, std::move(blob));
  if (DigestOf(bytes) != digest) {
    return Status(Code::kDataLoss,
                  "the layout template from the coordinator does not have the "
                  "digest that was asked for");
  }
  BASCULE_ASSIGN_OR_RETURN(WorldTemplate parsed, WorldTemplate::Parse(bytes));
  auto shared = std::make_shared<const WorldTemplate>(std::move(parsed));
  std::lock_guard lock(mutex_);
  templates_[digest] = shared;
  return std::shared_ptr<const WorldTemplate>(shared);
}

Result<std::shared_ptr<const WorldView>> ViewCache::Newest(const std::string& engine,
                                                           Deadline deadline) {
  BASCULE_ASSIGN_OR_RETURN(Membership membership, directory_->Members(deadline));
  return Plan(engine, std::move(membership), deadline);
}

Result<std::shared_ptr<const WorldView>> ViewCache::For(const std::string& engine,
                                                        const PlanBasis& basis, Deadline deadline) {
  const bool plain = basis.epoch != 0 && !basis.own_membership;
  if (plain) {
    std::lock_guard lock(mutex_);
    auto it = by_epoch_.find({engine, basis.epoch});
    if (it != by_epoch_.end()) return it->second;
  }
  BASCULE_ASSIGN_OR_RETURN(Membership membership,
                           directory_->MembersFor(basis.id, basis.epoch, deadline));
  BASCULE_ASSIGN_OR_RETURN(auto view, Plan(engine, std::move(membership), deadline));
  if (plain) {
    std::lock_guard lock(mutex_);
    if (by_epoch_.size() == kViewsKept) by_epoch_.erase(by_epoch_.begin());
    by_epoch_[{engine, basis.epoch}] = view;
  }
  return view;
}

Result<std::shared_ptr<const WorldView>> ViewCache::Plan(const std::string& engine,
                                                         Membership membership, Deadline deadline) {
  std::vector<MemberInfo> infos;
  std::copy_if(membership.members.begin(), membership.members.end(), std::back_inserter(infos),
               [&engine](const MemberInfo& member) {
                 return member.role == Role::kTrainer || member.engine == engine;
               });
  {
    std::lock_guard lock(mutex_);
    for (const auto& view : views_) {
      if (view->engine == engine && view->membership.term == membership.term &&
          SameMembers(view->infos, infos)) {
        return view;
      }
    }
  }
  World world;
  std::map<ContentDigest, uint32_t> template_index;
  const auto nodes = NumberNodes(infos);
  for (const MemberInfo& info : infos) {
    auto [it, added] =
        template_index.emplace(info.world_template, static_cast<uint32_t>(world.templates.size()));
    if (added) {
      BASCULE_ASSIGN_OR_RETURN(auto shared, Template(info.world_template, deadline));
      world.templates.push_back(std::move(shared));
      world.template_digests.push_back(info.world_template);
    }
    world.members.push_back({.role = info.role,
                             .engine = info.engine,
                             .rank = info.rank,
                             .node = nodes.at(info.node),
                             .world_template = it->second,
                             .coordinates = info.coordinates});
  }
  BASCULE_ASSIGN_OR_RETURN(auto planner, Planner::Prepare(std::move(world)));
  auto view = std::make_shared<WorldView>();
  view->membership = std::move(membership);
  view->engine = engine;
  view->infos = std::move(infos);
  view->planner = std::move(planner);
  std::lock_guard lock(mutex_);
  if (views_.size() == kViewsKept) views_.erase(views_.begin());
  views_.push_back(view);
  return std::shared_ptr<const WorldView>(view);
}

std::shared_ptr<const WorldView> ViewCache::Find(const ContentDigest& plan) const {
  std::lock_guard lock(mutex_);
  for (auto it = views_.rbegin(); it != views_.rend(); ++it) {
    if ((*it)->planner->digest() == plan) return *it;
  }
  return nullptr;
}

std::string NodeHint(const std::string& socket_directory) {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat net {};
  uint64_t namespace_id = stat("/proc/self/ns/net", &net) == 0 ? net.st_ino : 0;
  return DigestOf(fmt::format("{}/{}/{}", boot_id, namespace_id, socket_directory)).ToString();
}

}  // namespace bascule
