// Attention of bf16 heads of 64 columns on Hopper.
//
//   out = softmax(scale * query key^T) value                       for each sample and head
//
// attention_kernel walks over tiles of 192 queries of one head, a block a multiprocessor. Of its four warpgroups one
// thread copies tiles of 64 queries and of 128 keys and values to shared memory (TMA), and three warpgroups compute,
// 64 queries each:
//
//   S  = query key^T             wgmma, fp32, of the tile of keys to come
//   O += P value                 wgmma, fp32, of the tile before, at the same time
//   P  = 2^(scale * S - shift)   meanwhile; rounded to bf16 for the product
//
// With heads of 64 columns the exponentials take as long as the products. What helps is to have both units busy at any
// time: the warpgroups take turns in issuing their products, so that one's exponentials fall into the others' products.
//
// `shift` is the largest logit of a row's first tile of keys, plus kHeadroom. Flash attention would take the largest of
// all keys so far, look for it in each tile, and rescale what it has; the exponent of a float makes that superfluous,
// unless a logit lies 186 (log2) above the first ones. A row whose sums are not finite in the end is computed once
// more, slowly, with its true maximum (recompute_row): that also gives infinities and NaN their meaning.
#include <cuda.h>  // CUtensorMap: types alone, no function of the driver is linked

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/softmax.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kHeadDim = 64;
constexpr int kRows = 64;       // queries of a warpgroup
constexpr int kKeys = 128;      // of a tile
constexpr int kConsumers = 3;   // warpgroups that compute
constexpr int kStages = 4;      // tiles of keys, and of values, in shared memory
constexpr int kRowBytes = 128;  // of a head
constexpr int kThreads = (1 + kConsumers) * 128;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 160;  // a thread; 128 at the launch

constexpr float kHeadroom = 60.f;  // log2: weights of the first tile's keys are at most 2^-60
// Beyond these a row is computed once more. Below the first: logits so large that `shift` is rounded by a power of two.
constexpr float kSmallestSum = 0x1p-90f, kLargestSum = 0x1p126f;

struct Parameters {
  CUtensorMap query_map, key_map, value_map;
  HopperAttentionParams p;
  float scale;  // in units of log2
  int row_tiles, tiles, key_tiles;
};

// What the code has to be compiled for; on other GPUs the kernel is empty and never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "attention_hopper.cu: compile for 9.0a in place of 9.0 (wgmma, setmaxnreg)"
#endif

// Rows of 128 bytes in the order that TMA writes and wgmma reads (swizzle of 128 bytes).
template <int kCount>
struct alignas(1024) Tile {
  uint8_t row[kCount][kRowBytes];
};

// Layout of the shared memory. Kernels use addresses, 32 bits of the shared window: from pointers the compiler would
// make them anew wherever one is used.
struct Shared {
  Tile<kKeys> key[kStages], value[kStages];
  Tile<kRows> query[2][kConsumers];
  // `full`: the copy has arrived. `empty`: all warps that read it have done so.
  uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  uint64_t query_full[2][kConsumers], query_empty[2][kConsumers];
};

// A place in a ring of kSize, and the parity of the round.
template <int kSize>
struct Ring {
  int at = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++at == kSize) at = 0, parity ^= 1;
  }
};

struct TileIndex {
  int batch, head, row;  // first query

  __device__ __forceinline__ TileIndex(const Parameters& a, int tile) {
    const int sequence = tile / a.row_tiles;
    batch = sequence / static_cast<int>(a.p.heads);
    head = sequence - batch * static_cast<int>(a.p.heads);
    row = (tile - sequence * a.row_tiles) * (kConsumers * kRows);
  }
};

__device__ __forceinline__ const __nv_bfloat16* row_of(const void* data, const HeadStrides& stride, const TileIndex& at,
                                                       int64_t row) {
  return static_cast<const __nv_bfloat16*>(data) + at.batch * stride.batch + row * stride.sequence +
         at.head * stride.head;
}

