// CPU rotary embedding: optional norm of query and key, then rotation of the first rotary_dim columns of each head.
//
//   x      = input, or its rms norm or layer norm, over a head or over all heads of a token
//   out[a] = x[a] * cos[a] - x[b] * sin[a]
//   out[b] = x[b] * cos[b] + x[a] * sin[b]
//   pair (a, b) = (2p, 2p + 1) when interleaved, else (p, p + rotary_dim / 2)
//
// The unit of work is a token, with all its heads, of query and key alike: angles or table rows are brought once to two
// full-width fp32 rows (cos, and sin with the sign of its term) and used by every head that shares them, so that a
// rotation is x * cos + partner(x) * sin. Both columns of a pair are read before either is written, so that the output
// may be the input.

#ifndef LTX_ISA

#include <algorithm>
#include <cmath>
#include <limits>

#define LTX_ISA_FILE "cpu/rope.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void rotary(const RotaryParams& params, const RotaryAngles* angles, const Context& context) {
  LTX_DISPATCH(rotary, params, angles, context);
}

}  // namespace ltx

#else  // once per instruction set

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// Half of the lanes as doubles, which fill a native vector.
constexpr int kDoubles = kLanes / 2;
typedef double D __attribute__((vector_size(kLanes * 4)));
typedef uint64_t L __attribute__((vector_size(kLanes * 4)));
typedef float FHalf __attribute__((vector_size(kLanes * 2)));

// cos and sin of fp32 angles below 2^20 in magnitude, in double: half an fp32 ulp and a little. A multiple of pi / 2 is
// subtracted in two pieces, the first of 33 bits so that its product with a 20-bit integer is exact.
LTX_INLINE void cos_sin(FHalf angle, FHalf* cosine, FHalf* sine) {
  const D x = __builtin_convertvector(angle, D);
  const double to_integer = 6755399441055744.0;  // 1.5 * 2^52: adding and subtracting it rounds to an integer
  const D shifted = x * 0.63661977236758134 + to_integer;
  const D n = shifted - to_integer;
  const D r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
  const D z = r * r;
  const D s = r + r * z *
                      (-0.16666666644040354 +
                       z * (0.008333329305093303 + z * (-0.00019839253543027518 + z * 2.7172731622946917e-06)));
  const D c = 1.0 + z * (-0.5 + z * (0.041666654579759134 + z * (-0.0013887649460470487 + z * 2.4463166049196135e-05)));
  // shifted ends in the integer's bits. Odd quarter turns swap the two; the sign follows from the second bit.
  const L quarter = (L)shifted;
  const auto odd = (quarter & 1) != 0;
  const L cosine_sign = ((quarter + 1) & 2) << 62;
  const L sine_sign = (quarter & 2) << 62;
  *cosine = __builtin_convertvector((D)((L)(odd ? s : c) ^ cosine_sign), FHalf);
  *sine = __builtin_convertvector((D)((L)(odd ? c : s) ^ sine_sign), FHalf);
}

