#include "tests/plan/worlds.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "plan/boxes.h"

namespace bascule::testing {
namespace {

IntervalList ToList(const std::vector<std::vector<Interval>>& entries) {
  IntervalList list;
  for (const auto& entry : entries) {
    for (const Interval& interval : entry) {
      if (!interval.empty()) list.intervals.push_back(interval);
    }
    list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
  }
  return list;
}

Interval ChunkOf(int64_t extent, int64_t parts, int64_t index) {
  const int64_t size = (extent + parts - 1) / parts;
  return {std::min(extent, size * index), std::min(extent, size * (index + 1))};
}

std::vector<uint32_t> Coordinates(const std::vector<uint32_t>& axis_sizes, uint64_t rank) {
  std::vector<uint32_t> coordinates(axis_sizes.size());
  for (size_t axis = axis_sizes.size(); axis-- > 0;) {
    coordinates[axis] = static_cast<uint32_t>(rank % axis_sizes[axis]);
    rank /= axis_sizes[axis];
  }
  return coordinates;
}

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
};

// A random cut of one dimension; overlapping and incomplete ones now and then.
DimSelect RandomCut(TemplateMaker* maker, const std::vector<uint32_t>& axes, int64_t extent,
                    bool trainer, Dice* dice) {
  if (axes.empty() || dice->OneIn(3)) return maker->All(extent);
  const auto axis = static_cast<uint32_t>(dice->Between(0, static_cast<int64_t>(axes.size()) - 1));
  const int64_t kind = dice->Between(0, 9);
  if (kind < 5) return maker->Shard(extent, {axis});
  if (kind < 7) return maker->Strided(extent, axis, dice->Between(1, 3));
  if (kind < 8 && axes.size() > 1) return maker->Shard(extent, {axis, axis == 0 ? 1U : 0U});
  std::vector<std::vector<Interval>> entries;
  for (uint32_t i = 0; i < axes[axis]; ++i) {
    const int64_t begin = dice->Between(0, extent);
    entries.push_back({{begin, dice->Between(begin, extent)}});
    // Mostly trainers hold it all together.
    if (trainer && i == 0 && !dice->OneIn(8)) entries.back() = {{0, extent}};
  }
  return maker->List(std::move(entries), {axis});
}

std::vector<BoxProduct> RandomProducts(TemplateMaker* maker, const std::vector<uint32_t>& axes,
                                       const std::vector<int64_t>& shape, bool trainer,
                                       Dice* dice) {
  if (dice->OneIn(4)) return maker->FlatShards(shape);
  std::vector<BoxProduct> products;
  // Destinations may bind overlapping boxes (two landings of one need).
  const int64_t count = !trainer && dice->OneIn(4) ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) {
    BoxProduct product;
    for (int64_t extent : shape) {
      product.dims.push_back(RandomCut(maker, axes, extent, trainer, dice));
    }
    products.push_back(std::move(product));
  }
  return products;
}

std::vector<uint32_t> RandomMesh(Dice* dice) {
  std::vector<uint32_t> axes;
  const int64_t dims = dice->Between(0, 3);
  for (int64_t i = 0; i < dims; ++i) axes.push_back(static_cast<uint32_t>(dice->Between(1, 3)));
  return axes;
}

uint64_t Ranks(const std::vector<uint32_t>& axes) {
  uint64_t ranks = 1;
  for (uint32_t size : axes) ranks *= size;
  return ranks;
}

std::shared_ptr<const WorldTemplate> RandomTemplate(const std::vector<uint32_t>& axes,
                                                    const std::vector<Tensor>& tensors,
                                                    bool trainer, Dice* dice) {
  TemplateMaker maker(axes);
  uint32_t last_class = 0;
  const std::vector<int64_t>* last_shape = nullptr;
  for (const Tensor& tensor : tensors) {
    if (!trainer && dice->OneIn(8)) continue;
    if (last_shape == nullptr || *last_shape != tensor.shape || dice->OneIn(3)) {
      const DType dtype = trainer || !dice->OneIn(4) ? DType::kBF16 : DType::kF16;
      last_class = maker.Class(tensor.shape, dtype,
                               RandomProducts(&maker, axes, tensor.shape, trainer, dice));
      last_shape = &tensor.shape;
    }
    maker.Name(tensor.name, last_class);
  }
  return maker.Done();
}

