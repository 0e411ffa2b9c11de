// Tensors of the published checkpoints of some models, with how rollout engines cut them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/status.h"

namespace bascule::bench {

// How tensor parallelism cuts a tensor.
enum class Cut : uint8_t {
  kNone,      // on every rank
  kRows,      // dimension 0: column-parallel layers, vocabulary
  kColumns,   // dimension 1: row-parallel layers
  kKeyHeads,  // dimension 0 by key/value heads, which ranks may share
};

struct ModelTensor {
  LogicalTensor tensor;  // bf16
  Cut cut = Cut::kNone;
  int64_t expert = -1;  // of routed experts: its number
};

struct Model {
  std::string name;
  int64_t experts = 0;
  uint32_t key_heads = 0;
  std::vector<ModelTensor> tensors;
  [[nodiscard]] uint64_t bytes() const;
};

// `models_json` is the path of python/bascule/cli/models.json. Known: qwen3-235b-a22b,
// qwen3-30b-a3b, glm-5.2, deepseek-v3, kimi-k2.
[[nodiscard]] Result<Model> LoadModel(const std::string& models_json, const std::string& name);

}  // namespace bascule::bench
