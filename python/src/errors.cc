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

std::string TextOf(nb::handle exception) {
  const nb::object text = nb::steal(PyObject_Repr(exception.ptr()));
  const nb::object bytes =
      text.is_valid()
          ? nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"))
          : nb::object();
  if (bytes.is_valid()) {
    return {PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr()))};
  }
  PyErr_Clear();
  return std::string("an exception of type ") + nb::type_name(exception.type()).c_str() +
         ", whose repr() raises";
}

}  // namespace bascule::python