// ---- A row once more, by a warp: two passes over the keys, of which a lane has every 32nd.

using Words = Pack<__nv_bfloat16, 8>;

__device__ __forceinline__ Words words_of(const __nv_bfloat16* head, int i) {
  return load_pack<__nv_bfloat16, 8>(head, i * 8, 1, 0, true);
}

__device__ __forceinline__ float dot(const Words (&query)[kHeadDim / 8], const __nv_bfloat16* key) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) {
    float x[8], y[8];
    unpack(query[i], x);
    unpack(words_of(key, i), y);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(x[j], y[j], sum);
  }
  return sum;
}

__device__ void recompute_row(const Parameters& a, const TileIndex& at, int64_t row) {
  const HopperAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const __nv_bfloat16* const head = row_of(p.query, p.query_stride, at, row);
  Words query[kHeadDim / 8];
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) query[i] = words_of(head, i);
  const auto logit = [&](int64_t key) {  // rounded alike in both passes: no fused multiply-add with the maximum
    return __fmul_rn(a.scale, dot(query, row_of(p.key, p.key_stride, at, key)));
  };
  float maximum = -INFINITY;
#pragma unroll 1
  for (int64_t key = lane; key < p.keys; key += 32) maximum = fmaxf(maximum, logit(key));
  maximum = warp_max(maximum);
  if (maximum == -INFINITY) maximum = 0.f;  // then all weights are zero
  constexpr int kColumns = 32;
  auto* const out =
      static_cast<__nv_bfloat16*>(p.output) + ((at.batch * p.queries + row) * p.heads + at.head) * kHeadDim;
#pragma unroll 1
  for (int first = 0; first < kHeadDim; first += kColumns) {  // all of them would not fit the registers
    float output[kColumns] = {}, sum = 0.f;
#pragma unroll 1
    for (int64_t key = lane; key < p.keys; key += 32) {
      const float weight = exp2_fast(logit(key) - maximum);
      sum += weight;
      const __nv_bfloat16* const value = row_of(p.value, p.value_stride, at, key);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        float x[8];
        unpack(words_of(value + first, i), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) output[i * 8 + j] = fmaf(weight, x[j], output[i * 8 + j]);
      }
    }
    const float inverse = inverse_sum(lane_sum(sum, 32));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float total = lane_sum(output[i], 32) * inverse;
      if (lane == i) out[first + i] = __float2bfloat16_rn(total);
    }
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- Barriers and copies in shared memory

// Addresses of the members of Shared.
struct Address {
  uint32_t shared;

  __device__ __forceinline__ uint32_t key(int stage) const { return member(offsetof(Shared, key), stage, kTileBytes); }
  __device__ __forceinline__ uint32_t value(int stage) const {
    return member(offsetof(Shared, value), stage, kTileBytes);
  }
  __device__ __forceinline__ uint32_t query(int slot, int consumer) const {
    return member(offsetof(Shared, query), slot * kConsumers + consumer, sizeof(Tile<kRows>));
  }
  __device__ __forceinline__ uint32_t key_full(int stage) const { return member(offsetof(Shared, key_full), stage); }
  __device__ __forceinline__ uint32_t key_empty(int stage) const { return member(offsetof(Shared, key_empty), stage); }
  __device__ __forceinline__ uint32_t value_full(int stage) const {
    return member(offsetof(Shared, value_full), stage);
  }
  __device__ __forceinline__ uint32_t value_empty(int stage) const {
    return member(offsetof(Shared, value_empty), stage);
  }
  __device__ __forceinline__ uint32_t query_full(int slot, int consumer) const {
    return member(offsetof(Shared, query_full), slot * kConsumers + consumer);
  }
  __device__ __forceinline__ uint32_t query_empty(int slot, int consumer) const {
    return member(offsetof(Shared, query_empty), slot * kConsumers + consumer);
  }

 private:
  static constexpr uint32_t kTileBytes = sizeof(Tile<kKeys>);
  __device__ __forceinline__ uint32_t member(size_t offset, int index, uint32_t bytes = sizeof(uint64_t)) const {
    return shared + static_cast<uint32_t>(offset) + index * bytes;
  }
};

