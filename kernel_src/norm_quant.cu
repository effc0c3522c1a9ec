// The norm family with quantised results (norm.cu has the formula, quant.cu the other quantising ops).
//
//   scale  = max(amax(|out|) / 448, 2^-120) of the row, or one number for all rows
//   values = e4m3(out * (1 / scale))
//
// The row kernel (ltx/row/kernel.cuh) takes all of them but modulated RMS norms whose vectors it has no instance for,
// above all LTX-Video's tables. modulate_held_kernel below is faster there (H200, adaln_rmsnorm_quant with tables
// 2x8064x2048, of a copy's time: 1.14, the row kernel 1.19: h200-quant-rows.json).
#include <algorithm>

#include "ltx/row/kernel.cuh"

namespace ltx {

// quant.cu: rows without a norm.
void rows_quant(const NormParams& p, const Context& context);

namespace {

// ---- Modulated RMS norms of many vectors: blocks stay and take one row after the other

constexpr int kHeldBlock = 256;      // threads of a block, at least
constexpr int kHeldPartials = 16;    // of a row: one of each warp
constexpr int kHeldThreads = 768;    // of a multiprocessor
constexpr int64_t kReserved = 2048;  // bytes of a block's shared memory that are the system's and the block's arrays

// Bounds the registers, as the threads that a multiprocessor shall hold.
constexpr int held_threads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return kMaxThreads;  // more would spill
#else
  return kHeldThreads;
#endif
}

// factor and addend of all columns in fp32, as a warp reads them. In runs of 32 packs: the factor's first fours, its
// second fours, the addend's.
extern __shared__ float4 held_vectors[];

template <int kWidth>
struct HeldVectors {
  static constexpr int kFours = kWidth / 4;
  float4* data;

  // `pack`: index of the first pack; get(k) reads pack + 32 k.
  __device__ __forceinline__ explicit HeldVectors(int pack)
      : data(held_vectors + pack / 32 * 32 * 2 * kFours + pack % 32) {}
  __device__ __forceinline__ void set(int vector, const float (&x)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      data[(vector * kFours + i) * 32] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
  __device__ __forceinline__ void get(int k, int vector, float (&x)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 four = data[((k * 2 + vector) * kFours + i) * 32];
      x[4 * i] = four.x;
      x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z;
      x[4 * i + 3] = four.w;
    }
  }
};

// A barrier of the threads of one row.
__device__ __forceinline__ void row_barrier() {
  asm volatile("bar.sync %0, %1;" : : "r"(threadIdx.y), "r"(blockDim.x) : "memory");
}

// block: x = the threads of a row, whole warps with kPacks whole packs a thread; y = rows. grid: x = what runs at once,
// y = the outer dimension. kKnown: as norm_kernel's. Gives the bits of norm_kernel_general.
template <typename T, int kPacks, uint32_t kKnown>
__global__ void __launch_bounds__(held_threads(), 1) modulate_held_kernel(const __grid_constant__ CompactParams p) {
  constexpr int kWidth = kPackWidth<T>, kStep = 32 * kWidth;
  using P = Pack<T, kWidth>;
  // Consecutive rows use two sets in turns, so that a reduction needs one barrier.
  __shared__ float4 sums[2][kHeldBlock / 32][kHeldPartials / 4], magnitudes[2][kHeldBlock / 32][kHeldPartials / 4];
  const int threads = static_cast<int>(blockDim.x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = threads / 32, fours = (warps + 3) / 4, first = (warp * 32 * kPacks + lane) * kWidth;
  const uint32_t stride = gridDim.x * blockDim.y;
  uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  P packs[kPacks];
  const auto load = [&](uint32_t from) {
    if (from >= p.rows) return;
    const char* const data = row_of<false>(p.input, from) + first * sizeof(T);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) packs[k] = reinterpret_cast<const P*>(data)[k * 32];
  };
  load(row);
  // Places past the last warp's stay zeros.
  for (int i = threadIdx.x; i < 2 * kHeldPartials; i += threads) {
    (&sums[i / kHeldPartials][threadIdx.y][0].x)[i % kHeldPartials] = 0.f;
    (&magnitudes[i / kHeldPartials][threadIdx.y][0].x)[i % kHeldPartials] = 0.f;
  }
#pragma unroll 1
  for (int pack = threadIdx.y * threads + threadIdx.x; pack < threads * kPacks; pack += threads * blockDim.y) {
    const Vectors<T, T, Statistic::kRms, Fusion::kModulate, kKnown, 1, 0> vectors(p, 0, pack * kWidth, 0);
    float factor[kWidth], addend[kWidth];
    get_factors<Statistic::kRms, Fusion::kModulate>(vectors, kKnown ? 0.f : p.weight_offset, factor, addend);
    const HeldVectors<kWidth> to(pack);
    to.set(0, factor);
    to.set(1, addend);
  }
  const HeldVectors<kWidth> vectors(warp * 32 * kPacks + lane);
  __syncthreads();
  bool inside[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) inside[k] = true;
#pragma unroll 1
  for (int turn = 0; row < p.rows; row += stride, turn ^= 1) {
    float y[kPacks][kWidth], rstd = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      unpack(packs[k], y[k]);
#pragma unroll
      for (float& v : y[k]) asm volatile("" : "+f"(v));  // or the next row's packs would wait for these
    }
    load(row + stride);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) rstd += pack_squares<false>(y[k], 0.f, kWidth);
    rstd = lane_sum(rstd, 32);
    const float4* const row_sums = sums[turn][threadIdx.y];
    if (threads > 32) {
      if (lane == 0) (&sums[turn][threadIdx.y][0].x)[warp] = rstd;
      row_barrier();
      rstd = 0.f;
#pragma unroll 1
      for (int i = 0; i < fours; ++i) {
        const float sum = (row_sums[i].x + row_sums[i].y) + (row_sums[i].z + row_sums[i].w);
        rstd = i == 0 ? sum : rstd + sum;
      }
    }
    rstd = reciprocal_root(rstd, p.inverse_width, p.eps);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float factor[kWidth], addend[kWidth];
      vectors.get(k, 0, factor);
      normalise<Statistic::kRms>(0.f, rstd, y[k]);
      vectors.get(k, 1, addend);
      apply_factors<true>(factor, addend, y[k]);
    }
    float most = 0.f;
    if (!p.static_scale) {
      most = warp_magnitude(magnitude(y));
      if (threads > 32) {
        if (lane == 0) (&magnitudes[turn][threadIdx.y][0].x)[warp] = most;
        row_barrier();
#pragma unroll 1
        for (int i = 0; i < fours; ++i) {
          const float4 x = magnitudes[turn][threadIdx.y][i];
          most = larger_magnitude(most, larger_magnitude(larger_magnitude(x.x, x.y), larger_magnitude(x.z, x.w)));
        }
      }
    }
    store_quantised(y, inside, row_scale(p.static_scale, most), row_of<false>(p.out, row) + first, kStep,
                    p.scales + static_cast<int64_t>(blockIdx.y) * p.rows + row);
  }
}

