// Attention with few keys (a video's tokens to a prompt's), with the RMS norms of query and key in it.
//
//   n(x) = x * rstd * weight
//   out  = softmax(scale * n(query) n(key)^T + mask) value      for each head
//
// rstd = 1 / sqrt(mean(x^2) + eps) over all heads of a token.
//
// row_statistics computes rstd, a warp a token. Then one of two kernels:
// attention_kernel    fp16 and bf16, heads of 64 or 128, on tensor cores; a block keeps keys and values of one head in
//                     shared memory and walks over queries, a warp 16 at a time
// attention_general   any dtype, head, stride and GPU; a warp a query and head
//
// On tensor cores the key is multiplied with both weights and the scale, and then rounded once. The query stays as it
// lies in memory: its rstd multiplies the logits.
//
// Norms before an SDPA backend move more than the minimum: one read of the query, one write of the output.
#include <algorithm>
#include <cmath>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/softmax.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// ---- 1 / sqrt(mean(x^2) + eps) of every token: those of all queries, then those of all keys.

constexpr int kStatisticsThreads = 256;
constexpr int kPacksInFlight = 8;

// A token's elements: `packed` if all heads are one aligned row.
struct Tokens {
  const void* data;
  HeadStrides stride;
  int64_t sequence;
  bool packed;
};

template <typename T>
__device__ __forceinline__ float sum_of_squares(const T* token, const Tokens& tokens, int head_dim, int64_t width,
                                                int64_t column) {
  constexpr int kWidth = kPackWidth<T>;
  Pack<T, kWidth> pack;
  if (tokens.packed) {
    pack = load_pack<T, kWidth>(token, column, 1, width, true);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto c = static_cast<uint32_t>(column + i), head = c / static_cast<uint32_t>(head_dim);
      const int64_t at = head * tokens.stride.head + (c - head * head_dim) * tokens.stride.column;
      pack.set_bits(i, c < width ? reinterpret_cast<const typename Pack<T, kWidth>::Bits*>(token)[at] : 0);
    }
  }
  float x[kWidth], sum[2] = {0.f, 0.f};
  unpack(pack, x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i % 2] = fmaf(x[i], x[i], sum[i % 2]);
  return sum[0] + sum[1];
}

template <typename T>
__global__ void __launch_bounds__(kStatisticsThreads)
    row_statistics(const __grid_constant__ Tokens query, const __grid_constant__ Tokens key, int64_t batch,
                   int head_dim, int64_t width, float eps, float* rstd) {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // attention_kernel may begin
#endif
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kStatisticsThreads / 32) + threadIdx.x / 32;
  const int64_t queries = batch * query.sequence;
  if (row >= queries + batch * key.sequence) return;
  const Tokens& tokens = row < queries ? query : key;
  const int64_t token = row < queries ? row : row - queries;
  const int64_t sample = token <= 0xffffffffll && tokens.sequence <= 0xffffffffll
                             ? static_cast<uint32_t>(token) / static_cast<uint32_t>(tokens.sequence)
                             : token / tokens.sequence;
  const T* data = static_cast<const T*>(tokens.data) + sample * tokens.stride.batch +
                  (token - sample * tokens.sequence) * tokens.stride.sequence;
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
  for (int64_t first = lane * kPackWidth<T>; first < width; first += kPacksInFlight * 32 * kPackWidth<T>) {
    float part[kPacksInFlight];
#pragma unroll
    for (int i = 0; i < kPacksInFlight; ++i) {
      const int64_t column = first + i * 32 * kPackWidth<T>;
      part[i] = column < width ? sum_of_squares(data, tokens, head_dim, width, column) : 0.f;
    }
    sum += tree_sum(part);
  }
  sum = lane_sum(sum, 32);
  if (lane == 0) rstd[row] = reciprocal_root(sum, 1.f / static_cast<float>(width), eps);
}

// The weights of 8 columns of a head.
__device__ __forceinline__ void load_weights(const void* data, DType dtype, int64_t stride, int64_t column,
                                             float (&weight)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) weight[i] = 1.f;
  if (data) load_floats<8>(data, dtype, 0, column, stride, column + 8, false, weight);
}

