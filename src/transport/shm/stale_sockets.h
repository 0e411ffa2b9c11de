// Socket files that a process which was killed has left behind.
#pragma once

#include <string>

namespace bascule::shm {

// "<prefix>-<boot><random>", with the mark of this boot of the kernel, which alone knows whether
// somebody listens at a file. Nobody can guess it.
[[nodiscard]] std::string MakeSocketName(const std::string& prefix);

// Removes files "bascule-*.sock" of `directory` that are sockets of this user, made under this
// boot, and have no owner any more: a connect is refused. Others stay, and so does what is younger
// than kYoungestStaleMs, as its owner may not have bound it yet. Best effort.
inline constexpr int kYoungestStaleMs = 1000;
void RemoveStaleSockets(const std::string& directory);

}  // namespace bascule::shm
