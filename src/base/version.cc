#include "bascule/version.h"

namespace bascule {

const char* Version() { return BASCULE_VERSION; }

}  // namespace bascule
