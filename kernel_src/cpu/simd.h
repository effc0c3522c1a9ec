// Vectors of one instruction set: loads, stores and roundings of the three dtypes, row sums, exp.
//
// Included once per instruction set by each_isa.h; hence no include guard. `F` is a native vector of kLanes floats.
// Elementwise code may use any width, for each lane computes the same bits; only a sum depends on the order, so RowSum
// fixes it at kSumLanes logical lanes whatever the native width. Multiply-add is never contracted (-ffp-contract=off):
// the baseline has no FMA, and eager rounding forbids it.

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

#if LTX_ISA_LEVEL == 2
constexpr int kLanes = 16;
#elif LTX_ISA_LEVEL == 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr int kSumLanes = 32;  // fp32 rows in scratch memory are padded to whole multiples of it
constexpr int kSumParts = kSumLanes / kLanes;
constexpr int64_t kSumBlock = 512;

// Vectors side by side in a long chain of dependent operations (activations): enough to hide its latency, few enough
// for the registers.
#if LTX_ISA_LEVEL == 2 || defined(__aarch64__)
constexpr int kWide = 4;
#else
constexpr int kWide = 2;
#endif

typedef float F __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U __attribute__((vector_size(kLanes * 4)));

LTX_INLINE F splat(float value) { return F{} + value; }
LTX_INLINE U splat_bits(uint32_t value) { return U{} + value; }

// The smaller of |x| and the bound; the bound where x is NaN.
LTX_INLINE F bounded_magnitude(F x, F bound) {
#if LTX_ISA_LEVEL == 2
  return (F)_mm512_maskz_range_ps(0xffff, (__m512)x, (__m512)bound, 0b1010);  // minimum of magnitudes, sign cleared
#elif LTX_ISA_LEVEL == 1
  return (F)_mm256_min_ps((__m256)((U)x & 0x7fffffffu), (__m256)bound);
#elif defined(__x86_64__)
  return (F)_mm_min_ps((__m128)((U)x & 0x7fffffffu), (__m128)bound);
#else
  const F magnitude = (F)((U)x & 0x7fffffffu);
  return magnitude < bound ? magnitude : bound;
#endif
}

LTX_INLINE F load(const float* p) {
  typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
  return (F) * reinterpret_cast<const Unaligned*>(p);
}

LTX_INLINE void store(float* p, F x) {
  typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
  *reinterpret_cast<Unaligned*>(p) = x;
}

LTX_INLINE U load_words(const void* p) {
  typedef uint32_t Unaligned __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));
  return (U) * static_cast<const Unaligned*>(p);
}

LTX_INLINE void store_words(void* p, U x) {
  typedef uint32_t Unaligned __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));
  *static_cast<Unaligned*>(p) = x;
}

// Storage types: what a dtype's element is in memory.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// bfloat16 bits of x in the upper half of each lane, round to nearest even. The lower half is junk. A NaN stays one if
// the lower half of its bits is zero, as in a bfloat16, in the NaN of an invalid operation, and in whatever arithmetic
// makes of those; expand() sees to it for the operands of other dtypes.
LTX_INLINE U bfloat_upper(F x) {
  const U bits = (U)x;
  const I minus_odd = (I)(bits << 15) >> 31;
  return bits + 0x7fffu - (U)minus_odd;
}

// NaNs to one of zero payload.
LTX_INLINE F plain_nan(F x) { return x != x ? splat(__builtin_nanf("")) : x; }

// kLanes elements of 16 bits as they lie in memory, and their conversions.
#if LTX_ISA_LEVEL == 2

// The maskz forms with all lanes set: gcc 11 and 12 warn of uninitialised variables inside the plain ones.
typedef __m256i Packed;
LTX_INLINE Packed load_packed(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
LTX_INLINE void store_packed(void* p, Packed x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
LTX_INLINE F widen_bfloat(Packed x) { return (F)((U)_mm512_maskz_cvtepu16_epi32(0xffff, x) << 16); }
LTX_INLINE Packed narrow_bfloat(F x) { return _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)(bfloat_upper(x) >> 16)); }
LTX_INLINE F widen_half(Packed x) { return (F)_mm512_maskz_cvtph_ps(0xffff, x); }
LTX_INLINE Packed narrow_half(F x) { return _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT); }

