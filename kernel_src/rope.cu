// The rotary family: apply_rotary, apply_rotary_qk, rope_1d, rope_3d and qk_norm_rope.
//
//   x      = input, or input * rstd * weight              rstd = 1 / sqrt(mean(x^2) + eps), over a head or over a token
//   out[a] = x[a] * cos[a] - x[b] * sin[a]                pairs (a, b): (2p, 2p + 1) interleaved, (p, p + R / 2) half
//   out[b] = x[b] * cos[b] + x[a] * sin[b]                columns from R = rotary_dim on pass through
//
// ltx/params.h (RotaryParams, RotaryAngles) has the table forms. Query and key share one launch.
//
// A thread owns units: two packs of kWidth columns, A and B = A + R / 2, so that both members of every pair are in one
// thread in either layout (interleaved pairs lie inside a pack). Two kernels:
//   rotate_kernel    one unit column of one token, for a run of heads that share its cos and sin. With a norm per head,
//                    the lanes of a head sum by shuffles.
//   norm_row_kernel  one row, all heads of a token (norm across heads) or one long head, in registers or in a loop.
#include <algorithm>

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
// memory; in half turns, reduced in fp64, the argument is exact to 2^-25 of a half turn.
__device__ __forceinline__ void turn_by(float position, float frequency, float& sin, float& cos) {
  const double half_turns = static_cast<double>(__fmul_rn(position, frequency)) * 0.31830988618379067154;
  sincospif(static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns)), &sin, &cos);
}

