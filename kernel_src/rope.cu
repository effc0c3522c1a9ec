// The rotary family: apply_rotary, apply_rotary_qk, rope_1d, rope_3d and qk_norm_rope.
//
//   x      = input, or its rms norm or layer norm, over a head or over all heads of a token
//   out[a] = x[a] * cos[a] - x[b] * sin[a]                pairs (a, b): (2p, 2p + 1) interleaved, (p, p + R / 2) half
//   out[b] = x[b] * cos[b] + x[a] * sin[b]                columns from R = rotary_dim on pass through
//
// ltx/params.h (RotaryParams, RotaryAngles) has the table forms. Query and key share one launch.
//
// A thread owns units: two packs of kWidth columns, A and B = A + R / 2, so that both members of every pair are in one
// thread in either layout (interleaved pairs lie inside a pack).
//   heads_kernel    one unit column of one token, for a run of heads or of batches that share its cos and sin, or for
//                   one head with its own; with a norm per head, the lanes of a head sum by shuffles.
//   row_kernel      all heads of a token, query and key together (norm across heads).
//   heads_general, row_general: the same for everything unusual: widths that packs do not divide, misaligned or strided
//                   columns, partial rotary, long rows, eager rounding, layer norm or a weight offset across heads.
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
  uint32_t packed_vectors;  // bits 2o and 2o + 1: its norm's weight and bias
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

__device__ __forceinline__ float given_position(const RotaryAngles& angles, int64_t batch, int64_t token) {
  const int64_t i = batch * angles.position_stride_batch + token * angles.position_stride_sequence;
  if (angles.position_type == PositionType::kInt64) {
    return static_cast<float>(static_cast<const int64_t*>(angles.positions)[i]);
  }
  if (angles.position_type == PositionType::kInt32) {
    return static_cast<float>(static_cast<const int32_t*>(angles.positions)[i]);
  }
  return static_cast<const float*>(angles.positions)[i];
}

// The coordinate of a token of the grid on the pair's axis.
__device__ __forceinline__ float grid_position(const RotaryAngles& angles, int pair, uint32_t plane, uint32_t row,
                                               uint32_t column) {
  return static_cast<float>(pair < angles.axis_end[0] ? plane : pair < angles.axis_end[1] ? row : column);
}

__device__ __forceinline__ float position_of(const RotaryAngles& angles, int64_t batch, int64_t token, int pair) {
  if (angles.positions) return given_position(angles, batch, token);
  const uint32_t index = static_cast<uint32_t>(token), width = static_cast<uint32_t>(angles.grid[2]);
  const uint32_t height = static_cast<uint32_t>(angles.grid[1]);
  return grid_position(angles, pair, index / (height * width), index / width % height, index % width);
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

// `eager`: with the roundings of an eager chain in `dtype`.
template <int kWidth>
__device__ __forceinline__ void rotate_neighbours(bool eager, DType dtype, const float (&cos)[kWidth],
                                                  const float (&sin)[kWidth], float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i + 1 < kWidth; i += 2) {
    const float x0 = x[i];
    x[i] = turn_one(x0, x[i + 1], cos[i], -sin[i], eager, dtype);
    x[i + 1] = turn_one(x[i + 1], x0, cos[i + 1], sin[i + 1], eager, dtype);
  }
}

template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void rotate(bool eager, DType dtype, const Turn<kWidth>& turn, float (&a)[kWidth],
                                       float (&b)[kWidth]) {
  if constexpr (kInterleaved && kWidth > 1) {
    rotate_neighbours(eager, dtype, turn.cos_a, turn.sin_a, a);
    rotate_neighbours(eager, dtype, turn.cos_b, turn.sin_b, b);
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
  const bool eager = p.rounding == Rounding::kEager;
  const DType dtype = promote(DTypeOf<T>::value, p.table_dtype);
  if (p.interleaved) {
    rotate<true>(eager, dtype, turn, a, b);
  } else {
    rotate<false>(eager, dtype, turn, a, b);
  }
}

// Where all heads of a token share cos and sin and the norm's weight, the two are multiplied out once: a pack is then
// normalised and turned by rstd and the products alone. `weight_a` and `weight_b` belong to the columns of A and B.
template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void weigh(const float (&weight_a)[kWidth], const float (&weight_b)[kWidth],
                                      Turn<kWidth>& turn) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    turn.cos_a[i] = __fmul_rn(turn.cos_a[i], weight_a[i]);
    turn.cos_b[i] = __fmul_rn(turn.cos_b[i], weight_b[i]);
    // sin goes with the other member of the pair.
    turn.sin_a[i] = __fmul_rn(turn.sin_a[i], kInterleaved && kWidth > 1 ? weight_a[i ^ 1] : weight_b[i]);
    turn.sin_b[i] = __fmul_rn(turn.sin_b[i], kInterleaved && kWidth > 1 ? weight_b[i ^ 1] : weight_a[i]);
  }
}

template <int kWidth>
__device__ __forceinline__ void multiply(float factor, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(x[i], factor);
}

template <int kWidth>
__device__ __forceinline__ void subtract(float mean, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = __fsub_rn(x[i], mean);
}

template <int kWidth>
__device__ __forceinline__ void add_offset(float offset, float (&weight)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) weight[i] = __fadd_rn(offset, weight[i]);
}

// A norm's weight with its offset. `packed`: bit 0 for the weight, bit 1 for the bias.
template <int kWidth>
__device__ __forceinline__ void load_weight(const RotaryParams& p, const RotaryOperand& o, uint32_t packed,
                                            int64_t column, float (&weight)[kWidth]) {
  load_floats<kWidth>(o.weight, o.weight_dtype, 0, column, o.weight_stride, INT64_MAX, packed & 1, weight);
  add_offset(p.weight_offset, weight);
}

// x * rstd * weight + bias, of an x from which the mean is subtracted. Eager rounding rounds the result, and before the
// weight too where cast_before_weight asks for it.
template <typename T, int kWidth>
__device__ __forceinline__ void scale_by(const RotaryParams& p, const RotaryOperand& o, uint32_t packed, int64_t column,
                                         float rstd, float (&x)[kWidth]) {
  const bool eager = p.rounding == Rounding::kEager;
  float weight[kWidth], bias[kWidth];
  if (o.weight) load_weight<kWidth>(p, o, packed, column, weight);
  if (o.bias) load_floats<kWidth>(o.bias, o.bias_dtype, 0, column, o.bias_stride, INT64_MAX, packed >> 1 & 1, bias);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = __fmul_rn(x[i], rstd);
    if (eager && p.cast_before_weight) x[i] = round_to<T>(x[i]);
    if (o.weight) x[i] = __fmul_rn(x[i], weight[i]);
    if (o.bias) x[i] = __fadd_rn(x[i], bias[i]);
    if (eager) x[i] = round_to<T>(x[i]);
  }
}

