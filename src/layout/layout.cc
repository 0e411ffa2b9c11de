#include "bascule/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "layout/checked.h"
#include "layout/runs.h"
#include "layout/world_template.h"

namespace bascule {

std::string Box::ToString() const {
  std::string text = "[";
  for (int d = 0; d < ndim_; ++d) {
    text += fmt::format("{}{}:{}", d == 0 ? "" : ", ", (*this)[d].begin, (*this)[d].end);
  }
  return text + "]";
}

int64_t Layout::FindTensor(const std::string& name) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) return static_cast<int64_t>(i);
  }
  return -1;
}

namespace {

Status Invalid(const LogicalTensor& tensor, std::string message) {
  return Status(Code::kInvalidArgument, std::move(message)).WithTensor(tensor.name);
}

Status CheckName(std::string_view name, std::string_view what) {
  if (!name.empty() && name.size() <= kMaxNameBytes) return Status::Ok();
  return Status(Code::kInvalidArgument, fmt::format("{} has a name of {} bytes; give it 1 to {}",
                                                    what, name.size(), kMaxNameBytes));
}

Status NoTarget(const Alias& alias) {
  return Status(Code::kInvalidArgument,
                fmt::format("is an alias of '{}', which is no tensor of this layout or its world; "
                            "correct the name, or leave the alias to the rank that stores it",
                            alias.target))
      .WithTensor(alias.name);
}

// `names` are those of the layout's tensors.
Status CheckAliases(const Layout& layout, const std::unordered_set<std::string_view>& names) {
  std::unordered_set<std::string_view> aliases;
  for (const Alias& alias : layout.aliases) {
    BASCULE_RETURN_IF_ERROR(CheckName(alias.name, "an alias"));
    BASCULE_RETURN_IF_ERROR(CheckName(alias.target, "the target of an alias"));
    if (names.contains(alias.name)) {
      return Status(Code::kInvalidArgument,
                    "is an alias and a tensor; drop the tensor if the weights are tied")
          .WithTensor(alias.name);
    }
    if (!aliases.insert(alias.name).second) {
      return Status(Code::kInvalidArgument, "two aliases have this name").WithTensor(alias.name);
    }
  }
  for (const Alias& alias : layout.aliases) {
    if (aliases.contains(alias.target)) {
      return Status(Code::kInvalidArgument,
                    "is an alias of the alias " + alias.target + "; name the stored tensor")
          .WithTensor(alias.name);
    }
    const bool elsewhere = layout.world != nullptr && layout.world->Find(alias.target) >= 0;
    if (!names.contains(alias.target) && !elsewhere) return NoTarget(alias);
  }
  if (layout.world == nullptr) return Status::Ok();
  for (const Alias& alias : layout.world->aliases) {
    if (layout.world->Find(alias.target) < 0 && !names.contains(alias.target)) {
      return NoTarget(alias);
    }
  }
  return Status::Ok();
}

Status CheckTensors(const Layout& layout) {
  std::unordered_set<std::string_view> names;
  for (const LogicalTensor& tensor : layout.tensors) {
    BASCULE_RETURN_IF_ERROR(CheckName(tensor.name, "a tensor"));
    if (!names.insert(tensor.name).second) {
      return Invalid(tensor, "two tensors have this name; list a tensor once and bind it twice");
    }
    if (tensor.shape.size() > kMaxDims) {
      return Invalid(tensor,
                     fmt::format("has {} dimensions; at most {} are supported: merge dimensions "
                                 "that are never cut",
                                 tensor.shape.size(), kMaxDims));
    }
    if (DTypeSize(tensor.dtype) == 0) {
      return Invalid(tensor, fmt::format("unknown dtype {}", static_cast<int>(tensor.dtype)));
    }
    if (!TensorBytes(tensor.shape, tensor.dtype)) {
      return Invalid(tensor, fmt::format("shape [{}] has a negative extent or more than 2^63 bytes",
                                         fmt::join(tensor.shape, ", ")));
    }
  }
  return CheckAliases(layout, names);
}

// The end of a binding's memory in bytes from the start of the buffer; nullopt: beyond int64.
std::optional<int64_t> EndOf(const Binding& binding) {
  std::optional<int64_t> end = CheckedAdd(binding.byte_offset, DTypeSize(binding.dtype));
  for (int d = 0; d < binding.box.ndim() && end; ++d) {
    int64_t stride = binding.byte_strides[static_cast<size_t>(d)];
    std::optional<int64_t> span = CheckedMultiply(binding.box[d].size() - 1, stride);
    end = span ? CheckedAdd(*end, *span) : std::nullopt;
  }
  return end;
}

Status CheckBindingType(const Binding& binding, const LogicalTensor& tensor, Side side) {
  if (DTypeSize(binding.dtype) == 0) {
    return Invalid(tensor, fmt::format("unknown dtype {}", static_cast<int>(binding.dtype)));
  }
  if (side == Side::kDestination && binding.dtype != tensor.dtype) {
    return Invalid(tensor,
                   fmt::format("memory is {} but the tensor is declared {}; a destination's tensor "
                               "has the dtype of its memory",
                               DTypeName(binding.dtype), DTypeName(tensor.dtype)));
  }
  if (!Castable(binding.dtype, tensor.dtype)) {
    return Invalid(tensor, fmt::format("memory is {}, which cannot be cast to {} to publish",
                                       DTypeName(binding.dtype), DTypeName(tensor.dtype)));
  }
  if (binding.function != LandingFunction::kNone) {
    if (side == Side::kSource) {
      return Invalid(tensor, "a landing function belongs to a destination's binding");
    }
    if (!Castable(binding.dtype, DType::kF32)) {
      return Invalid(tensor, fmt::format("a landing function needs F32, BF16 or F16, not {}",
                                         DTypeName(binding.dtype)));
    }
  }
  return Status::Ok();
}

Status CheckBinding(const Layout& layout, const Binding& binding, size_t index, Side side) {
  if (binding.tensor >= layout.tensors.size() || binding.buffer >= layout.buffers.size()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("binding {} names tensor {} of {} and buffer {} of {}", index, binding.tensor,
                    layout.tensors.size(), binding.buffer, layout.buffers.size()));
  }
  const LogicalTensor& tensor = layout.tensors[binding.tensor];
  const Buffer& buffer = layout.buffers[binding.buffer];
  BASCULE_RETURN_IF_ERROR(CheckBindingType(binding, tensor, side));
  if (binding.box.ndim() != static_cast<int>(tensor.shape.size())) {
    return Invalid(tensor,
                   fmt::format("box {} has {} dimensions, the tensor {}", binding.box.ToString(),
                               binding.box.ndim(), tensor.shape.size()));
  }
  for (int d = 0; d < binding.box.ndim(); ++d) {
    const Interval& dim = binding.box[d];
    if (dim.begin < 0 || dim.end < dim.begin || dim.end > tensor.shape[static_cast<size_t>(d)]) {
      return Invalid(tensor, fmt::format("box {} reaches outside the shape [{}]",
                                         binding.box.ToString(), fmt::join(tensor.shape, ", ")));
    }
    if (dim.size() > 1 && binding.byte_strides[static_cast<size_t>(d)] < 0) {
      return Invalid(tensor, fmt::format("stride {} of dimension {} is negative; bind the memory "
                                         "unflipped",
                                         binding.byte_strides[static_cast<size_t>(d)], d));
    }
  }
  if (binding.box.empty()) return Status::Ok();
  std::optional<int64_t> end = EndOf(binding);
  if (binding.byte_offset < 0 || !end || static_cast<uint64_t>(*end) > buffer.bytes) {
    return Invalid(tensor, fmt::format("box {} at byte {} ends at byte {}, outside buffer '{}' of "
                                       "{} bytes; check offset, strides and dtype",
                                       binding.box.ToString(), binding.byte_offset,
                                       end ? fmt::to_string(*end) : std::string("over 2^63"),
                                       buffer.name, buffer.bytes));
  }
  return Status::Ok();
}

