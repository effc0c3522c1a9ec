// Rows quantised to fp8: norm_quant (rmsnorm, adaln_rmsnorm, gated_residual, gated_residual_adaln_rmsnorm,
// rmsnorm_residual, plain rows) and glu_quant (geglu, swiglu, gelu).
//
//   scale  = max(amax(|y|) / 448, 2^-120), or one number for all rows
//   values = e4m3(y * (1 / scale))              y: the op's fp32 result (norm.cu and glu.cu have the formulas)
//
// 16-bit rows are read once (2 bytes an element, and as many for a residual or an up) and written once (1 byte, and 2
// for the residual stream); y stays in registers while the row finds its largest magnitude.
//
// A row belongs to `threads` neighbouring threads; thread t owns the 16-byte packs t, t + threads, ... As in norm.cu,
// `geometry` looks at the row's length and dtype alone, the *_kernel take rows of whole aligned packs that fit the
// registers, and the *_kernel_general take everything else, walking the row once for the norm's sum, once for the
// magnitude and once for the values, from cache after the first pass.
#include <array>

#include "ltx/activation.cuh"
#include "ltx/fp8.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kMaxThreads = 512;  // of a row: leaves 128 registers a thread

// ---- Shared by all kernels

// Sum of squares of a pack, as two chains.
template <int kWidth>
__device__ __forceinline__ float pack_squares(const float (&h)[kWidth]) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i % 2] = fmaf(h[i], h[i], sum[i % 2]);
  return sum[0] + sum[1];
}

// x = addend + x, and alike.
template <int kWidth>
__device__ __forceinline__ void add(float (&x)[kWidth], const float (&addend)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = __fadd_rn(addend[i], x[i]);
}

template <int kWidth>
__device__ __forceinline__ void multiply(float (&x)[kWidth], const float (&factor)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(x[i], factor[i]);
}

template <int kWidth>
__device__ __forceinline__ void multiply_add(float (&x)[kWidth], const float (&factor)[kWidth],
                                             const float (&addend)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = fmaf(x[i], factor[i], addend[i]);
}

template <int kWidth, typename Op>
__device__ __forceinline__ void each(float (&x)[kWidth], const Op& op) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = op(x[i]);
}

template <typename T, int kWidth>
__device__ __forceinline__ void activate(Activation activation, float (&x)[kWidth]) {
  if (activation == Activation::kSilu) {
    each(x, [](float v) { return ltx::activate<T, Activation::kSilu>(v); });
  } else if (activation == Activation::kGeluTanh) {
    each(x, [](float v) { return ltx::activate<T, Activation::kGeluTanh>(v); });
  } else {
    each(x, [](float v) { return ltx::activate<T, Activation::kGelu>(v); });
  }
}

template <int kWidth>
__device__ __forceinline__ float pack_magnitude(float most, const float (&y)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) most = larger_magnitude(most, y[i]);
  return most;
}

// ---- In registers. Rows have at most two dimensions, of which the outer one is the grid's y.

struct RowPointer {
  char* data;
  int64_t inner, outer;  // strides in bytes

  __device__ __forceinline__ char* at(uint32_t row) const { return data + outer * blockIdx.y + inner * row; }
};

// A thread's packs of a row of T: number k of them begins at column(k), if inside(k).
// block: x = the threads of a row, y = rows. grid: x = rows of the inner dimension, y = the outer dimension.
template <typename T>
struct RowShare {
  static constexpr int kWidth = kPackWidth<T>;
  uint32_t rows, row;
  int width;
  bool active;

  // Rows past the last are row 0 and write nothing: every thread must reach every shuffle and barrier.
  __device__ __forceinline__ RowShare(uint32_t rows, int width)
      : rows(rows), row(blockIdx.x * blockDim.y + threadIdx.y), width(width), active(row < rows) {
    if (!active) row = 0;
  }
  __device__ __forceinline__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int column(int k) const { return static_cast<int>(threadIdx.x + k * blockDim.x) * kWidth; }
  __device__ __forceinline__ bool inside(int k) const { return column(k) < width; }

