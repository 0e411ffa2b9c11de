#include "copy/cpu/kernels.h"

// See digest/digest.cc.
#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "copy/cpu/kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "copy/cpu/cast-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace bascule::HWY_NAMESPACE {

// Sources are prefetched so far before they are read: the digest's work would otherwise hide the
// loads to come from the processor.
inline constexpr int64_t kAheadBytes = 4096;

// Streamed runs that do not consist of whole cache lines leave partial ones at both ends; that
// does not pay for short runs.
inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kStreamBytes = 1024;

// Copies runs of one tensor: source codes -> wire codes, which are digested -> target codes.
template <CodeKind kSource, CodeKind kWire, CodeKind kTarget, bool kDigest, bool kStore,
          bool kNarrowBack>
class RunCopier {
 public:
  HWY_INLINE explicit RunCopier(const Digester& digester) : digester_(digester) {}

  // `beyond` leads from a byte among the last kAheadBytes of this run to the one that is read
  // kAheadBytes later, in a later run; 0 where there is none.
  HWY_INLINE void Run(const uint8_t* source, uint8_t* target, uint64_t count, uint64_t first,
                      bool stream, int64_t beyond) {
    source_ = source;
    target_ = target;
    left_ = count;
    position_ = first * kWireBytes;
    beyond_ = beyond;
    if (kStore && stream && WorthStreaming()) {
      RunStreamed();
    } else {
      RunCached();
    }
  }

  HWY_INLINE uint64_t Finish() { return kDigest ? digester_.Finish() : 0; }
  HWY_INLINE const Digester& digester() const { return digester_; }

 private:
  static constexpr size_t kSourceBytes = kCodeBytes<kSource>;
  static constexpr size_t kWireBytes = kCodeBytes<kWire>;
  static constexpr size_t kTargetBytes = kCodeBytes<kTarget>;
  static constexpr size_t kStep = kStepCodes<kWire>;
  static constexpr size_t kWireVectors = kStepBytes<kWire> / kVectorBytes;

  HWY_INLINE bool WorthStreaming() const {
    const uint64_t bytes = left_ * kTargetBytes;
    return bytes >= kStreamBytes ||
           (reinterpret_cast<uintptr_t>(target_) % kLineBytes == 0 && bytes % kLineBytes == 0);
  }

  HWY_INLINE void RunCached() {
    AlignToWord();
    Steps<false>();
    Part(left_);
  }

  HWY_INLINE void AlignToWord() {
    if (!kDigest || kWireBytes == 4) return;
    const size_t lead = position_ % 4 / kWireBytes;
    if (lead != 0) Part(HWY_MIN(left_, uint64_t{kStep} - lead));
  }

  HWY_INLINE void RunStreamed() {
    const size_t gap = (0 - reinterpret_cast<uintptr_t>(target_)) % kVectorBytes;
    if (gap % kTargetBytes != 0) return RunCached();
    const uint64_t head = gap / kTargetBytes;
    if (kDigest && (position_ + head * kWireBytes) % 4 != 0) return RunApart(head);
    Part(head);
    Steps<true>();
    Part(left_);
  }

  // Words of the digest and vectors of the target do not fall together: a block is digested, then
  // copied out of the first-level cache.
  HWY_NOINLINE void RunApart(uint64_t head) {
    if constexpr (kDigest && kStore) {
      RunCopier<kSource, kWire, kWire, true, false, false> reader(digester_);
      RunCopier<kSource, kWire, kTarget, false, true, false> writer(digester_);
      while (left_ > 0) {
        const uint64_t count = HWY_MIN(left_, kBlockBytes + head);  // later ones start aligned
        head = 0;
        const int64_t beyond = count < left_ ? kAheadBytes : beyond_;
        reader.Run(source_, nullptr, count, position_ / kWireBytes, false, beyond);
        writer.Run(source_, target_, count, 0, true, 0);
        Advance(count);
      }
      digester_ = reader.digester();
    }
  }

  template <bool kStream>
  HWY_INLINE void Steps() {
    constexpr uint64_t kAhead = kAheadBytes / kSourceBytes;
    if (kDigest) digester_.Seek(position_);
    if (left_ > kAhead) StepsUntil<kStream>(kAhead, kAheadBytes);
    StepsUntil<kStream>(0, beyond_);
  }

  // Leaves `rest` elements or a few more.
  // Not inlined: there are dozens of copiers, and compiling them is slow enough.
  template <bool kStream>
  HWY_NOINLINE void StepsUntil(uint64_t rest, int64_t ahead) {
    while (left_ >= rest + kStep) {
      uint64_t steps = (left_ - rest) / kStep;
      if (kDigest) steps = HWY_MIN(steps, uint64_t{digester_.VectorsLeft() / kWireVectors});
      StepsInside<kStream>(steps, ahead);
      if (kDigest && left_ >= rest + kStep) StepAcross<kStream>(ahead);
    }
  }

