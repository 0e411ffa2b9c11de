// Canonical bytes: little-endian, lists with their length. For digests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace bascule::plan {

class Writer {
 public:
  void U32(uint32_t value) { Append(value, 4); }
  void U64(uint64_t value) { Append(value, 8); }
  void Text(std::string_view text) {
    U64(text.size());
    bytes_ += text;
  }
  template <typename T>
  void List(const std::vector<T>& values) {
    static_assert(std::is_unsigned_v<T>);
    U64(values.size());
    for (T value : values) Append(value, sizeof(T));
  }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  void Append(uint64_t value, size_t count) {
    for (size_t i = 0; i < count; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }
  std::string bytes_;
};

}  // namespace bascule::plan
