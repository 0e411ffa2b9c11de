// One rank's layout as JSON.
#include "bascule/layout_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "layout/checked.h"
#include "layout/json_reader.h"
#include "layout/world_json.h"

namespace bascule {

Result<std::string> DumpJson(const nlohmann::json& json, int indent) {
  // dump() throws on text that is not UTF-8, in builds with exceptions.
  try {
    return json.dump(indent);
  } catch (const nlohmann::json::exception&) {
    return Status(Code::kInvalidArgument, "JSON: a name is not UTF-8");
  }
}

namespace {

using Json = nlohmann::json;

const char* KindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kHost: return "host";
    case MemoryKind::kShared: return "shared";
    case MemoryKind::kDevice: return "device";
  }
  return "host";
}

Json TensorsToJson(const std::vector<LogicalTensor>& tensors) {
  Json list = Json::array();
  for (const LogicalTensor& tensor : tensors) {
    Json json = {
        {"name", tensor.name}, {"shape", tensor.shape}, {"dtype", DTypeName(tensor.dtype)}};
    if (tensor.derived) json["derived"] = true;
    list.push_back(std::move(json));
  }
  return list;
}

Json BuffersToJson(const std::vector<Buffer>& buffers) {
  Json list = Json::array();
  for (const Buffer& buffer : buffers) {
    Json json = {{"name", buffer.name}, {"bytes", buffer.bytes}};
    if (buffer.kind != MemoryKind::kHost) json["kind"] = KindName(buffer.kind);
    if (buffer.device >= 0) json["device"] = buffer.device;
    list.push_back(std::move(json));
  }
  return list;
}

Json BindingToJson(const Layout& layout, const Binding& binding) {
  const LogicalTensor& tensor = layout.tensors[binding.tensor];
  Json json = {{"tensor", tensor.name},
               {"buffer", layout.buffers[binding.buffer].name},
               {"offset", binding.byte_offset}};
  Json box = Json::array();
  Json strides = Json::array();
  for (int d = 0; d < binding.box.ndim(); ++d) {
    box.push_back({binding.box[d].begin, binding.box[d].end});
    strides.push_back(binding.byte_strides[static_cast<size_t>(d)]);
  }
  json["box"] = std::move(box);
  json["strides"] = std::move(strides);
  if (binding.dtype != tensor.dtype) json["dtype"] = DTypeName(binding.dtype);
  if (binding.function == LandingFunction::kNegExp) json["function"] = "neg_exp";
  return json;
}

Json PaddingToJson(const Layout& layout, const Padding& padding) {
  return {{"buffer", layout.buffers[padding.buffer].name},
          {"offset", padding.offset},
          {"bytes", padding.bytes},
          {"count", padding.count},
          {"stride", padding.stride}};
}

Status CheckReferences(const Layout& layout) {
  std::unordered_map<std::string_view, int> names;
  for (const Buffer& buffer : layout.buffers) {
    if (names[buffer.name]++ > 0) {
      return {Code::kInvalidArgument,
              "JSON: two buffers are named '" + buffer.name + "'; JSON refers to them by name"};
    }
  }
  bool good = true;
  for (const Binding& binding : layout.bindings) {
    good = good && binding.tensor < layout.tensors.size() && binding.buffer < layout.buffers.size();
  }
  for (const Padding& padding : layout.padding) good = good && padding.buffer < names.size();
  if (good) return Status::Ok();
  return {Code::kInvalidArgument, "JSON: a binding or padding refers to nothing; validate first"};
}

// Names of tensors or buffers -> their indices.
using Numbers = std::unordered_map<std::string, uint32_t>;

void AddName(const JsonNode& node, const std::string& name, Numbers* numbers) {
  if (!numbers->try_emplace(name, static_cast<uint32_t>(numbers->size())).second) {
    node.Fail("the name '" + name + "' occurs twice");
  }
}

uint32_t Refer(const JsonNode& node, const Numbers& numbers) {
  auto at = numbers.find(node.Text());
  if (at != numbers.end()) return at->second;
  node.Fail("no such name is declared");
  return 0;
}

Buffer ReadBuffer(const JsonNode& node) {
  node.AllowOnly({"name", "bytes", "kind", "device"});
  Buffer buffer;
  buffer.name = node["name"].Text();
  buffer.bytes = static_cast<uint64_t>(node["bytes"].Count());
  if (node.Has("device")) buffer.device = static_cast<int>(node["device"].Int(0, 1 << 20));
  if (node.Has("kind")) {
    std::string kind = node["kind"].Text();
    if (kind == "shared") {
      buffer.kind = MemoryKind::kShared;
    } else if (kind == "device") {
      buffer.kind = MemoryKind::kDevice;
    } else if (kind != "host") {
      node["kind"].Fail("expected \"host\", \"shared\" or \"device\"");
    }
  }
  return buffer;
}

Interval ReadInterval(const JsonNode& node) {
  std::vector<int64_t> ends = node.Counts(2);
  if (ends.size() == 2 && ends[0] <= ends[1]) return {ends[0], ends[1]};
  node.Fail("expected [begin, end] with begin <= end");
  return {};
}

// Dense row-major strides of a box, where none are given.
void SetDenseStrides(const JsonNode& node, Binding* binding) {
  std::optional<int64_t> stride = DTypeSize(binding->dtype);
  for (int d = binding->box.ndim() - 1; d >= 0; --d) {
    if (!stride) node.Fail("the box has more than 2^63 bytes");
    binding->byte_strides[static_cast<size_t>(d)] = stride.value_or(0);
    stride = CheckedMultiply(stride.value_or(0), std::max<int64_t>(binding->box[d].size(), 1));
  }
}

