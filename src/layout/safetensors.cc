#include "bascule/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>

#include "layout/checked.h"
#include "layout/json_reader.h"

namespace bascule {
namespace {

using Json = nlohmann::json;

Status Invalid(std::string message) {
  return {Code::kInvalidArgument, "safetensors: " + std::move(message)};
}

Status Invalid(const std::string& tensor, std::string message) {
  return Invalid(std::move(message)).WithTensor(tensor);
}

constexpr uint64_t kLengthBytes = 8;

// The header's text, after its length was checked.
Result<std::string_view> HeaderText(std::string_view prefix, uint64_t file_bytes) {
  if (prefix.size() < kLengthBytes || file_bytes < kLengthBytes) {
    return Invalid(fmt::format("a file of {} bytes, too short for a header", file_bytes));
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<uint64_t>(static_cast<uint8_t>(prefix[i])) << (8 * i);
  }
  if (length > kMaxSafetensorsHeader || length > file_bytes - kLengthBytes) {
    return Invalid(fmt::format("a header of {} bytes in a file of {} (at most {})", length,
                               file_bytes, kMaxSafetensorsHeader));
  }
  if (length > prefix.size() - kLengthBytes) {
    return Invalid(fmt::format("the header has {} bytes, only {} were given", length,
                               prefix.size() - kLengthBytes));
  }
  return prefix.substr(kLengthBytes, length);
}

// A JSON number that is an integer in [0, 2^63).
bool GetUnsigned(const Json& value, int64_t* number) {
  if (!value.is_number_unsigned()) return false;
  auto wide = value.get<uint64_t>();
  if (wide > static_cast<uint64_t>(INT64_MAX)) return false;
  *number = static_cast<int64_t>(wide);
  return true;
}

Result<SafetensorsTensor> ParseTensor(const std::string& name, const Json& value) {
  auto field = [&](const char* key) -> const Json* {
    auto at = value.is_object() ? value.find(key) : value.end();
    return value.is_object() && at != value.end() ? &*at : nullptr;
  };
  const Json* dtype = field("dtype");
  const Json* shape = field("shape");
  const Json* offsets = field("data_offsets");
  if (name.empty() || name.size() > kMaxNameBytes) return Invalid(name, "a name that is too long");
  if (dtype == nullptr || !dtype->is_string() || shape == nullptr || !shape->is_array() ||
      offsets == nullptr || !offsets->is_array() || offsets->size() != 2) {
    return Invalid(name, "the entry needs a dtype, a shape and two data_offsets");
  }
  SafetensorsTensor tensor;
  tensor.tensor.name = name;
  const auto& dtype_name = dtype->get_ref<const std::string&>();
  std::optional<DType> known = DTypeFromName(dtype_name);
  if (!known) {
    return Status(Code::kUnimplemented, "safetensors: dtype '" + dtype_name + "'").WithTensor(name);
  }
  tensor.tensor.dtype = *known;
  if (shape->size() > kMaxDims) return Invalid(name, "more than 8 dimensions");
  for (const Json& extent : *shape) {
    int64_t number = 0;
    if (!GetUnsigned(extent, &number)) return Invalid(name, "an extent is no count");
    tensor.tensor.shape.push_back(number);
  }
  std::optional<int64_t> bytes = TensorBytes(tensor.tensor.shape, *known);
  int64_t begin = 0;
  int64_t end = 0;
  if (!bytes || !GetUnsigned((*offsets)[0], &begin) || !GetUnsigned((*offsets)[1], &end) ||
      end < begin || end - begin != *bytes) {
    return Invalid(name, fmt::format("data_offsets [{}, {}] do not fit shape [{}] of {}", begin,
                                     end, fmt::join(tensor.tensor.shape, ", "), dtype_name));
  }
  tensor.begin = static_cast<uint64_t>(begin);
  tensor.end = static_cast<uint64_t>(end);
  return tensor;
}

// Sorted tensors must fill the data from its start to its end.
Status CheckOffsets(const SafetensorsHeader& header, uint64_t data_bytes) {
  uint64_t next = 0;
  const std::string* previous = nullptr;
  for (const SafetensorsTensor& tensor : header.tensors) {
    const std::string& name = tensor.tensor.name;
    if (tensor.begin < next) {
      return Invalid(name, fmt::format("bytes {} to {} overlap those of '{}'", tensor.begin,
                                       tensor.end, *previous));
    }
    if (tensor.begin > next) {
      return Invalid(name, fmt::format("starts at byte {} of the data, after a hole from byte {}",
                                       tensor.begin, next));
    }
    next = tensor.end;
    previous = &name;
  }
  if (next != data_bytes) {
    return Invalid(fmt::format("tensors take {} bytes of data, the file has {}: truncated?", next,
                               data_bytes));
  }
  return Status::Ok();
}

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view prefix, uint64_t file_bytes) {
  BASCULE_ASSIGN_OR_RETURN(std::string_view text, HeaderText(prefix, file_bytes));
  BASCULE_ASSIGN_OR_RETURN(Json json, ParseJson(text));
  if (!json.is_object()) return Invalid("the header is no JSON object");
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + text.size();
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return Invalid("__metadata__ is no object");
      for (const auto& [key, entry] : value.items()) {
        if (!entry.is_string()) return Invalid("__metadata__ entry '" + key + "' is no text");
        header.metadata[key] = entry.get<std::string>();
      }
      continue;
    }
    BASCULE_ASSIGN_OR_RETURN(SafetensorsTensor tensor, ParseTensor(name, value));
    header.tensors.push_back(std::move(tensor));
  }
  // Empty tensors sort before what starts where they are.
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.begin, a.end, a.tensor.name) <
                     std::tie(b.begin, b.end, b.tensor.name);
            });
  BASCULE_RETURN_IF_ERROR(CheckOffsets(header, file_bytes - header.data_offset));
  return header;
}

