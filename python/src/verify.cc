// Comparing what live ranks hold: bascule/verify.h for Python.
#include "bascule/verify.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bascule/safetensors.h"
#include "bind.h"
#include "calls.h"
#include "errors.h"

namespace bascule::python {
namespace {

// Bytes compared so far and in all; read by any thread while a comparison runs.
struct Progress {
  std::atomic<uint64_t> done{0};
  std::atomic<uint64_t> total{0};
};

CompareOptions OptionsOf(std::optional<DType> dtype, const std::shared_ptr<Progress>& progress) {
  CompareOptions options;
  options.dtype = dtype;
  if (progress) {
    options.progress = [progress](uint64_t done, uint64_t total) {
      progress->total = total;
      progress->done = done;
    };
  }
  return options;
}

// Path, address, bytes.
using File = std::tuple<std::string, uintptr_t, uint64_t>;

}  // namespace

void BindVerify(nb::module_& m) {
  nb::class_<Progress>(m, "Progress", "Bytes compared so far, and in all.")
      .def(nb::init<>())
      .def_prop_ro("done", [](const Progress& self) { return self.done.load(); })
      .def_prop_ro("total", [](const Progress& self) { return self.total.load(); });

  nb::class_<Comparison>(m, "Comparison", "See bascule.verify.Comparison.")
      .def_prop_ro("term", [](const Comparison& self) { return self.version.term; })
      .def_prop_ro("version", [](const Comparison& self) { return self.version.version; })
      .def_ro("tensors", &Comparison::tensors)
      .def_ro("elements", &Comparison::elements)
      .def_ro("bytes", &Comparison::bytes)
      .def_ro("different", &Comparison::different)
      .def_ro("only_left", &Comparison::only_left)
      .def_ro("only_right", &Comparison::only_right)
      .def_ro("unreadable", &Comparison::unreadable);

  m.def(
      "compare_ranks",
      [](const JobOptions& job, const std::string& left, const std::string& right,
         std::optional<DType> dtype, const std::shared_ptr<Progress>& progress, double timeout) {
        const RankName mine = Unwrap(ParseRankName(left));
        const RankName theirs = Unwrap(ParseRankName(right));
        const CompareOptions options = OptionsOf(dtype, progress);
        return Unwrap(Interruptibly(nb::none(), [=, deadline = DeadlineIn(timeout)] {
          return CompareRanks(job, mine, theirs, options, deadline);
        }));
      },
      nb::arg("job"), nb::arg("left"), nb::arg("right"), nb::arg("dtype").none(),
      nb::arg("progress").none(), nb::arg("timeout"));

  m.def(
      "compare_with_files",
      [](const JobOptions& job, const std::string& left, const std::vector<File>& files,
         nb::object owners, std::optional<DType> dtype, const std::shared_ptr<Progress>& progress,
         double timeout) {
        const RankName mine = Unwrap(ParseRankName(left));
        std::vector<SafetensorsFile> mapped;
        for (const auto& [path, address, bytes] : files) {
          mapped.push_back({path, reinterpret_cast<std::byte*>(address), bytes});
        }
        auto layout = std::make_shared<Layout>(Unwrap(LayoutOfSafetensors(mapped)));
        const CompareOptions options = OptionsOf(dtype, progress);
        return Unwrap(Interruptibly(owners, [=, deadline = DeadlineIn(timeout)] {
          return CompareWithLayout(job, mine, *layout, options, deadline);
        }));
      },
      nb::arg("job"), nb::arg("left"), nb::arg("files"), nb::arg("owners"), nb::arg("dtype").none(),
      nb::arg("progress").none(), nb::arg("timeout"));
}

}  // namespace bascule::python