// What is added to a key's logit, in units of log2; finite if the mask is.
__device__ __forceinline__ float mask_of(const AttentionParams& p, int64_t sample, int64_t key) {
  if (!p.mask) return 0.f;
  float one[1];
  load_floats<1>(p.mask, p.mask_dtype, sample * p.mask_stride_batch + key * p.mask_stride_key, 0, 1, 1, true, one);
  return log2_addend(one[0]);
}

// The largest logit so far, which the exponents of the softmax are relative to.
struct Maximum {
  float value = -INFINITY;

  // What all sums up to now have to be multiplied by.
  __device__ __forceinline__ float raise(float largest) {
    const float before = value;
    value = fmaxf(before, largest);
    return before == value ? 1.f : exp2_fast(before - value);
  }
  // With no finite logit every weight is zero.
  __device__ __forceinline__ float shift() const { return value == -INFINITY ? 0.f : value; }
};

// ---- Tensor cores
//
// mma.m16n8k16: with g = lane / 4 and t = lane % 4, a thread holds of A rows g and g + 8, of B column g, and of each of
// them the elements k = 2t, 2t + 1, 2t + 8, 2t + 9; of C rows g and g + 8, columns 2t and 2t + 1. Which element of a
// head is called k is free, as long as query and key agree: a thread takes the 8 neighbours that one access of 16 bytes
// brings, of every 32 columns the t-th 8. Columns of the value are permuted alike, so that a thread ends up with 8
// neighbours of the output.

constexpr int kWarps = 4;  // of a block
constexpr int kTile = 16;  // queries of a warp

// A chunk of keys, whose logits a warp holds at once.
template <int kHeadDim, int kChunk>
struct alignas(16) Shared {
  // 16 bytes each, at places that make reads free of bank conflicts.
  uint4 key[kChunk][kHeadDim / 8];
  uint4 value[kChunk][kHeadDim / 8];
  float mask[kChunk];   // in units of log2, as all logits
  float bound[kChunk];  // bounds |logit| without the mask, for every query
  int used;             // keys up to the last whose weight may be other than zero

  __device__ static int key_place(int row, int chunk) { return chunk ^ (row & 1) * 4; }
  __device__ static int value_place(int row, int chunk) { return chunk ^ (row & 7); }
};

template <typename T>
__device__ __forceinline__ void multiply_add(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Four 8 x 8 matrices, transposed: the lane's address is that of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void load_transposed(const uint4* row, uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#endif
}

template <typename T>
__device__ __forceinline__ const T* at(const void* data, const HeadStrides& stride, int64_t sample, int64_t row,
                                       int64_t head) {
  return static_cast<const T*>(data) + sample * stride.batch + row * stride.sequence + head * stride.head;
}

// Waits until row_statistics has finished: it lets this kernel start early.
__device__ __forceinline__ void await_statistics() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Below 2^-126, a weight of the softmax is zero.
constexpr float kZeroWeight = -127.f;

// Number of the chunk's keys up to the last that counts. Padding of a prompt does not count: its logits differ from the
// mask by at most the key's bound, so its weights are zero. `floor`: a lower bound of every query's largest logit, from
// the keys of this chunk and those before. For one warp.
template <int kHeadDim, int kChunk>
__device__ __forceinline__ int used_keys(const Shared<kHeadDim, kChunk>& shared, float& floor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = lane; i < kChunk; i += 32) floor = fmaxf(floor, shared.mask[i] - shared.bound[i]);
  floor = warp_max(floor);
  int used = 0;
#pragma unroll
  for (int i = 0; i < kChunk; i += 32) {
    // NaN counts: a key or value is then not finite.
    const bool counts = !(shared.mask[i + lane] + shared.bound[i + lane] - floor < kZeroWeight);
    const unsigned found = __ballot_sync(0xffffffffu, counts);
    if (found != 0) used = i + 32 - __clz(found);
  }
  return used;
}

