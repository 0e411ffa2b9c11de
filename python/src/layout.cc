// Layouts: plain values as Python builds and reads them.
#include "bascule/layout.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bascule/layout_json.h"
#include "bind.h"
#include "calls.h"
#include "errors.h"

namespace bascule::python {
namespace {

using IntervalPairs = std::vector<std::pair<int64_t, int64_t>>;

IntervalPairs ToPairs(const Box& box) {
  IntervalPairs pairs;
  for (int d = 0; d < box.ndim(); ++d) pairs.emplace_back(box[d].begin, box[d].end);
  return pairs;
}

std::vector<int64_t> StridesOf(const Binding& binding) {
  return {binding.byte_strides.begin(), binding.byte_strides.begin() + binding.box.ndim()};
}

void BindEnums(nb::module_& m) {
  nb::enum_<DType>(m, "DType", "The type of an element, by its safetensors name.")
      .value("F32", DType::kF32)
      .value("BF16", DType::kBF16)
      .value("F16", DType::kF16)
      .value("F64", DType::kF64)
      .value("F8_E4M3", DType::kF8E4M3)
      .value("F8_E5M2", DType::kF8E5M2)
      .value("I64", DType::kI64)
      .value("I32", DType::kI32)
      .value("I16", DType::kI16)
      .value("I8", DType::kI8)
      .value("U8", DType::kU8)
      .value("BOOL", DType::kBool)
      .def_prop_ro("itemsize", [](DType dtype) { return DTypeSize(dtype); });
  nb::enum_<MemoryKind>(m, "MemoryKind", "What kind of memory a buffer is.")
      .value("HOST", MemoryKind::kHost)
      .value("SHARED", MemoryKind::kShared)
      .value("DEVICE", MemoryKind::kDevice);
  nb::enum_<LandingFunction>(m, "LandingFunction", "An elementwise function applied on landing.")
      .value("NONE", LandingFunction::kNone)
      .value("NEG_EXP", LandingFunction::kNegExp);
}

void BindParts(nb::module_& m) {
  nb::class_<LogicalTensor>(m, "LogicalTensor",
                            "A tensor of the checkpoint.\n\n"
                            "Parameters\n----------\n"
                            "name, shape\n    Its own.\n"
                            "dtype\n    A source's publish dtype, a destination's own dtype.\n"
                            "derived\n    True for scales and codes of quantized tensors.")
      .def(
          "__init__",
          [](LogicalTensor* self, std::string name, std::vector<int64_t> shape, DType dtype,
             bool derived) {
            new (self) LogicalTensor{std::move(name), std::move(shape), dtype, derived};
          },
          nb::arg("name"), nb::arg("shape"), nb::arg("dtype"), nb::arg("derived") = false)
      .def_ro("name", &LogicalTensor::name)
      .def_ro("shape", &LogicalTensor::shape)
      .def_ro("dtype", &LogicalTensor::dtype)
      .def_ro("derived", &LogicalTensor::derived)
      .def("__repr__", [](const LogicalTensor& self) {
        std::string text = "LogicalTensor(" + self.name + ", [";
        for (size_t d = 0; d < self.shape.size(); ++d) {
          text += (d == 0 ? "" : ", ") + std::to_string(self.shape[d]);
        }
        return text + "], " + std::string(DTypeName(self.dtype)) + ")";
      });
  nb::class_<Buffer>(m, "Buffer", "Memory that a rank owns.")
      .def_ro("name", &Buffer::name)
      .def_prop_ro("address",
                   [](const Buffer& self) { return reinterpret_cast<uintptr_t>(self.data); })
      .def_ro("bytes", &Buffer::bytes)
      .def_ro("kind", &Buffer::kind)
      .def_ro("device", &Buffer::device)
      .def_ro("fd", &Buffer::fd)
      .def_ro("fd_offset", &Buffer::fd_offset);
  nb::class_<Binding>(m, "Binding", "One box of one tensor <-> strided local memory.")
      .def_ro("tensor", &Binding::tensor, "Index in Layout.tensors.")
      .def_ro("buffer", &Binding::buffer, "Index in Layout.buffers.")
      .def_prop_ro("box", [](const Binding& self) { return ToPairs(self.box); })
      .def_ro("byte_offset", &Binding::byte_offset)
      .def_prop_ro("byte_strides", &StridesOf)
      .def_ro("dtype", &Binding::dtype)
      .def_ro("function", &Binding::function);
  nb::class_<Alias>(m, "Alias", "A tied tensor: stored as its target.")
      .def_ro("name", &Alias::name)
      .def_ro("target", &Alias::target);
  nb::class_<Padding>(m, "Padding", "Destination bytes that nothing fills.")
      .def_ro("buffer", &Padding::buffer)
      .def_ro("offset", &Padding::offset)
      .def_ro("bytes", &Padding::bytes)
      .def_ro("count", &Padding::count)
      .def_ro("stride", &Padding::stride);
}

void BindLayoutClass(nb::module_& m) {
  nb::class_<Layout>(m, "Layout", "All bindings of one rank, without the owners of its memory.")
      .def_ro("tensors", &Layout::tensors)
      .def_ro("buffers", &Layout::buffers)
      .def_ro("bindings", &Layout::bindings)
      .def_ro("aliases", &Layout::aliases)
      .def_ro("padding", &Layout::padding)
      .def_ro("unused", &Layout::unused)
      .def_ro("coordinates", &Layout::coordinates)
      .def(
          "set_memory",
          [](Layout& self, uint32_t buffer, uintptr_t address, MemoryKind kind, int device, int fd,
             uint64_t fd_offset) {
            Buffer& memory = self.buffers.at(buffer);
            memory.data = reinterpret_cast<std::byte*>(address);
            memory.kind = kind;
            memory.device = device;
            memory.fd = fd;
            memory.fd_offset = fd_offset;
          },
          nb::arg("buffer"), nb::arg("address"), nb::arg("kind"), nb::arg("device"), nb::arg("fd"),
          nb::arg("fd_offset"), "Give a buffer of `layout_from_json` its memory.")
      .def(
          "to_json",
          [](const Layout& self, int indent) { return Unwrap(LayoutToJson(self, indent)); },
          nb::arg("indent"))
      .def("validate",
           [](const Layout& self) { Check(WithoutGil([&] { return ValidateLayout(self); })); })
      .def("check_destination_coverage", [](const Layout& self) {
        Check(WithoutGil([&] { return CheckDestinationCoverage(self); }));
      });
  m.def(
      "layout_from_json", [](std::string_view text) { return Unwrap(LayoutFromJson(text)); },
      nb::arg("text"), "The buffers have no memory yet.");
}

}  // namespace

void BindLayout(nb::module_& m) {
  BindEnums(m);
  BindParts(m);
  BindLayoutClass(m);
}

}  // namespace bascule::python
