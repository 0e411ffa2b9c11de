#include <utility>

#include "plan/plan.h"
#include "plan/prepared.h"
#include "plan/serialize.h"

namespace bascule {
namespace {

class PreparedPlanner : public Planner {
 public:
  explicit PreparedPlanner(plan::Prepared prepared) : prepared_(std::move(prepared)) {}

  [[nodiscard]] const World& world() const override { return prepared_.world; }
  [[nodiscard]] ContentDigest digest() const override { return prepared_.digest; }
  [[nodiscard]] Part PartOf(uint32_t member) const override {
    return plan::MakePart(prepared_, member);
  }
  [[nodiscard]] Explanation Explain() const override { return plan::ExplainPlan(prepared_); }
  [[nodiscard]] Bound ComputeBound(const Rates& rates) const override {
    return plan::BoundOf(prepared_, rates);
  }

 private:
  plan::Prepared prepared_;
};

void WriteTensor(const PartTensor& tensor, plan::Writer* out) {
  out->Text(tensor.name);
  out->U32(tensor.destination_class);
  out->U32(tensor.destination_name);
  out->List(tensor.source_names);
  for (DType dtype : {tensor.published, tensor.wire, tensor.destination}) {
    out->U32(static_cast<uint32_t>(dtype));
  }
}

void WriteBox(const Box& box, plan::Writer* out) {
  out->U32(static_cast<uint32_t>(box.ndim()));
  for (int d = 0; d < box.ndim(); ++d) {
    out->U64(static_cast<uint64_t>(box[d].begin));
    out->U64(static_cast<uint64_t>(box[d].end));
  }
}

}  // namespace

Result<std::shared_ptr<const Planner>> Planner::Prepare(World world) {
  BASCULE_ASSIGN_OR_RETURN(plan::Prepared prepared, plan::PrepareWorld(std::move(world)));
  return std::shared_ptr<const Planner>(std::make_shared<PreparedPlanner>(std::move(prepared)));
}

ContentDigest PartDigest(const Part& part) {
  plan::Writer out;
  out.U32(part.member);
  out.U64(part.tensors.size());
  for (const PartTensor& tensor : part.tensors) WriteTensor(tensor, &out);
  out.U64(part.boxes.size());
  for (const Box& box : part.boxes) WriteBox(box, &out);
  out.U64(part.pieces.size());
  for (const Piece& piece : part.pieces) {
    out.U32(piece.tensor);
    out.U32(piece.box);
  }
  out.U64(part.chunks.size());
  for (const Chunk& chunk : part.chunks) {
    out.U32(chunk.source);
    out.U32(chunk.first_piece);
    out.U32(chunk.piece_count);
    out.U64(chunk.bytes);
    out.U64(chunk.elements);
  }
  out.U64(part.bytes);
  return DigestOf(out.bytes());
}

const char* Bound::binding_term() const {
  const std::pair<int64_t, const char*> terms[] = {{sole_source, "sole source"},
                                                   {trainer_egress, "trainer egress"},
                                                   {all_egress, "all egress"},
                                                   {node_ingress, "node ingress"},
                                                   {memory, "memory"}};
  const auto* worst = &terms[0];
  for (const auto& term : terms) {
    if (term.first > worst->first) worst = &term;
  }
  return worst->first == 0 ? "none" : worst->second;
}

}  // namespace bascule
