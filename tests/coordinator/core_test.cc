// Joining, terms, heartbeats: the rules of CoordinatorCore.
#include "coordinator/core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core_driver.h"

namespace bascule {
namespace {

using ::testing::HasSubstr;

TEST(CoordinatorTerm, OpensAtTheFirstTrainerAndCompletesAtTheLast) {
  CoreDriver d(2);
  ASSERT_TRUE(d.Join(0, 100).ok());
  EXPECT_FALSE(d.core.WaitComplete(100, d.now).has_value());
  ASSERT_TRUE(d.Join(1, 101).ok());
  const auto complete = d.core.WaitComplete(100, d.now);
  ASSERT_TRUE(complete.has_value());
  ASSERT_TRUE(complete->ok());
  EXPECT_TRUE((**complete)->complete);
  EXPECT_EQ((**complete)->members.size(), 2u);
  EXPECT_GE(d.core.term(), static_cast<uint64_t>(d.now.wall_ns / 1'000'000));
}

TEST(CoordinatorVersion, IsAvailableOnceAllRanksHoldIt) {
  CoreDriver d(2);
  d.JoinAll();
  EXPECT_EQ(d.Held(0, 1).state, VersionState::kOpen);
  EXPECT_FALSE(d.Poll().offered);
  EXPECT_EQ(d.Held(1, 1).state, VersionState::kAvailable);
  const PollReply offer = d.Poll();
  EXPECT_TRUE(offer.offered);
  EXPECT_EQ(offer.id, (VersionId{d.core.term(), 1}));
}

}  // namespace
}  // namespace bascule
