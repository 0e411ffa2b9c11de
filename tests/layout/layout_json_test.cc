// Layouts and worlds as JSON: round trips, errors with paths, damage.
#include "bascule/layout_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <sstream>

#include "layout/world_template.h"

namespace bascule {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const char* const kDeclared = R"({
  "bascule_world": 1,
  "mesh": [{"axis": "pp", "size": 2}, {"axis": "fsdp", "size": 2}, {"axis": "tp", "size": 2}],
  "tensors": [
    {"name": "embed", "shape": [10, 4], "dtype": "BF16",
     "placements": {"tp": {"shard": 0, "padded": 12}}},
    {"name": "q", "shape": [8, 4], "dtype": "BF16",
     "placements": {"pp": {"at": [1]}, "fsdp": {"strided_shard": 0, "split_factor": 2},
                    "tp": {"shard": 0}}},
    {"name": "k", "shape": [8, 4], "dtype": "BF16",
     "placements": {"pp": "replicate", "tp": {"shard": -1, "parts": 1}}},
    {"name": "scale", "shape": [], "dtype": "F32", "derived": true}
  ],
  "flat": [
    {"axes": ["fsdp"], "cuts": [0, 7, 12],
     "tensors": [{"name": "a", "shape": [2, 3], "dtype": "F32", "placements": {"pp": {"at": [0]}}},
                 {"name": "b", "shape": [2], "dtype": "F32", "start": 10}]}
  ],
  "aliases": {"lm_head": "embed"},
  "unused": ["mtp.*"]
})";

// What kDeclared says, by the builder.
std::shared_ptr<const WorldTemplate> Built() {
  auto builder = LayoutBuilder::Create(Mesh{{"pp", "fsdp", "tp"}, {2, 2, 2}});
  auto bf16 = [](const char* name, std::vector<int64_t> shape) {
    return LogicalTensor{name, std::move(shape), DType::kBF16};
  };
  FlatBuffer flat;
  flat.axes = {"fsdp"};
  flat.cuts = {0, 7, 12};
  flat.tensors = {{{"a", {2, 3}, DType::kF32}, {{"pp", At(0)}}}, {{"b", {2}, DType::kF32}, {}, 10}};
  EXPECT_TRUE(builder->Add(Block::Of(bf16("embed", {10, 4}), {{"tp", ShardPadded(0, 12)}})).ok());
  EXPECT_TRUE(builder
                  ->Add(Block::Of(bf16("q", {8, 4}),
                                  {{"pp", At(1)}, {"fsdp", StridedShard(0, 2)}, {"tp", Shard(0)}}))
                  .ok());
  EXPECT_TRUE(builder->Add(Block::Of(bf16("k", {8, 4}), {{"tp", ShardParts(1, 1)}})).ok());
  EXPECT_TRUE(builder->Add(Block::Of({"scale", {}, DType::kF32, true})).ok());
  EXPECT_TRUE(builder->AddFlat(flat).ok());
  builder->AddAlias({"lm_head", "embed"});
  builder->AddUnused("mtp.*");
  return *builder->BuildWorld();
}

TEST(WorldJson, DeclaredFormIsWhatTheBuilderMakes) {
  Result<DeclaredWorld> world = WorldFromJson(kDeclared);
  ASSERT_TRUE(world.ok()) << world.status().ToString();
  EXPECT_EQ(world->mesh.axis_names, (std::vector<std::string>{"pp", "fsdp", "tp"}));
  EXPECT_EQ(*world->world, *Built());
}

TEST(WorldJson, ExpandedFormRoundTrips) {
  DeclaredWorld world = *WorldFromJson(kDeclared);
  for (int indent : {-1, 2}) {
    Result<std::string> text = WorldToJson(world, indent);
    ASSERT_TRUE(text.ok());
    Result<DeclaredWorld> again = WorldFromJson(*text);
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(*again->world, *world.world);
    EXPECT_EQ(again->mesh.axis_names, world.mesh.axis_names);
    EXPECT_EQ(*WorldToJson(*again, indent), *text);
  }
}