__device__ __forceinline__ void init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity is over; the one before the first counts as over, with parity 1.
__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Rows [row, row + kCount) of a head, zeros past the last; arrives at the barrier.
template <int kCount>
__device__ __forceinline__ void copy(uint32_t tile, const CUtensorMap& map, uint32_t barrier, const TileIndex& at,
                                     int row) {
  arrive_expecting(barrier, sizeof(Tile<kCount>));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(tile),
      "l"(&map), "r"(barrier), "r"(0), "r"(at.head), "r"(row), "r"(at.batch)
      : "memory");
}

// ---- wgmma
//
// Products are asynchronous: between the commit of a group and the wait for it, nothing may touch its registers. The
// compiler does not see that, so what was computed is passed through `hold` where it becomes valid.

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Operand in shared memory: rows of 128 bytes, swizzled, groups of 8 rows one behind the other. In units of 16 bytes,
// so that a sum with n is the operand n * 16 bytes further.
__device__ __forceinline__ uint64_t operand(uint32_t tile) {
  constexpr uint64_t kSwizzle128 = 1, kGroup = 8 * kRowBytes / 16;
  return kSwizzle128 << 62 | kGroup << 32 | (tile & 0x3ffff) / 16;
}

#define LTX_FLOATS_8(constraint, x, i)                                                                      \
  constraint(x[i]), constraint(x[i + 1]), constraint(x[i + 2]), constraint(x[i + 3]), constraint(x[i + 4]), \
      constraint(x[i + 5]), constraint(x[i + 6]), constraint(x[i + 7])
#define LTX_FLOATS_32(constraint, x, i)                                                                    \
  LTX_FLOATS_8(constraint, x, i), LTX_FLOATS_8(constraint, x, i + 8), LTX_FLOATS_8(constraint, x, i + 16), \
      LTX_FLOATS_8(constraint, x, i + 24)
#define LTX_SCORES                                                                                                 \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, " \
  "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, " \
  "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, " \
  "%57, %58, %59, %60, %61, %62, %63}, %64, %65, "

// scores = query key^T, 64 x 128: a thread has rows g and g + 8 of its warp's 16, with g = lane / 4 and t = lane % 4,
// and of each 8 keys the (2t)th and the next: [4 * block + 2 * half + i]. Its first 16 columns of the head begin anew.
__device__ __forceinline__ void multiply_scores(float (&scores)[64], uint64_t query, uint64_t key) {
  constexpr int kStep = 16 * 2 / 16;  // 16 columns
  asm volatile(LTX_SCORES "0, 1, 1, 0, 0;"
               : LTX_FLOATS_32("=f", scores, 0), LTX_FLOATS_32("=f", scores, 32)
               : "l"(query), "l"(key));
#pragma unroll
  for (int i = 1; i < kHeadDim / 16; ++i) {
    asm volatile(LTX_SCORES "1, 1, 1, 0, 0;"
                 : LTX_FLOATS_32("+f", scores, 0), LTX_FLOATS_32("+f", scores, 32)
                 : "l"(query + i * kStep), "l"(key + i * kStep));
  }
}

// output += weights value, 64 x 64. Of 16 keys a thread holds four words of weights.
__device__ __forceinline__ void multiply_value(float (&output)[32], const uint32_t (&weights)[32], uint64_t value) {
  constexpr int kStep = 16 * kRowBytes / 16;  // 16 keys
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : LTX_FLOATS_32("+f", output, 0)
        : "r"(weights[4 * i]), "r"(weights[4 * i + 1]), "r"(weights[4 * i + 2]), "r"(weights[4 * i + 3]),
          "l"(value + i * kStep));
  }
}

#undef LTX_SCORES
#undef LTX_FLOATS_32
#undef LTX_FLOATS_8

// ---- Copies

