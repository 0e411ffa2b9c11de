#include "errors.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace bascule::python {

namespace nb = nanobind;

void Raise(const Status& status) {
  nb::object error = nb::module_::import_("bascule.errors")
                         .attr("from_fields")(CodeName(status.code()), status.message(),
                                              status.rank(), status.peer(), status.tensor());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

}  // namespace bascule::python
