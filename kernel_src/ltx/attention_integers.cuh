// Queries and keys of attention_hopper.cu as integers of 8 bits; integer * scale stands for the number.
//
//   query   rotated; a scale for each row
//   key     less the mean of its head's keys, and rotated; kKeyScales scales for each tile of keys
//
// The mean changes all scores of a query by the same number, which the softmax does not see. The rotation multiplies
// rows by a Hadamard matrix. It leaves products of rows as they are, and spreads a column with large numbers over all
// columns, which would otherwise take the digits from the others.
//
// Key k of a tile has scale k / 2 % kKeyScales: a thread of a product needs the scores of these keys alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "ltx/fp8.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/vec.cuh"

namespace ltx {

constexpr int kIntegerColumns = 128;  // of a row
constexpr int kKeyScales = 4;         // of a tile of keys

struct Integers {
  int8_t *query, *key;  // [batch, heads, queries or keys, kIntegerColumns]
  float* query_scale;   // [batch, heads, queries], times the scale of the attention in units of log2
  float* key_scale;     // [batch, heads, key_tiles, kKeyScales]
  float* key_mean;      // [batch, heads, kIntegerColumns]
};

// x + kShift has the integer x in its low bits, where its magnitude is less than 2^22, rounded to nearest even.
constexpr float kShift = 0x1.8p23f;
constexpr uint32_t kShiftBits = 0x4b400000u;

namespace integers {

constexpr int kSamples = 256, kSampleThreads = 512;  // keys of a head that sample_keys reads
constexpr int kLanes = 4;                            // of a row; lane i has the packs i, i + kLanes, ...
constexpr int kPacks = kIntegerColumns / 8 / kLanes, kColumns = 8 * kPacks;  // of a lane

// The keys of a sample that may count: the first ones.
__device__ __forceinline__ int valid_keys(const HopperAttentionParams& p, int64_t batch) {
  const int keys = static_cast<int>(p.keys);
  return p.key_lengths ? min(keys, max(0, p.key_lengths[batch * p.key_lengths_stride])) : keys;
}

template <typename T>
__device__ __forceinline__ const T* row_of(const void* data, const HeadStrides& stride, int64_t batch, int64_t head,
                                           int64_t row) {
  return static_cast<const T*>(data) + batch * stride.batch + row * stride.sequence + head * stride.head;
}

// The mean of up to kSamples keys of a head, evenly spread. grid: batch * heads.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads) sample_keys(HopperAttentionParams p, float* key_mean) {
  constexpr int kRowPacks = kIntegerColumns / 8, kRows = kSampleThreads / kRowPacks;  // at once
  __shared__ float sums[kRows][kIntegerColumns];
  const int64_t sequence = blockIdx.x, batch = sequence / p.heads, head = sequence - batch * p.heads;
  const int keys = valid_keys(p, batch), samples = min(keys, kSamples);
  const int pack = threadIdx.x % kRowPacks, first = threadIdx.x / kRowPacks;
  float sum[8] = {};
#pragma unroll 8
  for (int i = first; i < samples; i += kRows) {
    const int64_t row = static_cast<int64_t>(i) * keys / samples;
    float x[8];
    unpack(load_pack<T, 8>(row_of<T>(p.key, p.key_stride, batch, head, row), pack * 8, 1, 0, true), x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += x[j];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[first][pack * 8 + j] = sum[j];
  __syncthreads();
  if (threadIdx.x >= kIntegerColumns) return;
  float total = 0.f;
  for (int i = 0; i < kRows; ++i) total += sums[i][threadIdx.x];
  key_mean[sequence * kIntegerColumns + threadIdx.x] = total / max(samples, 1);
}

// Rows times a Hadamard matrix, whose columns have the length sqrt(kIntegerColumns).
__device__ __forceinline__ void rotate(float (&x)[kColumns]) {
#pragma unroll
  for (int step = 1; step < kColumns; step *= 2) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i & step) continue;
      const float low = x[i], high = x[i + step];
      x[i] = low + high;
      x[i + step] = low - high;
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    const float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(0xffffffffu, x[i], lanes));
  }
}

// The scale of values of magnitude up to `most`. It is NaN if `most` is not finite: the scores are then NaN, too.
__device__ __forceinline__ QuantScale integer_scale(float most) {
  if (!(most < INFINITY)) return {NAN, 0.f};
  const float scale = fmaxf(most * (1.f / 127.f), kMinScale);
  return {scale, __frcp_rn(scale)};
}

// x * inverse as four bytes.
__device__ __forceinline__ uint32_t to_integers(const float* x, float inverse) {
  const auto bits = [inverse](float x) { return __float_as_uint(fmaf(x, inverse, kShift)); };
  const uint32_t low = __byte_perm(bits(x[0]), bits(x[1]), 0x0040), high = __byte_perm(bits(x[2]), bits(x[3]), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ void store_row(int8_t* row, const float (&x)[kColumns], float inverse) {
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const uint2 words = {to_integers(&x[i * 8], inverse), to_integers(&x[i * 8 + 4], inverse)};
    *reinterpret_cast<uint2*>(row + (i * kLanes + threadIdx.x % kLanes) * 8) = words;
  }
}

template <typename T>
__device__ __forceinline__ void load_row(const T* row, bool counts, float (&x)[kColumns]) {
  Pack<T, 8> packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    packs[i] = {};
    if (counts) packs[i] = load_pack<T, 8>(row, (i * kLanes + threadIdx.x % kLanes) * 8, 1, 0, true);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) unpack(packs[i], reinterpret_cast<float (&)[8]>(x[i * 8]));
}