Binding ReadBinding(const JsonNode& node, const Layout& layout, const Numbers& tensors,
                    const Numbers& buffers) {
  node.AllowOnly({"tensor", "buffer", "box", "offset", "strides", "dtype", "function"});
  Binding binding;
  binding.tensor = Refer(node["tensor"], tensors);
  binding.buffer = Refer(node["buffer"], buffers);
  if (binding.tensor >= layout.tensors.size()) return binding;  // after an error
  const LogicalTensor& tensor = layout.tensors[binding.tensor];
  const size_t ndim = tensor.shape.size();
  binding.box = Box::Whole(tensor.shape);
  binding.dtype = node.Has("dtype") ? node["dtype"].Type() : tensor.dtype;
  if (node.Has("offset")) binding.byte_offset = node["offset"].Count();
  if (node.Has("box")) {
    JsonNode box = node["box"];
    int d = 0;
    if (box.size() != ndim) box.Fail(fmt::format("expected {} intervals", ndim));
    box.ForEach([&](const JsonNode& item) { binding.box[d++] = ReadInterval(item); });
  }
  if (node.Has("strides")) {
    std::vector<int64_t> strides = node["strides"].Counts(kMaxDims);
    if (strides.size() != ndim) node["strides"].Fail(fmt::format("expected {} strides", ndim));
    std::copy(strides.begin(), strides.end(), binding.byte_strides.begin());
  } else {
    SetDenseStrides(node, &binding);
  }
  if (node.Has("function")) {
    if (node["function"].Text() != "neg_exp") node["function"].Fail("expected \"neg_exp\"");
    binding.function = LandingFunction::kNegExp;
  }
  return binding;
}

Padding ReadPadding(const JsonNode& node, const Numbers& buffers) {
  node.AllowOnly({"buffer", "offset", "bytes", "count", "stride"});
  Padding padding;
  padding.buffer = Refer(node["buffer"], buffers);
  padding.offset = static_cast<uint64_t>(node["offset"].Count());
  padding.bytes = static_cast<uint64_t>(node["bytes"].Count());
  if (node.Has("count")) padding.count = static_cast<uint64_t>(node["count"].Count());
  if (node.Has("stride")) padding.stride = static_cast<uint64_t>(node["stride"].Count());
  return padding;
}

void ReadLayout(const JsonNode& root, Layout* layout) {
  root.AllowOnly({"bascule_layout", "tensors", "buffers", "bindings", "aliases", "padding",
                  "unused", "world", "coordinates"});
  (void)root["bascule_layout"].Int(1, 1);
  Numbers tensors;
  Numbers buffers;
  root["tensors"].ForEach([&](const JsonNode& node) {
    node.AllowOnly({"name", "shape", "dtype", "derived"});
    layout->tensors.push_back(ReadTensor(node));
    AddName(node, layout->tensors.back().name, &tensors);
  });
  root["buffers"].ForEach([&](const JsonNode& node) {
    layout->buffers.push_back(ReadBuffer(node));
    AddName(node, layout->buffers.back().name, &buffers);
  });
  root["bindings"].ForEach([&](const JsonNode& node) {
    layout->bindings.push_back(ReadBinding(node, *layout, tensors, buffers));
  });
  if (root.Has("padding")) {
    root["padding"].ForEach(
        [&](const JsonNode& node) { layout->padding.push_back(ReadPadding(node, buffers)); });
  }
  ReadAliases(root, &layout->aliases);
  ReadUnused(root, &layout->unused);
  if (root.Has("world")) {
    layout->world = ReadWorld(root["world"]).world;
    for (int64_t coordinate : root["coordinates"].Counts(WorldTemplate::kMaxAxes)) {
      layout->coordinates.push_back(static_cast<uint32_t>(
          std::min<int64_t>(coordinate, std::numeric_limits<uint32_t>::max())));
    }
  } else if (root.Has("coordinates")) {
    root["coordinates"].Fail("coordinates without a world");
  }
}

}  // namespace

Result<std::string> LayoutToJson(const Layout& layout, int indent) {
  BASCULE_RETURN_IF_ERROR(CheckReferences(layout));
  Json json = {{"bascule_layout", 1},
               {"tensors", TensorsToJson(layout.tensors)},
               {"buffers", BuffersToJson(layout.buffers)},
               {"bindings", Json::array()}};
  for (const Binding& binding : layout.bindings) {
    json["bindings"].push_back(BindingToJson(layout, binding));
  }
  for (const Padding& padding : layout.padding) {
    json["padding"].push_back(PaddingToJson(layout, padding));
  }
  for (const Alias& alias : layout.aliases) json["aliases"][alias.name] = alias.target;
  if (!layout.unused.empty()) json["unused"] = layout.unused;
  if (layout.world != nullptr) {
    json["world"] = ExpandedWorldJson(*layout.world, {});
    json["coordinates"] = layout.coordinates;
  }
  return DumpJson(json, indent);
}

Result<Layout> LayoutFromJson(std::string_view text) {
  BASCULE_ASSIGN_OR_RETURN(Json json, ParseJson(text));
  Status error;
  Layout layout;
  ReadLayout(JsonNode(json, &error), &layout);
  BASCULE_RETURN_IF_ERROR(error);
  return layout;
}

}  // namespace bascule
