// Layouts from declared meshes. bascule/layout.py finds the memory of arrays and calls this.
#include "bascule/mesh.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "calls.h"
#include "errors.h"

namespace bascule::python {
namespace {

using nb::literals::operator""_a;

Placements ToPlacements(const nb::typed<nb::dict, nb::str, Placement>& placements) {
  Placements list;
  for (auto [axis, placement] : placements) {
    list.push_back({nb::cast<std::string>(axis), nb::cast<Placement>(placement)});
  }
  return list;
}

using PlacementDict = nb::typed<nb::dict, nb::str, Placement>;

std::string Repr(const Placement& placement) {
  const std::string dim = std::to_string(placement.dim);
  switch (placement.kind) {
    case Placement::Kind::kReplicate: return "replicate()";
    case Placement::Kind::kShard:
      if (placement.parts != 0) {
        return "shard_parts(" + dim + ", " + std::to_string(placement.parts) + ")";
      }
      if (placement.padded != 0) {
        return "shard_padded(" + dim + ", " + std::to_string(placement.padded) + ")";
      }
      return "shard(" + dim + ")";
    case Placement::Kind::kStridedShard:
      return "strided_shard(" + dim + ", " + std::to_string(placement.split_factor) + ")";
    case Placement::Kind::kAt: {
      std::string text = "at(";
      for (size_t i = 0; i < placement.at.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(placement.at[i]);
      }
      return text + ")";
    }
  }
  return "";
}

void BindMesh(nb::module_& m) {
  nb::class_<Mesh>(m, "Mesh",
                   "A grid of ranks with named axes.\n\n"
                   "Rank numbers are row-major, the last axis fastest, as torch's DeviceMesh. No\n"
                   "axes: one rank.\n\n"
                   "Parameters\n----------\n"
                   "axis_names\n    Unique and not empty.\n"
                   "axis_sizes\n    As many, none zero.")
      .def(
          "__init__",
          [](Mesh* self, std::vector<std::string> names, std::vector<uint32_t> sizes) {
            Mesh mesh{std::move(names), std::move(sizes)};
            Check(mesh.Validate());
            new (self) Mesh(std::move(mesh));
          },
          "axis_names"_a = std::vector<std::string>(), "axis_sizes"_a = std::vector<uint32_t>())
      .def_ro("axis_names", &Mesh::axis_names)
      .def_ro("axis_sizes", &Mesh::axis_sizes)
      .def_prop_ro("ranks", &Mesh::ranks, "How many ranks there are.")
      .def(
          "coordinates_of",
          [](const Mesh& self, uint64_t rank) {
            if (rank >= self.ranks()) {
              Raise(Status(Code::kInvalidArgument, "rank " + std::to_string(rank) +
                                                       " of a mesh of " +
                                                       std::to_string(self.ranks()) + " ranks"));
            }
            return self.CoordinatesOf(rank);
          },
          "rank"_a, "Return the coordinates of a rank.")
      .def("__repr__", [](const Mesh& self) {
        std::string text = "Mesh(";
        for (size_t i = 0; i < self.axis_names.size(); ++i) {
          text +=
              (i == 0 ? "" : ", ") + self.axis_names[i] + "=" + std::to_string(self.axis_sizes[i]);
        }
        return text + ")";
      });

  nb::class_<Placement>(m, "Placement", "What one mesh axis does to a tensor.")
      .def("__repr__", &Repr);
  m.def("replicate", &Replicate, "Every rank along the axis holds all of it.");
  m.def("shard", &Shard, "dim"_a,
        "Cut ``dim`` as torch.chunk does: parts of ceil(extent / ranks); the last ranks have less\n"
        "or nothing.");
  m.def(
      "shard_parts", &ShardParts, "dim"_a, "parts"_a,
      "Cut ``dim`` into ``parts`` equal parts; with more ranks than parts, neighbours share one.");
  m.def("shard_padded", &ShardPadded, "dim"_a, "padded"_a,
        "Pad ``dim`` to ``padded`` elements, then cut it; the array holds the padding too.");
  m.def("strided_shard", &StridedShard, "dim"_a, "split_factor"_a,
        "DTensor's _StridedShard: cut after the shard of ``dim`` on the axes to the right.");
  m.def(
      "at",
      [](nb::args coordinates) { return AtAny(nb::cast<std::vector<uint32_t>>(coordinates)); },
      nb::sig("def at(*coordinates: int) -> Placement"),
      "Only ranks with these coordinates along the axis hold it: experts, pipeline stages.");
}

void BindBlock(nb::module_& m) {
  nb::class_<Block>(m, "Block",
                    "How the memory of one array is made of parts of logical tensors.\n\n"
                    "An array at one rank has a local shape; where `at` leaves a part on other\n"
                    "ranks only, the part takes no room in the array.")
      .def_static(
          "of",
          [](LogicalTensor tensor, PlacementDict placements) {
            return Block::Of(std::move(tensor), ToPlacements(placements));
          },
          "tensor"_a, "placements"_a = nb::dict(),
          "The rank's part of a tensor, or of the slice of it that `slice` picks.")
      .def_static("concat", &Block::Concat, "dim"_a, "parts"_a,
                  "Parts one after another along an existing dimension: fused gate/up, QKV.")
      .def_static("stack", &Block::Stack, "parts"_a,
                  "Parts of equal local shape along a new first dimension: stacked experts.")
      .def_static("interleave", &Block::Interleave, "dim"_a, "parts"_a,
                  "tiles"_a = std::vector<int64_t>(),
                  "Take ``tiles[i]`` indices of part i in turn along ``dim``; no tiles: one each.")
      .def(
          "slice",
          [](Block self, int dim, int64_t begin, int64_t end, int64_t step) {
            return std::move(self).Slice(dim, begin, end, step);
          },
          "dim"_a, "begin"_a, "end"_a, "step"_a = 1,
          "Only these indices of a logical dimension; placements then cut the slice.")
      .def(
          "transpose",
          [](Block self, std::vector<int> order) { return std::move(self).Transpose(order); },
          "order"_a, "Dimension i of the result is dimension ``order[i]`` of this block.")
      .def(
          "pad_to",
          [](Block self, int dim, int64_t extent) { return std::move(self).PadTo(dim, extent); },
          "dim"_a, "extent"_a, "Pad the end of a dimension of the array to ``extent``.")
      .def(
          "landing",
          [](Block self, LandingFunction function) { return std::move(self).Landing(function); },
          "function"_a, "Apply an elementwise function on landing.");
  m.def("fused_qkv", &FusedQkv, "q"_a, "k"_a, "v"_a, "kv_heads"_a, "axis"_a,
        "[q; k; v] along dimension 0, cut by heads along ``axis``. With more ranks than kv heads,\n"
        "neighbours share one. Weights and biases alike.");
  m.def(
      "fused_gate_up",
      [](LogicalTensor gate, LogicalTensor up, PlacementDict placements, bool interleaved) {
        return FusedGateUp(std::move(gate), std::move(up), ToPlacements(placements), interleaved);
      },
      "gate"_a, "up"_a, "placements"_a = nb::dict(), "interleaved"_a = false,
      "[gate; up] along dimension 0, or row by row.");

  nb::class_<FlatTensor>(m, "FlatTensor", "A tensor of a flat buffer.")
      .def(
          "__init__",
          [](FlatTensor* self, LogicalTensor tensor, PlacementDict placements, int64_t start) {
            new (self) FlatTensor{std::move(tensor), ToPlacements(placements), start};
          },
          "tensor"_a, "placements"_a = nb::dict(), "start"_a = -1);
  nb::class_<FlatBuffer>(
      m, "FlatBuffer",
      "Tensors one after another, row-major, in one buffer that ranks cut at any element.\n\n"
      "FSDP1's and Megatron's flat parameters.\n\n"
      "Parameters\n----------\n"
      "tensors\n    In order; each right after the one before unless it has a ``start``.\n"
      "axes\n    Of the mesh, along which the buffer is cut; the first is the most significant.\n"
      "cuts\n    Rank r holds elements ``[cuts[r], cuts[r + 1])``; none: parts of\n"
      "    ceil(total / ranks).")
      .def(
          "__init__",
          [](FlatBuffer* self, std::vector<FlatTensor> tensors, std::vector<std::string> axes,
             std::vector<int64_t> cuts) {
            new (self) FlatBuffer{std::move(tensors), std::move(axes), std::move(cuts)};
          },
          "tensors"_a, "axes"_a, "cuts"_a = std::vector<int64_t>());
}

LocalMemory ToMemory(uint32_t buffer, int64_t byte_offset, std::vector<int64_t> byte_strides,
                     std::optional<DType> dtype) {
  return {buffer, byte_offset, std::move(byte_strides), dtype};
}

void BindBuilder(nb::module_& m) {
  nb::class_<LayoutBuilder>(m, "LayoutBuilder", "See bascule.layout.LayoutBuilder.")
      .def(
          "__init__",
          [](LayoutBuilder* self, const Mesh& mesh, const std::vector<uint32_t>& coordinates) {
            new (self) LayoutBuilder(Unwrap(LayoutBuilder::Create(mesh, coordinates)));
          },
          "mesh"_a, "coordinates"_a)
      .def(
          "local_shape",
          [](LayoutBuilder& self, const Block& block) -> std::optional<std::vector<int64_t>> {
            auto shape = self.LocalShape(block);
            if (!shape.ok() && shape.status().code() == Code::kNotFound) return std::nullopt;
            return Unwrap(std::move(shape));
          },
          "block"_a, "The shape of a block's array; None where all of it is at other ranks.")
      .def(
          "local_elements",
          [](LayoutBuilder& self, const FlatBuffer& flat) {
            return Unwrap(self.LocalElements(flat));
          },
          "flat"_a, "How many elements of the flat buffer the rank holds.")
      .def(
          "add_buffer",
          [](LayoutBuilder& self, std::string name, uintptr_t address, uint64_t bytes,
             MemoryKind kind, int device, int fd, uint64_t fd_offset) {
            return self.AddBuffer({.name = std::move(name),
                                   .data = reinterpret_cast<std::byte*>(address),
                                   .bytes = bytes,
                                   .kind = kind,
                                   .device = device,
                                   .fd = fd,
                                   .fd_offset = fd_offset});
          },
          "name"_a, "address"_a, "bytes"_a, "kind"_a, "device"_a, "fd"_a, "fd_offset"_a)
      .def(
          "add_elsewhere", [](LayoutBuilder& self, const Block& block) { Check(self.Add(block)); },
          "block"_a, "Add a block of which this rank holds nothing.")
      .def(
          "add",
          [](LayoutBuilder& self, const Block& block, uint32_t buffer, int64_t byte_offset,
             std::vector<int64_t> byte_strides, std::optional<DType> dtype) {
            Check(self.Add(block, ToMemory(buffer, byte_offset, std::move(byte_strides), dtype)));
          },
          "block"_a, "buffer"_a, "byte_offset"_a, "byte_strides"_a, "dtype"_a)
      .def(
          "add_flat_elsewhere",
          [](LayoutBuilder& self, const FlatBuffer& flat) { Check(self.AddFlat(flat)); }, "flat"_a)
      .def(
          "add_flat",
          [](LayoutBuilder& self, const FlatBuffer& flat, uint32_t buffer, int64_t byte_offset,
             std::optional<DType> dtype) {
            Check(self.AddFlat(flat, ToMemory(buffer, byte_offset, {}, dtype)));
          },
          "flat"_a, "buffer"_a, "byte_offset"_a, "dtype"_a)
      .def(
          "add_alias",
          [](LayoutBuilder& self, std::string name, std::string target) {
            self.AddAlias({std::move(name), std::move(target)});
          },
          "name"_a, "target"_a)
      .def("add_unused", &LayoutBuilder::AddUnused, "pattern"_a)
      .def(
          "add_padding",
          [](LayoutBuilder& self, uint32_t buffer, uint64_t offset, uint64_t bytes, uint64_t count,
             uint64_t stride) {
            self.AddPadding({buffer, offset, bytes, count, stride});
          },
          "buffer"_a, "offset"_a, "bytes"_a, "count"_a, "stride"_a)
      .def("build", [](LayoutBuilder& self) {
        return Unwrap(WithoutGil([&] { return self.BuildLayout(); }));
      });
}

}  // namespace

void BindMeshes(nb::module_& m) {
  BindMesh(m);
  BindBlock(m);
  BindBuilder(m);
}

}  // namespace bascule::python
