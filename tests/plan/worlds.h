// Worlds for planner tests: templates made by hand, random worlds, and an owner map per element
// that knows nothing of cells, classes or balance.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace bascule::testing {

// A random number generator whose draws are the same with every standard library.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  // Uniform enough in [low, high].
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t n) { return Between(1, n) == 1; }

 private:
  std::mt19937_64 engine_;
};

// "t7".
std::string Numbered(const char* prefix, int64_t number);

// Fills a WorldTemplate by hand. Names must be added in sorted order.
class TemplateMaker {
 public:
  explicit TemplateMaker(std::vector<uint32_t> axis_sizes);
  // How one dimension is cut.
  DimSelect All(int64_t extent);                                     // every rank holds it all
  DimSelect Shard(int64_t extent, std::vector<uint32_t> axes);       // torch.chunk over the axes
  DimSelect Strided(int64_t extent, uint32_t axis, int64_t factor);  // chunks of chunks
  DimSelect List(std::vector<std::vector<Interval>> entries, std::vector<uint32_t> axes);

  uint32_t Class(std::vector<int64_t> shape, DType dtype, std::vector<BoxProduct> products);
  // Products that cut the row-major order at equal element ranges over all ranks of the mesh.
  std::vector<BoxProduct> FlatShards(const std::vector<int64_t>& shape);
  void Name(std::string name, uint32_t class_index);
  void AddAlias(std::string name, std::string target);
  [[nodiscard]] std::shared_ptr<const WorldTemplate> Done() const;

 private:
  WorldTemplate world_;
};

// Adds a template and all ranks of its mesh as members; `nodes[i]` is the node of rank i.
void AddMembers(World* world, std::shared_ptr<const WorldTemplate> shape, Role role,
                const std::string& engine, const std::vector<uint32_t>& nodes);

// Trainers and one to three engines with random meshes, shardings, nodes and options.
World RandomWorld(uint64_t seed);

// Who holds and who needs each element of each tensor.
struct ElementMap {
  // [name][element]: member ids, sorted. Names as destinations store them.
  std::map<std::string, std::vector<std::vector<uint32_t>>> holders;
  std::map<std::string, std::vector<std::vector<uint32_t>>> needers;
  bool complete = true;  // every needed element is held
};
ElementMap MapElements(const World& world);

// Calls visit(row-major index) for each element of a box of a tensor.
template <typename Visit>
void ForEachElement(const Box& box, const std::vector<int64_t>& shape, Visit&& visit) {
  if (box.empty()) return;
  std::vector<int64_t> at;
  for (int d = 0; d < box.ndim(); ++d) at.push_back(box[d].begin);
  while (true) {
    int64_t index = 0;
    for (int d = 0; d < box.ndim(); ++d)
      index = index * shape[static_cast<size_t>(d)] + at[static_cast<size_t>(d)];
    visit(static_cast<size_t>(index));
    int d = box.ndim() - 1;
    for (; d >= 0; --d) {
      if (++at[static_cast<size_t>(d)] < box[d].end) break;
      at[static_cast<size_t>(d)] = box[d].begin;
    }
    if (d < 0) return;
  }
}

const TemplateClass& ClassNamed(const WorldTemplate& world, const std::string& name);

}  // namespace bascule::testing
