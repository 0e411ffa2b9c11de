// Damage to the copy programs of sessions in this process, by which tests prove that a planner's or
// a builder's mistake is caught: the checks must not share what they check. Nothing sets it in
// production.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "copy/program.h"

namespace bascule {

enum class ProgramKind { kSnapshot, kLanding, kCommit };

// Is given a copy of each program right before it runs. `first_op` are the positions in `ops` that
// the landing's chunks begin at; empty for other kinds. Called by any thread.
using ProgramFault = std::function<void(ProgramKind kind, const std::string& rank,
                                        CopyProgram* program, std::vector<uint32_t>* first_op)>;
// Replaces the fault; an empty function ends it. Not while a session copies.
void SetProgramFault(ProgramFault fault);
[[nodiscard]] bool HasProgramFault();
void ApplyProgramFault(ProgramKind kind, const std::string& rank, CopyProgram* program,
                       std::vector<uint32_t>* first_op);

// The program to run: `program` itself, or `copy`, made a damaged copy of it.
inline const CopyProgram* WithFault(ProgramKind kind, const std::string& rank,
                                    const CopyProgram* program, CopyProgram* copy) {
  if (!HasProgramFault()) return program;
  std::vector<uint32_t> none;
  *copy = *program;
  ApplyProgramFault(kind, rank, copy, &none);
  return copy;
}

}  // namespace bascule