__device__ __forceinline__ void produce(const Parameters& a, const Address& shared) {
  Ring<2> query;
  Ring<kStages> key;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    const TileIndex at(a, tile);
#pragma unroll 1
    for (int i = 0; i < kConsumers; ++i) {
      wait(shared.query_empty(query.at, i), query.parity ^ 1);
      copy<kRows>(shared.query(query.at, i), a.query_map, shared.query_full(query.at, i), at, at.row + i * kRows);
    }
    query.advance();
#pragma unroll 1
    for (int j = 0; j < a.key_tiles; ++j) {
      wait(shared.key_empty(key.at), key.parity ^ 1);
      copy<kKeys>(shared.key(key.at), a.key_map, shared.key_full(key.at), at, j * kKeys);
      wait(shared.value_empty(key.at), key.parity ^ 1);
      copy<kKeys>(shared.value(key.at), a.value_map, shared.value_full(key.at), at, j * kKeys);
      key.advance();
    }
  }
}

// ---- Computing warpgroups

// Named barriers 1 to kConsumers: each of the warpgroup that waits, and of the one before it.
__device__ __forceinline__ void await_turn(int consumer) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
}
__device__ __forceinline__ void give_turn(int consumer) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + consumer) : "memory");
}

__device__ __forceinline__ uint32_t to_bf16(float low, float high) {
  const float x[2] = {low, high};
  return to_pack<__nv_bfloat16, 2>(x).word[0];
}

// Of four blocks of 8 columns, a thread has the t-th word of each, and gets the four words of the t-th.
__device__ __forceinline__ void gather_block(uint32_t (&word)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const auto swap = [](uint32_t& low, uint32_t& high, bool upper, int distance) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    low = upper ? got : low;
    high = upper ? high : got;
  };
  swap(word[0], word[1], odd, 1);
  swap(word[2], word[3], odd, 1);
  swap(word[0], word[2], upper, 2);
  swap(word[1], word[3], upper, 2);
}

// What a thread knows of its rows g and g + 8.
struct RowPair {
  float shift[2];
  float sum[2][2] = {};  // of even and of odd columns: one chain of additions for a row would take longer than the rest

  __device__ __forceinline__ void set_shift(const float (&scores)[64], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = scores[2 * half];
#pragma unroll
      for (int i = 0; i < 64; i += 4) largest = fmaxf(largest, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      shift[half] = fmaf(largest, scale, kHeadroom);
    }
  }

  // In place: scores become weights.
  __device__ __forceinline__ void exponentiate(float (&scores)[64], float scale) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int half = i / 2 % 2;
      scores[i] = exp2_fast(fmaf(scores[i], scale, -shift[half]));
      sum[half][i % 2] += scores[i];
    }
  }

  __device__ __forceinline__ float total(int half) const {
    float x = sum[half][0] + sum[half][1];
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
};

__device__ __forceinline__ void leave_out_keys(float (&scores)[64], int from) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    scores[i] = key < from ? scores[i] : -INFINITY;
  }
}

