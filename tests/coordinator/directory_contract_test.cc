// What every Directory does, run over the local and the gRPC one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "bascule/layout.h"
#include "coordinator/grpc_directory.h"
#include "coordinator/local_directory.h"

namespace bascule {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// Long enough that a busy machine does not make live ranks silent.
constexpr int kHeartbeatMs = 300;

Deadline Soon() { return Deadline::In(seconds(10)); }

// Two tensors of four rows; trainer r of a world of n holds rows [4r/n, 4(r+1)/n).
std::string TemplateBytes(uint32_t axis) {
  WorldTemplate world;
  world.axis_sizes = {axis};
  IntervalList rows;
  IntervalList columns{{{0, 8}}, {0, 1}};
  for (uint32_t i = 0; i < axis; ++i) {
    rows.intervals.push_back({4 * i / axis, 4 * (i + 1) / axis});
    rows.offsets.push_back(i + 1);
  }
  world.lists = {rows, columns};
  TemplateClass tensors;
  tensors.shape = {4, 8};
  tensors.products = {{{{0, {0}}, {1, {}}}}};
  world.classes = {tensors};
  world.names = {"a", "b"};
  world.class_of = {0, 0};
  world.Canonicalize();
  EXPECT_TRUE(world.Validate().ok()) << world.Validate().ToString();
  return world.Serialize();
}

enum class Kind { kLocal, kGrpc };

class DirectoryContract : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    CoordinatorServiceOptions options;
    options.job = "job";
    options.token = "secret";
    options.heartbeat = milliseconds(kHeartbeatMs);
    service_ = CoordinatorService::Create(options);
    if (GetParam() == Kind::kGrpc) {
      auto server = ServeDirectory(service_, "127.0.0.1:0", "secret");
      ASSERT_TRUE(server.ok()) << server.status().ToString();
      server_ = std::move(*server);
    }
    directory_ = NewDirectory();
    bytes_ = TemplateBytes(2);
    digest_ = DigestOf(bytes_);
    ASSERT_TRUE(directory_->PutBlob(digest_, bytes_, Soon()).ok());
  }
  std::unique_ptr<Directory> NewDirectory() {
    if (GetParam() == Kind::kLocal) return MakeLocalDirectory(service_);
    return MakeGrpcDirectory(server_->address(), "secret");
  }
  JoinRequest Trainer(uint32_t rank, uint64_t incarnation) {
    JoinRequest request;
    request.job = "job";
    request.token = "secret";
    request.build = "test";
    request.member.rank = rank;
    request.member.world_size = 2;
    request.member.incarnation = incarnation;
    request.member.node = "n";
    request.member.world_template = digest_;
    request.member.coordinates = {rank};
    request.member.addresses = {{"shm", std::string("\x00\xff", 2)}};
    return request;
  }
  JoinRequest Rollout(uint64_t incarnation) {
    JoinRequest request = Trainer(0, incarnation);
    request.member.role = Role::kRollout;
    request.member.engine = "e\xff";  // any bytes
    request.member.world_size = 1;
    request.member.channel = "127.0.0.1:1";
    return request;
  }
  HeldRequest HeldBy(uint64_t incarnation, uint64_t term, uint64_t version) {
    HeldRequest request;
    request.token = "secret";
    request.incarnation = incarnation;
    request.held.id = {term, version};
    request.held.replica_sums = {{1, 2}, {3, 4}};
    return request;
  }
  // Beats for these incarnations until the test ends.
  void KeepAlive(std::vector<uint64_t> incarnations) {
    beater_ = std::thread([this, incarnations = std::move(incarnations)] {
      auto directory = NewDirectory();
      while (!stop_) {
        for (uint64_t incarnation : incarnations) {
          HeartbeatRequest request;
          request.token = "secret";
          request.incarnation = incarnation;
          (void)directory->Heartbeat(request, Deadline::In(seconds(1)));
        }
        std::this_thread::sleep_for(milliseconds(20));
      }
    });
  }
  void TearDown() override {
    stop_ = true;
    if (beater_.joinable()) beater_.join();
    directory_ = nullptr;
    server_ = nullptr;
    service_ = nullptr;
  }

  std::shared_ptr<CoordinatorService> service_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<Directory> directory_;
  std::string bytes_;
  ContentDigest digest_;
  std::thread beater_;
  std::atomic<bool> stop_{false};
};

INSTANTIATE_TEST_SUITE_P(All, DirectoryContract, ::testing::Values(Kind::kLocal, Kind::kGrpc),
                         [](const auto& param) {
                           return param.param == Kind::kLocal ? "Local" : "Grpc";
                         });

