// The gradients of the norm family, of its inputs alone: one launch, in which a row is read once and written once.
//
//   d = norm'(grad * factor + grad2 * factor2; h) + grad_residual         dx = d * gate, or norm'(d * gate * weight; x)
//
// ltx/params.h (NormBackwardParams) has the formula. The mean and the root mean square are computed again from h: their
// sums take the same reduction as those of the gradient, so that nothing but h has to be kept for the backward.
//
// norm_backward_kernel takes whole packs, and shares a row among threads as norm_kernel does (ltx/row/geometry.cuh).
// norm_backward_general takes everything else: strides, misaligned views, mixed dtypes, long rows, an index. It walks
// the row once for each pair of sums and once for the results, in the same order, and gives the same bits.
#include <array>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/row/geometry.cuh"
#include "ltx/row/gradient.cuh"
#include "ltx/row/operands.cuh"
#include "ltx/row/vectors.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// Bounds the registers, as the threads that a multiprocessor shall hold.
constexpr int register_threads(Fusion f, int packs) {
  if (packs > 2) return traits(f).norms_branch || traits(f).modulates_twice ? 256 : 384;
  return traits(f).norms_branch ? 512 : 640;
}

// Of the bytes between a row and the one that its block prefetches, for each multiprocessor: as norm_kernel's.
constexpr int64_t kAheadBytes = 24 << 10;

struct CompactBackwardParams {
  CompactParams rows;  // input: h; out: d; residual_out: dx
  CompactView grad, grad2, grad_residual, branch;
};

// The vectors that are loaded while the row is on its way.
constexpr uint32_t loaded_ahead(Fusion f, int packs, uint32_t known, bool wide) {
  if (wide) return 0;
  constexpr uint32_t kFirst = kWeight | kScale | kScale2;
  return (packs > 2 ? kFirst : kFirst | kScaleTable | kGate) & (known ? known : kWeight | kScale);
}

