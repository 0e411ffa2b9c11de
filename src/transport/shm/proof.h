// The keyed proofs of the shm handshake: each side shows that it knows the job token without
// sending it. Nonces of both sides are covered, so an old proof is worth nothing.
#pragma once

#include <string>
#include <string_view>

namespace bascule::shm {

// HMAC-SHA256(token, role and the parts, each preceded by its length). 32 bytes.
[[nodiscard]] std::string ClientProof(std::string_view token, std::string_view hello,
                                      std::string_view challenge);
// `welcome_rest` is the Welcome with its proof left empty.
[[nodiscard]] std::string ServerProof(std::string_view token, std::string_view hello,
                                      std::string_view challenge, std::string_view welcome_rest);
// In constant time for equal sizes.
[[nodiscard]] bool SameProof(std::string_view a, std::string_view b);

}  // namespace bascule::shm
