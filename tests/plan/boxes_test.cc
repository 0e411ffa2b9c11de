#include "plan/boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/plan/worlds.h"

namespace bascule::plan {
namespace {

using testing::Dice;
using testing::ForEachElement;

Box RandomBox(const std::vector<int64_t>& shape, Dice* dice) {
  std::vector<Interval> dims;
  for (int64_t extent : shape) {
    const int64_t begin = dice->Between(0, extent - 1);
    dims.push_back({begin, dice->Between(begin + 1, extent)});
  }
  return Box(dims);
}

std::vector<int64_t> RandomShape(Dice* dice, int64_t largest) {
  std::vector<int64_t> shape;
  for (int64_t d = dice->Between(0, 4); d > 0; --d) shape.push_back(dice->Between(1, largest));
  return shape;
}

TEST(Boxes, RangesAreTheRowMajorOrderInFewBoxes) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Dice dice(seed);
    const auto shape = RandomShape(&dice, 5);
    const Box box = RandomBox(shape, &dice);
    std::vector<size_t> order;
    ForEachElement(box, shape, [&](size_t e) { order.push_back(e); });
    const int64_t first = dice.Between(0, box.size());
    const int64_t last = dice.Between(first, box.size());
    std::vector<Box> boxes;
    AppendRange(box, first, last, &boxes);
    std::vector<size_t> found;
    for (const Box& part : boxes) {
      EXPECT_FALSE(part.empty());
      ForEachElement(part, shape, [&](size_t e) { found.push_back(e); });
    }
    EXPECT_EQ(found, std::vector<size_t>(order.begin() + first, order.begin() + last));
    EXPECT_LE(static_cast<int>(boxes.size()), std::max(1, 2 * box.ndim() - 1));
  }
}

TEST(Boxes, RefinementIsDisjointAndKnowsEveryOwner) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE(seed);
    Dice dice(seed);
    const auto shape = RandomShape(&dice, 8);
    std::vector<OwnedBox> owned;
    std::map<size_t, std::set<uint32_t>> owners;
    for (int64_t i = dice.Between(0, 12); i > 0; --i) {
      owned.push_back({RandomBox(shape, &dice), static_cast<uint32_t>(dice.Between(0, 5))});
      ForEachElement(owned.back().box, shape,
                     [&](size_t e) { owners[e].insert(owned.back().owner); });
    }
    const Cells cells = Refine(owned);
    std::map<size_t, std::set<uint32_t>> found;
    for (size_t c = 0; c < cells.boxes.size(); ++c) {
      auto list = cells.OwnersOf(c);
      ForEachElement(cells.boxes[c], shape, [&](size_t e) {
        EXPECT_TRUE(found.try_emplace(e, list.begin(), list.end()).second) << "overlap";
      });
    }
    EXPECT_EQ(found, owners);
    std::reverse(owned.begin(), owned.end());
    EXPECT_EQ(Refine(owned).boxes, cells.boxes) << "independent of the order given";
  }
}

// Flat shards of two worlds that are cut at different elements: the case that a plain grid of all
// faces turns into hundreds of thousands of cells.
TEST(Boxes, TwoFlatShardingsRefineToFewCells) {
  const Box whole{{0, 4096}, {0, 4096}};
  std::vector<OwnedBox> owned;
  uint32_t owner = 0;
  for (int64_t ranks : {256, 96}) {
    for (int64_t r = 0; r < ranks; ++r, ++owner) {
      std::vector<Box> boxes;
      AppendRange(whole, whole.size() * r / ranks + r % 7, whole.size() * (r + 1) / ranks, &boxes);
      for (const Box& box : boxes) owned.push_back({box, owner});
    }
  }
  EXPECT_LT(Refine(owned).boxes.size(), 4U * owned.size());
}

TEST(Boxes, IndexFindsWhatABruteForceSearchFinds) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Dice dice(seed);
    const auto shape = RandomShape(&dice, 9);
    std::vector<OwnedBox> owned;
    for (int64_t i = dice.Between(0, 9); i > 0; --i) {
      owned.push_back({RandomBox(shape, &dice), static_cast<uint32_t>(i)});
    }
    const std::vector<Box> boxes = Refine(owned).boxes;
    std::vector<uint32_t> order;
    const BoxIndex index(boxes, &order);
    const Box query = RandomBox(shape, &dice);
    std::set<Box> expected;
    for (const Box& box : boxes) {
      if (!box.Intersect(query).empty()) expected.insert(box.Intersect(query));
    }
    std::set<Box> found;
    index.ForEachOverlap(query, [&](uint32_t i, const Box& common) {
      EXPECT_EQ(index.boxes()[i], boxes[order[i]]);
      found.insert(common);
    });
    EXPECT_EQ(found, expected);
  }
}

TEST(Boxes, CutsSnapToTensorsAndRows) {
  const Box box{{0, 10}, {0, 100}};  // 2000 bytes of bf16
  EXPECT_EQ(SnapCut(box, 1499, 2, 4000), 1000) << "below whole_bytes: never cut";
  EXPECT_EQ(SnapCut(box, 1501, 2, 4000), 2000);
  EXPECT_EQ(SnapCut(box, 1012, 2, 64), 1000) << "near a tensor boundary";
  EXPECT_EQ(SnapCut(box, 1430, 2, 64), 1430) << "rows are longer than whole_bytes";
  EXPECT_EQ(SnapCut(box, 1430, 2, 200), 1400) << "a row is a grain";
  EXPECT_EQ(SnapCut(box, 1455, 2, 200), 1500);
  int64_t last = 0;
  for (int64_t cut = 0; cut <= 3000; ++cut) {
    const int64_t snapped = SnapCut(box, cut, 2, 300);
    EXPECT_GE(snapped, last);
    EXPECT_LE(std::abs(snapped - cut), 150);
    last = snapped;
  }
}

TEST(Boxes, TableKeepsTheOrderOfFirstUse) {
  BoxTable table;
  for (int round = 0; round < 2; ++round) {
    for (int64_t i = 0; i < 1000; ++i) {
      EXPECT_EQ(table.Intern(Box{{i, i + 1}, {0, 7}}), static_cast<uint32_t>(i));
    }
  }
  EXPECT_EQ(table.size(), 1000U);
}

}  // namespace
}  // namespace bascule::plan