// block: x = the threads of a row, y = rows. grid: x = groups of the inner dimension, y = the outer dimension. kKnown:
// the vectors of the call, where they are known at compile time.
template <typename T, typename M, Statistic S, Fusion F, int kPacks, uint32_t kKnown>
__global__ void __launch_bounds__(register_threads(F, kPacks), 1)
    norm_backward_kernel(const __grid_constant__ CompactBackwardParams q) {
  constexpr int kWidth = kPackWidth<T>, kStep = 32 * kWidth;
  constexpr bool kNorm = S != Statistic::kNone, kLayer = S == Statistic::kLayer, kBranch = traits(F).norms_branch;
  constexpr bool kPair = traits(F).modulates_twice;
  constexpr uint32_t kAhead = loaded_ahead(F, kPacks, kKnown, sizeof(M) > sizeof(T));
  using P = Pack<T, kWidth>;
  __shared__ ReduceScratch<2> scratch[3];
  const CompactParams& p = q.rows;
  const int threads = static_cast<int>(blockDim.x);
  // Rows past the last read row 0 and write nothing: every thread must reach every shuffle and barrier.
  uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool active = row < p.rows;
  if (!active) row = 0;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = (kPacks > 1 ? warp * 32 * kPacks + lane : static_cast<int>(threadIdx.x)) * kWidth;
  bool inside[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) inside[k] = first + k * kStep < p.width;
  const bool adds = kNorm && q.grad_residual.data != nullptr;
  if (kPacks > 1 && threadIdx.x == 0 && p.ahead != 0 && row + p.ahead < p.rows) {
    const uint32_t bytes = p.width * static_cast<uint32_t>(sizeof(T));
    prefetch(row_of<false>(q.grad, row + p.ahead), bytes);
    if constexpr (kNorm) prefetch(row_of<false>(p.input, row + p.ahead), bytes);
    if constexpr (kPair) prefetch(row_of<false>(q.grad2, row + p.ahead), bytes);
    if constexpr (kBranch) prefetch(row_of<false>(q.branch, row + p.ahead), bytes);
    if (adds) prefetch(row_of<false>(q.grad_residual, row + p.ahead), bytes);
  }
  P grad[kPacks], grad2[kPacks], h[kPacks], addend[kPacks], branch[kPacks];
  const auto load = [&](const CompactView& view, P(&packs)[kPacks]) {
    const T* const from = reinterpret_cast<const T*>(row_of<false>(view, row)) + first;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      packs[k] = P{};
      if (inside[k]) packs[k] = *reinterpret_cast<const P*>(from + k * kStep);
    }
  };
  const auto store = [&](const CompactView& view, int k, const float (&x)[kWidth]) {
    if (!active || !inside[k]) return;
    T* const to = reinterpret_cast<T*>(row_of<false>(view, row)) + first;
    store_row_pack(reinterpret_cast<P*>(to + k * kStep), to_pack<T, kWidth>(x));
  };
  load(q.grad, grad);
  if constexpr (kNorm) load(p.input, h);
  if constexpr (kPair) load(q.grad2, grad2);
  if constexpr (kBranch) load(q.branch, branch);
  if (adds) load(q.grad_residual, addend);
  Vectors<T, M, S, F, kKnown, kPacks, kAhead> vectors(p, row, first, kStep);
  vectors.load_ahead(inside);

  float t[kPacks][kWidth];
  RowNorm norm;
  if constexpr (kNorm) {
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      unpack(grad[k], t[k]);
      if (!inside[k]) continue;
      float factor[kWidth], unused[kWidth], x[kWidth];
      vectors.k = k;
      get_factors<S, F>(vectors, p.weight_offset, factor, unused);
      multiply(factor, t[k]);
      if constexpr (kPair) {
        unpack(grad2[k], x);
        get_factors<S, F, true>(vectors, p.weight_offset, factor, unused);
        add_product(x, factor, t[k]);
      }
      unpack(h[k], x);
      sums[0] += kLayer ? tree_sum(x) : pack_squares<false>(x, 0.f, kWidth);
      sums[1] += kLayer ? tree_sum(t[k]) : pack_product(t[k], x, kWidth);
    }
    block_reduce(sums, threads, scratch[0]);
    if constexpr (kLayer) {
      norm.mean = sums[0] * p.inverse_width;
      norm.mean_t = sums[1] * p.inverse_width;
      sums[0] = sums[1] = 0.f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!inside[k]) continue;
        float x[kWidth];
        unpack(h[k], x);
        norm.centre<S>(x, t[k]);
        sums[0] += pack_squares<false>(x, 0.f, kWidth);
        sums[1] += pack_product(t[k], x, kWidth);
      }
      block_reduce(sums, threads, scratch[1]);
    }
    norm.set(sums[0], sums[1], p.inverse_width, p.eps);
  }
  RowNorm branch_norm;
  float branch_sums[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!inside[k]) continue;
    float x[kWidth];
    vectors.k = k;
    if constexpr (kNorm) {
      unpack(h[k], x);
      if constexpr (kLayer) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[i] = __fsub_rn(x[i], norm.mean);
      }
      if (adds) {
        float more[kWidth];
        unpack(addend[k], more);
        norm.apply(x, more, t[k]);
      } else {
        norm.apply(x, t[k]);
      }
      store(p.out, k, t[k]);
    } else {
      unpack(grad[k], t[k]);
    }
    if (kBranch || vectors.template has<kGate>()) {
      get_gate(vectors, x);
      if constexpr (kBranch) weigh_gate(vectors, p.weight_offset, x);
      multiply(x, t[k]);
      if constexpr (kBranch) {
        unpack(branch[k], x);
        branch_sums[0] += pack_squares<false>(x, 0.f, kWidth);
        branch_sums[1] += pack_product(t[k], x, kWidth);
      } else {
        store(p.residual_out, k, t[k]);
      }
    }
  }
  if constexpr (kBranch) {
    block_reduce(branch_sums, threads, scratch[2]);
    branch_norm.set(branch_sums[0], branch_sums[1], p.inverse_width, p.branch_eps);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float x[kWidth];
      unpack(branch[k], x);
      branch_norm.apply(x, t[k]);
      store(p.residual_out, k, t[k]);
    }
  }
}

// ---- Any strides, alignment, dtypes and lengths

// The rows that may be read or written in whole packs.
struct WholePacks {
  uint32_t operands;  // h, the results and the vectors, as Operand bits
  bool grad, grad2, grad_residual, branch;
};

