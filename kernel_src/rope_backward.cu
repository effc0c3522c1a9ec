// The gradients of apply_rotary, apply_rotary_qk and qk_norm_rope, of query and key: the rotation backwards, the
// weight, and the gradient of the norm, in one launch for both. ltx/rotary_backward.h has the formula.
//
// A row is a head, or with a norm across heads a token. Its threads own packs of 16 bytes, as in the norm kernels. The
// partner of an element is in its own pack, or in the half layout in the pack half a head away. The same threads take
// the rows of one place in the sequence one after the other: the query's of every batch, then the key's. A thread of
// one pack reads cos and sin once where all these rows share them. A thread keeps its packs of a row. It reads them
// again for each pair of sums and for the result where it has more than kMostPacks, and where it reads element by
// element.
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

constexpr int kThreads = 128;      // of a block of rows of at most a warp
constexpr int kMostThreads = 512;  // of a row
constexpr int kMostPacks = 2;      // that a thread keeps
constexpr int kOnePack = 256;      // most threads of a row where each keeps one pack

// A column of a row: its head, and in that head itself, its partner, and the entry of its pair in a half-width table.
struct Place {
  uint32_t head, column, partner, pair;
  bool first;  // of the pair
};

__device__ __forceinline__ Place place_of(const RotaryBackwardParams& p, uint32_t column) {
  const uint32_t head_dim = static_cast<uint32_t>(p.head_dim), half = static_cast<uint32_t>(p.rotary_dim) / 2;
  Place place;
  place.head = column / head_dim;
  place.column = column - place.head * head_dim;
  place.first = p.interleaved ? place.column % 2 == 0 : place.column < half;
  place.partner = p.interleaved ? place.column ^ 1 : place.first ? place.column + half : place.column - half;
  place.pair = p.interleaved ? place.column / 2 : min(place.column, place.partner);
  return place;
}

// cos of a pack's columns, and sin of their partners with the sign that it has in their sums.
template <int kWidth>
struct Turn {
  float cos[kWidth], sin[kWidth];
};

// A row of one operand, from its first head on. kWhole: every access is a whole pack (the tables': one or two), no pack
// holds columns on both sides of a border, and strides have 32 bits. Otherwise element by element.
template <typename T, typename C, bool kWhole>
struct Row {
  static constexpr int kWidth = kPackWidth<T>;
  using Stride = std::conditional_t<kWhole, uint32_t, int64_t>;
  const RotaryBackwardParams& p;
  const RotaryOperand& operand;
  const T* grad;
  const HeadStrides& grad_stride;
  uint32_t batch, sequence, head;
  int width;