template <int kWidth>
__device__ __forceinline__ float squares(const float (&a)[kWidth], const float (&b)[kWidth]) {
  float terms[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) terms[i] = fmaf(a[i], a[i], __fmul_rn(b[i], b[i]));
  return tree_sum(terms);
}

template <int kWidth>
__device__ __forceinline__ float total(const float (&a)[kWidth], const float (&b)[kWidth]) {
  float terms[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) terms[i] = __fadd_rn(a[i], b[i]);
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

// A source limits row_kernel's registers: row_threads of its threads fit a multiprocessor. With fewer registers there
// are spills in the half layout, in fp16 (conversions need more) and on Blackwell.
template <typename T>
constexpr int row_threads(int most) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 512;
#else
  return std::is_same_v<T, __half> ? 512 : most;
#endif
}

// RotaryParams as these kernels take them: byte strides of 32 bits, one for cos and sin. Half of the instructions of a
// token were its addresses.
struct PackedStrides {
  uint32_t batch, sequence, head;
};
struct PackedOperand {
  const char *input, *cos, *sin, *weight, *bias;
  char* output;
  PackedStrides input_stride, output_stride, table_stride;
  uint32_t sequence, heads;
  float eps;
  bool fp32_weight;  // beside 16-bit heads
};
struct PackedParams {
  PackedOperand operand[2];
  uint32_t batch;
  int32_t half;  // of a head's columns
  float weight_offset;
};

__device__ __forceinline__ uint64_t place(const PackedStrides& s, uint32_t batch, uint32_t token, uint32_t head) {
  return static_cast<uint64_t>(s.batch) * batch + static_cast<uint64_t>(s.sequence) * token +
         static_cast<uint64_t>(s.head) * head;
}

// Divides numbers below 2^31 by one that the host knows.
struct Divider {
  uint32_t magic, shift;

