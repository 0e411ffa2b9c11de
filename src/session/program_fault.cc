#include "session/program_fault.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace bascule {
namespace {

std::atomic<bool> active{false};
std::mutex mutex;
ProgramFault current;

}  // namespace

void SetProgramFault(ProgramFault fault) {
  const std::lock_guard lock(mutex);
  active = static_cast<bool>(fault);
  current = std::move(fault);
}

bool HasProgramFault() { return active; }

void ApplyProgramFault(ProgramKind kind, const std::string& rank, CopyProgram* program,
                       std::vector<uint32_t>* first_op) {
  const std::lock_guard lock(mutex);
  if (current) current(kind, rank, program, first_op);
}

}  // namespace bascule