TEST_P(DirectoryContract, AVersionGoesFromPublishToPoll) {
  const auto first = directory_->Join(Trainer(0, 10), Soon());
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_EQ(first->heartbeat_ms, kHeartbeatMs);
  EXPECT_NE(first->coordinator, 0u);

  // Waits for the other rank.
  auto waiting =
      std::async(std::launch::async, [this] { return NewDirectory()->WaitComplete(10, Soon()); });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  ASSERT_TRUE(directory_->Join(Trainer(1, 11), Soon()).ok());
  const auto complete = waiting.get();
  ASSERT_TRUE(complete.ok()) << complete.status().ToString();
  EXPECT_TRUE(complete->complete);
  ASSERT_EQ(complete->members.size(), 2u);
  EXPECT_EQ(complete->members[1], Trainer(1, 11).member);
  ASSERT_TRUE(directory_->Join(Rollout(20), Soon()).ok());

  const uint64_t term = first->term;
  const auto open = directory_->Held(HeldBy(10, term, 1), Soon());
  ASSERT_TRUE(open.ok()) << open.status().ToString();
  EXPECT_EQ(open->state, VersionState::kOpen);
  auto query = std::async(std::launch::async, [&] {
    return NewDirectory()->QueryVersion(20, {term, 1}, true, Soon());
  });
  EXPECT_EQ(query.wait_for(milliseconds(50)), std::future_status::timeout);
  ASSERT_TRUE(directory_->Held(HeldBy(11, term, 1), Soon()).ok());
  const auto available = query.get();
  ASSERT_TRUE(available.ok()) << available.status().ToString();
  EXPECT_EQ(available->state, VersionState::kAvailable);

  const auto offer = directory_->Poll(20, {}, false, Soon());
  ASSERT_TRUE(offer.ok());
  EXPECT_TRUE(offer->offered);
  EXPECT_EQ(offer->id, (VersionId{term, 1}));
  const auto members = directory_->MembersFor(offer->id, offer->epoch, Soon());
  ASSERT_TRUE(members.ok()) << members.status().ToString();
  ASSERT_EQ(members->members.size(), 3u);
  EXPECT_EQ(members->members[2], Rollout(20).member);
  EXPECT_TRUE(directory_->Poll(20, offer->id, true, Soon())->offered);
  EXPECT_FALSE(directory_->Poll(20, offer->id, false, Soon())->offered);
  EXPECT_TRUE(directory_->Serving(20, offer->id, true, Soon()).ok());

  ASSERT_TRUE(directory_->Revoked(11, offer->id, Soon()).ok());
  const auto retired = directory_->QueryVersion(20, offer->id, false, Soon());
  ASSERT_TRUE(retired.ok());
  EXPECT_EQ(retired->state, VersionState::kRetired);
  EXPECT_THAT(retired->reason, HasSubstr("trainer 1"));
}

TEST_P(DirectoryContract, BlobsComeBackAsTheyWere) {
  EXPECT_TRUE(*directory_->HasBlob(digest_, Soon()));
  EXPECT_EQ(*directory_->GetBlob(digest_, Soon()), bytes_);
  ContentDigest other = digest_;
  ++other.low;
  EXPECT_FALSE(*directory_->HasBlob(other, Soon()));
  EXPECT_EQ(directory_->GetBlob(other, Soon()).status().code(), Code::kNotFound);
  EXPECT_EQ(directory_->PutBlob(other, bytes_, Soon()).code(), Code::kDataLoss);
  std::string large(40 << 20, 'x');
  EXPECT_TRUE(directory_->PutBlob(DigestOf(large), large, Soon()).ok());
  EXPECT_EQ(directory_->GetBlob(DigestOf(large), Soon())->size(), large.size());
}

TEST_P(DirectoryContract, AMemberNeedsItsTemplateStored) {
  JoinRequest request = Trainer(0, 10);
  ++request.member.world_template.low;
  EXPECT_EQ(directory_->Join(request, Soon()).status().code(), Code::kNotFound);
  request.member.world_template = DigestOf("no template");
  ASSERT_TRUE(directory_->PutBlob(DigestOf("no template"), "no template", Soon()).ok());
  EXPECT_EQ(directory_->Join(request, Soon()).status().code(), Code::kInvalidArgument);
  request = Trainer(0, 10);
  request.member.coordinates = {2};
  const Status outside = directory_->Join(request, Soon()).status();
  EXPECT_EQ(outside.code(), Code::kInvalidArgument);
  EXPECT_EQ(outside.rank(), 0);
}

