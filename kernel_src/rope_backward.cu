// The gradients of apply_rotary, apply_rotary_qk and qk_norm_rope, of query and key: the rotation backwards, the
// weight, and the gradient of the norm, in one launch for both. ltx/rotary_backward.h has the formula.
//
// A row is a head, or with a norm across heads a token. Its threads own packs of 16 bytes, as in the norm kernels. The
// partner of an element is in its own pack, or in the half layout in the pack half a head away. A thread keeps its
// packs of a row. It reads them again for each pair of sums and for the result where it has more than kMostPacks, and
// where it reads element by element.
#include <algorithm>
#include <type_traits>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/reduce.cuh"
#include "ltx/rotary_backward.h"
#include "ltx/row/gradient.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kThreads = 128;      // of a block of short rows
constexpr int kMostThreads = 512;  // of a row
constexpr int kMostPacks = 2;      // that a thread keeps

// A row of one operand. Heads of the row start at multiples of the head strides.
template <typename T, typename C>
struct Row {
  const T *grad, *input;
  T* out;
  const C *cos, *sin;
  const HeadStrides& grad_stride;
  const RotaryOperand& operand;  // its other strides, weight and eps
};

template <typename T, typename C>
__device__ __forceinline__ Row<T, C> row_at(const RotaryBackwardParams& p, int64_t row, bool across) {
  int operand = 0;
  const auto rows = [&](const RotaryOperand& o) { return p.batch * o.sequence * (across ? 1 : o.heads); };
  if (row >= rows(p.operand[0])) {
    row -= rows(p.operand[0]);
    operand = 1;
  }
  const RotaryOperand& o = p.operand[operand];
  int64_t head = 0;
  if (!across) {
    const int64_t token = row / o.heads;
    head = row - token * o.heads;
    row = token;
  }
  const int64_t batch = row / o.sequence, sequence = row - batch * o.sequence;
  const auto start = [&](const HeadStrides& s) { return batch * s.batch + sequence * s.sequence + head * s.head; };
  const HeadStrides& grad = p.grad_stride[operand];
  return {static_cast<const T*>(p.grad[operand]) + start(grad),
          static_cast<const T*>(o.input) + start(o.input_stride),
          static_cast<T*>(o.output) + start(o.output_stride),
          static_cast<const C*>(o.cos) + start(o.cos_stride),
          static_cast<const C*>(o.sin) + start(o.sin_stride),
          grad,
          o};
}

// kWhole: every access is a whole pack (the tables': one or two), and no pack holds columns on both sides of a border.
// Otherwise element by element.
template <typename T, typename C, bool kWhole>
struct Loader {
  static constexpr int kWidth = kPackWidth<T>;
  const RotaryBackwardParams& p;
  const Row<T, C>& row;
  int width;  // of the row

