#include "layout/world_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace bascule {
namespace {

using Json = nlohmann::json;
constexpr int64_t kMaxUint32 = std::numeric_limits<uint32_t>::max();

std::string AxisName(const std::vector<std::string>& names, size_t axis) {
  return axis < names.size() ? names[axis] : fmt::format("axis{}", axis);
}

Json ListJson(const IntervalList& list) {
  Json entries = Json::array();
  for (uint32_t e = 0; e < list.size(); ++e) {
    Json entry = Json::array();
    for (const Interval& interval : list.Entry(e)) entry.push_back({interval.begin, interval.end});
    entries.push_back(std::move(entry));
  }
  return entries;
}

Json ClassJson(const TemplateClass& tensor_class, const std::vector<std::string>& axis_names) {
  Json products = Json::array();
  for (const BoxProduct& product : tensor_class.products) {
    Json dims = Json::array();
    for (const DimSelect& select : product.dims) {
      Json axes = Json::array();
      for (uint32_t axis : select.axes) axes.push_back(AxisName(axis_names, axis));
      dims.push_back({{"list", select.list}, {"axes", std::move(axes)}});
    }
    products.push_back(std::move(dims));
  }
  Json json = {{"shape", tensor_class.shape},
               {"dtype", DTypeName(tensor_class.dtype)},
               {"products", std::move(products)}};
  if (tensor_class.derived) json["derived"] = true;
  return json;
}

Mesh ReadMesh(const JsonNode& node) {
  Mesh mesh;
  node.ForEach([&](const JsonNode& axis) {
    axis.AllowOnly({"axis", "size"});
    mesh.axis_names.push_back(axis["axis"].Text());
    mesh.axis_sizes.push_back(static_cast<uint32_t>(axis["size"].Int(1, kMaxUint32)));
  });
  Status status = mesh.Validate();
  if (!status.ok()) node.Fail(status.message());
  return mesh;
}

Placement ReadPlacement(const JsonNode& node) {
  if (node.is_string()) {
    if (node.Text() != "replicate") node.Fail("expected \"replicate\" or an object");
    return Replicate();
  }
  auto dim = [&node](const char* key) { return static_cast<int>(node[key].Int(-64, 64)); };
  auto number = [&node](const char* key) {
    return static_cast<uint32_t>(node[key].Int(1, kMaxUint32));
  };
  if (node.Has("at")) {
    node.AllowOnly({"at"});
    std::vector<uint32_t> at;
    node["at"].ForEach([&](const JsonNode& item) {
      at.push_back(static_cast<uint32_t>(item.Int(0, kMaxUint32)));
    });
    return AtAny(std::move(at));
  }
  if (node.Has("strided_shard")) {
    node.AllowOnly({"strided_shard", "split_factor"});
    return StridedShard(dim("strided_shard"), number("split_factor"));
  }
  node.AllowOnly({"shard", "parts", "padded"});
  Placement placement = Shard(dim("shard"));
  if (node.Has("parts")) placement.parts = number("parts");
  if (node.Has("padded")) {
    placement.padded = node["padded"].Int(1, std::numeric_limits<int64_t>::max());
  }
  return placement;
}

Placements ReadPlacements(const JsonNode& node) {
  Placements placements;
  if (!node.Has("placements")) return placements;
  node["placements"].ForEachMember([&](const std::string& axis, const JsonNode& item) {
    placements.push_back({axis, ReadPlacement(item)});
  });
  return placements;
}

FlatBuffer ReadFlat(const JsonNode& node) {
  node.AllowOnly({"axes", "cuts", "tensors"});
  FlatBuffer flat;
  node["axes"].ForEach([&](const JsonNode& axis) { flat.axes.push_back(axis.Text()); });
  if (node.Has("cuts")) flat.cuts = node["cuts"].Counts(WorldTemplate::kMaxRanks + 1);
  node["tensors"].ForEach([&](const JsonNode& item) {
    item.AllowOnly({"name", "shape", "dtype", "derived", "placements", "start"});
    FlatTensor tensor{ReadTensor(item), ReadPlacements(item)};
    if (item.Has("start")) tensor.start = item["start"].Count();
    flat.tensors.push_back(std::move(tensor));
  });
  return flat;
}

// Fails at a node with an error that comes from elsewhere.
void FailWith(const JsonNode& node, const Status& status) {
  if (status.ok()) return;
  std::string tensor =
      status.tensor().empty() ? "" : fmt::format(" (tensor '{}')", status.tensor());
  node.Fail(status.message() + tensor);
}

// A world that is declared by placements and flat buffers.
std::shared_ptr<const WorldTemplate> ReadDeclared(const JsonNode& node, const Mesh& mesh) {
  node.AllowOnly({"bascule_world", "mesh", "tensors", "flat", "aliases", "unused"});
  Result<LayoutBuilder> builder = LayoutBuilder::Create(mesh);
  if (!builder.ok()) {
    FailWith(node, builder.status());
    return nullptr;
  }
  if (node.Has("tensors")) {
    node["tensors"].ForEach([&](const JsonNode& item) {
      item.AllowOnly({"name", "shape", "dtype", "derived", "placements"});
      FailWith(item, builder->Add(Block::Of(ReadTensor(item), ReadPlacements(item))));
    });
  }
  if (node.Has("flat")) {
    node["flat"].ForEach(
        [&](const JsonNode& item) { FailWith(item, builder->AddFlat(ReadFlat(item))); });
  }
  std::vector<Alias> aliases;
  std::vector<std::string> unused;
  ReadAliases(node, &aliases);
  ReadUnused(node, &unused);
  for (Alias& alias : aliases) builder->AddAlias(std::move(alias));
  for (std::string& pattern : unused) builder->AddUnused(std::move(pattern));
  Result<std::shared_ptr<const WorldTemplate>> world = builder->BuildWorld();
  FailWith(node, world.status());
  return world.ok() ? *world : nullptr;
}

IntervalList ReadList(const JsonNode& node) {
  IntervalList list;
  node.ForEach([&](const JsonNode& entry) {
    entry.ForEach([&](const JsonNode& item) {
      std::vector<int64_t> ends = item.Counts(2);
      if (ends.size() != 2 || ends[0] >= ends[1]) item.Fail("expected [begin, end], begin < end");
      if (ends.size() == 2) list.intervals.push_back({ends[0], ends[1]});
    });
    list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
  });
  return list;
}

TemplateClass ReadClass(const JsonNode& node, const Mesh& mesh, size_t lists) {
  node.AllowOnly({"shape", "dtype", "derived", "products"});
  TemplateClass tensor_class;
  tensor_class.shape = node["shape"].Counts(kMaxDims);
  tensor_class.dtype = node["dtype"].Type();
  if (node.Has("derived")) tensor_class.derived = node["derived"].Bool();
  node["products"].ForEach([&](const JsonNode& dims) {
    BoxProduct& product = tensor_class.products.emplace_back();
    dims.ForEach([&](const JsonNode& dim) {
      dim.AllowOnly({"list", "axes"});
      DimSelect& select = product.dims.emplace_back();
      JsonNode list = dim["list"];
      if (lists == 0) list.Fail("there are no lists");
      select.list = static_cast<uint32_t>(list.Int(0, static_cast<int64_t>(lists) - 1));
      dim["axes"].ForEach([&](const JsonNode& item) {
        int axis = mesh.Axis(item.Text());
        if (axis < 0) item.Fail("the mesh has no such axis");
        select.axes.push_back(static_cast<uint32_t>(std::max(axis, 0)));
      });
    });
  });
  return tensor_class;
}

std::shared_ptr<const WorldTemplate> ReadExpanded(const JsonNode& node, const Mesh& mesh) {
  node.AllowOnly({"bascule_world", "mesh", "lists", "classes", "names", "aliases", "unused"});
  auto world = std::make_shared<WorldTemplate>();
  world->axis_sizes = mesh.axis_sizes;
  node["lists"].ForEach([&](const JsonNode& item) { world->lists.push_back(ReadList(item)); });
  node["classes"].ForEach([&](const JsonNode& item) {
    world->classes.push_back(ReadClass(item, mesh, world->lists.size()));
  });
  node["names"].ForEachMember([&](const std::string& name, const JsonNode& item) {
    if (world->classes.empty()) item.Fail("there are no classes");
    int64_t last = std::max<int64_t>(static_cast<int64_t>(world->classes.size()) - 1, 0);
    world->names.push_back(name);
    world->class_of.push_back(static_cast<uint32_t>(item.Int(0, last)));
  });
  ReadAliases(node, &world->aliases);
  ReadUnused(node, &world->unused);
  if (!node.ok()) return nullptr;
  // Indices are in range, which Canonicalize needs; Validate checks the rest.
  world->Canonicalize();
  FailWith(node, world->Validate());
  return world;
}

}  // namespace

