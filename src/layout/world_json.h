// Worlds as JSON, and the parts that worlds and layouts share.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bascule/layout_json.h"
#include "layout/json_reader.h"
#include "layout/world_template.h"

namespace bascule {

// An error where a text is not UTF-8.
[[nodiscard]] Result<std::string> DumpJson(const nlohmann::json& json, int indent);

// The expanded form. Axes without a name are called axis0, axis1, ...
[[nodiscard]] nlohmann::json ExpandedWorldJson(const WorldTemplate& world,
                                               const std::vector<std::string>& axis_names);
// Either form; null after an error of the node.
[[nodiscard]] DeclaredWorld ReadWorld(const JsonNode& node);

// Name, shape, dtype and derived of a tensor.
[[nodiscard]] LogicalTensor ReadTensor(const JsonNode& node);
// The members "aliases" and "unused" of a node, where it has them.
void ReadAliases(const JsonNode& node, std::vector<Alias>* aliases);
void ReadUnused(const JsonNode& node, std::vector<std::string>* unused);

}  // namespace bascule
