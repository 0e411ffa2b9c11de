// WorldTemplate::Validate: what Parse, BoxesOf and MapArena rely on.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "layout/checked.h"
#include "layout/world_template.h"

namespace bascule {
namespace {

Status Invalid(std::string message) {
  return Status(Code::kInvalidArgument, "world template: " + std::move(message));
}

// What classes need to know about a list.
struct ListFacts {
  int64_t end = 0;    // beyond the last index of any entry
  uint64_t most = 0;  // intervals of the longest entry
};

Status CheckAxes(const WorldTemplate& world) {
  if (world.axis_sizes.size() > WorldTemplate::kMaxAxes) {
    return Invalid(
        fmt::format("{} axes, more than {}", world.axis_sizes.size(), WorldTemplate::kMaxAxes));
  }
  uint64_t ranks = 1;
  for (uint32_t size : world.axis_sizes) {
    ranks *= size;  // both factors below 2^32
    if (size == 0 || ranks > WorldTemplate::kMaxRanks) {
      return Invalid(fmt::format("mesh of sizes [{}] has no rank or more than {}",
                                 fmt::join(world.axis_sizes, ", "), WorldTemplate::kMaxRanks));
    }
  }
  return Status::Ok();
}

Result<ListFacts> CheckList(const IntervalList& list, size_t index) {
  const std::vector<uint32_t>& offsets = list.offsets;
  if (offsets.size() < 2 || offsets.front() != 0 || offsets.back() != list.intervals.size() ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    return Invalid(fmt::format("list {} has no entries or wrong offsets", index));
  }
  ListFacts facts;
  for (uint32_t entry = 0; entry < list.size(); ++entry) {
    int64_t end = 0;
    for (const Interval& interval : list.Entry(entry)) {
      if (interval.begin < end || interval.empty()) {
        return Invalid(
            fmt::format("list {} entry {}: intervals are not sorted, disjoint and "
                        "non-empty",
                        index, entry));
      }
      end = interval.end;
    }
    facts.end = std::max(facts.end, end);
    facts.most = std::max<uint64_t>(facts.most, list.Entry(entry).size());
  }
  return facts;
}

Status CheckSelect(const WorldTemplate& world, const DimSelect& select) {
  if (select.list >= world.lists.size()) {
    return Invalid(fmt::format("list {} of {}", select.list, world.lists.size()));
  }
  uint64_t entries = 1;
  uint64_t seen = 0;
  for (uint32_t axis : select.axes) {
    if (axis >= world.axis_sizes.size() || (seen >> axis & 1) != 0) {
      return Invalid(fmt::format("axis {} does not exist or is used twice", axis));
    }
    seen |= uint64_t{1} << axis;
    entries *= world.axis_sizes[axis];
  }
  if (entries != world.lists[select.list].size()) {
    return Invalid(fmt::format("list {} has {} entries for {} coordinates", select.list,
                               world.lists[select.list].size(), entries));
  }
  return Status::Ok();
}

// A bound on the boxes and bytes of a class at any coordinates.
struct ClassFacts {
  uint64_t boxes = 0;
  uint64_t bytes = 0;
};

Result<ClassFacts> CheckClass(const WorldTemplate& world, const TemplateClass& tensor_class,
                              const std::vector<ListFacts>& lists) {
  const size_t ndim = tensor_class.shape.size();
  if (ndim > kMaxDims || DTypeSize(tensor_class.dtype) == 0) {
    return Invalid(fmt::format("a class has {} dimensions and dtype {}", ndim,
                               static_cast<int>(tensor_class.dtype)));
  }
  std::optional<int64_t> bytes = TensorBytes(tensor_class.shape, tensor_class.dtype);
  if (!bytes) return Invalid("a shape has a negative extent or more than 2^63 bytes");
  ClassFacts facts;
  for (const BoxProduct& product : tensor_class.products) {
    const bool scalar = ndim == 0 && product.dims.size() <= 1;
    if (!scalar && product.dims.size() != ndim) {
      return Invalid(
          fmt::format("a product of {} dimensions in a class of {}", product.dims.size(), ndim));
    }
    uint64_t boxes = 1;
    for (size_t d = 0; d < product.dims.size(); ++d) {
      BASCULE_RETURN_IF_ERROR(CheckSelect(world, product.dims[d]));
      const ListFacts& list = lists[product.dims[d].list];
      if (list.end > (ndim == 0 ? 1 : tensor_class.shape[d])) {
        return Invalid(fmt::format("list {} reaches {}, beyond dimension {} of [{}]",
                                   product.dims[d].list, list.end, d,
                                   fmt::join(tensor_class.shape, ", ")));
      }
      // Both factors are at most 2^32; the cap keeps the product there.
      boxes = std::min(boxes * list.most, WorldTemplate::kMaxBoxes + 1);
    }
    facts.boxes += boxes;
    if (__builtin_add_overflow(facts.bytes, static_cast<uint64_t>(*bytes), &facts.bytes)) {
      return Invalid("the boxes of a class exceed 2^64 bytes");
    }
  }
  return facts;
}

Status CheckText(const std::string& text, std::string_view what) {
  if (!text.empty() && text.size() <= kMaxNameBytes) return Status::Ok();
  return Invalid(
      fmt::format("{} of {} bytes; 1 to {} are allowed", what, text.size(), kMaxNameBytes));
}

Status CheckNames(const WorldTemplate& world, const std::vector<ClassFacts>& classes) {
  if (world.names.size() != world.class_of.size()) return Invalid("names without classes");
  if (world.names.size() > std::numeric_limits<uint32_t>::max()) return Invalid("too many names");
  ClassFacts total;
  for (size_t n = 0; n < world.names.size(); ++n) {
    BASCULE_RETURN_IF_ERROR(CheckText(world.names[n], "a name"));
    if (n > 0 && world.names[n - 1] >= world.names[n]) {
      return Invalid("names are not sorted and unique at '" + world.names[n] + "'");
    }
    if (world.class_of[n] >= classes.size()) return Invalid("a name's class does not exist");
    const ClassFacts& facts = classes[world.class_of[n]];
    total.boxes += facts.boxes;  // capped at every step
    if (total.boxes > WorldTemplate::kMaxBoxes) {
      return Invalid(
          fmt::format("a rank may hold more than {} boxes at '{}'; interleave along a "
                      "stride or merge boxes",
                      WorldTemplate::kMaxBoxes, world.names[n]));
    }
    if (__builtin_add_overflow(total.bytes, facts.bytes, &total.bytes) || total.bytes > uint64_t{1}
                                                                                            << 62) {
      return Invalid("a rank's boxes may exceed 2^62 bytes");
    }
  }
  return Status::Ok();
}

Status CheckAliases(const WorldTemplate& world) {
  auto is_alias = [&world](const std::string& name) {
    auto at = std::lower_bound(world.aliases.begin(), world.aliases.end(), name,
                               [](const Alias& a, const std::string& b) { return a.name < b; });
    return at != world.aliases.end() && at->name == name;
  };
  for (size_t i = 0; i < world.aliases.size(); ++i) {
    const Alias& alias = world.aliases[i];
    BASCULE_RETURN_IF_ERROR(CheckText(alias.name, "an alias"));
    BASCULE_RETURN_IF_ERROR(CheckText(alias.target, "an alias target"));
    if (i > 0 && world.aliases[i - 1].name >= alias.name) {
      return Invalid("aliases are not sorted and unique at '" + alias.name + "'");
    }
    if (world.Find(alias.name) >= 0) {
      return Invalid("'" + alias.name + "' is an alias and a tensor");
    }
    if (is_alias(alias.target)) {
      return Invalid("'" + alias.name + "' is an alias of the alias '" + alias.target + "'");
    }
  }
  for (size_t i = 0; i < world.unused.size(); ++i) {
    BASCULE_RETURN_IF_ERROR(CheckText(world.unused[i], "an unused pattern"));
    if (i > 0 && world.unused[i - 1] >= world.unused[i]) {
      return Invalid("unused patterns are not sorted and unique at '" + world.unused[i] + "'");
    }
  }
  return Status::Ok();
}

}  // namespace

Status WorldTemplate::Validate() const {
  BASCULE_RETURN_IF_ERROR(CheckAxes(*this));
  std::vector<ListFacts> list_facts;
  for (size_t i = 0; i < lists.size(); ++i) {
    BASCULE_ASSIGN_OR_RETURN(ListFacts facts, CheckList(lists[i], i));
    list_facts.push_back(facts);
  }
  std::vector<ClassFacts> class_facts;
  for (const TemplateClass& tensor_class : classes) {
    BASCULE_ASSIGN_OR_RETURN(ClassFacts facts, CheckClass(*this, tensor_class, list_facts));
    class_facts.push_back(facts);
  }
  BASCULE_RETURN_IF_ERROR(CheckNames(*this, class_facts));
  return CheckAliases(*this);
}

}  // namespace bascule
