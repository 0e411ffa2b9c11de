#include <nanobind/nanobind.h>

#include "bascule/version.h"
#include "bind.h"
#include "calls.h"

namespace bascule::python {

NB_MODULE(_bascule, m) {
  m.doc() = "The core of bascule. Private: use the names in bascule.";
  m.def("version", &Version, "The library's version.");
  // What the exit of the interpreter leaves alive is a session cut short, not a leak to report.
  nb::set_leak_warnings(false);
  BindLayout(m);
  BindMeshes(m);
  BindPlan(m);
  BindSession(m);
  m.def(
      "wait_abandoned", [](double timeout) { return WaitAbandoned(DeadlineIn(timeout)); },
      nb::arg("timeout"),
      "Wait for calls that Ctrl-C left in the background; True when none is left.");
  m.def("forget_abandoned", &ForgetAbandoned, "Called in a child after fork.");
  m.def("park_threads", &ParkThreads,
        "Called last at interpreter exit: other threads never come back from the core.");
}

}  // namespace bascule::python