// Keys [first, first + kChunk) of a sample and head, with all factors but the query's rstd; zeros past the last. For
// the whole block. kAtOnce: packs of each that a thread reads before it uses one.
template <typename T, int kAtOnce, int kHeadDim, int kChunk>
__device__ __forceinline__ void load_keys(const AttentionParams& p, int64_t sample, int64_t head, int64_t first,
                                          Shared<kHeadDim, kChunk>& shared, float& floor) {
  constexpr int kPieces = kHeadDim / 8, kRows = kWarps * 32 / kPieces;
  static_assert(kChunk % (kAtOnce * kRows) == 0);
  __syncthreads();  // nobody reads what was there before
  const int piece = threadIdx.x % kPieces;
  const float* const rstd = p.workspace + p.batch * p.queries + sample * p.keys + first;
  const auto keys = static_cast<int>(min(p.keys - first, static_cast<int64_t>(kChunk)));
  for (int row = threadIdx.x; row < kChunk; row += kWarps * 32) {
    shared.mask[row] = row < keys ? mask_of(p, sample, first + row) : -INFINITY;
  }
  // A normalised query of all heads is at most this long; 1 % covers rounding.
  const float query_bound = 1.01f * sqrtf(static_cast<float>(p.heads * kHeadDim));
#pragma unroll 1
  for (int begin = threadIdx.x / kPieces; begin < kChunk; begin += kAtOnce * kRows) {
    Pack<T, 8> raw[kAtOnce], values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = begin + i * kRows;
      raw[i] = values[i] = Pack<T, 8>{};
      if (row >= keys) continue;
      raw[i] = load_pack<T, 8>(at<T>(p.key, p.key_stride, sample, first + row, head), piece * 8, 1, 0, true);
      values[i] = load_pack<T, 8>(at<T>(p.value, p.value_stride, sample, first + row, head), piece * 8, 1, 0, true);
    }
    float factor[8], query_weight[8];
    const int64_t column = head * kHeadDim + piece * 8;
    load_weights(p.key_weight, p.key_weight_dtype, p.key_weight_stride, column, factor);
    load_weights(p.query_weight, p.query_weight_dtype, p.query_weight_stride, column, query_weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) factor[j] *= query_weight[j] * (p.scale * kLog2E);
    await_statistics();
    float key_rstd[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) key_rstd[i] = begin + i * kRows < keys ? rstd[begin + i * kRows] : 0.f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = begin + i * kRows;
      float x[8], value[8], squares = 0.f;
      unpack(raw[i], x);
      unpack(values[i], value);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] *= key_rstd[i] * factor[j];
        squares = fmaf(x[j], x[j], fmaf(0.f, value[j], squares));  // NaN if a value is infinite or NaN
      }
      squares = lane_sum(squares, kPieces);
      if (piece == 0) shared.bound[row] = query_bound * sqrtf(squares);
      const Pack<T, 8> key = to_pack<T, 8>(x);
      shared.key[row][shared.key_place(row, piece)] = *reinterpret_cast<const uint4*>(&key);
      // Pair r of the 8 columns of this piece goes to the r-th of the four pieces of these 32 columns.
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        uint4& place = shared.value[row][shared.value_place(row, piece / 4 * 4 + r)];
        reinterpret_cast<uint32_t*>(&place)[piece % 4] = values[i].word[r];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int used = used_keys(shared, floor);
    if (threadIdx.x == 0) shared.used = used;
  }
  __syncthreads();
}

// The queries of a tile that a thread holds, as they lie in memory: rows g and g + 8.
template <typename T, int kHeadDim>
struct Queries {
  Pack<T, 8> pack[kHeadDim / 32][2];
  float rstd[2];

  // Past the last query: the last once more.
  __device__ static int row(int first, int half, int count) {
    return min(first + static_cast<int>(threadIdx.x % 32) / 4 + 8 * half, count - 1);
  }
  // `head`: the first query's elements that are this thread's.
  __device__ __forceinline__ void load(const T* head, int64_t stride, int first, int count) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* const data = head + row(first, half, count) * stride;
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; ++i) pack[i][half] = load_pack<T, 8>(data, i * 32, 1, 0, true);
    }
  }
  __device__ __forceinline__ void load_statistics(const float* statistics, int first, int count) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rstd[half] = statistics[row(first, half, count)];
  }
};

