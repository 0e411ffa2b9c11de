// One descriptor of a plan is wrong, in a running session: found at the first version of a plan at
// once, later within the sixteen versions of the rotation, by a check that does not share it.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "session/program_fault.h"
#include "tests/session/job_fixture.h"

namespace bascule {
namespace {

using testing::Soon;
using testing::ToyJob;

enum class Mutation { kDestination, kSourceRow, kDropped, kDoubled };

struct Case {
  ProgramKind kind = ProgramKind::kLanding;
  Mutation mutation = Mutation::kDestination;
  uint32_t op = 0;  // which operation, modulo their number
};

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  static const char* const kinds[] = {"Snapshot", "Landing", "Commit"};
  static const char* const mutations[] = {"Destination", "SourceRow", "Dropped", "Doubled"};
  return std::string(kinds[static_cast<int>(info.param.kind)]) +
         mutations[static_cast<int>(info.param.mutation)] + std::to_string(info.param.op);
}

// Damages one operation. An offset is moved towards the side where there is room.
void Mutate(const Case& what, CopyProgram* program, std::vector<uint32_t>* first_op) {
  const size_t at = what.op % program->ops.size();
  CopyOp& op = program->ops[at];
  switch (what.mutation) {
    case Mutation::kDestination: op.target_offset += op.target_offset >= 16 ? -16 : 16; break;
    case Mutation::kSourceRow: op.source_offset += op.source_offset >= 32 ? -32 : 32; break;
    case Mutation::kDropped:
      program->ops.erase(program->ops.begin() + static_cast<std::ptrdiff_t>(at));
      for (uint32_t& first : *first_op) first -= first > at ? 1 : 0;
      break;
    case Mutation::kDoubled: {
      const CopyOp twice = op;
      program->ops.insert(program->ops.begin() + static_cast<std::ptrdiff_t>(at), twice);
      for (uint32_t& first : *first_op) first += first > at ? 1 : 0;
      break;
    }
  }
}

class ProgramFaultTest : public ::testing::TestWithParam<Case> {
 protected:
  ProgramFaultTest() {
    job_.AddTrainers(2);
    job_.AddEngine("e0", 2, 1);
    for (const testing::TestTensor& tensor : testing::ToyModel()) names_.insert(tensor.name);
  }
  ~ProgramFaultTest() override { SetProgramFault({}); }

  // From now on one operation of one rank is wrong.
  void Break() {
    const Case what = GetParam();
    const std::string victim =
        what.kind == ProgramKind::kSnapshot ? "trainer 1" : "engine e0 rank 1";
    SetProgramFault([what, victim](ProgramKind kind, const std::string& rank, CopyProgram* program,
                                   std::vector<uint32_t>* first_op) {
      if (kind == what.kind && rank == victim) Mutate(what, program, first_op);
    });
  }