  // Steps that lie within one block of the digest.
  template <bool kStream>
  HWY_INLINE void StepsInside(uint64_t steps, int64_t ahead) {
    const uint8_t* source = source_;
    uint8_t* target = target_;
    const uint32_t* keys = digester_.keys();
    V64 even = digester_.even();
    V64 odd = digester_.odd();
    for (uint64_t i = 0; i < steps; ++i) {
      PrefetchStep(source + ahead);
      const auto wire = ConvertCodes<kNarrowBack, kSource, kWire>(LoadCodes<kSource>(source));
      if constexpr (kDigest) {
        ForEachWords(wire,
                     [&](V32 words) HWY_ATTR { Digester::AddInside(words, keys, even, odd); });
      }
      if constexpr (kStore) {
        StoreCodes<kStream, kTarget>(ConvertCodes<false, kWire, kTarget>(wire), target);
        target += kStepBytes<kTarget>;
      }
      source += kStepBytes<kSource>;
    }
    if (kDigest) digester_.Resume(keys, even, odd);
    Advance(steps * kStep);
  }

  // A step in which a block may end.
  template <bool kStream>
  HWY_INLINE void StepAcross(int64_t ahead) {
    PrefetchStep(source_ + ahead);
    const auto wire = ConvertCodes<kNarrowBack, kSource, kWire>(LoadCodes<kSource>(source_));
    ForEachWords(wire, [&](V32 words) HWY_ATTR { digester_.Add(words); });
    if constexpr (kStore) {
      StoreCodes<kStream, kTarget>(ConvertCodes<false, kWire, kTarget>(wire), target_);
    }
    Advance(kStep);
  }

  static HWY_INLINE void PrefetchStep(const uint8_t* source) {
    for (size_t byte = 0; byte < kStepBytes<kSource>; byte += kLineBytes) {
      hwy::Prefetch(source + byte);
    }
  }

  HWY_INLINE void Advance(uint64_t count) {
    source_ += count * kSourceBytes;
    if (kStore) target_ += count * kTargetBytes;
    position_ += count * kWireBytes;
    left_ -= count;
  }

  HWY_INLINE void Part(uint64_t count) {
    if (count > 0) Parts(count);
  }

  // Fewer elements than a step, or more where a start amid a word leaves room for fewer in one.
  HWY_NOINLINE void Parts(uint64_t count) {
    while (count > 0) {
      const size_t lead = kDigest ? position_ % 4 / kWireBytes : 0;
      const size_t part = static_cast<size_t>(HWY_MIN(count, uint64_t{kStep} - lead));
      if (HWY_MEM_OPS_MIGHT_FAULT || lead != 0) {
        PartOnStack(part, lead);
      } else {
        PartMasked(part);
      }
      Advance(part);
      count -= part;
    }
  }

  HWY_INLINE void PartMasked(size_t count) {
    const auto codes = LoadPart<kSource>(source_, count);
    const auto wire = ConvertCodes<kNarrowBack, kSource, kWire>(codes);
    if constexpr (kDigest) DigestPart(wire);
    if constexpr (kStore) {
      StorePart<kTarget>(ConvertCodes<false, kWire, kTarget>(wire), target_, count);
    }
  }

  // Nothing beyond the elements is touched; `lead` absent ones before them are zero.
  HWY_NOINLINE void PartOnStack(size_t count, size_t lead) {
    HWY_ALIGN uint8_t from[kStepBytes<kSource>] = {};
    std::memcpy(from + lead * kSourceBytes, source_, count * kSourceBytes);
    const auto wire = ConvertCodes<kNarrowBack, kSource, kWire>(LoadCodes<kSource>(from));
    if constexpr (kDigest) DigestPart(wire);
    if constexpr (kStore) {
      HWY_ALIGN uint8_t to[kStepBytes<kTarget>];
      StoreCodes<false, kTarget>(ConvertCodes<false, kWire, kTarget>(wire), to);
      std::memcpy(target_, to + lead * kTargetBytes, count * kTargetBytes);
    }
  }

  HWY_INLINE void DigestPart(const Codes<kWire>& wire) {
    digester_.Seek(position_);
    ForEachWords(wire, [&](V32 words) HWY_ATTR { digester_.Add(words); });
  }

  const uint8_t* source_ = nullptr;
  uint8_t* target_ = nullptr;
  uint64_t left_ = 0;      // elements
  uint64_t position_ = 0;  // of the next element in the tensor's code string, in bytes
  int64_t beyond_ = 0;
  Digester digester_;
};

template <CodeKind kSource, CodeKind kWire, CodeKind kTarget, bool kDigest, bool kStore,
          bool kNarrowBack = false>