// The same as operands A, in order of k.
template <typename T, int kHeadDim>
struct Operands {
  uint32_t a[kHeadDim / 16][4];

  __device__ __forceinline__ explicit Operands(const Queries<T, kHeadDim>& queries) {
    // The compiler cannot know that this is 0. For plain copies it would move four registers together before each of 64
    // multiplications: moves would be a third of all instructions.
    const uint32_t zero = blockDim.z - 1;
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[k][j] = queries.pack[k / 2][j % 2].word[k % 2 * 2 + j / 2] ^ zero;
    }
  }
};

// What a thread has of a tile's output: sums over keys of 2^(logit - maximum) * value, and in the last place those
// without value.
template <int kHeadDim>
struct Output {
  static constexpr int kSum = kHeadDim / 8;
  float sum[kHeadDim / 8 + 1][4] = {};
  Maximum maximum[2];
};

// Adds the first kKeys keys of a chunk to an output. `after_logits()` runs when the queries have been used.
template <int kKeys, bool kOnlyChunk, typename T, int kHeadDim, int kChunk, typename AfterLogits>
__device__ __forceinline__ void attend(const Operands<T, kHeadDim>& queries, const float (&rstd)[2],
                                       const Shared<kHeadDim, kChunk>& shared, Output<kHeadDim>& output,
                                       const AfterLogits& after_logits) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float logit[kKeys / 8][4], largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) logit[n][i] = 0.f;
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
      const uint4 key = shared.key[n * 8 + g][shared.key_place(g, i * 4 + t)];
      multiply_add<T>(queries.a[2 * i], key.x, key.y, logit[n]);
      multiply_add<T>(queries.a[2 * i + 1], key.z, key.w, logit[n]);
    }
    const float2 mask = *reinterpret_cast<const float2*>(&shared.mask[n * 8 + 2 * t]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      logit[n][i] = fmaf(logit[n][i], rstd[i / 2], i % 2 == 0 ? mask.x : mask.y);
      largest[i / 2] = fmaxf(largest[i / 2], logit[n][i]);
    }
  }
  after_logits();
  float shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Lanes 4g to 4g + 3 share a row.
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
    const float rescale = output.maximum[half].raise(largest[half]);
    shift[half] = output.maximum[half].shift();
    if constexpr (!kOnlyChunk) {
#pragma unroll
      for (int d = 0; d <= Output<kHeadDim>::kSum; ++d) {
        output.sum[d][2 * half] *= rescale;
        output.sum[d][2 * half + 1] *= rescale;
      }
    }
  }
  constexpr uint32_t kOnes = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80u : 0x3c003c00u;
#pragma unroll
  for (int s = 0; s < kKeys / 16; ++s) {
    // Rows g and g + 8 of keys 16s + 2t, + 1, + 8, + 9.
    uint32_t weights[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) pair[i] = exp2_fast(logit[2 * s + j / 2][j % 2 * 2 + i] - shift[j % 2]);
      weights[j] = to_pack<T, 2>(pair).word[0];
    }
    multiply_add<T>(weights, kOnes, kOnes, output.sum[Output<kHeadDim>::kSum]);
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 2) {
      const int row = s * 16 + lane % 16;
      uint32_t value[4];
      load_transposed(&shared.value[row][shared.value_place(row, d + lane / 16)], value);
      multiply_add<T>(weights, value[0], value[1], output.sum[d]);
      multiply_add<T>(weights, value[2], value[3], output.sum[d + 1]);
    }
  }
}

// ptxas needs more than a third of them before compute capability 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

// As registers allow: the keys of a chunk, and the blocks of a multiprocessor at once.
template <int kHeadDim, bool kOnlyChunk>
struct Tiling {
  static constexpr int kChunk = kOnlyChunk ? 128 : kHeadDim == 64 ? 64 : 32;
  static constexpr int kBlocks = kHeadDim == 64 && kOnlyChunk && !kFewRegisters ? 3 : 2;
};