Result<Layout> LayoutOfSafetensors(std::span<const SafetensorsFile> files) {
  Layout layout;
  std::unordered_map<std::string, std::string> file_of;
  for (const SafetensorsFile& file : files) {
    if (file.kind == MemoryKind::kDevice || (file.data == nullptr && file.bytes > 0)) {
      return Invalid("'" + file.path + "' is not in CPU memory");
    }
    std::string_view content(reinterpret_cast<const char*>(file.data), file.bytes);
    Result<SafetensorsHeader> header = ParseSafetensorsHeader(content, file.bytes);
    if (!header.ok()) {
      return Status(header.status().code(), header.status().message() + " in '" + file.path + "'")
          .WithTensor(header.status().tensor());
    }
    auto buffer = static_cast<uint32_t>(layout.buffers.size());
    layout.buffers.push_back({.name = file.path,
                              .data = file.data + header->data_offset,
                              .bytes = file.bytes - header->data_offset,
                              .kind = file.kind,
                              .fd = file.fd,
                              .fd_offset = file.fd_offset + header->data_offset});
    for (SafetensorsTensor& entry : header->tensors) {
      LogicalTensor& tensor = entry.tensor;
      auto [at, added] = file_of.try_emplace(tensor.name, file.path);
      if (!added) return Invalid(tensor.name, "is in '" + at->second + "' and '" + file.path + "'");
      Binding binding{static_cast<uint32_t>(layout.tensors.size()),
                      buffer,
                      Box::Whole(tensor.shape),
                      static_cast<int64_t>(entry.begin),
                      {},
                      tensor.dtype};
      int64_t stride = DTypeSize(tensor.dtype);
      for (size_t d = tensor.shape.size(); d-- > 0;) {
        binding.byte_strides[d] = stride;
        stride *= std::max<int64_t>(tensor.shape[d], 1);  // checked by the parser
      }
      layout.bindings.push_back(binding);
      layout.tensors.push_back(std::move(tensor));
    }
  }
  return layout;
}

}  // namespace bascule
