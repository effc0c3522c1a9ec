// The gradients of apply_rotary, apply_rotary_qk and qk_norm_rope, of query and key: the rotation backwards, the
// weight, and the gradient of the norm, in one launch for both. ltx/rotary_backward.h has the formula.
//
// A row is a head, or with a norm across heads a token. Its threads own packs of 16 bytes, as in the norm kernels. The
// partner of an element is in its own pack, or in the half layout in the pack half a head away. The same threads turn
// the rows of one place, of query and key and of every batch, one after the other: mostly they share cos and sin.
// A thread keeps its packs of a row. It reads them again for each pair of sums and for the result where it has more
// than kMostPacks, and where it reads element by element.
#include <algorithm>
#include <stdexcept>
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
__device__ __forceinline__ Row<T, C> row_at(const RotaryBackwardParams& p, int operand, int64_t batch,
                                            uint32_t sequence, uint32_t head) {
  const RotaryOperand& o = p.operand[operand];
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

// A column of a row: its head, and in that head itself, its partner, and the entry of its pair in a half-width table.
struct Place {
  int head, column, partner, pair;
  bool first;  // of the pair
};

__device__ __forceinline__ Place place_of(const RotaryBackwardParams& p, int column) {
  const int head_dim = static_cast<int>(p.head_dim), half = static_cast<int>(p.rotary_dim / 2);
  Place place;
  place.head = column / head_dim;
  place.column = column - place.head * head_dim;
  place.first = p.interleaved ? place.column % 2 == 0 : place.column < half;
  place.partner = p.interleaved ? place.column ^ 1 : place.column + (place.first ? half : -half);
  place.pair = p.interleaved ? place.column / 2 : min(place.column, place.partner);
  return place;
}

// cos of a pack's columns, and sin of their partners with the sign that it has in their sums.
template <int kWidth>
struct Turn {
  float cos[kWidth], sin[kWidth];
};

// kWhole: every access is a whole pack (the tables': one or two), and no pack holds columns on both sides of a border.
// Otherwise element by element.
template <typename T, typename C, bool kWhole>
struct Loader {
  static constexpr int kWidth = kPackWidth<T>;
  const RotaryBackwardParams& p;
  const Row<T, C>& row;
  int width;  // of the row

  __device__ __forceinline__ static int64_t offset(const HeadStrides& s, int head, int column) {
    return head * s.head + (kWhole ? column : column * s.column);
  }
  __device__ __forceinline__ int64_t offset(const HeadStrides& s, int column) const {
    const Place place = place_of(p, column);
    return offset(s, place.head, place.column);
  }
  __device__ __forceinline__ void load(const T* from, const HeadStrides& s, int column, float (&x)[kWidth]) const {
    if constexpr (kWhole) {
      unpack(load_pack<T, kWidth>(from + offset(s, column), 0, 1, kWidth, true), x);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = column + i < width ? to_float(from[offset(s, column + i)]) : 0.f;
    }
  }
  __device__ __forceinline__ void store(int column, const float (&x)[kWidth]) const {
    if constexpr (kWhole) {
      store_row_pack(reinterpret_cast<Pack<T, kWidth>*>(row.out + offset(row.operand.output_stride, column)),
                     to_pack<T, kWidth>(x));
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i < width) row.out[offset(row.operand.output_stride, column + i)] = from_float<T>(x[i]);
      }
    }
  }
  // kCount entries of a table.
  template <int kCount>
  __device__ __forceinline__ void entries(const C* from, float (&x)[kCount]) const {
    load_floats_as<C, kCount>(from, 0, 0, 1, kCount, true, x);
  }

  __device__ __forceinline__ void turn_of(int column, Turn<kWidth>& turn) const {
    const HeadStrides &cos_stride = row.operand.cos_stride, &sin_stride = row.operand.sin_stride;
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Place at = place_of(p, column + i);
        if (column + i >= width || at.column >= p.rotary_dim) continue;
        const auto entry = [&](int own) { return p.half_width_table ? at.pair : own; };
        turn.cos[i] = to_float(row.cos[offset(cos_stride, at.head, entry(at.column))]);
        const float sin = to_float(row.sin[offset(sin_stride, at.head, entry(at.partner))]);
        turn.sin[i] = at.first ? sin : -sin;
      }
      return;
    }
    const Place at = place_of(p, column);
    if (at.column >= p.rotary_dim) return;
    const C* const cos = row.cos + at.head * cos_stride.head;
    const C* const sin = row.sin + at.head * sin_stride.head;
    if (!p.interleaved) {
      entries(cos + (p.half_width_table ? at.pair : at.column), turn.cos);
      entries(sin + (p.half_width_table ? at.pair : at.partner), turn.sin);
      if (at.first) return;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn.sin[i] = -turn.sin[i];
    } else if (p.half_width_table) {
      float pairs[kWidth / 2];
      entries(cos + at.pair, pairs);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn.cos[i] = pairs[i / 2];
      entries(sin + at.pair, pairs);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn.sin[i] = i % 2 == 0 ? pairs[i / 2] : -pairs[i / 2];
    } else {
      float own[kWidth];
      entries(cos + at.column, turn.cos);
      entries(sin + at.column, own);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn.sin[i] = i % 2 == 0 ? own[i + 1] : -own[i - 1];
    }
  }

  // The gradient of a pack, which t holds, is rotated back.
  __device__ __forceinline__ void rotate(int column, const Turn<kWidth>& turn, float (&t)[kWidth]) const {
    float other[kWidth];
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const Place at = place_of(p, column + i);
        if (column + i >= width || at.column >= p.rotary_dim) continue;
        const float partner = to_float(row.grad[offset(row.grad_stride, at.head, at.partner)]);
        t[i] = fmaf(t[i], turn.cos[i], __fmul_rn(partner, turn.sin[i]));
      }
      return;
    }
    const Place at = place_of(p, column);
    if (at.column >= p.rotary_dim) return;
    if (p.interleaved) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) other[i] = t[i ^ 1];
    } else {
      load(row.grad, row.grad_stride, column - at.column + at.partner, other);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) t[i] = fmaf(t[i], turn.cos[i], __fmul_rn(other[i], turn.sin[i]));
  }
  __device__ __forceinline__ void weigh(int column, float (&t)[kWidth]) const {
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

// block: x = the threads of a row, y = places. grid: x = groups of places, `heads` of which a position has.
// A thread has at most kPacks packs of a row and keeps them. With kPacks = 0 it has any number and keeps none.
// one_table: all rows of a place have the same cos and sin, which a thread of one pack keeps.
template <typename T, typename C, bool kNorm, bool kWhole, int kPacks>
__global__ void __launch_bounds__(kPacks == 1 ? 768 : kMostThreads, 1)
    rotary_backward_kernel(const __grid_constant__ RotaryBackwardParams p, uint32_t heads, bool one_table) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kKept = kPacks > 0;
  __shared__ ReduceScratch<2> scratch[2];
  const bool across = kNorm && p.norm == QkNorm::kAcrossHeads;
  const uint32_t number = blockIdx.x * blockDim.y + threadIdx.y;
  const uint32_t sequence = number / heads, head = number - sequence * heads;
  const int threads = static_cast<int>(blockDim.x);
  int use = 0;  // Two sums in a row use different places, so that one barrier a sum is enough.
  const auto row_sum = [&](float (&sums)[2]) { block_reduce(sums, threads, scratch[use ^= 1]); };
  Turn<kWidth> turn;
  bool known = false;

  const auto turn_row = [&](int operand, int64_t batch) {
    const int64_t row_heads = p.operand[operand].heads;
    // The threads without a row read the first: each must reach every shuffle and barrier.
    const bool active = sequence < p.operand[operand].sequence && (across || head < row_heads);
    const Row<T, C> row = row_at<T, C>(p, operand, batch, active ? sequence : 0, active ? head : 0);
    const int width = static_cast<int>(across ? p.head_dim * row_heads : p.head_dim);
    const Loader<T, C, kWhole> load{p, row, width};
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
    // t becomes that of the formula.
    const auto take = [&](int column, int i) {
      if constexpr (!kKept) read(column, i);
      if (kPacks != 1 || !known) load.turn_of(column, turn);
      load.rotate(column, turn, t[i]);
      if constexpr (kNorm) load.weigh(column, t[i]);
    };
    if constexpr (kKept) each_pack(read);  // before the first of them is used
    if constexpr (kNorm) {
      const float inverse_width = 1.f / static_cast<float>(width);
      const bool layer = p.statistic == Statistic::kLayer;
      RowNorm norm;
      if (layer) {
        float sums[2] = {0.f, 0.f};
        each_pack([&](int column, int i) {
          take(column, i);
          sums[0] += tree_sum(h[i]);
          sums[1] += tree_sum(t[i]);
        });
        row_sum(sums);
        norm.mean = sums[0] * inverse_width;
        norm.mean_t = sums[1] * inverse_width;
      }
      float sums[2] = {0.f, 0.f};
      each_pack([&](int column, int i) {
        if (!kKept || !layer) take(column, i);
        if (layer) norm.centre<Statistic::kLayer>(h[i], t[i]);
        const int count = kWhole ? kWidth : width - column;
        sums[0] += pack_squares<false>(h[i], 0.f, count);
        sums[1] += pack_product(t[i], h[i], count);
      });
      row_sum(sums);
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
        take(column, i);
        load.store(column, t[i]);
      });
    }
    known = one_table;
  };