  explicit Divider(int64_t divisor) : shift(0) {
    while (int64_t{1} << shift < divisor) ++shift;
    magic = static_cast<uint32_t>((((int64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t x) const { return (__umulhi(x, magic) + x) >> shift; }
};

// Where a Turn comes from: a full-width table of C,
template <typename T, typename C, bool kInterleaved>
struct FullTable {
  static constexpr int kWidth = kPackWidth<T>;
  static constexpr int kRowThreads = row_threads<T>(kInterleaved ? 640 : 512);
  struct Angles {};
  static constexpr uint32_t kPairBytes = 2 * sizeof(C);
  static constexpr bool kFp32 = std::is_same_v<C, float>;
  Elements<C, kWidth> cos_a, cos_b, sin_a, sin_b;

  __device__ __forceinline__ void load(const char* cos, const char* sin, int a, int b) {
    cos_a.load(cos, a);
    cos_b.load(cos, b);
    sin_a.load(sin, a);
    sin_b.load(sin, b);
  }
  __device__ __forceinline__ void get(Turn<kWidth>& turn) const {
    cos_a.get(turn.cos_a);
    cos_b.get(turn.cos_b);
    sin_a.get(turn.sin_a);
    sin_b.get(turn.sin_b);
  }
};

// a table of one entry a pair,
template <typename T, typename C, bool kInterleaved>
struct HalfTable {
  static constexpr int kWidth = kPackWidth<T>;
  static constexpr int kRowThreads = row_threads<T>(kInterleaved ? 768 : 640);
  // Interleaved, a pack holds kWidth / 2 pairs; otherwise A and B are the two sides of kWidth pairs.
  static constexpr int kEntries = kInterleaved ? kWidth / 2 : kWidth;
  struct Angles {};
  static constexpr uint32_t kPairBytes = sizeof(C);
  static constexpr bool kFp32 = std::is_same_v<C, float>;
  Elements<C, kEntries> cos_a, cos_b, sin_a, sin_b;

  __device__ __forceinline__ void load(const char* cos, const char* sin, int a, int b) {
    cos_a.load(cos, kInterleaved ? a / 2 : a);
    sin_a.load(sin, kInterleaved ? a / 2 : a);
    if constexpr (kInterleaved) {
      cos_b.load(cos, b / 2);
      sin_b.load(sin, b / 2);
    }
  }
  static __device__ __forceinline__ void spread(const Elements<C, kEntries>& entries, float (&x)[kWidth]) {
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

// or positions and frequencies: the block computes the angles of its tokens once, as cos and sin in shared memory.
constexpr int kMaxAngles = 1024;  // tokens times pairs

template <typename T, bool kInterleaved>
struct Computed {
  static constexpr int kWidth = kPackWidth<T>;
  using Angles = RotaryAngles;
  Turn<kWidth> turn;

  // `pairs`: of the token.
  __device__ __forceinline__ void load(const float2* pairs, int a, int b) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float2 x = pairs[kInterleaved ? (a + i) / 2 : a + i];
      const float2 y = kInterleaved ? pairs[(b + i) / 2] : x;
      turn.cos_a[i] = x.x;
      turn.sin_a[i] = x.y;
      turn.cos_b[i] = y.x;
      turn.sin_b[i] = y.y;
    }
  }
  __device__ __forceinline__ void get(Turn<kWidth>& t) const { t = turn; }
};

// Query and key, where both turn by the same table: then one thread, with one Turn, does both.
__device__ __forceinline__ const PackedOperand& operand_of(const PackedParams& p, bool shared, int i) {
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

// x * rstd * (weight_offset + weight) + bias, both vectors held since the start.
template <typename T, int kWidth>
__device__ __forceinline__ void scale_held(const PackedOperand& o, const Pack<T, kWidth>& weight, float weight_offset,
                                           const Pack<T, kWidth>& bias, float rstd, float (&x)[kWidth]) {
  float w[kWidth], b[kWidth];
  if (o.weight) {
    unpack(weight, w);
    add_offset(weight_offset, w);
  }
  if (o.bias) unpack(bias, b);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = __fmul_rn(x[i], rstd);
    if (o.weight) x[i] = __fmul_rn(x[i], w[i]);
    if (o.bias) x[i] = __fadd_rn(x[i], b[i]);
  }
}

// A pack of a norm's weight or bias, where there is one.
template <typename T, int kWidth>
__device__ __forceinline__ void load_vector(const char* data, int column, Pack<T, kWidth>& vector) {
  if (data) vector = load_pack<T, kWidth>(reinterpret_cast<const T*>(data), column, 1, 0, true);
}

// Small blocks end at different times.
constexpr int kHeadsThreads = 128;
// Most heads of a thread: eight 16-byte loads in flight. Without a loop around them, one more block fits a
// multiprocessor, and four more with one head, where tokens are few (H200, bf16, without a loop and with one:
// qk_norm_rope per head 1x4608x24x128 35.3 us, 36.0; 1x512x32x8x128 9.5 us, 11.2).
constexpr int kHeadsAtOnce = 4;
// A layer norm holds weight and bias beside cos and sin, which takes more registers; Blackwell would spill some.
constexpr int blocks_at_once(int heads, Statistic norm) {
  if (heads == 1) return 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return norm == Statistic::kLayer ? 3 : 5;
#else
  return norm == Statistic::kLayer ? 4 : 5;
#endif
}

// What `slots` threads of heads_kernel share: `inner` heads, each taking every slots-th; over_batches: `inner` batches.
// count[o]: runs of operand o's heads.
struct Runs {
  int32_t inner, slots, count[2];
  uint32_t batches;  // that are not in a run
  uint32_t ahead;    // blocks; 0: nothing is prefetched
  bool over_batches;
  Divider by_counts{1}, by_threads{1}, by_batches{1};  // by both counts, the threads that share a token, `batches`
  // With computed angles: the tokens of a plane and of a row of the grid; by them, and by the pairs of a head.
  uint32_t plane, columns;
  Divider by_plane{1}, by_columns{1}, by_pairs{1};
};

// Which run of which tokens a block has.
struct Share {
  uint32_t group;
  int run;
  bool second;  // operand
};

__device__ __forceinline__ Share share_of(const Runs& runs, uint32_t block) {
  const uint32_t group = runs.by_counts(block);
  const int run = static_cast<int>(block - group * static_cast<uint32_t>(runs.count[0] + runs.count[1]));
  return {group, run < runs.count[0] ? run : run - runs.count[0], run >= runs.count[0]};
}

// The first threads bring the heads of the block that comes `runs.ahead` later into the L2, a token each.
__device__ __forceinline__ void prefetch_heads(const PackedParams& p, const Runs& runs, uint32_t block_rows,
                                               uint32_t head_bytes) {
  if (runs.ahead == 0 || threadIdx.x >= block_rows || blockIdx.x + runs.ahead >= gridDim.x) return;
  const Share share = share_of(runs, blockIdx.x + runs.ahead);
  const PackedOperand& o = p.operand[share.second];
  const uint32_t row = share.group * block_rows + threadIdx.x, token = runs.by_batches(row);
  if (token >= o.sequence) return;
  const int first = share.run * runs.inner, heads = min(runs.inner, static_cast<int>(o.heads) - first);
  prefetch(o.input + place(o.input_stride, row - token * runs.batches, token, static_cast<uint32_t>(first)),
           static_cast<uint32_t>(heads) * head_bytes);
}

// grid: x = groups of tokens, the runs of each side by side. `lanes` threads share a token, one a unit of a head; with
// a norm the next power of two, so that the lanes of a head sum among themselves.
template <typename T, typename Source, bool kInterleaved, Statistic kStatistic, int kHeads>
__global__ void __launch_bounds__(kHeadsThreads, blocks_at_once(kHeads, kStatistic))
    heads_kernel(const __grid_constant__ PackedParams p, const __grid_constant__ typename Source::Angles angles,
                 const __grid_constant__ Runs runs, int lanes, int units, float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kNorm = kStatistic != Statistic::kNone, kLayer = kStatistic == Statistic::kLayer;
  constexpr bool kFp32Weight = kHeads > 1 && kStatistic == Statistic::kRms;  // the others have no registers for it
  using P = Pack<T, kWidth>;
  const auto [group, run, second] = share_of(runs, blockIdx.x);
  const PackedOperand& o = p.operand[second];
  constexpr bool kComputed = std::is_same_v<typename Source::Angles, RotaryAngles>;
  const uint32_t slots = kComputed ? static_cast<uint32_t>(runs.slots) : 1,
                 threads = static_cast<uint32_t>(lanes) * slots;
  // Rows of a block: whole ones where the angles are the block's.
  const uint32_t block_rows = kComputed ? runs.by_threads(kHeadsThreads) : 0;
  const uint32_t first_thread = group * (kComputed ? block_rows * threads : kHeadsThreads);
  const uint32_t thread = first_thread + threadIdx.x, row = runs.by_threads(thread), rest = thread - row * threads;
  const uint32_t slot = kComputed ? rest / static_cast<uint32_t>(lanes) : 0;
  const int unit = static_cast<int>(rest - slot * static_cast<uint32_t>(lanes));
  // Batches side by side: they may share a table, which then comes from cache.
  uint32_t token = runs.by_batches(row), batch = row - token * runs.batches;
  const bool active = token < o.sequence && unit < units && (!kComputed || threadIdx.x < block_rows * threads);
  if (!kNorm && !kComputed && !active) return;  // with a norm, every lane must reach the shuffles
  if (!active) token = batch = 0;
  const int a = active ? unit * kWidth : 0, half = p.half;

  const uint32_t first = (runs.over_batches ? 0 : static_cast<uint32_t>(run * runs.inner)) + slot;
  const int in_run = runs.over_batches ? runs.inner : min(runs.inner, static_cast<int>(o.heads) - run * runs.inner);
  const int count =
      active || kNorm
          ? (kComputed ? (in_run - static_cast<int>(slot) + static_cast<int>(slots) - 1) / static_cast<int>(slots)
                       : in_run)
          : 0;
  const int64_t half_bytes = half * static_cast<int64_t>(sizeof(T));
  const uint64_t in_step = (runs.over_batches ? o.input_stride.batch : o.input_stride.head) * uint64_t{slots};
  const uint64_t out_step = (runs.over_batches ? o.output_stride.batch : o.output_stride.head) * uint64_t{slots};
  const uint32_t first_head = runs.over_batches ? 0 : first;
  const char* in = o.input + place(o.input_stride, batch, token, first_head) + a * sizeof(T);
  char* out = o.output + place(o.output_stride, batch, token, first_head) + a * sizeof(T);

  P raw_a[kHeads], raw_b[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (active && i < count) {
      raw_a[i] = *reinterpret_cast<const P*>(in);
      raw_b[i] = *reinterpret_cast<const P*>(in + half_bytes);
    }
    in += in_step;
  }
  if constexpr (kComputed) prefetch_heads(p, runs, block_rows, 2 * static_cast<uint32_t>(half_bytes));

  // After the heads, so that all are under way together.
  Source source;
  P weight_a, weight_b, bias_a, bias_b;
  if constexpr (kComputed) {
    __shared__ float2 table[kMaxAngles];
    const int pairs = half, rows = static_cast<int>(block_rows);
    const uint32_t first_row = group * block_rows;
    for (int i = static_cast<int>(threadIdx.x); i < rows * pairs; i += kHeadsThreads) {
      const uint32_t local = runs.by_pairs(static_cast<uint32_t>(i)), r = first_row + local, t = runs.by_batches(r);
      const int pair = i - static_cast<int>(local) * pairs;
      if (t >= o.sequence) break;
      const uint32_t plane = runs.by_plane(t), in_plane = t - plane * runs.plane;
      const uint32_t grid_row = runs.by_columns(in_plane), column = in_plane - grid_row * runs.columns;
      const float position = angles.positions ? given_position(angles, r - t * runs.batches, t)
                                              : grid_position(angles, pair, plane, grid_row, column);
      float sin, cos;
      turn_by(position, angles.inverse_frequency[pair], sin, cos);
      table[i] = {cos, sin};
    }
    __syncthreads();
    if (active) source.load(table + (row - first_row) * static_cast<uint32_t>(pairs), a, a + half);
  } else {
    if (active) {
      const uint64_t start = place(o.table_stride, batch, token, first_head);
      source.load(o.cos + start, o.sin + start, a, a + half);
    }
    if (kNorm && !(kFp32Weight && o.fp32_weight)) {
      load_vector<T>(o.weight, a, weight_a);
      load_vector<T>(o.weight, a + half, weight_b);
    }
    if constexpr (kLayer) {
      load_vector<T>(o.bias, a, bias_a);
      load_vector<T>(o.bias, a + half, bias_b);
    }
  }
  Turn<kWidth> turn;
  source.get(turn);
  if (kStatistic == Statistic::kRms && o.weight) {
    float w_a[kWidth], w_b[kWidth];
    if (kFp32Weight && o.fp32_weight) {  // It is loaded here: no registers were free for it before.
      load_floats_as<float, kWidth>(o.weight, 0, a, 1, 0, true, w_a);
      load_floats_as<float, kWidth>(o.weight, 0, a + half, 1, 0, true, w_b);
    } else {
      unpack(weight_a, w_a);
      unpack(weight_b, w_b);
    }
    add_offset(p.weight_offset, w_a);
    add_offset(p.weight_offset, w_b);
    weigh<kInterleaved>(w_a, w_b, turn);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < count) {
      float x_a[kWidth], x_b[kWidth];
      unpack(raw_a[i], x_a);
      unpack(raw_b[i], x_b);
      if constexpr (kLayer) {
        const float mean = __fmul_rn(lane_sum(active ? total(x_a, x_b) : 0.f, lanes), inverse_width);
        subtract(mean, x_a);
        subtract(mean, x_b);
      }
      if constexpr (kNorm) {
        const float sum = lane_sum(active ? squares(x_a, x_b) : 0.f, lanes);
        const float rstd = reciprocal_root(sum, inverse_width, o.eps);
        if constexpr (kLayer) {
          scale_held(o, weight_a, p.weight_offset, bias_a, rstd, x_a);
          scale_held(o, weight_b, p.weight_offset, bias_b, rstd, x_b);
        } else {
          multiply(rstd, x_a);
          multiply(rstd, x_b);
        }
      }
      rotate<kInterleaved>(false, DType::kFloat32, turn, x_a, x_b);
      if (active) {
        *reinterpret_cast<P*>(out) = to_pack<T, kWidth>(x_a);
        *reinterpret_cast<P*>(out + half_bytes) = to_pack<T, kWidth>(x_b);
      }
    }
    out += out_step;
  }
}

constexpr int kMaxRowThreads = 512;

// The first threads bring what the block that comes `ahead` later reads into the L2: query, key, cos, sin.
template <typename Source>
__device__ __forceinline__ void prefetch_token(const PackedParams& p, uint32_t ahead, bool shared, uint32_t run,
                                               uint32_t runs, const Divider& by_runs, uint32_t head_bytes) {
  if (ahead == 0 || threadIdx.x >= 4 || blockIdx.x + ahead >= gridDim.x) return;
  const uint32_t block = blockIdx.x + ahead, token = by_runs(block), batch = (block - token * runs) * run;
  const int i = static_cast<int>(threadIdx.x);
  if (i >= 2) {
    const PackedOperand& o = operand_of(p, shared, 0);
    if (token >= o.sequence) return;
    prefetch((i == 2 ? o.cos : o.sin) + place(o.table_stride, batch, token, 0),
             static_cast<uint32_t>(p.half) * Source::kPairBytes);
  } else if (i == 0 || shared) {
    const PackedOperand& o = operand_of(p, shared, i);
    for (uint32_t j = 0; token < o.sequence && j < run; ++j) {
      prefetch(o.input + place(o.input_stride, batch + j, token, 0), o.heads * head_bytes);
    }
  }
}

// grid: x = tokens, z = operand (one where shared). The block owns a token, in `run` batches, which share its table;
// each thread a unit of query and of key.
template <typename T, typename Source, bool kInterleaved>
__global__ void __launch_bounds__(Source::kRowThreads, 1)
    row_kernel(const __grid_constant__ PackedParams p, uint32_t units, bool shared, uint32_t run, uint32_t runs,
               const Divider by_runs, const Divider by_units, const float2 inverse_widths, uint32_t ahead) {
  constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  __shared__ ReduceScratch<2> scratch[2];
  const PackedOperand& first_operand = operand_of(p, shared, 0);
  const uint32_t token = by_runs(blockIdx.x), first_batch = (blockIdx.x - token * runs) * run;
  if (token >= first_operand.sequence) return;  // the whole block: the other operand is longer
  const uint32_t head = by_units(threadIdx.x), unit = threadIdx.x - head * units;
  const bool active = head < first_operand.heads;
  const int a = static_cast<int>(unit) * kWidth, b = a + p.half;
  const int column = static_cast<int>(head) * 2 * p.half;
  const int64_t start = a * static_cast<int64_t>(sizeof(T)), half_bytes = p.half * static_cast<int64_t>(sizeof(T));

  P raw_a[2], raw_b[2], weight_a[2], weight_b[2];
  const auto load_batch = [&](uint32_t batch) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (active && (i == 0 || shared)) {
        const PackedOperand& o = operand_of(p, shared, i);
        const char* const x = o.input + place(o.input_stride, batch, token, head) + start;
        raw_a[i] = *reinterpret_cast<const P*>(x);
        raw_b[i] = *reinterpret_cast<const P*>(x + half_bytes);
      }
    }
  };
  load_batch(first_batch);
  Source source;
  if (active) {
    const uint64_t table = place(first_operand.table_stride, first_batch, token, head);
    source.load(first_operand.cos + table, first_operand.sin + table, a, b);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || shared) {
        load_vector<T>(operand_of(p, shared, i).weight, column + a, weight_a[i]);
        load_vector<T>(operand_of(p, shared, i).weight, column + b, weight_b[i]);
      }
    }
  }
  prefetch_token<Source>(p, ahead, shared, run, runs, by_runs, 2 * static_cast<uint32_t>(half_bytes));
