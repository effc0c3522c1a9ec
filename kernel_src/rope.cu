// The rotary family: apply_rotary, apply_rotary_qk, rope_1d, rope_3d and qk_norm_rope.
//
//   x      = input, or input * rstd * weight              rstd = 1 / sqrt(mean(x^2) + eps), over a head or over a token
//   out[a] = x[a] * cos[a] - x[b] * sin[a]                pairs (a, b): (2p, 2p + 1) interleaved, (p, p + R / 2) half
//   out[b] = x[b] * cos[b] + x[a] * sin[b]                columns from R = rotary_dim on pass through
//
// ltx/params.h (RotaryParams, RotaryAngles) has the table forms. Query and key share one launch.
//
// A thread owns units: two packs of kWidth columns, A and B = A + R / 2, so that both members of every pair are in one
// thread in either layout (interleaved pairs lie inside a pack).
//   heads_kernel    one unit column of one token, for a run of query and key heads that share its cos and sin; with a
//   norm
//                   per head, the lanes of a head sum by shuffles.
//   row_kernel      all heads of a token, query and key together (norm across heads).
//   heads_general, row_general: the same for everything unusual: widths that packs do not divide, misaligned or strided
//                   columns, partial rotary, angles of each head's own, long rows, eager rounding.
// The first two are instantiated per table form and load everything before its first use.
#include <algorithm>
#include <type_traits>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// Everything about widths that the kernels need, computed once on the host.
struct Units {
  int32_t rotated;         // units of a head that turn
  int32_t per_head;        // units of a head
  int32_t pass_offset;     // B - A in the columns that pass through
  uint32_t packed_inputs;  // bit o: operand o's input moves in whole packs
  uint32_t packed_outputs;
  uint32_t packed_weights;
  uint32_t packed_tables;
};

// First column of a unit's packs. kWidth == 1 pairs neighbours when interleaved.
template <int kWidth>
__device__ __forceinline__ void unit_columns(const RotaryParams& p, const Units& units, int unit, int& a, int& b) {
  if (unit < units.rotated) {
    const bool neighbours = kWidth == 1 && p.interleaved;
    a = neighbours ? 2 * unit : unit * kWidth;
    b = neighbours ? a + 1 : a + static_cast<int>(p.rotary_dim) / 2;
  } else {
    a = static_cast<int>(p.rotary_dim) + (unit - units.rotated) * kWidth;
    b = a + units.pass_offset;
  }
}

// cos and sin of the columns of both packs.
template <int kWidth>
struct Turn {
  float cos_a[kWidth], sin_a[kWidth], cos_b[kWidth], sin_b[kWidth];
};

// One pack of table entries. A half-width table has an entry a pair: interleaved, kWidth / 2 of them, each used twice.
template <int kWidth>
__device__ __forceinline__ void load_entries(const RotaryParams& p, const void* table, int64_t start, int column,
                                             int64_t column_stride, bool packed, float (&x)[kWidth]) {
  constexpr int64_t kAll = INT64_MAX;  // no ragged end: units divide the rotated width
  if (p.half_width_table && p.interleaved) {
    if constexpr (kWidth == 1) {
      load_floats<1>(table, p.table_dtype, start, column / 2, column_stride, kAll, packed, x);
    } else {
      float pairs[kWidth / 2];
      load_floats<kWidth / 2>(table, p.table_dtype, start, column / 2, column_stride, kAll, packed, pairs);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = pairs[i / 2];
    }
  } else {
    if (p.half_width_table && column >= p.rotary_dim / 2) column -= static_cast<int>(p.rotary_dim) / 2;
    load_floats<kWidth>(table, p.table_dtype, start, column, column_stride, kAll, packed, x);
  }
}

__device__ __forceinline__ int64_t offset(const HeadStrides& s, int64_t batch, int64_t token, int64_t head) {
  return batch * s.batch + token * s.sequence + head * s.head;
}

template <int kWidth>
__device__ __forceinline__ void load_turn(const RotaryParams& p, const RotaryOperand& o, bool packed, int64_t batch,
                                          int64_t token, int64_t head, int a, int b, Turn<kWidth>& turn) {
  const int64_t cos = offset(o.cos_stride, batch, token, head), sin = offset(o.sin_stride, batch, token, head);
  load_entries<kWidth>(p, o.cos, cos, a, o.cos_stride.column, packed, turn.cos_a);
  load_entries<kWidth>(p, o.cos, cos, b, o.cos_stride.column, packed, turn.cos_b);
  load_entries<kWidth>(p, o.sin, sin, a, o.sin_stride.column, packed, turn.sin_a);
  load_entries<kWidth>(p, o.sin, sin, b, o.sin_stride.column, packed, turn.sin_b);
}

