// Vector casts by the published rule of bascule/dtype.h; they equal CastCode bit by bit. Included
// once per Highway target.
//
// All are made of integer operations and of fp32 operations whose operands and results are normal
// numbers, so that neither flush-to-zero modes of the host program nor the hardware's own NaN rules
// (vcvtph2ps quiets signalling NaNs, vcvtneps2bf16 flushes subnormals) can change a bit.
#if defined(BASCULE_COPY_CPU_CAST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BASCULE_COPY_CPU_CAST_INL_H_
#undef BASCULE_COPY_CPU_CAST_INL_H_
#else
#define BASCULE_COPY_CPU_CAST_INL_H_
#endif

#include "copy/cpu/code_kind.h"
#include "digest/digest-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace bascule::HWY_NAMESPACE {

using D16 = hn::ScalableTag<uint16_t>;
using D16Half = hn::Half<D16>;
using DF32 = hn::ScalableTag<float>;
using V16 = hn::Vec<D16>;

HWY_INLINE V32 WidenBF16(V32 code) { return hn::ShiftLeft<16>(code); }

HWY_INLINE V32 NarrowToBF16(V32 bits) {
  const D32 d;
  const V32 magnitude = hn::And(bits, hn::Set(d, 0x7FFFFFFFu));
  const V32 upper = hn::ShiftRight<16>(bits);
  const V32 even = hn::And(upper, hn::Set(d, 1u));
  const V32 rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(even, hn::Set(d, 0x7FFFu))));
  const V32 quiet = hn::Or(upper, hn::Set(d, 0x40u));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7F800000u)), quiet, rounded);
}

HWY_INLINE V32 WidenF16(V32 code) {
  const D32 d;
  const DF32 df;
  const V32 sign = hn::ShiftLeft<16>(hn::And(code, hn::Set(d, 0x8000u)));
  const V32 magnitude = hn::ShiftLeft<13>(hn::And(code, hn::Set(d, 0x7FFFu)));
  const V32 normal = hn::Add(magnitude, hn::Set(d, (127u - 15u) << 23));
  const V32 special = hn::Add(normal, hn::Set(d, (128u - 16u) << 23));
  // 2^-14 + subnormal, less 2^-14: exact.
  const V32 least = hn::Set(d, 113u << 23);
  const V32 subnormal =
      hn::BitCast(d, hn::Sub(hn::BitCast(df, hn::Add(magnitude, least)), hn::BitCast(df, least)));
  const V32 finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 1u << 23)), subnormal, normal);
  return hn::Or(sign, hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x0F800000u)), finite, special));
}

HWY_INLINE V32 NarrowToF16(V32 bits) {
  const D32 d;
  const DF32 df;
  const V32 magnitude = hn::And(bits, hn::Set(d, 0x7FFFFFFFu));
  const V32 sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 0x8000u));
  const V32 even = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1u));
  const V32 normal = hn::ShiftRight<13>(
      hn::Add(hn::Add(magnitude, even), hn::Set(d, 0xFFFu - ((127u - 15u) << 23))));
  // 0.5 has the last bit of its mantissa at 2^-24, the fp16 subnormals' unit: adding it rounds.
  const V32 half = hn::Set(d, 126u << 23);
  const V32 subnormal =
      hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, half))), half);
  const V32 quiet =
      hn::Or(hn::Set(d, 0x7E00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x3FFu)));
  const V32 finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 113u << 23)), subnormal, normal);
  const V32 special =
      hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7F800000u)), quiet, hn::Set(d, 0x7C00u));
  return hn::Or(sign, hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x47800000u)), finite, special));
}

// What WidenBF16 and WidenF16 made, undone: differs from narrowing in that NaNs keep their bits.
HWY_INLINE V32 NarrowBackToBF16(V32 bits) { return hn::ShiftRight<16>(bits); }
HWY_INLINE V32 NarrowBackToF16(V32 bits) {
  const D32 d;
  const V32 magnitude = hn::And(bits, hn::Set(d, 0x7FFFFFFFu));
  const V32 sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 0x8000u));
  const V32 nan = hn::Or(hn::Or(sign, hn::Set(d, 0x7C00u)),
                         hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x3FFu)));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 0x7F800000u)), nan, NarrowToF16(bits));
}

// The codes of one step: as many as two vectors of 32 bits or one of 16 bits hold, or one vector
// of bytes where nothing is cast.
template <CodeKind kKind>
struct Codes;
template <>
struct Codes<CodeKind::kRaw> {
  V32 words;
};
template <>
struct Codes<CodeKind::kF32> {
  V32 low;
  V32 high;
};
template <>
struct Codes<CodeKind::kBF16> {
  V16 codes;
};
template <>
struct Codes<CodeKind::kF16> {
  V16 codes;
};

// Bytes that count as one element here (1 for raw: rows are then in bytes), and elements a step.
template <CodeKind kKind>
inline constexpr size_t kCodeBytes = kKind == CodeKind::kRaw ? 1
                                                             : (kKind == CodeKind::kF32 ? 4 : 2);
template <CodeKind kKind>
inline constexpr size_t kStepCodes = kKind == CodeKind::kRaw ? kVectorBytes : kVectorBytes / 2;
template <CodeKind kKind>
inline constexpr size_t kStepBytes = kCodeBytes<kKind>* kStepCodes<kKind>;

