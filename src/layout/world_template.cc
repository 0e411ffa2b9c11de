#include "layout/world_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "layout/checked.h"

namespace bascule {
namespace {

// Appends the boxes of one product.
void AppendProduct(const WorldTemplate& world, const TemplateClass& tensor_class,
                   const BoxProduct& product, std::span<const uint32_t> coordinates,
                   std::vector<Box>* boxes) {
  std::array<std::span<const Interval>, kMaxDims> entries;
  for (size_t d = 0; d < product.dims.size(); ++d) {
    const DimSelect& select = product.dims[d];
    entries[d] = world.lists[select.list].Entry(world.EntryOf(select, coordinates));
    if (entries[d].empty()) return;
  }
  const size_t ndim = tensor_class.shape.size();
  Box box = Box::Whole(tensor_class.shape);
  std::array<size_t, kMaxDims> index{};
  for (size_t d = 0; d < ndim; ++d) box[static_cast<int>(d)] = entries[d][0];
  while (true) {
    boxes->push_back(box);
    size_t d = ndim;
    while (d > 0 && ++index[d - 1] == entries[d - 1].size()) {
      index[d - 1] = 0;
      box[static_cast<int>(d - 1)] = entries[d - 1][0];
      --d;
    }
    if (d == 0) return;
    box[static_cast<int>(d - 1)] = entries[d - 1][index[d - 1]];
  }
}

// Keeps the first of equal boxes in [first, end).
void RemoveDuplicates(std::vector<Box>* boxes, size_t first) {
  std::vector<size_t> order(boxes->size() - first);
  std::iota(order.begin(), order.end(), first);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    auto compared = (*boxes)[a] <=> (*boxes)[b];
    return compared < 0 || (compared == 0 && a < b);
  });
  std::vector<bool> duplicate(order.size());
  bool any = false;
  for (size_t i = 1; i < order.size(); ++i) {
    if ((*boxes)[order[i - 1]] == (*boxes)[order[i]]) duplicate[order[i] - first] = any = true;
  }
  if (!any) return;
  size_t kept = first;
  for (size_t i = first; i < boxes->size(); ++i) {
    if (!duplicate[i - first]) (*boxes)[kept++] = (*boxes)[i];
  }
  boxes->resize(kept);
}

}  // namespace

uint32_t WorldTemplate::EntryOf(const DimSelect& select,
                                std::span<const uint32_t> coordinates) const {
  uint32_t entry = 0;
  for (uint32_t axis : select.axes) entry = entry * axis_sizes[axis] + coordinates[axis];
  return entry;
}

void WorldTemplate::BoxesOf(uint32_t class_index, std::span<const uint32_t> coordinates,
                            std::vector<Box>* boxes) const {
  const TemplateClass& tensor_class = classes[class_index];
  const size_t first = boxes->size();
  for (const BoxProduct& product : tensor_class.products) {
    AppendProduct(*this, tensor_class, product, coordinates, boxes);
  }
  if (tensor_class.products.size() > 1) RemoveDuplicates(boxes, first);
}

uint64_t WorldTemplate::ranks() const {
  uint64_t ranks = 1;
  for (uint32_t size : axis_sizes) ranks *= size;
  return ranks;
}

int64_t WorldTemplate::Find(std::string_view name) const {
  auto at = std::lower_bound(names.begin(), names.end(), name);
  return at != names.end() && *at == name ? at - names.begin() : -1;
}

std::vector<uint32_t> WorldTemplate::CoordinatesOf(uint64_t rank) const {
  std::vector<uint32_t> coordinates(axis_sizes.size());
  for (size_t axis = axis_sizes.size(); axis-- > 0;) {
    coordinates[axis] = static_cast<uint32_t>(rank % axis_sizes[axis]);
    rank /= axis_sizes[axis];
  }
  return coordinates;
}

