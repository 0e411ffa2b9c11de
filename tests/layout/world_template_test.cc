// World templates: boxes, canonical bytes, hardened parsing, arena maps.
#include "layout/world_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

namespace bascule {
namespace {

using ::testing::HasSubstr;

// Mesh 2 x 4. "a", "c": [8, 6] rows over axis 1. "b": both axes over rows, two products.
// "s": a scalar that only axis 0 = 1 holds.
WorldTemplate Small() {
  WorldTemplate world;
  world.axis_sizes = {2, 4};
  world.lists = {
      {{{0, 2}, {2, 4}, {4, 6}, {6, 8}}, {0, 1, 2, 3, 4}},
      {{{0, 6}}, {0, 1}},
      {{{0, 1}}, {0, 0, 1}},
      {{{0, 1}, {2, 3}, {4, 5}, {6, 7}}, {0, 1, 1, 2, 2, 3, 3, 4, 4}},
  };
  world.classes = {
      {{8, 6}, DType::kBF16, false, {{{{0, {1}}, {1, {}}}}}},
      {{8, 6}, DType::kF32, false, {{{{3, {0, 1}}, {1, {}}}}, {{{0, {1}}, {1, {}}}}}},
      {{}, DType::kF32, true, {{{{2, {0}}}}}},
  };
  world.names = {"a", "b", "c", "s"};
  world.class_of = {0, 1, 0, 2};
  world.aliases = {{"t", "a"}};
  world.unused = {"model.mtp.*"};
  world.Canonicalize();
  return world;
}

std::vector<Box> Boxes(const WorldTemplate& world, const std::string& name,
                       std::vector<uint32_t> coordinates) {
  std::vector<Box> boxes;
  auto n = static_cast<size_t>(world.Find(name));
  world.BoxesOf(world.class_of[n], coordinates, &boxes);
  return boxes;
}

TEST(WorldTemplate, BoxesByCoordinates) {
  WorldTemplate world = Small();
  ASSERT_TRUE(world.Validate().ok());
  EXPECT_EQ(world.ranks(), 8u);
  EXPECT_EQ(world.CoordinatesOf(6), (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(Boxes(world, "a", {1, 2}), (std::vector<Box>{{{4, 6}, {0, 6}}}));
  EXPECT_EQ(Boxes(world, "b", {0, 2}), (std::vector<Box>{{{2, 3}, {0, 6}}, {{4, 6}, {0, 6}}}));
  EXPECT_EQ(Boxes(world, "b", {0, 1}), (std::vector<Box>{{{2, 4}, {0, 6}}}));
  EXPECT_EQ(Boxes(world, "s", {0, 0}), (std::vector<Box>{}));
  EXPECT_EQ(Boxes(world, "s", {1, 3}), (std::vector<Box>{Box()}));
  EXPECT_EQ(world.Find("t"), -1);
}

TEST(WorldTemplate, EqualProductsGiveABoxOnce) {
  WorldTemplate world = Small();
  TemplateClass& tensor_class = world.classes[world.class_of[0]];
  tensor_class.products.push_back(tensor_class.products[0]);
  EXPECT_EQ(Boxes(world, "a", {0, 0}).size(), 1u);
}

TEST(WorldTemplate, RoundTripIsByteIdentical) {
  WorldTemplate world = Small();
  std::string bytes = world.Serialize();
  Result<WorldTemplate> parsed = WorldTemplate::Parse(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(*parsed, world);
  EXPECT_EQ(parsed->Serialize(), bytes);
  EXPECT_EQ(DigestOf(bytes).ToString().size(), 32u);
  EXPECT_NE(DigestOf(bytes), DigestOf(bytes + "x"));
}

// The order in which lists, classes and names were written down does not change the bytes.
TEST(WorldTemplate, CanonicalBytesForgetTheOrderOfDescription) {
  WorldTemplate world = Small();
  WorldTemplate other = world;
  std::reverse(other.lists.begin(), other.lists.end());
  other.lists.push_back(other.lists[0]);      // a copy, used below
  other.lists.push_back({{{0, 1}}, {0, 1}});  // unused
  const auto lists = static_cast<uint32_t>(world.lists.size());
  for (TemplateClass& tensor_class : other.classes) {
    for (BoxProduct& product : tensor_class.products) {
      for (DimSelect& select : product.dims) select.list = lists - 1 - select.list;
    }
  }
  other.classes.push_back(other.classes[other.class_of[0]]);
  for (BoxProduct& product : other.classes.back().products) {
    for (DimSelect& select : product.dims) {
      if (select.list == 0) select.list = lists;
    }
  }
  other.class_of[2] = static_cast<uint32_t>(other.classes.size() - 1);
  std::swap(other.names[0], other.names[3]);
  std::swap(other.class_of[0], other.class_of[3]);
  EXPECT_EQ(other.Serialize(), world.Serialize());
  other.Canonicalize();
  EXPECT_EQ(other, world);
}

TEST(WorldTemplate, ValidateRefuses) {
  struct Case {
    const char* text;
    void (*damage)(WorldTemplate*);
  };
  const Case cases[] = {
      {"no rank", [](WorldTemplate* w) { w->axis_sizes[0] = 0; }},
      {"or more than",
       [](WorldTemplate* w) {
         w->axis_sizes = {1u << 31, 1u << 31, 1u << 31};
       }},
      {"axes, more than", [](WorldTemplate* w) { w->axis_sizes.assign(17, 1); }},
      {"wrong offsets", [](WorldTemplate* w) { w->lists[0].offsets[1] = 9; }},
      {"wrong offsets", [](WorldTemplate* w) { w->lists[0].offsets.clear(); }},
      {"not sorted",
       [](WorldTemplate* w) {
         w->lists[0].intervals[0] = {2, 2};
       }},
      {"not sorted",
       [](WorldTemplate* w) {
         w->lists[0].intervals[0] = {-1, 2};
       }},
      {"beyond dimension", [](WorldTemplate* w) { w->lists[0].intervals.back().end = 9; }},
      {"entries for", [](WorldTemplate* w) { w->classes[0].products[0].dims[0].axes = {0}; }},
      {"used twice",
       [](WorldTemplate* w) {
         w->classes[0].products[0].dims[0].axes = {1, 1};
       }},
      {"does not exist", [](WorldTemplate* w) { w->classes[0].products[0].dims[0].axes = {2}; }},
      {"list 99", [](WorldTemplate* w) { w->classes[0].products[0].dims[0].list = 99; }},
      {"a product of 1", [](WorldTemplate* w) { w->classes[0].products[0].dims.pop_back(); }},
      {"dtype 77", [](WorldTemplate* w) { w->classes[0].dtype = static_cast<DType>(77); }},
      {"2^63", [](WorldTemplate* w) { w->classes[0].shape[1] = INT64_MAX; }},
      {"sorted and unique", [](WorldTemplate* w) { w->names[1] = "a"; }},
      {"0 bytes", [](WorldTemplate* w) { w->names[0] = ""; }},
      {"class does not exist", [](WorldTemplate* w) { w->class_of[0] = 3; }},
      {"alias and a tensor", [](WorldTemplate* w) { w->aliases[0].name = "b"; }},
      {"alias of the alias",
       [](WorldTemplate* w) {
         w->aliases.push_back({"u", "t"});
       }},
  };
  for (const Case& c : cases) {
    WorldTemplate world = Small();
    c.damage(&world);
    Status status = world.Validate();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_THAT(status.message(), HasSubstr(c.text));
  }
}

// Eight dimensions of a hundred intervals each are 10^16 boxes from a few hundred bytes.
TEST(WorldTemplate, RefusesBoxBombs) {
  WorldTemplate world;
  IntervalList list;
  for (int64_t i = 0; i < 100; ++i) list.intervals.push_back({2 * i, 2 * i + 1});
  list.offsets.push_back(100);
  world.lists = {list};
  BoxProduct product{std::vector<DimSelect>(8)};
  world.classes = {{std::vector<int64_t>(8, 200), DType::kU8, false, {product}}};
  world.names = {"bomb"};
  world.class_of = {0};
  EXPECT_THAT(WorldTemplate::Parse(world.Serialize()).status().message(), HasSubstr("boxes"));
}

TEST(WorldTemplate, ParseTakesOnlyWholeCanonicalInput) {
  std::string bytes = Small().Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(WorldTemplate::Parse(std::string_view(bytes).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(WorldTemplate::Parse(bytes + std::string(1, '\0')).ok());
  std::string later = bytes;
  later[3] = 2;
  EXPECT_EQ(WorldTemplate::Parse(later).status().code(), Code::kVersionMismatch);
  EXPECT_THAT(WorldTemplate::Parse("GIF89a").status().message(), HasSubstr("magic"));
}

// A name that shares much and adds little would expand to a multiple of the input.
TEST(WorldTemplate, ParseBoundsWhatNamesExpandTo) {
  std::string bytes("BWT\1\0\0\1\0\1\0\0\2", 12);  // one class of scalars, two names
  auto add_name = [&bytes](char shared, const std::string& rest) {
    bytes += std::string{shared, static_cast<char>(rest.size())} + rest + '\0';
  };
  add_name(0, std::string(40, 'a'));
  std::string start = bytes;
  add_name(17, "bcdefgh");
  bytes += std::string(2, '\0');
  EXPECT_TRUE(WorldTemplate::Parse(bytes).ok());
  bytes = start;
  add_name(17, "b");
  bytes += std::string(2, '\0');
  EXPECT_THAT(WorldTemplate::Parse(bytes).status().message(), HasSubstr("malformed at byte"));
}

// Any damage is refused or gives a template that is valid and canonical.
TEST(WorldTemplate, ParseSurvivesDamage) {
  const std::string bytes = Small().Serialize();
  std::mt19937 random(7);
  for (int round = 0; round < 200000; ++round) {
    std::string damaged = bytes;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      size_t at = random() % damaged.size();
      switch (random() % 4) {
        case 0: damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8)); break;
        case 1: damaged[at] = static_cast<char>(random()); break;
        case 2: damaged.erase(at, 1 + random() % 4); break;
        case 3:
          damaged.insert(at, 1 + random() % 9, static_cast<char>(random() % 2 ? 0xff : 0));
          break;
      }
      if (damaged.empty()) break;
    }
    Result<WorldTemplate> parsed = WorldTemplate::Parse(damaged);
    if (!parsed.ok()) continue;
    ASSERT_EQ(parsed->Serialize(), damaged);
    std::vector<Box> boxes;
    for (uint32_t c = 0; c < parsed->classes.size(); ++c) {
      parsed->BoxesOf(c, parsed->CoordinatesOf(parsed->ranks() - 1), &boxes);
    }
  }
}

TEST(WorldTemplate, SeventyThousandNamesInTensOfMilliseconds) {
  WorldTemplate world = Small();
  world.names.clear();
  world.class_of.clear();
  for (int layer = 0; layer < 61; ++layer) {
    for (int expert = 0; expert < 384; ++expert) {
      for (const char* projection : {"down_proj", "gate_proj", "up_proj"}) {
        world.names.push_back("model.layers." + std::to_string(layer) + ".mlp.experts." +
                              std::to_string(expert) + "." + projection + ".weight");
        world.class_of.push_back(static_cast<uint32_t>(expert % 2));
      }
    }
  }
  world.aliases.clear();
  world.Canonicalize();
  auto start = std::chrono::steady_clock::now();
  std::string bytes = world.Serialize();
  auto middle = std::chrono::steady_clock::now();
  Result<WorldTemplate> parsed = WorldTemplate::Parse(bytes);
  auto end = std::chrono::steady_clock::now();
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed, world);
  EXPECT_LT(bytes.size(), 3u << 20);
  RecordProperty("bytes", static_cast<int>(bytes.size()));
  using Ms = std::chrono::duration<double, std::milli>;
  std::printf("serialize %.1f ms, parse %.1f ms, %zu bytes\n", Ms(middle - start).count(),
              Ms(end - middle).count(), bytes.size());
}

Layout TwoBoxes() {
  Layout layout;
  layout.tensors = {{"w", {8, 6}, DType::kBF16}, {"elsewhere", {3}, DType::kF32}};
  layout.buffers = {{.name = "b", .bytes = 48}};
  layout.bindings = {{0, 0, Box{{4, 6}, {0, 6}}, 24, {12, 2}, DType::kBF16},
                     {0, 0, Box{{0, 2}, {0, 6}}, 0, {12, 2}, DType::kBF16}};
  return layout;
}

TEST(TemplateOf, GroupsOneRanksBoxes) {
  Layout layout = TwoBoxes();
  Result<WorldTemplate> world = TemplateOf(layout);
  ASSERT_TRUE(world.ok()) << world.status().ToString();
  EXPECT_EQ(world->names, (std::vector<std::string>{"w"}));
  ASSERT_EQ(world->classes.size(), 1u);
  EXPECT_EQ(world->classes[0].products.size(), 1u);  // the boxes form a grid
  EXPECT_EQ(Boxes(*world, "w", {}), (std::vector<Box>{{{0, 2}, {0, 6}}, {{4, 6}, {0, 6}}}));
  EXPECT_TRUE(CheckAgainstTemplate(layout, *world, {}).ok());
}

TEST(TemplateOf, KeepsBoxesThatFormNoGrid) {
  Layout layout = TwoBoxes();
  layout.bindings[1].box = Box{{0, 3}, {0, 4}};
  Result<WorldTemplate> world = TemplateOf(layout);
  ASSERT_TRUE(world.ok());
  EXPECT_EQ(Boxes(*world, "w", {}), (std::vector<Box>{{{0, 3}, {0, 4}}, {{4, 6}, {0, 6}}}));
  EXPECT_TRUE(CheckAgainstTemplate(layout, *world, {}).ok());
}

TEST(CheckAgainstTemplate, NamesTheDifference) {
  Layout layout = TwoBoxes();
  WorldTemplate world = *TemplateOf(layout);
  auto expect = [&](const char* text) {
    Status status = CheckAgainstTemplate(layout, world, {});
    EXPECT_THAT(status.message(), HasSubstr(text));
    EXPECT_EQ(status.tensor(), "w");
  };
  layout.bindings[1].box = Box{{0, 3}, {0, 6}};
  expect("the layout binds box [0:3, 0:6]");
  layout.bindings.pop_back();
  expect("gives box [0:2, 0:6] to these coordinates");
  layout.bindings.clear();
  expect("no binding holds any");
  layout = TwoBoxes();
  layout.tensors[0].dtype = DType::kF32;
  expect("the layout says F32 [8, 6], the declared world BF16 [8, 6]");
  EXPECT_THAT(CheckAgainstTemplate(layout, world, std::vector<uint32_t>{0}).message(),
              HasSubstr("not in the mesh"));
}

TEST(MapArena, AlignsEachBox) {
  WorldTemplate world = Small();
  ArenaMap map = MapArena(world, std::vector<uint32_t>{1, 2});
  ASSERT_EQ(map.entries.size(), 5u);  // a, b twice, c, s
  EXPECT_EQ(map.first_entry, (std::vector<uint32_t>{0, 1, 3, 4, 5}));
  for (size_t i = 0; i < map.entries.size(); ++i) EXPECT_EQ(map.entries[i].offset, 256 * i);
  EXPECT_EQ(map.bytes, 256u * 5);
}

// 3 x 2 x 1 cells, of which a rank holds 4: not a grid, though 4 divides what a clamp left of 6.
TEST(TemplateOf, BoxesThatFillOnlyPartOfTheirGridStayApart) {
  Layout layout;
  layout.tensors.push_back({"t", {5, 3, 3}, DType::kU8});
  std::vector<std::byte> memory(64);
  layout.buffers.push_back({"b", memory.data(), memory.size()});
  const std::vector<Box> boxes{{{0, 1}, {0, 1}, {1, 3}},
                               {{0, 1}, {1, 2}, {1, 3}},
                               {{1, 2}, {1, 2}, {1, 3}},
                               {{3, 4}, {0, 1}, {1, 3}}};
  for (size_t i = 0; i < boxes.size(); ++i) {
    Binding binding;
    binding.box = boxes[i];
    binding.byte_offset = static_cast<int64_t>(i) * 2;
    binding.byte_strides = {2, 2, 1};
    binding.dtype = DType::kU8;
    layout.bindings.push_back(binding);
  }
  auto world = TemplateOf(layout);
  ASSERT_TRUE(world.ok()) << world.status().ToString();
  std::vector<Box> held;
  world->BoxesOf(0, {}, &held);
  std::sort(held.begin(), held.end());
  EXPECT_EQ(held, boxes);
}

}  // namespace
}  // namespace bascule