  // Pack k of a row of any dtype.
  template <typename M>
  __device__ __forceinline__ Pack<M, kWidth> load(const char* data, int k) const {
    return *reinterpret_cast<const Pack<M, kWidth>*>(reinterpret_cast<const M*>(data) + column(k));
  }
  template <typename M>
  __device__ __forceinline__ void get(const char* data, int k, float (&x)[kWidth]) const {
    load_floats_as<M, kWidth>(data, 0, column(k), 1, 0, true, x);
  }

  // Writes y, whose largest magnitude among the thread's own packs is `most`.
  template <int kPacks>
  __device__ __forceinline__ void quantise(const float (&y)[kPacks][kWidth], float most, const QuantOutput& output,
                                           float* scratch) const {
    if (!output.static_scale) most = row_magnitude(most, threads(), scratch);
    if (!active) return;
    const float scale = quant_scale(most, output.static_scale);
    const float inverse = __frcp_rn(scale);
    const int64_t number = static_cast<int64_t>(blockIdx.y) * rows + row;
    if (threadIdx.x == 0) output.scales[number] = scale;
    uint8_t* values = output.values + number * width;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (inside(k)) *reinterpret_cast<E4m3Pack<kWidth>*>(values + column(k)) = E4m3Pack<kWidth>(y[k], inverse);
    }
  }
};

// y = h * rstd * (weight_offset + weight) * (factor_offset + factor + factor_table) + shift + shift_table
// The factor is the modulation's 1 + scale or, where there is none, the weight.
struct NormRowParams {
  RowPointer input, residual, residual_out, gate, factor, shift;
  const char *gate_table, *weight, *factor_table, *shift_table;
  QuantOutput output;
  uint32_t rows;  // of the inner dimension
  int32_t width;
  float inverse_width, eps, weight_offset, factor_offset;
};

// T: of the rows; M: of all vectors and modulators.
template <typename T, typename M, bool kResidual, bool kNorm, int kPacks>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_quant_kernel(const __grid_constant__ NormRowParams p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][32];
  const RowShare<T> share(p.rows, p.width);
  const char *input_row = p.input.at(share.row), *residual_row = p.residual.at(share.row);
  const char *gate_row = p.gate.at(share.row), *factor_row = p.factor.at(share.row), *shift_row = p.shift.at(share.row);
  const bool gated = kResidual && p.gate.data, scaled = kNorm && p.factor.data, shifted = kNorm && p.shift.data;

  // All is on its way before any is used; but fp32 vectors beside 16-bit rows would take too many registers.
  constexpr bool kAhead = sizeof(M) == sizeof(T);
  Pack<T, kWidth> input[kPacks], residual[kPacks];
  Pack<M, kWidth> gate[kPacks], factor[kPacks], shift[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!share.inside(k)) continue;
    input[k] = share.template load<T>(input_row, k);
    if constexpr (kResidual) residual[k] = share.template load<T>(residual_row, k);
    if (kAhead && gated) gate[k] = share.template load<M>(gate_row, k);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!share.inside(k)) continue;
    if (kAhead && scaled) factor[k] = share.template load<M>(factor_row, k);
    if (kAhead && shifted) shift[k] = share.template load<M>(shift_row, k);
  }
  // value + table of a modulator.
  const auto get_modulator = [&](const Pack<M, kWidth>& ahead, const char* row, const char* table, int k,
                                 float (&m)[kWidth]) {
    if constexpr (kAhead) {
      unpack(ahead, m);
    } else {
      share.template get<M>(row, k, m);
    }
    if (table) {
      float t[kWidth];
      share.template get<M>(table, k, t);
      add(m, t);
    }
  };

  float y[kPacks][kWidth];
  if constexpr (kResidual) {
    char* residual_out = p.residual_out.at(share.row);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!share.inside(k)) continue;
      float r[kWidth];
      unpack(residual[k], r);
      unpack(input[k], y[k]);
      if (gated) {
        float g[kWidth];
        get_modulator(gate[k], gate_row, p.gate_table, k, g);
        multiply_add(y[k], g, r);
      } else {
        add(y[k], r);
      }
      if (share.active) {
        *(reinterpret_cast<Pack<T, kWidth>*>(residual_out) + share.column(k) / kWidth) = to_pack<T, kWidth>(y[k]);
      }
    }
  }
  float rstd = 1.f;
  if constexpr (kNorm) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!share.inside(k)) continue;
      if constexpr (kResidual) {
        sum += pack_squares(y[k]);
      } else {
        // The row stays packed, in half the registers, until the sum is known.
        float h[kWidth];
        unpack(input[k], h);
        sum += pack_squares(h);
      }
    }
    rstd = rsqrtf(fmaf(row_sum(sum, share.threads(), scratch[0]), p.inverse_width, p.eps));
  }
  float most = 0.f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!share.inside(k)) continue;
    if constexpr (!kResidual) unpack(input[k], y[k]);
    if constexpr (kNorm) {
      float m[kWidth], s[kWidth];
      each(y[k], [&](float h) { return __fmul_rn(h, rstd); });
      if (p.weight) {
        share.template get<M>(p.weight, k, m);
        each(m, [&](float w) { return __fadd_rn(p.weight_offset, w); });
        multiply(y[k], m);
      }
      if (scaled) {
        get_modulator(factor[k], factor_row, p.factor_table, k, m);
        each(m, [&](float f) { return __fadd_rn(p.factor_offset, f); });
      }
      if (shifted) get_modulator(shift[k], shift_row, p.shift_table, k, s);
      if (scaled && shifted) {
        multiply_add(y[k], m, s);
      } else if (scaled) {
        multiply(y[k], m);
      } else if (shifted) {
        add(y[k], s);
      }
    }
    most = pack_magnitude(most, y[k]);
  }
  share.quantise(y, most, p.output, scratch[1]);
}