// grid: x = heads of all samples (neighbouring blocks read neighbouring memory), y = shares of the queries.
// kOnlyChunk: there are no more keys than one chunk. `resident`: shared memory holds all chunks.
template <typename T, int kHeadDim, bool kOnlyChunk>
__global__ void __launch_bounds__(kWarps * 32, (Tiling<kHeadDim, kOnlyChunk>::kBlocks))
    attention_kernel(const __grid_constant__ AttentionParams p, int all_chunks, bool all_resident) {
  constexpr int kChunk = Tiling<kHeadDim, kOnlyChunk>::kChunk, kAtOnce = kOnlyChunk ? 8 : 2;
  const int chunks = kOnlyChunk ? 1 : all_chunks;
  const bool resident = kOnlyChunk || all_resident;
  extern __shared__ uint4 memory[];
  auto* shared = reinterpret_cast<Shared<kHeadDim, kChunk>*>(memory);
  const uint32_t sample = blockIdx.x / static_cast<uint32_t>(p.heads);
  const uint32_t head = blockIdx.x - sample * static_cast<uint32_t>(p.heads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* const query = at<T>(p.query, p.query_stride, sample, 0, head) + lane % 4 * 8;
  T* const out = const_cast<T*>(at<T>(p.output, p.output_stride, sample, 0, head)) + lane % 4 * 8;
  const float* const statistics = p.workspace + sample * p.queries;
  const int count = static_cast<int>(p.queries), step = gridDim.y * kWarps * kTile;
  int first = (blockIdx.y * kWarps + warp) * kTile;
  // Without resident keys a block walks together: a warp that has no queries left loads keys with the others.
  const int end = resident ? count : (count + kWarps * kTile - 1) / (kWarps * kTile) * (kWarps * kTile);
  Queries<T, kHeadDim> queries;
  if (first < end) queries.load(query, p.query_stride.sequence, first, count);
  float floor = -INFINITY;
  if (resident) {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) load_keys<T, kAtOnce>(p, sample, head, c * kChunk, shared[c], floor);
  }
  await_statistics();
  if (first < end) queries.load_statistics(statistics, first, count);
#pragma unroll 1
  for (; first < end; first += step) {
    const Operands<T, kHeadDim> operands(queries);
    const auto load_next = [&] {
      if (first + step >= end) return;
      queries.load(query, p.query_stride.sequence, first + step, count);
      queries.load_statistics(statistics, first + step, count);
    };
    Output<kHeadDim> output;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      if (!resident) load_keys<T, kAtOnce>(p, sample, head, c * kChunk, *shared, floor);
      const Shared<kHeadDim, kChunk>& chunk = shared[resident ? c : 0];
      if constexpr (kOnlyChunk) {
        // The next queries are on their way while the values are added up for these.
        if (chunk.used > kChunk / 2) {
          attend<kChunk, true>(operands, queries.rstd, chunk, output, load_next);
        } else if (chunk.used > kChunk / 4) {
          attend<kChunk / 2, true>(operands, queries.rstd, chunk, output, load_next);
        } else {
          attend<kChunk / 4, true>(operands, queries.rstd, chunk, output, load_next);
        }
      } else if (chunk.used > 0) {
        attend<kChunk, false>(operands, queries.rstd, chunk, output, [] {});
      }
    }
    if constexpr (!kOnlyChunk) load_next();  // not before: there are not enough registers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_sum(output.sum[Output<kHeadDim>::kSum][2 * half]);
      const int row = first + lane / 4 + 8 * half;
      if (row >= count) continue;
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; ++i) {
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = output.sum[i * 4 + j / 2][half * 2 + j % 2] * inverse;
        store_pack<T, 8>(out + row * p.output_stride.sequence, i * 32, 1, 0, true, to_pack<T, 8>(x));
      }
    }
  }
}

// ---- Everything else

constexpr int kGeneralThreads = 128;
constexpr int kMaxHeadDim = 256;

// The elements d = lane, lane + 32, ... of a head.
template <typename T>
struct HeadPart {
  static constexpr int kCount = kMaxHeadDim / 32;
  float x[kCount];

