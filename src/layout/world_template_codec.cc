// Canonical form and canonical bytes of world templates.
//
// Format, version 1 (integers are LEB128 varints; texts are a length and bytes):
//   "BWT" and the version byte
//   axes:    count, sizes
//   lists:   count; per list its entries: count; per entry its intervals: count; per interval
//            zigzag(begin - end of the interval before it in the list, 0 at first), size
//   classes: count; per class ndim, shape, dtype byte, derived byte, products: count; per product
//            dims: count; per dim list, axes: count, axes
//   names:   count; per name the bytes it shares with the one before, the rest as text, class.
//            Shared bytes are capped at 8 x (rest + 1), so that input bounds what it expands to.
//   aliases: count; name, target.   unused: count; pattern
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "layout/checked.h"
#include "layout/world_template.h"

namespace bascule {

std::string ContentDigest::ToString() const { return fmt::format("{:016x}{:016x}", high, low); }

ContentDigest DigestOf(std::string_view bytes) {
  XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

namespace {

constexpr std::string_view kMagic{"BWT\1", 4};
constexpr size_t kSharedPerByte = 8;

void PutVarint(uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

void PutText(std::string_view text, std::string* out) {
  PutVarint(text.size(), out);
  out->append(text);
}

void PutList(const IntervalList& list, std::string* out) {
  PutVarint(list.size(), out);
  int64_t end = 0;
  for (uint32_t entry = 0; entry < list.size(); ++entry) {
    PutVarint(list.Entry(entry).size(), out);
    for (const Interval& interval : list.Entry(entry)) {
      int64_t delta = interval.begin - end;
      PutVarint(static_cast<uint64_t>(delta) << 1 ^ static_cast<uint64_t>(delta >> 63), out);
      PutVarint(static_cast<uint64_t>(interval.size()), out);
      end = interval.end;
    }
  }
}

void PutClass(const TemplateClass& tensor_class, const std::vector<uint32_t>& list_number,
              std::string* out) {
  PutVarint(tensor_class.shape.size(), out);
  for (int64_t extent : tensor_class.shape) PutVarint(static_cast<uint64_t>(extent), out);
  out->push_back(static_cast<char>(tensor_class.dtype));
  out->push_back(tensor_class.derived ? '\1' : '\0');
  PutVarint(tensor_class.products.size(), out);
  for (const BoxProduct& product : tensor_class.products) {
    PutVarint(product.dims.size(), out);
    for (const DimSelect& select : product.dims) {
      PutVarint(list_number[select.list], out);
      PutVarint(select.axes.size(), out);
      for (uint32_t axis : select.axes) PutVarint(axis, out);
    }
  }
}

constexpr uint32_t kUnnumbered = 0xffffffff;

// The canonical numbering of a template.
struct CanonicalOrder {
  std::vector<uint32_t> names;         // old indices, sorted by name
  std::vector<uint32_t> classes;       // old index of each new class
  std::vector<uint32_t> lists;         // old index of each new list
  std::vector<uint32_t> class_number;  // new index of each old class, or kUnnumbered
  std::vector<uint32_t> list_number;   // new index of each old list, or kUnnumbered
};

std::vector<uint32_t> SortedNames(const std::vector<std::string>& names) {
  std::vector<uint32_t> order(names.size());
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(names.begin(), names.end())) {
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return names[a] < names[b]; });
  }
  return order;
}

CanonicalOrder OrderOf(const WorldTemplate& world) {
  // Representatives: the first of equal lists, and of classes that are equal once lists are.
  std::unordered_map<std::string, uint32_t> seen;
  std::vector<uint32_t> same_list(world.lists.size());
  std::string bytes;
  for (uint32_t i = 0; i < world.lists.size(); ++i) {
    bytes.clear();
    PutList(world.lists[i], &bytes);
    same_list[i] = seen.try_emplace(bytes, i).first->second;
  }
  seen.clear();
  std::vector<uint32_t> same_class(world.classes.size());
  for (uint32_t i = 0; i < world.classes.size(); ++i) {
    bytes.clear();
    PutClass(world.classes[i], same_list, &bytes);
    same_class[i] = seen.try_emplace(bytes, i).first->second;
  }
  // Numbers, by first use.
  CanonicalOrder order;
  order.names = SortedNames(world.names);
  order.class_number.assign(world.classes.size(), kUnnumbered);
  order.list_number.assign(world.lists.size(), kUnnumbered);
  for (uint32_t name : order.names) {
    uint32_t old_class = same_class[world.class_of[name]];
    if (order.class_number[old_class] != kUnnumbered) continue;
    order.class_number[old_class] = static_cast<uint32_t>(order.classes.size());
    order.classes.push_back(old_class);
    for (const BoxProduct& product : world.classes[old_class].products) {
      for (const DimSelect& select : product.dims) {
        uint32_t old_list = same_list[select.list];
        if (order.list_number[old_list] != kUnnumbered) continue;
        order.list_number[old_list] = static_cast<uint32_t>(order.lists.size());
        order.lists.push_back(old_list);
      }
    }
  }
  for (size_t i = 0; i < same_class.size(); ++i) {
    order.class_number[i] = order.class_number[same_class[i]];
  }
  for (size_t i = 0; i < same_list.size(); ++i) {
    order.list_number[i] = order.list_number[same_list[i]];
  }
  return order;
}

template <typename T, typename Less>
void SortUnique(std::vector<T>* values, const Less& less) {
  if (!std::is_sorted(values->begin(), values->end(), less)) {
    std::sort(values->begin(), values->end(), less);
  }
  values->erase(std::unique(values->begin(), values->end()), values->end());
}

bool AliasLess(const Alias& a, const Alias& b) {
  return a.name != b.name ? a.name < b.name : a.target < b.target;
}

void PutNames(const WorldTemplate& world, const CanonicalOrder& order, std::string* out) {
  PutVarint(order.names.size(), out);
  std::string_view previous;
  for (uint32_t n : order.names) {
    std::string_view name = world.names[n];
    size_t shared = static_cast<size_t>(
        std::mismatch(name.begin(), name.end(), previous.begin(), previous.end()).first -
        name.begin());
    // The largest s with s <= kSharedPerByte * (size - s + 1).
    shared = std::min(shared, kSharedPerByte * (name.size() + 1) / (kSharedPerByte + 1));
    PutVarint(shared, out);
    PutText(name.substr(shared), out);
    PutVarint(order.class_number[world.class_of[n]], out);
    previous = name;
  }
}

}  // namespace

