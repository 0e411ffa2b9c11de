// Joint classes: tensors that are alike on every side, so that the planner works on a few dozen
// classes and not on every tensor.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "bascule/status.h"
#include "plan/boxes.h"
#include "plan/plan.h"

namespace bascule::plan {

// Tensors whose class indices agree in every template in use. Only tensors that the template of
// some rollout stores.
struct JointClass {
  std::vector<int64_t> shape;
  DType published = DType::kF32;
  uint32_t first_item = 0;  // Joint::items[first_item .. + items)
  uint32_t items = 0;
  uint32_t source_tuple = 0;         // index in Joint::source_tuples
  std::vector<uint32_t> need_class;  // per Joint::need_templates: class there, or kNone
};

struct Joint {
  std::vector<uint32_t> source_templates;  // World::templates indices that trainers use, sorted
  std::vector<uint32_t> need_templates;    // ... that rollouts use
  std::vector<JointClass> classes;         // by their first tensor name
  // The class of a tensor in each of source_templates, or kNone: what fixes who holds it.
  std::vector<std::vector<uint32_t>> source_tuples;
  // Tensors by class, then by name; `names` as destinations store them.
  std::vector<std::string_view> items;
  // Per World::templates: index in its names of each item, or kNone. A trainer's template counts
  // an alias as its target. Empty where no member uses the template.
  std::vector<std::vector<uint32_t>> name_index;
  // Per need template: index of each item among the names it stores, or kNone.
  std::vector<std::vector<uint32_t>> own_name_index;
};

// Errors: shapes that disagree, more than one publish dtype, dtypes that cannot be cast.
[[nodiscard]] Result<Joint> JoinClasses(const World& world);

}  // namespace bascule::plan