  // A column's place: of the head, and within it.
  __device__ __forceinline__ int64_t place(const HeadStrides& s, int column) const {
    const int head = column / static_cast<int>(p.head_dim);
    return head * s.head + (column - head * p.head_dim) * s.column;
  }
  __device__ __forceinline__ void load(const T* from, const HeadStrides& s, int column, float (&x)[kWidth]) const {
    if constexpr (kWhole) {
      unpack(load_pack<T, kWidth>(from + place(s, column), 0, 1, kWidth, true), x);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = column + i < width ? to_float(from[place(s, column + i)]) : 0.f;
    }
  }
  __device__ __forceinline__ void store(int column, const float (&x)[kWidth]) const {
    if constexpr (kWhole) {
      store_row_pack(reinterpret_cast<Pack<T, kWidth>*>(row.out + place(row.operand.output_stride, column)),
                     to_pack<T, kWidth>(x));
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i < width) row.out[place(row.operand.output_stride, column + i)] = from_float<T>(x[i]);
      }
    }
  }
  // kCount entries of a table.
  template <int kCount>
  __device__ __forceinline__ void table(const C* from, float (&x)[kCount]) const {
    load_floats_as<C, kCount>(from, 0, 0, 1, kCount, true, x);
  }

  // The gradient of a pack, which t holds, is rotated back.
  __device__ __forceinline__ void rotate(int column, float (&t)[kWidth]) const {
    const int half = static_cast<int>(p.rotary_dim / 2);
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i >= width) continue;
        const int head = (column + i) / static_cast<int>(p.head_dim);
        const int c = column + i - head * static_cast<int>(p.head_dim);
        if (c >= p.rotary_dim) continue;
        const bool first = p.interleaved ? c % 2 == 0 : c < half;
        const int partner = p.interleaved ? c ^ 1 : first ? c + half : c - half;
        const int pair = p.interleaved ? c / 2 : first ? c : partner;
        const int64_t cos =
            head * row.operand.cos_stride.head + (p.half_width_table ? pair : c) * row.operand.cos_stride.column;
        const int64_t sin =
            head * row.operand.sin_stride.head + (p.half_width_table ? pair : partner) * row.operand.sin_stride.column;
        const float other = to_float(row.grad[head * row.grad_stride.head + partner * row.grad_stride.column]);
        const float turn = __fmul_rn(other, to_float(row.sin[sin]));
        t[i] = fmaf(t[i], to_float(row.cos[cos]), first ? turn : -turn);
      }
    } else {
      const int head = column / static_cast<int>(p.head_dim);
      const int c = column - head * static_cast<int>(p.head_dim);
      if (c >= p.rotary_dim) return;
      const C* const cos = row.cos + head * row.operand.cos_stride.head;
      const C* const sin = row.sin + head * row.operand.sin_stride.head;
      float cosine[kWidth], sine[kWidth], other[kWidth];
      if (p.interleaved) {
        if (p.half_width_table) {
          float pairs[kWidth / 2];
          table(cos + c / 2, pairs);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) cosine[i] = pairs[i / 2];
          table(sin + c / 2, pairs);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sine[i] = pairs[i / 2];
        } else {
          table(cos + c, cosine);
          table(sin + c, sine);
#pragma unroll
          for (int i = 0; i < kWidth; i += 2) {  // the partner's
            const float kept = sine[i];
            sine[i] = sine[i + 1];
            sine[i + 1] = kept;
          }
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) other[i] = t[i ^ 1];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float turn = __fmul_rn(other[i], sine[i]);
          t[i] = fmaf(t[i], cosine[i], i % 2 == 0 ? turn : -turn);
        }
      } else {
        const bool first = c < half;
        const int partner = first ? c + half : c - half, pair = first ? c : partner;
        load(row.grad, row.grad_stride, column - c + partner, other);
        table(cos + (p.half_width_table ? pair : c), cosine);
        table(sin + (p.half_width_table ? pair : partner), sine);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float turn = __fmul_rn(other[i], sine[i]);
          t[i] = fmaf(t[i], cosine[i], first ? turn : -turn);
        }
      }
    }
  }
  // The gradient of a pack, which t holds, becomes t of the formula: rotated back and weighed.
  __device__ __forceinline__ void weigh(int column, float (&t)[kWidth]) const {
    rotate(column, t);
    if (row.operand.weight == nullptr) return;
    float weight[kWidth];
    load_floats<kWidth>(row.operand.weight, row.operand.weight_dtype, 0, column, row.operand.weight_stride, width,
                        kWhole, weight);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (p.weight_offset != 0.f) weight[i] = __fadd_rn(p.weight_offset, weight[i]);
      t[i] = __fmul_rn(t[i], weight[i]);
    }
  }
};

// block: x = the threads of a row, y = rows. grid: x = groups of rows, those of the key after those of the query.
// A thread has at most kPacks packs of a row and keeps them. With kPacks = 0 it has any number and keeps none.
template <typename T, typename C, bool kNorm, bool kWhole, int kPacks>
__global__ void __launch_bounds__(kMostThreads, kPacks == 1 ? 2 : 1)
    rotary_backward_kernel(const __grid_constant__ RotaryBackwardParams p, int64_t rows) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kKept = kPacks > 0;
  __shared__ ReduceScratch<2> scratch[2];
  const bool across = kNorm && p.norm == QkNorm::kAcrossHeads;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = number < rows;  // the others read row 0: every thread must reach every shuffle and barrier
  const Row<T, C> row = row_at<T, C>(p, active ? number : 0, across);
  const int width =
      static_cast<int>(across ? p.head_dim * (number < p.batch * p.operand[0].sequence || !active ? p.operand[0].heads
                                                                                                  : p.operand[1].heads)
                              : p.head_dim);
  const Loader<T, C, kWhole> load{p, row, width};
  const int threads = static_cast<int>(blockDim.x);
  float h[kKept ? kPacks : 1][kWidth], t[kKept ? kPacks : 1][kWidth];
  // body(column, i): pack i of those that the thread keeps.
  const auto each_pack = [&](const auto& body) {
    const int first = threadIdx.x * kWidth, step = threads * kWidth;
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first + i * step < width) body(first + i * step, i);
      }
    } else {
#pragma unroll 1
      for (int column = first; column < width; column += step) body(column, 0);
    }
  };
  const auto read = [&](int column, int i) {
    if constexpr (kNorm) load.load(row.input, row.operand.input_stride, column, h[i]);
    load.load(row.grad, row.grad_stride, column, t[i]);
  };
  if constexpr (kKept) each_pack(read);  // before the first of them is used
  if constexpr (kNorm) {
    const float inverse_width = 1.f / static_cast<float>(width);
    const bool layer = p.statistic == Statistic::kLayer;
    RowNorm norm;
    const auto take = [&](int column, int i) {
      if constexpr (!kKept) read(column, i);
      load.weigh(column, t[i]);
    };
    if (layer) {
      float sums[2] = {0.f, 0.f};
      each_pack([&](int column, int i) {
        take(column, i);
        sums[0] += tree_sum(h[i]);
        sums[1] += tree_sum(t[i]);
      });
      block_reduce(sums, threads, scratch[0]);
      norm.mean = sums[0] * inverse_width;
      norm.mean_t = sums[1] * inverse_width;
    }
    float sums[2] = {0.f, 0.f};
    each_pack([&](int column, int i) {
      if (!kKept || !layer) take(column, i);
      if (layer) norm.centre<Statistic::kLayer>(h[i], t[i]);
      sums[0] += pack_squares<false>(h[i], 0.f, width - column);
      sums[1] += pack_product(t[i], h[i], width - column);
    });
    block_reduce(sums, threads, scratch[1]);
    norm.set(sums[0], sums[1], inverse_width, row.operand.eps);
    if (!active) return;
    each_pack([&](int column, int i) {
      if constexpr (!kKept) {
        take(column, i);
        if (layer) norm.centre<Statistic::kLayer>(h[i], t[i]);
      }
      norm.apply(h[i], t[i]);
      load.store(column, t[i]);
    });
  } else {
    if (!active) return;
    each_pack([&](int column, int i) {
      if constexpr (!kKept) read(column, i);
      load.rotate(column, t[i]);
      load.store(column, t[i]);
    });
  }
}

