// The gradients of gated and plain activations: of geglu, swiglu, gelu, swiglu_clamped and gate_heads.
//
//   grad_gate = grad * up * activation'(gate)     grad_up = grad * activation(gate)
//
// glu.cu has the activations, ltx/params.h (GluBackwardParams) which operands may be absent. Everything is elementwise,
// but for a gate that serves a whole head: its gradient is a sum over the head's columns.
//
// A thread owns a pack of 16 bytes. glu_backward_kernel has two instances: one moves whole packs of rows that are one
// dimension, the other takes any strides and alignment. Both have the same arithmetic.
#include <algorithm>
#include <array>

#include "ltx/activation.cuh"
#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kThreads = 128;

// kInTurn: gate and up in turn, g0 u0 g1 u1 ..., and so their gradients.
enum class Form { kPlain, kBias, kGated, kInTurn };

// sigmoid(x) and 1 - sigmoid(x), each to its own relative precision.
struct Sigmoids {
  float value, complement;
};
template <typename T>
__device__ __forceinline__ Sigmoids sigmoids(float x) {
  const float a = fabsf(x);
  float power, larger;
  if constexpr (sizeof(T) == 4) {
    power = expf(-a);
    larger = 1.f / (1.f + power);
  } else {
    power = fast_exp2(a * -1.4426950408889634f);
    larger = fast_reciprocal(1.f + power);
  }
  const float smaller = power * larger;
  return x < 0.f ? Sigmoids{smaller, larger} : Sigmoids{larger, smaller};
}

// An activation and its derivative.
struct Slope {
  float value, derivative;
};

// x * sigmoid(t) with t = k x or the tanh form's polynomial; `rate` is the derivative of t.
template <typename T>
__device__ __forceinline__ Slope times_sigmoid_slope(float x, float t, float rate) {
  const Sigmoids s = sigmoids<T>(t);
  return {x * s.value, fmaf(x * s.value * s.complement, rate, s.value)};
}

template <typename T, Activation A>
__device__ __forceinline__ Slope slope(float x, float alpha) {
  if constexpr (A == Activation::kSilu) return times_sigmoid_slope<T>(x, x, 1.f);
  if constexpr (A == Activation::kClampedSilu) return times_sigmoid_slope<T>(x, alpha * x, alpha);
  if constexpr (A == Activation::kGeluTanh) {
    // t = 2 sqrt(2 / pi) (x + 0.044715 x^3). Where the bound of the square counts, the sigmoid is 0 or 1.
    const float square = fminf(x * x, 1e4f);
    return times_sigmoid_slope<T>(x, x * fmaf(square, 0.071354816272600289f, 1.5957691216057308f),
                                  fmaf(square, 0.214064448817800867f, 1.5957691216057308f));
  }
  float cdf, density;
  if constexpr (sizeof(T) == 4) {
    cdf = 0.5f * erfcf(x * -0.70710678118654752f);
    density = expf(-0.5f * x * x);
  } else {
    density = fast_exp2(x * x * -0.72134752044448170f);
    cdf = fast_normal_cdf(x, density);
  }
  return {x * cdf, fmaf(x * 0.39894228040143268f, density, cdf)};
}

// The gradients of a gate and its up. Without an up only that of the gate is meant.
struct Gradients {
  float gate, up;
};
template <typename T, Activation A>
__device__ __forceinline__ Gradients gradients(const GluParams& p, float grad, float gate, float up) {
  if constexpr (A == Activation::kSigmoid) {
    const Sigmoids s = sigmoids<T>(gate);
    const float weight = p.scale * s.value;
    return {grad * up * weight * s.complement, grad * weight};
  } else if constexpr (A == Activation::kClampedSilu) {
    const Slope s = slope<T, A>(gate > p.limit ? p.limit : gate, p.alpha);
    const float u = fminf(fmaxf(up, -p.limit), p.limit) + 1.f;
    // torch.clamp has the gradient 1 at its bounds and, for NaN, 0.
    return {gate <= p.limit ? grad * (up == up ? u : up) * s.derivative : 0.f,
            fabsf(up) <= p.limit ? grad * s.value : 0.f};
  } else {
    const Slope s = slope<T, A>(gate, 1.f);
    return {grad * up * s.derivative, grad * s.value};
  }
}

// Two packs in turn, g0 u0 g1 u1 ..., as gates and ups, and back.
template <int kWidth>
__device__ __forceinline__ void part(const float (&first)[kWidth], const float (&second)[kWidth], float (&gate)[kWidth],
                                     float (&up)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int j = 2 * i;
    gate[i] = j < kWidth ? first[j % kWidth] : second[j % kWidth];
    up[i] = j < kWidth ? first[j % kWidth + 1] : second[j % kWidth + 1];
  }
}
template <int kWidth>
__device__ __forceinline__ void join(const float (&gate)[kWidth], const float (&up)[kWidth], float (&first)[kWidth],
                                     float (&second)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float& even = 2 * i < kWidth ? first[2 * i % kWidth] : second[2 * i % kWidth];
    float& odd = 2 * i < kWidth ? first[2 * i % kWidth + 1] : second[2 * i % kWidth + 1];
    even = gate[i];
    odd = up[i];
  }
}