struct GluRowParams {
  RowPointer gate, up;  // gelu: no up
  const char* bias;     // of the rows' dtype
  QuantOutput output;
  uint32_t rows;
  int32_t width;
  Activation activation;
};

template <typename T, bool kGated, int kPacks>
__global__ void __launch_bounds__(kMaxThreads, 1) glu_quant_kernel(const __grid_constant__ GluRowParams p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[32];
  const RowShare<T> share(p.rows, p.width);
  const char *gate_row = p.gate.at(share.row), *up_row = p.up.at(share.row);
  Pack<T, kWidth> gate[kPacks], up[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!share.inside(k)) continue;
    gate[k] = share.template load<T>(gate_row, k);
    if constexpr (kGated) up[k] = share.template load<T>(up_row, k);
  }
  float y[kPacks][kWidth], most = 0.f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!share.inside(k)) continue;
    float other[kWidth];
    unpack(gate[k], y[k]);
    if (!kGated && p.bias) {
      share.template get<T>(p.bias, k, other);
      add(y[k], other);
    }
    activate<T>(p.activation, y[k]);
    if constexpr (kGated) {
      unpack(up[k], other);
      multiply(y[k], other);
    }
    most = pack_magnitude(most, y[k]);
  }
  share.quantise(y, most, p.output, scratch);
}

// ---- Everything else. block: as above; grid: x counts all rows.

// Calls at(column) for the thread's packs of a row, of any length.
template <typename T, typename At>
__device__ __forceinline__ void for_packs(int64_t width, const At& at) {
#pragma unroll 1
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kPackWidth<T>; column < width;
       column += static_cast<int64_t>(blockDim.x) * kPackWidth<T>) {
    at(column);
  }
}

