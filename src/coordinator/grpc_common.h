// What the gRPC server and client share. Internal.
#pragma once

namespace bascule {

inline constexpr const char* kTokenKey = "bascule-token-bin";

// gRPC logs to stderr unless told otherwise; this library prints nothing. Once a process.
void QuietGrpc();

}  // namespace bascule
