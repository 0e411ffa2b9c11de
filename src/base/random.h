// Random numbers that nobody can guess: names, nonces, probes. From the kernel; thread-safe.
// Seeded, repeatable sequences (tests, fault injection) are SplitMix64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace bascule {

void FillRandom(std::span<std::byte> bytes);
[[nodiscard]] uint64_t RandomU64();
// 2 * bytes lower-case hexadecimal digits.
[[nodiscard]] std::string RandomHex(size_t bytes);

// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (OOPSLA 2014). Value type.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Uniform enough in [0, bound) for bounds far below 2^64; bound > 0.
  uint64_t Below(uint64_t bound) { return Next() % bound; }

 private:
  uint64_t state_;
};

}  // namespace bascule