#pragma unroll 1
  for (uint32_t j = 0; j < run; ++j) {
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
    block_reduce(sums, static_cast<int>(blockDim.x), scratch[j % 2]);
    if (!active) continue;
    Turn<kWidth> turn;
    source.get(turn);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || shared) {
        const PackedOperand& o = operand_of(p, shared, i);
        const float inverse_width = i == 1 || blockIdx.z == 1 ? inverse_widths.y : inverse_widths.x;
        const float rstd = reciprocal_root(sums[i], inverse_width, o.eps);
        float x_a[kWidth], x_b[kWidth];
        unpack(raw_a[i], x_a);
        unpack(raw_b[i], x_b);
        scale_held(o.weight, weight_a[i], rstd, x_a);
        scale_held(o.weight, weight_b[i], rstd, x_b);
        rotate<kInterleaved>(false, DType::kFloat32, turn, x_a, x_b);
        char* const y = o.output + place(o.output_stride, first_batch + j, token, head) + start;
        *reinterpret_cast<P*>(y) = to_pack<T, kWidth>(x_a);
        *reinterpret_cast<P*>(y + half_bytes) = to_pack<T, kWidth>(x_b);
      }
    }
    if (j + 1 < run) load_batch(first_batch + j + 1);
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
  const uint32_t packed_vectors = units.packed_vectors >> (2 * blockIdx.z);
  const bool layer = p.statistic == Statistic::kLayer;
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
  const bool own_angles = o.heads > 1 && (o.cos_stride.head != 0 || o.sin_stride.head != 0);
  Turn<kWidth> turn;
  // As heads_kernel; where the weight cannot be multiplied out, scale_by applies it.
  const bool weighed = kNorm && turns && !layer && p.rounding == Rounding::kFp32;
  const auto take_turn = [&](int head) {
    find_turn(p, o, angles, packed_table, batch, token, head, a, b, turn);
    if (!weighed || !o.weight) return;
    float w_a[kWidth], w_b[kWidth];
    load_weight<kWidth>(p, o, packed_vectors, a, w_a);
    load_weight<kWidth>(p, o, packed_vectors, b, w_b);
    if (p.interleaved) {
      weigh<true>(w_a, w_b, turn);
    } else {
      weigh<false>(w_a, w_b, turn);
    }
  };
  if (turns && !own_angles) take_turn(0);