void WorldTemplate::Canonicalize() {
  CanonicalOrder order = OrderOf(*this);
  std::vector<IntervalList> new_lists;
  new_lists.reserve(order.lists.size());
  for (uint32_t list : order.lists) new_lists.push_back(std::move(lists[list]));
  lists = std::move(new_lists);
  std::vector<TemplateClass> new_classes;
  new_classes.reserve(order.classes.size());
  for (uint32_t index : order.classes) {
    TemplateClass& tensor_class = new_classes.emplace_back(std::move(classes[index]));
    for (BoxProduct& product : tensor_class.products) {
      for (DimSelect& select : product.dims) select.list = order.list_number[select.list];
    }
  }
  classes = std::move(new_classes);
  std::vector<std::string> new_names;
  std::vector<uint32_t> new_class_of;
  new_names.reserve(names.size());
  new_class_of.reserve(names.size());
  for (uint32_t n : order.names) {
    new_names.push_back(std::move(names[n]));
    new_class_of.push_back(order.class_number[class_of[n]]);
  }
  names = std::move(new_names);
  class_of = std::move(new_class_of);
  SortUnique(&aliases, AliasLess);
  SortUnique(&unused, std::less<>());
}

std::string WorldTemplate::Serialize() const {
  CanonicalOrder order = OrderOf(*this);
  std::string out(kMagic);
  PutVarint(axis_sizes.size(), &out);
  for (uint32_t size : axis_sizes) PutVarint(size, &out);
  PutVarint(order.lists.size(), &out);
  for (uint32_t list : order.lists) PutList(lists[list], &out);
  PutVarint(order.classes.size(), &out);
  for (uint32_t index : order.classes) PutClass(classes[index], order.list_number, &out);
  PutNames(*this, order, &out);
  std::vector<Alias> sorted_aliases = aliases;
  SortUnique(&sorted_aliases, AliasLess);
  PutVarint(sorted_aliases.size(), &out);
  for (const Alias& alias : sorted_aliases) {
    PutText(alias.name, &out);
    PutText(alias.target, &out);
  }
  std::vector<std::string> sorted_unused = unused;
  SortUnique(&sorted_unused, std::less<>());
  PutVarint(sorted_unused.size(), &out);
  for (const std::string& pattern : sorted_unused) PutText(pattern, &out);
  return out;
}

namespace {

// Reads from untrusted bytes. After a failure every read gives zero and ok() is false, so that
// loops end: a count is never more than what the rest of the input can hold.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] size_t position() const { return position_; }
  [[nodiscard]] size_t left() const { return bytes_.size() - position_; }

  uint8_t Byte() {
    if (!ok_ || left() == 0) {
      ok_ = false;
      return 0;
    }
    return static_cast<uint8_t>(bytes_[position_++]);
  }

  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint8_t byte = Byte();
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return ok_ ? value : 0;
    }
    ok_ = false;
    return 0;
  }

  // A number in [0, limit].
  uint64_t UpTo(uint64_t limit) {
    uint64_t value = Varint();
    if (value > limit) ok_ = false;
    return ok_ ? value : 0;
  }

  // The number of items that follow, each of which takes at least `item_bytes`.
  size_t Count(size_t item_bytes) { return UpTo(left() / item_bytes); }

  std::string_view Bytes(size_t size) {
    if (!ok_ || size > left()) {
      ok_ = false;
      return {};
    }
    position_ += size;
    return bytes_.substr(position_ - size, size);
  }

  std::string_view Text() { return Bytes(Count(1)); }
  void Fail() { ok_ = false; }

 private:
  std::string_view bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

constexpr uint64_t kMax32 = 0xffffffff;
constexpr uint64_t kMaxInt64 = 0x7fffffffffffffff;