__device__ __forceinline__ float position_of(const RotaryAngles& angles, int64_t batch, int64_t token, int pair) {
  if (angles.positions) {
    const int64_t i = batch * angles.position_stride_batch + token * angles.position_stride_sequence;
    if (angles.position_type == PositionType::kInt64) {
      return static_cast<float>(static_cast<const int64_t*>(angles.positions)[i]);
    }
    if (angles.position_type == PositionType::kInt32) {
      return static_cast<float>(static_cast<const int32_t*>(angles.positions)[i]);
    }
    return static_cast<const float*>(angles.positions)[i];
  }
  const uint32_t index = static_cast<uint32_t>(token), width = static_cast<uint32_t>(angles.grid[2]);
  const uint32_t height = static_cast<uint32_t>(angles.grid[1]);
  if (pair < angles.axis_end[0]) return static_cast<float>(index / (height * width));
  if (pair < angles.axis_end[1]) return static_cast<float>(index / width % height);
  return static_cast<float>(index % width);
}

// sin and cos of fp32(position) * frequency. Angles reach 1e5 and more, where sincosf turns to a reduction in local
// memory. Here fp64 takes the quarter turns out, and what is left, at most an eighth of a turn, keeps its relative
// precision in fp32.
__device__ __forceinline__ void turn_by(float position, float frequency, float& sin, float& cos) {
  const double half_turns = static_cast<double>(__fmul_rn(position, frequency)) * 0.31830988618379067154;
  const double quarters = rint(2.0 * half_turns);
  float s, c;
  sincospif(static_cast<float>(fma(-0.5, quarters, half_turns)), &s, &c);
  const int quadrant = static_cast<int>(static_cast<int64_t>(quarters) & 3);
  sin = quadrant & 1 ? c : s;
  cos = quadrant & 1 ? s : c;
  if (quadrant == 2 || quadrant == 3) sin = -sin;
  if (quadrant == 1 || quadrant == 2) cos = -cos;
}

// The same Turn from positions and frequencies.
template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void compute_turn(const RotaryParams& p, const RotaryAngles& angles, int64_t batch,
                                             int64_t token, int a, int b, Turn<kWidth>& turn) {
  const int half = static_cast<int>(p.rotary_dim) / 2;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (kInterleaved && i % 2 == 1) {  // the pair of the column before
      turn.cos_a[i] = turn.cos_a[i - 1];
      turn.sin_a[i] = turn.sin_a[i - 1];
      turn.cos_b[i] = turn.cos_b[i - 1];
      turn.sin_b[i] = turn.sin_b[i - 1];
      continue;
    }
    const int pair_a = kInterleaved ? (a + i) / 2 : a + i, pair_b = kInterleaved ? (b + i) / 2 : b + i - half;
    turn_by(position_of(angles, batch, token, pair_a), angles.inverse_frequency[pair_a], turn.sin_a[i], turn.cos_a[i]);
    if (!kInterleaved || kWidth == 1) {  // A and B are the two sides of one pair
      turn.cos_b[i] = turn.cos_a[i];
      turn.sin_b[i] = turn.sin_a[i];
    } else {
      turn_by(position_of(angles, batch, token, pair_b), angles.inverse_frequency[pair_b], turn.sin_b[i],
              turn.cos_b[i]);
    }
  }
}

// x * cos + y * sin with the roundings of an eager chain in `dtype`; sin comes with its sign.
__device__ __forceinline__ float turn_one(float x, float y, float cos, float sin, bool eager, DType dtype) {
  if (!eager) return fmaf(x, cos, __fmul_rn(y, sin));
  return round_to(dtype, __fadd_rn(round_to(dtype, __fmul_rn(x, cos)), round_to(dtype, __fmul_rn(y, sin))));
}