  __device__ __forceinline__ int64_t offset(const HeadStrides& s, const Place& at, uint32_t column) const {
    const auto steps = [](uint32_t count, int64_t stride) {
      return static_cast<int64_t>(count) * static_cast<Stride>(stride);
    };
    return steps(batch, s.batch) + steps(sequence, s.sequence) + steps(head + at.head, s.head) +
           (kWhole ? column : steps(column, s.column));
  }
  // body(i, its place), for the elements of the pack at `column` that are in the row.
  template <typename Body>
  __device__ __forceinline__ void each_element(int column, const Body& body) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i < width) body(i, place_of(p, column + i));
    }
  }
  // The pack at `column`, whose place is `at`; from_column: the first to read in that head.
  __device__ __forceinline__ void load(const void* from, const HeadStrides& s, int column, const Place& at,
                                       uint32_t from_column, float (&x)[kWidth]) const {
    const T* const data = static_cast<const T*>(from);
    if constexpr (kWhole) {
      unpack(load_pack<T, kWidth>(data + offset(s, at, from_column), 0, 1, kWidth, true), x);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = 0.f;
      each_element(column, [&](int i, const Place& own) { x[i] = to_float(data[offset(s, own, own.column)]); });
    }
  }
  __device__ __forceinline__ void store(int column, const Place& at, const float (&x)[kWidth]) const {
    T* const out = static_cast<T*>(operand.output);
    const HeadStrides& s = operand.output_stride;
    if constexpr (kWhole) {
      store_row_pack(reinterpret_cast<Pack<T, kWidth>*>(out + offset(s, at, at.column)), to_pack<T, kWidth>(x));
    } else {
      each_element(column, [&](int i, const Place& own) { out[offset(s, own, own.column)] = from_float<T>(x[i]); });
    }
  }
  // kCount entries of a table.
  template <int kCount>
  __device__ __forceinline__ void entries(const void* table, const HeadStrides& s, const Place& at, uint32_t column,
                                          float (&x)[kCount]) const {
    load_floats_as<C, kCount>(table, offset(s, at, column), 0, 1, kCount, true, x);
  }

  __device__ __forceinline__ void turn_of(int column, const Place& at, Turn<kWidth>& turn) const {
    const HeadStrides &cos_stride = operand.cos_stride, &sin_stride = operand.sin_stride;
    if constexpr (!kWhole) {
      each_element(column, [&](int i, const Place& own) {
        if (own.column >= p.rotary_dim) return;
        const auto entry = [&](const void* table, const HeadStrides& s, uint32_t full) {
          return to_float(static_cast<const C*>(table)[offset(s, own, p.half_width_table ? own.pair : full)]);
        };
        turn.cos[i] = entry(operand.cos, cos_stride, own.column);
        const float sin = entry(operand.sin, sin_stride, own.partner);
        turn.sin[i] = own.first ? sin : -sin;
      });
      return;
    }
    if (at.column >= static_cast<uint32_t>(p.rotary_dim)) return;
    if (!p.interleaved) {
      entries(operand.cos, cos_stride, at, p.half_width_table ? at.pair : at.column, turn.cos);
      entries(operand.sin, sin_stride, at, p.half_width_table ? at.pair : at.partner, turn.sin);
      if (at.first) return;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn.sin[i] = -turn.sin[i];
    } else if (p.half_width_table) {
      float cos[kWidth / 2], sin[kWidth / 2];
      entries(operand.cos, cos_stride, at, at.pair, cos);
      entries(operand.sin, sin_stride, at, at.pair, sin);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        turn.cos[i] = cos[i / 2];
        turn.sin[i] = i % 2 == 0 ? sin[i / 2] : -sin[i / 2];
      }
    } else {
      float sin[kWidth];
      entries(operand.cos, cos_stride, at, at.column, turn.cos);
      entries(operand.sin, sin_stride, at, at.column, sin);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn.sin[i] = i % 2 == 0 ? sin[i + 1] : -sin[i - 1];
    }
  }

  // The gradient of a pack, which t holds, is rotated back.
  __device__ __forceinline__ void rotate(int column, const Place& at, const Turn<kWidth>& turn,
                                         float (&t)[kWidth]) const {
    if constexpr (!kWhole) {
      each_element(column, [&](int i, const Place& own) {
        if (own.column >= p.rotary_dim) return;
        const float other = to_float(grad[offset(grad_stride, own, own.partner)]);
        t[i] = fmaf(t[i], turn.cos[i], __fmul_rn(other, turn.sin[i]));
      });
      return;
    }
    if (at.column >= static_cast<uint32_t>(p.rotary_dim)) return;
    float other[kWidth];
    if (p.interleaved) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) other[i] = t[i ^ 1];
    } else {
      load(grad, grad_stride, column, at, at.partner, other);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) t[i] = fmaf(t[i], turn.cos[i], __fmul_rn(other[i], turn.sin[i]));
  }
  __device__ __forceinline__ void weigh(int column, float (&t)[kWidth]) const {
    if (operand.weight == nullptr) return;
    float weight[kWidth];
    load_floats<kWidth>(operand.weight, operand.weight_dtype, 0, column, operand.weight_stride, width, kWhole, weight);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (p.weight_offset != 0.f) weight[i] = __fadd_rn(p.weight_offset, weight[i]);
      t[i] = __fmul_rn(t[i], weight[i]);
    }
  }
};

