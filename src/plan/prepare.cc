#include <fmt/format.h>

#include <algorithm>

#include "plan/prepared.h"
#include "plan/serialize.h"

namespace bascule::plan {
namespace {

std::string NameOf(const Member& member) {
  if (member.role == Role::kTrainer) return fmt::format("trainer {}", member.rank);
  return fmt::format("engine {} rank {}", member.engine, member.rank);
}

Status CheckMember(const World& world, const Member& member) {
  auto wrong = [&](std::string what) {
    return Status(Code::kInvalidArgument, std::move(what)).WithPeer(NameOf(member));
  };
  if (member.world_template >= world.templates.size()) {
    return wrong(fmt::format("template {} is not among the {} of this world", member.world_template,
                             world.templates.size()));
  }
  const auto& axes = world.templates[member.world_template]->axis_sizes;
  if (member.coordinates.size() != axes.size()) {
    return wrong(fmt::format("{} coordinates for a mesh of {} axes", member.coordinates.size(),
                             axes.size()));
  }
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    if (member.coordinates[axis] >= axes[axis]) {
      return wrong(fmt::format("coordinate {} on axis {} of size {}", member.coordinates[axis],
                               axis, axes[axis]));
    }
  }
  return Status::Ok();
}

Status CheckWorld(const World& world) {
  if (world.templates.size() != world.template_digests.size()) {
    return {Code::kInvalidArgument, "a world needs one digest per template"};
  }
  if (world.chunk_bytes == 0) return {Code::kInvalidArgument, "chunk_bytes is 0"};
  auto key = [](const Member& m) { return std::tie(m.role, m.engine, m.rank); };
  for (size_t i = 0; i < world.members.size(); ++i) {
    BASCULE_RETURN_IF_ERROR(CheckMember(world, world.members[i]));
    if (i > 0 && !(key(world.members[i - 1]) < key(world.members[i]))) {
      return Status(Code::kInvalidArgument,
                    "members must be sorted by (role, engine, rank), unique")
          .WithPeer(NameOf(world.members[i]));
    }
  }
  return Status::Ok();
}

std::vector<uint32_t> UsersOf(const World& world, Role role, uint32_t world_template) {
  std::vector<uint32_t> users;
  for (uint32_t id = 0; id < world.members.size(); ++id) {
    const Member& member = world.members[id];
    if (member.role == role && member.world_template == world_template) users.push_back(id);
  }
  return users;
}

void AddNodes(Prepared* prepared) {
  const auto& members = prepared->world.members;
  std::vector<uint32_t> numbers;
  for (const Member& member : members) numbers.push_back(member.node);
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  prepared->nodes.resize(numbers.size());
  for (uint32_t id = 0; id < members.size(); ++id) {
    auto at = std::lower_bound(numbers.begin(), numbers.end(), members[id].node);
    const auto index = static_cast<uint32_t>(at - numbers.begin());
    prepared->node_of.push_back(index);
    Node& node = prepared->nodes[index];
    (members[id].role == Role::kTrainer ? node.trainers : node.rollouts).push_back(id);
  }
}

void AddNeeds(Prepared* prepared) {
  const World& world = prepared->world;
  prepared->slot_of.assign(world.members.size(), kNone);
  prepared->ordinal_of.assign(world.members.size(), kNone);
  for (uint32_t slot = 0; slot < prepared->joint.need_templates.size(); ++slot) {
    const uint32_t t = prepared->joint.need_templates[slot];
    TemplateUsers users(t, UsersOf(world, Role::kRollout, t));
    for (uint32_t i = 0; i < users.members().size(); ++i) {
      prepared->slot_of[users.members()[i]] = slot;
      prepared->ordinal_of[users.members()[i]] = i;
    }
    auto& places = prepared->need_places.emplace_back();
    for (uint32_t c = 0; c < world.templates[t]->classes.size(); ++c) {
      places.push_back(users.PlacementOf(world, c));
    }
    prepared->needers.push_back(std::move(users));
  }
}

// A group of trainers with equal coordinates on the axes that matter, hence equal boxes.
using HolderGroup = const std::vector<uint32_t>*;

uint32_t InternOwners(std::span<const uint32_t> owners, const std::vector<HolderGroup>& groups,
                      HolderSets* sets) {
  if (owners.size() == 1) return sets->Intern(*groups[owners[0]]);
  std::vector<uint32_t> members;
  for (uint32_t group : owners) {
    members.insert(members.end(), groups[group]->begin(), groups[group]->end());
  }
  std::sort(members.begin(), members.end());
  return sets->Intern(members);
}

HolderCells CellsOf(const World& world, const std::vector<uint32_t>& tuple,
                    std::vector<TemplateUsers>* users, HolderSets* sets) {
  std::vector<OwnedBox> held;
  std::vector<HolderGroup> groups;
  std::vector<Placement> alive;  // keeps the groups
  for (size_t slot = 0; slot < tuple.size(); ++slot) {
    if (tuple[slot] == kNone) continue;
    const Placement& places = alive.emplace_back((*users)[slot].PlacementOf(world, tuple[slot]));
    for (size_t g = 0; g < places.boxes.size(); ++g) {
      for (const Box& box : places.boxes[g]) {
        if (!box.empty()) held.push_back({box, static_cast<uint32_t>(groups.size())});
      }
      groups.push_back(&places.groups->members[g]);
    }
  }
  Cells cells = Refine(std::move(held));
  HolderCells result;
  std::vector<uint32_t> order;
  result.index = BoxIndex(std::move(cells.boxes), &order);
  for (uint32_t cell : order) {
    result.set.push_back(InternOwners(cells.OwnersOf(cell), groups, sets));
  }
  return result;
}

void AddHolders(Prepared* prepared) {
  const World& world = prepared->world;
  std::vector<TemplateUsers> users;
  for (uint32_t t : prepared->joint.source_templates) {
    users.emplace_back(t, UsersOf(world, Role::kTrainer, t));
  }
  for (const auto& tuple : prepared->joint.source_tuples) {
    prepared->holder_cells.push_back(CellsOf(world, tuple, &users, &prepared->sets));
  }
}

Status CheckHeld(const Prepared& prepared, const JointClass& joined, const Box& need,
                 uint32_t needer) {
  int64_t held = 0;
  prepared.HoldersOf(joined).index.ForEachOverlap(
      need, [&held](uint32_t, const Box& common) { held += common.size(); });
  if (held == need.size()) return Status::Ok();
  const std::string name(prepared.joint.items[joined.first_item]);
  return Status(Code::kNotFound,
                fmt::format("no trainer holds {} of the {} elements {} of {} that {} needs",
                            need.size() - held, need.size(), need.ToString(), name,
                            NameOf(prepared.world.members[needer])))
      .WithPeer(NameOf(prepared.world.members[needer]))
      .WithTensor(name);
}

// Everything that a rollout needs must be held by some trainer.
Status CheckCoverage(const Prepared& prepared) {
  for (const JointClass& joined : prepared.joint.classes) {
    int64_t elements = 1;
    for (int64_t extent : joined.shape) elements *= extent;
    if (prepared.HoldersOf(joined).index.elements() == elements) continue;
    for (size_t slot = 0; slot < joined.need_class.size(); ++slot) {
      if (joined.need_class[slot] == kNone) continue;
      const Placement& places = prepared.need_places[slot][joined.need_class[slot]];
      for (size_t g = 0; g < places.boxes.size(); ++g) {
        for (const Box& need : places.boxes[g]) {
          BASCULE_RETURN_IF_ERROR(CheckHeld(prepared, joined, need, places.groups->members[g][0]));
        }
      }
    }
  }
  return Status::Ok();
}

ContentDigest DigestPlan(const Prepared& prepared) {
  const World& world = prepared.world;
  Writer out;
  out.U32(kPlannerVersion);
  out.U64(world.chunk_bytes);
  out.U64(world.whole_bytes);
  out.U64(world.template_digests.size());
  for (const ContentDigest& digest : world.template_digests) {
    out.U64(digest.high);
    out.U64(digest.low);
  }
  out.U64(world.members.size());
  for (const Member& member : world.members) {
    out.U32(static_cast<uint32_t>(member.role));
    out.Text(member.engine);
    out.U32(member.rank);
    out.U32(member.node);
    out.U32(member.world_template);
    out.List(member.coordinates);
  }
  out.U64(prepared.shares.size());
  for (const Shares& shares : prepared.shares) {
    out.List(shares.holders);
    out.List(shares.bytes);
  }
  return DigestOf(out.bytes());
}

}  // namespace