template <typename T, Statistic S>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_backward_general(const __grid_constant__ NormBackwardParams p, WholePacks whole, int packs,
                          float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kNorm = S != Statistic::kNone, kLayer = S == Statistic::kLayer;
  __shared__ ReduceScratch<2> scratch[3];
  const int threads = static_cast<int>(blockDim.x);
  const int64_t width = p.rows.width, row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = row < p.rows.count;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = (packs == 1 ? static_cast<int>(threadIdx.x) : warp * 32 * packs + lane) * kWidth;
  const int64_t stride = static_cast<int64_t>(threads) * packs * kWidth;
  const auto each_pack = [&](const auto& body) {
#pragma unroll 1
    for (int64_t begin = first; begin < width; begin += stride) {
#pragma unroll 1
      for (int k = 0; k < packs; ++k) {
        const int64_t column = begin + k * 32 * kWidth;
        if (column < width) body(column);
      }
    }
  };
  RowStarts start;
  int64_t grads = 0, grads2 = 0, addends = 0, branches = 0;
  walk_row(p.rows, active ? row : 0, [&](int d, int64_t i) {
    start.add(p, d, i);
    grads += i * p.grad.stride[d];
    grads2 += i * p.grad2.stride[d];
    addends += i * p.grad_residual.stride[d];
    branches += i * p.branch.stride[d];
  });
  start.choose(p);
  GeneralLoader<T, true> vectors{p, start, whole.operands};
  const auto get = [&](const RowView& view, int64_t from, bool packed, int64_t column, float (&x)[kWidth]) {
    unpack(load_pack<T, kWidth>(static_cast<const T*>(view.data) + from, column, view.column_stride, width, packed), x);
  };
  const auto put = [&](const RowView& view, int64_t to, bool packed, int64_t column, const float (&x)[kWidth]) {
    if (!active || view.data == nullptr) return;
    store_pack(static_cast<T*>(view.data) + to, column, view.column_stride, width, packed, to_pack<T, kWidth>(x));
  };
  RowNorm norm, branch_norm;
  // h and t of a pack, centred where the means are known.
  const auto get_terms = [&](int64_t column, float (&h)[kWidth], float (&t)[kWidth]) {
    get(p.grad, grads, whole.grad, column, t);
    if constexpr (!kNorm) return;
    float factor[kWidth], unused[kWidth];
    vectors.column = column;
    vectors.second = false;
    get_factors<S, Fusion::kBackward>(vectors, p.weight_offset, factor, unused);
    multiply(factor, t);
    if (p.grad2.data != nullptr) {
      get(p.grad2, grads2, whole.grad2, column, h);
      vectors.second = true;
      get_factors<S, Fusion::kBackward>(vectors, p.weight_offset, factor, unused);
      vectors.second = false;
      add_product(h, factor, t);
    }
    vectors.get_input(h);
    norm.centre<S>(h, t);
  };
  float h[kWidth], t[kWidth];
  if constexpr (kNorm) {
#pragma unroll 1
    for (int pass = kLayer ? 0 : 1; pass < 2; ++pass) {
      float sums[2] = {0.f, 0.f};
      each_pack([&](int64_t column) {
        get_terms(column, h, t);
        sums[0] += pass == 0 ? tree_sum(h) : pack_squares<false>(h, 0.f, width - column);
        sums[1] += pass == 0 ? tree_sum(t) : pack_product(t, h, width - column);
      });
      block_reduce(sums, threads, scratch[pass]);
      if (pass == 0) {
        norm.mean = sums[0] * inverse_width;
        norm.mean_t = sums[1] * inverse_width;
      } else {
        norm.set(sums[0], sums[1], inverse_width, p.eps);
      }
    }
  }
  // The gradient of h. `weigh` applies the branch's factors.
  const auto get_gradient = [&](int64_t column) {
    get_terms(column, h, t);
    if constexpr (kNorm) {
      if (p.grad_residual.data != nullptr) {
        float addend[kWidth];
        get(p.grad_residual, addends, whole.grad_residual, column, addend);
        norm.apply(h, addend, t);
      } else {
        norm.apply(h, t);
      }
    }
  };
  const auto weigh = [&](int64_t column) {
    float gate[kWidth];
    vectors.column = column;
    get_gate(vectors, gate);
    if (p.norms_branch) weigh_gate(vectors, p.weight_offset, gate);
    multiply(gate, t);
  };
  if (p.norms_branch) {
    float sums[2] = {0.f, 0.f}, x[kWidth];
    each_pack([&](int64_t column) {
      get_gradient(column);
      weigh(column);
      get(p.branch, branches, whole.branch, column, x);
      sums[0] += pack_squares<false>(x, 0.f, width - column);
      sums[1] += pack_product(t, x, width - column);
    });
    block_reduce(sums, threads, scratch[2]);
    branch_norm.set(sums[0], sums[1], inverse_width, p.branch_eps);
  }
  stop_unless_named(start.named);
  each_pack([&](int64_t column) {
    get_gradient(column);
    put(p.out, start.out, whole.operands & kOut, column, t);
    if (p.residual_out.data == nullptr) return;
    weigh(column);
    if (p.norms_branch) {
      get(p.branch, branches, whole.branch, column, h);
      branch_norm.apply(h, t);
    }
    put(p.residual_out, start.residual_out, whole.operands & kResidualOut, column, t);
  });
}