#pragma unroll 1
  for (int head = first_head; head < last_head; ++head) {
    const int64_t start = offset(o.input_stride, batch, token, head);
    float x_a[kWidth] = {}, x_b[kWidth] = {};
    if (active) {
      unpack(load_input<T, kWidth>(o, packed_in, start, a), x_a);
      unpack(load_input<T, kWidth>(o, packed_in, start, b), x_b);
    }
    if constexpr (kNorm) {
      const float inverse_width = 1.f / static_cast<float>(p.head_dim);
      if (layer) {
        const float mean = __fmul_rn(lane_sum(total(x_a, x_b), lanes), inverse_width);
        subtract(mean, x_a);
        subtract(mean, x_b);
      }
      const float sum = lane_sum(active ? squares(x_a, x_b) : 0.f, lanes);
      const float rstd = reciprocal_root(sum, inverse_width, o.eps);
      if (weighed) {
        multiply(rstd, x_a);
        multiply(rstd, x_b);
      } else {
        scale_by<T>(p, o, packed_vectors, a, rstd, x_a);
        scale_by<T>(p, o, packed_vectors, b, rstd, x_b);
      }
    }
    if (turns) {
      if (own_angles) take_turn(head);
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
// reads it twice, or three times for a layer norm.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    row_general(const __grid_constant__ RotaryParams p, const __grid_constant__ Units units) {
  __shared__ ReduceScratch<1> scratch[2];
  const RotaryOperand& o = p.operand[blockIdx.y];
  const bool packed_in = units.packed_inputs >> blockIdx.y & 1, packed_out = units.packed_outputs >> blockIdx.y & 1;
  const bool packed_table = units.packed_tables >> blockIdx.y & 1;
  const uint32_t packed_vectors = units.packed_vectors >> (2 * blockIdx.y);
  const int heads = p.norm == QkNorm::kAcrossHeads ? static_cast<int>(o.heads) : 1;
  const int64_t tokens = p.norm == QkNorm::kAcrossHeads ? blockIdx.x : blockIdx.x / o.heads;
  const int row_head = static_cast<int>(blockIdx.x - tokens * (p.norm == QkNorm::kAcrossHeads ? 1 : o.heads));
  if (tokens >= p.batch * o.sequence) return;  // the whole block: the other operand is longer
  // Below the grid's 2^31.
  const int batch = static_cast<int>(tokens / o.sequence), token = static_cast<int>(tokens - batch * o.sequence);
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
  // For a layer norm; an rms norm's mean stays zero.
  float mean = 0.f;
  const auto centre = [&](const Pack<T, kWidth>& raw_a, const Pack<T, kWidth>& raw_b, float (&x_a)[kWidth],
                          float (&x_b)[kWidth]) {
    unpack(raw_a, x_a);
    unpack(raw_b, x_b);
    if (p.statistic == Statistic::kLayer) {
      subtract(mean, x_a);
      subtract(mean, x_b);
    }
  };
  const auto finish = [&](const Place& at, const Pack<T, kWidth>& raw_a, const Pack<T, kWidth>& raw_b, float rstd) {
    float x_a[kWidth], x_b[kWidth];
    centre(raw_a, raw_b, x_a, x_b);
    const int64_t vector_start = static_cast<int64_t>(at.head - row_head) * p.head_dim;
    scale_by<T>(p, o, packed_vectors, vector_start + at.a, rstd, x_a);
    scale_by<T>(p, o, packed_vectors, vector_start + at.b, rstd, x_b);
    // No load may cross these two asm fences: on sm_120 there are no registers for its result.
    asm volatile("" ::: "memory");
    if (at.turns) {
      Turn<kWidth> turn;
      load_turn<kWidth>(p, o, packed_table, batch, token, at.head, at.a, at.b, turn);
      rotate_general<T>(p, turn, x_a, x_b);
    }
    asm volatile("" ::: "memory");
    const int64_t start = offset(o.output_stride, batch, token, at.head);
    store_output<T>(o, packed_out, start, at.a, x_a);
    store_output<T>(o, packed_out, start, at.b, x_b);
  };
  Pack<T, kWidth> raw_a, raw_b;
  // Of the row's elements, or of their squares.
  const auto sum_of = [&](bool squared) {
    float sum = 0.f;
#pragma unroll 1
    for (int u = threadIdx.x; u < count; u += threads) {
      load(place(u), raw_a, raw_b);
      float x_a[kWidth], x_b[kWidth];
      centre(raw_a, raw_b, x_a, x_b);
      sum += squared ? squares(x_a, x_b) : total(x_a, x_b);
    }
    return block_reduce(sum, threads, scratch[squared]);
  };
  const float inverse_width = 1.f / static_cast<float>(heads * p.head_dim);
  if (p.statistic == Statistic::kLayer) mean = __fmul_rn(sum_of(false), inverse_width);
  const float rstd = reciprocal_root(sum_of(true), inverse_width, o.eps);
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
  const int table_width = p.half_width_table && p.interleaved && kWidth > 1 ? kWidth / 2 : kWidth;
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    units.packed_inputs |= static_cast<uint32_t>(is_packed_head(o.input, p.dtype, kWidth, kWidth, o.input_stride)) << i;
    units.packed_outputs |= static_cast<uint32_t>(is_packed_head(o.output, p.dtype, kWidth, kWidth, o.output_stride))
                            << i;
    units.packed_tables |=
        static_cast<uint32_t>(is_packed_head(o.cos, p.table_dtype, table_width, table_width, o.cos_stride) &&
                              is_packed_head(o.sin, p.table_dtype, table_width, table_width, o.sin_stride))
        << i;
    const bool weight = is_packed(o.weight, o.weight_dtype, kWidth, kWidth, o.weight_stride, nullptr, 0);
    const bool bias = is_packed(o.bias, o.bias_dtype, kWidth, kWidth, o.bias_stride, nullptr, 0);
    units.packed_vectors |= (static_cast<uint32_t>(weight) | static_cast<uint32_t>(bias) << 1) << 2 * i;
  }
  return units;
}

