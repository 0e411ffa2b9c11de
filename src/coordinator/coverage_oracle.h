// What the coordinator knows of layouts: world templates, and which sets of ranks cover them.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "coordinator/core.h"
#include "layout/world_template.h"

namespace bascule {

using TemplateMap = std::map<ContentDigest, std::shared_ptr<const WorldTemplate>>;

// For every region that some member holds, the members that hold it, each distinct set once: some
// of them hold everything iff each set has one of them. Indices in `members`, sorted. Members of
// templates that are not in `templates` hold nothing.
[[nodiscard]] std::vector<std::vector<uint32_t>> HolderSetsOf(
    std::span<const MemberInfo* const> members, const TemplateMap& templates);

// Thread-safe. Answers depend on the arguments and the templates added only; what was worked out
// for a world is remembered, so that a check is a few look-ups.
class TemplateOracle final : public CoverageOracle {
 public:
  // Parses a template blob, unless it is known; bytes that are none are remembered too (see Check).
  void Add(const ContentDigest& digest, const std::string& bytes);
  // Forgets all others. `digests` are sorted.
  void Retain(const std::vector<ContentDigest>& digests);

  [[nodiscard]] Status Check(const MemberInfo& member) const override;
  [[nodiscard]] bool Covers(std::span<const MemberInfo* const> holders,
                            std::span<const MemberInfo* const> world) const override;
  [[nodiscard]] uint64_t ReplicaGroup(const MemberInfo& member) const override;
  [[nodiscard]] std::string BucketName(const MemberInfo& member, size_t bucket, size_t buckets,
                                       std::string* tensor) const override;
  [[nodiscard]] std::vector<MemberInfo> World(const MemberInfo& member) const override;

 private:
  struct Template {
    std::shared_ptr<const WorldTemplate> world;  // null: see error
    Status error;
    uint64_t names = 0;                    // hash of the list of names
    std::vector<uint64_t> names_of_class;  // hash of the set of names of each class
  };
  // Layouts are known by a 64-bit hash of template digest and coordinates.
  struct WorldSets {
    uint64_t key = 0;  // sum of the layouts' hashes
    size_t members = 0;
    std::unordered_map<uint64_t, uint32_t> index;
    std::vector<std::vector<uint32_t>> sets;
  };

  [[nodiscard]] std::shared_ptr<const Template> Find(const ContentDigest& digest) const;
  [[nodiscard]] std::shared_ptr<const WorldSets> SetsOf(
      std::span<const MemberInfo* const> world) const;

  mutable std::mutex mutex_;
  std::map<ContentDigest, std::shared_ptr<const Template>> templates_;
  mutable std::unordered_map<uint64_t, uint64_t> groups_;        // layout hash -> group
  mutable std::deque<std::shared_ptr<const WorldSets>> worlds_;  // the last few, newest last
};

}  // namespace bascule
