#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/random.h"
#include "transport/transport.h"

namespace bascule {
namespace fault {
namespace {

// What goes wrong with one operation. Decided by the seed and the operation's number alone, so a
// run with the same order of operations misbehaves in the same way.
struct Mishap {
  bool drop = false;
  bool duplicate = false;
  bool truncate = false;
  bool corrupt = false;
  bool stall = false;
  bool kill = false;
  std::chrono::microseconds delay{0};
  uint64_t where = 0;  // picks the bit or the length
};

// Thread-safe.
class Dice {
 public:
  explicit Dice(FaultOptions options) : options_(options) {}

  Mishap Throw() {
    SplitMix64 random(SplitMix64(options_.seed).Next() + next_.fetch_add(1) * 0x632be59bd9b4e019u);
    auto happens = [&random](uint32_t permille) { return random.Below(1000) < permille; };
    Mishap mishap;
    mishap.drop = happens(options_.drop);
    mishap.duplicate = happens(options_.duplicate);
    mishap.truncate = happens(options_.truncate);
    mishap.corrupt = happens(options_.corrupt);
    mishap.stall = happens(options_.stall);
    mishap.kill = happens(options_.kill);
    bool late = happens(options_.delay);
    uint64_t microseconds = random.Below(uint64_t{options_.delay_ms} * 1000 + 1);
    if (late) mishap.delay = std::chrono::microseconds(microseconds);
    mishap.where = random.Next();
    return mishap;
  }

 private:
  const FaultOptions options_;
  std::atomic<uint64_t> next_ = 0;
};

void FlipBit(std::byte* data, uint64_t bytes, uint64_t where) {
  if (bytes == 0) return;
  uint64_t bit = where % (bytes * 8);
  data[bit / 8] ^= std::byte{1} << (bit % 8);
}

// Each call of data() is an operation that may be corrupted: it then answers a private copy of the
// region as it is now, with one bit flipped. The last few copies stay readable.
class FaultRegion final : public ImportedRegion {
 public:
  FaultRegion(std::shared_ptr<ImportedRegion> inner, std::shared_ptr<Dice> dice)
      : inner_(std::move(inner)), dice_(std::move(dice)) {}

  [[nodiscard]] const std::byte* data() const override {
    if (inner_->data() == nullptr) return nullptr;
    Mishap mishap = dice_->Throw();
    if (!mishap.corrupt) return inner_->data();
    std::vector<std::byte> copy(inner_->data(), inner_->data() + inner_->bytes());
    FlipBit(copy.data(), copy.size(), mishap.where);
    std::lock_guard lock(mutex_);
    if (copies_.size() == kCopies) copies_.erase(copies_.begin());
    copies_.push_back(std::move(copy));
    return copies_.back().data();
  }
  [[nodiscard]] uint64_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] const ImportedRegion& inner() const { return *inner_; }

 private:
  static constexpr size_t kCopies = 8;
  const std::shared_ptr<ImportedRegion> inner_;
  const std::shared_ptr<Dice> dice_;
  mutable std::mutex mutex_;
  mutable std::vector<std::vector<std::byte>> copies_;
};

class FaultPeer final : public Peer {
 public:
  FaultPeer(std::shared_ptr<Peer> inner, std::shared_ptr<Dice> dice)
      : name_(inner->name()), inner_(std::move(inner)), dice_(std::move(dice)) {}

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] bool alive() const override {
    std::shared_ptr<Peer> inner = Inner();
    return inner != nullptr && inner->alive();
  }

  [[nodiscard]] Result<std::shared_ptr<ImportedRegion>> Import(std::string_view blob,
                                                               Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(Operation operation, Begin(deadline, /*can_drop=*/false));
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<ImportedRegion> region,
                             operation.inner->Import(blob, deadline));
    return std::shared_ptr<ImportedRegion>(std::make_shared<FaultRegion>(std::move(region), dice_));
  }

  [[nodiscard]] Result<std::string> Call(std::string_view request, Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(Operation operation, Begin(deadline, /*can_drop=*/true));
    const Mishap& mishap = operation.mishap;
    Result<std::string> answer = operation.inner->Call(request, deadline);
    if (mishap.duplicate) (void)operation.inner->Call(request, deadline);
    if (!answer.ok()) return answer;
    if (mishap.truncate && !answer->empty()) answer->resize(mishap.where % answer->size());
    if (mishap.corrupt) {
      FlipBit(reinterpret_cast<std::byte*>(answer->data()), answer->size(), mishap.where);
    }
    return answer;
  }