// block: x = the threads of a row, y = the rows of one operand and batch that it turns at once. grid: x = such blocks.
// A position of the sequence has `heads` rows of an operand and batch; an operand of fewer heads leaves some out.
// A thread has at most kPacks packs of a row and keeps them. With kPacks = 0 it has any number and keeps none.
// one_table: cos and sin are the same in query, key and every batch.
template <typename T, typename C, bool kNorm, bool kWhole, int kPacks>
__global__ void __launch_bounds__(kPacks == 1 ? kOnePack : kMostThreads, kPacks == 1 ? 3 : 1)
    rotary_backward_kernel(const __grid_constant__ RotaryBackwardParams p, uint32_t heads, bool one_table) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kKept = kPacks > 0;
  __shared__ ReduceScratch<2> scratch[2];
  const bool across = kNorm && p.norm == QkNorm::kAcrossHeads;
  const uint32_t number = blockIdx.x * blockDim.y + threadIdx.y;
  const uint32_t sequence = number / heads, head = number - sequence * heads;
  const int threads = static_cast<int>(blockDim.x), first = threadIdx.x * kWidth, step = threads * kWidth;
  int use = 0;  // Two sums in a row use different places, so that one barrier a sum is enough.
  const auto row_sum = [&](float (&sums)[2]) { block_reduce(sums, threads, scratch[use ^= 1]); };
  Place kept[kKept ? kPacks : 1];
  if constexpr (kKept) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) kept[i] = place_of(p, first + i * step);
  }
  Turn<kWidth> turn;
  bool known = false;

  const auto turn_row = [&](int o, uint32_t batch) {
    const RotaryOperand& operand = p.operand[o];
    const bool active = sequence < operand.sequence && (across || head < operand.heads);
    if (!__any_sync(0xffffffffu, active)) return;  // rows of more than a warp: the whole block
    // Other threads without a row read the first: each must reach every shuffle.
    const int width = static_cast<int>(across ? p.head_dim * operand.heads : p.head_dim);
    const Row<T, C, kWhole> row{p,
                                operand,
                                static_cast<const T*>(p.grad[o]),
                                p.grad_stride[o],
                                batch,
                                active ? sequence : 0,
                                active ? head : 0,
                                width};
    float h[kKept ? kPacks : 1][kWidth], t[kKept ? kPacks : 1][kWidth];
    // body(column, its place, i): pack i of those that the thread keeps.
    const auto each_pack = [&](const auto& body) {
      if constexpr (kKept) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (first + i * step < width) body(first + i * step, kept[i], i);
        }
      } else {
#pragma unroll 1
        for (int column = first; column < width; column += step) body(column, place_of(p, column), 0);
      }
    };
    const auto read = [&](int column, const Place& at, int i) {
      if constexpr (kNorm) row.load(operand.input, operand.input_stride, column, at, at.column, h[i]);
      row.load(row.grad, row.grad_stride, column, at, at.column, t[i]);
    };
    // The gradient of a pack is rotated back and weighed, which gives t of the formula.
    const auto take = [&](int column, const Place& at, int i) {
      if constexpr (!kKept) read(column, at, i);
      if (kPacks != 1 || !known) row.turn_of(column, at, turn);
      known = one_table && active;
      row.rotate(column, at, turn, t[i]);
      if constexpr (kNorm) row.weigh(column, t[i]);
    };
    if constexpr (kKept) each_pack(read);  // before the first of them is used
    if constexpr (kNorm) {
      const float inverse_width = 1.f / static_cast<float>(width);
      const bool layer = p.statistic == Statistic::kLayer;
      RowNorm norm;
      if (layer) {
        float sums[2] = {0.f, 0.f};
        each_pack([&](int column, const Place& at, int i) {
          take(column, at, i);
          sums[0] += tree_sum(h[i]);
          sums[1] += tree_sum(t[i]);
        });
        row_sum(sums);
        norm.mean = sums[0] * inverse_width;
        norm.mean_t = sums[1] * inverse_width;
      }
      float sums[2] = {0.f, 0.f};
      each_pack([&](int column, const Place& at, int i) {
        if (!kKept || !layer) take(column, at, i);
        if (layer) norm.centre<Statistic::kLayer>(h[i], t[i]);
        const int count = kWhole ? kWidth : width - column;
        sums[0] += pack_squares<false>(h[i], 0.f, count);
        sums[1] += pack_product(t[i], h[i], count);
      });
      row_sum(sums);
      norm.set(sums[0], sums[1], inverse_width, operand.eps);
      if (!active) return;
      each_pack([&](int column, const Place& at, int i) {
        if constexpr (!kKept) {
          take(column, at, i);
          if (layer) norm.centre<Statistic::kLayer>(h[i], t[i]);
        }
        norm.apply(h[i], t[i]);
        row.store(column, at, t[i]);
      });
    } else {
      if (!active) return;
      each_pack([&](int column, const Place& at, int i) {
        take(column, at, i);
        row.store(column, at, t[i]);
      });
    }
  };
#pragma unroll 1
  for (int operand = 0; operand < p.operands; ++operand) {
#pragma unroll 1
    for (uint32_t batch = 0; batch < static_cast<uint32_t>(p.batch); ++batch) turn_row(operand, batch);
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
    const auto narrow = [](const HeadStrides& s) { return std::max({s.batch, s.sequence, s.head}) <= UINT32_MAX; };
    const auto rows = [&](const void* data, const HeadStrides& s) {
      return is_packed_head(data, DTypeOf<T>::value, kWidth, p.head_dim, s) && narrow(s);
    };
    const auto table = [&](const void* data, const HeadStrides& s) {
      return is_packed_head(data, DTypeOf<C>::value, entries, columns, s) && narrow(s);
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
    return a.batch == b.batch && a.sequence == b.sequence && a.head == b.head && a.column == b.column;
  };
  const auto moves = [&](const HeadStrides& s) { return p.batch > 1 && s.batch != 0; };
  return q.cos == k.cos && q.sin == k.sin && same(q.cos_stride, k.cos_stride) && same(q.sin_stride, k.sin_stride) &&
         !moves(q.cos_stride) && !moves(q.sin_stride);
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
  const int64_t packs = ceil_div(width, kPackWidth<T>), kept = packs <= kOnePack ? 1 : kMostPacks;
  const int threads = packs <= 32 ? next_power_of_two(packs)
                                  : static_cast<int>(std::min<int64_t>(ceil_div(packs, 32 * kept) * 32, kMostThreads));
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
  if (packs <= threads) {
    p.norm == QkNorm::kNone ? run(std::false_type{}, One{}) : run(std::true_type{}, One{});
  } else if (p.norm == QkNorm::kNone) {
    run(std::false_type{}, Any{});
  } else if (packs <= kept * threads) {
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
