// Declared meshes: placements, blocks and flat buffers against arrays that are cut element by
// element. Local memory is filled with the numbers of the elements that belong there; every binding
// must find, at each index of its box, that element's number.
#include "bascule/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "layout/flat_layout.h"
#include "layout/world_template.h"
#include "tests/layout/array.h"

namespace bascule {
namespace {

using testing::Array;
using testing::Chunk;
using testing::ConcatAlong;
using testing::Full;
using ::testing::HasSubstr;
using testing::Indices;
using testing::Range;
using testing::SliceAlong;
using testing::StackOf;
using testing::TakeAlong;
using testing::Transposed;
using Coordinates = std::vector<uint32_t>;

constexpr int64_t kPad = -1;
constexpr int64_t kSpacing = 1 << 20;  // numbers of tensor t start at t * kSpacing

LogicalTensor Tensor(const std::string& name, std::vector<int64_t> shape) {
  return {name, std::move(shape), DType::kI64};
}

// Calls visit(index in the tensor row-major, relative indices) for each element of a box.
void ForEachElement(const Box& box, const std::vector<int64_t>& shape,
                    const std::function<void(int64_t, const std::vector<int64_t>&)>& visit) {
  std::vector<int64_t> index(static_cast<size_t>(box.ndim()));
  for (int64_t n = 0; n < box.size(); ++n) {
    int64_t rest = n;
    for (int d = box.ndim() - 1; d >= 0; --d) {
      index[static_cast<size_t>(d)] = rest % box[d].size();
      rest /= box[d].size();
    }
    int64_t flat = 0;
    for (int d = 0; d < box.ndim(); ++d) {
      flat = flat * shape[static_cast<size_t>(d)] + box[d].begin + index[static_cast<size_t>(d)];
    }
    visit(flat, index);
  }
}

// `numbers`: name -> first number of its elements.
using Numbers = std::map<std::string, int64_t>;

// Bindings must find their elements in `memory`, and bind each number of it but kPad.
void ExpectMemory(const Layout& layout, uint32_t buffer, const std::vector<int64_t>& memory,
                  const Numbers& numbers) {
  std::multiset<int64_t> bound;
  for (const Binding& binding : layout.bindings) {
    if (binding.buffer != buffer) continue;
    const LogicalTensor& tensor = layout.tensors[binding.tensor];
    ForEachElement(binding.box, tensor.shape, [&](int64_t flat, const std::vector<int64_t>& index) {
      int64_t offset = binding.byte_offset;
      for (size_t d = 0; d < index.size(); ++d) offset += index[d] * binding.byte_strides[d];
      ASSERT_EQ(offset % 8, 0);
      ASSERT_LT(static_cast<size_t>(offset / 8), memory.size());
      ASSERT_EQ(memory[static_cast<size_t>(offset / 8)], numbers.at(tensor.name) + flat)
          << tensor.name << " " << binding.box.ToString();
      bound.insert(numbers.at(tensor.name) + flat);
    });
  }
  std::multiset<int64_t> expected(memory.begin(), memory.end());
  expected.erase(kPad);
  EXPECT_EQ(bound, expected);
}

// The numbers of all elements that a template gives to coordinates.
std::multiset<int64_t> HeldBy(const WorldTemplate& world, const Coordinates& coordinates,
                              const Numbers& numbers) {
  std::multiset<int64_t> held;
  for (size_t n = 0; n < world.names.size(); ++n) {
    std::vector<Box> boxes;
    world.BoxesOf(world.class_of[n], coordinates, &boxes);
    for (const Box& box : boxes) {
      ForEachElement(box, world.classes[world.class_of[n]].shape,
                     [&](int64_t flat, const std::vector<int64_t>&) {
                       held.insert(numbers.at(world.names[n]) + flat);
                     });
    }
  }
  return held;
}

using Evaluate = std::function<std::optional<Array>(const Coordinates&)>;

// The block, at every rank of the mesh, must have the local array that `evaluate` gives; and the
// world that any rank builds must give every rank the elements of that array.
void ExpectBlock(const Mesh& mesh, const Block& block, const Evaluate& evaluate,
                 const Numbers& numbers) {
  std::shared_ptr<const WorldTemplate> first;
  for (uint64_t rank = 0; rank < mesh.ranks(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const Coordinates coordinates = mesh.CoordinatesOf(rank);
    std::optional<Array> array = evaluate(coordinates);
    auto builder = LayoutBuilder::Create(mesh, coordinates);
    ASSERT_TRUE(builder.ok());
    Result<std::vector<int64_t>> shape = builder->LocalShape(block);
    if (array) {
      ASSERT_TRUE(shape.ok()) << shape.status().ToString();
      EXPECT_EQ(*shape, array->shape);
    } else {
      EXPECT_EQ(shape.status().code(), Code::kNotFound);
    }
    std::vector<int64_t> memory = array ? array->values : std::vector<int64_t>();
    uint32_t buffer = builder->AddBuffer({.name = "memory", .bytes = memory.size() * 8});
    Status status = builder->Add(block, {.buffer = buffer});
    ASSERT_TRUE(status.ok()) << status.ToString();
    Result<Layout> layout = builder->BuildLayout();
    ASSERT_TRUE(layout.ok()) << layout.status().ToString();
    ExpectMemory(*layout, buffer, memory, numbers);
    status = CheckDestinationCoverage(*layout);
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (first == nullptr) first = layout->world;
    EXPECT_EQ(*layout->world, *first);
    std::multiset<int64_t> expected(memory.begin(), memory.end());
    expected.erase(kPad);
    EXPECT_EQ(HeldBy(*first, coordinates, numbers), expected);
    if (::testing::Test::HasFailure()) return;
  }
  auto builder = LayoutBuilder::Create(mesh);
  ASSERT_TRUE(builder->Add(block).ok());
  EXPECT_EQ(**builder->BuildWorld(), *first);
  EXPECT_EQ(builder->LocalShape(block).status().code(), Code::kInvalidArgument);
}

TEST(Mesh, Validates) {
  EXPECT_TRUE(Mesh{}.Validate().ok());
  EXPECT_TRUE((Mesh{{"a", "b"}, {2, 3}}).Validate().ok());
  EXPECT_FALSE((Mesh{{"a"}, {2, 3}}).Validate().ok());
  EXPECT_FALSE((Mesh{{"a", "a"}, {2, 3}}).Validate().ok());
  EXPECT_FALSE((Mesh{{"a"}, {0}}).Validate().ok());
  EXPECT_FALSE((Mesh{{"a", "b"}, {1u << 31, 1u << 31}}).Validate().ok());
  EXPECT_EQ((Mesh{{"a", "b"}, {2, 3}}).CoordinatesOf(4), (Coordinates{1, 1}));
}

// Random meshes and placements; DTensor's rules are said again by cutting arrays.
TEST(Placements, MatchArraysCutAxisByAxis) {
  std::mt19937 random(1);
  auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Mesh mesh;
    const auto axes = static_cast<size_t>(below(4));
    for (size_t a = 0; a < axes; ++a) {
      mesh.axis_names.push_back(std::string(1, static_cast<char>('a' + a)));
      mesh.axis_sizes.push_back(static_cast<uint32_t>(1 + below(4)));
    }
    std::vector<int64_t> shape;
    for (int64_t d = 1 + below(3); d > 0; --d) shape.push_back(1 + below(9));
    // Strided shards come in the one form that FSDP over TP makes: to the left of a shard.
    Placements placements;
    std::vector<std::function<Array(const Array&, const Coordinates&)>> steps;  // in order of cuts
    std::vector<std::function<bool(const Coordinates&)>> present;
    const int strided_dim = static_cast<int>(below(static_cast<int64_t>(shape.size())));
    const bool strided = axes >= 2 && below(3) == 0;
    for (size_t a = 0; a < axes; ++a) {
      const uint32_t ranks = mesh.axis_sizes[a];
      auto dim = static_cast<size_t>(below(static_cast<int64_t>(shape.size())));
      auto chunk = [a, ranks](size_t d) {
        return [a, ranks, d](const Array& array, const Coordinates& c) {
          return Chunk(array, d, ranks, c[a]);
        };
      };
      if (strided && a == 0) {
        placements.push_back({"a", StridedShard(strided_dim, mesh.axis_sizes[1])});
        continue;  // cuts after axis 1
      }
      if (strided && a == 1) {
        placements.push_back({"b", Shard(strided_dim)});
        steps.push_back(chunk(static_cast<size_t>(strided_dim)));
        const uint32_t outer = mesh.axis_sizes[0];
        auto d = static_cast<size_t>(strided_dim);
        steps.push_back([outer, d](const Array& array, const Coordinates& c) {
          return Chunk(array, d, outer, c[0]);
        });
        continue;
      }
      if (strided && dim == static_cast<size_t>(strided_dim)) continue;
      switch (below(5)) {
        case 0: break;
        case 1: {
          auto at = static_cast<uint32_t>(below(ranks));
          placements.push_back({mesh.axis_names[a], At(at)});
          present.push_back([a, at](const Coordinates& c) { return c[a] == at; });
          break;
        }
        case 2: {
          // A strided shard with no shard to its right.
          const auto factor = static_cast<uint32_t>(1 + below(4));
          bool later = a + 1 < axes;  // keep it the last that cuts
          if (later || strided) break;
          placements.push_back({mesh.axis_names[a], StridedShard(static_cast<int>(dim), factor)});
          steps.push_back([=](const Array& array, const Coordinates& c) {
            std::vector<Array> parts;
            for (uint32_t p = 0; p < factor; ++p) {
              parts.push_back(Chunk(Chunk(array, dim, factor, p), dim, ranks, c[a]));
            }
            return ConcatAlong(dim, parts);
          });
          break;
        }
        default:
          placements.push_back(
              {mesh.axis_names[a], Shard(static_cast<int>(dim) -
                                         (below(2) == 0 ? static_cast<int>(shape.size()) : 0))});
          steps.push_back(chunk(dim));
      }
    }
    std::shuffle(placements.begin(), placements.end(), random);
    Evaluate evaluate = [&](const Coordinates& coordinates) -> std::optional<Array> {
      for (const auto& here : present) {
        if (!here(coordinates)) return std::nullopt;
      }
      Array array = Range(shape);
      for (const auto& step : steps) array = step(array, coordinates);
      return array;
    };
    ExpectBlock(mesh, Block::Of(Tensor("w", shape), placements), evaluate, {{"w", 0}});
    if (HasFailure()) return;
  }
}

TEST(Placements, ScalarsAreWhereAtSays) {
  Mesh mesh{{"ep", "tp"}, {4, 2}};
  ExpectBlock(
      mesh, Block::Of(Tensor("scale", {}), {{"ep", AtAny({1, 3})}}),
      [](const Coordinates& c) { return c[0] % 2 == 1 ? std::optional(Range({})) : std::nullopt; },
      {{"scale", 0}});
}

TEST(Placements, NameWhatIsWrong) {
  struct Case {
    const char* text;
    Placements placements;
  };
  const Case cases[] = {
      {"no axis 'pp'", {{"pp", Shard(0)}}},
      {"placed twice", {{"tp", Shard(0)}, {"tp", Shard(1)}}},
      {"shards dimension 2", {{"tp", Shard(2)}}},
      {"shards dimension -1", {{"tp", Shard(-3)}}},
      {"At(4) on axis 'tp'", {{"tp", At(4)}}},
      {"no coordinate", {{"tp", AtAny({})}}},
      {"neither divides", {{"tp", ShardParts(0, 3)}}},
      {"equal parts", {{"tp", ShardParts(0, 12)}}},
      {"cannot be padded to 4", {{"tp", ShardPadded(0, 4)}}},
      {"where other axes cut it too", {{"dp", Shard(0)}, {"tp", ShardPadded(0, 16)}}},
      {"split_factor 0", {{"tp", StridedShard(0, 0)}}},
      {"split_factor 3 where 4 ranks", {{"dp", StridedShard(0, 3)}, {"tp", Shard(0)}}},
  };
  for (const Case& c : cases) {
    auto builder = LayoutBuilder::Create(Mesh{{"dp", "tp"}, {2, 4}});
    Status status = builder->Add(Block::Of(Tensor("w", {8, 6}), c.placements));
    EXPECT_THAT(status.message(), HasSubstr(c.text));
    EXPECT_EQ(status.tensor(), "w");
  }
}

std::vector<Array> ChunksOf(const std::vector<Array>& arrays, size_t dim, int64_t n, int64_t r) {
  std::vector<Array> chunks;
  for (const Array& array : arrays) chunks.push_back(Chunk(array, dim, n, r));
  return chunks;
}

TEST(Blocks, FusedQkvSharesKvHeads) {
  for (uint32_t tp : {1u, 2u, 4u, 8u, 16u}) {
    SCOPED_TRACE(tp);
    const int64_t heads = 16;
    const int64_t kv = 4;
    const int64_t size = 3;
    Numbers numbers = {{"q", 0}, {"k", kSpacing}, {"v", 2 * kSpacing}};
    Block block = FusedQkv(Tensor("q", {heads * size, 5}), Tensor("k", {kv * size, 5}),
                           Tensor("v", {kv * size, 5}), kv, "tp");
    ExpectBlock(
        Mesh{{"tp"}, {tp}}, block,
        [&](const Coordinates& c) {
          // As vLLM's QKVParallelLinear: rank r of more ranks than heads takes head r / replicas.
          int64_t parts = std::min<int64_t>(tp, kv);
          int64_t part = c[0] / (tp / parts);
          return ConcatAlong(0, {Chunk(Range({heads * size, 5}), 0, tp, c[0]),
                                 Chunk(Range({kv * size, 5}, kSpacing), 0, parts, part),
                                 Chunk(Range({kv * size, 5}, 2 * kSpacing), 0, parts, part)});
        },
        numbers);
  }
}

// Megatron's linear_qkv: for each group, its q heads, its k head, its v head.
TEST(Blocks, MegatronQkvInterleavesGroups) {
  const int64_t groups = 8;
  const int64_t q_rows = 6;  // 3 heads of 2
  const int64_t rows = 2;
  Numbers numbers = {{"q", 0}, {"k", kSpacing}, {"v", 2 * kSpacing}};
  Placements placements = {{"tp", Shard(0)}};
  Block block = Block::Interleave(0,
                                  {Block::Of(Tensor("q", {groups * q_rows, 3}), placements),
                                   Block::Of(Tensor("k", {groups * rows, 3}), placements),
                                   Block::Of(Tensor("v", {groups * rows, 3}), placements)},
                                  {q_rows, rows, rows});
  ExpectBlock(
      Mesh{{"dp", "tp"}, {2, 4}}, block,
      [&](const Coordinates& c) {
        std::vector<Array> parts;
        for (int64_t g = 0; g < groups; ++g) {
          parts.push_back(SliceAlong(Range({groups * q_rows, 3}), 0, g * q_rows, (g + 1) * q_rows));
          parts.push_back(
              SliceAlong(Range({groups * rows, 3}, kSpacing), 0, g * rows, (g + 1) * rows));
          parts.push_back(
              SliceAlong(Range({groups * rows, 3}, 2 * kSpacing), 0, g * rows, (g + 1) * rows));
        }
        return Chunk(ConcatAlong(0, parts), 0, 4, c[1]);
      },
      numbers);
}

Array InterleaveRows(const Array& a, const Array& b) {
  std::vector<Array> rows;
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    rows.push_back(SliceAlong(a, 0, i, i + 1));
    rows.push_back(SliceAlong(b, 0, i, i + 1));
  }
  return ConcatAlong(0, rows);
}

// w13 of experts, [E_local, 2 I_local, H]: fused or interleaved, plain or transposed, experts over
// one axis and rows over another; w2 is cut along columns.
TEST(Blocks, StackedExperts) {
  const int64_t experts = 8;
  for (bool interleaved : {false, true}) {
    for (bool transposed : {false, true}) {
      SCOPED_TRACE(interleaved * 2 + transposed);
      Numbers numbers;
      std::vector<Block> blocks;
      for (int64_t e = 0; e < experts; ++e) {
        std::string name = std::to_string(e);
        numbers["gate" + name] = e * 2 * kSpacing;
        numbers["up" + name] = (e * 2 + 1) * kSpacing;
        Placements placements = {{"ep", At(static_cast<uint32_t>(e / 2))}, {"tp", Shard(0)}};
        blocks.push_back(FusedGateUp(Tensor("gate" + name, {6, 5}), Tensor("up" + name, {6, 5}),
                                     placements, interleaved));
      }
      Block block = Block::Stack(std::move(blocks));
      if (transposed) block = std::move(block).Transpose({0, 2, 1});
      ExpectBlock(
          Mesh{{"ep", "tp"}, {4, 2}}, block,
          [&](const Coordinates& c) {
            std::vector<Array> stacked;
            for (int64_t e = c[0] * 2; e < c[0] * 2 + 2; ++e) {
              Array gate = Chunk(Range({6, 5}, e * 2 * kSpacing), 0, 2, c[1]);
              Array up = Chunk(Range({6, 5}, (e * 2 + 1) * kSpacing), 0, 2, c[1]);
              stacked.push_back(interleaved ? InterleaveRows(gate, up)
                                            : ConcatAlong(0, {gate, up}));
            }
            Array array = StackOf(stacked);
            return transposed ? Transposed(array, {0, 2, 1}) : array;
          },
          numbers);
    }
  }
}

TEST(Blocks, PaddedVocabulary) {
  for (int64_t vocabulary : {13, 16, 3}) {
    SCOPED_TRACE(vocabulary);
    ExpectBlock(Mesh{{"tp"}, {4}},
                Block::Of(Tensor("embed", {vocabulary, 3}), {{"tp", ShardPadded(0, 16)}}),
                [&](const Coordinates& c) {
                  return Chunk(
                      ConcatAlong(0, {Range({vocabulary, 3}), Full({16 - vocabulary, 3}, kPad)}), 0,
                      4, c[0]);
                },
                {{"embed", 0}});
  }
}

TEST(Blocks, TwoPaddedShardsPadTheirCornerOnce) {
  ExpectBlock(
      Mesh{{"row", "column"}, {2, 2}},
      Block::Of(Tensor("w", {5, 6}), {{"row", ShardPadded(0, 8)}, {"column", ShardPadded(1, 8)}}),
      [](const Coordinates& c) {
        Array rows = ConcatAlong(0, {Range({5, 6}), Full({3, 6}, kPad)});
        Array padded = ConcatAlong(1, {rows, Full({8, 2}, kPad)});
        return Chunk(Chunk(padded, 0, 2, c[0]), 1, 2, c[1]);
      },
      {{"w", 0}});
}

TEST(Blocks, PadsTwoDimensionsOfATranspose) {
  Block block = std::move(std::move(Block::Of(Tensor("w", {3, 5}), {{"tp", Shard(0)}})).PadTo(0, 4))
                    .PadTo(1, 8)
                    .Transpose({1, 0});
  ExpectBlock(Mesh{{"tp"}, {2}}, block,
              [](const Coordinates& c) {
                Array rows = Chunk(Range({3, 5}), 0, 2, c[0]);
                Array padded = ConcatAlong(0, {rows, Full({4 - rows.shape[0], 5}, kPad)});
                return Transposed(ConcatAlong(1, {padded, Full({4, 3}, kPad)}), {1, 0});
              },
              {{"w", 0}});
}

// A checkpoint that is fused itself (gate rows, then up rows; or row by row), cut within each half.
TEST(Blocks, SlicesOfAFusedTensor) {
  Placements placements = {{"tp", Shard(0)}};
  LogicalTensor fused = Tensor("gate_up", {12, 3});
  ExpectBlock(
      Mesh{{"tp"}, {2}},
      Block::Concat(0, {Block::Of(fused, placements).Slice(0, 0, 6),
                        Block::Of(fused, placements).Slice(0, 6, 12)}),
      [](const Coordinates& c) {
        Array array = Range({12, 3});
        return ConcatAlong(
            0, ChunksOf({SliceAlong(array, 0, 0, 6), SliceAlong(array, 0, 6, 12)}, 0, 2, c[0]));
      },
      {{"gate_up", 0}});
  ExpectBlock(Mesh{{"tp"}, {2}},
              Block::Concat(0, {Block::Of(fused, placements).Slice(0, 0, 12, 2),
                                Block::Of(fused, placements).Slice(0, 1, 12, 2)}),
              [](const Coordinates& c) {
                Array array = Range({12, 3});
                return ConcatAlong(0, ChunksOf({TakeAlong(array, 0, Indices(0, 12, 2)),
                                                TakeAlong(array, 0, Indices(1, 12, 2))},
                                               0, 2, c[0]));
              },
              {{"gate_up", 0}});
}

TEST(Blocks, NameWhatIsWrong) {
  auto of = [](const char* name, std::vector<int64_t> shape, Placements placements = {}) {
    return Block::Of(Tensor(name, std::move(shape)), std::move(placements));
  };
  struct Case {
    const char* text;
    Block block;
  };
  const Case cases[] = {
      {"does not fit its neighbour's", Block::Concat(0, {of("a", {2, 3}), of("b", {2, 4})})},
      {"part 1 has 1 dimensions", Block::Concat(0, {of("a", {2, 3}), of("b", {2})})},
      {"dimension 2 of a block of 2", Block::Concat(2, {of("a", {2, 3})})},
      {"without parts", Block::Stack({})},
      {"as many whole tiles", Block::Interleave(0, {of("a", {2, 3}), of("b", {3, 3})})},
      {"as many whole tiles", Block::Interleave(0, {of("a", {3}), of("b", {2})}, {2, 2})},
      {"one tile of at least 1", Block::Interleave(0, {of("a", {2}), of("b", {2})}, {1})},
      {"Interleave along a dimension that an Interleave around it tiles",
       Block::Interleave(0, {Block::Interleave(0, {of("a", {2}), of("b", {2})}), of("c", {4})},
                         {2, 2})},
      {"is no order", of("a", {2, 3}).Transpose({0, 0})},
      {"is no order of 2", of("a", {2, 3}).Transpose({0})},
      {"is padded to 1", of("a", {2, 3}).PadTo(0, 1)},
      {"slice 0:9:1", of("a", {2, 3}).Slice(0, 0, 9)},
      {"belong to Block::Of", Block::Stack({of("a", {2})}).Slice(0, 0, 1)},
      {"more than 2^63 bytes", of("a", {int64_t{1} << 62, 2})},
      {"at most 8", of("a", {1, 1, 1, 1, 1, 1, 1, 1, 1})},
  };
  for (const Case& c : cases) {
    auto builder = LayoutBuilder::Create(Mesh{{"tp"}, {2}}, {0});
    uint32_t buffer = builder->AddBuffer({.name = "b", .bytes = 1 << 20});
    EXPECT_THAT(builder->Add(c.block, {.buffer = buffer}).message(), HasSubstr(c.text));
  }
}

TEST(Blocks, MemoryMustFit) {
  auto builder = LayoutBuilder::Create(Mesh{{"tp"}, {2}}, {0});
  Block block = Block::Of(Tensor("w", {4, 4}), {{"tp", Shard(0)}});
  uint32_t buffer = builder->AddBuffer({.name = "small", .bytes = 63});
  EXPECT_THAT(builder->Add(block, {.buffer = buffer}).message(), HasSubstr("'small' of 63 bytes"));
  EXPECT_FALSE(builder->Add(block, {.buffer = 9}).ok());
  EXPECT_FALSE(builder->Add(block, {.buffer = buffer, .byte_strides = {8}}).ok());
  EXPECT_FALSE(builder->Add(block, {.buffer = buffer, .byte_strides = {INT64_MAX, 8}}).ok());
  EXPECT_FALSE(builder->Add(block, {.buffer = buffer, .byte_offset = -8}).ok());
}

TEST(Blocks, StridesAndDtypeOfTheMemory) {
  auto builder = LayoutBuilder::Create(Mesh{{"tp"}, {2}}, {1});
  uint32_t buffer = builder->AddBuffer({.name = "master", .bytes = 1000});
  LogicalTensor tensor{"w", {4, 3}, DType::kBF16};
  ASSERT_TRUE(
      builder
          ->Add(
              Block::Of(tensor, {{"tp", Shard(0)}}),
              {.buffer = buffer, .byte_offset = 40, .byte_strides = {100, 4}, .dtype = DType::kF32})
          .ok());
  Layout layout = *builder->BuildLayout();
  ASSERT_EQ(layout.bindings.size(), 1u);
  EXPECT_EQ(layout.bindings[0].box, (Box{{2, 4}, {0, 3}}));
  EXPECT_EQ(layout.bindings[0].byte_offset, 40);
  EXPECT_EQ(layout.bindings[0].byte_strides[0], 100);
  EXPECT_EQ(layout.bindings[0].dtype, DType::kF32);
  EXPECT_TRUE(ValidateLayout(layout, Side::kSource).ok());
}

TEST(LayoutBuilder, TellsWhenMemoryOfABlockIsMissing) {
  auto builder = LayoutBuilder::Create(Mesh{{"tp"}, {2}}, {0});
  ASSERT_TRUE(builder->Add(Block::Of(Tensor("w", {4}), {{"tp", Shard(0)}})).ok());
  Status status = builder->BuildLayout().status();
  EXPECT_THAT(status.message(), HasSubstr("no binding holds any"));
  EXPECT_EQ(status.tensor(), "w");
  EXPECT_TRUE(builder->BuildWorld().ok());
}

TEST(LayoutBuilder, ATensorMayBeAddedTwice) {
  auto builder = LayoutBuilder::Create(Mesh{{"tp"}, {2}}, {0});
  Block block = Block::Of(Tensor("embed", {4}), {{"tp", Shard(0)}});
  for (const char* name : {"embed", "lm_head"}) {
    uint32_t buffer = builder->AddBuffer({.name = name, .bytes = 16});
    ASSERT_TRUE(builder->Add(block, {.buffer = buffer}).ok());
  }
  builder->AddAlias({"lm_head.weight", "embed"});
  builder->AddUnused("mtp.*");
  Result<Layout> layout = builder->BuildLayout();
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->tensors.size(), 1u);
  EXPECT_EQ(layout->bindings.size(), 2u);
  EXPECT_EQ(layout->world->classes[0].products.size(), 1u);
  EXPECT_EQ(layout->world->aliases, layout->aliases);
  EXPECT_TRUE(CheckDestinationCoverage(*layout).ok());
  EXPECT_EQ(builder->Add(Block::Of(Tensor("embed", {5}))).tensor(), "embed");
}