// Neighbours exchanged: lanes 1, 0, 3, 2, ...
LTX_INLINE F swap_neighbours(F x) {
#if defined(__clang__) && LTX_ISA_LEVEL == 2
  return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif defined(__clang__) && LTX_ISA_LEVEL == 1
  return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#elif defined(__clang__)
  return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#elif LTX_ISA_LEVEL == 2
  return __builtin_shuffle(x, I{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#elif LTX_ISA_LEVEL == 1
  return __builtin_shuffle(x, I{1, 0, 3, 2, 5, 4, 7, 6});
#else
  return __builtin_shuffle(x, I{1, 0, 3, 2});
#endif
}

// cos, and sin with the sign of its term, of each column of a head; padded.
struct Turn {
  float *cos, *sin;
};

// Spreads one cos and sin per pair (in `pairs`) over both columns of the pair.
inline void spread_pairs(const Turn& pairs, int64_t rotary_dim, bool interleaved, const Turn& turn) {
  const int64_t half = rotary_dim / 2;
  if (interleaved) {
    for (int64_t p = 0; p < half; ++p) {
      turn.cos[2 * p] = turn.cos[2 * p + 1] = pairs.cos[p];
      turn.sin[2 * p] = -pairs.sin[p];
      turn.sin[2 * p + 1] = pairs.sin[p];
    }
  } else {
    for (int64_t p = 0; p < half; ++p) {
      turn.cos[p] = turn.cos[half + p] = pairs.cos[p];
      turn.sin[p] = -pairs.sin[p];
      turn.sin[half + p] = pairs.sin[p];
    }
  }
}

// Table row to turn. `spare` holds two more rows.
inline void read_table(const RotaryParams& p, const char* cos, const char* sin, int64_t cos_stride, int64_t sin_stride,
                       const Turn& spare, const Turn& turn) {
  if (p.half_width_table) {
    expand(spare.cos, cos, p.table_dtype, cos_stride, p.rotary_dim / 2);
    expand(spare.sin, sin, p.table_dtype, sin_stride, p.rotary_dim / 2);
    return spread_pairs(spare, p.rotary_dim, p.interleaved, turn);
  }
  expand(turn.cos, cos, p.table_dtype, cos_stride, p.rotary_dim);
  expand(turn.sin, sin, p.table_dtype, sin_stride, p.rotary_dim);
  if (p.interleaved) {
    for (int64_t c = 0; c < p.rotary_dim; c += 2) turn.sin[c] = -turn.sin[c];
  } else {
    for (int64_t c = 0; c < p.rotary_dim / 2; ++c) turn.sin[c] = -turn.sin[c];
  }
}

inline float position_of(const RotaryAngles& a, int64_t batch, int64_t token) {
  const int64_t i = batch * a.position_stride_batch + token * a.position_stride_sequence;
  switch (a.position_type) {
    case PositionType::kInt64:
      return static_cast<float>(static_cast<const int64_t*>(a.positions)[i]);
    case PositionType::kInt32:
      return static_cast<float>(static_cast<const int32_t*>(a.positions)[i]);
    case PositionType::kFloat32:
      break;
  }
  return static_cast<const float*>(a.positions)[i];
}

// Angles of a token to turn.
inline void compute_angles(const RotaryParams& p, const RotaryAngles& a, int64_t batch, int64_t token,
                           const Turn& spare, const Turn& turn) {
  const int64_t pairs = p.rotary_dim / 2;
  const int64_t plane = a.grid[1] * a.grid[2];
  const int64_t coordinate[3] = {token / plane, token / a.grid[2] % a.grid[1], token % a.grid[2]};
  float* angle = turn.cos;
  for (int64_t axis = 0, pair = 0; axis < 3; ++axis) {
    const float position = a.positions != nullptr ? position_of(a, batch, token) : static_cast<float>(coordinate[axis]);
    for (; pair < a.axis_end[axis]; ++pair) angle[pair] = position * a.inverse_frequency[pair];
  }
  for (int64_t pair = pairs; pair < round_up(pairs, kDoubles); ++pair) angle[pair] = 0.f;

  bool in_range = true;
  for (int64_t pair = 0; pair < pairs; ++pair) in_range = in_range && std::fabs(angle[pair]) < 1048576.f;
  if (in_range) {
    for (int64_t pair = 0; pair < pairs; pair += kDoubles) {
      FHalf x, cosine, sine;
      __builtin_memcpy(&x, angle + pair, sizeof x);
      cos_sin(x, &cosine, &sine);
      __builtin_memcpy(spare.cos + pair, &cosine, sizeof cosine);
      __builtin_memcpy(spare.sin + pair, &sine, sizeof sine);
    }
  } else {
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const double x = std::isfinite(angle[pair]) ? angle[pair] : std::numeric_limits<double>::quiet_NaN();
      spare.cos[pair] = static_cast<float>(std::cos(x));
      spare.sin[pair] = static_cast<float>(std::sin(x));
    }
  }
  spread_pairs(spare, p.rotary_dim, p.interleaved, turn);
}

// A head, from Source (the storage, or an fp32 row of normed values) to T. Columns beyond rotary_dim are copied. Eager
// code rounds the products where input and table have one 16-bit dtype.
template <class Source, class T>
void rotate_head(const RotaryParams& p, const void* input, void* output, const Turn& turn) {
  const Source* in = static_cast<const Source*>(input);
  T* out = static_cast<T*>(output);
  const bool round_products = p.rounding == Rounding::kEager && p.table_dtype == p.dtype;
  const auto turned = [&](F x, F partner, int64_t c) {
    F straight = x * load(turn.cos + c), crossed = partner * load(turn.sin + c);
    if (round_products) {
      straight = round_to<T>(straight);
      crossed = round_to<T>(crossed);
    }
    return straight + crossed;
  };
  if (p.interleaved) {
    for (int64_t c = 0; c < p.rotary_dim; c += kLanes) {
      const F x = load_upto(in + c, p.rotary_dim - c);
      store_upto(out + c, turned(x, swap_neighbours(x), c), p.rotary_dim - c);
    }
  } else {
    const int64_t half = p.rotary_dim / 2;
    for (int64_t c = 0; c < half; c += kLanes) {
      const F first = load_upto(in + c, half - c), second = load_upto(in + half + c, half - c);
      store_upto(out + c, turned(first, second, c), half - c);
      store_upto(out + half + c, turned(second, first, half + c), half - c);
    }
  }
  if (input == output) return;
  for (int64_t c = p.rotary_dim; c < p.head_dim; c += kLanes) {
    store_upto(out + c, load_upto(in + c, p.head_dim - c), p.head_dim - c);
  }
}

void rotate_head(const RotaryParams& p, const void* input, bool normed, void* output, const Turn& turn) {
  switch (p.dtype) {
    case DType::kFloat32:
      return rotate_head<float, float>(p, input, output, turn);
    case DType::kFloat16:
      return normed ? rotate_head<float, Half>(p, input, output, turn)
                    : rotate_head<Half, Half>(p, input, output, turn);
    case DType::kBFloat16:
      return normed ? rotate_head<float, BFloat>(p, input, output, turn)
                    : rotate_head<BFloat, BFloat>(p, input, output, turn);
  }
}

// The norm's vectors in fp32; null where there is none.
struct Vectors {
  float *weight = nullptr, *bias = nullptr;
  float eps = 0.f;
};

struct SumTerm {
  const float* row;
  LTX_INLINE F operator()(int64_t c) const { return load(row + c); }
};

// Norm of an fp32 row padded with zeros, in place. Eager rounding rounds once, after weight and bias, and before the
// weight too where cast_before_weight asks for it.
void norm_row(const RotaryParams& p, const Vectors& vectors, int64_t width, float* row) {
  if (p.statistic == Statistic::kLayer) {
    const float mean = sum_row(width, SumTerm{row}) / static_cast<float>(width);
    for (int64_t c = 0; c < width; c += kLanes) {
      F x = load(row + c) - mean;
      if (width - c < kLanes) x = first_lanes(x, width - c);
      store(row + c, x);
    }
  }
  const float rstd = rms_rstd(row, width, vectors.eps);
  const bool eager = p.rounding == Rounding::kEager;
  for (int64_t c = 0; c < width; c += kLanes) {
    F x = load(row + c) * rstd;
    if (eager && p.cast_before_weight) x = round_to(p.dtype, x);
    if (const float* weight = varying(vectors.weight)) x = x * load(weight + c);
    if (const float* bias = varying(vectors.bias)) x = x + load(bias + c);
    if (eager) x = round_to(p.dtype, x);
    store(row + c, x);
  }
}

// Works through tokens; owns the scratch memory for that.
class TokenRange {
 public:
  TokenRange(const RotaryParams& p, const RotaryAngles* angles)
      : p_(p), angles_(angles), element_(static_cast<int64_t>(size_of(p.dtype))), scratch_(kRows, row_width(p)) {
    for (Turn& turn : turns_) turn = {scratch_.take(), scratch_.take()};
    spare_ = {scratch_.take(), scratch_.take()};
    normed_ = scratch_.take();
    input_buffer_ = scratch_.take();
    output_buffer_ = scratch_.take();
    for (int o = 0; o < p.operands; ++o) {
      const RotaryOperand& x = p.operand[o];
      const int64_t width = (p.norm == QkNorm::kAcrossHeads ? x.heads : 1) * p.head_dim;
      vectors_[o].eps = x.eps;
      if (x.weight != nullptr) {
        vectors_[o].weight = scratch_.take();
        expand(vectors_[o].weight, x.weight, x.weight_dtype, x.weight_stride, width);
        for (int64_t c = 0; p.weight_offset != 0.f && c < width; ++c) vectors_[o].weight[c] += p.weight_offset;
      }
      if (x.bias != nullptr) {
        vectors_[o].bias = scratch_.take();
        expand(vectors_[o].bias, x.bias, x.bias_dtype, x.bias_stride, width);
      }
    }
  }

  // Tokens of one batch entry, query and key, as far as they reach.
  void run(int64_t batch, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token += kTokens) {
      run_block(batch, token, std::min<int64_t>(kTokens, end - token));
    }
  }

 private:
  // Tokens whose angles are held at a time, so that heads which lie apart can be walked one by one.
  static constexpr int kTokens = 8;
  static constexpr int kRows = 2 * kTokens + 9;

  static int64_t row_width(const RotaryParams& p) {
    int64_t width = p.head_dim;
    if (p.norm == QkNorm::kAcrossHeads) {
      for (int o = 0; o < p.operands; ++o) width = std::max(width, p.operand[o].heads * p.head_dim);
    }
    return round_up(width, kSumLanes) + kSumLanes;  // the last head of a token is padded too
  }

  static int64_t offset(const HeadStrides& stride, int64_t batch, int64_t token, int64_t head) {
    return batch * stride.batch + token * stride.sequence + head * stride.head;
  }

  const char* input_at(const RotaryOperand& x, int64_t batch, int64_t token, int64_t head) const {
    return static_cast<const char*>(x.input) + offset(x.input_stride, batch, token, head) * element_;
  }

  void run_block(int64_t batch, int64_t token, int64_t count) {
    if (angles_ != nullptr) {
      for (int64_t t = 0; t < count; ++t) compute_angles(p_, *angles_, batch, token + t, spare_, turns_[t]);
    }
    for (int o = 0; o < p_.operands; ++o) {
      const RotaryOperand& x = p_.operand[o];
      const int64_t tokens = std::min(count, x.sequence - token);
      const bool shared_by_heads = angles_ != nullptr || (x.cos_stride.head == 0 && x.sin_stride.head == 0);
      if (angles_ == nullptr && shared_by_heads && tokens > 0) read_tables(x, batch, token, tokens);
      const auto run_one = [&](int64_t t, int64_t head) {
        if (!shared_by_heads) read_table_at(x, batch, token + t, head, turns_[t]);
        run_head(x, vectors_[o], batch, token + t, head, turns_[t]);
      };
      if (p_.norm != QkNorm::kAcrossHeads && x.input_stride.head > x.input_stride.sequence) {
        for (int64_t head = 0; head < x.heads; ++head) {
          for (int64_t t = 0; t < tokens; ++t) run_one(t, head);
        }
      } else {
        for (int64_t t = 0; t < tokens; ++t) {
          if (p_.norm == QkNorm::kAcrossHeads) norm_token(x, vectors_[o], batch, token + t);
          for (int64_t head = 0; head < x.heads; ++head) run_one(t, head);
        }
      }
      if (!shared_by_heads) last_cos_ = nullptr;
    }
  }

  void read_table_at(const RotaryOperand& x, int64_t batch, int64_t token, int64_t head, const Turn& turn) {
    const int64_t size = static_cast<int64_t>(size_of(p_.table_dtype));
    const char* cos = static_cast<const char*>(x.cos) + offset(x.cos_stride, batch, token, head) * size;
    const char* sin = static_cast<const char*>(x.sin) + offset(x.sin_stride, batch, token, head) * size;
    read_table(p_, cos, sin, x.cos_stride.column, x.sin_stride.column, spare_, turn);
  }

  // Brings the table's entries for the tokens into turns_, unless they are there: query and key mostly share a table.
  void read_tables(const RotaryOperand& x, int64_t batch, int64_t token, int64_t count) {
    const auto same = [](const HeadStrides& a, const HeadStrides& b) {
      return a.batch == b.batch && a.sequence == b.sequence && a.column == b.column;
    };
    if (last_cos_ == x.cos && last_sin_ == x.sin && last_batch_ == batch && last_token_ == token &&
        last_count_ >= count && same(last_cos_stride_, x.cos_stride) && same(last_sin_stride_, x.sin_stride)) {
      return;
    }
    for (int64_t t = 0; t < count; ++t) read_table_at(x, batch, token + t, 0, turns_[t]);
    last_cos_ = x.cos;
    last_sin_ = x.sin;
    last_cos_stride_ = x.cos_stride;
    last_sin_stride_ = x.sin_stride;
    last_batch_ = batch;
    last_token_ = token;
    last_count_ = count;
  }

  void norm_token(const RotaryOperand& x, const Vectors& vectors, int64_t batch, int64_t token) {
    expand_heads(normed_, input_at(x, batch, token, 0), p_.dtype, x.input_stride, x.heads, p_.head_dim);
    norm_row(p_, vectors, x.heads * p_.head_dim, normed_);
  }

  void run_head(const RotaryOperand& x, const Vectors& vectors, int64_t batch, int64_t token, int64_t head,
                const Turn& turn) {
    const void* input = input_at(x, batch, token, head);
    char* output = static_cast<char*>(x.output) + offset(x.output_stride, batch, token, head) * element_;
    if (p_.norm == QkNorm::kAcrossHeads) {
      input = normed_ + head * p_.head_dim;
    } else if (p_.norm == QkNorm::kPerHead) {
      expand(normed_, input, p_.dtype, x.input_stride.column, p_.head_dim);
      norm_row(p_, vectors, p_.head_dim, normed_);
      input = normed_;
    } else if (x.input_stride.column != 1) {
      gather(input_buffer_, input, p_.dtype, x.input_stride.column, p_.head_dim);
      input = input_buffer_;
    }
    const bool normed = p_.norm != QkNorm::kNone;
    if (x.output_stride.column == 1) return rotate_head(p_, input, normed, output, turn);
    rotate_head(p_, input, normed, output_buffer_, turn);
    scatter(output, p_.dtype, x.output_stride.column, p_.head_dim, output_buffer_);
  }

  const RotaryParams& p_;
  const RotaryAngles* angles_;
  int64_t element_;
  Scratch scratch_;
  Turn turns_[kTokens], spare_;
  float *normed_, *input_buffer_, *output_buffer_;
  Vectors vectors_[2];
  // What turns_ holds.
  const void* last_cos_ = nullptr;
  const void* last_sin_ = nullptr;
  HeadStrides last_cos_stride_, last_sin_stride_;
  int64_t last_batch_ = 0, last_token_ = 0, last_count_ = 0;
};

void rotary(const RotaryParams& params, const RotaryAngles* angles, const Context& context) {
  int64_t tokens = 0, heads = 0;
  for (int o = 0; o < params.operands; ++o) {
    tokens = std::max(tokens, params.operand[o].sequence);
    heads += params.operand[o].heads;
  }
  struct Job {
    const RotaryParams& params;
    const RotaryAngles* angles;
    int64_t tokens;
    void operator()(int64_t begin, int64_t end) const {
      TokenRange range(params, angles);
      for (int64_t unit = begin; unit < end;) {
        const int64_t batch = unit / tokens, token = unit % tokens;
        const int64_t count = std::min(end - unit, tokens - token);
        range.run(batch, token, token + count);
        unit += count;
      }
    }
  };
  for_ranges(context, params.batch * tokens, heads * params.head_dim, Job{params, angles, tokens});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
