// What the sender and the receiver share: the model, its values, options, errors.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "bascule/layout.h"
#include "bascule/session.h"

namespace example {

inline constexpr uint32_t kKvHeads = 4;

// The checkpoint: names, shapes and the dtype that is published.
inline std::vector<bascule::LogicalTensor> Tensors() {
  const bascule::DType bf16 = bascule::DType::kBF16;
  return {{"embed.weight", {512, 256}, bf16},  {"q_proj.weight", {256, 256}, bf16},
          {"k_proj.weight", {64, 256}, bf16},  {"v_proj.weight", {64, 256}, bf16},
          {"o_proj.weight", {256, 256}, bf16}, {"norm.weight", {256}, bf16}};
}

// Element (row, column) of a tensor in a version: a number below 256, so that bf16 holds it.
inline float Value(uint64_t version, size_t tensor, int64_t row, int64_t column) {
  const auto mixed = version * 31 + tensor * 59 + static_cast<uint64_t>(row * 7 + column * 3);
  return static_cast<float>(mixed % 251);
}

[[noreturn]] inline void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

inline void Check(const bascule::Status& status, const std::string& what) {
  if (!status.ok()) Fail(what + ": " + status.ToString());
}

// The value of a call, or its error and the end.
template <typename T>
T Check(bascule::Result<T> result, const std::string& what) {
  Check(result.status(), what);
  return std::move(result).value();
}

// Counts elements in the live weights, walked by the layout, and stops at one that is not as sent.
inline uint64_t CheckElements(const bascule::Layout& layout, uint64_t version) {
  const auto tensors = Tensors();
  uint64_t count = 0;
  for (const auto& binding : layout.bindings) {
    const std::string& name = layout.tensors[binding.tensor].name;
    size_t number = 0;
    while (tensors[number].name != name) ++number;
    const bool matrix = binding.box.ndim() == 2;
    const bascule::Interval rows = matrix ? binding.box[0] : bascule::Interval{0, 1};
    const bascule::Interval columns = binding.box[matrix ? 1 : 0];
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      for (int64_t column = columns.begin; column < columns.end; ++column, ++count) {
        const int64_t offset = binding.byte_offset +
                               (matrix ? (row - rows.begin) * binding.byte_strides[0] : 0) +
                               (column - columns.begin) * binding.byte_strides[matrix ? 1 : 0];
        uint16_t code = 0;  // bf16: the upper half of an fp32
        std::memcpy(&code, layout.buffers[binding.buffer].data + offset, sizeof(code));
        const uint32_t bits = static_cast<uint32_t>(code) << 16;
        float value = 0;
        std::memcpy(&value, &bits, sizeof(value));
        if (value != Value(version, number, row, column)) {
          Fail(name + " is wrong at " + std::to_string(row) + ", " + std::to_string(column));
        }
      }
    }
  }
  return count;
}

// "--name value" pairs over defaults.
class Options {
 public:
  Options(int argc, char** argv, std::map<std::string, std::string> defaults)
      : values_(std::move(defaults)) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i];
      if (!name.starts_with("--") || !values_.contains(name.substr(2)) || i + 1 == argc) {
        std::string usage = std::string("usage: ") + argv[0];
        for (const auto& [known, value] : values_) usage += " [--" + known + " " + value + "]";
        std::fprintf(stderr, "%s\n", usage.c_str());
        std::exit(2);
      }
      values_[name.substr(2)] = argv[i + 1];
    }
  }

  const std::string& Text(const std::string& name) const { return values_.at(name); }
  uint32_t Number(const std::string& name) const {
    const std::string& text = Text(name);
    uint32_t number = 0;
    const auto end = std::from_chars(text.data(), text.data() + text.size(), number);
    if (end.ec != std::errc() || *end.ptr != '\0') Fail("--" + name + ": no number: " + text);
    return number;
  }

 private:
  std::map<std::string, std::string> values_;
};

// The job that both belong to. Its secret is JOB_TOKEN; without one, only this host is served.
inline bascule::JobOptions Job(const std::string& coordinator) {
  bascule::JobOptions job;
  job.name = "example";
  job.coordinator = coordinator;
  if (const char* token = std::getenv("JOB_TOKEN")) job.token = token;
  return job;
}

}  // namespace example
