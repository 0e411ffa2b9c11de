// Little-endian byte strings for small messages between ranks. The reader never reads past its
// input: after a failed read every later one fails too and ok() is false.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace bascule {

class WireWriter {
 public:
  void U8(uint8_t value) { Raw(&value, sizeof value); }
  void U32(uint32_t value) { Raw(&value, sizeof value); }
  void U64(uint64_t value) { Raw(&value, sizeof value); }
  void I64(int64_t value) { Raw(&value, sizeof value); }
  void Bytes(std::string_view value) {
    U32(static_cast<uint32_t>(value.size()));
    Raw(value.data(), value.size());
  }
  [[nodiscard]] std::string Take() { return std::move(bytes_); }

 private:
  void Raw(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  std::string bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}
  uint8_t U8() { return Fixed<uint8_t>(); }
  uint32_t U32() { return Fixed<uint32_t>(); }
  uint64_t U64() { return Fixed<uint64_t>(); }
  int64_t I64() { return Fixed<int64_t>(); }
  std::string Bytes() {
    uint32_t size = U32();
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    std::string value(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return value;
  }
  // A count of items of at least `item_bytes` each: false input cannot make the caller allocate
  // more than the message's own length.
  uint32_t Count(size_t item_bytes) {
    uint32_t count = U32();
    if (!ok_ || (item_bytes > 0 && count > bytes_.size() / item_bytes)) {
      ok_ = false;
      return 0;
    }
    return count;
  }
  [[nodiscard]] bool ok() const { return ok_; }
  // Everything was read and nothing is left.
  [[nodiscard]] bool done() const { return ok_ && bytes_.empty(); }

 private:
  template <typename T>
  T Fixed() {
    T value{};
    if (!ok_ || bytes_.size() < sizeof value) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace bascule