int64_t longest(const RotaryParams& p) {
  return std::max(p.operand[0].sequence, p.operands == 2 ? p.operand[1].sequence : 0);
}

// Enough heads a thread to pay for its cos and sin, few enough to fill the GPU with short sequences.
int heads_per_block(int64_t heads, bool computed) {
  return static_cast<int>(std::max<int64_t>(std::min<int64_t>(heads, computed ? 16 : 8), ceil_div(heads, kMaxGridY)));
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
    units.packed_inputs = units.packed_outputs = units.packed_vectors = units.packed_tables = 0;
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

// RotaryParams as the main line takes them; false where a stride is too wide, or cos and sin do not lie alike.
bool pack_params(const RotaryParams& p, PackedParams& q) {
  bool fits = p.batch <= 0x7fffffff && longest(p) <= 0x7fffffff;
  const auto pack = [&](const HeadStrides& s, DType dtype) {
    const auto bytes = [&](int64_t stride) {
      const int64_t wide = stride * element_size(dtype);
      fits = fits && wide == static_cast<uint32_t>(wide);
      return static_cast<uint32_t>(wide);
    };
    return PackedStrides{bytes(s.batch), bytes(s.sequence), bytes(s.head)};
  };
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    fits = fits && same(o.cos_stride, o.sin_stride);
    q.operand[i] = {
        static_cast<const char*>(o.input),    static_cast<const char*>(o.cos),  static_cast<const char*>(o.sin),
        static_cast<const char*>(o.weight),   static_cast<const char*>(o.bias), static_cast<char*>(o.output),
        pack(o.input_stride, p.dtype),        pack(o.output_stride, p.dtype),   pack(o.cos_stride, p.table_dtype),
        static_cast<uint32_t>(o.sequence),    static_cast<uint32_t>(o.heads),   o.eps,
        o.weight && o.weight_dtype != p.dtype};
  }
  q.batch = static_cast<uint32_t>(p.batch);
  q.half = static_cast<int32_t>(p.head_dim / 2);
  q.weight_offset = p.weight_offset;
  return fits;
}

