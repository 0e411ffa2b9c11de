#include "copy/program.h"

#include <algorithm>
#include <string>

namespace bascule {
namespace {

constexpr uint32_t kFree = 0xFFFFFFFF;

uint64_t HashShape(const CopyShape& shape) {
  uint64_t hash = static_cast<uint64_t>(shape.ndim) | static_cast<uint64_t>(shape.source) << 8 |
                  static_cast<uint64_t>(shape.wire) << 16 |
                  static_cast<uint64_t>(shape.target) << 24 |
                  static_cast<uint64_t>(shape.function) << 32;
  const auto mix = [&hash](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  };
  for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) {
    mix(shape.extents[d]);
    mix(shape.source_strides[d]);
    mix(shape.target_strides[d]);
    mix(shape.tensor_strides[d]);
  }
  return hash;
}

void CopyDim(const CopyShape& from, size_t from_dim, CopyShape* to, size_t to_dim) {
  to->extents[to_dim] = from.extents[from_dim];
  to->source_strides[to_dim] = from.source_strides[from_dim];
  to->target_strides[to_dim] = from.target_strides[from_dim];
  to->tensor_strides[to_dim] = from.tensor_strides[from_dim];
}

// True where walking dimension d of `outer` is walking on in the last dimension of `inner`.
bool Continues(const CopyShape& outer, size_t d, const CopyShape& inner, size_t last) {
  const int64_t extent = inner.extents[last];
  return outer.source_strides[d] == extent * inner.source_strides[last] &&
         outer.target_strides[d] == extent * inner.target_strides[last] &&
         outer.tensor_strides[d] == extent * inner.tensor_strides[last];
}

// Dimensions that are left, outermost first; unused entries are zero.
CopyShape Normalize(const CopyShape& shape) {
  CopyShape kept;
  kept.source = shape.source;
  kept.wire = shape.wire;
  kept.target = shape.target;
  kept.function = shape.function;
  // From the inside out into the end of `reversed`, merging on the way.
  CopyShape reversed;
  size_t n = 0;
  for (size_t d = static_cast<size_t>(shape.ndim); d-- > 0;) {
    if (shape.extents[d] == 1) continue;
    if (n > 0 && Continues(shape, d, reversed, n - 1)) {
      reversed.extents[n - 1] *= shape.extents[d];
    } else {
      CopyDim(shape, d, &reversed, n++);
    }
  }
  for (size_t d = 0; d < n; ++d) CopyDim(reversed, n - 1 - d, &kept, d);
  kept.ndim = static_cast<int32_t>(n);
  return kept;
}

struct Extent {
  uint64_t source = 0;  // bytes from the first element's first to the last element's last
  uint64_t target = 0;
};

// False on overflow or a negative stride.
bool SpanOf(const CopyShape& shape, const std::array<int64_t, kMaxDims>& strides, DType dtype,
            uint64_t* span) {
  int64_t last = DTypeSize(dtype);
  for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) {
    int64_t reach = 0;
    if (strides[d] < 0 || __builtin_mul_overflow(shape.extents[d] - 1, strides[d], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  *span = static_cast<uint64_t>(last);
  return true;
}

Status CheckShape(const CopyShape& shape, size_t index, Extent* extent) {
  const auto invalid = [index](const char* what) {
    return Status(Code::kInvalidArgument,
                  "copy shape " + std::to_string(index) + ": " + std::string(what));
  };
  if (shape.ndim < 0 || shape.ndim > kMaxDims) return invalid("bad number of dimensions");
  int64_t elements = 1;
  for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) {
    if (shape.extents[d] < 1) return invalid("empty dimension");
    if (shape.tensor_strides[d] < 0) return invalid("negative tensor stride");
    if (__builtin_mul_overflow(elements, shape.extents[d], &elements)) {
      return invalid("too many elements");
    }
  }
  if (DTypeSize(shape.source) == 0 || DTypeSize(shape.wire) == 0 || DTypeSize(shape.target) == 0) {
    return invalid("unknown dtype");
  }
  if (!Castable(shape.source, shape.wire)) return invalid("source cannot be cast to wire");
  if (!Castable(shape.wire, shape.target)) return invalid("wire cannot be cast to target");
  if (shape.function > LandingFunction::kNegExp) return invalid("unknown landing function");
  if (shape.function != LandingFunction::kNone && !Castable(shape.wire, DType::kF32)) {
    return invalid("a landing function needs a real dtype");
  }
  if (!SpanOf(shape, shape.source_strides, shape.source, &extent->source)) {
    return invalid("bad source strides");
  }
  if (!SpanOf(shape, shape.target_strides, shape.target, &extent->target)) {
    return invalid("bad target strides");
  }
  return Status::Ok();
}

bool Inside(int64_t offset, uint64_t span, uint64_t bytes) {
  return offset >= 0 && span <= bytes && static_cast<uint64_t>(offset) <= bytes - span;
}

}  // namespace

void CopyProgram::RebuildIndex(size_t slots) {
  index_.assign(slots, kFree);
  for (uint32_t i = 0; i < shapes.size(); ++i) {
    size_t slot = HashShape(shapes[i]) & (slots - 1);
    while (index_[slot] != kFree) slot = (slot + 1) & (slots - 1);
    index_[slot] = i;
  }
  indexed_ = shapes.size();
}

uint32_t CopyProgram::Intern(const CopyShape& shape) {
  // Most operations have the shape of the one before.
  if (!ops.empty() && ops.back().shape < shapes.size() && shapes[ops.back().shape] == shape) {
    return ops.back().shape;
  }
  if (indexed_ != shapes.size() || (shapes.size() + 1) * 2 > index_.size()) {
    size_t slots = std::max<size_t>(64, index_.size());
    while (slots < (shapes.size() + 1) * 4) slots *= 2;
    RebuildIndex(slots);
  }
  const size_t mask = index_.size() - 1;
  size_t slot = HashShape(shape) & mask;
  for (; index_[slot] != kFree; slot = (slot + 1) & mask) {
    if (shapes[index_[slot]] == shape) return index_[slot];
  }
  index_[slot] = static_cast<uint32_t>(shapes.size());
  shapes.push_back(shape);
  indexed_ = shapes.size();
  return index_[slot];
}

void CopyProgram::Add(const CopyShape& shape, CopyOp op) {
  for (size_t d = 0; d < static_cast<size_t>(shape.ndim); ++d) {
    if (shape.extents[d] <= 0) return;
  }
  op.shape = Intern(Normalize(shape));
  ops.push_back(op);
}

uint64_t CopyProgram::Bytes() const {
  std::vector<uint64_t> bytes_of(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    uint64_t bytes = static_cast<uint64_t>(DTypeSize(shapes[i].source)) +
                     static_cast<uint64_t>(DTypeSize(shapes[i].target));
    for (size_t d = 0; d < static_cast<size_t>(shapes[i].ndim); ++d) {
      bytes *= static_cast<uint64_t>(shapes[i].extents[d]);
    }
    bytes_of[i] = bytes;
  }
  uint64_t total = 0;
  for (const CopyOp& op : ops) total += bytes_of[op.shape];
  return total;
}

Status CheckProgram(const CopyProgram& program, std::span<const ConstMemory> sources,
                    std::span<const Memory> targets,
                    const std::function<std::string(uint64_t)>& name_of) {
  std::vector<Extent> extents(program.shapes.size());
  for (size_t i = 0; i < program.shapes.size(); ++i) {
    BASCULE_RETURN_IF_ERROR(CheckShape(program.shapes[i], i, &extents[i]));
  }
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const CopyOp& op = program.ops[i];
    const char* wrong = nullptr;
    if (op.shape >= program.shapes.size()) {
      wrong = "no such shape";
    } else if (op.source_base >= sources.size()) {
      wrong = "no such source";
    } else if (op.target_base >= targets.size()) {
      wrong = "no such target";
    } else if (op.sum != kNoSum && op.sum >= program.sums) {
      wrong = "no such sum";
    } else if (op.first_element < 0) {
      wrong = "negative first element";
    } else if (!Inside(op.source_offset, extents[op.shape].source, sources[op.source_base].bytes)) {
      wrong = "outside its source";
    } else if (!Inside(op.target_offset, extents[op.shape].target, targets[op.target_base].bytes)) {
      wrong = "outside its target";
    }
    if (wrong != nullptr) {
      return Status(Code::kInvalidArgument, "copy operation " + std::to_string(i) + ": " + wrong)
          .WithTensor(name_of ? name_of(op.tensor_key) : "");
    }
  }
  return Status::Ok();
}

}  // namespace bascule
