#include "bench/model_shapes.h"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace bascule::bench {
namespace {

using Json = nlohmann::json;

class ModelMaker {
 public:
  ModelMaker(std::string name, Json config) : config_(std::move(config)) {
    model_.name = std::move(name);
  }

  Model Make(bool latent) {
    model_.experts = Get(latent ? "n_routed_experts" : "num_experts");
    Add("model.embed_tokens.weight", {Get("vocab_size"), hidden_}, Cut::kRows);
    const int64_t dense = latent ? Get("first_k_dense_replace") : 0;
    for (int64_t layer = 0; layer < Get("num_hidden_layers"); ++layer) {
      prefix_ = fmt::format("model.layers.{}.", layer);
      latent ? LatentAttention() : GroupedAttention();
      Add("input_layernorm.weight", {hidden_});
      Add("post_attention_layernorm.weight", {hidden_});
      layer < dense ? Mlp("mlp.", Get("intermediate_size")) : Experts(latent);
    }
    prefix_.clear();
    Add("model.norm.weight", {hidden_});
    Add("lm_head.weight", {Get("vocab_size"), hidden_}, Cut::kRows);
    return std::move(model_);
  }

 private:
  int64_t Get(const char* key) const { return config_.at(key).get<int64_t>(); }

  void Add(const std::string& name, std::vector<int64_t> shape, Cut cut = Cut::kNone,
           int64_t expert = -1) {
    model_.tensors.push_back({{prefix_ + name, std::move(shape), DType::kBF16}, cut, expert});
  }

  // Multi-head latent attention of DeepSeek-V3; with the sparse indexer where the config has one.
  void LatentAttention() {
    const int64_t heads = Get("num_attention_heads");
    const int64_t nope = Get("qk_nope_head_dim");
    const int64_t rope = Get("qk_rope_head_dim");
    const int64_t value = Get("v_head_dim");
    const int64_t q_rank = Get("q_lora_rank");
    const int64_t kv_rank = Get("kv_lora_rank");
    Add("self_attn.q_a_proj.weight", {q_rank, hidden_});
    Add("self_attn.q_a_layernorm.weight", {q_rank});
    Add("self_attn.q_b_proj.weight", {heads * (nope + rope), q_rank}, Cut::kRows);
    Add("self_attn.kv_a_proj_with_mqa.weight", {kv_rank + rope, hidden_});
    Add("self_attn.kv_a_layernorm.weight", {kv_rank});
    Add("self_attn.kv_b_proj.weight", {heads * (nope + value), kv_rank}, Cut::kRows);
    Add("self_attn.o_proj.weight", {hidden_, heads * value}, Cut::kColumns);
    if (!config_.contains("index_n_heads")) return;
    const int64_t index_heads = Get("index_n_heads");
    const int64_t index_dim = Get("index_head_dim");
    Add("self_attn.indexer.wq_b.weight", {index_heads * index_dim, q_rank});
    Add("self_attn.indexer.wk.weight", {index_dim, hidden_});
    Add("self_attn.indexer.k_norm.weight", {index_dim});
    Add("self_attn.indexer.k_norm.bias", {index_dim});
    Add("self_attn.indexer.weights_proj.weight", {index_heads, hidden_});
  }

  // Grouped-query attention of Qwen3, with q and k norms.
  void GroupedAttention() {
    const int64_t head = Get("head_dim");
    const int64_t queries = Get("num_attention_heads") * head;
    model_.key_heads = static_cast<uint32_t>(Get("num_key_value_heads"));
    const int64_t keys = Get("num_key_value_heads") * head;
    Add("self_attn.q_proj.weight", {queries, hidden_}, Cut::kRows);
    Add("self_attn.k_proj.weight", {keys, hidden_}, Cut::kKeyHeads);
    Add("self_attn.v_proj.weight", {keys, hidden_}, Cut::kKeyHeads);
    Add("self_attn.o_proj.weight", {hidden_, queries}, Cut::kColumns);
    Add("self_attn.q_norm.weight", {head});
    Add("self_attn.k_norm.weight", {head});
  }

  void Mlp(const std::string& name, int64_t inner, int64_t expert = -1) {
    Add(name + "gate_proj.weight", {inner, hidden_}, Cut::kRows, expert);
    Add(name + "up_proj.weight", {inner, hidden_}, Cut::kRows, expert);
    Add(name + "down_proj.weight", {hidden_, inner}, Cut::kColumns, expert);
  }

  void Experts(bool shared) {
    const int64_t inner = Get("moe_intermediate_size");
    Add("mlp.gate.weight", {model_.experts, hidden_});
    if (shared) {
      Add("mlp.gate.e_score_correction_bias", {model_.experts});
      Mlp("mlp.shared_experts.", inner * Get("n_shared_experts"));
    }
    for (int64_t expert = 0; expert < model_.experts; ++expert) {
      Mlp(fmt::format("mlp.experts.{}.", expert), inner, expert);
    }
  }

  Json config_;
  int64_t hidden_ = Get("hidden_size");
  Model model_;
  std::string prefix_;
};

}  // namespace

uint64_t Model::bytes() const {
  uint64_t total = 0;
  for (const ModelTensor& t : tensors) {
    total += static_cast<uint64_t>(Box::Whole(t.tensor.shape).size()) * 2;
  }
  return total;
}

Result<Model> LoadModel(const std::string& models_json, const std::string& name) {
  std::ifstream file(models_json);
  const Json models = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (models.is_discarded() || !models.contains(name)) {
    return Status(Code::kNotFound, fmt::format("no model {} in {}", name, models_json));
  }
  const std::string type = models[name].value("model_type", "");
  if (type != "qwen3_moe" && type != "deepseek_v3" && type != "glm_moe_dsa") {
    return Status(Code::kUnimplemented, fmt::format("no shapes of {} here", type));
  }
  return ModelMaker(name, models[name]).Make(/*latent=*/type != "qwen3_moe");
}

}  // namespace bascule::bench