// Writes the row that get(column, y) gives, zero past its end.
template <typename T, typename Get>
__device__ __forceinline__ void quantise_general(int64_t row, bool active, int64_t width, const QuantOutput& output,
                                                 float* scratch, const Get& get) {
  constexpr int kWidth = kPackWidth<T>;
  float y[kWidth], most = 0.f;
  if (!output.static_scale) {
    for_packs<T>(width, [&](int64_t column) {
      get(column, y);
      most = pack_magnitude(most, y);
    });
    most = row_magnitude(most, static_cast<int>(blockDim.x), scratch);
  }
  if (!active) return;
  const float scale = quant_scale(most, output.static_scale);
  const float inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) output.scales[row] = scale;
  uint8_t* values = output.values + row * width;
  for_packs<T>(width, [&](int64_t column) {
    get(column, y);
    const E4m3Pack<kWidth> pack(y, inverse);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i < width) values[column + i] = pack.byte(i);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_quant_kernel_general(const __grid_constant__ NormParams p, const __grid_constant__ QuantOutput output,
                              float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][32];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const bool active = number < p.rows.count;
  int64_t input = 0, residual = 0, residual_out = 0, gate = 0, scale = 0, shift = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    input += i * p.input.stride[d];
    residual += i * p.residual.stride[d];
    residual_out += i * p.residual_out.stride[d];
    gate += i * p.gate.value.stride[d];
    scale += i * p.scale.value.stride[d];
    shift += i * p.shift.value.stride[d];
  });
  const auto get = [&](const RowView& view, int64_t row, int64_t column, float (&x)[kWidth]) {
    load_floats<kWidth>(view.data, view.dtype, row, column, view.column_stride, width, false, x);
  };
  const auto get_modulator = [&](const Modulator& modulator, int64_t row, int64_t column, float (&m)[kWidth]) {
    get(modulator.value, row, column, m);
    if (modulator.table.data) {
      float table[kWidth];
      get(modulator.table, 0, column, table);
      add(m, table);
    }
  };
  const auto get_h = [&](int64_t column, float (&h)[kWidth]) {
    get(p.input, input, column, h);
    if (p.residual.data) {
      float r[kWidth], g[kWidth];
      get(p.residual, residual, column, r);
      if (p.gate.value.data) {
        get_modulator(p.gate, gate, column, g);
        multiply_add(h, g, r);
      } else {
        add(h, r);
      }
    }
  };
  const bool normalises = p.statistic == Statistic::kRms;
  float sum = 0.f;
  if (normalises || p.residual_out.data) {
    for_packs<T>(width, [&](int64_t column) {
      float h[kWidth];
      get_h(column, h);
      sum += pack_squares(h);
      if (active && p.residual_out.data) {
        store_pack(static_cast<T*>(p.residual_out.data) + residual_out, column, p.residual_out.column_stride, width,
                   false, to_pack<T, kWidth>(h));
      }
    });
  }
  float rstd = 1.f;
  if (normalises) {
    rstd = rsqrtf(fmaf(row_sum(sum, static_cast<int>(blockDim.x), scratch[0]), inverse_width, p.eps));
  }
  quantise_general<T>(number, active, width, output, scratch[1], [&](int64_t column, float (&y)[kWidth]) {
    get_h(column, y);
    if (!normalises) return;
    float m[kWidth], s[kWidth];
    each(y, [&](float h) { return __fmul_rn(h, rstd); });
    if (p.weight.data) {
      get(p.weight, 0, column, m);
      each(m, [&](float w) { return __fadd_rn(p.weight_offset, w); });
      multiply(y, m);
    }
    if (p.scale.value.data) {
      get_modulator(p.scale, scale, column, m);
      each(m, [&](float f) { return __fadd_rn(1.f, f); });
    }
    if (p.shift.value.data) get_modulator(p.shift, shift, column, s);
    if (p.scale.value.data && p.shift.value.data) {
      multiply_add(y, m, s);
    } else if (p.scale.value.data) {
      multiply(y, m);
    } else if (p.shift.value.data) {
      add(y, s);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    glu_quant_kernel_general(const __grid_constant__ GluParams p, const __grid_constant__ QuantOutput output) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[32];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const bool active = number < p.rows.count;
  int64_t gate = 0, up = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    gate += i * p.gate.stride[d];
    up += i * p.up.stride[d];
  });
  const auto get = [&](const RowView& view, int64_t row, int64_t column, float (&x)[kWidth]) {
    load_floats<kWidth>(view.data, view.dtype, row, column, view.column_stride, width, false, x);
  };
  quantise_general<T>(number, active, width, output, scratch, [&](int64_t column, float (&y)[kWidth]) {
    float other[kWidth];
    get(p.gate, gate, column, y);
    if (p.bias.data) {
      get(p.bias, 0, column, other);
      add(y, other);
    }
    activate<T>(p.activation, y);
    if (p.up.data) {
      get(p.up, up, column, other);
      multiply(y, other);
    }
  });
}

// ---- Launch

// How a row is shared out: `threads` a row, `packs` a thread (0: more than the registers hold).
struct Geometry {
  int threads;
  int packs;
};