  __device__ __forceinline__ void load(const T* head, int64_t stride, int head_dim) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      x[i] = d < head_dim ? to_float(head[d * stride]) : 0.f;
    }
  }
  __device__ __forceinline__ void load_weights(const void* data, DType dtype, int64_t stride, int64_t first,
                                               int head_dim) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      float one[1] = {1.f};
      if (data && d < head_dim) load_floats<1>(data, dtype, (first + d) * stride, 0, 1, 1, true, one);
      x[i] = one[0];
    }
  }
  __device__ __forceinline__ void normalise(float rstd, const HeadPart& weight) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * rstd * weight.x[i];
  }
};

template <typename T>
__global__ void __launch_bounds__(kGeneralThreads) attention_general(const __grid_constant__ AttentionParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kGeneralThreads / 32) + threadIdx.x / 32;
  if (item >= p.batch * p.queries * p.heads) return;
  const int64_t token = item / p.heads, head = item - token * p.heads;
  const int64_t sample = token / p.queries, row = token - sample * p.queries;
  const auto head_dim = static_cast<int>(p.head_dim);
  const int64_t column = head * p.head_dim;
  HeadPart<T> query, weight;
  query.load(at<T>(p.query, p.query_stride, sample, row, head), p.query_stride.column, head_dim);
  weight.load_weights(p.query_weight, p.query_weight_dtype, p.query_weight_stride, column, head_dim);
  query.normalise(p.workspace[token], weight);
  weight.load_weights(p.key_weight, p.key_weight_dtype, p.key_weight_stride, column, head_dim);
  Maximum maximum;
  float output[HeadPart<T>::kCount] = {}, sum = 0.f;
  for (int64_t t = 0; t < p.keys; ++t) {
    HeadPart<T> key, value;
    key.load(at<T>(p.key, p.key_stride, sample, t, head), p.key_stride.column, head_dim);
    value.load(at<T>(p.value, p.value_stride, sample, t, head), p.value_stride.column, head_dim);
    key.normalise(p.workspace[p.batch * p.queries + sample * p.keys + t], weight);
    float product = 0.f;
#pragma unroll
    for (int i = 0; i < HeadPart<T>::kCount; ++i) product = fmaf(query.x[i], key.x[i], product);
    const float logit = fmaf(lane_sum(product, 32), p.scale * kLog2E, mask_of(p, sample, t));
    const float rescale = maximum.raise(logit), probability = exp2f(logit - maximum.shift());
    sum = fmaf(sum, rescale, probability);
#pragma unroll
    for (int i = 0; i < HeadPart<T>::kCount; ++i) output[i] = fmaf(output[i], rescale, probability * value.x[i]);
  }
  const float inverse = inverse_sum(sum);
  auto* out = const_cast<T*>(at<T>(p.output, p.output_stride, sample, row, head));
#pragma unroll
  for (int i = 0; i < HeadPart<T>::kCount; ++i) {
    const int d = threadIdx.x % 32 + 32 * i;
    if (d < head_dim) out[d * p.output_stride.column] = from_float<T>(output[i] * inverse);
  }
}

// ---- Host side

template <typename T>
bool is_packed_head(const void* data, const HeadStrides& stride, int64_t head_dim) {
  return is_packed_head(data, DTypeOf<T>::value, kPackWidth<T>, head_dim, stride);
}

// A block may have that much on every GPU with tensor cores for bf16.
constexpr int kMaxSharedBytes = 96 * 1024 + 2048;

enum class Code : int { kNone, kTensorCores, kEarlyStart };

// What the code of a kernel can do: a newer GPU may run what was compiled for an older one.
template <typename Kernel>
Code code_of(Kernel kernel, int device) {
  cudaFuncAttributes code{};
  if (cudaFuncGetAttributes(&code, kernel) != cudaSuccess || code.ptxVersion < 80 ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes) != cudaSuccess) {
    return Code::kNone;
  }
  const bool starts_early = code.ptxVersion >= 90 && device_attribute<cudaDevAttrComputeCapabilityMajor>(device) >= 9;
  return starts_early ? Code::kEarlyStart : Code::kTensorCores;
}