#elif LTX_ISA_LEVEL == 1

typedef __m128i Packed;
LTX_INLINE Packed load_packed(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
LTX_INLINE void store_packed(void* p, Packed x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
LTX_INLINE F widen_bfloat(Packed x) { return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
LTX_INLINE Packed narrow_bfloat(F x) {
  const __m256i bits = (__m256i)(bfloat_upper(x) >> 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}
LTX_INLINE F widen_half(Packed x) { return (F)_mm256_cvtph_ps(x); }
LTX_INLINE Packed narrow_half(F x) { return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

#elif defined(__aarch64__)

typedef uint16x4_t Packed;
LTX_INLINE Packed load_packed(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
LTX_INLINE void store_packed(void* p, Packed x) { vst1_u16(static_cast<uint16_t*>(p), x); }
LTX_INLINE F widen_bfloat(Packed x) { return (F)vshll_n_u16(x, 16); }
LTX_INLINE Packed narrow_bfloat(F x) { return vshrn_n_u32((uint32x4_t)bfloat_upper(x), 16); }
LTX_INLINE F widen_half(Packed x) { return (F)vcvt_f32_f16(vreinterpret_f16_u16(x)); }
LTX_INLINE Packed narrow_half(F x) { return vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)); }

#else

typedef __m128i Packed;  // in the lower 64 bits
LTX_INLINE Packed load_packed(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
LTX_INLINE void store_packed(void* p, Packed x) { _mm_storel_epi64(static_cast<__m128i*>(p), x); }
LTX_INLINE F widen_bfloat(Packed x) { return (F)_mm_unpacklo_epi16(_mm_setzero_si128(), x); }
// Keeps the lower 16 bits of each lane: sign-extended, they survive SSE2's only (signed, saturating) pack.
LTX_INLINE Packed pack_lower(U x) {
  const __m128i extended = (__m128i)((I)(x << 16) >> 16);
  return _mm_packs_epi32(extended, extended);
}
LTX_INLINE Packed narrow_bfloat(F x) { return pack_lower(bfloat_upper(x) >> 16); }

// float16 without F16C, to the same bits. Denormals go through an fp32 addition that does the shift (and, towards
// fp16, the rounding) without ever touching an fp32 denormal, so that flush-to-zero modes change nothing.
LTX_COLD F widen_half(Packed x) {
  const U half = (U)_mm_unpacklo_epi16(x, _mm_setzero_si128());
  const U sign = (half & 0x8000u) << 16;
  const U magnitude = half & 0x7fffu;
  const U shifted = magnitude << 13;
  const U normal = shifted + (112u << 23);
  const U denormal = (U)((F)(shifted + (113u << 23)) - (F)splat_bits(113u << 23));
  const U quiet = (U)(magnitude > 0x7c00u) & 0x00400000u;
  const U special = (shifted + (224u << 23)) | quiet;
  const U finite = magnitude < 0x0400u ? denormal : normal;
  return (F)(sign | (magnitude >= 0x7c00u ? special : finite));
}
LTX_COLD Packed narrow_half(F x) {
  const U bits = (U)x;
  const U sign = (bits >> 16) & 0x8000u;
  const U magnitude = bits & 0x7fffffffu;
  const U nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  const U special = magnitude > 0x7f800000u ? nan : splat_bits(0x7c00u);
  const U denormal = (U)((F)magnitude + 0.5f) - 0x3f000000u;
  const U normal = (magnitude - (112u << 23) + (0x0fffu + ((magnitude >> 13) & 1u))) >> 13;
  const U finite = magnitude < 0x38800000u ? denormal : normal;
  return pack_lower(sign | (magnitude >= 0x47800000u ? special : finite));
}

#endif

LTX_INLINE F load(const Half* p) { return widen_half(load_packed(p)); }
LTX_INLINE F load(const BFloat* p) { return widen_bfloat(load_packed(p)); }
LTX_INLINE void store(Half* p, F x) { store_packed(p, narrow_half(x)); }
LTX_INLINE void store(BFloat* p, F x) { store_packed(p, narrow_bfloat(x)); }

template <class T>
LTX_COLD F load_tail(const T* p, int64_t count) {
  T tail[kLanes] = {};
  if (count > 0) __builtin_memcpy(tail, p, static_cast<size_t>(count) * sizeof(T));
  return load(tail);
}

template <class T>
LTX_COLD void store_tail(T* p, F x, int64_t count) {
  T tail[kLanes];
  store(tail, x);
  if (count > 0) __builtin_memcpy(p, tail, static_cast<size_t>(count) * sizeof(T));
}

// The first `count` lanes only; the others read as zero and are not written. count may be kLanes and more.
template <class T>
LTX_INLINE F load_upto(const T* p, int64_t count) {
  return __builtin_expect(count >= kLanes, 1) ? load(p) : load_tail(p, count);
}

template <class T>
LTX_INLINE void store_upto(T* p, F x, int64_t count) {
  __builtin_expect(count >= kLanes, 1) ? store(p, x) : store_tail(p, x, count);
}

// x with every lane from `count` on zero.
LTX_COLD F first_lanes(F x, int64_t count) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? lanes[i] : 0.f;
  return load(lanes);
}

// Hides that a pointer is the same in every turn of a loop. Without it -O3 copies the loop for each combination of
// optional operands (ten times the code); a predicted branch per vector costs less than that.
template <class T>
LTX_INLINE T* varying(T* p) {
  __asm__("" : "+r"(p));
  return p;
}

// x rounded to a dtype and back.
template <class T>
LTX_INLINE F round_to(F x);
template <>
LTX_INLINE F round_to<float>(F x) {
  return x;
}
template <>
LTX_INLINE F round_to<Half>(F x) {
  return widen_half(narrow_half(x));
}
template <>
LTX_INLINE F round_to<BFloat>(F x) {
  return (F)(bfloat_upper(x) & 0xffff0000u);
}

LTX_INLINE F round_to(DType dtype, F x) {
  if (dtype == DType::kBFloat16) return round_to<BFloat>(x);
  if (dtype == DType::kFloat16) return round_to<Half>(x);
  return x;
}

template <class Bits>
inline void gather_bits(Bits* target, const void* row, int64_t stride, int64_t width) {
  const Bits* source = static_cast<const Bits*>(row);
  for (int64_t c = 0; c < width; ++c) target[c] = source[c * stride];
}

template <class Bits>
inline void scatter_bits(void* row, int64_t stride, int64_t width, const Bits* source) {
  Bits* target = static_cast<Bits*>(row);
  for (int64_t c = 0; c < width; ++c) target[c * stride] = source[c];
}

// A strided row copied to a contiguous one of the same dtype, and back.
inline void gather(void* target, const void* row, DType dtype, int64_t stride, int64_t width) {
  if (dtype == DType::kFloat32) return gather_bits(static_cast<float*>(target), row, stride, width);
  gather_bits(static_cast<uint16_t*>(target), row, stride, width);
}

inline void scatter(void* row, DType dtype, int64_t stride, int64_t width, const void* source) {
  if (dtype == DType::kFloat32) return scatter_bits(row, stride, width, static_cast<const float*>(source));
  scatter_bits(row, stride, width, static_cast<const uint16_t*>(source));
}

template <class T>
inline void widen_row(float* target, const void* row, int64_t width) {
  const T* source = static_cast<const T*>(row);
  for (int64_t c = 0; c < round_up(width, kSumLanes); c += kLanes) {
    store(target + c, plain_nan(load_upto(source + c, width - c)));
  }
}

template <class T>
inline void narrow_row(void* row, const float* source, int64_t width) {
  T* target = static_cast<T*>(row);
  for (int64_t c = 0; c < width; c += kLanes) store_upto(target + c, load(source + c), width - c);
}

// A row of any dtype and stride as fp32. The padding becomes zero.
inline void expand(float* target, const void* row, DType dtype, int64_t stride, int64_t width) {
  if (stride != 1) {
    // The copy lies at the target's end: each vector is read before a wider one overwrites it.
    const int64_t padded = round_up(width, kSumLanes);
    void* copy = reinterpret_cast<char*>(target + padded) - padded * static_cast<int64_t>(size_of(dtype));
    gather(copy, row, dtype, stride, width);
    row = copy;
  }
  switch (dtype) {
    case DType::kFloat32:
      return widen_row<float>(target, row, width);
    case DType::kFloat16:
      return widen_row<Half>(target, row, width);
    case DType::kBFloat16:
      return widen_row<BFloat>(target, row, width);
  }
}

// The heads of a token, one after the other, as one fp32 row. The target is kSumLanes longer than a padded row: each
// head is padded in turn.
inline void expand_heads(float* target, const void* token, DType dtype, const HeadStrides& stride, int64_t heads,
                         int64_t head_dim) {
  const int64_t width = heads * head_dim;
  if (stride.column == 1 && stride.head == head_dim) return expand(target, token, dtype, 1, width);
  const int64_t step = stride.head * static_cast<int64_t>(size_of(dtype));
  for (int64_t head = 0; head < heads; ++head) {
    expand(target + head * head_dim, static_cast<const char*>(token) + head * step, dtype, stride.column, head_dim);
  }
  std::fill(target + width, target + round_up(width, kSumLanes), 0.f);
}

// An fp32 row written contiguously in any dtype.
inline void narrow(void* target, const float* row, DType dtype, int64_t width) {
  switch (dtype) {
    case DType::kFloat32:
      return narrow_row<float>(target, row, width);
    case DType::kFloat16:
      return narrow_row<Half>(target, row, width);
    case DType::kBFloat16:
      return narrow_row<BFloat>(target, row, width);
  }
}

// kSumLanes partial sums.
struct Lanes {
  F part[kSumParts];
};

LTX_INLINE Lanes zero_lanes() {
  Lanes lanes;
#pragma GCC unroll 8
  for (int p = 0; p < kSumParts; ++p) lanes.part[p] = F{};
  return lanes;
}

LTX_INLINE void add_lanes(Lanes& sum, const Lanes& other) {
#pragma GCC unroll 8
  for (int p = 0; p < kSumParts; ++p) sum.part[p] = sum.part[p] + other.part[p];
}

// Lane i plus lane i + kLanes / 2, and so on down to one.
LTX_INLINE float fold(F x) {
#if defined(__aarch64__)
  const float32x2_t pairs = vadd_f32(vget_low_f32((float32x4_t)x), vget_high_f32((float32x4_t)x));
  return vget_lane_f32(pairs, 0) + vget_lane_f32(pairs, 1);
#else
#if LTX_ISA_LEVEL == 2
  const __m256 eight =
      _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 0), _mm512_maskz_extractf32x8_ps(0xff, (__m512)x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif LTX_ISA_LEVEL == 1
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
  const __m128 four = (__m128)x;
#endif
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#endif
}

// Lane i plus lane i + 16, then i + 8, and so on: the same tree for any native width.
LTX_INLINE float fold_lanes(Lanes sum) {
#pragma GCC unroll 8
  for (int half = kSumParts / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int p = 0; p < half; ++p) sum.part[p] = sum.part[p] + sum.part[p + half];
  }
  return fold(sum.part[0]);
}

// Sum of a row. The columns of a block of kSumBlock are added lane by lane, the blocks pairwise: at most 16 + 5 +
// log2(width / 512) roundings lie on the way of any element, and the order depends on nothing but the width.
class RowSum {
 public:
  LTX_INLINE void push(Lanes block) {
    int level = 0;
    for (uint64_t n = count_; n & 1u; n >>= 1) {
      add_lanes(block, level_[level]);
      ++level;
    }
    level_[level] = block;
    ++count_;
  }

  LTX_INLINE float total() const {
    Lanes sum = zero_lanes();
    for (int level = 0; count_ >> level; ++level) {
      if ((count_ >> level) & 1u) add_lanes(sum, level_[level]);
    }
    return fold_lanes(sum);
  }

 private:
  uint64_t count_ = 0;
  Lanes level_[40];
};

// Sums term(column) over [0, width), where term gives the kLanes values from a column on, zero beyond the width.
template <class Term>
LTX_INLINE float sum_row(int64_t width, const Term& term) {
  RowSum sum;
  for (int64_t begin = 0;;) {
    const int64_t end = width - begin < kSumBlock ? width : begin + kSumBlock;
    Lanes block = zero_lanes();
    for (; begin < end; begin += kSumLanes) {
#pragma GCC unroll 8
      for (int p = 0; p < kSumParts; ++p) block.part[p] = block.part[p] + term(begin + p * kLanes);
    }
    if (width <= kSumBlock) return fold_lanes(block);
    sum.push(block);
    if (begin >= width) return sum.total();
  }
}

struct SquareTerm {
  const float* row;
  LTX_INLINE F operator()(int64_t c) const {
    const F x = load(row + c);
    return x * x;
  }
};

// 1 / sqrt(mean of squares + eps) of an fp32 row padded with zeros.
inline float rms_rstd(const float* row, int64_t width, float eps) {
  const float mean_square = sum_row(width, SquareTerm{row}) / static_cast<float>(width);
  return 1.f / std::sqrt(mean_square + eps);
}

// kWide vectors that go through the same operations.
struct Wide {
  F part[kWide];
};
struct WideMask {
  I part[kWide];
};

#define LTX_EACH_PART _Pragma("GCC unroll 8") for (int p = 0; p < kWide; ++p)
#define LTX_WIDE_OPERATOR(op)                          \
  LTX_INLINE Wide operator op(Wide a, const Wide& b) { \
    LTX_EACH_PART a.part[p] = a.part[p] op b.part[p];  \
    return a;                                          \
  }                                                    \
  LTX_INLINE Wide operator op(Wide a, float b) {       \
    LTX_EACH_PART a.part[p] = a.part[p] op b;          \
    return a;                                          \
  }                                                    \
  LTX_INLINE Wide operator op(float a, Wide b) {       \
    LTX_EACH_PART b.part[p] = a op b.part[p];          \
    return b;                                          \
  }
LTX_WIDE_OPERATOR(+)
LTX_WIDE_OPERATOR(-)
LTX_WIDE_OPERATOR(*)
LTX_WIDE_OPERATOR(/)
#undef LTX_WIDE_OPERATOR

LTX_INLINE WideMask operator<(const Wide& a, float b) {
  WideMask mask;
  LTX_EACH_PART mask.part[p] = a.part[p] < b;
  return mask;
}

LTX_INLINE Wide select(const WideMask& mask, Wide yes, const Wide& no) {
  LTX_EACH_PART yes.part[p] = mask.part[p] ? yes.part[p] : no.part[p];
  return yes;
}

LTX_INLINE Wide select(const WideMask& mask, Wide yes, float no) {
  LTX_EACH_PART yes.part[p] = mask.part[p] ? yes.part[p] : splat(no);
  return yes;
}

// Only the bits of `mask` in each lane: the absolute value, or the leading bits of the significand.
LTX_INLINE Wide keep_bits(Wide x, uint32_t mask) {
  LTX_EACH_PART x.part[p] = (F)((U)x.part[p] & mask);
  return x;
}

LTX_INLINE Wide bounded_magnitude(Wide x, float bound) {
  LTX_EACH_PART x.part[p] = bounded_magnitude(x.part[p], splat(bound));
  return x;
}

// x * 2^n, n being the integer in the lowest bits of `shifted` (see to_integer), for exponents that stay in range.
LTX_INLINE Wide scale_by_power(Wide x, const Wide& shifted) {
  LTX_EACH_PART x.part[p] = (F)((U)x.part[p] + ((U)shifted.part[p] << 23));
  return x;
}

// e^x underflows while e^x * y does not yet. So it is computed times 2^64, and the caller multiplies by kUnscale last.
constexpr float kUnscale = 0x1p-64f;
// 1.5 * 2^23 + 64: adding and subtracting it rounds to an integer, which, with 64 added, the lowest bits of the sum
// hold.
constexpr float kToInteger = 12582912.f + 64.f;

// e^-x * 2^64 for x in [0, 130]: 1 ulp, by -x = n ln 2 - r and a minimax polynomial (relative error 2^-28).
LTX_INLINE Wide scaled_exp_minus(const Wide& x) {
  const Wide shifted = x * -1.44269504f + kToInteger;
  const Wide n = shifted - kToInteger;
  // ln 2 in two pieces, the first of so few bits that n times it is exact.
  const Wide r = (x + n * 0.693359375f) + n * -2.12194440e-4f;
  const Wide square = r * r;
  const Wide polynomial =
      (r * -0.16666515171527863f + 0.4999999403953552f) +
      square * ((r * -0.008369418792426586f + 0.04166845604777336f) + square * 0.001381313893944025f);
  return scale_by_power((polynomial * square - r) + 1.f, shifted);
}

// x * sigmoid(v). With e = exp(-|v|) this is x / (1 + e) for v >= 0 and x * e / (1 + e) otherwise. Where e is below
// 2^-158 it counts as zero, as does x * e: finite x give zero, and -inf * 0 the NaN that torch gives.
LTX_INLINE Wide times_sigmoid(const Wide& x, const Wide& v) {
  const Wide magnitude = keep_bits(v, 0x7fffffffu);
  const Wide scaled = select(magnitude < 110.f, scaled_exp_minus(magnitude), 0.f);
  const WideMask negative = v < 0.f;
  const Wide quotient = select(negative, x * scaled, x) / (scaled * kUnscale + 1.f);
  return select(negative, quotient * kUnscale, quotient);
}

// kWide vectors of storage. Each 32-bit word of bfloat16 holds two neighbours; one shift and one mask separate them, so
// that a pair of vectors holds the even and the odd elements of its range. fp32 rows that join in are arranged alike.
template <class T>
LTX_INLINE Wide load_wide(const T* source) {
  Wide x;
  LTX_EACH_PART x.part[p] = load(source + p * kLanes);
  return x;
}
template <>
LTX_INLINE Wide load_wide<BFloat>(const BFloat* source) {
  Wide x;
#pragma GCC unroll 8
  for (int p = 0; p < kWide; p += 2) {
    const U words = load_words(source + p * kLanes);
    x.part[p] = (F)(words << 16);
    x.part[p + 1] = (F)(words & 0xffff0000u);
  }
  return x;
}

template <class T>
LTX_INLINE void store_wide(T* target, const Wide& x) {
  LTX_EACH_PART store(target + p * kLanes, x.part[p]);
}
template <>
LTX_INLINE void store_wide<BFloat>(BFloat* target, const Wide& x) {
#pragma GCC unroll 8
  for (int p = 0; p < kWide; p += 2) {
    const U even = bfloat_upper(x.part[p]), odd = bfloat_upper(x.part[p + 1]);
    store_words(target + p * kLanes, (even >> 16) | (odd & 0xffff0000u));
  }
}

// Brings an fp32 row, padded to whole Wides, into the order that load_wide<BFloat> gives.
inline void arrange_bfloat(float* row, int64_t width) {
  float pair[2 * kLanes];
  for (int64_t begin = 0; begin < width; begin += 2 * kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      pair[i] = row[begin + 2 * i];
      pair[kLanes + i] = row[begin + 2 * i + 1];
    }
    for (int i = 0; i < 2 * kLanes; ++i) row[begin + i] = pair[i];
  }
}

template <class T>
LTX_INLINE Wide round_to(Wide x) {
  LTX_EACH_PART x.part[p] = round_to<T>(x.part[p]);
  return x;
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx
