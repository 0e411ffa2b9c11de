// The library's version.
#pragma once

#pragma GCC visibility push(default)
namespace bascule {

// "major.minor.patch", semantic versioning. Never null.
[[nodiscard]] const char* Version();

}  // namespace bascule
#pragma GCC visibility pop
