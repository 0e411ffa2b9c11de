#include "transport/shm/proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <initializer_list>

#include "base/wire.h"

namespace bascule::shm {
namespace {

std::string Hmac(std::string_view token, std::initializer_list<std::string_view> parts) {
  WireWriter message;
  for (std::string_view part : parts) message.Bytes(part);
  std::string bytes = message.Take();
  unsigned char mac[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()),
       reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), mac, &size);
  return {reinterpret_cast<const char*>(mac), size};
}

}  // namespace

std::string ClientProof(std::string_view token, std::string_view hello,
                        std::string_view challenge) {
  return Hmac(token, {"bascule shm client", hello, challenge});
}

std::string ServerProof(std::string_view token, std::string_view hello, std::string_view challenge,
                        std::string_view welcome_rest) {
  return Hmac(token, {"bascule shm server", hello, challenge, welcome_rest});
}

bool SameProof(std::string_view a, std::string_view b) {
  // An empty proof is what a failed HMAC gives; it must never match.
  return !a.empty() && a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace bascule::shm