LogicalTensor ReadTensor(const JsonNode& node) {
  LogicalTensor tensor;
  tensor.name = node["name"].Text();
  tensor.shape = node["shape"].Counts(kMaxDims);
  tensor.dtype = node["dtype"].Type();
  if (node.Has("derived")) tensor.derived = node["derived"].Bool();
  return tensor;
}

void ReadAliases(const JsonNode& node, std::vector<Alias>* aliases) {
  if (!node.Has("aliases")) return;
  node["aliases"].ForEachMember([&](const std::string& name, const JsonNode& target) {
    aliases->push_back({name, target.Text()});
  });
}

void ReadUnused(const JsonNode& node, std::vector<std::string>* unused) {
  if (!node.Has("unused")) return;
  node["unused"].ForEach([&](const JsonNode& item) { unused->push_back(item.Text()); });
}

Json ExpandedWorldJson(const WorldTemplate& world, const std::vector<std::string>& axis_names) {
  Json json = {{"bascule_world", 1},
               {"mesh", Json::array()},
               {"lists", Json::array()},
               {"classes", Json::array()},
               {"names", Json::object()}};
  for (size_t axis = 0; axis < world.axis_sizes.size(); ++axis) {
    json["mesh"].push_back(
        {{"axis", AxisName(axis_names, axis)}, {"size", world.axis_sizes[axis]}});
  }
  for (const IntervalList& list : world.lists) json["lists"].push_back(ListJson(list));
  for (const TemplateClass& tensor_class : world.classes) {
    json["classes"].push_back(ClassJson(tensor_class, axis_names));
  }
  for (size_t n = 0; n < world.names.size(); ++n) json["names"][world.names[n]] = world.class_of[n];
  for (const Alias& alias : world.aliases) json["aliases"][alias.name] = alias.target;
  if (!world.unused.empty()) json["unused"] = world.unused;
  return json;
}

DeclaredWorld ReadWorld(const JsonNode& node) {
  (void)node["bascule_world"].Int(1, 1);
  DeclaredWorld world;
  world.mesh = ReadMesh(node["mesh"]);
  if (!node.ok()) return world;
  if (!node.Has("classes")) {
    world.world = ReadDeclared(node, world.mesh);
    return world;
  }
  world.world = ReadExpanded(node, world.mesh);
  return world;
}

Result<std::string> WorldToJson(const DeclaredWorld& world, int indent) {
  if (world.world == nullptr || world.mesh.axis_sizes != world.world->axis_sizes) {
    return Status(Code::kInvalidArgument, "JSON: the world has no template or another mesh");
  }
  return DumpJson(ExpandedWorldJson(*world.world, world.mesh.axis_names), indent);
}

Result<DeclaredWorld> WorldFromJson(std::string_view text) {
  BASCULE_ASSIGN_OR_RETURN(Json json, ParseJson(text));
  Status error;
  DeclaredWorld world = ReadWorld(JsonNode(json, &error));
  BASCULE_RETURN_IF_ERROR(error);
  return world;
}

}  // namespace bascule