template <CodeKind kKind>
HWY_INLINE Codes<kKind> LoadCodes(const uint8_t* from) {
  if constexpr (kKind == CodeKind::kRaw) {
    return {hn::BitCast(D32(), hn::LoadU(D8(), from))};
  } else if constexpr (kKind == CodeKind::kF32) {
    return {hn::BitCast(D32(), hn::LoadU(D8(), from)),
            hn::BitCast(D32(), hn::LoadU(D8(), from + kVectorBytes))};
  } else {
    return {hn::BitCast(D16(), hn::LoadU(D8(), from))};
  }
}

template <bool kStream>
HWY_INLINE void StoreVector(V8 bytes, uint8_t* to) {
  if constexpr (kStream) {
    hn::Stream(bytes, D8(), to);
  } else {
    hn::StoreU(bytes, D8(), to);
  }
}

template <bool kStream, CodeKind kKind>
HWY_INLINE void StoreCodes(const Codes<kKind>& codes, uint8_t* to) {
  if constexpr (kKind == CodeKind::kRaw) {
    StoreVector<kStream>(hn::BitCast(D8(), codes.words), to);
  } else if constexpr (kKind == CodeKind::kF32) {
    StoreVector<kStream>(hn::BitCast(D8(), codes.low), to);
    StoreVector<kStream>(hn::BitCast(D8(), codes.high), to + kVectorBytes);
  } else {
    StoreVector<kStream>(hn::BitCast(D8(), codes.codes), to);
  }
}

// The first `bytes` bytes of a vector, at most all of them. Nothing beyond is touched; only where
// HWY_MEM_OPS_MIGHT_FAULT is 0.
HWY_INLINE V32 LoadBytes(const uint8_t* from, size_t bytes) {
  return hn::BitCast(D32(), hn::MaskedLoad(hn::FirstN(D8(), bytes), D8(), from));
}
HWY_INLINE void StoreBytes(V8 vector, uint8_t* to, size_t bytes) {
  hn::BlendedStore(vector, hn::FirstN(D8(), bytes), D8(), to);
}

// The first `count` codes of a step; the others are zero.
template <CodeKind kKind>
HWY_INLINE Codes<kKind> LoadPart(const uint8_t* from, size_t count) {
  const size_t bytes = count * kCodeBytes<kKind>;
  if constexpr (kKind == CodeKind::kRaw) {
    return {LoadBytes(from, bytes)};
  } else if constexpr (kKind == CodeKind::kF32) {
    return {LoadBytes(from, HWY_MIN(bytes, kVectorBytes)),
            LoadBytes(from + kVectorBytes, bytes - HWY_MIN(bytes, kVectorBytes))};
  } else {
    return {hn::BitCast(D16(), LoadBytes(from, bytes))};
  }
}

template <CodeKind kKind>
HWY_INLINE void StorePart(const Codes<kKind>& codes, uint8_t* to, size_t count) {
  const size_t bytes = count * kCodeBytes<kKind>;
  if constexpr (kKind == CodeKind::kRaw) {
    StoreBytes(hn::BitCast(D8(), codes.words), to, bytes);
  } else if constexpr (kKind == CodeKind::kF32) {
    StoreBytes(hn::BitCast(D8(), codes.low), to, HWY_MIN(bytes, kVectorBytes));
    StoreBytes(hn::BitCast(D8(), codes.high), to + kVectorBytes,
               bytes - HWY_MIN(bytes, kVectorBytes));
  } else {
    StoreBytes(hn::BitCast(D8(), codes.codes), to, bytes);
  }
}

// Hands the codes to `add` as vectors of words.
template <CodeKind kKind, typename Add>
HWY_INLINE void ForEachWords(const Codes<kKind>& codes, const Add& add) {
  if constexpr (kKind == CodeKind::kRaw) {
    add(codes.words);
  } else if constexpr (kKind == CodeKind::kF32) {
    add(codes.low);
    add(codes.high);
  } else {
    add(hn::BitCast(D32(), codes.codes));
  }
}

template <bool kNarrowBack, CodeKind kFrom, CodeKind kTo>
HWY_INLINE Codes<kTo> ConvertCodes(const Codes<kFrom>& from) {
  if constexpr (kFrom == kTo) {
    return from;
  } else if constexpr (kTo == CodeKind::kF32) {
    const D16Half half;
    const V32 low = hn::PromoteTo(D32(), hn::LowerHalf(half, from.codes));
    const V32 high = hn::PromoteTo(D32(), hn::UpperHalf(half, from.codes));
    if constexpr (kFrom == CodeKind::kBF16) return {WidenBF16(low), WidenBF16(high)};
    if constexpr (kFrom == CodeKind::kF16) return {WidenF16(low), WidenF16(high)};
  } else if constexpr (kFrom == CodeKind::kF32) {
    const auto narrow = [](V32 bits) {
      if constexpr (kTo == CodeKind::kBF16) {
        return kNarrowBack ? NarrowBackToBF16(bits) : NarrowToBF16(bits);
      } else {
        return kNarrowBack ? NarrowBackToF16(bits) : NarrowToF16(bits);
      }
    };
    const D16Half half;
    return {hn::Combine(D16(), hn::TruncateTo(half, narrow(from.high)),
                        hn::TruncateTo(half, narrow(from.low)))};
  } else {
    return ConvertCodes<kNarrowBack, CodeKind::kF32, kTo>(
        ConvertCodes<kNarrowBack, kFrom, CodeKind::kF32>(from));
  }
}

}  // namespace bascule::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // BASCULE_COPY_CPU_CAST_INL_H_