template <typename T, bool kInterleaved, bool kEagerPossible, int kWidth>
__device__ __forceinline__ void rotate(const RotaryParams& p, const Turn<kWidth>& turn, float (&a)[kWidth],
                                       float (&b)[kWidth]) {
  const bool eager = kEagerPossible && p.rounding == Rounding::kEager;
  const DType dtype = promote(DTypeOf<T>::value, p.table_dtype);
  if constexpr (kInterleaved && kWidth > 1) {
#pragma unroll
    for (int i = 0; i + 1 < kWidth; i += 2) {
      const float a0 = a[i], b0 = b[i];
      a[i] = turn_one(a0, a[i + 1], turn.cos_a[i], -turn.sin_a[i], eager, dtype);
      a[i + 1] = turn_one(a[i + 1], a0, turn.cos_a[i + 1], turn.sin_a[i + 1], eager, dtype);
      b[i] = turn_one(b0, b[i + 1], turn.cos_b[i], -turn.sin_b[i], eager, dtype);
      b[i + 1] = turn_one(b[i + 1], b0, turn.cos_b[i + 1], turn.sin_b[i + 1], eager, dtype);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float a0 = a[i];
      a[i] = turn_one(a0, b[i], turn.cos_a[i], -turn.sin_a[i], eager, dtype);
      b[i] = turn_one(b[i], a0, turn.cos_b[i], turn.sin_b[i], eager, dtype);
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void rotate_general(const RotaryParams& p, const Turn<kWidth>& turn, float (&a)[kWidth],
                                               float (&b)[kWidth]) {
  if (p.interleaved) {
    rotate<T, true, true>(p, turn, a, b);
  } else {
    rotate<T, false, true>(p, turn, a, b);
  }
}

// x * rstd * weight. torch.nn.RMSNorm, the q/k norm of the models, multiplies in fp32 and rounds once.
template <typename T, int kWidth>
__device__ __forceinline__ void scale_by(const RotaryParams& p, const RotaryOperand& o, bool packed, int64_t column,
                                         float rstd, float (&x)[kWidth]) {
  float weight[kWidth];
  if (o.weight) {
    load_floats<kWidth>(o.weight, o.weight_dtype, 0, column, o.weight_stride, INT64_MAX, packed, weight);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = __fmul_rn(x[i], rstd);
    if (o.weight) x[i] = __fmul_rn(x[i], weight[i]);
    if (p.rounding == Rounding::kEager) x[i] = round_to<T>(x[i]);
  }
}

template <int kWidth>
__device__ __forceinline__ float squares(const float (&a)[kWidth], const float (&b)[kWidth]) {
  float terms[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) terms[i] = fmaf(a[i], a[i], __fmul_rn(b[i], b[i]));
  return tree_sum(terms);
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_input(const RotaryOperand& o, bool packed, int64_t start, int column) {
  return load_pack<T, kWidth>(static_cast<const T*>(o.input) + start, column, o.input_stride.column, INT64_MAX, packed);
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_output(const RotaryOperand& o, bool packed, int64_t start, int column,
                                             const float (&x)[kWidth]) {
  store_pack(static_cast<T*>(o.output) + start, column, o.output_stride.column, INT64_MAX, packed,
             to_pack<T, kWidth>(x));
}

// ---- The main line: whole packs, full rotary, fp32 rounding, one table form an instance

// kCount table entries in their own dtype, so that several loads are in flight before the first conversion.
template <typename C, int kCount>
struct Entries {
  static constexpr int kStep = kCount < kPackWidth<C> ? kCount : kPackWidth<C>;
  Pack<C, kStep> pack[kCount / kStep];

  __device__ __forceinline__ void load(const void* table, int64_t start) {
#pragma unroll
    for (int s = 0; s < kCount / kStep; ++s) {
      pack[s] = load_pack<C, kStep>(static_cast<const C*>(table) + start, s * kStep, 1, 0, true);
    }
  }
  __device__ __forceinline__ void get(float (&x)[kCount]) const {
#pragma unroll
    for (int s = 0; s < kCount / kStep; ++s) {
      float part[kStep];
      unpack(pack[s], part);
#pragma unroll
      for (int i = 0; i < kStep; ++i) x[s * kStep + i] = part[i];
    }
  }
};

// Where a Turn comes from: a full-width table of C,
template <typename T, typename C, bool kInterleaved>
struct FullTable {
  static constexpr int kWidth = kPackWidth<T>;
  struct Angles {};
  Entries<C, kWidth> cos_a, cos_b, sin_a, sin_b;

  __device__ __forceinline__ void load(const RotaryParams&, const Angles&, const RotaryOperand& o, int64_t batch,
                                       int64_t token, int head, int a, int b) {
    const int64_t cos = offset(o.cos_stride, batch, token, head), sin = offset(o.sin_stride, batch, token, head);
    cos_a.load(o.cos, cos + a);
    cos_b.load(o.cos, cos + b);
    sin_a.load(o.sin, sin + a);
    sin_b.load(o.sin, sin + b);
  }
  __device__ __forceinline__ void get(Turn<kWidth>& turn) const {
    cos_a.get(turn.cos_a);
    cos_b.get(turn.cos_b);
    sin_a.get(turn.sin_a);
    sin_b.get(turn.sin_b);
  }
};

// a table of one fp32 entry a pair,
template <typename T, bool kInterleaved>
struct HalfTable {
  static constexpr int kWidth = kPackWidth<T>;
  // Interleaved, a pack holds kWidth / 2 pairs; otherwise A and B are the two sides of kWidth pairs.
  static constexpr int kEntries = kInterleaved ? kWidth / 2 : kWidth;
  struct Angles {};
  Entries<float, kEntries> cos_a, cos_b, sin_a, sin_b;

  __device__ __forceinline__ void load(const RotaryParams&, const Angles&, const RotaryOperand& o, int64_t batch,
                                       int64_t token, int head, int a, int b) {
    const int64_t cos = offset(o.cos_stride, batch, token, head), sin = offset(o.sin_stride, batch, token, head);
    cos_a.load(o.cos, cos + (kInterleaved ? a / 2 : a));
    sin_a.load(o.sin, sin + (kInterleaved ? a / 2 : a));
    if constexpr (kInterleaved) {
      cos_b.load(o.cos, cos + b / 2);
      sin_b.load(o.sin, sin + b / 2);
    }
  }
  static __device__ __forceinline__ void spread(const Entries<float, kEntries>& entries, float (&x)[kWidth]) {
    float pairs[kEntries];
    entries.get(pairs);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = pairs[kInterleaved ? i / 2 : i];
  }
  __device__ __forceinline__ void get(Turn<kWidth>& turn) const {
    spread(cos_a, turn.cos_a);
    spread(sin_a, turn.sin_a);
    spread(kInterleaved ? cos_b : cos_a, turn.cos_b);
    spread(kInterleaved ? sin_b : sin_a, turn.sin_b);
  }
};

// or positions and frequencies.
template <typename T, bool kInterleaved>
struct Computed {
  static constexpr int kWidth = kPackWidth<T>;
  using Angles = RotaryAngles;
  Turn<kWidth> turn;

  __device__ __forceinline__ void load(const RotaryParams& p, const RotaryAngles& angles, const RotaryOperand&,
                                       int64_t batch, int64_t token, int, int a, int b) {
    compute_turn<kInterleaved>(p, angles, batch, token, a, b, turn);
  }
  __device__ __forceinline__ void get(Turn<kWidth>& t) const { t = turn; }
};

// Query and key, where both turn by the same table: then one thread, with one Turn, does both.
__device__ __forceinline__ const RotaryOperand& operand_of(const RotaryParams& p, bool shared, int i) {
  return p.operand[shared ? i : static_cast<int>(blockIdx.z)];
}

// x * rstd * weight, the weight held since the start.
template <typename T, int kWidth>
__device__ __forceinline__ void scale_held(bool weighted, const Pack<T, kWidth>& weight, float rstd,
                                           float (&x)[kWidth]) {
  float w[kWidth];
  if (weighted) unpack(weight, w);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = __fmul_rn(x[i], rstd);
    if (weighted) x[i] = __fmul_rn(x[i], w[i]);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void load_weight(const RotaryOperand& o, int column, Pack<T, kWidth>& weight) {
  if (o.weight) weight = load_pack<T, kWidth>(static_cast<const T*>(o.weight), column, 1, 0, true);
}

// Word by word: a choice between two arrays would put both into local memory.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> select(bool first, const Pack<T, kWidth>& x, const Pack<T, kWidth>& y) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack.word) / sizeof(pack.word[0])); ++i) {
    pack.word[i] = first ? x.word[i] : y.word[i];
  }
  return pack;
}

constexpr int kHeadsThreads = 256;
// Heads that a thread loads before it stores the first: four 16-byte loads in flight.
constexpr int kHeadsAtOnce = 2;

// grid: x = groups of tokens, y = runs of heads, z = operand (one where shared: the heads are then query's and key's).
// `lanes` threads share a token, one a unit of a head; with a norm the next power of two, so that the lanes of a head
// sum among themselves.
template <typename T, typename Source, bool kInterleaved, bool kNorm>
__global__ void __launch_bounds__(kHeadsThreads, 2)
    heads_kernel(const __grid_constant__ RotaryParams p, const __grid_constant__ typename Source::Angles angles,
                 int lanes, int units, int heads_per_block, bool shared) {
  constexpr int kWidth = kPackWidth<T>;
  const RotaryOperand& first_operand = operand_of(p, shared, 0);
  const uint32_t thread = blockIdx.x * kHeadsThreads + threadIdx.x;
  const uint32_t row = thread / static_cast<uint32_t>(lanes);
  const int unit = static_cast<int>(thread - row * static_cast<uint32_t>(lanes));
  const uint32_t batches = static_cast<uint32_t>(p.batch);
  const int first_heads = static_cast<int>(first_operand.heads);
  const int heads = first_heads + (shared ? static_cast<int>(p.operand[1].heads) : 0);
  const int begin = static_cast<int>(blockIdx.y) * heads_per_block, end = min(begin + heads_per_block, heads);
  const bool active = row < batches * static_cast<uint32_t>(first_operand.sequence) && unit < units;
  if (!kNorm && !active) return;  // with a norm, every lane must reach the shuffles
  // Batches side by side: they may share a table, which then comes from cache.
  const int64_t token = active ? row / batches : 0, batch = active ? row % batches : 0;
  const int a = active ? unit * kWidth : 0, b = a + static_cast<int>(p.head_dim) / 2;

  Source source;
  if (active) source.load(p, angles, first_operand, batch, token, 0, a, b);
  Pack<T, kWidth> weight_a[2], weight_b[2];
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || shared) {
        load_weight<T>(operand_of(p, shared, i), a, weight_a[i]);
        load_weight<T>(operand_of(p, shared, i), b, weight_b[i]);
      }
    }
  }
  Turn<kWidth> turn;
  source.get(turn);
  for (int head = begin; head < end; head += kHeadsAtOnce) {
    Pack<T, kWidth> raw_a[kHeadsAtOnce], raw_b[kHeadsAtOnce];
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      if (active && head + i < end) {
        const bool second = head + i >= first_heads;
        const RotaryOperand& o = operand_of(p, shared, second);
        const int64_t start = offset(o.input_stride, batch, token, head + i - (second ? first_heads : 0));
        raw_a[i] = load_input<T, kWidth>(o, true, start, a);
        raw_b[i] = load_input<T, kWidth>(o, true, start, b);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      if (head + i < end) {
        const bool second = head + i >= first_heads;
        const RotaryOperand& o = operand_of(p, shared, second);
        float x_a[kWidth], x_b[kWidth];
        unpack(raw_a[i], x_a);
        unpack(raw_b[i], x_b);
        if constexpr (kNorm) {
          const float sum = lane_sum(active ? squares(x_a, x_b) : 0.f, lanes);
          const float rstd = rsqrtf(sum / static_cast<float>(p.head_dim) + p.eps);
          scale_held(o.weight, select(second, weight_a[1], weight_a[0]), rstd, x_a);
          scale_held(o.weight, select(second, weight_b[1], weight_b[0]), rstd, x_b);
        }
        rotate<T, kInterleaved, false>(p, turn, x_a, x_b);
        if (active) {
          const int64_t start = offset(o.output_stride, batch, token, head + i - (second ? first_heads : 0));
          store_output<T>(o, true, start, a, x_a);
          store_output<T>(o, true, start, b, x_b);
        }
      }
    }
  }
}

constexpr int kMaxRowThreads = 512;

// grid: x = tokens, z = operand (one where shared). The block owns a token, each thread a unit of query and of key.
template <typename T, typename Source, bool kInterleaved>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    row_kernel(const __grid_constant__ RotaryParams p, int units, bool shared) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][32];
  const RotaryOperand& first_operand = operand_of(p, shared, 0);
  const uint32_t batches = static_cast<uint32_t>(p.batch);
  const int64_t token = blockIdx.x / batches, batch = blockIdx.x % batches;
  if (token >= first_operand.sequence) return;  // the whole block: the other operand is longer
  const int head = static_cast<int>(threadIdx.x) / units, unit = static_cast<int>(threadIdx.x) - head * units;
  const bool active = head < first_operand.heads;
  const int a = unit * kWidth, b = a + static_cast<int>(p.head_dim) / 2;
  const int row = head * static_cast<int>(p.head_dim);

  Pack<T, kWidth> raw_a[2], raw_b[2], weight_a[2], weight_b[2];
  Source source;
  if (active) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || shared) {
        const RotaryOperand& o = operand_of(p, shared, i);
        const int64_t start = offset(o.input_stride, batch, token, head);
        raw_a[i] = load_input<T, kWidth>(o, true, start, a);
        raw_b[i] = load_input<T, kWidth>(o, true, start, b);
      }
    }
    source.load(p, {}, first_operand, batch, token, head, a, b);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || shared) {
        load_weight<T>(operand_of(p, shared, i), row + a, weight_a[i]);
        load_weight<T>(operand_of(p, shared, i), row + b, weight_b[i]);
      }
    }
  }
  float sums[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (active && (i == 0 || shared)) {
      float x_a[kWidth], x_b[kWidth];
      unpack(raw_a[i], x_a);
      unpack(raw_b[i], x_b);
      sums[i] = squares(x_a, x_b);
    }
  }
  row_sums(sums, static_cast<int>(blockDim.x), scratch);
  if (!active) return;
  Turn<kWidth> turn;
  source.get(turn);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i == 0 || shared) {
      const RotaryOperand& o = operand_of(p, shared, i);
      const float rstd = rsqrtf(sums[i] / static_cast<float>(o.heads * p.head_dim) + p.eps);
      float x_a[kWidth], x_b[kWidth];
      unpack(raw_a[i], x_a);
      unpack(raw_b[i], x_b);
      scale_held(o.weight, weight_a[i], rstd, x_a);
      scale_held(o.weight, weight_b[i], rstd, x_b);
      rotate<T, kInterleaved, false>(p, turn, x_a, x_b);
      const int64_t start = offset(o.output_stride, batch, token, head);
      store_output<T>(o, true, start, a, x_a);
      store_output<T>(o, true, start, b, x_b);
    }
  }
}

