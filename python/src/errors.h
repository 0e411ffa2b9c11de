// Status -> the exceptions of bascule.errors, and exceptions -> text.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "bascule/status.h"

namespace bascule::python {

// Raises the exception of an error. Needs the GIL.
[[noreturn]] void Raise(const Status& status);

// The repr() of an exception as UTF-8: what is no character is escaped, and where repr() raises
// there is the type's name. Needs the GIL; raises nothing.
[[nodiscard]] std::string TextOf(nanobind::handle exception);

inline void Check(const Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
[[nodiscard]] T Unwrap(Result<T> result) {
  if (!result.ok()) Raise(result.status());
  return std::move(result).value();
}

}  // namespace bascule::python
