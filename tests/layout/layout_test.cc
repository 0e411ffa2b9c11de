// Layouts by themselves: ValidateLayout and CheckDestinationCoverage.
#include "bascule/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bascule/mesh.h"
#include "layout/world_template.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;

// A [4, 6] tensor, dense in one buffer, of bf16.
Layout Dense() {
  Layout layout;
  layout.tensors = {{"w", {4, 6}, DType::kBF16}};
  layout.buffers = {{.name = "buffer", .bytes = 48}};
  layout.bindings = {{0, 0, Box{{0, 4}, {0, 6}}, 0, {12, 2}, DType::kBF16}};
  return layout;
}

void ExpectInvalid(const Status& status, const std::string& text, const std::string& tensor = "") {
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr(text));
  if (!tensor.empty()) {
    EXPECT_EQ(status.tensor(), tensor);
  }
}

TEST(Box, ToString) {
  EXPECT_EQ((Box{{0, 8}, {16, 32}}).ToString(), "[0:8, 16:32]");
  EXPECT_EQ(Box().ToString(), "[]");
}

TEST(ValidateLayout, TakesADenseTensor) {
  EXPECT_TRUE(ValidateLayout(Dense(), Side::kSource).ok());
  EXPECT_TRUE(ValidateLayout(Dense(), Side::kDestination).ok());
  EXPECT_EQ(Dense().FindTensor("w"), 0);
  EXPECT_EQ(Dense().FindTensor("v"), -1);
}

TEST(ValidateLayout, NamesWhatIsWrong) {
  struct Case {
    const char* text;
    void (*damage)(Layout*);
  };
  const Case cases[] = {
      {"two tensors have this name", [](Layout* l) { l->tensors.push_back(l->tensors[0]); }},
      {"name of 0 bytes", [](Layout* l) { l->tensors[0].name = ""; }},
      {"negative extent", [](Layout* l) { l->tensors[0].shape[1] = -1; }},
      {"more than 2^63 bytes",
       [](Layout* l) {
         l->tensors[0].shape = {1LL << 40, 1LL << 40};
       }},
      {"more than 2^63 bytes",
       [](Layout* l) {
         l->tensors[0].shape = {0, 1LL << 62, 1LL << 62};
       }},
      {"at most 8", [](Layout* l) { l->tensors[0].shape.assign(9, 1); }},
      {"box [0:5, 0:6] reaches outside", [](Layout* l) { l->bindings[0].box[0].end = 5; }},
      {"box [-1:4, 0:6] reaches outside", [](Layout* l) { l->bindings[0].box[0].begin = -1; }},
      {"has 1 dimensions, the tensor 2",
       [](Layout* l) {
         l->bindings[0].box = Box{{0, 4}};
       }},
      {"names tensor 1 of 1", [](Layout* l) { l->bindings[0].tensor = 1; }},
      {"outside buffer 'buffer' of 48", [](Layout* l) { l->bindings[0].byte_offset = 2; }},
      {"outside buffer", [](Layout* l) { l->bindings[0].byte_offset = -2; }},
      {"over 2^63", [](Layout* l) { l->bindings[0].byte_strides[0] = INT64_MAX; }},
      {"is negative", [](Layout* l) { l->bindings[0].byte_strides[0] = -12; }},
      {"cannot be cast to BF16", [](Layout* l) { l->bindings[0].dtype = DType::kU8; }},
      {"unknown dtype 99", [](Layout* l) { l->bindings[0].dtype = static_cast<DType>(99); }},
      {"landing function belongs to a destination",
       [](Layout* l) { l->bindings[0].function = LandingFunction::kNegExp; }},
      {"an alias and a tensor",
       [](Layout* l) {
         l->aliases = {{"w", "x"}};
       }},
      {"two aliases",
       [](Layout* l) {
         l->aliases = {{"x", "w"}, {"x", "w"}};
       }},
      {"alias of the alias",
       [](Layout* l) {
         l->aliases = {{"x", "y"}, {"y", "w"}};
       }},
      {"is an alias of 'y', which is no tensor",
       [](Layout* l) {
         l->aliases = {{"x", "y"}};
       }},
      {"outside buffer",
       [](Layout* l) {
         l->padding = {{0, 40, 16}};
       }},
      {"outside buffer",
       [](Layout* l) {
         l->padding = {{0, 0, 4, 1ULL << 62, 1ULL << 62}};
       }},
      {"overlap at stride",
       [](Layout* l) {
         l->padding = {{0, 0, 4, 2, 2}};
       }},
      {"names buffer 3",
       [](Layout* l) {
         l->padding = {{3, 0, 4}};
       }},
      {"which overlap", [](Layout* l) {
         l->bindings.push_back(l->bindings[0]);
         l->bindings[1].box = Box{{3, 4}, {5, 6}};
       }}};
  for (const Case& c : cases) {
    Layout layout = Dense();
    c.damage(&layout);
    ExpectInvalid(ValidateLayout(layout, Side::kSource), c.text);
  }
}

