// CompareRanks and CompareWithLayout: sums of common boxes, asked of ranks or computed here.
#include "bascule/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "base/fork_guard.h"
#include "coordinator/grpc_directory.h"
#include "layout/world_template.h"
#include "session/agent.h"
#include "session/audit.h"
#include "session/membership.h"
#include "session/messages.h"
#include "transport/transport.h"

namespace bascule {
namespace {

constexpr uint64_t kStepBytes = 64 << 20;
constexpr size_t kStepBoxes = 4096;

// What one side holds of a tensor.
struct Held {
  std::vector<int64_t> shape;
  DType dtype = DType::kF32;
  std::vector<Box> boxes;
};

class Holder {
 public:
  virtual ~Holder() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual bool trainer() const = 0;
  [[nodiscard]] const std::map<std::string, Held>& tensors() const { return tensors_; }
  // id none: of what it holds newest or serves; the reply says which.
  [[nodiscard]] virtual Result<SumsReply> Sums(VersionId id, std::vector<WantedSum> wanted,
                                               Deadline deadline) = 0;

 protected:
  std::map<std::string, Held> tensors_;
};

class LiveRank final : public Holder {
 public:
  [[nodiscard]] static Result<std::unique_ptr<Holder>> Connect(const JobOptions& job,
                                                               const RankName& rank,
                                                               Directory* directory,
                                                               Deadline deadline);
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] bool trainer() const override { return trainer_; }
  Result<SumsReply> Sums(VersionId id, std::vector<WantedSum> wanted, Deadline deadline) override;

