#include "layout/flat_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "layout/checked.h"

namespace bascule {
namespace {

Status Invalid(const LogicalTensor& tensor, std::string message) {
  return Status(Code::kInvalidArgument, std::move(message)).WithTensor(tensor.name);
}

int64_t ElementsFrom(const std::vector<int64_t>& shape, size_t dim) {
  int64_t elements = 1;
  for (size_t d = dim; d < shape.size(); ++d) elements *= shape[d];
  return elements;
}

// Elements [begin, end) of the sub-array from dimension `dim` on; `prefix` fixes the ones before.
void AppendFlatBoxes(const std::vector<int64_t>& shape, size_t dim, int64_t begin, int64_t end,
                     Box prefix, std::vector<Box>* boxes) {
  if (begin >= end) return;
  const int64_t row = ElementsFrom(shape, dim + 1);
  auto fix = [&](int64_t first, int64_t last) {
    Box box = prefix;
    box[static_cast<int>(dim)] = {first, last};
    return box;
  };
  int64_t first = begin / row;
  const int64_t last = end / row;
  if (first == last) {  // inside one row
    AppendFlatBoxes(shape, dim + 1, begin % row, end % row, fix(first, first + 1), boxes);
    return;
  }
  if (begin % row != 0) {
    AppendFlatBoxes(shape, dim + 1, begin % row, row, fix(first, first + 1), boxes);
    ++first;
  }
  if (first < last) boxes->push_back(fix(first, last));
  if (end % row != 0) AppendFlatBoxes(shape, dim + 1, 0, end % row, fix(last, last + 1), boxes);
}

}  // namespace

std::vector<Box> FlatBoxes(const std::vector<int64_t>& shape, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  if (shape.empty()) {
    if (begin < end) boxes.push_back(Box());
  } else {
    AppendFlatBoxes(shape, 0, begin, end, Box::Whole(shape), &boxes);
  }
  return boxes;
}

namespace {

// A tensor of a flat buffer, its placements checked.
struct FlatItem {
  const FlatTensor* declared = nullptr;
  std::vector<AxisRule> rules;
  std::vector<std::vector<AxisRule>> cuts;  // per dimension
};

// A flat buffer, its names and numbers checked.
struct FlatPlan {
  std::vector<FlatItem> items;
  std::vector<uint32_t> flat_axes;   // in the order of the rank number
  std::vector<uint32_t> other_axes;  // that any tensor's placements depend on, sorted
  int64_t ranks = 1;                 // along flat_axes
};

// One tensor's part at some coordinates of the other axes.
struct FlatPart {
  bool present = false;
  std::vector<IndexSet> sets;  // per dimension
  std::vector<int64_t> shape;  // of the part
  int64_t start = 0;           // in the buffer, in elements
  int64_t size = 0;
};

Result<FlatItem> PlanItem(const Mesh& mesh, const FlatTensor& declared,
                          const std::vector<uint32_t>& flat_axes) {
  const LogicalTensor& tensor = declared.tensor;
  BASCULE_RETURN_IF_ERROR(TemplateBuilder::CheckTensor(tensor));
  FlatItem item;
  item.declared = &declared;
  Result<std::vector<AxisRule>> rules = RulesOf(mesh, declared.placements, tensor.shape.size());
  if (!rules.ok()) return rules.status().WithTensor(tensor.name);
  item.rules = std::move(rules).value();
  for (const AxisRule& rule : item.rules) {
    if (std::find(flat_axes.begin(), flat_axes.end(), rule.axis) != flat_axes.end()) {
      return Invalid(tensor, "axis '" + mesh.axis_names[rule.axis] +
                                 "' cuts the flat buffer; it cannot place the tensor too");
    }
    if (rule.placement.padded != 0) return Invalid(tensor, "ShardPadded in a flat buffer");
  }
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    Result<std::vector<AxisRule>> cuts = CutsOf(item.rules, static_cast<int>(d));
    if (!cuts.ok()) return cuts.status().WithTensor(tensor.name);
    Status status = CheckCuts(*cuts, tensor.shape[d]);
    if (!status.ok()) return std::move(status).WithTensor(tensor.name);
    item.cuts.push_back(std::move(cuts).value());
  }
  return item;
}

Result<FlatPlan> PlanOf(const Mesh& mesh, const FlatBuffer& flat) {
  FlatPlan plan;
  for (const std::string& name : flat.axes) {
    int axis = mesh.Axis(name);
    auto number = static_cast<uint32_t>(axis);
    if (axis < 0 ||
        std::find(plan.flat_axes.begin(), plan.flat_axes.end(), number) != plan.flat_axes.end()) {
      return Status(Code::kInvalidArgument, "flat buffer: axis '" + name + "' is unknown or twice");
    }
    plan.flat_axes.push_back(number);
    plan.ranks *= mesh.axis_sizes[number];
  }
  if (!flat.cuts.empty() &&
      (flat.cuts.size() != static_cast<size_t>(plan.ranks) + 1 || flat.cuts[0] < 0 ||
       !std::is_sorted(flat.cuts.begin(), flat.cuts.end()))) {
    return Status(Code::kInvalidArgument,
                  fmt::format("flat buffer: {} cuts for {} ranks; give one more than ranks, not "
                              "falling",
                              flat.cuts.size(), plan.ranks));
  }
  for (const FlatTensor& tensor : flat.tensors) {
    BASCULE_ASSIGN_OR_RETURN(FlatItem item, PlanItem(mesh, tensor, plan.flat_axes));
    for (const AxisRule& rule : item.rules) {
      auto at = std::lower_bound(plan.other_axes.begin(), plan.other_axes.end(), rule.axis);
      if (rule.ranks > 1 && (at == plan.other_axes.end() || *at != rule.axis)) {
        plan.other_axes.insert(at, rule.axis);
      }
    }
    plan.items.push_back(std::move(item));
  }
  return plan;
}

// The parts at coordinates of the other axes, and the elements of the whole buffer there.
Result<std::vector<FlatPart>> PartsAt(const FlatPlan& plan,
                                      const std::vector<uint32_t>& coordinates, int64_t* total) {
  std::vector<FlatPart> parts;
  int64_t next = 0;
  *total = 0;
  for (const FlatItem& item : plan.items) {
    FlatPart& part = parts.emplace_back();
    const LogicalTensor& tensor = item.declared->tensor;
    part.present = Present(item.rules, coordinates);
    part.size = part.present ? 1 : 0;
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      part.sets.push_back(Apply(item.cuts[d], Stepped(0, tensor.shape[d], 1), coordinates));
      part.shape.push_back(SizeOf(part.sets[d]));
      part.size *= part.shape[d];  // at most the tensor's elements
    }
    part.start = item.declared->start >= 0 ? item.declared->start : next;
    std::optional<int64_t> end = CheckedAdd(part.start, part.size);
    if (!end) return Invalid(tensor, "lies beyond element 2^63 of the flat buffer");
    next = *end;
    *total = std::max(*total, next);
  }
  return parts;
}