// Whether the main line takes the call: see its heading.
template <typename T>
bool is_main_line(const RotaryParams& p, bool computed) {
  constexpr int kWidth = kPackWidth<T>;
  if (p.rounding != Rounding::kFp32 || p.rotary_dim != p.head_dim || !divides(p, kWidth)) return false;
  // Threads are counted in 32 bits.
  if (p.batch * longest(p) * std::max<int64_t>(p.head_dim / 2 / kWidth, kHeadsThreads) > 0x7fffffff) return false;
  if (p.half_width_table && p.interleaved && p.table_dtype != DType::kFloat32) return false;
  if (computed && p.head_dim / 2 > kMaxAngles / 2) return false;
  const bool layer = p.statistic == Statistic::kLayer;
  // No model asks for these, and row_kernel has no register left for them.
  if (p.norm == QkNorm::kAcrossHeads && (layer || p.weight_offset != 0.f)) return false;
  if (p.norm == QkNorm::kPerHead && layer && p.table_dtype != DType::kFloat32) return false;
  const Units units = make_units<T, kWidth>(p);
  const uint32_t all = (1u << p.operands) - 1;
  if (units.packed_inputs != all || units.packed_outputs != all || (!computed && units.packed_tables != all)) {
    return false;
  }
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    const bool fp32_weight = o.weight_dtype == DType::kFloat32 && p.norm == QkNorm::kPerHead && !layer;
    if (o.weight && (o.weight_dtype != DTypeOf<T>::value && !fp32_weight)) return false;
    if (o.weight && !(units.packed_vectors >> 2 * i & 1)) return false;
    if (o.bias && (o.bias_dtype != DTypeOf<T>::value || !(units.packed_vectors >> 2 * i & 2))) return false;
    if (p.norm == QkNorm::kAcrossHeads && o.heads * units.per_head > kMaxRowThreads) return false;
  }
  return p.norm != QkNorm::kPerHead || units.per_head <= 32;
}

// Threads of a multiprocessor from which on each has several heads, and most threads that share a run with computed
// angles. (Most heads of a thread, H200, bf16, of a copy's time with 4 and with 12, h200-tuning.json: qk_norm_rope per
// head 1x4608x24x128 1.10, 1.12; 4x4096x32x8x128 1.06, 1.07; apply_rotary_qk 1x32760x12x128 1.03, 1.05.)
constexpr int kRunThreads = 1536, kSlots = 8;
// Batches whose token row_kernel turns by one table in one block (2x2688x32x64: 1.10 against 1.12 for one a block).
constexpr int kBatchRun = 2;

uint32_t batch_run(int64_t batch) {
  uint32_t run = static_cast<uint32_t>(std::min<int64_t>(batch, kBatchRun));
  while (batch % run) --run;
  return run;
}

bool angles_differ(const RotaryAngles& angles) { return angles.positions && angles.position_stride_batch != 0; }
template <typename Angles>
bool angles_differ(const Angles&) {
  return false;
}

// Enough heads a thread to pay for its cos and sin, few enough to fill the GPU `device` with short sequences.
Runs make_runs(const RotaryParams& p, const RotaryAngles* angles, int lanes, bool common, int device) {
  const bool computed = angles != nullptr;
  const int64_t q_heads = p.operand[0].heads, k_heads = p.operands == 2 ? p.operand[1].heads : 0;
  const int64_t heads = std::max(q_heads, k_heads), items = p.batch * longest(p) * lanes * (q_heads + k_heads);
  const int64_t spare = std::max<int64_t>(items / (static_cast<int64_t>(multiprocessors(device)) * kRunThreads), 1);
  Runs runs{};
  // Computed angles are shared through the block: its threads take several heads at a time, but each enough of them to
  // pay for what it shares (rope_3d 1x21x30x52x12x128 1.08 x a copy with one slot, 1.03 with two, 1.015 with four, 1.26
  // with eight; 2x7x16x24x32x64 1.13 with two, 1.12 with four, 1.09 with eight: h200-tuning.json).
  int64_t slots = 1;
  if (computed) {
    const int64_t most = std::min<int64_t>(std::min<int64_t>(kSlots, kHeadsThreads / lanes), heads);
    slots = spare == 1 ? most : std::min(std::max<int64_t>(heads / 3, 1), most);
  }
  runs.slots = static_cast<int32_t>(slots);
  const auto has_own_angles = [&](int i) {
    return p.operands > i && p.operand[i].heads > 1 && p.operand[i].cos_stride.head;
  };
  const int64_t a_thread = has_own_angles(0) || has_own_angles(1) ? 1 : std::min<int64_t>(spare, kHeadsAtOnce);
  // All batches or none.
  runs.over_batches = heads == 1 && common && a_thread >= p.batch && !computed;
  const int64_t inner = runs.over_batches ? p.batch : ceil_div(heads, ceil_div(heads, a_thread * slots));
  runs.inner = static_cast<int32_t>(inner);
  runs.batches = static_cast<uint32_t>(runs.over_batches ? 1 : p.batch);
  runs.by_batches = Divider(runs.batches);
  runs.by_threads = Divider(lanes * slots);
  runs.count[0] = static_cast<int32_t>(runs.over_batches ? 1 : ceil_div(q_heads, inner));
  runs.count[1] = p.operands == 2 ? static_cast<int32_t>(runs.over_batches ? 1 : ceil_div(k_heads, inner)) : 0;
  runs.by_counts = Divider(runs.count[0] + runs.count[1]);
  if (computed) {
    runs.plane = static_cast<uint32_t>(angles->grid[1] * angles->grid[2]);
    runs.columns = static_cast<uint32_t>(angles->grid[2]);
    runs.by_plane = Divider(runs.plane);
    runs.by_columns = Divider(runs.columns);
    runs.by_pairs = Divider(p.head_dim / 2);
  }
  return runs;
}

// How far ahead prefetch() works, in threads of a multiprocessor: part of those that run at once. In row_kernel only
// where the heads share a table, as what is ahead must not crowd out what is in use. H200, bf16, of a copy's time with
// and without: qk_norm_rope across heads, table of a head, 1x32760x12x128 1.01, 1.11, 1x4096x12x128 1.06, 1.19,
// 1x8190x40x128 1.07, 1.27, full table, 2x2688x32x64 1.14, 1.09; rope_1d 4x4096x32x8x128 1.04, 1.08; rope_3d
// 1x21x30x52x12x128 1.01, 1.04; per head with a table 1x32760x12x12x128 1.05, 1.03 (h200-tuning.json).
constexpr int kTokensAhead = 512, kHeadsAhead = 256;

// Whether the heads of a token are one row.
bool is_row(const PackedOperand& o, int64_t head_bytes) { return o.heads == 1 || o.input_stride.head == head_bytes; }

// Whether a token's heads turn by one row of cos and one of sin that whole 16 bytes make up.
bool is_shared_row(const PackedOperand& o) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return o.heads > 1 && o.table_stride.head == 0 && aligned(o.cos) && aligned(o.sin) &&
         (o.table_stride.batch | o.table_stride.sequence) % 16 == 0;
}

