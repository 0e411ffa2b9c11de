// Collects boxes of tensors into a world template.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "bascule/layout.h"
#include "bascule/mesh.h"
#include "bascule/status.h"
#include "layout/index_set.h"
#include "layout/world_template.h"

namespace bascule {

// Appends a number to a key of an interning map.
inline void AppendKey(int64_t value, std::string* key) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}
void AppendKey(const std::vector<int64_t>& values, std::string* key);
void AppendKey(const Placements& placements, std::string* key);

// Calls visit(entry, coordinates) for each combination of coordinates along `axes` (sorted), in the
// order of a DimSelect's entries; other coordinates are 0.
template <typename Visit>
void ForEachEntry(const Mesh& mesh, std::span<const uint32_t> axes, const Visit& visit) {
  std::vector<uint32_t> coordinates(mesh.axis_sizes.size());
  for (uint32_t entry = 0;; ++entry) {
    visit(entry, coordinates);
    size_t a = axes.size();
    while (a > 0 && ++coordinates[axes[a - 1]] == mesh.axis_sizes[axes[a - 1]]) {
      coordinates[axes[--a]] = 0;
    }
    if (a == 0) return;
  }
}

class TemplateBuilder {
 public:
  // The mesh must be valid.
  explicit TemplateBuilder(Mesh mesh) : mesh_(std::move(mesh)) {}

  [[nodiscard]] const Mesh& mesh() const { return mesh_; }

  // Equal arguments give equal numbers.
  uint32_t InternList(IntervalList list);
  uint32_t InternProduct(BoxProduct product);

  // The product that `rules` make of one set of indices a dimension; dims of the result are cut at
  // multiples of tiles[d] positions where that is not 0. `rules` come from RulesOf, `cuts[d]` from
  // CutsOf.
  uint32_t ProductOf(std::span<const AxisRule> rules,
                     const std::vector<std::vector<AxisRule>>& cuts,
                     const std::vector<IndexSet>& sets, std::span<const int64_t> tiles);

  // Adds a product's boxes to a tensor; the tensor must be the same each time.
  [[nodiscard]] Status AddBoxes(const LogicalTensor& tensor, uint32_t product);
  // Legal name, shape and dtype.
  [[nodiscard]] static Status CheckTensor(const LogicalTensor& tensor);

  [[nodiscard]] Result<std::shared_ptr<const WorldTemplate>> Build(
      const std::vector<Alias>& aliases, const std::vector<std::string>& unused) const;

 private:
  struct Named {
    uint32_t kind = 0;  // index in kinds_
    std::vector<uint32_t> products;
  };

  Mesh mesh_;
  std::vector<IntervalList> lists_;
  std::vector<BoxProduct> products_;
  std::vector<TemplateClass> kinds_;  // shape, dtype, derived; without products
  std::unordered_map<std::string, uint32_t> list_numbers_;
  std::unordered_map<std::string, uint32_t> product_numbers_;
  std::unordered_map<std::string, uint32_t> kind_numbers_;
  std::unordered_map<std::string, Named> tensors_;
};

}  // namespace bascule