// Two overlapping boxes of a list, or nullopt. Sweeps along the dimension with the most cuts.
std::optional<std::pair<Box, Box>> FindOverlap(std::vector<Box> boxes) {
  if (boxes.size() < 2) return std::nullopt;
  if (boxes[0].ndim() == 0) return std::pair(boxes[0], boxes[1]);
  int sweep = 0;
  size_t most = 0;
  for (int d = 0; d < boxes[0].ndim(); ++d) {
    std::unordered_set<int64_t> begins;
    for (const Box& box : boxes) begins.insert(box[d].begin);
    if (begins.size() > most) {
      most = begins.size();
      sweep = d;
    }
  }
  std::sort(boxes.begin(), boxes.end(),
            [sweep](const Box& a, const Box& b) { return a[sweep].begin < b[sweep].begin; });
  std::vector<const Box*> active;
  for (const Box& box : boxes) {
    std::erase_if(active,
                  [&](const Box* other) { return (*other)[sweep].end <= box[sweep].begin; });
    for (const Box* other : active) {
      if (!box.Intersect(*other).empty()) return std::pair(*other, box);
    }
    active.push_back(&box);
  }
  return std::nullopt;
}

Status CheckNoOverlap(const Layout& layout) {
  std::vector<std::vector<Box>> boxes(layout.tensors.size());
  for (const Binding& binding : layout.bindings) {
    if (!binding.box.empty()) boxes[binding.tensor].push_back(binding.box);
  }
  for (size_t t = 0; t < boxes.size(); ++t) {
    if (auto overlap = FindOverlap(std::move(boxes[t]))) {
      return Invalid(layout.tensors[t],
                     fmt::format("a source binds boxes {} and {}, which overlap; bind each element "
                                 "once and declare tied weights as aliases",
                                 overlap->first.ToString(), overlap->second.ToString()));
    }
  }
  return Status::Ok();
}