// Columns of a row of dtype T as fp32, and back. kWhole: in one access.
template <typename T, bool kWhole, int kWidth>
__device__ __forceinline__ void load(const RowView& v, int64_t start, int64_t column, int64_t width,
                                     float (&x)[kWidth]) {
  unpack(load_pack<T, kWidth>(static_cast<const T*>(v.data) + start, column, v.column_stride, width, kWhole), x);
}
template <typename T, bool kWhole, int kWidth>
__device__ __forceinline__ void store(const RowView& v, int64_t start, int64_t column, int64_t width,
                                      const float (&x)[kWidth]) {
  T* const row = static_cast<T*>(v.data) + start;
  const auto pack = to_pack<T, kWidth>(x);
  if constexpr (kWhole) {
    store_row_pack(reinterpret_cast<Pack<T, kWidth>*>(row + column), pack);
  } else {
    store_pack(row, column, v.column_stride, width, false, pack);
  }
}

// kWhole: rows are at most one dimension, and every access is a whole pack; grid: x = blocks of a row, y and z = rows.
// Otherwise x counts the packs of all rows.
template <typename T, Activation A, Form F, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    glu_backward_kernel(const __grid_constant__ GluBackwardParams p, int64_t packs_per_row) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kGated = F == Form::kGated || F == Form::kInTurn;
  const int64_t width = p.rows.width;
  int64_t row, pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int64_t grads = 0, gates = 0, ups = 0, grad_gates = 0, grad_ups = 0;
  const auto move = [&](int d, int64_t i) {
    grads += i * p.grad.stride[d];
    gates += i * p.gate.stride[d];
    ups += i * p.up.stride[d];
    grad_gates += i * p.grad_gate.stride[d];
    grad_ups += i * p.grad_up.stride[d];
  };
  if constexpr (kWhole) {
    row = static_cast<int64_t>(blockIdx.z) * kMaxGridY + blockIdx.y;
    if (pack >= packs_per_row || row >= p.rows.count) return;
    move(0, row);
  } else {
    if (pack >= p.rows.count * packs_per_row) return;
    row = pack / packs_per_row;
    pack -= row * packs_per_row;
    walk_row(p.rows, row, move);
  }
  const int64_t column = pack * kWidth;
  constexpr bool kTurns = F == Form::kInTurn && kWhole;
  float grad[kWidth], gate[kWidth], up[kWidth];
  load<T, kWhole>(p.grad, grads, column, width, grad);
  if constexpr (kTurns) {
    float first[kWidth], second[kWidth];
    load<T, kWhole>(p.gate, gates, 2 * column, width, first);
    load<T, kWhole>(p.gate, gates, 2 * column + kWidth, width, second);
    part(first, second, gate, up);
  } else {
    load<T, kWhole>(p.gate, gates, column, width, gate);
    if constexpr (kGated) load<T, kWhole>(p.up, ups, column, width, up);
  }
  if constexpr (F == Form::kBias) {
    float bias[kWidth];
    load_floats<kWidth>(p.bias.data, p.bias.dtype, 0, column, p.bias.column_stride, width, kWhole, bias);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gate[i] = __fadd_rn(gate[i], bias[i]);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const Gradients g = gradients<T, A>(p, grad[i], gate[i], kGated ? up[i] : 1.f);
    gate[i] = g.gate;
    up[i] = g.up;
  }
  if constexpr (kTurns) {
    float first[kWidth], second[kWidth];
    join(gate, up, first, second);
    store<T, kWhole>(p.grad_gate, grad_gates, 2 * column, width, first);
    store<T, kWhole>(p.grad_gate, grad_gates, 2 * column + kWidth, width, second);
  } else {
    store<T, kWhole>(p.grad_gate, grad_gates, column, width, gate);
    if constexpr (kGated) store<T, kWhole>(p.grad_up, grad_ups, column, width, up);
  }
}

// A gate a head: rows are heads, and `lanes` neighbouring threads, a power of two up to 32, own one.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    head_gates_backward_kernel(const __grid_constant__ GluBackwardParams p, int lanes) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t width = p.rows.width;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  const bool active = row < p.rows.count;  // the others read row 0: every thread has to reach the shuffles
  int64_t grads = 0, gates = 0, ups = 0, grad_gates = 0, grad_ups = 0;
  walk_row(p.rows, active ? row : 0, [&](int d, int64_t i) {
    grads += i * p.grad.stride[d];
    gates += i * p.gate.stride[d];
    ups += i * p.up.stride[d];
    grad_gates += i * p.grad_gate.stride[d];
    grad_ups += i * p.grad_up.stride[d];
  });
  const Sigmoids s = sigmoids<T>(to_float(static_cast<const T*>(p.gate.data)[gates]));
  const float weight = p.scale * s.value;
  float sum = 0.f;