// ---- Everything else

struct NoAngles {};

template <int kWidth>
__device__ __forceinline__ void find_turn(const RotaryParams& p, const RotaryOperand& o, const NoAngles&, bool packed,
                                          int64_t batch, int64_t token, int64_t head, int a, int b,
                                          Turn<kWidth>& turn) {
  load_turn<kWidth>(p, o, packed, batch, token, head, a, b, turn);
}
template <int kWidth>
__device__ __forceinline__ void find_turn(const RotaryParams& p, const RotaryOperand&, const RotaryAngles& angles, bool,
                                          int64_t batch, int64_t token, int64_t, int a, int b, Turn<kWidth>& turn) {
  if (p.interleaved) {
    compute_turn<true>(p, angles, batch, token, a, b, turn);
  } else {
    compute_turn<false>(p, angles, batch, token, a, b, turn);
  }
}

// grid: x = groups of tokens, y = runs of heads, z = operand. `lanes` threads share a token, one a unit of a head; with
// a norm the next power of two, so that the lanes of a head sum among themselves.
template <typename T, int kWidth, bool kNorm, typename Angles>
__global__ void __launch_bounds__(kHeadsThreads, 1)
    heads_general(const __grid_constant__ RotaryParams p, const __grid_constant__ Angles angles,
                  const __grid_constant__ Units units, int lanes, int heads_per_block) {
  const RotaryOperand& o = p.operand[blockIdx.z];
  const bool packed_in = units.packed_inputs >> blockIdx.z & 1, packed_out = units.packed_outputs >> blockIdx.z & 1;
  const bool packed_table = units.packed_tables >> blockIdx.z & 1;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row =
      thread <= 0xffffffffll ? static_cast<uint32_t>(thread) / static_cast<uint32_t>(lanes) : thread / lanes;
  const int unit = static_cast<int>(thread - row * lanes);
  const int first_head = static_cast<int>(blockIdx.y) * heads_per_block;
  const int last_head = min(first_head + heads_per_block, static_cast<int>(o.heads));
  const bool active = row < p.batch * o.sequence && unit < units.per_head;
  // With a norm every lane must reach the shuffles.
  if (!kNorm && !active) return;
  const int64_t batch = active ? row / o.sequence : 0, token = active ? row - batch * o.sequence : 0;
  int a = 0, b = 0;
  unit_columns<kWidth>(p, units, active ? unit : 0, a, b);
  const bool turns = active && unit < units.rotated;
  const bool own_angles = o.cos_stride.head != 0 || o.sin_stride.head != 0;
  Turn<kWidth> turn;
  if (turns && !own_angles) find_turn(p, o, angles, packed_table, batch, token, 0, a, b, turn);

#pragma unroll 1
  for (int head = first_head; head < last_head; ++head) {
    const int64_t start = offset(o.input_stride, batch, token, head);
    float x_a[kWidth] = {}, x_b[kWidth] = {};
    if (active) {
      unpack(load_input<T, kWidth>(o, packed_in, start, a), x_a);
      unpack(load_input<T, kWidth>(o, packed_in, start, b), x_b);
    }
    if constexpr (kNorm) {
      const float sum = lane_sum(squares(x_a, x_b), lanes);
      const float rstd = rsqrtf(sum / static_cast<float>(p.head_dim) + p.eps);
      const bool packed_weight = units.packed_weights >> blockIdx.z & 1;
      scale_by<T>(p, o, packed_weight, a, rstd, x_a);
      scale_by<T>(p, o, packed_weight, b, rstd, x_b);
    }
    if (turns) {
      if (own_angles) find_turn(p, o, angles, packed_table, batch, token, head, a, b, turn);
      rotate_general<T>(p, turn, x_a, x_b);
    }
    if (active) {
      const int64_t out = offset(o.output_stride, batch, token, head);
      store_output<T>(o, packed_out, out, a, x_a);
      store_output<T>(o, packed_out, out, b, x_b);
    }
  }
}