__device__ __forceinline__ void to_weights(const float (&scores)[64], uint32_t (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = to_bf16(scores[2 * i], scores[2 * i + 1]);
}

// Divides by the sums, and writes; rows that have left the range of fp32 are computed once more.
__device__ __forceinline__ void finish(const Parameters& a, const TileIndex& at, int consumer, float (&output)[32],
                                       const RowPair& rows) {
  const HopperAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32, warp_row = at.row + consumer * kRows + threadIdx.x % 128 / 32 * 16;
  unsigned once_more = 0;  // rows of the warp
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = warp_row + lane / 4 + 8 * half;
    const float sum = rows.total(half), inverse = __frcp_rn(sum);
    float zero = 0.f;  // or NaN
#pragma unroll
    for (int i = 2 * half; i < 32; i += 4) zero = fmaf(output[i], 0.f, fmaf(output[i + 1], 0.f, zero));
    const bool fails = !(sum > kSmallestSum && sum < kLargestSum) || zero != 0.f;
    const unsigned found = __ballot_sync(0xffffffffu, fails && row < p.queries);
#pragma unroll
    for (int g = 0; g < 8; ++g) once_more |= (found >> 4 * g & 0xf) != 0 ? 1u << (g + 8 * half) : 0;
    auto* const out =
        static_cast<__nv_bfloat16*>(p.output) + ((at.batch * p.queries + row) * p.heads + at.head) * kHeadDim;
#pragma unroll
    for (int first = 0; first < kHeadDim / 8; first += 4) {
      Words words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = 4 * (first + i) + 2 * half;
        words.word[i] = to_bf16(output[block] * inverse, output[block + 1] * inverse);
      }
      gather_block(words.word);
      if (row < p.queries) store_pack<__nv_bfloat16, 8>(out, (first + lane % 4) * 8, 1, 0, true, words);
    }
  }
  __syncwarp();  // what is written here is written once more
  for (; once_more != 0; once_more &= once_more - 1) recompute_row(a, at, warp_row + __ffs(once_more) - 1);
}

__device__ __forceinline__ void consume(const Parameters& a, const Address& shared, int consumer) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto release = [first_lane](uint32_t barrier) {
    if (first_lane) arrive(barrier);
  };
  const int last_keys = static_cast<int>(a.p.keys) - (a.key_tiles - 1) * kKeys;
  const int next = consumer == kConsumers - 1 ? 0 : consumer + 1;
  if (next == 0) give_turn(next);
  Ring<2> query;
  Ring<kStages> key, value;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) {
    float scores[64], output[32] = {};
    uint32_t weights[32];
    RowPair rows;
    const uint64_t query_operand = operand(shared.query(query.at, consumer));
    wait(shared.query_full(query.at, consumer), query.parity);
    wait(shared.key_full(key.at), key.parity);
    begin_products();
    multiply_scores(scores, query_operand, operand(shared.key(key.at)));
    commit_products();
    await_products<0>();
    hold(scores);
    release(shared.key_empty(key.at));
    key.advance();
    if (a.key_tiles == 1 && last_keys < kKeys) leave_out_keys(scores, last_keys);
    rows.set_shift(scores, a.scale);
    rows.exponentiate(scores, a.scale);
    to_weights(scores, weights);
#pragma unroll 1
    for (int j = 1; j < a.key_tiles; ++j) {
      wait(shared.key_full(key.at), key.parity);
      await_turn(consumer);
      hold(output), hold(weights);
      begin_products();
      multiply_scores(scores, query_operand, operand(shared.key(key.at)));
      commit_products();
      wait(shared.value_full(value.at), value.parity);
      multiply_value(output, weights, operand(shared.value(value.at)));
      commit_products();
      give_turn(next);
      await_products<1>();
      hold(scores);
      release(shared.key_empty(key.at));
      key.advance();
      if (j == a.key_tiles - 1 && last_keys < kKeys) leave_out_keys(scores, last_keys);
      rows.exponentiate(scores, a.scale);
      hold(scores);
      await_products<0>();
      hold(output), hold(weights), hold(scores);
      release(shared.value_empty(value.at));
      value.advance();
      to_weights(scores, weights);
    }
    release(shared.query_empty(query.at, consumer));
    query.advance();
    wait(shared.value_full(value.at), value.parity);
    hold(output), hold(weights);
    begin_products();
    multiply_value(output, weights, operand(shared.value(value.at)));
    commit_products();
    await_products<0>();
    hold(output);
    release(shared.value_empty(value.at));
    value.advance();
    finish(a, TileIndex(a, tile), consumer, output, rows);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Parameters a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ Tile<kKeys> memory[];
  Address shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;  // of a warpgroup
    for (int i = 0; i < kStages; ++i) {
      init(shared.key_full(i), 1);
      init(shared.value_full(i), 1);
      init(shared.key_empty(i), kConsumers * kWarps);
      init(shared.value_empty(i), kConsumers * kWarps);
    }
    for (int i = 0; i < kConsumers; ++i) {
      for (int slot = 0; slot < 2; ++slot) {
        init(shared.query_full(slot, i), 1);
        init(shared.query_empty(slot, i), kWarps);
      }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("" : "+r"(shared.shared));  // from here on a number that lies in a register
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);  // one for a warp
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == 0) produce(a, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume(a, shared, warpgroup - 1);
  }