#pragma unroll 1
  for (int64_t column = lane * kWidth; column < width; column += lanes * kWidth) {
    float grad[kWidth], x[kWidth];
    load<T, kWhole>(p.grad, grads, column, width, grad);
    load<T, kWhole>(p.up, ups, column, width, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum = fmaf(grad[i], x[i], sum);
      x[i] = grad[i] * weight;
    }
    if (active) store<T, kWhole>(p.grad_up, grad_ups, column, width, x);
  }
  sum = lane_sum(sum, lanes);
  if (active && lane == 0) {
    static_cast<T*>(p.grad_gate.data)[grad_gates] = from_float<T>(sum * weight * s.complement);
  }
}

// Whether gate and up of swiglu_clamped, and their gradients, lie in turn, element by element.
template <typename T>
bool is_in_turn(const GluBackwardParams& p) {
  const auto turns = [&](const RowView& gate, const RowView& up) {
    return up.data == static_cast<const T*>(gate.data) + 1 && gate.column_stride == 2 && up.column_stride == 2 &&
           gate.stride[0] == up.stride[0];
  };
  return p.activation == Activation::kClampedSilu && p.rows.ndim <= 1 && turns(p.gate, p.up) &&
         turns(p.grad_gate, p.grad_up);
}

template <typename T, Activation A>
void launch(const GluBackwardParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto packed = [&](const RowView& v, int64_t width, int64_t column_stride) {
    return !v.data || is_packed(v.data, v.dtype, kPackWidth<T>, width, column_stride, v.stride, p.rows.ndim);
  };
  const auto whole = [&](const RowView& v) { return packed(v, p.rows.width, v.column_stride); };
  const int64_t packs = ceil_div(p.rows.width, kPackWidth<T>);
  if (p.gate_repeat > 1) {
    const bool fits = whole(p.grad) && whole(p.up) && whole(p.grad_up);
    const auto kernel = takes_packed("glu", forced().glu, fits) ? head_gates_backward_kernel<T, true>
                                                                : head_gates_backward_kernel<T, false>;
    const int lanes = std::min(next_power_of_two(packs), 32);
    kernel<<<grid_size(ceil_div(p.rows.count, kThreads / lanes)), kThreads, 0, stream>>>(p, lanes);
    return check_launch("glu_backward");
  }
  const bool in_turn = is_in_turn<T>(p);
  const bool sides = in_turn ? packed(p.gate, 2 * p.rows.width, 1) && packed(p.grad_gate, 2 * p.rows.width, 1)
                             : whole(p.gate) && whole(p.up) && whole(p.grad_gate) && whole(p.grad_up);
  const bool fits = p.rows.ndim <= 1 && sides && whole(p.grad) && whole(p.bias) &&
                    p.rows.count <= int64_t{kMaxGridY} * kMaxGridY && (p.rows.count == 1 || packs >= kThreads / 4);
  const bool main_line = takes_packed("glu", forced().glu, fits);
  const auto run = [&](auto kernel, dim3 grid) { kernel<<<grid, kThreads, 0, stream>>>(p, packs); };
  const auto run_form = [&](auto form) {
    constexpr Form F = decltype(form)::value;
    if (main_line) {
      run(glu_backward_kernel<T, A, F, true>,
          dim3(grid_size(ceil_div(packs, kThreads)), static_cast<unsigned>(std::min<int64_t>(p.rows.count, kMaxGridY)),
               static_cast<unsigned>(ceil_div(p.rows.count, kMaxGridY))));
    } else {
      run(glu_backward_kernel<T, A, F, false>, dim3(grid_size(ceil_div(p.rows.count * packs, kThreads))));
    }
  };
  if (p.up.data) {
    if constexpr (A == Activation::kClampedSilu) {
      if (in_turn) {
        run_form(std::integral_constant<Form, Form::kInTurn>());
        return check_launch("glu_backward");
      }
    }
    run_form(std::integral_constant<Form, Form::kGated>());
  } else if constexpr (A == Activation::kGelu || A == Activation::kGeluTanh) {
    p.bias.data ? run_form(std::integral_constant<Form, Form::kBias>())
                : run_form(std::integral_constant<Form, Form::kPlain>());
  } else if constexpr (A == Activation::kSilu) {
    run_form(std::integral_constant<Form, Form::kPlain>());
  }
  check_launch("glu_backward");
}

}  // namespace

void glu_backward(const GluBackwardParams& p, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](GluBackwardParams& q) {
      return std::array<RowView*, 5>{&q.grad, &q.gate, &q.up, &q.grad_gate, &q.grad_up};
    };
    return for_each_slice(p, views, [&](const GluBackwardParams& q) { glu_backward(q, context); });
  }
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.activation == Activation::kSilu) return launch<T, Activation::kSilu>(p, context);
    if (p.activation == Activation::kGeluTanh) return launch<T, Activation::kGeluTanh>(p, context);
    if (p.activation == Activation::kSigmoid) return launch<T, Activation::kSigmoid>(p, context);
    if (p.activation == Activation::kClampedSilu) return launch<T, Activation::kClampedSilu>(p, context);
    return launch<T, Activation::kGelu>(p, context);
  });
}

}  // namespace ltx
