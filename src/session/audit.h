// Which elements which trainer counts in an audit, and the rows that both sides compare. Made from
// templates alone: no plan, no copy program.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "bascule/status.h"
#include "digest/audit.h"
#include "session/membership.h"
#include "session/messages.h"

namespace bascule {

// A box of a trainer's tensor that this trainer counts for one receiver.
struct CountedBox {
  uint32_t tensor = 0;  // index in the trainer's template's names
  DType wire = DType::kF32;
  Box box;  // inside one box that the trainer holds
};

// What trainer `self` (member id) counts for rollout `receiver` (member id): the elements that the
// receiver's boxes cover and of which `self` is the lowest-numbered holder among `live` (trainer
// ranks, ascending).
[[nodiscard]] std::vector<CountedBox> CountedFor(const World& world, uint32_t self,
                                                 uint32_t receiver,
                                                 const std::vector<uint32_t>& live);

// The sum of a wanted box over places of its tensor (shape: the whole tensor's), each element
// counted once. `live`: the places are a destination's storages, and a value that the wire dtype
// does not hold makes the sum equal to none.
[[nodiscard]] Sum SumWanted(const WantedSum& wanted, std::span<const StridedBox> places,
                            std::span<const int64_t> shape, bool live);
// The same for each wanted box, over the bindings of a layout; bindings with a landing function
// cannot be read back and are left out. An alias counts as a tensor of its own name.
[[nodiscard]] std::vector<Sum> SumWanted(const Layout& layout, std::span<const WantedSum> wanted,
                                         bool live);

// Sums by row name.
using AuditRows = std::map<std::string, Sum>;
[[nodiscard]] std::string RowOf(const std::string& tensor, AuditScope scope);
[[nodiscard]] bool InScope(const std::string& tensor, AuditScope scope, uint64_t version);

}  // namespace bascule