Interval CutOf(const FlatBuffer& flat, const FlatPlan& plan, int64_t total, int64_t rank) {
  if (flat.cuts.empty()) return ChunkOf(total, plan.ranks, rank);
  auto r = static_cast<size_t>(rank);
  return {flat.cuts[r], flat.cuts[r + 1]};
}

int64_t FlatRank(const Mesh& mesh, const FlatPlan& plan, const std::vector<uint32_t>& coordinates) {
  int64_t rank = 0;
  for (uint32_t axis : plan.flat_axes) rank = rank * mesh.axis_sizes[axis] + coordinates[axis];
  return rank;
}

// The boxes of a part that lie in a cut of the buffer, in the part's own coordinates.
std::vector<Box> BoxesIn(const FlatPart& part, Interval cut) {
  int64_t begin = std::max(cut.begin, part.start) - part.start;
  int64_t end = std::min(cut.end, part.start + part.size) - part.start;
  return begin < end ? FlatBoxes(part.shape, begin, end) : std::vector<Box>();
}

// What one product of a tensor holds, by number of the combination of coordinates.
using Slot = std::map<uint32_t, std::vector<IndexSet>>;

BoxProduct ProductOf(const Slot& slot, size_t dims, uint32_t entries,
                     const std::vector<uint32_t>& axes, TemplateBuilder* world) {
  BoxProduct product;
  for (size_t d = 0; d < dims; ++d) {
    IntervalList list;
    for (const auto& [entry, sets] : slot) {
      list.offsets.resize(entry + 1, static_cast<uint32_t>(list.intervals.size()));
      list.intervals.insert(list.intervals.end(), sets[d].begin(), sets[d].end());
      list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
    }
    list.offsets.resize(entries + 1, static_cast<uint32_t>(list.intervals.size()));
    product.dims.push_back({world->InternList(std::move(list)), axes});
  }
  return product;
}

// A flat buffer at all coordinates.
class FlatWorld {
 public:
  FlatWorld(const FlatBuffer& flat, FlatPlan plan, TemplateBuilder* world)
      : flat_(flat), plan_(std::move(plan)), world_(world) {}

