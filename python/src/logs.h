// What the core's log hook tells, until a Python thread takes it: no thread of the core ever enters
// Python.
#pragma once

#include <nanobind/nanobind.h>

#include "bascule/log.h"

namespace bascule::python {

// Puts lines into the process's queue; the oldest go where nobody takes them.
[[nodiscard]] LogSink QueueingSink();

void BindLogs(nanobind::module_& m);

}  // namespace bascule::python
