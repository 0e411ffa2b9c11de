// Which boxes the ranks of one template have: computed once for ranks whose coordinates agree on
// the axes that matter.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layout/world_template.h"
#include "plan/plan.h"

namespace bascule::plan {

// Members that use one template in one role, grouped by their coordinates along some axes.
struct AxisGroups {
  std::vector<uint32_t> axes;                  // sorted
  std::vector<uint32_t> group_of;              // per user, in order of `TemplateUsers::members`
  std::vector<std::vector<uint32_t>> members;  // per group: member ids, sorted
};

// The boxes of one class, per group of members.
struct Placement {
  std::shared_ptr<const AxisGroups> groups;
  std::vector<std::vector<Box>> boxes;  // per group; may be empty
};

class TemplateUsers {
 public:
  // `members` are ids, sorted.
  TemplateUsers(uint32_t world_template, std::vector<uint32_t> members)
      : template_(world_template), members_(std::move(members)) {}

  [[nodiscard]] uint32_t world_template() const { return template_; }
  [[nodiscard]] const std::vector<uint32_t>& members() const { return members_; }
  [[nodiscard]] Placement PlacementOf(const World& world, uint32_t class_index);

 private:
  std::shared_ptr<const AxisGroups> GroupsBy(const World& world, std::vector<uint32_t> axes);

  uint32_t template_;
  std::vector<uint32_t> members_;
  std::vector<std::shared_ptr<const AxisGroups>> known_;
};

}  // namespace bascule::plan
