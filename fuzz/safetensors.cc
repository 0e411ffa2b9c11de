// Parses bytes as a safetensors file: its header alone, with a length from the input, and whole.
#include "bascule/safetensors.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bascule;
  uint64_t claimed = 0;
  if (size < sizeof claimed) return 0;
  std::memcpy(&claimed, data, sizeof claimed);
  std::string file(reinterpret_cast<const char*>(data) + sizeof claimed, size - sizeof claimed);
  if (auto header = ParseSafetensorsHeader(file, claimed); header.ok()) {
    for (const SafetensorsTensor& tensor : header->tensors) {
      if (tensor.begin > tensor.end || header->data_offset + tensor.end > claimed) std::abort();
    }
  }
  const SafetensorsFile whole{"fuzz", reinterpret_cast<std::byte*>(file.data()), file.size()};
  if (auto layout = LayoutOfSafetensors({&whole, 1}); layout.ok()) {
    if (!ValidateLayout(*layout).ok()) std::abort();
  }
  return 0;
}