  Status Prepare() {
    const Mesh& mesh = world_->mesh();
    axes_ = plan_.other_axes;
    axes_.insert(axes_.end(), plan_.flat_axes.begin(), plan_.flat_axes.end());
    std::erase_if(axes_, [&](uint32_t axis) { return mesh.axis_sizes[axis] == 1; });
    std::sort(axes_.begin(), axes_.end());
    Status status;
    ForEachEntry(mesh, plan_.other_axes, [&](uint32_t, const std::vector<uint32_t>& coordinates) {
      if (!status.ok()) return;
      int64_t total = 0;
      Result<std::vector<FlatPart>> parts = PartsAt(plan_, coordinates, &total);
      if (!parts.ok()) {
        status = parts.status();
        return;
      }
      parts_.push_back(std::move(parts).value());
      totals_.push_back(total);
      AppendKey(total, &key_);
    });
    for (uint32_t axis : plan_.flat_axes) AppendKey(axis, &key_);
    for (uint32_t axis : axes_) AppendKey(axis, &key_);
    if (!flat_.cuts.empty()) {
      // Cuts relative to a tensor decide; a digest of them keeps keys short.
      std::string cuts;
      AppendKey(flat_.cuts, &cuts);
      key_ += DigestOf(cuts).ToString();
    }
    return status;
  }

  // Equal keys give equal products.
  [[nodiscard]] std::string KeyOf(size_t item) const {
    std::string key = key_;
    AppendKey(plan_.items[item].declared->tensor.shape, &key);
    AppendKey(plan_.items[item].declared->placements, &key);
    for (const std::vector<FlatPart>& parts : parts_) AppendKey(parts[item].start, &key);
    return key;
  }

  std::vector<uint32_t> ProductsOf(size_t item) {
    const Mesh& mesh = world_->mesh();
    std::vector<Slot> slots;
    size_t other = 0;
    ForEachEntry(mesh, plan_.other_axes, [&](uint32_t, std::vector<uint32_t> coordinates) {
      AddRanks(item, other++, std::move(coordinates), &slots);
    });
    uint32_t entries = 1;
    for (uint32_t axis : axes_) entries *= mesh.axis_sizes[axis];
    const size_t dims = std::max<size_t>(1, plan_.items[item].cuts.size());
    std::vector<uint32_t> products;
    for (const Slot& slot : slots) {
      products.push_back(
          world_->InternProduct(bascule::ProductOf(slot, dims, entries, axes_, world_)));
    }
    return products;
  }

 private:
  // Adds what the ranks at one combination of the other axes hold.
  void AddRanks(size_t item, size_t other, std::vector<uint32_t> coordinates,
                std::vector<Slot>* slots) {
    const Mesh& mesh = world_->mesh();
    const FlatPart& part = parts_[other][item];
    if (part.size == 0) return;
    for (int64_t rank = 0; rank < plan_.ranks; ++rank) {
      Interval cut = CutOf(flat_, plan_, totals_[other], rank);
      if (cut.end <= part.start || cut.begin >= part.start + part.size) continue;
      std::vector<Box> boxes = BoxesIn(part, cut);
      int64_t rest = rank;
      for (size_t a = plan_.flat_axes.size(); a-- > 0;) {
        uint32_t axis = plan_.flat_axes[a];
        coordinates[axis] = static_cast<uint32_t>(rest % mesh.axis_sizes[axis]);
        rest /= mesh.axis_sizes[axis];
      }
      uint32_t entry = 0;
      for (uint32_t axis : axes_) entry = entry * mesh.axis_sizes[axis] + coordinates[axis];
      if (slots->size() < boxes.size()) slots->resize(boxes.size());
      for (size_t b = 0; b < boxes.size(); ++b) {
        std::vector<IndexSet>& sets = (*slots)[b][entry];
        for (int d = 0; d < boxes[b].ndim(); ++d) {
          sets.push_back(Take(part.sets[static_cast<size_t>(d)], boxes[b][d]));
        }
        if (sets.empty()) sets.push_back({{0, 1}});  // a scalar: held here
      }
    }
  }

  const FlatBuffer& flat_;
  FlatPlan plan_;
  TemplateBuilder* world_;
  std::vector<uint32_t> axes_;                // of more than one rank, sorted
  std::vector<std::vector<FlatPart>> parts_;  // per combination of the other axes, per tensor
  std::vector<int64_t> totals_;
  std::string key_;
};

}  // namespace

