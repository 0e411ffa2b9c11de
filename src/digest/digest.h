// The digest of design "every update is proved". The formula (docs/protocol.md has it too):
//
//   A tensor's elements in checkpoint (row-major) order, in the wire dtype, little-endian, fill a
//   byte string, which is cut into 32-bit little-endian words V (zero-padded at the end). A block
//   is 512 words. With block h and lane l (word index w = 512 h + l):
//
//     D = sum over h of K_h * ( sum over l of P_l * V[h, l] )    mod 2^64
//     P_l = LaneKeys()[l]: 512 distinct odd 32-bit keys, l-th output of SplitMix64 seeded with
//           kLaneSeed, upper 32 bits | 1, repeats skipped
//     K_h = Mix64(tensor_key + (h + 1) * 0x9E3779B97F4A7C15) | 1
//     tensor_key = TensorKey(name) = FNV-1a 64 of the name's UTF-8 bytes
//     Mix64 = the SplitMix64 finalizer
//
// D is linear in the words: a part of a tensor contributes words in which the bytes of absent
// elements are zero, so any cut, order or stride of a set of elements gives the same sum. An
// element count goes beside it. It guards against faults, not against forgery.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace bascule {

inline constexpr int kDigestBlockWords = 512;
inline constexpr uint64_t kLaneSeed = 0x42617363756C6531;  // "Bascule1"

// A digest and how many elements it covers. Adding two sums of disjoint elements gives the sum
// of both; all arithmetic is mod 2^64.
struct Sum {
  uint64_t digest = 0;
  uint64_t elements = 0;
  Sum& operator+=(const Sum& other) {
    digest += other.digest;
    elements += other.elements;
    return *this;
  }
  Sum& operator-=(const Sum& other) {
    digest -= other.digest;
    elements -= other.elements;
    return *this;
  }
  friend Sum operator+(Sum a, const Sum& b) { return a += b; }
  friend Sum operator-(Sum a, const Sum& b) { return a -= b; }
  friend bool operator==(const Sum&, const Sum&) = default;
};

[[nodiscard]] constexpr uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

[[nodiscard]] constexpr uint64_t TensorKey(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return hash;
}

[[nodiscard]] constexpr uint64_t BlockKey(uint64_t tensor_key, uint64_t block) {
  return Mix64(tensor_key + (block + 1) * 0x9E3779B97F4A7C15u) | 1;
}

// The 512 lane keys P.
[[nodiscard]] const std::array<uint32_t, kDigestBlockWords>& LaneKeys();

// Digest of `count` consecutive elements of `element_bytes` (1, 2, 4 or 8) each, the first being
// element `first` of the tensor in checkpoint order. `data` may have any alignment. Pure;
// vectorized with run-time dispatch.
[[nodiscard]] uint64_t DigestRun(const void* data, int64_t first, int64_t count, int element_bytes,
                                 uint64_t tensor_key);

}  // namespace bascule
