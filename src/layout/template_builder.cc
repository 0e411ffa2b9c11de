#include "layout/template_builder.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout/checked.h"

namespace bascule {

void AppendKey(const std::vector<int64_t>& values, std::string* key) {
  AppendKey(static_cast<int64_t>(values.size()), key);
  for (int64_t value : values) AppendKey(value, key);
}

void AppendKey(const Placements& placements, std::string* key) {
  for (const AxisPlacement& named : placements) {
    const Placement& placement = named.placement;
    AppendKey(static_cast<int64_t>(named.axis.size()), key);
    key->append(named.axis);
    key->push_back(static_cast<char>(placement.kind));
    AppendKey(placement.dim, key);
    AppendKey(placement.split_factor, key);
    AppendKey(placement.parts, key);
    AppendKey(placement.padded, key);
    AppendKey(static_cast<int64_t>(placement.at.size()), key);
    for (uint32_t coordinate : placement.at) AppendKey(coordinate, key);
  }
}

uint32_t TemplateBuilder::InternList(IntervalList list) {
  std::string key(reinterpret_cast<const char*>(list.offsets.data()),
                  list.offsets.size() * sizeof(uint32_t));
  key.append(reinterpret_cast<const char*>(list.intervals.data()),
             list.intervals.size() * sizeof(Interval));
  auto [at, added] =
      list_numbers_.try_emplace(std::move(key), static_cast<uint32_t>(lists_.size()));
  if (added) lists_.push_back(std::move(list));
  return at->second;
}

uint32_t TemplateBuilder::InternProduct(BoxProduct product) {
  std::string key;
  for (const DimSelect& select : product.dims) {
    AppendKey(select.list, &key);
    AppendKey(static_cast<int64_t>(select.axes.size()), &key);
    for (uint32_t axis : select.axes) AppendKey(axis, &key);
  }
  auto [at, added] =
      product_numbers_.try_emplace(std::move(key), static_cast<uint32_t>(products_.size()));
  if (added) products_.push_back(std::move(product));
  return at->second;
}

namespace {

// The axes of more than one rank that a dimension's entries depend on. Dimension 0 also says who
// holds the tensor at all.
std::vector<uint32_t> AxesOf(std::span<const AxisRule> cuts, std::span<const AxisRule> rules,
                             bool presence) {
  std::vector<uint32_t> axes;
  for (const AxisRule& cut : cuts) {
    if (cut.ranks > 1) axes.push_back(cut.axis);
  }
  for (const AxisRule& rule : rules) {
    bool at = rule.placement.kind == Placement::Kind::kAt;
    if (presence && at && rule.ranks > 1) axes.push_back(rule.axis);
  }
  std::sort(axes.begin(), axes.end());
  return axes;
}

}  // namespace

uint32_t TemplateBuilder::ProductOf(std::span<const AxisRule> rules,
                                    const std::vector<std::vector<AxisRule>>& cuts,
                                    const std::vector<IndexSet>& sets,
                                    std::span<const int64_t> tiles) {
  BoxProduct product;
  auto add_dim = [&](std::span<const AxisRule> dim_cuts, const IndexSet& set, int64_t tile) {
    const bool presence = product.dims.empty();
    std::vector<uint32_t> axes = AxesOf(dim_cuts, rules, presence);
    IntervalList list;
    ForEachEntry(mesh_, axes, [&](uint32_t, const std::vector<uint32_t>& coordinates) {
      if (!presence || Present(rules, coordinates)) {
        IndexSet kept = Apply(dim_cuts, set, coordinates);
        if (tile != 0) kept = CutAtTiles(kept, tile);
        list.intervals.insert(list.intervals.end(), kept.begin(), kept.end());
      }
      list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
    });
    product.dims.push_back({InternList(std::move(list)), std::move(axes)});
  };
  for (size_t d = 0; d < sets.size(); ++d) add_dim(cuts[d], sets[d], tiles[d]);
  // A scalar: who holds it, if not every rank.
  if (sets.empty() && !AxesOf({}, rules, true).empty()) add_dim({}, {{0, 1}}, 0);
  return InternProduct(std::move(product));
}

Status TemplateBuilder::CheckTensor(const LogicalTensor& tensor) {
  auto invalid = [&tensor](std::string message) {
    return Status(Code::kInvalidArgument, std::move(message)).WithTensor(tensor.name);
  };
  if (tensor.name.empty() || tensor.name.size() > kMaxNameBytes) {
    return invalid(fmt::format("a tensor has a name of {} bytes; give it 1 to {}",
                               tensor.name.size(), kMaxNameBytes));
  }
  if (tensor.shape.size() > kMaxDims) {
    return invalid(
        fmt::format("has {} dimensions; at most {} are supported", tensor.shape.size(), kMaxDims));
  }
  if (DTypeSize(tensor.dtype) == 0 || !TensorBytes(tensor.shape, tensor.dtype)) {
    return invalid(
        fmt::format("shape [{}] has a negative extent or more than 2^63 bytes, or the "
                    "dtype is unknown",
                    fmt::join(tensor.shape, ", ")));
  }
  return Status::Ok();
}

Status TemplateBuilder::AddBoxes(const LogicalTensor& tensor, uint32_t product) {
  std::string key{static_cast<char>(tensor.dtype), static_cast<char>(tensor.derived)};
  AppendKey(tensor.shape, &key);
  auto [kind, new_kind] =
      kind_numbers_.try_emplace(std::move(key), static_cast<uint32_t>(kinds_.size()));
  if (new_kind) kinds_.push_back({tensor.shape, tensor.dtype, tensor.derived, {}});
  auto [at, added] = tensors_.try_emplace(tensor.name);
  Named& named = at->second;
  if (added) named.kind = kind->second;
  if (named.kind != kind->second) {
    return Status(Code::kInvalidArgument, "is added twice with different shapes or dtypes")
        .WithTensor(tensor.name);
  }
  if (std::find(named.products.begin(), named.products.end(), product) == named.products.end()) {
    named.products.push_back(product);
  }
  return Status::Ok();
}

Result<std::shared_ptr<const WorldTemplate>> TemplateBuilder::Build(
    const std::vector<Alias>& aliases, const std::vector<std::string>& unused) const {
  auto world = std::make_shared<WorldTemplate>();
  world->axis_sizes = mesh_.axis_sizes;
  world->lists = lists_;
  world->aliases = aliases;
  world->unused = unused;
  world->names.reserve(tensors_.size());
  world->class_of.reserve(tensors_.size());
  std::unordered_map<std::string, uint32_t> class_numbers;
  std::string key;
  // The order of a hash map: Canonicalize sorts.
  for (const auto& [name, named] : tensors_) {
    key.clear();
    AppendKey(named.kind, &key);
    for (uint32_t product : named.products) AppendKey(product, &key);
    auto [at, added] = class_numbers.try_emplace(key, static_cast<uint32_t>(world->classes.size()));
    if (added) {
      TemplateClass& tensor_class = world->classes.emplace_back(kinds_[named.kind]);
      for (uint32_t product : named.products) tensor_class.products.push_back(products_[product]);
    }
    world->names.push_back(name);
    world->class_of.push_back(at->second);
  }
  world->Canonicalize();
  BASCULE_RETURN_IF_ERROR(world->Validate());
  return std::shared_ptr<const WorldTemplate>(std::move(world));
}

}  // namespace bascule