std::vector<Tensor> RandomTensors(Dice* dice) {
  std::vector<Tensor> tensors;
  const int64_t count = dice->Between(1, 7);
  for (int64_t i = 0; i < count; ++i) {
    Tensor tensor{Numbered("t", i), {}};
    if (i > 0 && dice->OneIn(2)) {
      tensor.shape = tensors.back().shape;
    } else {
      const int64_t dims = dice->Between(0, 4);
      const int64_t largest = dims <= 2 && dice->OneIn(6) ? 60 : 7;
      for (int64_t d = 0; d < dims; ++d) tensor.shape.push_back(dice->Between(1, largest));
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<uint32_t> RandomNodes(uint64_t ranks, uint32_t first, Dice* dice) {
  std::vector<uint32_t> nodes;
  const auto per_node = static_cast<uint64_t>(dice->Between(1, 5));
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    nodes.push_back(first + static_cast<uint32_t>(rank / per_node));
  }
  return nodes;
}

size_t Elements(const std::vector<int64_t>& shape) {
  size_t n = 1;
  for (int64_t extent : shape) n *= static_cast<size_t>(extent);
  return n;
}

void Insert(uint32_t member, std::vector<uint32_t>* members) {
  if (std::find(members->begin(), members->end(), member) == members->end()) {
    members->push_back(member);
  }
}

}  // namespace

std::string Numbered(const char* prefix, int64_t number) {
  return fmt::format("{}{}", prefix, number);
}

TemplateMaker::TemplateMaker(std::vector<uint32_t> axis_sizes) {
  world_.axis_sizes = std::move(axis_sizes);
}

DimSelect TemplateMaker::List(std::vector<std::vector<Interval>> entries,
                              std::vector<uint32_t> axes) {
  world_.lists.push_back(ToList(entries));
  return {static_cast<uint32_t>(world_.lists.size() - 1), std::move(axes)};
}

DimSelect TemplateMaker::All(int64_t extent) { return List({{{0, extent}}}, {}); }

DimSelect TemplateMaker::Shard(int64_t extent, std::vector<uint32_t> axes) {
  int64_t parts = 1;
  for (uint32_t axis : axes) parts *= world_.axis_sizes[axis];
  std::vector<std::vector<Interval>> entries;
  for (int64_t i = 0; i < parts; ++i) entries.push_back({ChunkOf(extent, parts, i)});
  return List(std::move(entries), std::move(axes));
}

DimSelect TemplateMaker::Strided(int64_t extent, uint32_t axis, int64_t factor) {
  const int64_t parts = world_.axis_sizes[axis];
  std::vector<std::vector<Interval>> entries(static_cast<size_t>(parts));
  for (int64_t chunk = 0; chunk < factor; ++chunk) {
    const Interval outer = ChunkOf(extent, factor, chunk);
    for (int64_t i = 0; i < parts; ++i) {
      const Interval inner = ChunkOf(outer.size(), parts, i);
      entries[static_cast<size_t>(i)].push_back(
          {outer.begin + inner.begin, outer.begin + inner.end});
    }
  }
  return List(std::move(entries), {axis});
}

uint32_t TemplateMaker::Class(std::vector<int64_t> shape, DType dtype,
                              std::vector<BoxProduct> products) {
  world_.classes.push_back({std::move(shape), dtype, false, std::move(products)});
  return static_cast<uint32_t>(world_.classes.size() - 1);
}

std::vector<BoxProduct> TemplateMaker::FlatShards(const std::vector<int64_t>& shape) {
  const auto ranks = static_cast<int64_t>(Ranks(world_.axis_sizes));
  const Box whole = Box::Whole(shape);
  std::vector<uint32_t> axes;
  for (uint32_t axis = 0; axis < world_.axis_sizes.size(); ++axis) axes.push_back(axis);
  // Box number k of every rank makes product k; ranks with fewer have empty entries.
  std::vector<std::vector<Box>> shards(static_cast<size_t>(ranks));
  size_t most = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    auto& shard = shards[static_cast<size_t>(r)];
    const Interval range = ChunkOf(whole.size(), ranks, r);
    plan::AppendRange(whole, range.begin, range.end, &shard);
    most = std::max(most, shard.size());
  }
  std::vector<BoxProduct> products;
  for (size_t k = 0; k < most; ++k) {
    BoxProduct product;
    for (int d = 0; d < whole.ndim(); ++d) {
      std::vector<std::vector<Interval>> entries;
      for (const auto& shard : shards) {
        entries.emplace_back();
        if (k < shard.size()) entries.back().push_back(shard[k][d]);
      }
      product.dims.push_back(List(std::move(entries), axes));
    }
    products.push_back(std::move(product));
  }
  return products;
}