Status FlatExpander::AddBoxes(const FlatBuffer& flat) {
  BASCULE_ASSIGN_OR_RETURN(FlatPlan plan, PlanOf(world_->mesh(), flat));
  FlatWorld expanded(flat, std::move(plan), world_);
  BASCULE_RETURN_IF_ERROR(expanded.Prepare());
  for (size_t i = 0; i < flat.tensors.size(); ++i) {
    auto [at, added] = products_.try_emplace(expanded.KeyOf(i));
    if (added) at->second = expanded.ProductsOf(i);
    for (uint32_t product : at->second) {
      BASCULE_RETURN_IF_ERROR(world_->AddBoxes(flat.tensors[i].tensor, product));
    }
  }
  return Status::Ok();
}

Result<int64_t> FlatExpander::LocalElements(const FlatBuffer& flat) {
  BASCULE_ASSIGN_OR_RETURN(FlatPlan plan, PlanOf(world_->mesh(), flat));
  if (!coordinates_->has_value()) {
    return Status(Code::kInvalidArgument, "the builder was created without coordinates");
  }
  int64_t total = 0;
  BASCULE_RETURN_IF_ERROR(PartsAt(plan, **coordinates_, &total).status());
  return CutOf(flat, plan, total, FlatRank(world_->mesh(), plan, **coordinates_)).size();
}

namespace {

// Bindings of one box of a part: one for each product of the intervals that the part's positions
// are in the tensor. `strides` are those of the part, `offset` that of the box, in bytes.
void AppendBindings(const FlatPart& part, const Box& box, size_t dim, int64_t offset,
                    Binding* binding, std::vector<Binding>* bindings) {
  if (dim == part.sets.size()) {
    binding->byte_offset = offset;
    bindings->push_back(*binding);
    return;
  }
  int64_t position = 0;
  for (const Interval& interval : Take(part.sets[dim], box[static_cast<int>(dim)])) {
    binding->box[static_cast<int>(dim)] = interval;
    AppendBindings(part, box, dim + 1, offset + position * binding->byte_strides[dim], binding,
                   bindings);
    position += interval.size();
  }
}

}  // namespace

Status FlatExpander::AddBindings(const FlatBuffer& flat, const LocalMemory& memory,
                                 BindingSink sink) {
  BASCULE_ASSIGN_OR_RETURN(FlatPlan plan, PlanOf(world_->mesh(), flat));
  int64_t total = 0;
  BASCULE_ASSIGN_OR_RETURN(std::vector<FlatPart> parts, PartsAt(plan, **coordinates_, &total));
  const Interval cut = CutOf(flat, plan, total, FlatRank(world_->mesh(), plan, **coordinates_));
  if (!memory.byte_strides.empty() || memory.byte_offset < 0 ||
      memory.buffer >= sink.layout->buffers.size()) {
    return Status(Code::kInvalidArgument,
                  "flat buffer: its memory is dense, at a non-negative offset of an added buffer");
  }
  const Buffer& buffer = sink.layout->buffers[memory.buffer];
  for (size_t i = 0; i < parts.size(); ++i) {
    const LogicalTensor& tensor = flat.tensors[i].tensor;
    const FlatPart& part = parts[i];
    Binding binding;
    binding.buffer = memory.buffer;
    binding.dtype = memory.dtype.value_or(tensor.dtype);
    const int64_t element = DTypeSize(binding.dtype);
    int64_t end = std::min(cut.end, part.start + part.size) - cut.begin;
    std::optional<int64_t> end_byte = CheckedMultiply(std::max<int64_t>(end, 0), element);
    if (end_byte) end_byte = CheckedAdd(*end_byte, memory.byte_offset);
    if (!end_byte || static_cast<uint64_t>(*end_byte) > buffer.bytes) {
      return Invalid(tensor, fmt::format("flat elements [{}, {}) of this rank do not fit buffer "
                                         "'{}' of {} bytes",
                                         cut.begin, cut.end, buffer.name, buffer.bytes));
    }
    for (size_t d = 0; d < part.shape.size(); ++d) {
      binding.byte_strides[d] = ElementsFrom(part.shape, d + 1) * element;
    }
    int64_t next = std::max(cut.begin, part.start) - cut.begin;  // boxes lie one after another
    for (const Box& box : BoxesIn(part, cut)) {
      binding.box = Box::Whole(tensor.shape);
      binding.tensor = sink.TensorNumber(tensor);
      AppendBindings(part, box, 0, memory.byte_offset + next * element, &binding,
                     &sink.layout->bindings);
      next += box.size();
    }
  }
  return Status::Ok();
}

}  // namespace bascule