TEST(FlatBoxes, AreFewAndInOrder) {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> shape;
    for (auto d = random() % 5; d > 0; --d) shape.push_back(1 + static_cast<int64_t>(random() % 4));
    int64_t count = testing::Count(shape);
    auto begin = static_cast<int64_t>(random() % static_cast<uint64_t>(count + 1));
    auto end = begin + static_cast<int64_t>(random() % static_cast<uint64_t>(count - begin + 1));
    std::vector<Box> boxes = FlatBoxes(shape, begin, end);
    EXPECT_LE(boxes.size(), std::max<size_t>(1, 2 * shape.size() - (shape.empty() ? 0 : 1)));
    std::vector<int64_t> elements;
    for (const Box& box : boxes) {
      EXPECT_FALSE(box.empty());
      ForEachElement(box, shape,
                     [&](int64_t flat, const std::vector<int64_t>&) { elements.push_back(flat); });
    }
    EXPECT_EQ(elements, Indices(begin, end));
  }
}

// Flat buffers of random tensors, some of them parts of tensor-parallel or expert-parallel ones,
// with random cuts and starts, against one long array.
TEST(FlatBuffers, MatchOneLongArray) {
  std::mt19937 random(5);
  auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Mesh mesh{{"pp", "fsdp", "tp"},
              {static_cast<uint32_t>(1 + below(2)), static_cast<uint32_t>(1 + below(5)),
               static_cast<uint32_t>(1 + below(3))}};
    const bool two_axes = below(3) == 0;  // flat over pp as well
    FlatBuffer flat;
    flat.axes =
        two_axes ? std::vector<std::string>{"fsdp", "pp"} : std::vector<std::string>{"fsdp"};
    const int64_t ranks = mesh.axis_sizes[1] * (two_axes ? mesh.axis_sizes[0] : 1);
    Numbers numbers;
    std::vector<std::function<std::optional<Array>(const Coordinates&)>> parts;
    for (int64_t t = 0; t < 1 + below(5); ++t) {
      std::vector<int64_t> shape;
      for (int64_t d = below(4); d > 0; --d) shape.push_back(1 + below(5));
      std::string name = "t" + std::to_string(t);
      numbers[name] = t * kSpacing;
      FlatTensor tensor{Tensor(name, shape)};
      const bool sharded = !shape.empty() && below(2) == 0;
      auto dim = shape.empty() ? 0 : static_cast<size_t>(below(static_cast<int64_t>(shape.size())));
      if (sharded) tensor.placements.push_back({"tp", Shard(static_cast<int>(dim))});
      const bool at = !two_axes && below(3) == 0;
      const auto stage = static_cast<uint32_t>(below(mesh.axis_sizes[0]));
      if (at) tensor.placements.push_back({"pp", At(stage)});
      flat.tensors.push_back(tensor);
      const int64_t tp = mesh.axis_sizes[2];
      parts.push_back([=](const Coordinates& c) -> std::optional<Array> {
        if (at && c[0] != stage) return std::nullopt;
        Array array = Range(shape, t * kSpacing);
        return sharded ? Chunk(array, dim, tp, c[2]) : array;
      });
    }
    auto whole = [&](const Coordinates& c) {
      std::vector<int64_t> values;
      for (const auto& part : parts) {
        std::optional<Array> array = part(c);
        if (array) values.insert(values.end(), array->values.begin(), array->values.end());
      }
      return values;
    };
    if (below(2) == 0) {  // cuts of our own; they cover the longest buffer
      size_t longest = 0;
      for (uint64_t r = 0; r < mesh.ranks(); ++r) {
        longest = std::max(longest, whole(mesh.CoordinatesOf(r)).size());
      }
      for (int64_t r = 1; r < ranks; ++r)
        flat.cuts.push_back(below(static_cast<int64_t>(longest) + 1));
      flat.cuts.push_back(0);
      flat.cuts.push_back(static_cast<int64_t>(longest));
      std::sort(flat.cuts.begin(), flat.cuts.end());
    }
    std::shared_ptr<const WorldTemplate> first;
    for (uint64_t r = 0; r < mesh.ranks(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      Coordinates c = mesh.CoordinatesOf(r);
      std::vector<int64_t> values = whole(c);
      auto size = static_cast<int64_t>(values.size());
      int64_t rank = two_axes ? c[1] * mesh.axis_sizes[0] + c[0] : c[1];
      int64_t chunk = (size + ranks - 1) / ranks;
      int64_t begin = flat.cuts.empty() ? chunk * rank : flat.cuts[static_cast<size_t>(rank)];
      int64_t end = flat.cuts.empty() ? begin + chunk : flat.cuts[static_cast<size_t>(rank) + 1];
      begin = std::min(begin, size);
      end = std::min(end, size);
      std::vector<int64_t> memory(values.begin() + begin, values.begin() + end);
      auto builder = LayoutBuilder::Create(mesh, c);
      uint32_t buffer = builder->AddBuffer({.name = "flat", .bytes = memory.size() * 8});
      Status status = builder->AddFlat(flat, {.buffer = buffer});
      ASSERT_TRUE(status.ok()) << status.ToString();
      Result<Layout> layout = builder->BuildLayout();
      ASSERT_TRUE(layout.ok()) << layout.status().ToString();
      ExpectMemory(*layout, buffer, memory, numbers);
      EXPECT_TRUE(ValidateLayout(*layout, Side::kSource).ok());
      if (first == nullptr) first = layout->world;
      EXPECT_EQ(*layout->world, *first);
      EXPECT_EQ(HeldBy(*first, c, numbers), std::multiset<int64_t>(memory.begin(), memory.end()));
      if (flat.cuts.empty()) {
        EXPECT_EQ(*builder->LocalElements(flat), static_cast<int64_t>(memory.size()));
      }
      if (HasFailure()) return;
    }
  }
}

