// Frames and messages of the shm socket: pure bytes.
#include "transport/shm/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/random.h"

namespace bascule::shm {
namespace {

// Feeds `bytes` in pieces of at most `step`; the frames that came out, or the error.
Result<std::vector<Frame>> Feed(FrameAssembler& assembler, std::string_view bytes, size_t step) {
  std::vector<Frame> frames;
  while (!bytes.empty()) {
    std::span<char> space = assembler.Space();
    size_t n = std::min({space.size(), bytes.size(), step});
    if (n == 0) return Status(Code::kInternal, "no space although no frame is complete");
    std::memcpy(space.data(), bytes.data(), n);
    bytes.remove_prefix(n);
    BASCULE_RETURN_IF_ERROR(assembler.Advance(n));
    if (assembler.complete()) frames.push_back(assembler.Take());
  }
  return frames;
}

TEST(Frame, AnyCutGivesTheSameFrames) {
  std::string stream = EncodeFrame(FrameType::kCall, 7, "") +
                       EncodeFrame(FrameType::kAnswer, 8, std::string(200'000, 'a')) +
                       EncodeFrame(FrameType::kOpened, UINT64_MAX, "xyz", true);
  for (size_t step : {size_t{1}, size_t{7}, size_t{24}, size_t{65'536}, size_t{1} << 30}) {
    FrameAssembler assembler(1 << 20);
    auto frames = Feed(assembler, stream, step);
    ASSERT_TRUE(frames.ok()) << frames.status().ToString();
    ASSERT_EQ(frames->size(), 3u);
    EXPECT_EQ((*frames)[0].id, 7u);
    EXPECT_EQ((*frames)[1].payload, std::string(200'000, 'a'));
    EXPECT_TRUE((*frames)[2].has_descriptor);
    EXPECT_EQ((*frames)[2].id, UINT64_MAX);
    EXPECT_FALSE(assembler.partial());
  }
}

TEST(Frame, TheHeaderNeverChanges) {
  std::string expected("BCS1\x06\x01\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0abc", 27);
  EXPECT_EQ(EncodeFrame(FrameType::kCall, 2, "abc", true), expected);
}

TEST(Frame, BadHeadersAreErrors) {
  std::string good = EncodeFrame(FrameType::kCall, 1, "abc");
  for (size_t at : {size_t{0}, size_t{3}, size_t{4}, size_t{5}, size_t{6}, size_t{7}, size_t{23}}) {
    std::string bad = good;
    bad[at] = static_cast<char>(0xee);
    FrameAssembler assembler(1 << 20);
    EXPECT_FALSE(Feed(assembler, bad, 100).ok()) << at;
  }
  FrameAssembler strict(2);
  EXPECT_FALSE(Feed(strict, good, 100).ok());
}

TEST(Frame, MemoryFollowsTheBytesAndNotTheClaim) {
  std::string frame = EncodeFrame(FrameType::kCall, 1, std::string(1000, 'x'));
  uint64_t claim = 64 << 20;
  std::memcpy(frame.data() + 16, &claim, sizeof(claim));
  FrameAssembler assembler(claim);
  ASSERT_TRUE(Feed(assembler, frame, 1 << 30).ok());
  EXPECT_TRUE(assembler.partial());
  EXPECT_LE(assembler.Space().size(), size_t{64} << 10);
}

TEST(Frame, MessagesSurviveTheTrip) {
  std::string nonce(kNonceBytes, 'n');
  auto hello = DecodeHello(Encode(Hello{.expected_incarnation = 1,
                                        .incarnation = 2,
                                        .job = "job",
                                        .name = "trainer 3",
                                        .nonce = nonce}));
  ASSERT_TRUE(hello.ok());
  EXPECT_EQ(hello->expected_incarnation, 1u);
  EXPECT_EQ(hello->incarnation, 2u);
  EXPECT_EQ(hello->job + hello->name + hello->nonce, "jobtrainer 3" + nonce);
  auto opened = DecodeOpened(Encode(Opened{.bytes = 1,
                                           .fd_offset = 2,
                                           .sealed = true,
                                           .inode_device = 3,
                                           .inode = 4,
                                           .probe_offset = 5,
                                           .probe = "p"}));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->probe_offset, 5u);
  Status status = Status(Code::kDataLoss, "m").WithRank(-1).WithPeer("p").WithTensor("t");
  EXPECT_EQ(DecodeStatus(Encode(status)).ToString(), status.ToString());
  EXPECT_EQ(DecodeStatus(Encode(Status(status).WithRank(4095))).rank(), 4095);
}

TEST(Frame, CutAndPaddedMessagesAreErrors) {
  std::vector<std::string> messages = {
      Encode(Hello{.job = "j", .name = "n", .nonce = std::string(kNonceBytes, 'n')}),
      Encode(Challenge{.nonce = std::string(kNonceBytes, 'n')}),
      Encode(Welcome{.proof = std::string(kProofBytes, 'p'), .name = "n"}),
      Encode(Open{.region = 1}),
      Encode(Opened{.bytes = 1, .probe = "p"}),
      Encode(Status(Code::kBusy, "m"))};
  auto decodes = [](size_t kind, std::string_view bytes) {
    switch (kind) {
      case 0: return DecodeHello(bytes).ok();
      case 1: return DecodeChallenge(bytes).ok();
      case 2: return DecodeWelcome(bytes).ok();
      case 3: return DecodeOpen(bytes).ok();
      case 4: return DecodeOpened(bytes).ok();
      default: return DecodeStatus(bytes).code() != Code::kInternal;
    }
  };
  for (size_t kind = 0; kind < messages.size(); ++kind) {
    EXPECT_TRUE(decodes(kind, messages[kind])) << kind;
    for (size_t cut = 0; cut < messages[kind].size(); ++cut) {
      EXPECT_FALSE(decodes(kind, std::string_view(messages[kind]).substr(0, cut))) << kind;
    }
    EXPECT_FALSE(decodes(kind, messages[kind] + "x")) << kind;
  }
  // "Unknown" must not decode as OK (fault 11).
  EXPECT_EQ(DecodeStatus(Encode(Status())).code(), Code::kInternal);
}

}  // namespace
}  // namespace bascule::shm