TEST(ValidateLayout, AliasesHaveTheirTargetHereOrAtOtherRanks) {
  LayoutBuilder builder = *LayoutBuilder::Create(Mesh{{"pp"}, {2}}, {0});
  ASSERT_TRUE(builder.Add(Block::Of({"far", {4}, DType::kF32}, {{"pp", At(1)}})).ok());
  builder.AddAlias({"tied", "far"});
  EXPECT_TRUE(ValidateLayout(*builder.BuildLayout(), Side::kSource).ok());
  builder.AddAlias({"lost", "nothing"});
  Layout layout = *builder.BuildLayout();
  for (Side side : {Side::kSource, Side::kDestination}) {
    ExpectInvalid(ValidateLayout(layout, side), "alias of 'nothing'", "lost");
  }
  layout.aliases.clear();  // the world has it still
  ExpectInvalid(ValidateLayout(layout, Side::kSource), "alias of 'nothing'", "lost");
}

TEST(ValidateLayout, DestinationsMayLandABoxTwiceButKeepTheirDtype) {
  Layout layout = Dense();
  layout.buffers.push_back(layout.buffers[0]);
  layout.bindings.push_back(layout.bindings[0]);
  layout.bindings[1].buffer = 1;
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
  ExpectInvalid(ValidateLayout(layout, Side::kSource), "overlap", "w");
  layout.tensors[0].dtype = DType::kF32;
  ExpectInvalid(ValidateLayout(layout, Side::kDestination), "memory is BF16", "w");
}

TEST(ValidateLayout, FindsOverlapAmongManyBoxes) {
  Layout layout;
  layout.tensors = {{"w", {1, 20000}, DType::kU8}};
  layout.buffers = {{.name = "b", .bytes = 20000}};
  for (int64_t i = 0; i < 20000; ++i) {
    layout.bindings.push_back({0, 0, Box{{0, 1}, {i, i + 1}}, i, {0, 1}, DType::kU8});
  }
  EXPECT_TRUE(ValidateLayout(layout, Side::kSource).ok());
  layout.bindings[7].box = Box{{0, 1}, {19000, 19001}};
  ExpectInvalid(ValidateLayout(layout, Side::kSource), "[0:1, 19000:19001]", "w");
}

TEST(DestinationCoverage, NamesTheGap) {
  Layout layout = Dense();
  layout.bindings[0].box = Box{{0, 4}, {0, 5}};
  Status status = CheckDestinationCoverage(layout);
  ExpectInvalid(status, "nothing fills byte 10 of buffer 'buffer'", "w");
  layout.padding = {{0, 10, 2, 4, 12}};
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
  layout.padding[0].count = 3;
  ExpectInvalid(CheckDestinationCoverage(layout), "byte 46");
}

TEST(DestinationCoverage, NamesBothFillers) {
  Layout layout = Dense();
  layout.tensors.push_back({"v", {1}, DType::kBF16});
  layout.bindings.push_back({1, 0, Box{{0, 1}}, 20, {}, DType::kBF16});
  Status status = CheckDestinationCoverage(layout);
  ExpectInvalid(status, "byte 20 of buffer 'buffer' is filled by tensor 'w' box [0:4, 0:6]", "v");
  EXPECT_THAT(status.message(), HasSubstr("tensor 'v' box [0:1]"));
  layout.bindings.pop_back();
  layout.padding = {{0, 24, 4}};
  ExpectInvalid(CheckDestinationCoverage(layout), "byte 24 of buffer 'buffer'", "w");
  layout.padding.clear();
  layout.bindings[0].byte_strides = {2, 2};
  ExpectInvalid(CheckDestinationCoverage(layout), "filled twice", "w");
}