Geometry geometry(int64_t width, int pack_width) {
  const int64_t packs = ceil_div(width, pack_width);
  if (packs <= 32) return {next_power_of_two(packs), 1};  // several rows a warp
  if (packs <= 64) return {32, 2};
  if (packs <= 4 * kMaxThreads) return {static_cast<int>(ceil_div(packs, 128)) * 32, 4};
  return {kMaxThreads, 0};
}

// A launch of rows of `width` columns: short rows share a block of four warps, a longer one has a block to itself.
template <typename T>
struct Launch {
  Geometry shape;
  dim3 block;
  cudaStream_t stream;

  Launch(int64_t width, const Context& context)
      : shape(geometry(width, kPackWidth<T>)),
        block(static_cast<unsigned>(shape.threads),
              shape.threads > 32 ? 1u : static_cast<unsigned>(128 / shape.threads)),
        stream(static_cast<cudaStream_t>(context.stream)) {}

  dim3 grid(int64_t rows, int64_t outer = 1) const {
    return {grid_size(ceil_div(rows, block.y)), static_cast<unsigned>(outer)};
  }
};

// Takes operands for a *_kernel; `fits` until one of them does not.
template <typename T>
class RowOperands {
 public:
  explicit RowOperands(const Rows& rows) : rows_(rows) {
    inner_ = rows.ndim == 2 ? rows.size[1] : rows.count;
    fits_ = rows.ndim <= 2 && (rows.ndim < 2 || rows.size[0] <= 65535) && inner_ <= 0xffffffffll;
  }

  bool fits() const { return fits_; }
  int64_t inner() const { return inner_; }
  int64_t outer() const { return rows_.ndim == 2 ? rows_.size[0] : 1; }

  RowPointer row(const RowView& view) {
    check(view);
    const int64_t bytes = element_size(view.dtype);
    return {static_cast<char*>(view.data), rows_.ndim > 0 ? view.stride[rows_.ndim - 1] * bytes : 0,
            rows_.ndim == 2 ? view.stride[0] * bytes : 0};
  }
  const char* vector(const RowView& view) {
    check(view);
    return static_cast<const char*>(view.data);
  }

 private:
  void check(const RowView& v) {
    fits_ = fits_ &&
            (!v.data || is_packed(v.data, v.dtype, kPackWidth<T>, rows_.width, v.column_stride, v.stride, rows_.ndim));
  }

  const Rows& rows_;
  int64_t inner_;
  bool fits_;
};

template <typename T, typename M, bool kResidual, bool kNorm>
void launch_norm(const NormRowParams& p, const Launch<T>& launch, dim3 grid) {
  switch (launch.shape.packs) {
    case 1:
      return norm_quant_kernel<T, M, kResidual, kNorm, 1><<<grid, launch.block, 0, launch.stream>>>(p);
    case 2:
      return norm_quant_kernel<T, M, kResidual, kNorm, 2><<<grid, launch.block, 0, launch.stream>>>(p);
    default:
      return norm_quant_kernel<T, M, kResidual, kNorm, 4><<<grid, launch.block, 0, launch.stream>>>(p);
  }
}

template <typename T, typename M>
void launch_norm(const NormRowParams& p, bool normalises, const Launch<T>& launch, dim3 grid) {
  if (p.residual.data) {
    return normalises ? launch_norm<T, M, true, true>(p, launch, grid)
                      : launch_norm<T, M, true, false>(p, launch, grid);
  }
  if (normalises) return launch_norm<T, M, false, true>(p, launch, grid);
  return launch_norm<T, T, false, false>(p, launch, grid);  // no vectors
}

