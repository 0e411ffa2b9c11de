// The library's version.
#pragma once

namespace bascule {

// "major.minor.patch", semantic versioning. Never null.
[[nodiscard]] const char* Version();

}  // namespace bascule