namespace {

// The boxes of one tensor as products: one product where they form a grid, else one each.
std::vector<BoxProduct> ProductsOf(std::vector<Box> boxes, std::vector<IntervalList>* lists,
                                   std::map<std::vector<Interval>, uint32_t>* interned) {
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  auto product_of = [&](const std::vector<std::vector<Interval>>& dims) {
    BoxProduct product;
    for (const std::vector<Interval>& intervals : dims) {
      auto [at, added] = interned->try_emplace(intervals, static_cast<uint32_t>(lists->size()));
      if (added) lists->push_back({intervals, {0, static_cast<uint32_t>(intervals.size())}});
      product.dims.push_back({at->second, {}});
    }
    return product;
  };
  std::vector<std::vector<Interval>> grid(static_cast<size_t>(boxes[0].ndim()));
  size_t cells = 1;
  bool disjoint = true;
  for (size_t d = 0; d < grid.size(); ++d) {
    for (const Box& box : boxes) grid[d].push_back(box[static_cast<int>(d)]);
    std::sort(grid[d].begin(), grid[d].end());
    grid[d].erase(std::unique(grid[d].begin(), grid[d].end()), grid[d].end());
    for (size_t i = 1; i < grid[d].size(); ++i) {
      disjoint = disjoint && grid[d][i - 1].end <= grid[d][i].begin;
    }
    // Clamped above the number of boxes: no overflow, and too many stays too many.
    cells = std::min(cells, boxes.size() + 1) * grid[d].size();
  }
  if (disjoint && cells == boxes.size()) return {product_of(grid)};
  std::vector<BoxProduct> products;
  for (const Box& box : boxes) {
    std::vector<std::vector<Interval>> dims;
    for (int d = 0; d < box.ndim(); ++d) dims.push_back({box[d]});
    products.push_back(product_of(dims));
  }
  return products;
}

std::vector<std::vector<Box>> BoxesByTensor(const Layout& layout) {
  std::vector<std::vector<Box>> boxes(layout.tensors.size());
  for (const Binding& binding : layout.bindings) {
    if (!binding.box.empty()) boxes[binding.tensor].push_back(binding.box);
  }
  return boxes;
}

Status Differs(const std::string& tensor, std::string message) {
  return Status(Code::kInvalidArgument,
                std::move(message) + "; build the layout and its world from one description")
      .WithTensor(tensor);
}

// `boxes` holds what the layout binds, `expected` what the template says.
Status CompareBoxes(const std::string& name, std::vector<Box> boxes, std::vector<Box> expected) {
  std::sort(boxes.begin(), boxes.end());
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  std::sort(expected.begin(), expected.end());
  for (const Box& box : boxes) {
    if (!std::binary_search(expected.begin(), expected.end(), box)) {
      return Differs(name, "the layout binds box " + box.ToString() +
                               ", which the declared world does not give to these coordinates");
    }
  }
  for (const Box& box : expected) {
    if (!std::binary_search(boxes.begin(), boxes.end(), box)) {
      return Differs(name, "the declared world gives box " + box.ToString() +
                               " to these coordinates, but no binding holds it");
    }
  }
  return Status::Ok();
}

Status CheckCoordinates(const WorldTemplate& world, std::span<const uint32_t> coordinates) {
  bool good = coordinates.size() == world.axis_sizes.size();
  for (size_t axis = 0; good && axis < coordinates.size(); ++axis) {
    good = coordinates[axis] < world.axis_sizes[axis];
  }
  if (good) return Status::Ok();
  return Status(Code::kInvalidArgument,
                fmt::format("coordinates [{}] are not in the mesh of sizes [{}]",
                            fmt::join(coordinates, ", "), fmt::join(world.axis_sizes, ", ")));
}

}  // namespace

