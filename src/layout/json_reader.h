// Reading untrusted JSON: values, types and ranges are checked, and the first error keeps the path.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bascule/dtype.h"
#include "bascule/status.h"

namespace bascule {

// Parses a text. Repeated keys and nesting deeper than 64 are errors; a syntax error gives line and
// column.
[[nodiscard]] Result<nlohmann::json> ParseJson(std::string_view text);

// A value inside a document. After the first error reads give empty values, so that the reader
// checks once, at the end. A node points to its parent: it must not outlive it.
class JsonNode {
 public:
  // The root. `error` is set by the first wrong read and must be OK before.
  JsonNode(const nlohmann::json& value, Status* error) : value_(&value), error_(error) {}

  [[nodiscard]] bool Has(const char* key) const {
    return value_ != nullptr && value_->is_object() && value_->contains(key);
  }
  // A member of an object; an error where it is missing.
  [[nodiscard]] JsonNode operator[](const char* key) const;
  // Calls visit(node) for each element of an array.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    if (!Expect(value_ != nullptr && value_->is_array(), "an array")) return;
    for (size_t i = 0; i < value_->size() && error_->ok(); ++i) {
      visit(JsonNode(&(*value_)[i], this, {}, i));
    }
  }
  // Calls visit(key, node) for each member of an object.
  template <typename Visit>
  void ForEachMember(const Visit& visit) const {
    if (!Expect(value_ != nullptr && value_->is_object(), "an object")) return;
    for (const auto& [key, value] : value_->items()) {
      if (!error_->ok()) return;
      visit(key, JsonNode(&value, this, key, 0));
    }
  }
  // Whether the document has been right so far.
  [[nodiscard]] bool ok() const { return error_->ok(); }
  [[nodiscard]] size_t size() const { return value_ != nullptr ? value_->size() : 0; }
  [[nodiscard]] bool is_string() const { return value_ != nullptr && value_->is_string(); }

  // An integer in [low, high].
  [[nodiscard]] int64_t Int(int64_t low, int64_t high) const;
  [[nodiscard]] int64_t Count() const { return Int(0, INT64_MAX); }
  [[nodiscard]] bool Bool() const;
  [[nodiscard]] std::string Text() const;
  [[nodiscard]] DType Type() const;  // a dtype by name
  [[nodiscard]] std::vector<int64_t> Counts(size_t most) const;
  // Members other than these are errors.
  void AllowOnly(std::initializer_list<const char*> keys) const;
  // Records an error at this node unless there is one.
  void Fail(std::string message) const;
  [[nodiscard]] std::string Path() const;

 private:
  JsonNode(const nlohmann::json* value, const JsonNode* parent, std::string_view key, size_t index)
      : value_(value), parent_(parent), key_(key), index_(index), error_(parent->error_) {}
  bool Expect(bool condition, const char* what) const;

  const nlohmann::json* value_;  // null after an error
  const JsonNode* parent_ = nullptr;
  std::string_view key_;  // empty: an element
  size_t index_ = 0;
  Status* error_;
};

}  // namespace bascule
