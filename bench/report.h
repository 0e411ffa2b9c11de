// What every benchmark prints: one row a measurement, beside what it is measured against.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace bascule::bench {

// `ratio` is value / against_value. With a target, the row passes where the ratio reaches it.
struct Row {
  std::string bench;  // e.g. "copy"
  std::string name;   // the case, e.g. "4 KiB runs, dense -> strided, 2 threads"
  double value = 0;
  std::string unit;     // e.g. "GB/s"
  std::string against;  // e.g. "memcpy"; empty: nothing to compare with
  double against_value = 0;
  std::optional<double> target;  // of the ratio
  bool at_most = false;          // the ratio must not exceed the target

  [[nodiscard]] std::optional<double> ratio() const;
  // Nothing where there is no target.
  [[nodiscard]] std::optional<bool> passed() const;
};

// The middle value; of an even number the lower middle. `values` must not be empty.
[[nodiscard]] double Median(std::vector<double> values);

class Report {
 public:
  // Prints the row at once; long runs are watched.
  void Add(Row row);
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  [[nodiscard]] bool AllPassed() const;
  // A JSON array of {bench, case, value, unit, against, against_value, ratio, target, passed}; what
  // a row lacks is null. False where the file cannot be written.
  [[nodiscard]] bool WriteJson(const std::string& path) const;

 private:
  std::vector<Row> rows_;
};

}  // namespace bascule::bench