__device__ __forceinline__ float row_magnitude(const float (&x)[kColumns]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) most = larger_magnitude(most, x[i]);
  return lane_magnitude(most, kLanes);
}

// A block makes integers of kKeys queries, or of a tile of keys. `scale`: of the attention in units of log2. Its sign
// goes with the queries, so that the largest integer stays the largest logit. grid: (query_tiles + key_tiles) * batch *
// heads; neighbouring blocks read neighbouring heads.
template <typename T, int kKeys>
__global__ void __launch_bounds__(kKeys* kLanes)
    quantise_rows(HopperAttentionParams p, Integers to, float scale, int query_tiles, int key_tiles) {
  const int64_t sequences = p.batch * p.heads, block = blockIdx.x / sequences;
  const int64_t sequence = blockIdx.x - block * sequences, batch = sequence / p.heads,
                head = sequence - batch * p.heads;
  float x[kColumns];
  if (block < query_tiles) {
    const int64_t row = block * kKeys + threadIdx.x / kLanes, at = sequence * p.queries + row;
    const bool counts = row < p.queries;
    load_row(row_of<T>(p.query, p.query_stride, batch, head, row), counts, x);
    rotate(x);
    const QuantScale by = integer_scale(row_magnitude(x));
    if (!counts) return;
    if (threadIdx.x % kLanes == 0) to.query_scale[at] = by.scale * fabsf(scale) * (1.f / kIntegerColumns);
    store_row(to.query + at * kIntegerColumns, x, scale < 0.f ? -by.inverse : by.inverse);
    return;
  }
  const int64_t tile = block - query_tiles, row = tile * kKeys + threadIdx.x / kLanes;
  const bool counts = row < valid_keys(p, batch);
  load_row(row_of<T>(p.key, p.key_stride, batch, head, row), counts, x);
  if (counts) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float mean[8];
      load_floats<8>(to.key_mean, DType::kFloat32, sequence * kIntegerColumns, (i * kLanes + threadIdx.x % kLanes) * 8,
                     1, 0, true, mean);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i * 8 + j] -= mean[j];
    }
  }
  rotate(x);
  // A warp has 8 rows: 8 neighbouring lanes have the rows of one scale.
  constexpr int kWarps = kKeys * kLanes / 32, kScaleLanes = 32 / kKeyScales;
  __shared__ float magnitudes[kWarps][kKeyScales];
  const int lane = threadIdx.x % 32, part = lane / kScaleLanes;
  float most = lane_magnitude(row_magnitude(x), kScaleLanes);
  if (lane % kScaleLanes == 0) magnitudes[threadIdx.x / 32][part] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = larger_magnitude(most, magnitudes[i][part]);
  const QuantScale by = integer_scale(most);
  if (threadIdx.x < 32 && lane % kScaleLanes == 0) {
    to.key_scale[(sequence * key_tiles + tile) * kKeyScales + part] = by.scale;
  }
  if (row < p.keys) store_row(to.key + (sequence * p.keys + row) * kIntegerColumns, x, by.inverse);
}

}  // namespace integers

// ---- Host side

// Of the arrays of Integers.
struct IntegerBytes {
  int64_t query, key, query_scale, key_scale, key_mean;

  IntegerBytes(const HopperAttentionParams& p, int64_t key_tiles) {
    const auto bytes = [sequences = p.batch * p.heads](int64_t each) { return ceil_div(sequences * each, 256) * 256; };
    query = bytes(p.queries * kIntegerColumns);
    key = bytes(p.keys * kIntegerColumns);
    query_scale = bytes(p.queries * sizeof(float));
    key_scale = bytes(key_tiles * kKeyScales * sizeof(float));
    key_mean = bytes(kIntegerColumns * sizeof(float));
  }
  int64_t all() const { return query + key + query_scale + key_scale + key_mean; }
};

inline HeadStrides integer_strides(const HopperAttentionParams& p, int64_t tokens) {
  return {p.heads * tokens * kIntegerColumns, kIntegerColumns, tokens * kIntegerColumns, 1};
}

template <typename T, int kKeys>
void make_integers(const HopperAttentionParams& p, const Integers& to, float scale, cudaStream_t stream) {
  const int64_t sequences = p.batch * p.heads;
  const int64_t query_tiles = ceil_div(p.queries, kKeys), key_tiles = ceil_div(p.keys, kKeys);
  integers::sample_keys<T><<<grid_size(sequences), integers::kSampleThreads, 0, stream>>>(p, to.key_mean);
  integers::quantise_rows<T, kKeys>
      <<<grid_size((query_tiles + key_tiles) * sequences), kKeys * integers::kLanes, 0, stream>>>(
          p, to, scale, static_cast<int>(query_tiles), static_cast<int>(key_tiles));
}

}  // namespace ltx