const std::vector<Box>& Prepared::NeedOf(uint32_t member, const JointClass& joined) const {
  static const std::vector<Box> kNothing;
  const uint32_t slot = slot_of[member];
  if (slot == kNone || joined.need_class[slot] == kNone) return kNothing;
  const Placement& places = need_places[slot][joined.need_class[slot]];
  return places.boxes[places.groups->group_of[ordinal_of[member]]];
}

DType Prepared::WireOf(uint32_t member, const JointClass& joined) const {
  const uint32_t slot = slot_of[member];
  const WorldTemplate& own = *world.templates[joint.need_templates[slot]];
  return WireDType(joined.published, own.classes[joined.need_class[slot]].dtype);
}

std::vector<DType> Prepared::WiresOn(const Node& node, const JointClass& joined) const {
  std::vector<DType> wires;
  for (uint32_t member : node.rollouts) {
    if (NeedOf(member, joined).empty()) continue;
    const DType wire = WireOf(member, joined);
    if (std::find(wires.begin(), wires.end(), wire) == wires.end()) wires.push_back(wire);
  }
  return wires;
}

Cells Prepared::NeedsOn(const Node& node, const JointClass& joined, DType wire) const {
  std::vector<OwnedBox> needs;
  for (uint32_t member : node.rollouts) {
    const std::vector<Box>& boxes = NeedOf(member, joined);
    if (boxes.empty() || WireOf(member, joined) != wire) continue;
    for (const Box& box : boxes) needs.push_back({box, member});
  }
  return Refine(std::move(needs));
}

SourceChoice Prepared::ChoiceFor(uint32_t set, uint32_t node) const {
  if (!nodes[node].trainers.empty()) {
    auto local = on_node.find({set, node});
    if (local != on_node.end()) return local->second;
  }
  SourceChoice choice;
  choice.shares = shares_of_set[set];
  if (choice.shares == kNone) choice.holder = sets.MembersOf(set)[0];
  return choice;
}

Result<Prepared> PrepareWorld(World world) {
  BASCULE_RETURN_IF_ERROR(CheckWorld(world));
  Prepared prepared;
  prepared.world = std::move(world);
  BASCULE_ASSIGN_OR_RETURN(prepared.joint, JoinClasses(prepared.world));
  AddNodes(&prepared);
  AddNeeds(&prepared);
  AddHolders(&prepared);
  BASCULE_RETURN_IF_ERROR(CheckCoverage(prepared));
  BalanceSources(&prepared);
  prepared.digest = DigestPlan(prepared);
  return prepared;
}

}  // namespace bascule::plan