TEST_P(DirectoryContract, ErrorsKeepAllTheirFields) {
  KeepAlive({10});
  ASSERT_TRUE(directory_->Join(Trainer(0, 10), Soon()).ok());
  const Status second = directory_->Join(Trainer(0, 12), Soon()).status();
  EXPECT_EQ(second.code(), Code::kAlreadyExists);
  EXPECT_EQ(second.rank(), 0);
  EXPECT_EQ(second.peer(), "trainer 0");
  EXPECT_THAT(second.message(), HasSubstr("two live ranks with one number"));
}

TEST_P(DirectoryContract, AWaitEndsByItsDeadlineAndSaysWhatIsMissing) {
  KeepAlive({10});
  ASSERT_TRUE(directory_->Join(Trainer(0, 10), Soon()).ok());
  // On a busy machine the coordinator's answer may come after the caller has given up: then the
  // caller's own words are less good.
  bool said = false;
  for (int i = 0; i < 10 && !said; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const auto waited = directory_->WaitComplete(10, Deadline::In(milliseconds(150)));
    const auto took = std::chrono::steady_clock::now() - begin;
    EXPECT_EQ(waited.status().code(), Code::kDeadlineExceeded) << waited.status().ToString();
    said = waited.status().message().find("missing: 1") != std::string::npos;
    EXPECT_GE(took, milliseconds(130));
    EXPECT_LT(took, milliseconds(3000));
  }
  EXPECT_TRUE(said);
}

TEST_P(DirectoryContract, AKilledRankIsReplacedWithinItsSuccessorsJoin) {
  KeepAlive({11});
  const auto first = directory_->Join(Trainer(0, 10), Soon());
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(directory_->Join(Trainer(1, 11), Soon()).ok());
  // Rank 0 was killed this moment: no call has to be tried again.
  const auto next = directory_->Join(Trainer(0, 12), Soon());
  ASSERT_TRUE(next.ok()) << next.status().ToString();
  EXPECT_GT(next->term, first->term);
  EXPECT_EQ(directory_->WaitComplete(11, Soon()).status().code(), Code::kStaleTerm);
  EXPECT_TRUE(*directory_->Gone(10, Soon()));
  EXPECT_FALSE(*directory_->Gone(11, Soon()));
}

TEST_P(DirectoryContract, LeaveAndRebind) {
  ASSERT_TRUE(directory_->Join(Trainer(0, 10), Soon()).ok());
  MemberInfo changed = Trainer(0, 10).member;
  changed.layout_serial = 1;
  changed.addresses.clear();
  const auto before = directory_->Members(Soon());
  ASSERT_TRUE(before.ok());
  ASSERT_TRUE(directory_->Rebind(changed, Soon()).ok());
  const auto after = directory_->Members(Soon());
  ASSERT_TRUE(after.ok());
  EXPECT_GT(after->epoch, before->epoch);
  EXPECT_EQ(after->members.front(), changed);
  ASSERT_TRUE(directory_->Leave(10, Soon()).ok());
  EXPECT_TRUE(directory_->Members(Soon())->members.empty());
  EXPECT_TRUE(*directory_->Gone(10, Soon()));
}

TEST_P(DirectoryContract, AWrongTokenLearnsNothing) {
  ASSERT_TRUE(directory_->Join(Trainer(0, 10), Soon()).ok());
  JoinRequest request = Trainer(0, 12);
  request.token = "Secret";
  const Status refused = directory_->Join(request, Soon()).status();
  EXPECT_EQ(refused.code(), Code::kPermissionDenied);
  EXPECT_EQ(refused.message().find("trainer"), std::string::npos);
  HeartbeatRequest heartbeat;
  heartbeat.incarnation = 10;
  EXPECT_EQ(directory_->Heartbeat(heartbeat, Soon()).status().code(), Code::kPermissionDenied);
  EXPECT_EQ(directory_->Held(HeldRequest(), Soon()).status().code(), Code::kPermissionDenied);
}

TEST_P(DirectoryContract, AStoppedServiceEndsWaits) {
  ASSERT_TRUE(directory_->Join(Trainer(0, 10), Soon()).ok());
  auto waiting = std::async(std::launch::async, [this] {
    return NewDirectory()->WaitComplete(10, Deadline::In(seconds(2)));
  });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  service_->Stop();
  EXPECT_EQ(waiting.get().status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace bascule
