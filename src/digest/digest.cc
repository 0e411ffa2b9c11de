// x86-64-v2 is the least that is supported: Highway's scalar fallback has vectors of one lane,
// which cannot hold two codes of 16 bits.
#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "digest/digest.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "digest/digest-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace bascule::HWY_NAMESPACE {

// Adds fewer bytes than a vector less `lead`, which is the offset of the first in its word.
HWY_INLINE void AddPart(Digester& digester, const uint8_t* data, size_t bytes, size_t lead) {
  HWY_ALIGN uint8_t words[kVectorBytes] = {};
  std::memcpy(words + lead, data, bytes);
  digester.Add(hn::BitCast(D32(), hn::Load(D8(), words)));
}

// Data is prefetched so far before it is read.
constexpr uint64_t kAheadBytes = 4096;

uint64_t DigestBytes(const uint8_t* data, uint64_t bytes, uint64_t position, uint64_t tensor_key) {
  Digester digester(tensor_key);
  digester.Seek(position);
  if (const size_t lead = position % 4; lead != 0) {
    const size_t part = static_cast<size_t>(HWY_MIN(bytes, uint64_t{kVectorBytes} - lead));
    AddPart(digester, data, part, lead);
    data += part;
    bytes -= part;
    digester.Seek(position + part);
  }
  while (bytes >= kVectorBytes) {
    const size_t vectors =
        static_cast<size_t>(HWY_MIN(bytes / kVectorBytes, uint64_t{digester.VectorsLeft()}));
    const uint32_t* keys = digester.keys();
    V64 even = digester.even();
    V64 odd = digester.odd();
    const uint64_t ahead = bytes >= kAheadBytes + kBlockBytes ? kAheadBytes : 0;
    for (size_t i = 0; i < vectors; ++i) {
      hwy::Prefetch(data + i * kVectorBytes + ahead);
      const V32 words = hn::BitCast(D32(), hn::LoadU(D8(), data + i * kVectorBytes));
      Digester::AddInside(words, keys, even, odd);
    }
    digester.Resume(keys, even, odd);
    data += vectors * kVectorBytes;
    bytes -= vectors * kVectorBytes;
    if (bytes >= kVectorBytes) {  // this one may cross the end of the block
      digester.Add(hn::BitCast(D32(), hn::LoadU(D8(), data)));
      data += kVectorBytes;
      bytes -= kVectorBytes;
    }
  }
  if (bytes > 0) AddPart(digester, data, static_cast<size_t>(bytes), 0);
  return digester.Finish();
}

}  // namespace bascule::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bascule {

HWY_EXPORT(DigestBytes);

const std::array<uint32_t, kDigestBlockWords>& LaneKeys() {
  static constexpr std::array<uint32_t, kDigestBlockWords> kKeys = MakeLaneKeys();
  return kKeys;
}

uint64_t DigestRun(const void* data, int64_t first, int64_t count, int element_bytes,
                   uint64_t tensor_key) {
  if (count <= 0) return 0;
  const uint64_t width = static_cast<uint64_t>(element_bytes);
  return HWY_DYNAMIC_DISPATCH(DigestBytes)(static_cast<const uint8_t*>(data),
                                           static_cast<uint64_t>(count) * width,
                                           static_cast<uint64_t>(first) * width, tensor_key);
}

}  // namespace bascule
#endif  // HWY_ONCE