template <typename T>
void norm_quant(const NormParams& p, const QuantOutput& output, const Context& context) {
  const Launch<T> launch(p.rows.width, context);
  RowOperands<T> operands(p.rows);
  NormRowParams q;
  q.input = operands.row(p.input);
  q.residual = operands.row(p.residual);
  q.residual_out = operands.row(p.residual_out);
  q.gate = operands.row(p.gate.value);
  const bool scaled = p.scale.value.data;
  q.factor = operands.row(scaled ? p.scale.value : p.weight);
  q.shift = operands.row(p.shift.value);
  q.gate_table = operands.vector(p.gate.table);
  q.weight = scaled ? operands.vector(p.weight) : nullptr;
  q.factor_table = operands.vector(p.scale.table);
  q.shift_table = operands.vector(p.shift.table);
  q.output = output;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.width = static_cast<int32_t>(p.rows.width);
  q.inverse_width = 1.f / static_cast<float>(p.rows.width);
  q.eps = p.eps;
  q.weight_offset = p.weight_offset;
  q.factor_offset = scaled ? 1.f : p.weight_offset;
  bool narrow = false, wide = false, other = false;
  for (const RowView* v :
       {&p.gate.value, &p.gate.table, &p.weight, &p.scale.value, &p.scale.table, &p.shift.value, &p.shift.table}) {
    if (!v->data) continue;
    (v->dtype == DTypeOf<T>::value ? narrow : v->dtype == DType::kFloat32 ? wide : other) = true;
  }
  if (launch.shape.packs > 0 && operands.fits() && !other && !(narrow && wide)) {
    const bool normalises = p.statistic == Statistic::kRms;
    const dim3 grid = launch.grid(operands.inner(), operands.outer());
    wide ? launch_norm<T, float>(q, normalises, launch, grid) : launch_norm<T, T>(q, normalises, launch, grid);
  } else {
    norm_quant_kernel_general<T>
        <<<launch.grid(p.rows.count), launch.block, 0, launch.stream>>>(p, output, q.inverse_width);
  }
  check_launch("norm_quant");
}

template <typename T, bool kGated>
void launch_glu(const GluRowParams& p, const Launch<T>& launch, dim3 grid) {
  switch (launch.shape.packs) {
    case 1:
      return glu_quant_kernel<T, kGated, 1><<<grid, launch.block, 0, launch.stream>>>(p);
    case 2:
      return glu_quant_kernel<T, kGated, 2><<<grid, launch.block, 0, launch.stream>>>(p);
    default:
      return glu_quant_kernel<T, kGated, 4><<<grid, launch.block, 0, launch.stream>>>(p);
  }
}

template <typename T>
void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  const Launch<T> launch(p.rows.width, context);
  RowOperands<T> operands(p.rows);
  const GluRowParams q{operands.row(p.gate),
                       operands.row(p.up),
                       operands.vector(p.bias),
                       output,
                       static_cast<uint32_t>(operands.inner()),
                       static_cast<int32_t>(p.rows.width),
                       p.activation};
  const bool plain_bias = !p.bias.data || p.bias.dtype == DTypeOf<T>::value;
  if (launch.shape.packs > 0 && operands.fits() && plain_bias) {
    const dim3 grid = launch.grid(operands.inner(), operands.outer());
    p.up.data ? launch_glu<T, true>(q, launch, grid) : launch_glu<T, false>(q, launch, grid);
  } else {
    glu_quant_kernel_general<T><<<launch.grid(p.rows.count), launch.block, 0, launch.stream>>>(p, output);
  }
  check_launch("glu_quant");
}

// The slices of for_each_slice, with the part of the output that each writes.
template <typename Params, typename Views, typename Op>
void for_each_output_slice(const Params& params, const QuantOutput& output, const Views& views, const Op& op) {
  QuantOutput slice = output;
  for_each_slice(params, views, [&](const Params& q) {
    op(q, slice);
    slice.values += q.rows.count * q.rows.width;
    slice.scales += q.rows.count;
  });
}

}  // namespace

void norm_quant(const NormParams& p, const QuantOutput& output, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](NormParams& q) {
      return std::array<RowView*, 6>{&q.input,      &q.residual,    &q.residual_out,
                                     &q.gate.value, &q.scale.value, &q.shift.value};
    };
    return for_each_output_slice(p, output, views,
                                 [&](const NormParams& q, const QuantOutput& slice) { norm_quant(q, slice, context); });
  }
  dispatch(p.dtype, [&](auto zero) { norm_quant<decltype(zero)>(p, output, context); });
}

void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](GluParams& q) { return std::array<RowView*, 2>{&q.gate, &q.up}; };
    return for_each_output_slice(p, output, views,
                                 [&](const GluParams& q, const QuantOutput& slice) { glu_quant(q, slice, context); });
  }
  dispatch(p.dtype, [&](auto zero) { glu_quant<decltype(zero)>(p, output, context); });
}

}  // namespace ltx