TEST(FlatBuffers, NameWhatIsWrong) {
  auto message = [](FlatBuffer flat, uint64_t bytes = 1000) {
    auto builder = LayoutBuilder::Create(Mesh{{"dp", "tp"}, {2, 2}}, {0, 0});
    uint32_t buffer = builder->AddBuffer({.name = "b", .bytes = bytes});
    return builder->AddFlat(flat, {.buffer = buffer}).message();
  };
  FlatTensor w{Tensor("w", {4, 4})};
  EXPECT_THAT(message({{w}, {"pp"}}), HasSubstr("axis 'pp'"));
  EXPECT_THAT(message({{w}, {"dp", "dp"}}), HasSubstr("twice"));
  EXPECT_THAT(message({{w}, {"dp"}, {0, 16}}), HasSubstr("2 cuts for 2 ranks"));
  EXPECT_THAT(message({{w}, {"dp"}, {0, 20, 16}}), HasSubstr("not falling"));
  EXPECT_THAT(message({{w}, {"dp"}}, 63), HasSubstr("do not fit buffer 'b' of 63"));
  EXPECT_THAT(message({{w}, {"dp"}}, 64), "");
  w.placements = {{"dp", Shard(0)}};
  EXPECT_THAT(message({{w}, {"dp"}}), HasSubstr("cannot place the tensor too"));
  w = FlatTensor{Tensor("w", {4, 4}), {}, INT64_MAX};
  EXPECT_THAT(message({{w}, {"dp"}}), HasSubstr("beyond element 2^63"));
}