// grid: x = rows, y = operand. A row is a token (norm across heads) or one long head of a token; the block owns it and
// reads it twice.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    row_general(const __grid_constant__ RotaryParams p, const __grid_constant__ Units units) {
  __shared__ float scratch[32];
  const RotaryOperand& o = p.operand[blockIdx.y];
  const bool packed_in = units.packed_inputs >> blockIdx.y & 1, packed_out = units.packed_outputs >> blockIdx.y & 1;
  const bool packed_table = units.packed_tables >> blockIdx.y & 1;
  const bool packed_weight = units.packed_weights >> blockIdx.y & 1;
  const int heads = p.norm == QkNorm::kAcrossHeads ? static_cast<int>(o.heads) : 1;
  const int64_t tokens = p.norm == QkNorm::kAcrossHeads ? blockIdx.x : blockIdx.x / o.heads;
  const int row_head = static_cast<int>(blockIdx.x - tokens * (p.norm == QkNorm::kAcrossHeads ? 1 : o.heads));
  if (tokens >= p.batch * o.sequence) return;  // the whole block: the other operand is longer
  const int64_t batch = tokens / o.sequence, token = tokens - batch * o.sequence;
  const int count = heads * units.per_head;
  const int threads = static_cast<int>(blockDim.x);

  struct Place {
    int head, a, b;
    bool turns;
  };
  const auto place = [&](int u) {
    Place at;
    at.head = u / units.per_head;
    const int unit = u - at.head * units.per_head;
    unit_columns<kWidth>(p, units, unit, at.a, at.b);
    at.turns = unit < units.rotated;
    at.head += row_head;
    return at;
  };
  const auto load = [&](const Place& at, Pack<T, kWidth>& raw_a, Pack<T, kWidth>& raw_b) {
    const int64_t start = offset(o.input_stride, batch, token, at.head);
    raw_a = load_input<T, kWidth>(o, packed_in, start, at.a);
    raw_b = load_input<T, kWidth>(o, packed_in, start, at.b);
  };
  const auto finish = [&](const Place& at, const Pack<T, kWidth>& raw_a, const Pack<T, kWidth>& raw_b, float rstd) {
    float x_a[kWidth], x_b[kWidth];
    unpack(raw_a, x_a);
    unpack(raw_b, x_b);
    const int64_t weight_start = static_cast<int64_t>(at.head - row_head) * p.head_dim;
    scale_by<T>(p, o, packed_weight, weight_start + at.a, rstd, x_a);
    scale_by<T>(p, o, packed_weight, weight_start + at.b, rstd, x_b);
    if (at.turns) {
      Turn<kWidth> turn;
      load_turn<kWidth>(p, o, packed_table, batch, token, at.head, at.a, at.b, turn);
      rotate_general<T>(p, turn, x_a, x_b);
    }
    const int64_t start = offset(o.output_stride, batch, token, at.head);
    store_output<T>(o, packed_out, start, at.a, x_a);
    store_output<T>(o, packed_out, start, at.b, x_b);
  };
  const auto sum_of = [&](const Pack<T, kWidth>& raw_a, const Pack<T, kWidth>& raw_b) {
    float x_a[kWidth], x_b[kWidth];
    unpack(raw_a, x_a);
    unpack(raw_b, x_b);
    return squares(x_a, x_b);
  };

  float sum = 0.f;
  Pack<T, kWidth> raw_a, raw_b;
