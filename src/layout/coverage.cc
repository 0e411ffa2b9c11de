#include "layout/coverage.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

namespace bascule {
namespace {

// The members of one side, folded: which worlds it has, and its tensors grouped by the classes that
// they have in each world.
class SideView {
 public:
  // What a group of tensors is, over all members of the side.
  struct Group {
    std::vector<int64_t> shape;
    DType dtype = DType::kF32;
    std::vector<Box> boxes;  // of all members, sorted, each once
  };

  explicit SideView(std::span<const WorldMember> members) {
    for (const WorldMember& member : members) {
      auto at = std::find(worlds_.begin(), worlds_.end(), member.world);
      if (at == worlds_.end()) {
        worlds_.push_back(member.world);
        members_.emplace_back();
        at = worlds_.end() - 1;
      }
      members_[static_cast<size_t>(at - worlds_.begin())].push_back(&member);
    }
  }

  // Groups the tensors. An error where worlds of the side differ about a tensor.
  Status GroupTensors() {
    constexpr uint32_t kNone = 0xffffffff;
    std::unordered_map<std::string_view, std::vector<uint32_t>> classes_of;
    for (size_t w = 0; w < worlds_.size(); ++w) {
      for (size_t n = 0; n < worlds_[w]->names.size(); ++n) {
        std::vector<uint32_t>& classes = classes_of[worlds_[w]->names[n]];
        classes.resize(w + 1, kNone);
        classes[w] = worlds_[w]->class_of[n];
      }
      for (const Alias& alias : worlds_[w]->aliases) aliases_[alias.name] = alias.target;
    }
    std::map<std::vector<uint32_t>, uint32_t> numbers;
    for (auto& [name, classes] : classes_of) {
      classes.resize(worlds_.size(), kNone);
      auto [at, added] = numbers.try_emplace(classes, static_cast<uint32_t>(groups_.size()));
      if (added) {
        groups_.emplace_back();
        BASCULE_RETURN_IF_ERROR(Fill(name, classes, kNone, &groups_.back()));
      }
      tensors_.emplace_back(name, at->second);
      group_of_[name] = at->second;
    }
    std::sort(tensors_.begin(), tensors_.end());
    return Status::Ok();
  }

  // Sorted by name.
  [[nodiscard]] const std::vector<std::pair<std::string_view, uint32_t>>& tensors() const {
    return tensors_;
  }
  [[nodiscard]] const Group& group(uint32_t number) const { return groups_[number]; }

  // The stored tensor behind a name: itself, or the target of an alias of this side.
  [[nodiscard]] std::string_view Resolve(std::string_view name) const {
    auto at = aliases_.find(name);
    return group_of_.contains(name) || at == aliases_.end() ? name : at->second;
  }
  // The group of a stored tensor that some member holds boxes of.
  [[nodiscard]] std::optional<uint32_t> Find(std::string_view name) const {
    auto at = group_of_.find(name);
    if (at == group_of_.end() || groups_[at->second].boxes.empty()) return std::nullopt;
    return at->second;
  }
  [[nodiscard]] const std::vector<const WorldTemplate*>& worlds() const { return worlds_; }
  [[nodiscard]] bool DeclaresUnused(std::string_view name) const {
    return std::any_of(worlds_.begin(), worlds_.end(), [&](const WorldTemplate* world) {
      return std::any_of(world->unused.begin(), world->unused.end(),
                         [&](const std::string& p) { return MatchesPattern(p, name); });
    });
  }