uint64_t CopyRows(const RowBlock& block) {
  RunCopier<kSource, kWire, kTarget, kDigest, kStore, kNarrowBack> copier(
      Digester(block.tensor_key));
  // Rows that are not cast count in bytes.
  const int64_t scale = kSource == CodeKind::kRaw ? block.element_bytes : 1;
  const int64_t run = block.run * scale;
  const int64_t run_bytes = run * static_cast<int64_t>(kCodeBytes<kSource>);
  const int64_t rows_ahead = run_bytes >= kAheadBytes ? 1 : (kAheadBytes - 1) / run_bytes + 1;
  const int64_t beyond = run_bytes >= kAheadBytes ? kAheadBytes - run_bytes + block.source_stride
                                                  : rows_ahead * block.source_stride;
  const uint8_t* source = reinterpret_cast<const uint8_t*>(block.source);
  uint8_t* target = reinterpret_cast<uint8_t*>(block.target);
  uint64_t first = static_cast<uint64_t>(block.first * scale);
  for (int64_t row = 0; row < block.rows; ++row) {
    copier.Run(source, target, static_cast<uint64_t>(run), first, block.stream,
               row + rows_ahead < block.rows ? beyond : 0);
    source += block.source_stride;
    if (kStore) target += block.target_stride;
    first += static_cast<uint64_t>(block.tensor_stride * scale);
  }
  return copier.Finish();
}

template <bool kDigest, bool kStore>
RowKernel PickRaw() {
  return &CopyRows<CodeKind::kRaw, CodeKind::kRaw, CodeKind::kRaw, kDigest, kStore>;
}

// One cast, from kSource to kTarget. Where nothing is digested, the wire dtype does not matter.
template <CodeKind kSource, CodeKind kTarget>
RowKernel PickCast(const KernelSpec& spec) {
  if (!spec.store) {
    constexpr bool kWidened = kSource == CodeKind::kF32;
    return spec.narrow_back ? &CopyRows<kSource, kTarget, kTarget, true, false, kWidened>
                            : &CopyRows<kSource, kTarget, kTarget, true, false>;
  }
  if (!spec.digest) return &CopyRows<kSource, kTarget, kTarget, false, true>;
  return spec.wire == spec.source ? &CopyRows<kSource, kSource, kTarget, true, true>
                                  : &CopyRows<kSource, kTarget, kTarget, true, true>;
}

RowKernel PickKernel(const KernelSpec& spec) {
  if (spec.source == spec.wire && (spec.wire == spec.target || !spec.store)) {
    if (!spec.store) return PickRaw<true, false>();
    return spec.digest ? PickRaw<true, true>() : PickRaw<false, true>();
  }
  using enum CodeKind;
  const DType last = spec.store ? spec.target : spec.wire;
  if (!Castable(spec.source, last)) return nullptr;
  if (spec.store && spec.wire != spec.source && spec.wire != spec.target) return nullptr;
  const CodeKind to = CodeKindOf(last);
  switch (CodeKindOf(spec.source)) {
    case kF32: return to == kBF16 ? PickCast<kF32, kBF16>(spec) : PickCast<kF32, kF16>(spec);
    case kBF16: return to == kF32 ? PickCast<kBF16, kF32>(spec) : PickCast<kBF16, kF16>(spec);
    case kF16: return to == kF32 ? PickCast<kF16, kF32>(spec) : PickCast<kF16, kBF16>(spec);
    case kRaw: break;
  }
  return nullptr;
}

template <CodeKind kNarrow>
uint64_t CountInexactIn(const uint8_t* values, uint64_t count) {
  constexpr size_t kStep = kStepCodes<CodeKind::kF32>;
  uint64_t inexact = 0;
  const auto count_in = [&](const uint8_t* from) {
    const auto codes = LoadCodes<CodeKind::kF32>(from);
    const auto narrow = ConvertCodes<true, CodeKind::kF32, kNarrow>(codes);
    const auto back = ConvertCodes<false, kNarrow, CodeKind::kF32>(narrow);
    inexact += hn::CountTrue(D32(), hn::Ne(back.low, codes.low));
    inexact += hn::CountTrue(D32(), hn::Ne(back.high, codes.high));
  };
  for (; count >= kStep; count -= kStep, values += kStepBytes<CodeKind::kF32>) count_in(values);
  if (count > 0) {
    HWY_ALIGN uint8_t rest[kStepBytes<CodeKind::kF32>] = {};
    std::memcpy(rest, values, count * 4);
    count_in(rest);
  }
  return inexact;
}

uint64_t CountInexactBF16(const uint8_t* values, uint64_t count) {
  return CountInexactIn<CodeKind::kBF16>(values, count);
}

uint64_t CountInexactF16(const uint8_t* values, uint64_t count) {
  return CountInexactIn<CodeKind::kF16>(values, count);
}

}  // namespace bascule::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bascule {

HWY_EXPORT(PickKernel);
HWY_EXPORT(CountInexactBF16);
HWY_EXPORT(CountInexactF16);

RowKernel FindRowKernel(const KernelSpec& spec) { return HWY_DYNAMIC_DISPATCH(PickKernel)(spec); }

int64_t CountInexact(const std::byte* values, int64_t count, DType narrow) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values);
  const auto n = static_cast<uint64_t>(count);
  return static_cast<int64_t>(narrow == DType::kBF16
                                  ? HWY_DYNAMIC_DISPATCH(CountInexactBF16)(bytes, n)
                                  : HWY_DYNAMIC_DISPATCH(CountInexactF16)(bytes, n));
}

void FlushStores() { hwy::FlushStream(); }

}  // namespace bascule
#endif  // HWY_ONCE
