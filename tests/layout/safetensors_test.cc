// safetensors headers: hardened parsing, and files as layouts.
#include "bascule/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace bascule {
namespace {

using ::testing::HasSubstr;

std::string File(const std::string& header, size_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(header.size() >> (8 * i)));
  return file + header + std::string(data_bytes, 'x');
}

Result<SafetensorsHeader> Parse(const std::string& file) {
  return ParseSafetensorsHeader(file, file.size());
}

const char* const kGood = R"({"__metadata__":{"format":"pt"},)"
                          R"("b":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},)"
                          R"("a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},)"
                          R"("none":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]},)"
                          R"("scalar":{"dtype":"I64","shape":[],"data_offsets":[32,40]}})";

TEST(Safetensors, ParsesAHeader) {
  std::string file = File(kGood, 40);
  Result<SafetensorsHeader> header = Parse(file);
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  ASSERT_EQ(header->tensors.size(), 4u);
  EXPECT_EQ(header->tensors[0].tensor, (LogicalTensor{"a", {4}, DType::kBF16}));
  EXPECT_EQ(header->tensors[1].tensor.name, "none");
  EXPECT_EQ(header->tensors[2].begin, 8u);
  EXPECT_EQ(header->tensors[2].end, 32u);
  EXPECT_EQ(header->metadata.at("format"), "pt");
  EXPECT_EQ(header->data_offset, file.size() - 40);
  // The start of the file is enough.
  EXPECT_TRUE(ParseSafetensorsHeader(file.substr(0, file.size() - 40), file.size()).ok());
}

TEST(Safetensors, NamesWhatIsWrong) {
  struct Case {
    const char* text;
    std::string file;
  };
  auto one = [](const std::string& entry, size_t bytes = 8) {
    return File("{\"w\":" + entry + "}", bytes);
  };
  std::string longer = File(kGood, 40);
  longer[7] = 1;
  const Case cases[] = {
      {"too short", "1234567"},
      {"a header of", longer},
      {"a header of", File(kGood, 40).substr(0, 50)},
      {"no JSON object", File("[1]", 0)},
      {"line 1, column 6", File("{\"w\":", 0)},
      {"needs a dtype", one("3")},
      {"needs a dtype", one(R"({"dtype":"F32","shape":[2]})")},
      {"dtype 'F7'", one(R"({"dtype":"F7","shape":[2],"data_offsets":[0,8]})")},
      {"no count", one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})")},
      {"no count", one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})")},
      {"more than 8", one(R"({"dtype":"F32","shape":[2,1,1,1,1,1,1,1,1],"data_offsets":[0,8]})")},
      {"do not fit", one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})")},
      {"do not fit", one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})")},
      {"do not fit", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,-8]})")},
      {"do not fit",
       one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})")},
      {"truncated", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 7)},
      {"truncated", one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 9)},
      {"after a hole", one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})")},
      {"overlap those of 'a'", File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                                    R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                                    7)},
      {"occurs twice", File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                            R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                            4)},
      {"__metadata__", File(R"({"__metadata__":{"a":1}})", 0)},
  };
  for (const Case& c : cases) {
    Result<SafetensorsHeader> header = Parse(c.file);
    EXPECT_FALSE(header.ok()) << c.text;
    EXPECT_THAT(header.status().message(), HasSubstr(c.text));
  }
}

TEST(Safetensors, SurvivesDamageAndDepth) {
  const std::string good = File(kGood, 40);
  std::mt19937 random(2);
  for (int round = 0; round < 50000; ++round) {
    std::string file = good;
    for (auto flips = 1 + random() % 3; flips > 0; --flips) {
      file[random() % (good.size() - 40)] = static_cast<char>(random());
    }
    if (random() % 4 == 0) file.resize(random() % file.size());
    (void)Parse(file).ok();
  }
  EXPECT_FALSE(Parse(File(std::string(1 << 20, '['), 0)).ok());
  const std::string brackets = std::string(1 << 20, '[') + std::string(1 << 20, ']');
  EXPECT_FALSE(
      Parse(File(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[)" + brackets + ",8]}}", 8))
          .ok());
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  EXPECT_FALSE(Parse(File(deep + "1" + std::string(100000, '}'), 0)).ok());
}

TEST(Safetensors, FilesBecomeALayout) {
  std::string first = File(kGood, 40);
  std::string second = File(R"({"c":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
  auto file = [](const char* path, std::string* content) {
    SafetensorsFile mapped;
    mapped.path = path;
    mapped.data = reinterpret_cast<std::byte*>(content->data());
    mapped.bytes = content->size();
    return mapped;
  };
  std::vector<SafetensorsFile> files = {file("1.safetensors", &first),
                                        file("2.safetensors", &second)};
  Result<Layout> layout = LayoutOfSafetensors(files);
  ASSERT_TRUE(layout.ok()) << layout.status().ToString();
  EXPECT_EQ(layout->buffers.size(), 2u);
  EXPECT_TRUE(ValidateLayout(*layout, Side::kSource).ok());
  EXPECT_TRUE(CheckDestinationCoverage(*layout).ok());
  const Binding& b = layout->bindings[2];
  EXPECT_EQ(layout->tensors[b.tensor].name, "b");
  EXPECT_EQ(b.byte_offset, 8);
  EXPECT_EQ(b.byte_strides[0], 12);
  EXPECT_EQ(layout->buffers[1].data, files[1].data + second.size() - 4);

  files.push_back(file("3.safetensors", &second));
  EXPECT_THAT(LayoutOfSafetensors(files).status().message(),
              HasSubstr("'2.safetensors' and '3.safetensors'"));
  files[2].bytes -= 1;
  EXPECT_THAT(LayoutOfSafetensors(files).status().message(), HasSubstr("in '3.safetensors'"));
}

}  // namespace
}  // namespace bascule