Result<WorldTemplate> TemplateOf(const Layout& layout) {
  for (const Binding& binding : layout.bindings) {
    if (binding.tensor >= layout.tensors.size() ||
        binding.box.ndim() != static_cast<int>(layout.tensors[binding.tensor].shape.size())) {
      return Status(Code::kInvalidArgument, "a binding does not fit its tensor; validate first");
    }
  }
  WorldTemplate world;
  std::map<std::vector<Interval>, uint32_t> interned;
  std::vector<std::vector<Box>> boxes = BoxesByTensor(layout);
  for (size_t t = 0; t < boxes.size(); ++t) {
    if (boxes[t].empty()) continue;
    const LogicalTensor& tensor = layout.tensors[t];
    world.names.push_back(tensor.name);
    world.class_of.push_back(static_cast<uint32_t>(world.classes.size()));
    world.classes.push_back({tensor.shape, tensor.dtype, tensor.derived,
                             ProductsOf(std::move(boxes[t]), &world.lists, &interned)});
  }
  world.aliases = layout.aliases;
  world.unused = layout.unused;
  world.Canonicalize();
  BASCULE_RETURN_IF_ERROR(world.Validate());
  return world;
}

Status CheckAgainstTemplate(const Layout& layout, const WorldTemplate& world,
                            std::span<const uint32_t> coordinates) {
  BASCULE_RETURN_IF_ERROR(CheckCoordinates(world, coordinates));
  std::vector<std::vector<Box>> boxes = BoxesByTensor(layout);
  std::vector<bool> bound(world.names.size());
  std::vector<Box> expected;
  for (size_t t = 0; t < boxes.size(); ++t) {
    if (boxes[t].empty()) continue;
    const LogicalTensor& tensor = layout.tensors[t];
    int64_t name = world.Find(tensor.name);
    if (name < 0) return Differs(tensor.name, "the declared world does not know this tensor");
    bound[static_cast<size_t>(name)] = true;
    uint32_t index = world.class_of[static_cast<size_t>(name)];
    const TemplateClass& tensor_class = world.classes[index];
    if (tensor.shape != tensor_class.shape || tensor.dtype != tensor_class.dtype ||
        tensor.derived != tensor_class.derived) {
      return Differs(
          tensor.name,
          fmt::format("the layout says {} [{}], the declared world {} [{}]",
                      DTypeName(tensor.dtype), fmt::join(tensor.shape, ", "),
                      DTypeName(tensor_class.dtype), fmt::join(tensor_class.shape, ", ")));
    }
    expected.clear();
    world.BoxesOf(index, coordinates, &expected);
    BASCULE_RETURN_IF_ERROR(CompareBoxes(tensor.name, std::move(boxes[t]), expected));
  }
  std::vector<bool> holds(world.classes.size());
  for (uint32_t c = 0; c < world.classes.size(); ++c) {
    expected.clear();
    world.BoxesOf(c, coordinates, &expected);
    holds[c] = !expected.empty();
  }
  for (size_t n = 0; n < world.names.size(); ++n) {
    if (!bound[n] && holds[world.class_of[n]]) {
      return Differs(world.names[n],
                     "the declared world gives boxes of it to these coordinates, but no binding "
                     "holds any");
    }
  }
  return Status::Ok();
}

ArenaMap MapArena(const WorldTemplate& world, std::span<const uint32_t> coordinates) {
  std::vector<std::vector<Box>> boxes(world.classes.size());
  for (uint32_t c = 0; c < world.classes.size(); ++c) world.BoxesOf(c, coordinates, &boxes[c]);
  ArenaMap map;
  map.first_entry.reserve(world.names.size() + 1);
  for (uint32_t tensor = 0; tensor < world.names.size(); ++tensor) {
    map.first_entry.push_back(static_cast<uint32_t>(map.entries.size()));
    uint32_t index = world.class_of[tensor];
    auto element = static_cast<uint64_t>(DTypeSize(world.classes[index].dtype));
    for (const Box& box : boxes[index]) {
      map.entries.push_back({tensor, box, map.bytes});
      uint64_t bytes = static_cast<uint64_t>(box.size()) * element;
      map.bytes += (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
    }
  }
  map.first_entry.push_back(static_cast<uint32_t>(map.entries.size()));
  return map;
}

}  // namespace bascule
