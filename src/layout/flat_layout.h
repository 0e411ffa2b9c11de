// Expands flat buffers: tensors one after another, cut at any element.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bascule/layout.h"
#include "bascule/mesh.h"
#include "layout/block_layout.h"
#include "layout/template_builder.h"

namespace bascule {

// The boxes of elements [begin, end) of a row-major array, in order: at most 2 d - 1, and at most
// one for a scalar. 0 <= begin <= end <= number of elements.
[[nodiscard]] std::vector<Box> FlatBoxes(const std::vector<int64_t>& shape, int64_t begin,
                                         int64_t end);

class FlatExpander {
 public:
  // Both outlive the expander.
  FlatExpander(TemplateBuilder* world, const std::optional<std::vector<uint32_t>>* coordinates)
      : world_(world), coordinates_(coordinates) {}

  [[nodiscard]] Status AddBoxes(const FlatBuffer& flat);
  // Bindings of the rank; its part of the buffer starts at memory.byte_offset.
  [[nodiscard]] Status AddBindings(const FlatBuffer& flat, const LocalMemory& memory,
                                   BindingSink sink);
  [[nodiscard]] Result<int64_t> LocalElements(const FlatBuffer& flat);

 private:
  TemplateBuilder* world_;
  const std::optional<std::vector<uint32_t>>* coordinates_;
  std::unordered_map<std::string, std::vector<uint32_t>> products_;
};

}  // namespace bascule