// ---- The launch

template <uint32_t kVectors>
using Known = std::integral_constant<uint32_t, kVectors>;

// The sets of vectors that models' blocks pass, which have an instance of their own. Only models in bfloat16 are
// trained. The last one is 0, for any others.
template <typename T, typename M>
constexpr std::array<uint32_t, 5> known_sets(Statistic s, Fusion f) {
  constexpr uint32_t kTables = kGateTable | kScaleTable;
  if (sizeof(T) != 2 || sizeof(M) != 2 || !std::is_same_v<T, __nv_bfloat16>) return {};
  if (s == Statistic::kNone) return {kGate};
  if (f == Fusion::kBackwardPair) return {kScale | kScale2};
  if (f == Fusion::kBackwardBranch) return {kBranchWeight | kWeight | kGate | kScale};
  return {s == Statistic::kRms ? kWeight : kGate | kWeight, kScale, kScale | kScaleTable, kGate | kScale,
          kGate | kScale | kTables};
}

template <typename T, typename M, Statistic S, Fusion F>
void launch_packed(const CompactBackwardParams& q, const Geometry& g, dim3 block, unsigned outer, cudaStream_t stream) {
  const uint32_t vectors = q.rows.present & ~(kElementOperands | kVarying);
  const dim3 grid(grid_size(ceil_div(q.rows.rows, static_cast<int64_t>(block.y))), outer);
  const auto run = [&](auto known) {
    constexpr uint32_t kKnown = decltype(known)::value;
    if (kKnown != 0 && (vectors != kKnown || (q.rows.present & kVarying) || g.packs == 1)) return false;
    // Rows of one pack a thread are short: one head, for example.
    if constexpr (kKnown == 0) {
      if (g.packs == 1) {
        norm_backward_kernel<T, M, S, F, 1, 0><<<grid, block, 0, stream>>>(q);
        return true;
      }
    }
    if (g.packs == 2) {
      norm_backward_kernel<T, M, S, F, 2, kKnown><<<grid, block, 0, stream>>>(q);
    } else {
      norm_backward_kernel<T, M, S, F, 4, kKnown><<<grid, block, 0, stream>>>(q);
    }
    return true;
  };
  constexpr auto kSets = known_sets<T, M>(S, F);
  run(Known<kSets[0]>()) || run(Known<kSets[1]>()) || run(Known<kSets[2]>()) || run(Known<kSets[3]>()) ||
      run(Known<kSets[4]>()) || run(Known<0>());
}

