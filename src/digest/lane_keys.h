// The table P of the digest, as the vector kernels load it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "digest/digest.h"

namespace bascule {

// Enough for one vector of 512 bits to be loaded at any lane.
inline constexpr size_t kLaneKeysPad = 16;

constexpr std::array<uint32_t, kDigestBlockWords> MakeLaneKeys() {
  std::array<uint32_t, kDigestBlockWords> keys{};
  uint64_t state = kLaneSeed;
  size_t count = 0;
  while (count < keys.size()) {
    state += 0x9E3779B97F4A7C15u;
    const uint32_t key = static_cast<uint32_t>(Mix64(state) >> 32) | 1;
    bool repeated = false;
    for (size_t i = 0; i < count; ++i) repeated |= keys[i] == key;
    if (!repeated) keys[count++] = key;
  }
  return keys;
}

// The table, followed by its own first entries, so that a vector that crosses the end of a block
// finds the keys of both blocks in one load.
constexpr std::array<uint32_t, kDigestBlockWords + kLaneKeysPad> MakePaddedLaneKeys() {
  std::array<uint32_t, kDigestBlockWords + kLaneKeysPad> padded{};
  const auto keys = MakeLaneKeys();
  for (size_t i = 0; i < padded.size(); ++i) padded[i] = keys[i % keys.size()];
  return padded;
}

alignas(
    64) inline constexpr std::array<uint32_t, kDigestBlockWords + kLaneKeysPad> kPaddedLaneKeys =
    MakePaddedLaneKeys();

}  // namespace bascule