 private:
  std::string name_;
  bool trainer_ = false;
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<Peer> peer_;
};

Result<std::unique_ptr<Holder>> LiveRank::Connect(const JobOptions& job, const RankName& rank,
                                                  Directory* directory, Deadline deadline) {
  BASCULE_ASSIGN_OR_RETURN(Membership membership, directory->Members(deadline));
  const MemberInfo* found = nullptr;
  std::string others;
  for (const MemberInfo& member : membership.members) {
    const bool same_role = (member.role == Role::kTrainer) == rank.engine.empty();
    if (same_role && member.rank == rank.rank && member.engine == rank.engine) found = &member;
    others += (others.empty() ? "" : ", ") + MemberName(member);
  }
  if (found == nullptr) {
    return Status(Code::kNotFound, fmt::format("the job has no {}; it has: {}", rank.ToString(),
                                               others.empty() ? "no members" : others))
        .WithPeer(rank.ToString());
  }
  auto live = std::make_unique<LiveRank>();
  live->name_ = MemberName(*found);
  live->trainer_ = found->role == Role::kTrainer;
  BASCULE_ASSIGN_OR_RETURN(std::string bytes, directory->GetBlob(found->world_template, deadline));
  BASCULE_ASSIGN_OR_RETURN(WorldTemplate world, WorldTemplate::Parse(bytes));
  for (size_t i = 0; i < world.names.size(); ++i) {
    const TemplateClass& tensor_class = world.classes[world.class_of[i]];
    Held held{tensor_class.shape, tensor_class.dtype, {}};
    world.BoxesOf(world.class_of[i], found->coordinates, &held.boxes);
    if (!held.boxes.empty()) live->tensors_[world.names[i]] = std::move(held);
  }
  for (const Alias& alias : world.aliases) {
    auto target = live->tensors_.find(alias.target);
    if (target != live->tensors_.end()) live->tensors_[alias.name] = target->second;
  }
  BASCULE_ASSIGN_OR_RETURN(
      live->transport_, MakeShmTransport({job.name, job.token, RandomId(), "verify"},
                                         {.directory = job.socket_directory, .huge_pages = false}));
  for (const TransportAddress& address : found->addresses) {
    if (address.transport != live->transport_->name()) continue;
    auto peer = live->transport_->Connect(address.address, found->incarnation, deadline);
    if (!peer.ok()) return Status(peer.status()).WithPeer(live->name_);
    live->peer_ = std::move(*peer);
    return std::unique_ptr<Holder>(std::move(live));
  }
  return Status(Code::kUnavailable,
                fmt::format("{} offers no transport that reaches it from here; run this on its "
                            "host",
                            live->name_))
      .WithPeer(live->name_);
}

Result<SumsReply> LiveRank::Sums(VersionId id, std::vector<WantedSum> wanted, Deadline deadline) {
  PeerRequest request;
  request.method = PeerMethod::kSums;
  request.id = id;
  const size_t boxes = wanted.size();
  request.wanted = std::move(wanted);
  const std::string bytes = Encode(request);
  for (;;) {
    auto answer = peer_->Call(bytes, deadline);
    if (answer.ok()) {
      BASCULE_ASSIGN_OR_RETURN(SumsReply reply, DecodeSumsReply(*answer));
      if (reply.sums.size() != boxes) {
        return Status(Code::kVersionMismatch, name_ + " answers as another build would")
            .WithPeer(name_);
      }
      return reply;
    }
    // It lands just now: ask again.
    const bool busy = answer.status().code() == Code::kBusy;
    if (!busy || deadline.Left() < std::chrono::milliseconds(50)) {
      return Status(answer.status()).WithPeer(name_);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

class Here final : public Holder {
 public:
  explicit Here(const Layout& layout) : layout_(layout) {
    for (const Binding& binding : layout.bindings) {
      const LogicalTensor& tensor = layout.tensors[binding.tensor];
      Held& held = tensors_[tensor.name];
      held.shape = tensor.shape;
      held.dtype = binding.dtype;
      if (!binding.box.empty()) held.boxes.push_back(binding.box);
    }
    for (const Alias& alias : layout.aliases) {
      auto target = tensors_.find(alias.target);
      if (target != tensors_.end()) tensors_[alias.name] = target->second;
    }
  }
  [[nodiscard]] std::string name() const override { return "the checkpoint"; }
  [[nodiscard]] bool trainer() const override { return true; }
  Result<SumsReply> Sums(VersionId id, std::vector<WantedSum> wanted, Deadline) override {
    SumsReply reply;
    reply.id = id;
    reply.sums = SumWanted(layout_, wanted, false);
    return reply;
  }

 private:
  const Layout& layout_;
};

// What is to be compared, in the order of names.
struct Step {
  std::vector<WantedSum> wanted;
  uint64_t bytes = 0;
};

// The dtype in which codes of the two are the same where their values are.
std::optional<DType> CommonDType(DType left, DType right, std::optional<DType> chosen) {
  const DType common = chosen ? *chosen : Holds(left, right) ? right : left;
  const bool fits = Castable(left, common) && Castable(right, common) &&
                    (chosen || Holds(left, common)) && (chosen || Holds(right, common));
  return fits ? std::optional(common) : std::nullopt;
}

// A box cut along its first dimensions to pieces of about a step.
void Cut(const Box& box, uint64_t element_bytes, std::vector<Box>* pieces) {
  const auto bytes = static_cast<uint64_t>(box.size()) * element_bytes;
  int widest = 0;
  while (widest < box.ndim() && box[widest].size() <= 1) ++widest;
  if (bytes <= kStepBytes || widest == box.ndim()) {
    pieces->push_back(box);
    return;
  }
  const int64_t middle = box[widest].begin + box[widest].size() / 2;
  Box first = box;
  first[widest].end = middle;
  Box second = box;
  second[widest].begin = middle;
  Cut(first, element_bytes, pieces);
  Cut(second, element_bytes, pieces);
}

Result<std::vector<Step>> StepsOf(const Holder& left, const Holder& right,
                                  const CompareOptions& options, Comparison* result) {
  std::vector<Step> steps(1);
  for (const auto& [name, mine] : left.tensors()) {
    auto found = right.tensors().find(name);
    if (found == right.tensors().end()) {
      result->only_left.push_back(name);
      continue;
    }
    const Held& theirs = found->second;
    if (mine.shape != theirs.shape) {
      return Status(Code::kInvalidArgument,
                    fmt::format("{} has shape [{}] in {}, [{}] in {}", name,
                                fmt::join(mine.shape, ", "), left.name(),
                                fmt::join(theirs.shape, ", "), right.name()))
          .WithTensor(name);
    }
    const auto dtype = CommonDType(mine.dtype, theirs.dtype, options.dtype);
    if (!dtype) {
      result->unreadable.push_back(name);
      continue;
    }
    std::vector<Box> pieces;
    for (const Box& a : mine.boxes) {
      for (const Box& b : theirs.boxes) {
        const Box common = a.Intersect(b);
        if (!common.empty()) Cut(common, static_cast<uint64_t>(DTypeSize(*dtype)), &pieces);
      }
    }
    if (pieces.empty()) result->only_left.push_back(name);
    for (const Box& piece : pieces) {
      const uint64_t bytes =
          static_cast<uint64_t>(piece.size()) * static_cast<uint64_t>(DTypeSize(*dtype));
      const bool full = !steps.back().wanted.empty() && (steps.back().bytes + bytes > kStepBytes ||
                                                         steps.back().wanted.size() >= kStepBoxes);
      if (full) steps.emplace_back();
      steps.back().wanted.push_back({name, piece, *dtype});
      steps.back().bytes += bytes;
    }
  }
  for (const auto& [name, theirs] : right.tensors()) {
    if (!left.tensors().contains(name)) result->only_right.push_back(name);
  }
  return steps;
}

// One version that both sides have: a rollout decides, between trainers the older of the newest.
Result<VersionId> CommonVersion(Holder* left, Holder* right, Deadline deadline) {
  BASCULE_ASSIGN_OR_RETURN(SumsReply mine, left->Sums({}, {}, deadline));
  BASCULE_ASSIGN_OR_RETURN(SumsReply theirs, right->Sums(mine.id, {}, deadline));
  return theirs.id;
}

Result<Comparison> Compare(Holder* left, Holder* right, const CompareOptions& options,
                           Deadline deadline) {
  Comparison result;
  BASCULE_ASSIGN_OR_RETURN(result.version, CommonVersion(left, right, deadline));
  BASCULE_ASSIGN_OR_RETURN(std::vector<Step> steps, StepsOf(*left, *right, options, &result));
  uint64_t total = 0;
  for (const Step& step : steps) total += step.bytes;
  std::string last;
  for (Step& step : steps) {
    if (step.wanted.empty()) continue;
    if (deadline.Passed()) {
      return Status(Code::kDeadlineExceeded,
                    fmt::format("compared {} of {} MB by the deadline; raise it",
                                result.bytes >> 20, total >> 20));
    }
    BASCULE_ASSIGN_OR_RETURN(SumsReply mine, left->Sums(result.version, step.wanted, deadline));
    BASCULE_ASSIGN_OR_RETURN(SumsReply theirs, right->Sums(result.version, step.wanted, deadline));
    for (size_t i = 0; i < step.wanted.size(); ++i) {
      const std::string& name = step.wanted[i].tensor;
      if (name != last) ++result.tensors;
      last = name;
      const auto whole = static_cast<uint64_t>(step.wanted[i].box.size());
      auto note = [&name](std::vector<std::string>* names) {
        if (names->empty() || names->back() != name) names->push_back(name);
      };
      if (mine.sums[i].elements != whole || theirs.sums[i].elements != whole) {
        note(&result.unreadable);
        continue;
      }
      result.elements += whole;
      if (mine.sums[i] != theirs.sums[i]) note(&result.different);
    }
    result.bytes += step.bytes;
    if (options.progress) options.progress(result.bytes, total);
  }
  for (auto* names : {&result.different, &result.unreadable}) {
    std::sort(names->begin(), names->end());
    names->erase(std::unique(names->begin(), names->end()), names->end());
  }
  return result;
}

Status CheckDType(const CompareOptions& options) {
  if (!options.dtype || DTypeSize(*options.dtype) != 0) return Status::Ok();
  return Status(Code::kInvalidArgument, "CompareOptions::dtype is no dtype");
}

}  // namespace

std::string RankName::ToString() const {
  return engine.empty() ? fmt::format("trainer {}", rank)
                        : fmt::format("engine {} rank {}", engine, rank);
}

Result<RankName> ParseRankName(std::string_view text) {
  RankName name;
  std::string_view number;
  const size_t colon = text.rfind(':');
  const size_t word = text.rfind(" rank ");
  if (text.starts_with("trainer ")) {
    number = text.substr(8);
  } else if (text.starts_with("engine ") && word != std::string_view::npos && word > 7) {
    name.engine = text.substr(7, word - 7);
    number = text.substr(word + 6);
  } else if (colon != std::string_view::npos && colon > 0) {
    name.engine = text.substr(0, colon);
    number = text.substr(colon + 1);
    if (name.engine == "trainer") name.engine.clear();
  }
  const char* end = number.data() + number.size();
  const auto parsed = std::from_chars(number.data(), end, name.rank);
  if (number.empty() || parsed.ec != std::errc() || parsed.ptr != end) {
    return Status(Code::kInvalidArgument,
                  fmt::format("\"{}\" names no rank; write trainer:3 for a trainer, e0:1 for rank "
                              "1 of engine e0",
                              text));
  }
  return name;
}

Result<Comparison> CompareRanks(const JobOptions& job, const RankName& left, const RankName& right,
                                const CompareOptions& options, Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(CheckNotForked());
  BASCULE_RETURN_IF_ERROR(CheckDType(options));
  auto directory = MakeGrpcDirectory(job.coordinator, job.token);
  BASCULE_ASSIGN_OR_RETURN(auto mine, LiveRank::Connect(job, left, directory.get(), deadline));
  BASCULE_ASSIGN_OR_RETURN(auto theirs, LiveRank::Connect(job, right, directory.get(), deadline));
  // What a rollout serves decides the version; trainers may hold several.
  if (mine->trainer() && !theirs->trainer()) {
    BASCULE_ASSIGN_OR_RETURN(Comparison turned,
                             Compare(theirs.get(), mine.get(), options, deadline));
    std::swap(turned.only_left, turned.only_right);
    return turned;
  }
  return Compare(mine.get(), theirs.get(), options, deadline);
}

Result<Comparison> CompareWithLayout(const JobOptions& job, const RankName& left,
                                     const Layout& checkpoint, const CompareOptions& options,
                                     Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(CheckNotForked());
  BASCULE_RETURN_IF_ERROR(CheckDType(options));
  BASCULE_RETURN_IF_ERROR(ValidateLayout(checkpoint));
  auto directory = MakeGrpcDirectory(job.coordinator, job.token);
  BASCULE_ASSIGN_OR_RETURN(auto mine, LiveRank::Connect(job, left, directory.get(), deadline));
  Here theirs(checkpoint);
  return Compare(mine.get(), &theirs, options, deadline);
}

}  // namespace bascule