template <typename T, Statistic S, Fusion F>
void launch(const NormBackwardParams& p, const Context& context) {
  const Geometry g = geometry(p.rows.width, kPackWidth<T>, S, F, Output::kRounded, 1);
  const dim3 block(static_cast<unsigned>(g.threads),
                   g.threads > 32 ? 1u : static_cast<unsigned>(kShortRowThreads / g.threads));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  bool fast = false;
  VectorTypes types{};
  WholePacks whole{};
  whole.operands = whole_pack_operands<T>(p, fast, types);
  CompactBackwardParams q{};
  fast = fast && compact_params(p, q.rows) && !p.index.data && g.fits && g.threads <= register_threads(F, g.packs);
  const auto add = [&](CompactView& compact, const RowView& view, bool& packed) {
    if (view.data == nullptr) return;
    packed =
        is_packed(view.data, view.dtype, kPackWidth<T>, p.rows.width, view.column_stride, view.stride, p.rows.ndim);
    const int64_t inner = p.rows.ndim > 0 ? view.stride[p.rows.ndim - 1] * int64_t{sizeof(T)} : 0;
    const int64_t outer = p.rows.ndim == 2 ? view.stride[0] * int64_t{sizeof(T)} : 0;
    compact = {static_cast<char*>(view.data), static_cast<uint32_t>(inner), static_cast<uint32_t>(outer)};
    fast = fast && packed && compact.inner == inner && compact.outer == outer;
  };
  add(q.grad, p.grad, whole.grad);
  add(q.grad2, p.grad2, whole.grad2);
  add(q.grad_residual, p.grad_residual, whole.grad_residual);
  add(q.branch, p.branch, whole.branch);
  // fp32 vectors beside 16-bit rows: the modulations of models that keep them in fp32.
  constexpr bool kTakesWide = sizeof(T) == 2 && F == Fusion::kBackward;
  const bool wide = types == VectorTypes::kFp32;
  fast = fast && (types == VectorTypes::kRows || (wide && kTakesWide));
  if (takes_packed("norm", forced().norm, fast)) {
    int rows_read = 2;
    for (const RowView* view : {&p.grad2, &p.grad_residual, &p.branch}) rows_read += view->data != nullptr;
    q.rows.ahead = rows_ahead(kAheadBytes, p.rows.width * int64_t{sizeof(T)} * rows_read, context.device);
    const unsigned outer = p.rows.ndim == 2 ? static_cast<unsigned>(p.rows.size[0]) : 1;
    if constexpr (kTakesWide) {
      if (wide) {
        launch_packed<T, float, S, F>(q, g, block, outer, stream);
        return check_launch("norm_backward");
      }
    }
    launch_packed<T, T, S, F>(q, g, block, outer, stream);
  } else {
    if (forced().norm == Kernel::kElements) whole = {};
    norm_backward_general<T, S><<<grid_size(ceil_div(p.rows.count, block.y)), block, 0, stream>>>(
        p, whole, g.packs, 1.f / static_cast<float>(p.rows.width));
  }
  check_launch("norm_backward");
}

template <typename T>
void dispatch_fusion(const NormBackwardParams& p, const Context& context) {
  if (p.statistic == Statistic::kNone) return launch<T, Statistic::kNone, Fusion::kBackward>(p, context);
  if (p.norms_branch) return launch<T, Statistic::kRms, Fusion::kBackwardBranch>(p, context);
  if (p.grad2.data) {
    return p.statistic == Statistic::kLayer ? launch<T, Statistic::kLayer, Fusion::kBackwardPair>(p, context)
                                            : launch<T, Statistic::kRms, Fusion::kBackwardPair>(p, context);
  }
  return p.statistic == Statistic::kLayer ? launch<T, Statistic::kLayer, Fusion::kBackward>(p, context)
                                          : launch<T, Statistic::kRms, Fusion::kBackward>(p, context);
}

}  // namespace

void norm_backward(const NormBackwardParams& p, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](NormBackwardParams& q) {
      return std::array<RowView*, 12>{&q.input,       &q.out,         &q.residual_out,  &q.grad,
                                      &q.grad2,       &q.branch,      &q.grad_residual, &q.gate.value,
                                      &q.scale.value, &q.shift.value, &q.scale2.value,  &q.out_gate.value};
    };
    int64_t slice = 0;
    return for_each_slice(p, views, [&](NormBackwardParams& q) {
      if (q.index.data) {
        const int64_t offset = slice++ * q.index.stride[0] * index_size(q.index.type);
        q.index.data = static_cast<const char*>(q.index.data) + offset;
        for (int d = 0; d < q.rows.ndim; ++d) q.index.stride[d] = q.index.stride[d + 1];
      }
      norm_backward(q, context);
    });
  }
  dispatch(p.dtype, [&](auto zero) { dispatch_fusion<decltype(zero)>(p, context); });
}

}  // namespace ltx