#pragma unroll 1
  for (int u = threadIdx.x; u < count; u += threads) {
    load(place(u), raw_a, raw_b);
    sum += sum_of(raw_a, raw_b);
  }
  const float mean = row_sum(sum, threads, scratch) / static_cast<float>(heads * p.head_dim);
  const float rstd = rsqrtf(mean + p.eps);
#pragma unroll 1
  for (int u = threadIdx.x; u < count; u += threads) {
    const Place at = place(u);
    load(at, raw_a, raw_b);
    finish(at, raw_a, raw_b, rstd);
  }
}

// Whether packs of kWidth divide the widths: both halves of what turns, and of what passes through.
bool divides(const RotaryParams& p, int width) {
  const int64_t rest = p.head_dim - p.rotary_dim;
  return p.rotary_dim / 2 % width == 0 && rest % 2 == 0 && rest / 2 % width == 0;
}

template <typename T, int kWidth>
Units make_units(const RotaryParams& p) {
  Units units{};
  const int64_t rest = p.head_dim - p.rotary_dim;
  units.rotated = static_cast<int32_t>(p.rotary_dim / 2 / kWidth);
  units.per_head = units.rotated + static_cast<int32_t>(rest / 2 / kWidth);
  units.pass_offset = static_cast<int32_t>(rest / 2);
  const auto packed = [](const void* data, DType dtype, int width, const HeadStrides& s) {
    const int64_t strides[] = {s.batch, s.sequence, s.head};
    return is_packed(data, dtype, width, width, s.column, strides, 3);
  };
  const int table_width = p.half_width_table && p.interleaved && kWidth > 1 ? kWidth / 2 : kWidth;
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    units.packed_inputs |= static_cast<uint32_t>(packed(o.input, p.dtype, kWidth, o.input_stride)) << i;
    units.packed_outputs |= static_cast<uint32_t>(packed(o.output, p.dtype, kWidth, o.output_stride)) << i;
    units.packed_tables |= static_cast<uint32_t>(packed(o.cos, p.table_dtype, table_width, o.cos_stride) &&
                                                 packed(o.sin, p.table_dtype, table_width, o.sin_stride))
                           << i;
    units.packed_weights |=
        static_cast<uint32_t>(is_packed(o.weight, o.weight_dtype, kWidth, kWidth, o.weight_stride, nullptr, 0)) << i;
  }
  return units;
}