TEST(LayoutJson, RoundTrips) {
  auto builder = LayoutBuilder::Create(Mesh{{"tp"}, {2}}, {1});
  LogicalTensor gate{"gate", {6, 3}, DType::kBF16};
  LogicalTensor up{"up", {6, 3}, DType::kBF16, true};
  uint32_t fused = builder->AddBuffer(
      {.name = "gate_up", .bytes = 48, .kind = MemoryKind::kDevice, .device = 3});
  ASSERT_TRUE(
      builder->Add(FusedGateUp(gate, up, {{"tp", Shard(0)}}, true).PadTo(0, 8), {.buffer = fused})
          .ok());
  uint32_t a_log = builder->AddBuffer({.name = "A", .bytes = 8, .kind = MemoryKind::kShared});
  ASSERT_TRUE(builder
                  ->Add(Block::Of({"A_log", {4}, DType::kF32}, {{"tp", Shard(0)}})
                            .Landing(LandingFunction::kNegExp),
                        {.buffer = a_log})
                  .ok());
  builder->AddAlias({"tied", "gate"});
  builder->AddUnused("mtp.*");
  Layout layout = *builder->BuildLayout();
  Result<std::string> text = LayoutToJson(layout, 1);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  Result<Layout> again = LayoutFromJson(*text);
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(*LayoutToJson(*again, 1), *text);
  EXPECT_EQ(again->tensors, layout.tensors);
  EXPECT_EQ(again->aliases, layout.aliases);
  EXPECT_EQ(again->unused, layout.unused);
  EXPECT_EQ(again->coordinates, layout.coordinates);
  EXPECT_EQ(*again->world, *layout.world);
  ASSERT_EQ(again->bindings.size(), layout.bindings.size());
  EXPECT_EQ(again->bindings[2].function, LandingFunction::kNegExp);
  EXPECT_EQ(again->bindings[1].byte_offset, layout.bindings[1].byte_offset);
  EXPECT_EQ(again->bindings[1].byte_strides, layout.bindings[1].byte_strides);
  EXPECT_EQ(again->buffers[0].kind, MemoryKind::kDevice);
  EXPECT_EQ(again->buffers[0].device, 3);
  EXPECT_EQ(again->buffers[1].kind, MemoryKind::kShared);
  EXPECT_TRUE(CheckDestinationCoverage(*again).ok());
}

const char* const kLayout = R"({
  "bascule_layout": 1,
  "tensors": [{"name": "w", "shape": [4, 6], "dtype": "BF16"}],
  "buffers": [{"name": "memory", "bytes": 48}],
  "bindings": [{"tensor": "w", "buffer": "memory"}]
})";