// Whether every access may be a whole pack.
template <typename T, typename C>
bool takes_whole_packs(const RotaryBackwardParams& p) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t border = p.interleaved ? p.rotary_dim : p.rotary_dim / 2;
  if (p.head_dim % kWidth != 0 || border % kWidth != 0) return false;
  // A table is read as many entries at a time as a pack has columns, or pairs.
  const int entries = p.interleaved && p.half_width_table ? kWidth / 2 : kWidth;
  const int columns = p.half_width_table ? p.rotary_dim / 2 : p.rotary_dim;
  for (int i = 0; i < p.operands; ++i) {
    const RotaryOperand& o = p.operand[i];
    const auto rows = [&](const void* data, const HeadStrides& s) {
      return is_packed_head(data, DTypeOf<T>::value, kWidth, p.head_dim, s);
    };
    const auto table = [&](const void* data, const HeadStrides& s) {
      return is_packed_head(data, DTypeOf<C>::value, entries, columns, s);
    };
    if (!rows(p.grad[i], p.grad_stride[i]) || !rows(o.output, o.output_stride)) return false;
    if (p.norm != QkNorm::kNone && !rows(o.input, o.input_stride)) return false;
    if (!table(o.cos, o.cos_stride) || !table(o.sin, o.sin_stride)) return false;
    const int64_t weights = p.head_dim * (p.norm == QkNorm::kAcrossHeads ? o.heads : 1);
    if (o.weight && !is_packed(o.weight, o.weight_dtype, kWidth, weights, o.weight_stride, nullptr, 0)) return false;
  }
  return true;
}

template <typename T, typename C>
void launch(const RotaryBackwardParams& p, const Context& context) {
  const bool across = p.norm == QkNorm::kAcrossHeads;
  int64_t rows = 0, width = p.head_dim;
  for (int i = 0; i < p.operands; ++i) {
    rows += p.batch * p.operand[i].sequence * (across ? 1 : p.operand[i].heads);
    if (across) width = std::max(width, p.head_dim * p.operand[i].heads);
  }
  // Query and key have as many threads a row.
  const int64_t packs = ceil_div(width, kPackWidth<T>);
  const int threads = packs <= 32 ? next_power_of_two(packs)
                                  : static_cast<int>(std::min<int64_t>(ceil_div(packs, 32) * 32, kMostThreads));
  const dim3 block(static_cast<unsigned>(threads), threads > 32 ? 1u : static_cast<unsigned>(kThreads / threads));
  const unsigned grid = grid_size(ceil_div(rows, block.y));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const bool whole = takes_packed("rotary", forced().rotary, takes_whole_packs<T, C>(p));
  const auto run = [&](auto norm, auto packs) {
    constexpr bool kNorm = decltype(norm)::value;
    const auto kernel = whole ? rotary_backward_kernel<T, C, kNorm, true, decltype(packs)::value>
                              : rotary_backward_kernel<T, C, kNorm, false, 0>;
    kernel<<<grid, block, 0, stream>>>(p, rows);
  };
  using One = std::integral_constant<int, 1>;
  using Any = std::integral_constant<int, 0>;
  if (p.norm == QkNorm::kNone) {
    packs <= threads ? run(std::false_type{}, One{}) : run(std::false_type{}, Any{});
  } else if (packs <= threads) {
    run(std::true_type{}, One{});
  } else if (packs <= kMostPacks * threads) {
    run(std::true_type{}, std::integral_constant<int, kMostPacks>{});
  } else {
    run(std::true_type{}, Any{});
  }
  check_launch("rotary_backward");
}

}  // namespace

void rotary_backward(const RotaryBackwardParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.table_dtype == DType::kFloat32 ? launch<T, float>(p, context) : launch<T, T>(p, context);
  });
}

}  // namespace ltx