// Kimi-K2's 69,000 tensors, on a trainer mesh of FSDP 256 and on a rollout mesh of EP 32.
TEST(LayoutBuilder, DescribesKimiK2InWellUnderASecond) {
  constexpr int kLayers = 61;
  constexpr int kExperts = 384;
  for (bool rollout : {false, true}) {
    auto start = std::chrono::steady_clock::now();
    Mesh mesh = rollout ? Mesh{{"ep"}, {32}} : Mesh{{"fsdp"}, {256}};
    auto builder = LayoutBuilder::Create(mesh);
    auto bf16 = [](std::string name, std::vector<int64_t> shape) {
      return LogicalTensor{std::move(name), std::move(shape), DType::kBF16};
    };
    Status status;
    for (int layer = 1; layer < kLayers && status.ok(); ++layer) {
      std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.experts.";
      std::vector<Block> w13;
      std::vector<Block> w2;
      for (int e = 0; e < kExperts; ++e) {
        std::string name = prefix + std::to_string(e);
        Placements placements = rollout ? Placements{{"ep", At(static_cast<uint32_t>(e / 12))}}
                                        : Placements{{"fsdp", Shard(0)}};
        w13.push_back(FusedGateUp(bf16(name + ".gate_proj.weight", {2048, 7168}),
                                  bf16(name + ".up_proj.weight", {2048, 7168}), placements));
        w2.push_back(Block::Of(bf16(name + ".down_proj.weight", {7168, 2048}), placements));
      }
      status = builder->Add(Block::Stack(std::move(w13)));
      if (status.ok()) status = builder->Add(Block::Stack(std::move(w2)));
    }
    ASSERT_TRUE(status.ok()) << status.ToString();
    auto world = builder->BuildWorld();
    ASSERT_TRUE(world.ok()) << world.status().ToString();
    double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    EXPECT_EQ((*world)->names.size(), 60u * 384 * 3);
    EXPECT_EQ((*world)->classes.size(), rollout ? 64u : 2u);
    std::printf("%s: %.0f ms, %zu bytes\n", rollout ? "rollout" : "trainer", ms,
                (*world)->Serialize().size());
  }
}

// The same tensors in one flat buffer a layer, cut into 256.
TEST(LayoutBuilder, DescribesFlatKimiK2) {
  auto start = std::chrono::steady_clock::now();
  auto builder = LayoutBuilder::Create(Mesh{{"fsdp"}, {256}});
  for (int layer = 1; layer < 61; ++layer) {
    FlatBuffer flat;
    flat.axes = {"fsdp"};
    for (int e = 0; e < 384; ++e) {
      for (const char* part : {"gate", "up", "down"}) {
        flat.tensors.push_back(
            {{std::to_string(layer) + "." + std::to_string(e) + part, {2048, 7168}, DType::kBF16}});
      }
    }
    ASSERT_TRUE(builder->AddFlat(flat).ok());
  }
  auto world = builder->BuildWorld();
  ASSERT_TRUE(world.ok()) << world.status().ToString();
  double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  std::printf("flat: %.0f ms, %zu bytes, %zu classes\n", ms, (*world)->Serialize().size(),
              (*world)->classes.size());
}

}  // namespace
}  // namespace bascule