// Launches the kernel of this head and number of chunks, or says that there is none.
template <typename T, int kHeadDim, bool kOnlyChunk>
bool launch_tensor_cores(const AttentionParams& p, const Context& context) {
  constexpr int kChunk = Tiling<kHeadDim, kOnlyChunk>::kChunk;
  constexpr int64_t kBytes = sizeof(Shared<kHeadDim, kChunk>);
  const int64_t chunks = ceil_div(p.keys, kChunk), blocks = p.batch * p.heads;
  const bool fits =
      p.head_dim == kHeadDim && (p.keys <= Tiling<kHeadDim, true>::kChunk) == kOnlyChunk && p.queries <= 0x7f000000 &&
      blocks <= 0x7fffffff && is_packed_head<T>(p.query, p.query_stride, p.head_dim) &&
      is_packed_head<T>(p.key, p.key_stride, p.head_dim) && is_packed_head<T>(p.value, p.value_stride, p.head_dim) &&
      is_packed_head<T>(p.output, p.output_stride, p.head_dim);
  if (!fits) return false;
  const auto kernel = attention_kernel<T, kHeadDim, kOnlyChunk>;
  const auto code = static_cast<Code>(
      once_a_device(context.device, [&] { return static_cast<int>(code_of(kernel, context.device)); }));
  if (code == Code::kNone) return false;
  const bool resident = chunks * kBytes <= kMaxSharedBytes;
  // As many blocks as run at once: each loads the keys, which takes as long as 50 queries (h200-tuning.json, 2 x 2688
  // queries: 30 us, with twice as many blocks 34). The order of no sum depends on it.
  const int64_t at_once = multiprocessors(context.device) * Tiling<kHeadDim, kOnlyChunk>::kBlocks;
  const int64_t shares =
      std::clamp<int64_t>(at_once / blocks, 1, std::min<int64_t>(ceil_div(p.queries, kWarps * kTile), kMaxGridY));
  cudaLaunchAttribute early_start{};
  early_start.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early_start.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_size(blocks), static_cast<unsigned>(shares));
  config.blockDim = kWarps * 32;
  config.dynamicSmemBytes = (resident ? chunks : 1) * kBytes;
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = &early_start;
  config.numAttrs = code == Code::kEarlyStart ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, p, static_cast<int>(chunks), resident);
  return true;
}

template <typename T>
void launch(const AttentionParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int64_t width = p.heads * p.head_dim;
  const auto tokens = [&](const void* data, const HeadStrides& stride, int64_t sequence) {
    const bool row = stride.head == p.head_dim || p.heads == 1;
    return Tokens{data, stride, sequence, row && is_packed_head<T>(data, stride, p.head_dim)};
  };
  const int64_t rows = p.batch * (p.queries + p.keys);
  row_statistics<T><<<grid_size(ceil_div(rows, kStatisticsThreads / 32)), kStatisticsThreads, 0, stream>>>(
      tokens(p.query, p.query_stride, p.queries), tokens(p.key, p.key_stride, p.keys), p.batch,
      static_cast<int>(p.head_dim), width, p.eps, p.workspace);
  bool launched = false;
  if constexpr (sizeof(T) == 2) {
    if (forced().attention != Kernel::kGeneral) {
      launched = launch_tensor_cores<T, 64, true>(p, context) || launch_tensor_cores<T, 64, false>(p, context) ||
                 launch_tensor_cores<T, 128, true>(p, context) || launch_tensor_cores<T, 128, false>(p, context);
    }
  }
  if (takes_packed("attention", forced().attention, launched)) return;
  const int64_t items = p.batch * p.queries * p.heads;
  attention_general<T><<<grid_size(ceil_div(items, kGeneralThreads / 32)), kGeneralThreads, 0, stream>>>(p);
}

}  // namespace

void attention(const AttentionParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) { launch<decltype(zero)>(p, context); });
  check_launch("attention");
}

}  // namespace ltx