#pragma unroll 1
  for (int operand = 0; operand < p.operands; ++operand) {
#pragma unroll 1
    for (int64_t batch = 0; batch < p.batch; ++batch) turn_row(operand, batch);
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

bool share_table(const RotaryBackwardParams& p) {
  const RotaryOperand &q = p.operand[0], &k = p.operand[p.operands - 1];
  const auto same = [](const HeadStrides& a, const HeadStrides& b) {
    return a.sequence == b.sequence && a.head == b.head && a.column == b.column;
  };
  const auto moves = [&](const HeadStrides& s) { return p.batch > 1 && s.batch != 0; };
  return q.cos == k.cos && q.sin == k.sin && same(q.cos_stride, k.cos_stride) && same(q.sin_stride, k.sin_stride) &&
         !moves(q.cos_stride) && !moves(q.sin_stride) && !moves(k.cos_stride) && !moves(k.sin_stride);
}

template <typename T, typename C>
void launch(const RotaryBackwardParams& p, const Context& context) {
  const bool across = p.norm == QkNorm::kAcrossHeads;
  int64_t heads = 1, sequence = 0, width = p.head_dim;
  for (int i = 0; i < p.operands; ++i) {
    sequence = std::max(sequence, p.operand[i].sequence);
    if (across) width = std::max(width, p.head_dim * p.operand[i].heads);
    if (!across) heads = std::max(heads, p.operand[i].heads);
  }
  if (sequence > INT32_MAX / heads) throw std::runtime_error("query, key: expected at most 2^31 - 1 heads in a batch");
  // Query and key have as many threads a row.
  const int64_t packs = ceil_div(width, kPackWidth<T>);
  const int threads = packs <= 32 ? next_power_of_two(packs)
                                  : static_cast<int>(std::min<int64_t>(ceil_div(packs, 32) * 32, kMostThreads));
  const dim3 block(static_cast<unsigned>(threads), threads > 32 ? 1u : static_cast<unsigned>(kThreads / threads));
  const unsigned grid = grid_size(ceil_div(sequence * heads, block.y));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const bool whole = takes_packed("rotary", forced().rotary, takes_whole_packs<T, C>(p));
  const auto run = [&](auto norm, auto packs) {
    constexpr bool kNorm = decltype(norm)::value;
    const auto kernel = whole ? rotary_backward_kernel<T, C, kNorm, true, decltype(packs)::value>
                              : rotary_backward_kernel<T, C, kNorm, false, 0>;
    kernel<<<grid, block, 0, stream>>>(p, static_cast<uint32_t>(heads), share_table(p));
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