TEST(LayoutJson, DefaultsAreTheWholeTensorDense) {
  Result<Layout> layout = LayoutFromJson(kLayout);
  ASSERT_TRUE(layout.ok()) << layout.status().ToString();
  EXPECT_TRUE(CheckDestinationCoverage(*layout).ok());
  EXPECT_EQ(layout->bindings[0].byte_strides[0], 12);
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(LayoutJson, ErrorsHaveAPath) {
  struct Case {
    const char* from;
    const char* to;
    const char* text;
  };
  const Case cases[] = {
      {"\"bascule_layout\": 1", "\"bascule_layout\": 2",
       "at $.bascule_layout: expected an integer"},
      {"\"bascule_layout\": 1,", "", "at $: 'bascule_layout' is missing"},
      {"\"bytes\": 48", "\"bytes\": -48", "at $.buffers[0].bytes"},
      {"\"bytes\": 48", "\"bytes\": 18446744073709551615", "at $.buffers[0].bytes"},
      {"\"bytes\": 48", "\"bytes\": 4.5", "at $.buffers[0].bytes"},
      {"\"bytes\": 48", "\"byte\": 48", "at $.buffers[0].byte: unknown key; known are name"},
      {"\"bytes\": 48", "\"bytes\": 48, \"kind\": \"disk\"", "at $.buffers[0].kind"},
      {"\"BF16\"", "\"bf16\"", "at $.tensors[0].dtype"},
      {"[4, 6]", "[4, \"6\"]", "at $.tensors[0].shape[1]"},
      {"[4, 6]", "[1,1,1,1,1,1,1,1,1]", "at $.tensors[0].shape: expected at most 8"},
      {"\"tensor\": \"w\"", "\"tensor\": \"v\"", "at $.bindings[0].tensor: no such name"},
      {"\"buffer\": \"memory\"", "\"buffer\": 0", "at $.bindings[0].buffer: expected a text"},
      {"\"buffer\": \"memory\"", "\"buffer\": \"memory\", \"box\": [[0, 4]]",
       "at $.bindings[0].box: expected 2 intervals"},
      {"\"buffer\": \"memory\"", "\"buffer\": \"memory\", \"box\": [[0, 4], [3, 2]]",
       "at $.bindings[0].box[1]: expected [begin, end]"},
      {"\"buffer\": \"memory\"", "\"buffer\": \"memory\", \"strides\": [2]",
       "at $.bindings[0].strides: expected 2 strides"},
      {"\"buffer\": \"memory\"", "\"buffer\": \"memory\", \"function\": \"exp\"",
       "at $.bindings[0].function"},
      {"\"bindings\": [", "\"bindings\": {}, \"padding\": [", "at $.bindings: expected an array"},
      {"}]\n}", "}], \"coordinates\": []\n}", "at $.coordinates"},
      {"}]\n}", "}], \"aliases\": {\"x\": 1}\n}", "at $.aliases.x: expected a text"},
      {"}]\n}", "}], \"unused\": \"x\"\n}", "at $.unused: expected an array"},
      {"}]\n}", "}], \"tensors\": []\n}", "the key 'tensors' occurs twice"},
      {"\"tensors\": [", "\"tensors\": [,", "line 3, column 15"},
      {"\"name\": \"memory\"", "\"name\": \"\xff\"", "invalid"},
  };
  for (const Case& c : cases) {
    Status status = LayoutFromJson(Replaced(kLayout, c.from, c.to)).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_THAT(status.message(), HasSubstr(c.text));
  }
  EXPECT_THAT(LayoutFromJson("7").status().message(), HasSubstr("at $: expected an object"));
  EXPECT_FALSE(LayoutFromJson("").ok());
  EXPECT_THAT(LayoutFromJson(std::string(1 << 20, '[')).status().message(),
              HasSubstr("deeper than 64"));
}

TEST(WorldJson, ErrorsHaveAPath) {
  struct Case {
    const char* from;
    const char* to;
    const char* text;
  };
  const Case declared[] = {
      {"\"size\": 2", "\"size\": 0", "at $.mesh[0].size"},
      {"\"axis\": \"fsdp\"", "\"axis\": \"pp\"", "at $.mesh: mesh: the axis name 'pp'"},
      {"\"shard\": 0, \"padded\": 12", "\"shard\": 2", "at $.tensors[0]: axis 'tp' shards"},
      {"\"tp\": {\"shard\": 0, \"padded\": 12}", "\"xp\": {\"shard\": 0}", "no axis 'xp'"},
      {"\"replicate\"", "\"partial\"", "at $.tensors[2].placements.pp"},
      {"\"at\": [1]", "\"at\": [2]", "(tensor 'q')"},
      {"\"split_factor\": 2", "\"factor\": 2", "placements.fsdp.factor: unknown key"},
      {"[0, 7, 12]", "[0, 7]", "at $.flat[0]: flat buffer: 2 cuts"},
      {"\"flat\": [", "\"classes\": [], \"flat\": [", "$.flat: unknown key"},
      {"{\"lm_head\": \"embed\"}", "{\"embed\": \"q\"}", "'embed' is an alias and a tensor"},
  };
  for (const Case& c : declared) {
    EXPECT_THAT(WorldFromJson(Replaced(kDeclared, c.from, c.to)).status().message(),
                HasSubstr(c.text));
  }
  const std::string text = *WorldToJson(*WorldFromJson(kDeclared));
  const Case expanded[] = {
      {"\"list\":0", "\"list\":99", "at $.classes[0].products[0][0].list"},
      {"\"axes\":[\"tp\"]", "\"axes\":[\"dp\"]", "the mesh has no such axis"},
      {"\"embed\":", "\"embed2\":99,\"embed\":", "at $.names.embed2"},
      {"\"lists\":[", "\"lists\":[[[[3,3]]],", "at $.lists[0][0][0]"},
      {"\"names\":{", "\"names\":{\"\":0,", "a name of 0 bytes"},
  };
  for (const Case& c : expanded) {
    EXPECT_THAT(WorldFromJson(Replaced(text, c.from, c.to)).status().message(), HasSubstr(c.text));
  }
}

TEST(LayoutJson, WritingNamesWhatItCannotSay) {
  Layout layout = *LayoutFromJson(kLayout);
  layout.buffers.push_back(layout.buffers[0]);
  EXPECT_THAT(LayoutToJson(layout).status().message(), HasSubstr("two buffers are named 'memory'"));
  layout.buffers.pop_back();
  layout.buffers[0].name = "\xff";
  EXPECT_THAT(LayoutToJson(layout).status().message(), HasSubstr("not UTF-8"));
  layout.bindings[0].tensor = 9;
  EXPECT_FALSE(LayoutToJson(layout).ok());
  EXPECT_FALSE(WorldToJson({}).ok());
}

// Every example of docs/layout-json.md is a document that the reader takes.
TEST(LayoutJson, ReadsTheDocumentation) {
  std::string here = __FILE__;  // tests/layout/layout_json_test.cc
  std::ifstream file(here.substr(0, here.rfind("tests/layout")) + "docs/layout-json.md");
  ASSERT_TRUE(file.good());
  std::stringstream content;
  content << file.rdbuf();
  std::string text = content.str();
  int examples = 0;
  for (size_t at = 0; (at = text.find("```json\n", at)) != std::string::npos; ++examples) {
    at += 8;
    std::string example = text.substr(at, text.find("```", at) - at);
    at += example.size();
    if (example.find("bascule_layout") != std::string::npos) {
      Result<Layout> layout = LayoutFromJson(example);
      ASSERT_TRUE(layout.ok()) << layout.status().ToString();
      EXPECT_TRUE(CheckDestinationCoverage(*layout).ok());
    } else {
      Result<DeclaredWorld> world = WorldFromJson(example);
      ASSERT_TRUE(world.ok()) << world.status().ToString();
    }
  }
  EXPECT_EQ(examples, 3);
}

TEST(LayoutJson, SurvivesDamage) {
  std::mt19937 random(4);
  const std::string texts[] = {kDeclared, *WorldToJson(*WorldFromJson(kDeclared)), kLayout};
  const std::string alphabet = "0123456789-.{}[],:\"truefalsn ";
  for (int round = 0; round < 20000; ++round) {
    std::string text = texts[round % 3];
    for (auto flips = 1 + random() % 3; flips > 0; --flips) {
      size_t at = random() % text.size();
      switch (random() % 3) {
        case 0: text[at] = alphabet[random() % alphabet.size()]; break;
        case 1: text.erase(at, 1 + random() % 8); break;
        case 2: text[at] = static_cast<char>(random()); break;
      }
      if (text.empty()) text = " ";
    }
    if (round % 3 == 2) {
      Result<Layout> layout = LayoutFromJson(text);
      if (layout.ok()) (void)CheckDestinationCoverage(*layout).ok();
    } else {
      Result<DeclaredWorld> world = WorldFromJson(text);
      if (world.ok()) {
        ASSERT_TRUE(WorldTemplate::Parse(world->world->Serialize()).ok());
      }
    }
  }
}

}  // namespace
}  // namespace bascule
