// Runs a test body once for each instruction set of this machine that the kernels are built for.
#pragma once

#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace bascule {

template <typename Body>
void ForEachTarget(const Body& body) {
#if defined(__x86_64__)
  const int64_t all = hwy::SupportedTargets();
  for (int64_t target : {HWY_SSE4, HWY_AVX2, HWY_AVX3}) {
    if ((all & target) == 0) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    body();
    hwy::SetSupportedTargetsForTest(0);
  }
#else
  body();
#endif
}

}  // namespace bascule