 private:
  Status Fill(std::string_view name, const std::vector<uint32_t>& classes, uint32_t none,
              Group* group) const {
    bool first = true;
    for (size_t w = 0; w < worlds_.size(); ++w) {
      if (classes[w] == none) continue;
      const TemplateClass& tensor_class = worlds_[w]->classes[classes[w]];
      if (!first && (group->shape != tensor_class.shape || group->dtype != tensor_class.dtype)) {
        return Status(
                   Code::kInvalidArgument,
                   fmt::format("ranks of one side declare it as {} [{}] and as {} [{}]",
                               DTypeName(group->dtype), fmt::join(group->shape, ", "),
                               DTypeName(tensor_class.dtype), fmt::join(tensor_class.shape, ", ")))
            .WithTensor(std::string(name));
      }
      first = false;
      group->shape = tensor_class.shape;
      group->dtype = tensor_class.dtype;
      for (const WorldMember* member : members_[w]) {
        worlds_[w]->BoxesOf(classes[w], member->coordinates, &group->boxes);
      }
    }
    std::sort(group->boxes.begin(), group->boxes.end());
    group->boxes.erase(std::unique(group->boxes.begin(), group->boxes.end()), group->boxes.end());
    return Status::Ok();
  }

  std::vector<const WorldTemplate*> worlds_;
  std::vector<std::vector<const WorldMember*>> members_;  // by world
  std::vector<Group> groups_;
  std::vector<std::pair<std::string_view, uint32_t>> tensors_;
  std::unordered_map<std::string_view, uint32_t> group_of_;
  std::unordered_map<std::string_view, std::string_view> aliases_;
};

// Appends what is left of `box` without `hole`: at most two pieces a dimension.
void Subtract(Box box, const Box& hole, std::vector<Box>* rest) {
  if (box.Intersect(hole).empty()) {
    rest->push_back(box);
    return;
  }
  for (int d = 0; d < box.ndim(); ++d) {
    if (box[d].begin < hole[d].begin) {
      rest->push_back(box);
      rest->back()[d].end = hole[d].begin;
      box[d].begin = hole[d].begin;
    }
    if (hole[d].end < box[d].end) {
      rest->push_back(box);
      rest->back()[d].begin = hole[d].end;
      box[d].end = hole[d].end;
    }
  }
}

// A part of `need` that none of `held` has, or nullopt.
std::optional<Box> Uncovered(const Box& need, const std::vector<Box>& held) {
  std::vector<Box> missing = {need};
  std::vector<Box> rest;
  for (const Box& box : held) {
    if (need.Intersect(box).empty()) continue;
    rest.clear();
    for (const Box& piece : missing) Subtract(piece, box, &rest);
    missing.swap(rest);
    if (missing.empty()) return std::nullopt;
  }
  return missing[0];
}

// Names up to five offenders and counts them all.
class Offenders {
 public:
  void Add(std::string_view name, const std::string& detail) {
    constexpr size_t kListed = 5;
    if (count_++ == 0) first_ = name;
    if (count_ > kListed) return;
    if (count_ > 1) list_ += ", ";
    list_ += fmt::format("'{}'{}", name, detail);
  }
  [[nodiscard]] bool none() const { return count_ == 0; }
  // "3 tensors WHAT: 'a', 'b', 'c'; REMEDY".
  [[nodiscard]] Status ToStatus(Code code, std::string_view what, std::string_view remedy) const {
    return Status(code, fmt::format("{} tensor{} {}: {}{}; {}", count_, count_ == 1 ? "" : "s",
                                    what, list_, count_ > 5 ? ", ..." : "", remedy))
        .WithTensor(first_);
  }

