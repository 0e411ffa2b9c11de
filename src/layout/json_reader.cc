#include "layout/json_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace bascule {
namespace {

using Json = nlohmann::json;
constexpr size_t kMaxDepth = 64;

// Looks for what Json::parse lets pass, and words its errors.
class Checker : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Open(); }
  bool start_array(size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    error = "the key '" + key + "' occurs twice in one object";
    return false;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& what) override {
    error = what.what();
    return false;
  }

  std::string error;

 private:
  bool Open() {
    keys_.emplace_back();
    if (keys_.size() > kMaxDepth) error = fmt::format("nested deeper than {}", kMaxDepth);
    return keys_.size() <= kMaxDepth;
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the values that are open
};

}  // namespace

Result<Json> ParseJson(std::string_view text) {
  Checker checker;
  if (!Json::sax_parse(text.begin(), text.end(), &checker)) {
    return Status(Code::kInvalidArgument, "JSON: " + checker.error);
  }
  Json json = Json::parse(text.begin(), text.end(), nullptr, false);
  if (json.is_discarded()) return Status(Code::kInvalidArgument, "JSON: not a JSON text");
  return json;
}

std::string JsonNode::Path() const {
  if (parent_ == nullptr) return "$";
  if (key_.empty()) return fmt::format("{}[{}]", parent_->Path(), index_);
  return fmt::format("{}.{}", parent_->Path(), key_);
}

void JsonNode::Fail(std::string message) const {
  if (error_->ok()) {
    *error_ = Status(Code::kInvalidArgument, fmt::format("JSON: at {}: {}", Path(), message));
  }
}

bool JsonNode::Expect(bool condition, const char* what) const {
  if (!condition) Fail(fmt::format("expected {}", what));
  return condition;
}

JsonNode JsonNode::operator[](const char* key) const {
  if (!Expect(value_ != nullptr && value_->is_object(), "an object")) {
    return {nullptr, this, key, 0};
  }
  auto at = value_->find(key);
  if (at == value_->end()) Fail(fmt::format("'{}' is missing", key));
  return {at == value_->end() ? nullptr : &*at, this, key, 0};
}

int64_t JsonNode::Int(int64_t low, int64_t high) const {
  bool good = value_ != nullptr && value_->is_number_integer();
  int64_t number = 0;
  if (good && value_->is_number_unsigned()) {
    auto wide = value_->get<uint64_t>();
    good = wide <= static_cast<uint64_t>(INT64_MAX);
    number = static_cast<int64_t>(good ? wide : 0);
  } else if (good) {
    number = value_->get<int64_t>();
  }
  if (good && number >= low && number <= high) return number;
  Fail(fmt::format("expected an integer from {} to {}", low, high));
  return low;
}

bool JsonNode::Bool() const {
  return Expect(value_ != nullptr && value_->is_boolean(), "true or false") && value_->get<bool>();
}

std::string JsonNode::Text() const {
  if (!Expect(value_ != nullptr && value_->is_string(), "a text")) return {};
  return value_->get<std::string>();
}

DType JsonNode::Type() const {
  std::optional<DType> dtype = DTypeFromName(Text());
  if (!dtype) Fail("expected a dtype such as \"BF16\"");
  return dtype.value_or(DType::kF32);
}

std::vector<int64_t> JsonNode::Counts(size_t most) const {
  std::vector<int64_t> counts;
  if (size() > most) Fail(fmt::format("expected at most {} elements", most));
  ForEach([&](const JsonNode& node) { counts.push_back(node.Count()); });
  return counts;
}

void JsonNode::AllowOnly(std::initializer_list<const char*> keys) const {
  ForEachMember([&](const std::string& key, const JsonNode& node) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      node.Fail(fmt::format("unknown key; known are {}", fmt::join(keys, ", ")));
    }
  });
}

}  // namespace bascule
