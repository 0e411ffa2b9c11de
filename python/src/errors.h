// Status -> the exceptions of bascule.errors.
#pragma once

#include <utility>

#include "bascule/status.h"

namespace bascule::python {

// Raises the exception of an error. Needs the GIL.
[[noreturn]] void Raise(const Status& status);

inline void Check(const Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
[[nodiscard]] T Unwrap(Result<T> result) {
  if (!result.ok()) Raise(result.status());
  return std::move(result).value();
}

}  // namespace bascule::python