// Blocks of `threads` ahead; none where there are not several times as many.
uint32_t blocks_ahead(int threads_ahead, int64_t threads, int64_t grid, int device) {
  const int64_t blocks = int64_t{multiprocessors(device)} * threads_ahead / threads;
  return grid > 2 * blocks ? static_cast<uint32_t>(blocks) : 0;
}

template <typename T, typename Source, bool kInterleaved>
void launch_main_line(const RotaryParams& p, const PackedParams& packed, const typename Source::Angles& angles,
                      int device, cudaStream_t stream) {
  const RotaryOperand &q = p.operand[0], &k = p.operand[1];
  const int units = static_cast<int>(p.head_dim / 2 / kPackWidth<T>);
  const bool across = p.norm == QkNorm::kAcrossHeads;
  const bool shared = p.operands == 2 && q.sequence == k.sequence && q.cos == k.cos && q.sin == k.sin &&
                      same(q.cos_stride, k.cos_stride) && same(q.sin_stride, k.sin_stride) &&
                      (!across || q.heads == k.heads);
  const unsigned operands = shared ? 1 : static_cast<unsigned>(p.operands);
  constexpr bool kComputed = std::is_same_v<typename Source::Angles, RotaryAngles>;
  // Whether the batches of a token turn by the same angles.
  bool common = kComputed ? !angles_differ(angles) : true;
  for (int i = 0; i < p.operands && !kComputed; ++i) {
    common = common && p.operand[i].cos_stride.batch == 0 && p.operand[i].sin_stride.batch == 0;
  }
  const int64_t head_bytes = p.head_dim * static_cast<int64_t>(sizeof(T));
  if constexpr (!kComputed) {
    if (across) {
      const int64_t threads = ceil_div(std::max(q.heads, p.operands == 2 ? k.heads : 0) * units, 32) * 32;
      const uint32_t run =
          common && p.batch * longest(p) > 2 * multiprocessors(device) * 2048 / threads ? batch_run(p.batch) : 1;
      const dim3 grid(grid_size(p.batch / run * longest(p)), 1, operands);
      const float2 inverse_widths = {1.f / static_cast<float>(q.heads * p.head_dim),
                                     1.f / static_cast<float>((p.operands == 2 ? k.heads : 1) * p.head_dim)};
      bool prefetched = true;
      for (int i = 0; i < p.operands; ++i) {
        const PackedOperand& o = packed.operand[i];
        prefetched = prefetched && is_row(o, head_bytes) && is_shared_row(o);
      }
      const uint32_t ahead = prefetched ? blocks_ahead(kTokensAhead, threads, grid.x, device) : 0;
      row_kernel<T, Source, kInterleaved><<<grid, static_cast<unsigned>(threads), 0, stream>>>(
          packed, static_cast<uint32_t>(units), shared, run, static_cast<uint32_t>(p.batch / run),
          Divider(p.batch / run), Divider(units), inverse_widths, ahead);
      return;
    }
  }
  const Statistic norm = p.norm == QkNorm::kPerHead ? p.statistic : Statistic::kNone;
  const int lanes = norm != Statistic::kNone ? next_power_of_two(units) : units;
  const RotaryAngles* computed = nullptr;
  if constexpr (kComputed) computed = &angles;
  Runs runs = make_runs(p, computed, lanes, common, device);
  const int64_t rows = runs.batches * longest(p);
  const int64_t groups =
      kComputed ? ceil_div(rows, kHeadsThreads / (lanes * runs.slots)) : ceil_div(rows * lanes, kHeadsThreads);
  const dim3 grid(grid_size(groups * (runs.count[0] + runs.count[1])));
  if (kComputed && is_row(packed.operand[0], head_bytes) &&
      (p.operands == 1 || is_row(packed.operand[1], head_bytes))) {
    runs.ahead = blocks_ahead(kHeadsAhead, kHeadsThreads, grid.x, device);
  }
  const float inverse_width = 1.f / static_cast<float>(p.head_dim);
  const auto run = [&](auto statistic) {
    const auto go = [&](auto kernel) {
      kernel<<<grid, kHeadsThreads, 0, stream>>>(packed, angles, runs, lanes, units, inverse_width);
    };
    constexpr Statistic kStatistic = decltype(statistic)::value;
    if constexpr (kStatistic != Statistic::kLayer) {  // few models have it: one kernel for any number of heads
      const bool fp32_weight = packed.operand[0].fp32_weight || packed.operand[1].fp32_weight;
      if (runs.inner <= runs.slots && !fp32_weight) return go(heads_kernel<T, Source, kInterleaved, kStatistic, 1>);
    }
    go(heads_kernel<T, Source, kInterleaved, kStatistic, kHeadsAtOnce>);
  };
  if constexpr (!kComputed) {
    if (norm == Statistic::kRms) return run(std::integral_constant<Statistic, Statistic::kRms>());
    if constexpr (Source::kFp32) {
      if (norm == Statistic::kLayer) return run(std::integral_constant<Statistic, Statistic::kLayer>());
    }
  }
  run(std::integral_constant<Statistic, Statistic::kNone>());
}

template <typename T, bool kInterleaved>
void dispatch_source(const RotaryParams& p, const PackedParams& q, const RotaryAngles* angles, int device,
                     cudaStream_t stream) {
  if (angles) return launch_main_line<T, Computed<T, kInterleaved>, kInterleaved>(p, q, *angles, device, stream);
  if (p.half_width_table) {
    if constexpr (!kInterleaved) {
      if (p.table_dtype != DType::kFloat32) {
        return launch_main_line<T, HalfTable<T, T, false>, false>(p, q, {}, device, stream);
      }
    }
    return launch_main_line<T, HalfTable<T, float, kInterleaved>, kInterleaved>(p, q, {}, device, stream);
  }
  if (p.table_dtype == DType::kFloat32) {
    return launch_main_line<T, FullTable<T, float, kInterleaved>, kInterleaved>(p, q, {}, device, stream);
  }
  return launch_main_line<T, FullTable<T, T, kInterleaved>, kInterleaved>(p, q, {}, device, stream);
}

}  // namespace

void rotary(const RotaryParams& p, const RotaryAngles* angles, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Kernel kernel = forced().rotary;
    PackedParams q{};
    if (takes_packed("rotary", kernel, is_main_line<T>(p, angles != nullptr) && pack_params(p, q))) {
      return p.interleaved ? dispatch_source<T, true>(p, q, angles, context.device, stream)
                           : dispatch_source<T, false>(p, q, angles, context.device, stream);
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