void TemplateMaker::Name(std::string name, uint32_t class_index) {
  world_.names.push_back(std::move(name));
  world_.class_of.push_back(class_index);
}

void TemplateMaker::AddAlias(std::string name, std::string target) {
  world_.aliases.push_back({std::move(name), std::move(target)});
}

std::shared_ptr<const WorldTemplate> TemplateMaker::Done() const {
  return std::make_shared<const WorldTemplate>(world_);
}

void AddMembers(World* world, std::shared_ptr<const WorldTemplate> shape, Role role,
                const std::string& engine, const std::vector<uint32_t>& nodes) {
  const auto index = static_cast<uint32_t>(world->templates.size());
  const auto first = static_cast<uint32_t>(
      std::count_if(world->members.begin(), world->members.end(),
                    [&](const Member& m) { return m.role == role && m.engine == engine; }));
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) {
    world->members.push_back(
        {role, engine, first + rank, nodes[rank], index, Coordinates(shape->axis_sizes, rank)});
  }
  world->template_digests.push_back(DigestOf(shape->Serialize()));
  world->templates.push_back(std::move(shape));
  std::sort(world->members.begin(), world->members.end(), [](const Member& a, const Member& b) {
    return std::tie(a.role, a.engine, a.rank) < std::tie(b.role, b.engine, b.rank);
  });
}

World RandomWorld(uint64_t seed) {
  Dice dice(seed);
  World world;
  world.chunk_bytes =
      static_cast<uint64_t>(dice.OneIn(4) ? dice.Between(16, 64) : dice.Between(64, 4096));
  world.whole_bytes = static_cast<uint64_t>(dice.OneIn(3) ? 0 : dice.Between(1, 256));
  const std::vector<Tensor> tensors = RandomTensors(&dice);
  const int64_t trainer_worlds = dice.OneIn(3) ? 2 : 1;
  for (int64_t i = 0; i < trainer_worlds; ++i) {
    const auto axes = RandomMesh(&dice);
    // Draws are statements of their own: compilers differ in the order of arguments.
    auto shape = RandomTemplate(axes, tensors, true, &dice);
    const auto nodes = RandomNodes(Ranks(axes), static_cast<uint32_t>(10 * i), &dice);
    AddMembers(&world, std::move(shape), Role::kTrainer, "", nodes);
  }
  const int64_t engines = dice.Between(1, 3);
  for (int64_t i = 0; i < engines; ++i) {
    const auto axes = RandomMesh(&dice);
    // Some engines share nodes with trainers, some with each other.
    const auto node =
        static_cast<uint32_t>(dice.OneIn(3) ? dice.Between(0, 8) : 100 + dice.Between(0, 8));
    auto shape = RandomTemplate(axes, tensors, false, &dice);
    const auto nodes = RandomNodes(Ranks(axes), node, &dice);
    AddMembers(&world, std::move(shape), Role::kRollout, Numbered("e", i), nodes);
  }
  return world;
}

const TemplateClass& ClassNamed(const WorldTemplate& world, const std::string& name) {
  auto at = std::lower_bound(world.names.begin(), world.names.end(), name);
  return world.classes[world.class_of[static_cast<size_t>(at - world.names.begin())]];
}

ElementMap MapElements(const World& world) {
  ElementMap map;
  for (uint32_t id = 0; id < world.members.size(); ++id) {
    const Member& member = world.members[id];
    const WorldTemplate& own = *world.templates[member.world_template];
    for (size_t n = 0; n < own.names.size(); ++n) {
      const auto& shape = own.classes[own.class_of[n]].shape;
      auto& side = member.role == Role::kTrainer ? map.holders : map.needers;
      auto& elements = side[own.names[n]];
      elements.resize(Elements(shape));
      std::vector<Box> boxes;
      own.BoxesOf(own.class_of[n], member.coordinates, &boxes);
      for (const Box& box : boxes) {
        ForEachElement(box, shape, [&](size_t e) { Insert(id, &elements[e]); });
      }
    }
  }
  for (auto& [name, needed] : map.needers) {
    auto& held = map.holders[name];
    held.resize(needed.size());
    for (size_t e = 0; e < needed.size(); ++e) {
      if (!needed[e].empty() && held[e].empty()) map.complete = false;
    }
  }
  return map;
}

}  // namespace bascule::testing
