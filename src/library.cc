// The shared library's own translation unit; everything else comes from the layers.
#include "bascule/version.h"

namespace bascule {

const char* Version() { return BASCULE_VERSION; }

}  // namespace bascule