Status CheckPadding(const Layout& layout) {
  for (const Padding& padding : layout.padding) {
    if (padding.buffer >= layout.buffers.size()) {
      return Status(Code::kInvalidArgument, fmt::format("padding names buffer {} of {}",
                                                        padding.buffer, layout.buffers.size()));
    }
    const Buffer& buffer = layout.buffers[padding.buffer];
    if (padding.bytes == 0 || padding.count == 0) continue;
    if (padding.count > 1 && padding.stride < padding.bytes) {
      return Status(Code::kInvalidArgument,
                    fmt::format("padding of buffer '{}': runs of {} bytes overlap at stride {}",
                                buffer.name, padding.bytes, padding.stride));
    }
    unsigned __int128 end = padding.offset;
    end += padding.bytes;
    end += static_cast<unsigned __int128>(padding.count - 1) * padding.stride;
    if (end > buffer.bytes) {
      return Status(Code::kInvalidArgument,
                    fmt::format("padding at byte {} ({} runs of {} bytes, stride {}) reaches "
                                "outside buffer '{}' of {} bytes",
                                padding.offset, padding.count, padding.bytes, padding.stride,
                                buffer.name, buffer.bytes));
    }
  }
  return Status::Ok();
}

}  // namespace

Status ValidateLayout(const Layout& layout, Side side) {
  BASCULE_RETURN_IF_ERROR(CheckTensors(layout));
  for (const Buffer& buffer : layout.buffers) {
    if (buffer.bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Status(Code::kInvalidArgument,
                    fmt::format("buffer '{}' has {} bytes, over 2^63", buffer.name, buffer.bytes));
    }
  }
  for (size_t i = 0; i < layout.bindings.size(); ++i) {
    BASCULE_RETURN_IF_ERROR(CheckBinding(layout, layout.bindings[i], i, side));
  }
  BASCULE_RETURN_IF_ERROR(CheckPadding(layout));
  for (const std::string& pattern : layout.unused) {
    BASCULE_RETURN_IF_ERROR(CheckName(pattern, "an unused pattern"));
  }
  if (side == Side::kSource) BASCULE_RETURN_IF_ERROR(CheckNoOverlap(layout));
  if (layout.world == nullptr) return Status::Ok();
  return CheckAgainstTemplate(layout, *layout.world, layout.coordinates);
}

}  // namespace bascule