TEST(DestinationCoverage, BuffersShareNoMemory) {
  Layout layout = Dense();
  layout.tensors.push_back({"v", {4, 6}, DType::kBF16});
  layout.buffers.push_back({.name = "other", .bytes = 48});
  layout.bindings.push_back(layout.bindings[0]);
  layout.bindings[1].tensor = 1;
  layout.bindings[1].buffer = 1;
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());  // no memory yet
  std::vector<std::byte> memory(96);
  layout.buffers[1].data = memory.data();
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
  layout.buffers[0].data = memory.data() + 48;
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
  layout.buffers[0].data = memory.data() + 46;
  ExpectInvalid(CheckDestinationCoverage(layout),
                "buffers 'other' and 'buffer' share 2 bytes of memory");
  layout.buffers[1].kind = MemoryKind::kShared;
  ExpectInvalid(CheckDestinationCoverage(layout), "share 2 bytes");
  layout.buffers[0].data = memory.data();
  ExpectInvalid(CheckDestinationCoverage(layout), "share 48 bytes");
  EXPECT_TRUE(ValidateLayout(layout, Side::kSource).ok());
  layout.buffers[1].kind = MemoryKind::kDevice;  // addresses of another space
  layout.buffers[1].device = 0;
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
  // An empty one is nowhere.
  layout.buffers.push_back({.name = "empty", .data = memory.data() + 3});
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
}

TEST(DestinationCoverage, TakesTransposedAndEmptyAndScalar) {
  Layout layout = Dense();
  layout.bindings[0].byte_strides = {2, 8};
  layout.tensors.push_back({"s", {}, DType::kF32});
  layout.tensors.push_back({"empty", {0, 3}, DType::kF32});
  layout.buffers.push_back({.name = "scalar", .bytes = 4});
  layout.buffers.push_back({.name = "nothing"});
  layout.bindings.push_back({1, 1, Box(), 0, {}, DType::kF32});
  layout.bindings.push_back({2, 2, Box{{0, 0}, {0, 3}}, 0, {12, 4}, DType::kF32});
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
}

// Interleaved gate and up, row by row and element by element, on buffers of 8 GB each.
TEST(DestinationCoverage, IsFastOnInterleavedRowsAndColumns) {
  constexpr int64_t kExperts = 128;
  Layout layout;
  for (int kind = 0; kind < 2; ++kind) {
    const bool columns = kind == 1;
    const int64_t rows = columns ? 128 : 2880 * 4;  // of gate, an expert
    const int64_t width = 2880;
    const auto buffer = static_cast<uint32_t>(layout.buffers.size());
    layout.buffers.push_back(
        {.name = "w13", .bytes = static_cast<uint64_t>(kExperts * rows * 2 * width * 2)});
    for (uint32_t part = 0; part < 2; ++part) {
      layout.tensors.push_back({(part == 0 ? "gate" : "up") + std::to_string(kind),
                                {kExperts, rows, width},
                                DType::kBF16});
      Binding binding{static_cast<uint32_t>(layout.tensors.size() - 1),
                      buffer,
                      Box::Whole({kExperts, rows, width}),
                      0,
                      {},
                      DType::kBF16};
      binding.byte_strides = {rows * width * 4, width * 4, columns ? 4 : 2};
      binding.byte_offset = part * (columns ? 2 : width * 2);
      layout.bindings.push_back(binding);
    }
  }
  EXPECT_TRUE(CheckDestinationCoverage(layout).ok());
  layout.bindings[3].box[2].end -= 1;
  ExpectInvalid(CheckDestinationCoverage(layout), "nothing fills byte 11518 of buffer 'w13'");
}

}  // namespace
}  // namespace bascule