IntervalList GetList(Reader* in) {
  IntervalList list;
  int64_t end = 0;
  size_t entries = in->Count(1);
  list.offsets.reserve(entries + 1);
  for (size_t entry = 0; entry < entries && in->ok(); ++entry) {
    size_t count = in->Count(2);
    for (size_t i = 0; i < count && in->ok(); ++i) {
      uint64_t zigzag = in->Varint();
      auto delta = static_cast<int64_t>(zigzag >> 1 ^ (~(zigzag & 1) + 1));
      std::optional<int64_t> begin = CheckedAdd(end, delta);
      auto size = static_cast<int64_t>(in->UpTo(kMaxInt64));
      std::optional<int64_t> next = begin ? CheckedAdd(*begin, size) : std::nullopt;
      if (!next) {
        in->Fail();
        break;
      }
      list.intervals.push_back({*begin, *next});
      end = *next;
    }
    list.offsets.push_back(static_cast<uint32_t>(list.intervals.size()));
  }
  return list;
}

TemplateClass GetClass(Reader* in) {
  TemplateClass tensor_class;
  size_t ndim = in->UpTo(kMaxDims);
  for (size_t d = 0; d < ndim; ++d) {
    tensor_class.shape.push_back(static_cast<int64_t>(in->UpTo(kMaxInt64)));
  }
  tensor_class.dtype = static_cast<DType>(in->Byte());
  uint8_t derived = in->Byte();
  if (derived > 1) in->Fail();
  tensor_class.derived = derived == 1;
  size_t products = in->Count(1);
  for (size_t p = 0; p < products && in->ok(); ++p) {
    BoxProduct& product = tensor_class.products.emplace_back();
    size_t dims = in->UpTo(kMaxDims);
    for (size_t d = 0; d < dims && in->ok(); ++d) {
      DimSelect& select = product.dims.emplace_back();
      select.list = static_cast<uint32_t>(in->UpTo(kMax32));
      size_t axes = in->UpTo(WorldTemplate::kMaxAxes);
      for (size_t a = 0; a < axes && in->ok(); ++a) {
        select.axes.push_back(static_cast<uint32_t>(in->UpTo(WorldTemplate::kMaxAxes)));
      }
    }
  }
  return tensor_class;
}

void GetNames(Reader* in, WorldTemplate* world) {
  size_t names = in->Count(4);
  world->names.reserve(names);
  world->class_of.reserve(names);
  std::string_view previous;
  for (size_t n = 0; n < names && in->ok(); ++n) {
    size_t shared = in->UpTo(previous.size());
    std::string_view rest = in->Text();
    if (shared > kSharedPerByte * (rest.size() + 1)) in->Fail();
    if (!in->ok()) return;
    std::string name;
    name.reserve(shared + rest.size());
    name.append(previous.substr(0, shared)).append(rest);
    world->names.push_back(std::move(name));
    world->class_of.push_back(static_cast<uint32_t>(in->UpTo(kMax32)));
    previous = world->names.back();
  }
}

void GetBody(Reader* in, WorldTemplate* world) {
  size_t axes = in->UpTo(WorldTemplate::kMaxAxes);
  for (size_t a = 0; a < axes; ++a) {
    world->axis_sizes.push_back(static_cast<uint32_t>(in->UpTo(kMax32)));
  }
  size_t lists = in->Count(1);
  for (size_t i = 0; i < lists && in->ok(); ++i) world->lists.push_back(GetList(in));
  size_t classes = in->Count(4);
  for (size_t i = 0; i < classes && in->ok(); ++i) world->classes.push_back(GetClass(in));
  GetNames(in, world);
  size_t aliases = in->Count(4);
  for (size_t i = 0; i < aliases && in->ok(); ++i) {
    std::string name(in->Text());
    world->aliases.push_back({std::move(name), std::string(in->Text())});
  }
  size_t unused = in->Count(2);
  for (size_t i = 0; i < unused && in->ok(); ++i) world->unused.emplace_back(in->Text());
}

}  // namespace

Result<WorldTemplate> WorldTemplate::Parse(std::string_view bytes) {
  Reader in(bytes);
  if (in.Bytes(3) != kMagic.substr(0, 3)) {
    return Status(Code::kInvalidArgument, "world template: not a template (wrong magic)");
  }
  uint8_t version = in.Byte();
  if (in.ok() && version != static_cast<uint8_t>(kMagic[3])) {
    return Status(Code::kVersionMismatch,
                  fmt::format("world template: format {} is not supported, only {}", version,
                              static_cast<int>(kMagic[3])));
  }
  WorldTemplate world;
  GetBody(&in, &world);
  if (!in.ok() || in.left() != 0) {
    return Status(Code::kInvalidArgument, fmt::format("world template: malformed at byte {} of {}",
                                                      in.position(), bytes.size()));
  }
  BASCULE_RETURN_IF_ERROR(world.Validate());
  if (world.Serialize() != bytes) {
    return Status(Code::kInvalidArgument, "world template: bytes are not in canonical form");
  }
  return world;
}

}  // namespace bascule
