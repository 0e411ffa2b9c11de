// The vector side of the digest, shared by DigestRun and by the copy kernels that fuse it. Included
// once per Highway target (foreach_target.h), hence the toggled guard.
#if defined(BASCULE_DIGEST_DIGEST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BASCULE_DIGEST_DIGEST_INL_H_
#undef BASCULE_DIGEST_DIGEST_INL_H_
#else
#define BASCULE_DIGEST_DIGEST_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "digest/digest.h"
#include "digest/lane_keys.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace bascule::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D8 = hn::ScalableTag<uint8_t>;
using D32 = hn::ScalableTag<uint32_t>;
using D64 = hn::ScalableTag<uint64_t>;
using V8 = hn::Vec<D8>;
using V32 = hn::Vec<D32>;
using V64 = hn::Vec<D64>;

inline constexpr size_t kVectorWords = hn::MaxLanes(D32());
inline constexpr size_t kVectorBytes = 4 * kVectorWords;
inline constexpr size_t kBlockBytes = size_t{4} * kDigestBlockWords;
static_assert(kVectorWords <= kLaneKeysPad, "a vector load must not pass the key table");

// Sums words of one tensor, a vector at a time. A position is a byte of the tensor's code string.
class Digester {
 public:
  HWY_INLINE explicit Digester(uint64_t tensor_key)
      : tensor_key_(tensor_key),
        even_(hn::Zero(D64())),
        odd_(hn::Zero(D64())),
        total_(hn::Zero(D64())) {}

  // The next word is the one that holds byte `position`.
  HWY_INLINE void Seek(uint64_t position) {
    const uint64_t block = position / kBlockBytes;
    if (block != block_) {
      CloseBlock();
      block_ = block;
    }
    lane_ = static_cast<size_t>(position % kBlockBytes) / 4;
  }

  // How many whole vectors fit before the end of the block.
  HWY_INLINE size_t VectorsLeft() const { return (kDigestBlockWords - lane_) / kVectorWords; }

  // What a loop over VectorsLeft() vectors needs, to be held in variables of its own: as members,
  // next to stores of bytes, which may alias anything, the compiler would keep them in memory.
  HWY_INLINE V64 even() const { return even_; }
  HWY_INLINE V64 odd() const { return odd_; }
  HWY_INLINE const uint32_t* keys() const { return kPaddedLaneKeys.data() + lane_; }

  // One vector of such a loop.
  static HWY_INLINE void AddInside(V32 words, const uint32_t*& keys, V64& even, V64& odd) {
    MultiplyAdd(words, hn::LoadU(D32(), keys), even, odd);
    keys += kVectorWords;
  }

  // The end of such a loop.
  HWY_INLINE void Resume(const uint32_t* keys, V64 even, V64 odd) {
    lane_ = static_cast<size_t>(keys - kPaddedLaneKeys.data());
    even_ = even;
    odd_ = odd;
    EndBlockIfFull();
  }

  // Adds the next kVectorWords words; a block may end within the vector.
  HWY_INLINE void Add(V32 words) {
    if (lane_ + kVectorWords <= kDigestBlockWords) {
      MultiplyAdd(words, hn::LoadU(D32(), keys()), even_, odd_);
      lane_ += kVectorWords;
    } else {
      // The key table goes on with its own start, so that one load serves both sides.
      const V32 both = hn::LoadU(D32(), keys());
      const auto before = hn::FirstN(D32(), kDigestBlockWords - lane_);
      MultiplyAdd(hn::IfThenElseZero(before, words), both, even_, odd_);
      CloseBlock();
      ++block_;
      MultiplyAdd(hn::IfThenZeroElse(before, words), both, even_, odd_);
      lane_ = lane_ + kVectorWords - kDigestBlockWords;
    }
    EndBlockIfFull();
  }

  HWY_INLINE uint64_t Finish() {
    CloseBlock();
    // Not SumOfLanes: GCC's reduction adds signed numbers, which UndefinedBehaviorSanitizer traps.
    HWY_ALIGN uint64_t lanes[kVectorWords / 2];
    hn::Store(total_, D64(), lanes);
    uint64_t sum = 0;
    for (uint64_t lane : lanes) sum += lane;
    return sum;
  }

 private:
  static HWY_INLINE void MultiplyAdd(V32 words, V32 keys, V64& even, V64& odd) {
    const V32 odd_words = hn::BitCast(D32(), hn::ShiftRight<32>(hn::BitCast(D64(), words)));
    const V32 odd_keys = hn::BitCast(D32(), hn::ShiftRight<32>(hn::BitCast(D64(), keys)));
    even = hn::Add(even, hn::MulEven(words, keys));
    odd = hn::Add(odd, hn::MulEven(odd_words, odd_keys));
  }

  HWY_INLINE void EndBlockIfFull() {
    if (lane_ == kDigestBlockWords) {
      CloseBlock();
      ++block_;
      lane_ = 0;
    }
  }

  // total += K_h * block sum, lane by lane: the horizontal sum is left to the end.
  HWY_INLINE void CloseBlock() {
    const V64 sum = hn::Add(even_, odd_);
    const uint64_t key = BlockKey(tensor_key_, block_);
    const V32 low_key = hn::BitCast(D32(), hn::Set(D64(), key));
    const V32 high_key = hn::BitCast(D32(), hn::Set(D64(), key >> 32));
    const V32 low = hn::BitCast(D32(), sum);
    const V32 high = hn::BitCast(D32(), hn::ShiftRight<32>(sum));
    const V64 cross = hn::Add(hn::MulEven(high, low_key), hn::MulEven(low, high_key));
    total_ = hn::Add(total_, hn::Add(hn::MulEven(low, low_key), hn::ShiftLeft<32>(cross)));
    even_ = hn::Zero(D64());
    odd_ = hn::Zero(D64());
  }

  uint64_t tensor_key_;
  uint64_t block_ = 0;
  size_t lane_ = 0;
  V64 even_;  // sums of P_l * V in this block, by parity of the lane
  V64 odd_;
  V64 total_;
};

}  // namespace bascule::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // BASCULE_DIGEST_DIGEST_INL_H_