int64_t longest(const RotaryParams& p) {
  return std::max(p.operand[0].sequence, p.operands == 2 ? p.operand[1].sequence : 0);
}

// Enough heads a thread to pay for its cos and sin, few enough to fill the GPU with short sequences.
int heads_per_block(int64_t heads, bool computed) {
  return static_cast<int>(std::max<int64_t>(std::min<int64_t>(heads, computed ? 16 : 8), ceil_div(heads, 65535)));
}

template <typename T, int kWidth, bool kNorm, typename Angles>
void launch_heads_general(const RotaryParams& p, const Angles& angles, const Units& units, cudaStream_t stream) {
  const int lanes = kNorm ? next_power_of_two(units.per_head) : units.per_head;
  const int64_t heads = std::max(p.operand[0].heads, p.operands == 2 ? p.operand[1].heads : 0);
  const int run = heads_per_block(heads, std::is_same_v<Angles, RotaryAngles>);
  const dim3 grid(grid_size(ceil_div(p.batch * longest(p) * lanes, kHeadsThreads)),
                  static_cast<unsigned>(ceil_div(heads, run)), static_cast<unsigned>(p.operands));
  heads_general<T, kWidth, kNorm, Angles><<<grid, kHeadsThreads, 0, stream>>>(p, angles, units, lanes, run);
}

template <typename T, int kWidth>
void launch_general(const RotaryParams& p, const RotaryAngles* angles, cudaStream_t stream) {
  Units units = make_units<T, kWidth>(p);
  if (forced().rotary == Kernel::kElements) {
    units.packed_inputs = units.packed_outputs = units.packed_weights = units.packed_tables = 0;
  }
  if (angles) return launch_heads_general<T, kWidth, false>(p, *angles, units, stream);
  if (p.norm == QkNorm::kNone) return launch_heads_general<T, kWidth, false>(p, NoAngles{}, units, stream);
  const bool across = p.norm == QkNorm::kAcrossHeads;
  if (!across && units.per_head <= 32) {
    return launch_heads_general<T, kWidth, true>(p, NoAngles{}, units, stream);
  }
  int64_t rows = 0, count = 0;
  for (int i = 0; i < p.operands; ++i) {
    rows = std::max(rows, p.batch * p.operand[i].sequence * (across ? 1 : p.operand[i].heads));
    count = std::max(count, (across ? p.operand[i].heads : 1) * units.per_head);
  }
  const dim3 grid(grid_size(rows), static_cast<unsigned>(p.operands));
  const int threads = static_cast<int>(std::min<int64_t>(ceil_div(count, 32) * 32, kMaxRowThreads));
  row_general<T, kWidth><<<grid, threads, 0, stream>>>(p, units);
}