#endif
}

// ---- Host side

// cuTensorMapEncodeTiled is the driver's; asked for by name, it needs no library to link against.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("attention: expected a driver of CUDA 12.0 or newer, which has cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
  }();
  return function;
}

// How TMA finds `rows` rows of a head. `name`: of the argument, for the error.
CUtensorMap tensor_map(const char* name, const void* data, const HeadStrides& stride, const HopperAttentionParams& p,
                       int64_t sequence, int rows) {
  constexpr cuuint64_t kBytes = sizeof(__nv_bfloat16);
  const auto bytes = [](int64_t elements) {  // zero, of a dimension of one, would be refused
    return elements == 0 ? 16 : static_cast<cuuint64_t>(elements) * kBytes;
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[] = {kHeadDim, size(p.heads), size(sequence), size(p.batch)};
  const cuuint64_t strides[] = {bytes(stride.head), bytes(stride.sequence), bytes(stride.batch)};
  const cuuint32_t box[] = {kHeadDim, 1, static_cast<cuuint32_t>(rows), 1}, steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides,
                                    box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(name) +
                             ": expected a layout that cuTensorMapEncodeTiled takes, got its error " +
                             std::to_string(result) + "; pass " + name + ".contiguous()");
  }
  return map;
}

}  // namespace

// The machine code for 9.0a is all there is: where the driver compiled PTX, it was that of an older architecture, whose
// kernel is empty.
bool has_hopper_attention(int device) {
  return once_a_device(device, [device] {
    int before = device;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaFuncAttributes code{};
    const bool found = cudaFuncGetAttributes(&code, attention_kernel) == cudaSuccess && code.binaryVersion == 90 &&
                       code.ptxVersion == 90 &&
                       cudaFuncSetAttribute(attention_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sizeof(Shared)) == cudaSuccess;
    cudaGetLastError();  // "no kernel image" is an answer
    cudaSetDevice(before);
    return found;
  });
}

void hopper_attention(const HopperAttentionParams& p, const Context& context) {
  if (!has_hopper_attention(context.device)) {
    throw std::runtime_error("attention: expected a GPU of compute capability 9.0, and a build with code for 9.0a");
  }
  const int64_t row_tiles = ceil_div(p.queries, kConsumers * kRows), tiles = row_tiles * p.heads * p.batch;
  if (tiles > 0x7fffffff - 0xffff || p.queries > 0x7fffffff - kConsumers * kRows || p.keys > 0x7fffffff - kKeys) {
    throw std::runtime_error("query: expected fewer than 2^31 tokens, keys and tiles of " +
                             std::to_string(kConsumers * kRows) + " tokens, got " + std::to_string(p.queries) + ", " +
                             std::to_string(p.keys) + " and " + std::to_string(tiles));
  }
  Parameters a;
  a.query_map = tensor_map("query", p.query, p.query_stride, p, p.queries, kRows);
  a.key_map = tensor_map("key", p.key, p.key_stride, p, p.keys, kKeys);
  a.value_map = tensor_map("value", p.value, p.value_stride, p, p.keys, kKeys);
  a.p = p;
  a.scale = p.scale * kLog2E;
  a.row_tiles = static_cast<int>(row_tiles);
  a.tiles = static_cast<int>(tiles);
  a.key_tiles = static_cast<int>(ceil_div(p.keys, kKeys));
  const int blocks = std::min(a.tiles, multiprocessors(context.device));
  attention_kernel<<<blocks, kThreads, sizeof(Shared), static_cast<cudaStream_t>(context.stream)>>>(a);
  check_launch("attention");
}

}  // namespace ltx
