// The logging hook. The library prints nothing: without a sink it is quiet.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace bascule {

enum class LogLevel : uint8_t { kInfo = 0, kWarning, kError };

// Called from the library's threads, several at once, without locks held that a caller needs; must
// return soon and must not call back into the object that logs. May be null.
using LogSink = std::function<void(LogLevel, std::string_view)>;

}  // namespace bascule