  // Publishes and updates as a job does. The error of the first call that found something.
  // `heals`: ranks may be poisoned before it.
  Status UpdateOnce(uint64_t version, bool heals = false) {
    for (size_t rank = 0; rank < job_.senders.size(); ++rank) {
      job_.trainer_memory[rank]->Fill(version);
      auto publication = job_.senders[rank]->Publish(version, Soon());
      if (!publication.ok()) return publication.status();
    }
    std::vector<std::shared_ptr<Update>> updates;
    for (auto& receiver : job_.receivers) {
      BASCULE_ASSIGN_OR_RETURN(auto update, receiver->Poll(Soon()));
      if (!update) return Status(Code::kInternal, "nothing was offered");
      updates.push_back(update);
    }
    for (auto& update : updates) BASCULE_RETURN_IF_ERROR(update->Stage(Soon()));
    Status found;
    for (auto& update : updates) {
      Status staged = update->WaitStaged(Soon());
      if (found.ok() && staged.code() == Code::kDataLoss) found = staged;
    }
    // The audit after the last update has ended: staging came after it, on the same thread.
    if (!heals) {
      for (auto& receiver : job_.receivers) {
        Status servable = receiver->Servable();
        if (found.ok() && servable.code() == Code::kPoisoned) found = servable;
      }
    }
    for (auto& update : updates) {
      Status committed = update->Commit(Soon());
      if (found.ok() && !committed.ok()) found = committed;
    }
    return found;
  }
  ToyJob job_;
  std::set<std::string> names_;
};

TEST_P(ProgramFaultTest, IsFoundAtTheFirstVersion) {
  Break();
  Status found = UpdateOnce(1);
  EXPECT_FALSE(found.ok()) << "a wrong program was not found";
  EXPECT_TRUE(names_.contains(found.tensor())) << found.ToString();
  SetProgramFault({});
  // With the right program the job goes on.
  EXPECT_EQ(UpdateOnce(2, true).ToString(), Status::Ok().ToString());
  for (auto& memory : job_.rollout_memory) EXPECT_EQ(memory->Wrong(2), 0);
}

TEST_P(ProgramFaultTest, IsFoundLaterWithinTheRotation) {
  ASSERT_EQ(UpdateOnce(1).ToString(), Status::Ok().ToString());
  ASSERT_EQ(UpdateOnce(2).ToString(), Status::Ok().ToString());
  Break();
  Status found;
  uint64_t version = 3;
  // Sixteen versions, and one more that shows what the audit of the last one found.
  for (; version < 3 + 17 && found.ok(); ++version) found = UpdateOnce(version);
  EXPECT_FALSE(found.ok()) << "a wrong program was not found in 16 versions";
  EXPECT_TRUE(names_.contains(found.tensor())) << found.ToString();
  SetProgramFault({});
  EXPECT_EQ(UpdateOnce(version, true).ToString(), Status::Ok().ToString());
  for (auto& memory : job_.rollout_memory) EXPECT_EQ(memory->Wrong(version), 0);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (ProgramKind kind : {ProgramKind::kSnapshot, ProgramKind::kLanding}) {
    for (Mutation mutation :
         {Mutation::kDestination, Mutation::kSourceRow, Mutation::kDropped, Mutation::kDoubled}) {
      for (uint32_t op : {0U, 3U, 7U}) cases.push_back({kind, mutation, op});
    }
  }
  // The switch: a copy that is made twice is no fault.
  for (Mutation mutation : {Mutation::kDestination, Mutation::kSourceRow, Mutation::kDropped}) {
    for (uint32_t op : {0U, 3U, 7U}) cases.push_back({ProgramKind::kCommit, mutation, op});
  }
  return cases;
}

// A rank with a landing function: what landed of that tensor is compared before the function, the
// other tensors in the live storages.
class LandingFunctionTest : public ProgramFaultTest {
 protected:
  static constexpr uint32_t kNorm = 3;  // model.layers.0.norm.weight
};

TEST_P(LandingFunctionTest, DoesNotKeepTheOthersFromTheAudit) {
  ToyJob job;
  job.AddTrainers(1, -1);
  job.rollout_memory.push_back(
      std::make_unique<testing::RankMemory>(testing::ToyModel(), 0, 1, -1));
  testing::RankMemory& memory = *job.rollout_memory.back();
  memory.layout.bindings[kNorm].function = LandingFunction::kNegExp;
  auto receiver = WeightReceiver::Connect(
      job.job, {.engine = "e0", .world_size = 1, .shadow = ShadowMode::kHost}, memory.layout,
      Soon());
  ASSERT_TRUE(receiver.ok()) << receiver.status().ToString();
  job.receivers.push_back(std::move(*receiver));

  Status found;
  uint64_t version = 1;
  auto update_once = [&] {
    job.trainer_memory[0]->Fill(version);
    auto& norm = job.trainer_memory[0]->storage[kNorm];
    for (size_t i = 0; i < norm.size(); ++i) norm[i] = (i + version) % 2 == 0 ? 0x0000 : 0x3F80;
    auto publication = job.senders[0]->Publish(version, Soon());
    if (!publication.ok()) return publication.status();
    BASCULE_ASSIGN_OR_RETURN(auto update, job.receivers[0]->Poll(Soon()));
    BASCULE_RETURN_IF_ERROR(update->Stage(Soon()));
    BASCULE_RETURN_IF_ERROR(update->WaitStaged(Soon()));
    Status servable = job.receivers[0]->Servable();
    if (servable.code() == Code::kPoisoned) return servable;
    BASCULE_RETURN_IF_ERROR(update->Commit(Soon()));
    return version <= 3 ? job.receivers[0]->Audit(Soon()) : Status::Ok();
  };
  for (; version <= 3; ++version) ASSERT_EQ(update_once().ToString(), Status::Ok().ToString());
  for (size_t i = 0; i < memory.storage[kNorm].size(); ++i) {
    // -exp(0) = -1 and -exp(1) = -2.718 in bf16; the last version was 3.
    const uint16_t want = (i + 3) % 2 == 0 ? 0xBF80 : 0xC02E;
    EXPECT_EQ(memory.storage[kNorm][i], want) << i;
  }

  const Case what = GetParam();
  SetProgramFault([&what](ProgramKind kind, const std::string&, CopyProgram* program,
                          std::vector<uint32_t>* first_op) {
    if (kind == what.kind) Mutate(what, program, first_op);
  });
  for (; version <= 3 + 17 && found.ok(); ++version) found = update_once();
  EXPECT_FALSE(found.ok()) << "a wrong program was not found in 16 versions";
  EXPECT_TRUE(names_.contains(found.tensor())) << found.ToString();
}

std::vector<Case> LandingFunctionCases() {
  std::vector<Case> cases;
  for (uint32_t op = 0; op < 8; ++op) {
    cases.push_back({ProgramKind::kSnapshot, Mutation::kSourceRow, op});
    cases.push_back({ProgramKind::kLanding, Mutation::kSourceRow, op});
    cases.push_back({ProgramKind::kCommit, Mutation::kDropped, op});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Descriptors, LandingFunctionTest,
                         ::testing::ValuesIn(LandingFunctionCases()), NameOf);
INSTANTIATE_TEST_SUITE_P(Descriptors, ProgramFaultTest, ::testing::ValuesIn(Cases()), NameOf);

}  // namespace
}  // namespace bascule
