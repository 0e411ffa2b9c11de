// The coordinator's state as JSON, for status displays (docs/protocol.md).
#include <nlohmann/json.hpp>

#include "coordinator/core.h"

namespace bascule {
namespace {

const char* StateName(VersionState state) {
  switch (state) {
    case VersionState::kUnknown: return "unknown";
    case VersionState::kOpen: return "open";
    case VersionState::kAvailable: return "available";
    case VersionState::kAborted: return "aborted";
    case VersionState::kRetired: return "retired";
  }
  return "unknown";
}

nlohmann::json JsonOf(VersionId id) {
  if (id.none()) return nullptr;
  return {{"term", id.term}, {"version", id.version}};
}

}  // namespace

std::string CoordinatorCore::StatusJson(CoordinatorTime now) const {
  nlohmann::json status;
  status["job"] = options_.job;
  status["coordinator"] = options_.coordinator_id;
  status["uptime_ms"] = now.steady_ms - options_.start.steady_ms;
  status["settled"] = settled_;
  status["heartbeat_ms"] = options_.heartbeat_ms;
  status["term"] = current_;
  status["epoch"] = epoch_;
  const auto current = terms_.find(current_);
  status["trainer_world_size"] = current == terms_.end() ? 0 : current->second.world_size;
  status["complete"] = current != terms_.end() && current->second.complete;
  status["blobs"] = blobs_.size();
  status["blob_bytes"] = blob_bytes_;
  status["members"] = nlohmann::json::array();
  for (const auto& [incarnation, member] : members_) {
    const MemberInfo& info = *member.info;
    nlohmann::json item = {{"role", info.role == Role::kTrainer ? "trainer" : "rollout"},
                           {"rank", info.rank},
                           {"world_size", info.world_size},
                           {"incarnation", incarnation},
                           {"layout", info.layout_serial},
                           {"node", info.node},
                           {"template", info.world_template.ToString()},
                           {"silent_ms", now.steady_ms - member.last_seen_ms},
                           {"build", member.build}};
    const MemberReport& report = member.report;
    item["done"] = report.done;
    item["last"] = nullptr;
    if (report.done > 0) {
      item["last"] = JsonOf(report.id);
      item["last"]["bytes"] = report.bytes;
      item["last"]["took_ms"] = static_cast<double>(report.took_ns) / 1e6;
      item["last"]["stall_ms"] = static_cast<double>(report.stall_ns) / 1e6;
    }
    item["error"] = nullptr;
    if (!report.error.empty()) {
      item["error"] = {{"message", report.error},
                       {"age_ms", (now.wall_ns - report.error_wall_ns) / 1'000'000}};
    }
    if (info.role == Role::kTrainer) {
      item["term"] = member.term;
      item["stale_term"] = IsStale(member);
    } else {
      item["engine"] = info.engine;
      item["serving"] = JsonOf(member.serving);
      item["servable"] = member.servable;
    }
    status["members"].push_back(std::move(item));
  }
  status["versions"] = nlohmann::json::array();
  for (const auto& [id, term] : terms_) {
    for (const auto& [number, version] : term.versions) {
      size_t holders = 0;
      for (const auto& [incarnation, hold] : version.holds) {
        holders += !hold.revoked && members_.count(incarnation) != 0 ? 1 : 0;
      }
      status["versions"].push_back(
          {{"term", id},
           {"version", number},
           {"state", StateName(version.state)},
           {"reason", version.reason},
           {"holders", holders},
           {"age_ms", (now.wall_ns - version.publish_start_ns) / 1'000'000}});
    }
  }
  // Names come from members and may be any bytes.
  return status.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace bascule