bool same(const HeadStrides& a, const HeadStrides& b) {
  return a.batch == b.batch && a.sequence == b.sequence && a.head == b.head && a.column == b.column;
}

// Whether the main line takes the call: see its heading.
template <typename T>
bool is_main_line(const RotaryParams& p, bool computed) {
  constexpr int kWidth = kPackWidth<T>;
  if (p.rounding != Rounding::kFp32 || p.rotary_dim != p.head_dim || !divides(p, kWidth)) return false;
  if (p.batch * longest(p) * std::max<int64_t>(p.head_dim / 2 / kWidth, 32) > 0x7fffffff) return false;  // 32-bit rows
  if (p.half_width_table && p.table_dtype != DType::kFloat32) return false;
  const Units units = make_units<T, kWidth>(p);
  const uint32_t all = (1u << p.operands) - 1;
  if (units.packed_inputs != all || units.packed_outputs != all || (!computed && units.packed_tables != all)) {
    return false;
  }
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    if (o.weight && (o.weight_dtype != DTypeOf<T>::value || !(units.packed_weights >> i & 1))) return false;
    const bool own_angles = o.cos_stride.head != 0 || o.sin_stride.head != 0;
    if (p.norm == QkNorm::kAcrossHeads ? o.heads * units.per_head > kMaxRowThreads : own_angles && o.heads > 1) {
      return false;
    }
  }
  return p.norm != QkNorm::kPerHead || units.per_head <= 32;
}

template <typename T, typename Source, bool kInterleaved>
void launch_main_line(const RotaryParams& p, const typename Source::Angles& angles, cudaStream_t stream) {
  const RotaryOperand &q = p.operand[0], &k = p.operand[1];
  const int units = static_cast<int>(p.head_dim / 2 / kPackWidth<T>);
  const bool across = p.norm == QkNorm::kAcrossHeads;
  const bool shared = p.operands == 2 && q.sequence == k.sequence && q.cos == k.cos && q.sin == k.sin &&
                      same(q.cos_stride, k.cos_stride) && same(q.sin_stride, k.sin_stride) &&
                      (!across || q.heads == k.heads);
  const unsigned operands = shared ? 1 : static_cast<unsigned>(p.operands);
  constexpr bool kComputed = std::is_same_v<typename Source::Angles, RotaryAngles>;
  if constexpr (!kComputed) {
    if (across) {
      const int64_t threads = ceil_div(std::max(q.heads, p.operands == 2 ? k.heads : 0) * units, 32) * 32;
      const dim3 grid(grid_size(p.batch * longest(p)), 1, operands);
      row_kernel<T, Source, kInterleaved><<<grid, static_cast<unsigned>(threads), 0, stream>>>(p, units, shared);
      return;
    }
  }
  const bool norm = p.norm == QkNorm::kPerHead;
  const int lanes = norm ? next_power_of_two(units) : units;
  const int64_t heads = shared ? q.heads + k.heads : std::max(q.heads, p.operands == 2 ? k.heads : 0);
  const int run = heads_per_block(heads, kComputed);
  const dim3 grid(grid_size(ceil_div(p.batch * longest(p) * lanes, kHeadsThreads)),
                  static_cast<unsigned>(ceil_div(heads, run)), operands);
  if constexpr (!kComputed) {
    if (norm) {
      heads_kernel<T, Source, kInterleaved, true>
          <<<grid, kHeadsThreads, 0, stream>>>(p, angles, lanes, units, run, shared);
      return;
    }
  }
  heads_kernel<T, Source, kInterleaved, false>
      <<<grid, kHeadsThreads, 0, stream>>>(p, angles, lanes, units, run, shared);
}

template <typename T, bool kInterleaved>
void dispatch_source(const RotaryParams& p, const RotaryAngles* angles, cudaStream_t stream) {
  if (angles) return launch_main_line<T, Computed<T, kInterleaved>, kInterleaved>(p, *angles, stream);
  if (p.half_width_table) return launch_main_line<T, HalfTable<T, kInterleaved>, kInterleaved>(p, {}, stream);
  if (p.table_dtype == DType::kFloat32) {
    return launch_main_line<T, FullTable<T, float, kInterleaved>, kInterleaved>(p, {}, stream);
  }
  return launch_main_line<T, FullTable<T, T, kInterleaved>, kInterleaved>(p, {}, stream);
}

}  // namespace

void rotary(const RotaryParams& p, const RotaryAngles* angles, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Kernel kernel = forced().rotary;
    if (takes_packed("rotary", kernel, is_main_line<T>(p, angles != nullptr))) {
      return p.interleaved ? dispatch_source<T, true>(p, angles, stream) : dispatch_source<T, false>(p, angles, stream);
    }
    const bool whole = divides(p, kPackWidth<T>);
    if (!whole && (kernel == Kernel::kGeneral || kernel == Kernel::kElements)) {
      fail_forced("head widths that whole packs divide", "rotary=general or rotary=elements");
    }
    if (whole && kernel != Kernel::kSingle) return launch_general<T, kPackWidth<T>>(p, angles, stream);
    return launch_general<T, 1>(p, angles, stream);
  });
  check_launch("rotary");
}

}  // namespace ltx