// The same Turn from positions and frequencies.
template <int kWidth>
__device__ __forceinline__ void compute_turn(const RotaryParams& p, const RotaryAngles& angles, int64_t batch,
                                             int64_t token, int a, int b, Turn<kWidth>& turn) {
  const int half = static_cast<int>(p.rotary_dim) / 2;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (p.interleaved && i % 2 == 1) {  // the pair of the column before
      turn.cos_a[i] = turn.cos_a[i - 1];
      turn.sin_a[i] = turn.sin_a[i - 1];
      turn.cos_b[i] = turn.cos_b[i - 1];
      turn.sin_b[i] = turn.sin_b[i - 1];
      continue;
    }
    const int pair_a = p.interleaved ? (a + i) / 2 : a + i, pair_b = p.interleaved ? (b + i) / 2 : b + i - half;
    turn_by(position_of(angles, batch, token, pair_a), angles.inverse_frequency[pair_a], turn.sin_a[i], turn.cos_a[i]);
    if (pair_b == pair_a) {
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

template <typename T, int kWidth>
__device__ __forceinline__ void rotate(const RotaryParams& p, const Turn<kWidth>& turn, float (&a)[kWidth],
                                       float (&b)[kWidth]) {
  const bool eager = p.rounding == Rounding::kEager;
  const DType dtype = promote(DTypeOf<T>::value, p.table_dtype);
  if (p.interleaved && kWidth > 1) {
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
  compute_turn<kWidth>(p, angles, batch, token, a, b, turn);
}

// Heads that a thread loads before it stores the first: four 16-byte loads in flight.
constexpr int kHeadsAtOnce = 2;

// grid: x = groups of tokens, y = runs of heads, z = operand. `lanes` threads share a token, one a unit of a head; with
// a norm the next power of two, so that the lanes of a head sum among themselves.
template <typename T, int kWidth, bool kNorm, typename Angles>
__global__ void __launch_bounds__(256)
    rotate_kernel(const __grid_constant__ RotaryParams p, const __grid_constant__ Angles angles,
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

  for (int head = first_head; head < last_head; head += kHeadsAtOnce) {
    Pack<T, kWidth> raw_a[kHeadsAtOnce], raw_b[kHeadsAtOnce];
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      if (head + i < last_head) {
        const int64_t start = offset(o.input_stride, batch, token, head + i);
        raw_a[i] = load_input<T, kWidth>(o, packed_in, start, a);
        raw_b[i] = load_input<T, kWidth>(o, packed_in, start, b);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      if (head + i >= last_head) break;
      float x_a[kWidth], x_b[kWidth];
      unpack(raw_a[i], x_a);
      unpack(raw_b[i], x_b);
      if constexpr (kNorm) {
        const float sum = lane_sum(active ? squares(x_a, x_b) : 0.f, lanes);
        const float rstd = rsqrtf(sum / static_cast<float>(p.head_dim) + p.eps);
        const bool packed_weight = units.packed_weights >> blockIdx.z & 1;
        scale_by<T>(p, o, packed_weight, a, rstd, x_a);
        scale_by<T>(p, o, packed_weight, b, rstd, x_b);
      }
      if (turns) {
        if (own_angles) find_turn(p, o, angles, packed_table, batch, token, head + i, a, b, turn);
        rotate<T>(p, turn, x_a, x_b);
      }
      if (active) {
        const int64_t start = offset(o.output_stride, batch, token, head + i);
        store_output<T>(o, packed_out, start, a, x_a);
        store_output<T>(o, packed_out, start, b, x_b);
      }
    }
  }
}

// grid: x = rows, y = operand. A row is a token (norm across heads) or one head of a token; the block owns it.
// kUnits == 0: longer than the registers hold, or not in whole packs; read twice.
template <typename T, int kWidth, int kUnits>
__global__ void __launch_bounds__(512)
    norm_row_kernel(const __grid_constant__ RotaryParams p, const __grid_constant__ Units units) {
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
      rotate<T>(p, turn, x_a, x_b);
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
  if constexpr (kUnits > 0) {
    Pack<T, kWidth> raw_a[kUnits], raw_b[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int u = static_cast<int>(threadIdx.x) + k * threads;
      if (u < count) load(place(u), raw_a[k], raw_b[k]);
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (static_cast<int>(threadIdx.x) + k * threads < count) sum += sum_of(raw_a[k], raw_b[k]);
    }
    const float mean = row_sum(sum, threads, scratch) / static_cast<float>(heads * p.head_dim);
    const float rstd = rsqrtf(mean + p.eps);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int u = static_cast<int>(threadIdx.x) + k * threads;
      if (u < count) finish(place(u), raw_a[k], raw_b[k], rstd);
    }
  } else {
    Pack<T, kWidth> raw_a, raw_b;
    for (int u = threadIdx.x; u < count; u += threads) {
      load(place(u), raw_a, raw_b);
      sum += sum_of(raw_a, raw_b);
    }
    const float mean = row_sum(sum, threads, scratch) / static_cast<float>(heads * p.head_dim);
    const float rstd = rsqrtf(mean + p.eps);
    for (int u = threadIdx.x; u < count; u += threads) {
      const Place at = place(u);
      load(at, raw_a, raw_b);
      finish(at, raw_a, raw_b, rstd);
    }
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

template <typename T, int kWidth, bool kNorm, typename Angles>
void launch_heads(const RotaryParams& p, const Angles& angles, const Units& units, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int lanes = kNorm ? next_power_of_two(units.per_head) : units.per_head;
  int64_t rows = 0, heads = 0;
  for (int i = 0; i < p.operands; ++i) {
    rows = std::max(rows, p.batch * p.operand[i].sequence);
    heads = std::max(heads, p.operand[i].heads);
  }
  // Enough heads a thread to pay for its cos and sin, few enough to fill the GPU with short sequences.
  const int heads_per_block = static_cast<int>(std::max<int64_t>(std::min<int64_t>(heads, 8), ceil_div(heads, 65535)));
  const dim3 grid(grid_size(ceil_div(rows * lanes, kThreads)), static_cast<unsigned>(ceil_div(heads, heads_per_block)),
                  static_cast<unsigned>(p.operands));
  rotate_kernel<T, kWidth, kNorm, Angles><<<grid, kThreads, 0, stream>>>(p, angles, units, lanes, heads_per_block);
  check_launch("rotary");
}

template <typename T, int kWidth>
void launch_rows(const RotaryParams& p, const Units& units, cudaStream_t stream) {
  int64_t rows = 0, count = 0;
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    const bool across = p.norm == QkNorm::kAcrossHeads;
    rows = std::max(rows, p.batch * o.sequence * (across ? 1 : o.heads));
    count = std::max(count, (across ? o.heads : 1) * units.per_head);
  }
  const dim3 grid(grid_size(rows), static_cast<unsigned>(p.operands));
  const auto threads = [&](int units_per_thread) {
    return static_cast<int>(std::min<int64_t>(ceil_div(count, 32 * units_per_thread) * 32, 512));
  };
  if constexpr (kWidth > 1) {
    if (count <= 32) {
      norm_row_kernel<T, kWidth, 1><<<grid, threads(1), 0, stream>>>(p, units);
    } else if (count <= 2 * 512) {
      norm_row_kernel<T, kWidth, 2><<<grid, threads(2), 0, stream>>>(p, units);
    } else {
      norm_row_kernel<T, kWidth, 0><<<grid, 512, 0, stream>>>(p, units);
    }
  } else {
    norm_row_kernel<T, kWidth, 0><<<grid, threads(4), 0, stream>>>(p, units);
  }
  check_launch("rotary norm");
}

template <typename T, int kWidth>
void launch(const RotaryParams& p, const RotaryAngles* angles, cudaStream_t stream) {
  const Units units = make_units<T, kWidth>(p);
  if (angles) return launch_heads<T, kWidth, false>(p, *angles, units, stream);
  if (p.norm == QkNorm::kNone) return launch_heads<T, kWidth, false>(p, NoAngles{}, units, stream);
  if (p.norm == QkNorm::kPerHead && units.per_head <= 32) {
    return launch_heads<T, kWidth, true>(p, NoAngles{}, units, stream);
  }
  return launch_rows<T, kWidth>(p, units, stream);
}

}  // namespace

void rotary(const RotaryParams& p, const RotaryAngles* angles, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (divides(p, kPackWidth<T>)) return launch<T, kPackWidth<T>>(p, angles, stream);
    return launch<T, 1>(p, angles, stream);
  });
}

}  // namespace ltx
