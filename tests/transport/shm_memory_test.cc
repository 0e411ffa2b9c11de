// Sealed memory, exports of the framework's memory, and the limits that bound them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "tests/transport/networks.h"
#include "tests/transport/process_info.h"
#include "transport/shm/memory_limit.h"
#include "transport/shm/memory_map.h"
#include "transport/shm/region.h"

namespace bascule::testing {
namespace {

using ::testing::HasSubstr;

TEST(SealedMemory, CannotBeResizedOrWrittenByOthers) {
  auto registry = std::make_shared<shm::RegionRegistry>();
  auto region = shm::OwnedRegion::Allocate(registry, 1, 100'000, "arena", true);
  ASSERT_TRUE(region.ok()) << region.status().ToString();
  int fd = (*region)->fd();
  auto file = shm::IdentifyFile(fd);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(::ftruncate(fd, 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(file->bytes * 2)), -1);
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1) << "a peer could stop the owner";
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_EQ(::pwrite(fd, "x", 1, 0), -1);

  auto map =
      shm::MappedRegion::Map(*shm::DecodeBlob((*region)->blob()), (*region)->Describe(0), fd);
  ASSERT_TRUE(map.ok()) << map.status().ToString();
  auto* page = const_cast<std::byte*>((*map)->data());
  EXPECT_EQ(::mprotect(page, 4096, PROT_READ | PROT_WRITE), -1);
  // The owner goes on to write.
  std::memset((*region)->data(), 5, 100'000);
  EXPECT_EQ((*map)->data()[99'999], std::byte{5});
}

TEST(SealedMemory, PagesAreTakenAtOnceAndGivenBack) {
  constexpr uint64_t kBytes = 64 << 20;
  uint64_t before = ResidentBytes();
  {
    auto memory = shm::CreateSealedMemory(kBytes, "arena", false);
    ASSERT_TRUE(memory.ok()) << memory.status().ToString();
    EXPECT_GE(ResidentBytes(), before + kBytes);
  }
  EXPECT_LT(ResidentBytes(), before + kBytes / 2);
  EXPECT_EQ(CountRegionMappings(), 0u);
}

TEST(SealedMemory, LargeRegionsCanUseHugePages) {
  auto memory = shm::CreateSealedMemory(5 << 20, "arena", true);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->map.data()) % (2 << 20), 0u);
  auto peer = shm::MemoryMap::Create(memory->fd.get(), 0, 5 << 20, false, true);
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(peer->data()) % (2 << 20), 0u);
}

TEST(SealedMemory, ProbesAreFreshEachTime) {
  auto registry = std::make_shared<shm::RegionRegistry>();
  auto region = shm::OwnedRegion::Allocate(registry, 1, 4096, "arena", true);
  ASSERT_TRUE(region.ok());
  shm::Opened first = (*region)->Describe(0);
  auto map = shm::MappedRegion::Map(*shm::DecodeBlob((*region)->blob()), first, (*region)->fd());
  ASSERT_TRUE(map.ok());
  EXPECT_TRUE((*map)->Matches(first));
  for (int i = 0; i < 16; ++i) {
    shm::Opened next = (*region)->Describe(0);
    EXPECT_NE(next.probe, first.probe);
    EXPECT_TRUE((*map)->Matches(next));
  }
  EXPECT_FALSE((*map)->Matches(first)) << "an overwritten probe must not match";
}

class Exports : public ::testing::Test {
 protected:
  static constexpr uint64_t kFile = 64 << 10;
  void SetUp() override {
    fd_ = UnixFd(::memfd_create("torch", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(fd_.get(), kFile), 0);
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, kFile, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
    for (uint64_t i = 0; i < kFile; ++i) data_[i] = static_cast<std::byte>(i * 31 + i / 1000);
    server_ = *MakeShmTransport(Identity(11, "trainer 0"), {});
    client_ = *MakeShmTransport(Identity(22, "rollout 0"), {});
    address_ = *server_->Listen(&handler_);
    peer_ = *client_->Connect(address_, 11, Soon());
  }
  void TearDown() override {
    peer_.reset();
    client_.reset();
    server_.reset();
    ::munmap(data_, kFile);
  }
  Buffer At(uint64_t offset, uint64_t bytes) {
    return {"model.weight", data_ + offset, bytes, MemoryKind::kShared, -1, fd_.get(), offset};
  }
  Status Refusal(const Buffer& buffer) {
    Status status = server_->Export(buffer).status();
    EXPECT_THAT(status.message(), HasSubstr("model.weight"));
    return status;
  }

  UnixFd fd_;
  std::byte* data_ = nullptr;
  TestHandler handler_;
  std::shared_ptr<Transport> server_, client_;
  std::string address_;
  std::shared_ptr<Peer> peer_;
};

TEST_F(Exports, AreTheFrameworksOwnPagesAtAnyOffset) {
  for (auto [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, kFile}, {4096, 4096}, {1, 1}, {4095, 2}, {12'345, 20'001}, {kFile - 3, 3}}) {
    auto region = server_->Export(At(offset, bytes));
    ASSERT_TRUE(region.ok()) << region.status().ToString();
    EXPECT_EQ((*region)->data(), data_ + offset);
    auto imported = peer_->Import((*region)->blob(), Soon());
    ASSERT_TRUE(imported.ok()) << imported.status().ToString();
    ASSERT_EQ((*imported)->bytes(), bytes);
    EXPECT_EQ(std::memcmp((*imported)->data(), data_ + offset, bytes), 0);
    data_[offset] = static_cast<std::byte>(static_cast<int>(data_[offset]) ^ 0xff);
    EXPECT_EQ((*imported)->data()[0], data_[offset]);
  }
}

TEST_F(Exports, KeepTheirOwnDescriptor) {
  auto region = server_->Export(At(0, kFile));
  ASSERT_TRUE(region.ok());
  fd_.Reset();
  EXPECT_TRUE(peer_->Import((*region)->blob(), Soon()).ok());
}

TEST_F(Exports, OfTheWrongMemoryAreRefused) {
  // The next page of the same file; a private copy; heap memory; another file.
  Buffer shifted = At(0, 4096);
  shifted.fd_offset = 4096;
  EXPECT_EQ(Refusal(shifted).code(), Code::kInvalidArgument);
  auto* copy = static_cast<std::byte*>(
      ::mmap(nullptr, kFile, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd_.get(), 0));
  Buffer private_copy = At(0, 4096);
  private_copy.data = copy;
  EXPECT_EQ(Refusal(private_copy).code(), Code::kInvalidArgument);
  ::munmap(copy, kFile);
  std::vector<std::byte> heap(4096);
  Buffer elsewhere = At(0, 4096);
  elsewhere.data = heap.data();
  EXPECT_EQ(Refusal(elsewhere).code(), Code::kInvalidArgument);
  UnixFd other(::memfd_create("other", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(other.get(), kFile), 0);
  Buffer other_file = At(0, 4096);
  other_file.fd = other.get();
  EXPECT_EQ(Refusal(other_file).code(), Code::kInvalidArgument);
}

TEST_F(Exports, ThatAreNotSharedOrTooShortAreRefused) {
  Buffer beyond = At(0, kFile);
  beyond.fd_offset = 1;
  EXPECT_EQ(Refusal(beyond).code(), Code::kInvalidArgument);
  Buffer far = At(0, 1);
  far.fd_offset = UINT64_MAX;
  EXPECT_EQ(Refusal(far).code(), Code::kInvalidArgument);
  Buffer host = At(0, 4096);
  host.kind = MemoryKind::kHost;
  EXPECT_EQ(Refusal(host).code(), Code::kInvalidArgument);
  Buffer no_descriptor = At(0, 4096);
  no_descriptor.fd = -1;
  EXPECT_EQ(Refusal(no_descriptor).code(), Code::kInvalidArgument);
  Buffer closed = At(0, 4096);
  closed.fd = 987;
  EXPECT_EQ(server_->Export(closed).status().code(), Code::kInvalidArgument);
}

TEST(SocketNames, AreLongAndRandom) {
  TestHandler handler;
  auto transport = *MakeShmTransport(Identity(1, "a"), {});
  std::string a = *transport->Listen(&handler);
  EXPECT_TRUE(a.starts_with("shm1:@bascule-job-"));
  EXPECT_GE(a.size(), std::strlen("shm1:@bascule-job-") + 32);
}

// A tree of files as the kernel would show them.
class FakeKernel {
 public:
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::path full = folder_.path() + "/" + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  shm::MemoryRoom Find() {
    return shm::FindMemoryRoom(folder_.path() + "/proc", folder_.path() + "/cgroup");
  }

 private:
  TempFolder folder_;
};

TEST(MemoryRoom, IsThatOfTheHostWithoutLimits) {
  FakeKernel kernel;
  EXPECT_EQ(kernel.Find().bytes, UINT64_MAX);
  kernel.Write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     100 kB\nSwapFree: 24 kB\n");
  kernel.Write("proc/self/cgroup", "0::/\n");
  kernel.Write("cgroup/memory.max", "max\n");
  kernel.Write("cgroup/memory.current", "123\n");
  EXPECT_EQ(kernel.Find().bytes, 124u << 10);
  EXPECT_THAT(kernel.Find().limit, HasSubstr("host"));
}

TEST(MemoryRoom, IsThatOfTheTightestGroupAbove) {
  FakeKernel kernel;
  kernel.Write("proc/meminfo", "MemAvailable: 1000000 kB\n");
  kernel.Write("proc/self/cgroup", "0::/pod/container\n");
  kernel.Write("cgroup/pod/container/memory.max", "max\n");
  kernel.Write("cgroup/pod/container/memory.current", "10\n");
  kernel.Write("cgroup/pod/memory.max", "1000\n");
  kernel.Write("cgroup/pod/memory.current", "900\n");
  kernel.Write("cgroup/pod/memory.stat", "anon 700\ninactive_file 200\n");
  EXPECT_EQ(kernel.Find().bytes, 300u);  // clean page cache can be dropped
  EXPECT_THAT(kernel.Find().limit, HasSubstr("/pod/memory.max"));
  kernel.Write("cgroup/pod/memory.current", "5000\n");
  EXPECT_EQ(kernel.Find().bytes, 0u);
}

TEST(MemoryRoom, ReadsTheFirstVersionOfGroups) {
  FakeKernel kernel;
  kernel.Write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n");
  kernel.Write("cgroup/memory/docker/abc/memory.limit_in_bytes", "4096\n");
  kernel.Write("cgroup/memory/docker/abc/memory.usage_in_bytes", "96\n");
  EXPECT_EQ(kernel.Find().bytes, 4000u);
}

TEST(MemoryRoom, MessagesNameSizeLimitAndRemedy) {
  auto transport = *MakeShmTransport(Identity(1, "a"), {});
  Status status = transport->Allocate(uint64_t{1} << 45, "arena of trainer 0").status();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("32.0 TiB"));
  EXPECT_THAT(status.message(), HasSubstr("arena of trainer 0"));
  EXPECT_THAT(status.message(), HasSubstr("free under"));
  EXPECT_THAT(status.message(), HasSubstr("raise it"));
}

}  // namespace
}  // namespace bascule::testing