// False where modulate_held_kernel does not take the call.
template <typename T>
bool launch_held(const NormParams& p, const Context& context) {
  if constexpr (has_known_sets<T>(Output::kQuantised)) {
    if (forced().norm != Kernel::kAny || forced().norm_packs != 0) return false;
    const Geometry g = geometry(p.rows.width, kPackWidth<T>, Statistic::kRms, Fusion::kModulate, Output::kQuantised, 1);
    if (g.packs < 3 || !g.fits || p.rows.width != g.threads * g.packs * kPackWidth<T>) return false;
    bool fast = false;
    VectorTypes types{};
    CompactParams q{};
    whole_pack_operands<T>(p, fast, types);
    if (!fast || types != VectorTypes::kRows || p.index.data || !compact_params(p, q)) return false;
    const uint32_t vectors = q.present & ~kElementOperands;
    if (vectors == (kScale | kShift) || vectors == (kWeight | kScale) || (vectors & kVarying)) return false;
    const int64_t held = p.rows.width * 2 * static_cast<int64_t>(sizeof(float));
    const int device = context.device;
    if (held + kReserved > device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device)) return false;
    const dim3 block(static_cast<unsigned>(g.threads), static_cast<unsigned>(std::max(1, kHeldBlock / g.threads)));
    const int64_t outer = p.rows.ndim == 2 ? p.rows.size[0] : 1;
    const int64_t at_once =
        std::min<int64_t>(kHeldThreads / static_cast<int>(block.x * block.y),
                          device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(device) / (held + kReserved));
    const int64_t running = std::max<int64_t>(1, multiprocessors(device) * at_once / outer);
    const dim3 grid(grid_size(std::min(ceil_div(static_cast<int64_t>(q.rows), block.y), running)),
                    static_cast<unsigned>(outer));
    constexpr uint32_t kTables = kScale | kScaleTable | kShift | kShiftTable;
    const bool tables = vectors == kTables;
    const auto kernel = g.packs == 4 ? (tables ? modulate_held_kernel<T, 4, kTables> : modulate_held_kernel<T, 4, 0>)
                                     : (tables ? modulate_held_kernel<T, 3, kTables> : modulate_held_kernel<T, 3, 0>);
    if (held + kReserved > (48 << 10)) {  // rare: more than a block has without asking
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(held));
    }
    kernel<<<grid, block, static_cast<size_t>(held), static_cast<cudaStream_t>(context.stream)>>>(q);
    check_launch("norm_quant");
    return true;
  }
  return false;
}

// ---- All of them

template <typename T, Statistic S>
void dispatch_fusion(const NormParams& p, const Context& context) {
  constexpr Output kQuantised = Output::kQuantised;
  const bool modulated = p.scale.value.data || p.shift.value.data;
  if (p.residual.data) {
    if constexpr (S == Statistic::kRms) {
      if (!p.gate.value.data && !modulated) return launch<T, S, Fusion::kAdd, kQuantised>(p, context);
    }
    return launch<T, S, Fusion::kGated, kQuantised>(p, context);
  }
  if (S == Statistic::kRms && modulated && launch_held<T>(p, context)) return;
  modulated ? launch<T, S, Fusion::kModulate, kQuantised>(p, context)
            : launch<T, S, Fusion::kPlain, kQuantised>(p, context);
}

}  // namespace

void norm_quant(const NormParams& p, const Context& context) {
  if (needs_split(p.rows)) return for_each_norm_slice(p, [&](const NormParams& q) { norm_quant(q, context); });
  if (p.norms_branch) return norm_branch(p, context);
  if (p.quantised2.values) return norm_pair(p, context);
  if (p.statistic == Statistic::kNone) return rows_quant(p, context);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.statistic == Statistic::kRms ? dispatch_fusion<T, Statistic::kRms>(p, context)
                                   : dispatch_fusion<T, Statistic::kLayer>(p, context);
  });
}

}  // namespace ltx
