// The logging hook. The library prints nothing: without a sink it is quiet.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace bascule {

// How much a line matters.
enum class LogLevel : uint8_t { kDebug = 0, kInfo, kWarning, kError };

// One line, without line end. Called from the caller's and the library's threads, several at once,
// without locks held that a caller needs; must return soon, must not throw and must not call back
// into the object that logs.
using LogSink = std::function<void(LogLevel, std::string_view)>;

}  // namespace bascule
