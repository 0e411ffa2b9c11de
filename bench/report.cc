#include "bench/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace bascule::bench {

std::optional<double> Row::ratio() const {
  if (against.empty() || against_value == 0) return std::nullopt;
  return value / against_value;
}

std::optional<bool> Row::passed() const {
  if (!target || !ratio()) return std::nullopt;
  return at_most ? *ratio() <= *target : *ratio() >= *target;
}

double Median(std::vector<double> values) {
  const size_t middle = (values.size() - 1) / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle),
                   values.end());
  return values[middle];
}

void Report::Add(Row row) {
  if (rows_.empty()) {
    fmt::print("{:<8} {:<52} {:>9} {:<6} {:>9} {:<10} {:>6} {:>7}\n", "bench", "case", "value",
               "unit", "against", "", "ratio", "target");
  }
  fmt::print("{:<8} {:<52} {:>9.3f} {:<6} ", row.bench, row.name, row.value, row.unit);
  if (row.ratio()) {
    fmt::print("{:>9.3f} {:<10} {:>6.3f}", row.against_value, row.against, *row.ratio());
  }
  if (row.target) fmt::print(" {} {:.2f}", row.at_most ? "<=" : ">=", *row.target);
  if (row.passed()) fmt::print(" {}", *row.passed() ? "pass" : "FAIL");
  fmt::print("\n");
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

bool Report::AllPassed() const {
  return std::all_of(rows_.begin(), rows_.end(),
                     [](const Row& row) { return row.passed().value_or(true); });
}

bool Report::WriteJson(const std::string& path) const {
  nlohmann::json rows = nlohmann::json::array();
  for (const Row& row : rows_) {
    nlohmann::json& json = rows.emplace_back();
    json["bench"] = row.bench;
    json["case"] = row.name;
    json["value"] = row.value;
    json["unit"] = row.unit;
    json["against"] = row.against.empty() ? nlohmann::json() : nlohmann::json(row.against);
    json["against_value"] = row.ratio() ? nlohmann::json(row.against_value) : nlohmann::json();
    json["ratio"] = row.ratio() ? nlohmann::json(*row.ratio()) : nlohmann::json();
    json["target"] = row.target ? nlohmann::json(*row.target) : nlohmann::json();
    json["passed"] = row.passed() ? nlohmann::json(*row.passed()) : nlohmann::json();
  }
  std::ofstream file(path);
  file << rows.dump(2) << "\n";
  file.flush();
  return file.good();
}

}  // namespace bascule::bench
