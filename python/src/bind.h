// The parts of module bascule._bascule.
#pragma once

#include <nanobind/nanobind.h>

namespace bascule::python {

void BindLayout(nanobind::module_& m);
void BindMeshes(nanobind::module_& m);
void BindPlan(nanobind::module_& m);
void BindSession(nanobind::module_& m);
void BindVerify(nanobind::module_& m);

}  // namespace bascule::python