  [[nodiscard]] Status Read(const ImportedRegion& region, std::span<const ReadRun> runs,
                            Deadline deadline) override {
    const auto* wrapped = dynamic_cast<const FaultRegion*>(&region);
    if (wrapped == nullptr) {
      return Status(Code::kInvalidArgument, "the region was not imported by this transport")
          .WithPeer(name_);
    }
    BASCULE_ASSIGN_OR_RETURN(Operation operation, Begin(deadline, /*can_drop=*/true));
    BASCULE_RETURN_IF_ERROR(operation.inner->Read(wrapped->inner(), runs, deadline));
    if (operation.mishap.corrupt && !runs.empty()) {
      const ReadRun& run = runs[operation.mishap.where % runs.size()];
      FlipBit(run.target, run.bytes, operation.mishap.where >> 8);
    }
    return Status::Ok();
  }

  [[nodiscard]] Result<uint64_t> Fetch(std::string_view request, std::span<std::byte> slot,
                                       Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(Operation operation, Begin(deadline, /*can_drop=*/true));
    const Mishap& mishap = operation.mishap;
    // Through memory of its own, so that what was cut off never was in the slot.
    std::vector<std::byte> payload(slot.size());
    BASCULE_ASSIGN_OR_RETURN(uint64_t bytes, operation.inner->Fetch(request, payload, deadline));
    if (mishap.duplicate) {
      std::vector<std::byte> again(slot.size());
      (void)operation.inner->Fetch(request, again, deadline);
    }
    if (mishap.truncate && bytes > 0) bytes = mishap.where % bytes;
    if (mishap.corrupt) FlipBit(payload.data(), bytes, mishap.where);
    std::copy_n(payload.begin(), bytes, slot.begin());
    return bytes;
  }

 private:
  struct Operation {
    std::shared_ptr<Peer> inner;
    Mishap mishap;
  };

  [[nodiscard]] std::shared_ptr<Peer> Inner() const {
    std::lock_guard lock(mutex_);
    return inner_;
  }

  // Throws the dice and does what happens before the operation itself.
  [[nodiscard]] Result<Operation> Begin(Deadline deadline, bool can_drop) {
    Operation operation{.inner = nullptr, .mishap = dice_->Throw()};
    {
      std::lock_guard lock(mutex_);
      if (operation.mishap.kill) inner_.reset();
      if (operation.mishap.stall) stalled_ = true;
      operation.inner = inner_;
    }
    if (operation.inner == nullptr) return Dead();
    if (stalled_ || (can_drop && operation.mishap.drop)) return NeverCompletes(deadline);
    if (operation.mishap.delay.count() > 0) {
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(operation.mishap.delay, deadline.Left()));
    }
    return operation;
  }

  [[nodiscard]] Status Dead() const {
    return Status(Code::kUnavailable, "the connection broke (injected fault)").WithPeer(name_);
  }

  [[nodiscard]] Status NeverCompletes(Deadline deadline) const {
    while (!deadline.Passed()) {
      if (!alive()) return Dead();
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(std::chrono::milliseconds(2), deadline.Left()));
    }
    return Status(Code::kDeadlineExceeded, "the peer did not answer in time (injected fault)")
        .WithPeer(name_);
  }

  const std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Peer> inner_;  // null once killed
  std::atomic<bool> stalled_ = false;
  const std::shared_ptr<Dice> dice_;
};

class FaultTransport final : public Transport {
 public:
  FaultTransport(std::shared_ptr<Transport> inner, FaultOptions options)
      : inner_(std::move(inner)), dice_(std::make_shared<Dice>(options)) {}

  [[nodiscard]] std::string name() const override {
    return fmt::format("fault({})", inner_->name());
  }
  [[nodiscard]] TransportKind kind() const override { return inner_->kind(); }
  [[nodiscard]] Result<std::string> Listen(PeerHandler* handler) override {
    return inner_->Listen(handler);
  }
  [[nodiscard]] Result<std::shared_ptr<SharedRegion>> Allocate(uint64_t bytes,
                                                               std::string_view label) override {
    return inner_->Allocate(bytes, label);
  }
  [[nodiscard]] Result<std::shared_ptr<SharedRegion>> Export(const Buffer& buffer) override {
    return inner_->Export(buffer);
  }
  [[nodiscard]] Result<std::shared_ptr<Peer>> Connect(std::string_view address,
                                                      uint64_t incarnation,
                                                      Deadline deadline) override {
    BASCULE_ASSIGN_OR_RETURN(std::shared_ptr<Peer> peer,
                             inner_->Connect(address, incarnation, deadline));
    return std::shared_ptr<Peer>(std::make_shared<FaultPeer>(std::move(peer), dice_));
  }

 private:
  const std::shared_ptr<Transport> inner_;
  const std::shared_ptr<Dice> dice_;
};

}  // namespace
}  // namespace fault

std::shared_ptr<Transport> MakeFaultTransport(std::shared_ptr<Transport> inner,
                                              FaultOptions options) {
  return std::make_shared<fault::FaultTransport>(std::move(inner), options);
}

}  // namespace bascule