 private:
  size_t count_ = 0;
  std::string first_;
  std::string list_;
};

// What is wrong between a needed group and the held one; empty: nothing.
struct Verdict {
  std::string mismatch;
  std::string gap;
};

Verdict Compare(const SideView::Group& held, const SideView::Group& needed) {
  if (held.shape != needed.shape) {
    return {fmt::format(" (source [{}], engine [{}])", fmt::join(held.shape, ", "),
                        fmt::join(needed.shape, ", ")),
            ""};
  }
  if (!Castable(held.dtype, needed.dtype)) {
    return {fmt::format(" (source {}, engine {})", DTypeName(held.dtype), DTypeName(needed.dtype)),
            ""};
  }
  for (const Box& box : needed.boxes) {
    if (auto missing = Uncovered(box, held.boxes)) return {"", " " + missing->ToString()};
  }
  return {};
}

Status CheckNeeds(const SideView& held, const SideView& needed) {
  Offenders unknown;
  Offenders mismatched;
  Offenders incomplete;
  std::map<std::pair<uint32_t, uint32_t>, Verdict> verdicts;
  for (const auto& [name, group] : needed.tensors()) {
    if (needed.group(group).boxes.empty()) continue;
    std::optional<uint32_t> source = held.Find(held.Resolve(name));
    if (!source) {
      unknown.Add(name, "");
      continue;
    }
    auto [at, added] = verdicts.try_emplace({*source, group});
    if (added) at->second = Compare(held.group(*source), needed.group(group));
    if (!at->second.mismatch.empty()) mismatched.Add(name, at->second.mismatch);
    if (!at->second.gap.empty()) incomplete.Add(name, at->second.gap);
  }
  if (!unknown.none()) {
    return unknown.ToStatus(Code::kNotFound, "of the engine are held by no source",
                            "publish them, alias them, or correct the names");
  }
  if (!mismatched.none()) {
    return mismatched.ToStatus(Code::kInvalidArgument, "differ in shape or dtype",
                               "declare both sides in checkpoint coordinates and castable dtypes");
  }
  if (!incomplete.none()) {
    return incomplete.ToStatus(Code::kInvalidArgument,
                               "of the engine have elements that no source holds",
                               "let a source rank bind the boxes");
  }
  return Status::Ok();
}

// The engine has one memory for names that it ties; the sources must not hold two tensors for it.
Status CheckTies(const SideView& held, const SideView& needed) {
  std::map<std::string_view, std::string_view> apart;
  for (const WorldTemplate* world : needed.worlds()) {
    for (const Alias& alias : world->aliases) {
      const std::string_view name = held.Resolve(alias.name);
      const std::string_view target = held.Resolve(alias.target);
      if (name == target || !held.Find(name) || !held.Find(target)) continue;
      // By its very name, not by a pattern: whoever writes it knows that both are equal.
      const std::vector<std::string>& unused = world->unused;
      if (std::find(unused.begin(), unused.end(), alias.name) != unused.end()) continue;
      apart.emplace(alias.name, alias.target);
    }
  }
  if (apart.empty()) return Status::Ok();
  const auto& [name, target] = *apart.begin();
  const std::string more =
      apart.size() == 1 ? "" : fmt::format(" (and {} more such ties)", apart.size() - 1);
  return Status(Code::kInvalidArgument,
                fmt::format("the engine ties {} to {}, but the trainers hold them apart{}; tie "
                            "them at the trainers, give the engine memory for each, or, where they "
                            "are always equal, declare {} unused by its whole name",
                            name, target, more, name))
      .WithTensor(std::string(name));
}

Status CheckWants(const SideView& held, const SideView& needed) {
  std::unordered_map<std::string_view, bool> wanted;  // stored names of the sources
  for (const auto& [name, group] : needed.tensors()) {
    if (!needed.group(group).boxes.empty()) wanted[held.Resolve(name)] = true;
  }
  Offenders unwanted;
  for (const auto& [name, group] : held.tensors()) {
    if (held.group(group).boxes.empty() || wanted.contains(name)) continue;
    if (!needed.DeclaresUnused(name)) unwanted.Add(name, "");
  }
  if (unwanted.none()) return Status::Ok();
  return unwanted.ToStatus(Code::kInvalidArgument, "of the sources are wanted by no engine member",
                           "bind them, or declare them unused (a trailing '*' matches any suffix)");
}

}  // namespace

bool MatchesPattern(std::string_view pattern, std::string_view name) {
  if (pattern.empty() || pattern.back() != '*') return pattern == name;
  pattern.remove_suffix(1);
  return name.substr(0, pattern.size()) == pattern;
}

Status CheckCoverage(std::span<const WorldMember> sources, std::span<const WorldMember> engine) {
  SideView held(sources);
  SideView needed(engine);
  BASCULE_RETURN_IF_ERROR(held.GroupTensors());
  BASCULE_RETURN_IF_ERROR(needed.GroupTensors());
  BASCULE_RETURN_IF_ERROR(CheckNeeds(held, needed));
  BASCULE_RETURN_IF_ERROR(CheckTies(held, needed));
  return CheckWants(held, needed);
}

}  // namespace bascule
