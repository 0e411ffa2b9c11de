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

#include "bind.h"
#include "calls.h"
#include "errors.h"

namespace bascule::python {
namespace {

using IntervalPairs = std::vector<std::pair<int64_t, int64_t>>;

void CheckDims(size_t ndim) {
  if (ndim > static_cast<size_t>(kMaxDims)) {
    Raise(Status(Code::kInvalidArgument, "a tensor has at most " + std::to_string(kMaxDims) +
                                             " dimensions, not " + std::to_string(ndim)));
  }
}

Box ToBox(const IntervalPairs& pairs) {
  CheckDims(pairs.size());
  std::vector<Interval> dims;
  for (const auto& [begin, end] : pairs) dims.push_back({begin, end});
  return Box(dims);
}

IntervalPairs ToPairs(const Box& box) {
  IntervalPairs pairs;
  for (int d = 0; d < box.ndim(); ++d) pairs.emplace_back(box[d].begin, box[d].end);
  return pairs;
}

std::vector<int64_t> StridesOf(const Binding& binding) {
  return {binding.byte_strides.begin(), binding.byte_strides.begin() + binding.box.ndim()};
}

uint32_t Index(size_t size) { return static_cast<uint32_t>(size); }

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
  nb::class_<LogicalTensor>(m, "LogicalTensor", "A tensor of the checkpoint.")
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
      .def(nb::init<>())
      .def_ro("tensors", &Layout::tensors)
      .def_ro("buffers", &Layout::buffers)
      .def_ro("bindings", &Layout::bindings)
      .def_ro("aliases", &Layout::aliases)
      .def_ro("padding", &Layout::padding)
      .def_rw("unused", &Layout::unused)
      .def_ro("coordinates", &Layout::coordinates)
      .def(
          "add_tensor",
          [](Layout& self, std::string name, std::vector<int64_t> shape, DType dtype,
             bool derived) {
            CheckDims(shape.size());
            self.tensors.push_back({std::move(name), std::move(shape), dtype, derived});
            return Index(self.tensors.size() - 1);
          },
          nb::arg("name"), nb::arg("shape"), nb::arg("dtype"), nb::arg("derived") = false,
          "Add a tensor; its index.")
      .def(
          "add_buffer",
          [](Layout& self, std::string name, uintptr_t address, uint64_t bytes, MemoryKind kind,
             int device, int fd, uint64_t fd_offset) {
            self.buffers.push_back({.name = std::move(name),
                                    .data = reinterpret_cast<std::byte*>(address),
                                    .bytes = bytes,
                                    .kind = kind,
                                    .device = device,
                                    .fd = fd,
                                    .fd_offset = fd_offset});
            return Index(self.buffers.size() - 1);
          },
          nb::arg("name"), nb::arg("address"), nb::arg("bytes"),
          nb::arg("kind") = MemoryKind::kHost, nb::arg("device") = -1, nb::arg("fd") = -1,
          nb::arg("fd_offset") = 0, "Add memory; its index.")
      .def(
          "add_binding",
          [](Layout& self, uint32_t tensor, uint32_t buffer, const IntervalPairs& box,
             int64_t byte_offset, const std::vector<int64_t>& byte_strides, DType dtype,
             LandingFunction function) {
            if (byte_strides.size() != box.size()) {
              Raise(Status(Code::kInvalidArgument, "a binding has one stride for each dimension"));
            }
            Binding binding{.tensor = tensor,
                            .buffer = buffer,
                            .box = ToBox(box),
                            .byte_offset = byte_offset,
                            .dtype = dtype,
                            .function = function};
            std::copy(byte_strides.begin(), byte_strides.end(), binding.byte_strides.begin());
            self.bindings.push_back(binding);
          },
          nb::arg("tensor"), nb::arg("buffer"), nb::arg("box"), nb::arg("byte_offset"),
          nb::arg("byte_strides"), nb::arg("dtype"),
          nb::arg("function") = LandingFunction::kNone, "Bind a box of a tensor to memory.")
      .def(
          "add_alias",
          [](Layout& self, std::string name, std::string target) {
            self.aliases.push_back({std::move(name), std::move(target)});
          },
          nb::arg("name"), nb::arg("target"))
      .def(
          "add_padding",
          [](Layout& self, uint32_t buffer, uint64_t offset, uint64_t bytes, uint64_t count,
             uint64_t stride) { self.padding.push_back({buffer, offset, bytes, count, stride}); },
          nb::arg("buffer"), nb::arg("offset"), nb::arg("bytes"), nb::arg("count") = 1,
          nb::arg("stride") = 0)
      .def("validate",
           [](const Layout& self) { Check(WithoutGil([&] { return ValidateLayout(self); })); })
      .def("check_destination_coverage", [](const Layout& self) {
        Check(WithoutGil([&] { return CheckDestinationCoverage(self); }));
      });
}

}  // namespace

void BindLayout(nb::module_& m) {
  BindEnums(m);
  BindParts(m);
  BindLayoutClass(m);
}

}  // namespace bascule::python
