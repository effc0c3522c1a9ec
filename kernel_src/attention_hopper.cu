// Attention of bf16 and fp16 heads of 64 and 128 columns on Hopper.
//
//   out = softmax(scale * query key^T + mask) value                for each sample and head
//
// hopper_attention_kernel runs one block on each multiprocessor. A block walks over tiles: some rows of queries of one
// head against all keys. One thread copies tiles of queries, keys and values to shared memory (TMA); the other
// warpgroups compute, 64 queries each. Per tile of keys:
//
//   S  = query key^T             wgmma, fp32, of the tile of keys to come
//   O += P value                 wgmma, fp32, of the tile before, at the same time
//   P  = 2^(scale * S - m)       meanwhile
//
// m is the largest logit of the row so far (kFollows), which O and the sum of P are rescaled to when it grows. The
// weight of the largest logit is then exact. Heads of 64 columns in bf16 keep the m of the first tile of keys, plus
// kHeadroom, which is faster: to look for the largest logit delays the exponentials. The range of fp32 makes that
// right, too; the error of peaked rows is up to 1.5 times as large (docs/attention.md).
//
// The exponentials take as long as the products with heads of 64 columns, and half as long with 128. Both units stay
// busy because the warpgroups take turns in issuing their products: one computes its exponentials while the products of
// the others run.
//
// Tiles rarely divide evenly among the multiprocessors. The last ones are cut between two blocks: the first block
// computes the first keys and writes its registers to memory, the second reads them and goes on. Each row's arithmetic
// is the same as without the cut.
//
// Few queries, at most one tile a head, would leave most multiprocessors idle. Their keys are split into pieces of a
// fixed number of tiles of keys (kSplits). Each piece is a tile of its own, whose output and log-sum-exp go to memory
// in fp32, and combine_pieces adds them up in the order of the keys. The pieces depend on the numbers of queries and
// keys and on the keys that count, and not on batch and heads: a row has the same bits in every batch.
//
// Key and value may have fewer heads than the query: consecutive heads of the query share one (`group`).
//
// Causal attention (kCausal) skips the keys after a tile's last query, and leaves out the keys after each row. Its
// tiles then differ in length, and none is cut. They are ordered from the longest to the shortest, and tiles of one
// length follow one another, so that the heads that share keys run at the same time. Every block takes one tile of
// each round, in even rounds from the first block to the last and in odd rounds from the last to the first: that evens
// out what the blocks compute.
//
// Heads of 128 columns may multiply queries and keys as integers of 8 bits (kIntegers, ltx/attention_integers.cuh).
// Their product takes half the time, and the scores are exact integers times a scale.
//
// The mask has one addend a key. plan_keys lists the tiles of keys that count, so that the others cost nothing, and
// marks those where addends have to be added.
//
// A row with a sum or an output out of the range of fp32, or with logits so large that m is rounded by more than a
// power of two, is computed once more, slowly (recompute_row): that gives infinities and NaN their meaning.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "ltx/attention_integers.cuh"
#include "ltx/hopper.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/softmax.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kRows = 64;          // queries of a warpgroup
constexpr float kHeadroom = 60.f;  // log2: weights of the first tile's keys are at most 2^-60 where m is theirs

// What fits: registers of a consumer hold the output (kHeadDim / 2), the scores (kKeys / 2) and the weights
// (kKeys / 4); shared memory holds kStages tiles of keys and of values, and kQuerySlots of queries.
template <typename T_, int kHeadDim_, int kConsumers_, int kKeys_, int kStages_, int kQuerySlots_, int kPieceTiles_,
          bool kTurns_, bool kFollows_, bool kIntegers_ = false, bool kSplits_ = false, bool kCausal_ = false>
struct Shape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;    // warpgroups that compute
  static constexpr int kKeys = kKeys_;              // of a tile
  static constexpr int kStages = kStages_;          // tiles of keys, and of values, in shared memory
  static constexpr int kQuerySlots = kQuerySlots_;  // tiles of queries in shared memory
  static constexpr int kPieceTiles = kPieceTiles_;  // tiles of keys of a piece
  static constexpr bool kTurns = kTurns_;           // the warpgroups issue their products in turns
  static constexpr bool kFollows = kFollows_;       // m is the largest logit so far
  static constexpr bool kSplits = kSplits_;         // a tile has one piece of the keys
  static constexpr bool kIntegers = kIntegers_;     // queries and keys are multiplied as integers
  static constexpr bool kCausal = kCausal_;         // a query sees the keys up to its own place
  using InPieces = Shape<T_, kHeadDim_, kConsumers_, kKeys_, kStages_, kQuerySlots_, kPieceTiles_, kTurns_, kFollows_,
                         kIntegers_, true>;
  using Causal = Shape<T_, kHeadDim_, kConsumers_, kKeys_, kStages_, kQuerySlots_, kPieceTiles_, kTurns_, kFollows_,
                       false, false, true>;
  // Beyond these sums a row is computed once more.
  static constexpr float kSmallestSum = kFollows ? 0.25f : 0x1p-90f, kLargestSum = 0x1p126f;
  using Score = std::conditional_t<kIntegers, uint32_t, float>;
  static constexpr int kStacks = kHeadDim / 64, kScoreStacks = kIntegers ? 1 : kStacks;  // of values; queries and keys
  static constexpr int kScores = kKeys / 2, kOutputs = kHeadDim / 2, kWeights = kKeys / 4;  // registers of a thread
  static constexpr int kState = kOutputs + 6;  // and, between two parts of a tile, in memory
  static constexpr int kThreads = (1 + kConsumers) * 128;
  // Registers of a thread. All threads together have as many as at the launch.
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kProducerRegisters = 32;
};

struct Parameters {
  CUtensorMap query_map, key_map, value_map;
  HopperAttentionParams p;
  Integers integers;
  float scale;                       // in units of log2
  int group;                         // heads of the query that share one of key and value
  int head_tiles, tiles, key_tiles;  // tiles of a head and of all heads, tiles of keys
  int waves, tail;                   // tiles that each block computes whole, and the last ones, which the blocks share
  uint32_t* flags;                   // set when a block's consumer warp has written its state
  float* states;
  const int* plan;       // null without a mask
  const float* addends;  // in units of log2
  // Of pieces of the keys, [batch, heads, pieces, queries]: rows of the output, and the logarithms of their sums of
  // exponentials in units of log2, which are NaN where a row has to be computed once more.
  float* partial_outputs;
  float* partial_lse;
};

// What the code has to be compiled for; on other GPUs the kernel is empty and never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "attention_hopper.cu: compile for 9.0a in place of 9.0 (wgmma, setmaxnreg)"
#endif

// kCount rows of a head: kStacks stacks of rows of 128 bytes.
template <int kCount, int kStacks>
struct alignas(1024) Tile {
  uint8_t row[kStacks][kCount][kSwizzleBytes];
};

template <typename S>
struct Shared {
  Tile<S::kKeys, S::kScoreStacks> key[S::kStages];
  Tile<S::kKeys, S::kStacks> value[S::kStages];
  Tile<kRows, S::kScoreStacks> query[S::kQuerySlots][S::kConsumers];
  // `full`: the copy has arrived. `empty`: all warps that read it have done so.
  uint64_t key_full[S::kStages], key_empty[S::kStages], value_full[S::kStages], value_empty[S::kStages];
  uint64_t query_full[S::kQuerySlots][S::kConsumers], query_empty[S::kQuerySlots][S::kConsumers];
};

// ---- Which keys count

// The entry of a tile of keys: its index, times two, plus one where addends have to be added.
constexpr int kAddends = 1;

// A block for each sample. `plan`: for each sample a count and that many entries; `addends`: kKeys a tile.
template <int kKeys>
__global__ void __launch_bounds__(256) plan_keys(HopperAttentionParams p, int key_tiles, int* plan, float* addends) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t batch = blockIdx.x;
  const int64_t length =
      p.key_lengths ? min(static_cast<int64_t>(p.key_lengths[batch * p.key_lengths_stride]), p.keys) : p.keys;
  int* const entries = plan + batch * (key_tiles + 1) + 1;
  for (int tile = warp; tile < key_tiles; tile += 8) {
    bool counts = false, adds = false;
    for (int i = lane; i < kKeys; i += 32) {
      const int64_t key = static_cast<int64_t>(tile) * kKeys + i;
      float addend = -INFINITY;
      if (key < length) {
        const int64_t offset = batch * p.mask_stride_batch + key * p.mask_stride_key;
        if (p.mask_is_bool) {
          addend = static_cast<const uint8_t*>(p.mask)[offset] ? 0.f : -INFINITY;
        } else {
          float x[1];
          load_floats<1>(p.mask, p.mask_dtype, offset, 0, 1, 1, true, x);
          addend = log2_addend(x[0]);
        }
      }
      counts |= addend != -INFINITY;
      adds |= addend != 0.f;
      addends[batch * key_tiles * kKeys + key] = addend;
    }
    counts = __any_sync(0xffffffffu, counts);
    adds = __any_sync(0xffffffffu, adds);
    if (lane == 0) entries[tile] = counts ? 2 * tile + (adds ? kAddends : 0) : -1;
  }
  __syncthreads();
  if (warp != 0) return;
  int count = 0;
  for (int first = 0; first < key_tiles; first += 32) {
    const int entry = first + lane < key_tiles ? entries[first + lane] : -1;
    const unsigned found = __ballot_sync(0xffffffffu, entry >= 0);
    if (entry >= 0) entries[count + __popc(found & ((1u << lane) - 1))] = entry;
    count += __popc(found);
    __syncwarp();
  }
  if (lane == 0) entries[-1] = count;
}

// The tiles of keys of one sample, or some of them.
template <typename S>
struct KeyTiles {
  const int* entries = nullptr;
  int first = 0, count, length;

  __device__ __forceinline__ KeyTiles(const Parameters& a, int batch) {
    length = static_cast<int>(a.p.keys);
    if (!S::kCausal && a.plan) {
      entries = a.plan + static_cast<int64_t>(batch) * (a.key_tiles + 1);
      count = *entries++;
      return;
    }
    if (a.p.key_lengths) length = min(length, max(0, a.p.key_lengths[batch * a.p.key_lengths_stride]));
    count = tiles_of(length);
  }
  // Keeps the keys before `key`.
  __device__ __forceinline__ void end_at(int key) {
    length = min(length, key);
    count = tiles_of(length);
  }
  // Keeps at most `tiles` tiles, from the tile `from` on.
  __device__ __forceinline__ void keep(int from, int tiles) {
    first = from;
    count = max(0, min(count - from, tiles));
  }
  __device__ __forceinline__ int entry(int i) const { return entries ? entries[first + i] : 2 * (first + i); }

 private:
  static __device__ __forceinline__ int tiles_of(int keys) { return (keys + S::kKeys - 1) / S::kKeys; }
};

// ---- Which tiles a block computes

struct TileIndex {
  int tile, batch, head;
  int row;    // first query
  int piece;  // of the keys

  template <typename S>
  static __device__ __forceinline__ TileIndex of(const Parameters& a, int tile) {
    int sequence, place;  // of a head in a sample; of the tile in it
    if constexpr (S::kCausal) {
      const int sequences = a.tiles / a.head_tiles, from_last = tile / sequences;
      sequence = tile - from_last * sequences;
      place = a.head_tiles - 1 - from_last;
    } else {
      sequence = tile / a.head_tiles;
      place = tile - sequence * a.head_tiles;
    }
    const int batch = sequence / static_cast<int>(a.p.heads), head = sequence - batch * static_cast<int>(a.p.heads);
    return {tile, batch, head, S::kSplits ? 0 : place * S::kConsumers * kRows, S::kSplits ? place : 0};
  }
};

template <typename S>
__device__ __forceinline__ KeyTiles<S> keys_of(const Parameters& a, const TileIndex& at) {
  KeyTiles<S> keys(a, at.batch);
  if (S::kCausal) keys.end_at(at.row + S::kConsumers * kRows);
  if (S::kSplits) keys.keep(at.piece * S::kPieceTiles, S::kPieceTiles);
  return keys;
}

// Some of the keys of a tile: from `from` to `to` of gridDim.x equal parts.
struct Part {
  int tile, from, to;

  __device__ __forceinline__ int begin(int key_tiles) const { return cut(from, key_tiles); }
  __device__ __forceinline__ int end(int key_tiles) const { return cut(to, key_tiles); }

 private:
  static __device__ __forceinline__ int cut(int at, int key_tiles) {
    return static_cast<int>(static_cast<int64_t>(at) * key_tiles / gridDim.x);
  }
};

// The i-th part of this block, or false. A block first computes the part that the next block completes as its last one,
// which therefore hardly waits.
template <typename S>
__device__ __forceinline__ bool next_part(const Parameters& a, int i, Part& part) {
  const int block = blockIdx.x, blocks = gridDim.x;
  part.from = 0;
  part.to = blocks;
  if constexpr (S::kCausal) {
    part.tile = i * blocks + (i % 2 == 0 ? block : blocks - 1 - block);
    return part.tile < a.tiles;
  }
  if (a.tail == 0) {
    part.tile = i * blocks + block;
    return part.tile < a.tiles;
  }
  // In parts: this block has those from `first` to `last` of the tail.
  const int first = block * a.tail, last = first + a.tail, shared = a.waves * blocks;
  if (i == 0) {
    part.tile = min(shared + last / blocks, a.tiles - 1);  // the last block shares no tile: its part is empty
    part.to = last % blocks;
    return true;
  }
  if (i <= a.waves) {
    part.tile = (i - 1) * blocks + block;
    return true;
  }
  const int whole = (first + blocks - 1) / blocks + i - 1 - a.waves;
  part.tile = shared + whole;
  if (whole < last / blocks) return true;
  part.tile = shared + first / blocks;
  part.from = first % blocks;
  return whole == last / blocks && part.from != 0;
}

template <typename T>
__device__ __forceinline__ T* row_of(const void* data, const HeadStrides& stride, const TileIndex& at, int64_t row) {
  return static_cast<T*>(const_cast<void*>(data)) + at.batch * stride.batch + row * stride.sequence +
         at.head * stride.head;
}

// ---- A row once more, by a warp: two passes over the keys, a lane takes every 32nd of them.

template <typename T>
__device__ __forceinline__ Pack<T, 8> words_of(const T* head, int i) {
  return load_pack<T, 8>(head, i * 8, 1, 0, true);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ float dot(const T* query, const T* key) {
  float sum = 0.f;
#pragma unroll 4
  for (int i = 0; i < kHeadDim / 8; ++i) {
    float x[8], y[8];
    unpack(words_of(query, i), x);
    unpack(words_of(key, i), y);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(x[j], y[j], sum);
  }
  return sum;
}

template <typename S>
__device__ __forceinline__ void recompute_row(const Parameters& a, const TileIndex& at, int64_t row, int length) {
  using T = typename S::T;
  constexpr int kHeadDim = S::kHeadDim;
  const HopperAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const T* const query = row_of<T>(p.query, p.query_stride, at, row);
  TileIndex key_at = at;
  key_at.head /= a.group;
  const float* const addends = a.plan ? a.addends + static_cast<int64_t>(at.batch) * a.key_tiles * S::kKeys : nullptr;
  const auto left_out = [&](int key) { return addends && addends[key] == -INFINITY; };
  const auto logit = [&](int key) {  // rounded alike in both passes: no fused multiply-add with the maximum
    const float x = __fmul_rn(a.scale, dot<T, kHeadDim>(query, row_of<T>(p.key, p.key_stride, key_at, key)));
    return addends ? __fadd_rn(x, addends[key]) : x;
  };
  float maximum = -INFINITY;
#pragma unroll 1
  for (int key = lane; key < length; key += 32) {
    if (!left_out(key)) maximum = fmaxf(maximum, logit(key));
  }
  maximum = warp_max(maximum);
  if (maximum == -INFINITY) maximum = 0.f;  // then all weights are zero
  constexpr int kColumns = 32;
  T* const out = row_of<T>(p.output, p.output_stride, at, row);
#pragma unroll 1
  for (int first = 0; first < kHeadDim; first += kColumns) {  // all of them would not fit the registers
    float output[kColumns] = {}, sum = 0.f;
#pragma unroll 1
    for (int key = lane; key < length; key += 32) {
      if (left_out(key)) continue;
      const float weight = exp2_fast(logit(key) - maximum);
      sum += weight;
      const T* const value = row_of<T>(p.value, p.value_stride, key_at, key);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        float x[8];
        unpack(words_of(value + first, i), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) output[i * 8 + j] = fmaf(weight, x[j], output[i * 8 + j]);
      }
    }
    sum = lane_sum(sum, 32);
    const float inverse = inverse_sum(sum);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float total = lane_sum(output[i], 32) * inverse;
      if (lane == i) out[first + i] = from_float<T>(total);
    }
    if (p.lse && lane == 0) {
      p.lse[(static_cast<int64_t>(at.batch) * p.heads + at.head) * p.queries + row] = log_sum(maximum, sum);
    }
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Addresses of the members of Shared.
template <typename S>
struct Address {
  using Members = Shared<S>;
  uint32_t shared;

  __device__ __forceinline__ uint32_t key(int stage) const {
    return member(offsetof(Members, key), stage, sizeof(Tile<S::kKeys, S::kScoreStacks>));
  }
  __device__ __forceinline__ uint32_t value(int stage) const {
    return member(offsetof(Members, value), stage, sizeof(Tile<S::kKeys, S::kStacks>));
  }
  __device__ __forceinline__ uint32_t query(int slot, int consumer) const {
    return member(offsetof(Members, query), slot * S::kConsumers + consumer, sizeof(Tile<kRows, S::kScoreStacks>));
  }
  __device__ __forceinline__ uint32_t key_full(int stage) const { return member(offsetof(Members, key_full), stage); }
  __device__ __forceinline__ uint32_t key_empty(int stage) const { return member(offsetof(Members, key_empty), stage); }
  __device__ __forceinline__ uint32_t value_full(int stage) const {
    return member(offsetof(Members, value_full), stage);
  }
  __device__ __forceinline__ uint32_t value_empty(int stage) const {
    return member(offsetof(Members, value_empty), stage);
  }
  __device__ __forceinline__ uint32_t query_full(int slot, int consumer) const {
    return member(offsetof(Members, query_full), slot * S::kConsumers + consumer);
  }
  __device__ __forceinline__ uint32_t query_empty(int slot, int consumer) const {
    return member(offsetof(Members, query_empty), slot * S::kConsumers + consumer);
  }

 private:
  __device__ __forceinline__ uint32_t member(size_t offset, int index, uint32_t bytes = sizeof(uint64_t)) const {
    return shared + static_cast<uint32_t>(offset) + index * bytes;
  }
};

// ---- Copies

// kCount rows of a head from `row` on, zeros past the last; arrives at the barrier.
template <int kCount, int kStacks>
__device__ __forceinline__ void copy_rows(uint32_t tile, const CUtensorMap& map, uint32_t barrier, int batch, int head,
                                          int row) {
  arrive_expecting(barrier, sizeof(Tile<kCount, kStacks>));
  copy_box(tile, map, barrier, 0, row, 0, head, batch);
}

template <typename S>
__device__ __forceinline__ void produce(const Parameters& a, const Address<S>& shared) {
  Ring<S::kQuerySlots> query;
  Ring<S::kStages> key;
  Part part;
#pragma unroll 1
  for (int i = 0; next_part<S>(a, i, part); ++i) {
    const TileIndex at = TileIndex::of<S>(a, part.tile);
    const KeyTiles<S> keys = keys_of<S>(a, at);
    const int begin = part.begin(keys.count), end = part.end(keys.count);
    if (begin == end) continue;
    const int key_head = at.head / a.group;
#pragma unroll 1
    for (int c = 0; c < S::kConsumers; ++c) {
      wait(shared.query_empty(query.at, c), query.parity ^ 1);
      copy_rows<kRows, S::kScoreStacks>(shared.query(query.at, c), a.query_map, shared.query_full(query.at, c),
                                        at.batch, at.head, at.row + c * kRows);
    }
    query.advance();
#pragma unroll 1
    for (int j = begin; j < end; ++j) {
      const int first = keys.entry(j) / 2 * S::kKeys;
      wait(shared.key_empty(key.at), key.parity ^ 1);
      copy_rows<S::kKeys, S::kScoreStacks>(shared.key(key.at), a.key_map, shared.key_full(key.at), at.batch, key_head,
                                           first);
      wait(shared.value_empty(key.at), key.parity ^ 1);
      copy_rows<S::kKeys, S::kStacks>(shared.value(key.at), a.value_map, shared.value_full(key.at), at.batch, key_head,
                                      first);
      key.advance();
    }
  }
}

// ---- Computing warpgroups

// scores = query key^T, 64 x kKeys.
template <typename S>
__device__ __forceinline__ void multiply_scores(typename S::Score (&scores)[S::kScores], uint32_t query, uint32_t key) {
  using Product = std::conditional_t<S::kIntegers, IntegerProducts<S::kKeys>, Products<typename S::T, S::kKeys>>;
  constexpr int kStep = 2, kSteps = kSwizzleBytes / 16 / kStep;  // 32 bytes a step, 128 bytes a row
  constexpr int kQueryStack = kRows * kSwizzleBytes / 16, kKeyStack = S::kKeys * kSwizzleBytes / 16;
  const uint64_t a = tile_descriptor(query), b = tile_descriptor(key);
  Product::start(scores, a, b);
#pragma unroll
  for (int i = 1; i < S::kScoreStacks * kSteps; ++i) {
    const int stack = i / kSteps, step = i % kSteps * kStep;
    Product::add(scores, a + stack * kQueryStack + step, b + stack * kKeyStack + step);
  }
}

// output += weights value, 64 x kHeadDim. Of 16 keys a thread holds four words of weights.
template <typename S>
__device__ __forceinline__ void multiply_value(float (&output)[S::kOutputs], const uint32_t (&weights)[S::kWeights],
                                               uint32_t value) {
  constexpr int kStep = 16 * kSwizzleBytes / 16;  // 16 keys
  const uint64_t b = tile_descriptor(value, S::kKeys * kSwizzleBytes);
#pragma unroll
  for (int i = 0; i < S::kKeys / 16; ++i) {
    Products<typename S::T, S::kHeadDim>::add_registers(output, &weights[4 * i], b + i * kStep);
  }
}

template <typename T>
__device__ __forceinline__ uint32_t to_word(float low, float high) {
  const float x[2] = {low, high};
  return to_pack<T, 2>(x).word[0];
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
  float maximum[2] = {-INFINITY, -INFINITY};  // in units of log2
  float sum[2][2] = {};  // of even and of odd columns: one chain of additions for a row would take longer than the rest

  // Sets `maximum` to the largest logit of these scores or of those before. `rescale`: what all sums so far have to be
  // multiplied by.
  template <int kScores>
  __device__ __forceinline__ void raise(const float (&scores)[kScores], float scale, float headroom,
                                        float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
      for (int i = 4; i < kScores; i += 4) {
        largest = fmaxf(largest, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      raise(half, fmaf(largest, scale, headroom), rescale);
    }
  }

  // The same of integers with kShift added. Positive numbers, and -infinity, keep their order as integers.
  template <int kScores>
  __device__ __forceinline__ void raise(const uint32_t (&scores)[kScores], const float (&scale)[2], float headroom,
                                        float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto score = [&](int i) { return static_cast<int>(scores[i / 2 * 4 + 2 * half + i % 2]); };
      int largest[2] = {score(0), score(1)};
#pragma unroll
      for (int i = 2; i < kScores / 2; i += 2) {
        int& one = largest[i / 2 % 2];
        one = __vimax3_s32(one, score(i), score(i + 1));
      }
      float logit = (__int_as_float(max(largest[0], largest[1])) - kShift) * scale[half];
      logit = fmaxf(logit, __shfl_xor_sync(0xffffffffu, logit, 1));
      logit = fmaxf(logit, __shfl_xor_sync(0xffffffffu, logit, 2));
      raise(half, logit + headroom, rescale);
    }
  }

  template <int kScores>
  __device__ __forceinline__ void exponentiate(uint32_t (&scores)[kScores], const float (&scale)[2]) {
    const float shifts[2] = {fmaf(kShift, scale[0], shift(0)), fmaf(kShift, scale[1], shift(1))};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2;
      const float weight = exp2_fast(fmaf(__uint_as_float(scores[i]), scale[half], -shifts[half]));
      scores[i] = __float_as_uint(weight);
      sum[half][i % 2] += weight;
    }
  }

  // In place: scores become weights relative to `maximum`.
  template <int kScores>
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float scale) {
    const float shifts[2] = {shift(0), shift(1)};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2;
      scores[i] = exp2_fast(fmaf(scores[i], scale, -shifts[half]));
      sum[half][i % 2] += scores[i];
    }
  }

  __device__ __forceinline__ void raise(int half, float logit, float (&rescale)[2]) {
    const float before = maximum[half];
    maximum[half] = fmaxf(before, logit);
    rescale[half] = exp2_fast(before - shift(half));
    sum[half][0] *= rescale[half];
    sum[half][1] *= rescale[half];
  }

  __device__ __forceinline__ float shift(int half) const { return maximum[half] == -INFINITY ? 0.f : maximum[half]; }

  __device__ __forceinline__ float total(int half) const {
    float x = sum[half][0] + sum[half][1];
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(uint32_t x) { return __uint_as_float(x); }

// Leaves out a tile's keys from `from` on, in rows g and g + 8. `none`: minus infinity, or its bits.
template <typename Score, int kScores>
__device__ __forceinline__ void leave_out_keys(Score (&scores)[kScores], const int (&from)[2], Score none) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int key = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    scores[i] = key < from[i / 2 % 2] ? scores[i] : none;
  }
}

// Scores become logits in units of log2.
template <int kScores>
__device__ __forceinline__ void add_addends(float (&scores)[kScores], float scale, const float* addends) {
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    const float2 addend = *reinterpret_cast<const float2*>(addends + i / 4 * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) scores[i + j] = fmaf(scores[i + j], scale, j % 2 == 0 ? addend.x : addend.y);
  }
}

template <typename T, typename Score, int kScores>
__device__ __forceinline__ void to_weights(const Score (&scores)[kScores], uint32_t (&weights)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) weights[i] = to_word<T>(as_float(scores[2 * i]), as_float(scores[2 * i + 1]));
}

template <int kOutputs>
__device__ __forceinline__ void multiply_output(float (&output)[kOutputs], const float (&rescale)[2]) {
  if (!__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) output[i] *= rescale[i / 2 % 2];
}

// ---- The state between two parts of a tile: registers of every thread

template <typename S>
struct State {
  static __device__ __forceinline__ float* at(const Parameters& a, int block, int consumer) {
    return a.states + (static_cast<int64_t>(block) * S::kConsumers + consumer) * S::kState * 128 + threadIdx.x % 128;
  }
  static __device__ __forceinline__ uint32_t* flag(const Parameters& a, int block, int consumer) {
    return a.flags + (block * S::kConsumers + consumer) * 4 + threadIdx.x % 128 / 32;
  }

  static __device__ __forceinline__ void write(const Parameters& a, int consumer, const float (&output)[S::kOutputs],
                                               const RowPair& rows) {
    float* const to = at(a, blockIdx.x, consumer);
#pragma unroll
    for (int i = 0; i < S::kOutputs; ++i) __stcg(to + i * 128, output[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const row = to + (S::kOutputs + 3 * half) * 128;
      __stcg(row, rows.maximum[half]);
      __stcg(row + 128, rows.sum[half][0]);
      __stcg(row + 256, rows.sum[half][1]);
    }
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag(a, blockIdx.x, consumer)) : "memory");
    }
  }

  // That of the block before.
  static __device__ __forceinline__ void read(const Parameters& a, int consumer, float (&output)[S::kOutputs],
                                              RowPair& rows) {
    const int block = blockIdx.x - 1;
    uint32_t written;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(written) : "l"(flag(a, block, consumer)) : "memory");
    } while (written == 0);
    const float* const from = at(a, block, consumer);
#pragma unroll
    for (int i = 0; i < S::kOutputs; ++i) output[i] = __ldcg(from + i * 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const row = from + (S::kOutputs + 3 * half) * 128;
      rows.maximum[half] = __ldcg(row);
      rows.sum[half][0] = __ldcg(row + 128);
      rows.sum[half][1] = __ldcg(row + 256);
    }
  }
};

// Divides by the sums, and writes. Rows out of fp32's range are computed again, by combine_pieces if keys are split.
template <typename S>
__device__ __forceinline__ void finish(const Parameters& a, const TileIndex& at, int consumer,
                                       float (&output)[S::kOutputs], const RowPair& rows, const KeyTiles<S>& keys) {
  using T = typename S::T;
  const HopperAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32, warp_row = at.row + consumer * kRows + threadIdx.x % 128 / 32 * 16;
  unsigned once_more = 0;  // rows of the warp
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = warp_row + lane / 4 + 8 * half;
    const float sum = rows.total(half), inverse = inverse_sum(sum);
    float zero = 0.f;  // or NaN
#pragma unroll
    for (int i = 2 * half; i < S::kOutputs; i += 4) zero = fmaf(output[i], 0.f, fmaf(output[i + 1], 0.f, zero));
    const bool fails = !(sum > S::kSmallestSum && sum < S::kLargestSum) || zero != 0.f;
    if constexpr (S::kSplits) {
      if (row < p.queries) {
        const int64_t partial = at.tile * p.queries + row;
        float* const to = a.partial_outputs + partial * S::kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int i = 2 * half; i < S::kOutputs; i += 4) {
          __stcg(reinterpret_cast<float2*>(to + i / 4 * 8), float2{output[i] * inverse, output[i + 1] * inverse});
        }
        if (lane % 4 == 0) __stcg(a.partial_lse + partial, fails ? NAN : rows.maximum[half] + log2f(sum));
      }
      continue;
    }
    const unsigned found = __ballot_sync(0xffffffffu, fails && row < p.queries && keys.count != 0);
#pragma unroll
    for (int g = 0; g < 8; ++g) once_more |= (found >> 4 * g & 0xf) != 0 ? 1u << (g + 8 * half) : 0;
    T* const out = row_of<T>(p.output, p.output_stride, at, row);
#pragma unroll
    for (int first = 0; first < S::kHeadDim / 8; first += 4) {
      Pack<T, 8> words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = 4 * (first + i) + 2 * half;
        words.word[i] = to_word<T>(output[block] * inverse, output[block + 1] * inverse);
      }
      gather_block(words.word);
      if (row < p.queries) store_pack<T, 8>(out, (first + lane % 4) * 8, 1, 0, true, words);
    }
    if (p.lse && lane % 4 == 0 && row < p.queries) {
      p.lse[(static_cast<int64_t>(at.batch) * p.heads + at.head) * p.queries + row] = log_sum(rows.maximum[half], sum);
    }
  }
  __syncwarp();  // recompute_row writes some rows once more
  for (; once_more != 0; once_more &= once_more - 1) {
    const int row = warp_row + __ffs(once_more) - 1;
    recompute_row<S>(a, at, row, S::kCausal ? min(keys.length, row + 1) : keys.length);
  }
}

// Runs in a warpgroup without queries in a part of a tile, and frees what the others wait for.
template <typename S, typename Release>
__device__ __forceinline__ void pass(const Address<S>& shared, int consumer, int next, int tiles,
                                     Ring<S::kQuerySlots>& query, Ring<S::kStages>& key, const Release& release) {
  wait(shared.query_full(query.at, consumer), query.parity);
  release(shared.query_empty(query.at, consumer));
  query.advance();
#pragma unroll 1
  for (int j = 0; j < tiles; ++j) {
    wait(shared.key_full(key.at), key.parity);
    release(shared.key_empty(key.at));
    if (S::kTurns && j != 0) {
      named_wait(1 + consumer, 256);
      named_arrive(1 + next, 256);
    }
    wait(shared.value_full(key.at), key.parity);
    release(shared.value_empty(key.at));
    key.advance();
  }
}

template <bool kIntegers>
struct Scales {
  __device__ __forceinline__ Scales(const Parameters&, const TileIndex&, int) {}
  __device__ __forceinline__ void load(int) {}
};

// The scales of the integers of rows g and g + 8 and of this thread's keys.
template <>
struct Scales<true> {
  float query[2];     // in units of log2
  const float* keys;  // of each tile of keys
  float key;          // of the tile at hand

  __device__ __forceinline__ Scales(const Parameters& a, const TileIndex& at, int consumer) {
    const int64_t sequence = at.batch * a.p.heads + at.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = at.row + consumer * kRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
      query[half] = a.integers.query_scale[sequence * a.p.queries + min(row, a.p.queries - 1)];
    }
    keys = a.integers.key_scale + sequence * a.key_tiles * kKeyScales + threadIdx.x % kKeyScales;
  }
  // This load runs beside the product. The compiler would move an ordinary load after the product.
  __device__ __forceinline__ void load(int tile) {
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(key) : "l"(keys + tile * kKeyScales));
  }
};

template <typename S>
__device__ __forceinline__ void consume(const Parameters& a, const Address<S>& shared, int consumer) {
  using T = typename S::T;
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto release = [first_lane](uint32_t barrier) {
    if (first_lane) arrive(barrier);
  };
  // Named barriers 1 to kConsumers: each of the warpgroup that waits, and of the one before it.
  const int next = consumer == S::kConsumers - 1 ? 0 : consumer + 1;
  if (S::kTurns && next == 0) named_arrive(1 + next, 256);
  Ring<S::kQuerySlots> query;
  Ring<S::kStages> key, value;
  Part part;
#pragma unroll 1
  for (int i = 0; next_part<S>(a, i, part); ++i) {
    const TileIndex at = TileIndex::of<S>(a, part.tile);
    const KeyTiles<S> keys = keys_of<S>(a, at);
    const int begin = part.begin(keys.count), end = part.end(keys.count);
    const bool is_end = part.to == gridDim.x;
    typename S::Score scores[S::kScores];
    float output[S::kOutputs] = {}, rescale[2];
    uint32_t weights[S::kWeights];
    RowPair rows;
    if (begin == end) {
      if (is_end && !S::kSplits) finish<S>(a, at, consumer, output, rows, keys);
      continue;
    }
    if (S::kSplits && consumer * kRows >= a.p.queries) {
      pass<S>(shared, consumer, next, end - begin, query, key, release);
      value = key;
      continue;
    }
    Scales<S::kIntegers> scales(a, at, consumer);
    // Scores become logits, and these weights.
    const auto exponentiate = [&](int j, bool first) {
      const int entry = keys.entry(j);
      if constexpr (S::kIntegers) {
        const float scale[2] = {scales.query[0] * scales.key, scales.query[1] * scales.key};
#pragma unroll
        for (int i = 0; i < S::kScores; ++i) scores[i] += kShiftBits;
        const int left = keys.length - entry / 2 * S::kKeys;
        if (left < S::kKeys) leave_out_keys(scores, {left, left}, 0xff800000u);
        if (S::kFollows || first) rows.raise(scores, scale, S::kFollows ? 0.f : kHeadroom, rescale);
        rows.exponentiate(scores, scale);
        return;
      } else {
        float scale = a.scale;
        const int left = keys.length - entry / 2 * S::kKeys;
        if constexpr (S::kCausal) {
          // Of the warp, counted from the first key of the tile.
          const int first_row = at.row + consumer * kRows + threadIdx.x % 128 / 32 * 16 - entry / 2 * S::kKeys;
          if (min(left, first_row + 1) < S::kKeys) {
            const int row = first_row + threadIdx.x % 32 / 4;
            leave_out_keys(scores, {min(left, row + 1), min(left, row + 9)}, -INFINITY);
          }
        } else if (entry & kAddends) {
          add_addends(scores, scale, a.addends + (static_cast<int64_t>(at.batch) * a.key_tiles + entry / 2) * S::kKeys);
          scale = 1.f;
        } else if (left < S::kKeys) {
          leave_out_keys(scores, {left, left}, -INFINITY);
        }
        if (S::kFollows || first) rows.raise(scores, scale, S::kFollows ? 0.f : kHeadroom, rescale);
        rows.exponentiate(scores, scale);
      }
    };
    if (begin != 0) State<S>::read(a, consumer, output, rows);
    const uint32_t queries = shared.query(query.at, consumer);
    wait(shared.query_full(query.at, consumer), query.parity);
    scales.load(keys.entry(begin) / 2);
    wait(shared.key_full(key.at), key.parity);
    begin_products();
    multiply_scores<S>(scores, queries, shared.key(key.at));
    commit_products();
    await_products<0>();
    hold(scores);
    release(shared.key_empty(key.at));
    key.advance();
    exponentiate(begin, begin == 0);
    if (S::kFollows) multiply_output(output, rescale);
    to_weights<T>(scores, weights);
#pragma unroll 1
    for (int j = begin + 1; j < end; ++j) {
      scales.load(keys.entry(j) / 2);
      wait(shared.key_full(key.at), key.parity);
      if (S::kTurns) named_wait(1 + consumer, 256);
      hold(output), hold(weights);
      begin_products();
      multiply_scores<S>(scores, queries, shared.key(key.at));
      commit_products();
      wait(shared.value_full(value.at), value.parity);
      multiply_value<S>(output, weights, shared.value(value.at));
      commit_products();
      if (S::kTurns) named_arrive(1 + next, 256);
      await_products<1>();
      hold(scores);
      release(shared.key_empty(key.at));
      key.advance();
      exponentiate(j, false);
      hold(scores);
      if (S::kFollows) stay_behind(rows.sum[0][0] + rows.sum[0][1] + (rows.sum[1][0] + rows.sum[1][1]));
      await_products<0>();
      hold(output), hold(weights), hold(scores);
      release(shared.value_empty(value.at));
      value.advance();
      if (S::kFollows) multiply_output(output, rescale);
      to_weights<T>(scores, weights);
    }
    release(shared.query_empty(query.at, consumer));
    query.advance();
    wait(shared.value_full(value.at), value.parity);
    hold(output), hold(weights);
    begin_products();
    multiply_value<S>(output, weights, shared.value(value.at));
    commit_products();
    await_products<0>();
    hold(output);
    release(shared.value_empty(value.at));
    value.advance();
    if (is_end) {
      finish<S>(a, at, consumer, output, rows, keys);
    } else {
      State<S>::write(a, consumer, output, rows);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) hopper_attention_kernel(const __grid_constant__ Parameters a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ Tile<1, 8> memory[];
  Address<S> shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;  // of a warpgroup
    for (int i = 0; i < S::kStages; ++i) {
      init_barrier(shared.key_full(i), 1);
      init_barrier(shared.value_full(i), 1);
      init_barrier(shared.key_empty(i), S::kConsumers * kWarps);
      init_barrier(shared.value_empty(i), S::kConsumers * kWarps);
    }
    for (int i = 0; i < S::kConsumers; ++i) {
      for (int slot = 0; slot < S::kQuerySlots; ++slot) {
        init_barrier(shared.query_full(slot, i), 1);
        init_barrier(shared.query_empty(slot, i), kWarps);
      }
    }
    publish_barriers();
  }
  __syncthreads();
  asm volatile("" : "+r"(shared.shared));  // from here on a number that lies in a register
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);  // one for a warp
  if (warpgroup == 0) {
    give_registers<S::kProducerRegisters>();
    if (threadIdx.x == 0) produce<S>(a, shared);
  } else {
    take_registers<S::kConsumerRegisters>();
    consume<S>(a, shared, warpgroup - 1);
  }
#endif
}

// ---- Where keys are split: a warp for each row adds its pieces up

template <typename S>
__global__ void __launch_bounds__(256, 2) combine_pieces(const __grid_constant__ Parameters a) {
  using T = typename S::T;
  constexpr int kColumns = S::kHeadDim / 32;  // of a lane
  const HopperAttentionParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t sequence = index / p.queries, row = index - sequence * p.queries;
  if (sequence >= p.batch * p.heads) return;
  const TileIndex at = TileIndex::of<S>(a, static_cast<int>(sequence) * a.head_tiles);
  const KeyTiles<S> keys(a, at.batch);
  const int pieces = (keys.count + S::kPieceTiles - 1) / S::kPieceTiles;
  const int64_t first = at.tile * p.queries + row;  // of the row in the first piece
  const float* const lse = a.partial_lse + first;
  float maximum = -INFINITY;
  bool fails = false;
#pragma unroll 1
  for (int i = lane; i < pieces; i += 32) {
    const float x = lse[i * p.queries];
    fails |= isnan(x);
    maximum = fmaxf(maximum, x);
  }
  if (__any_sync(0xffffffffu, fails)) {
    recompute_row<S>(a, at, row, keys.length);
    return;
  }
  maximum = warp_max(maximum);
  float sum = 0.f;
#pragma unroll 1
  for (int i = lane; i < pieces; i += 32) sum += exp2_fast(lse[i * p.queries] - maximum);
  sum = lane_sum(sum, 32);
  const float inverse = inverse_sum(sum);
  const float* const outputs = a.partial_outputs + first * S::kHeadDim + lane * kColumns;
  float output[kColumns] = {};
#pragma unroll 4
  for (int i = 0; i < pieces; ++i) {
    const float weight = exp2_fast(lse[i * p.queries] - maximum) * inverse;
    float x[kColumns];
    unpack(load_pack<float, kColumns>(outputs + i * p.queries * S::kHeadDim, 0, 1, 0, true), x);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) output[j] = fmaf(weight, x[j], output[j]);
  }
  T* const out = row_of<T>(p.output, p.output_stride, at, row) + lane * kColumns;
  store_pack<T, kColumns>(out, 0, 1, 0, true, to_pack<T, kColumns>(output));
  if (p.lse && lane == 0) p.lse[sequence * p.queries + row] = log_sum(maximum, sum);
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

template <typename T>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<int8_t> = CU_TENSOR_MAP_DATA_TYPE_UINT8;

// How TMA finds `rows` rows of a head, as stacks of 128 bytes. `name`: of the argument, for the error.
template <typename T, int kStacks>
CUtensorMap tensor_map(const char* name, const void* data, const HeadStrides& stride, int64_t batch, int64_t heads,
                       int64_t sequence, int rows) {
  constexpr int kColumns = kSwizzleBytes / sizeof(T);  // of a stack
  const auto bytes = [](int64_t elements) {            // zero, of a dimension of one, would be refused
    return elements == 0 ? 16 : static_cast<cuuint64_t>(elements) * sizeof(T);
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[] = {kColumns, size(sequence), kStacks, size(heads), size(batch)};
  const cuuint64_t strides[] = {bytes(stride.sequence), kSwizzleBytes, bytes(stride.head), bytes(stride.batch)};
  const cuuint32_t box[] = {kColumns, static_cast<cuuint32_t>(rows), kStacks, 1, 1}, steps[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(&map, kMapType<T>, 5, const_cast<void*>(data), sizes, strides, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(name) +
                             ": expected a layout that cuTensorMapEncodeTiled takes, got its error " +
                             std::to_string(result) + "; pass " + name + ".contiguous()");
  }
  return map;
}

// How the work divides, and what lies where in the workspace.
template <typename S>
struct Division {
  int64_t head_tiles, tiles, key_tiles, blocks, waves, tail;
  int64_t flag_bytes, state_bytes, plan_bytes, addend_bytes, partial_bytes, lse_bytes, integer_bytes;

  Division(const HopperAttentionParams& p, int device) {
    key_tiles = ceil_div(p.keys, S::kKeys);
    head_tiles = S::kSplits ? ceil_div(key_tiles, S::kPieceTiles) : ceil_div(p.queries, S::kConsumers * kRows);
    tiles = head_tiles * p.heads * p.batch;
    blocks = std::min<int64_t>(tiles, multiprocessors(device));
    waves = tiles / blocks - 1;
    tail = S::kCausal || tiles % blocks == 0 ? 0 : tiles - waves * blocks;
    const int64_t states = tail == 0 ? 0 : blocks * S::kConsumers;
    flag_bytes = round_up(states * 4 * sizeof(uint32_t));
    state_bytes = states * S::kState * 128 * sizeof(float);
    plan_bytes = p.mask ? round_up(p.batch * (key_tiles + 1) * sizeof(int)) : 0;
    addend_bytes = p.mask ? round_up(p.batch * key_tiles * S::kKeys * sizeof(float)) : 0;
    const int64_t partials = S::kSplits ? tiles * p.queries : 0;
    partial_bytes = partials * S::kHeadDim * sizeof(float);
    lse_bytes = partials * sizeof(float);
    integer_bytes = S::kIntegers ? IntegerBytes(p, key_tiles).all() : 0;
  }
  int64_t bytes() const {
    return flag_bytes + state_bytes + plan_bytes + addend_bytes + partial_bytes + lse_bytes + integer_bytes;
  }

 private:
  static int64_t round_up(int64_t bytes) { return ceil_div(bytes, 256) * 256; }
};

template <typename S>
bool has_code(int device) {
  return once_a_device(device, [device] {
    int before = device;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaFuncAttributes code{};
    const bool found = cudaFuncGetAttributes(&code, hopper_attention_kernel<S>) == cudaSuccess &&
                       code.binaryVersion == 90 && code.ptxVersion == 90 &&
                       cudaFuncSetAttribute(hopper_attention_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            sizeof(Shared<S>)) == cudaSuccess;
    cudaGetLastError();  // "no kernel image" is an answer
    cudaSetDevice(before);
    return found;
  });
}

template <typename S>
void launch(const HopperAttentionParams& p, const Context& context) {
  if (!has_code<S>(context.device)) {
    throw std::runtime_error("attention: expected a GPU of compute capability 9.0, and a build with code for 9.0a");
  }
  const Division<S> division(p, context.device);
  if (division.tiles > 0x7fffffff - 0xffff || p.queries > 0x7fffffff - S::kConsumers * kRows ||
      p.keys > 0x7fffffff - S::kKeys) {
    throw std::runtime_error("query: expected fewer than 2^31 tokens, keys and tiles of " +
                             std::to_string(S::kConsumers * kRows) + " tokens, got " + std::to_string(p.queries) +
                             ", " + std::to_string(p.keys) + " and " + std::to_string(division.tiles));
  }
  using T = typename S::T;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  Parameters a;
  a.value_map = tensor_map<T, S::kStacks>("value", p.value, p.value_stride, p.batch, p.key_heads, p.keys, S::kKeys);
  a.p = p;
  a.scale = p.scale * kLog2E;
  a.group = static_cast<int>(p.heads / p.key_heads);
  a.head_tiles = static_cast<int>(division.head_tiles);
  a.tiles = static_cast<int>(division.tiles);
  a.key_tiles = static_cast<int>(division.key_tiles);
  a.waves = static_cast<int>(division.waves);
  a.tail = static_cast<int>(division.tail);
  auto* workspace = static_cast<uint8_t*>(p.workspace);
  const auto take = [&workspace](int64_t bytes) -> void* {
    uint8_t* const taken = workspace;
    workspace += bytes;
    return taken;
  };
  a.flags = static_cast<uint32_t*>(take(division.flag_bytes));
  a.states = static_cast<float*>(take(division.state_bytes));
  auto* const plan = static_cast<int*>(take(division.plan_bytes));
  auto* const addends = static_cast<float*>(take(division.addend_bytes));
  a.partial_outputs = static_cast<float*>(take(division.partial_bytes));
  a.partial_lse = static_cast<float*>(take(division.lse_bytes));
  a.plan = p.mask ? plan : nullptr;
  a.addends = addends;
  if (division.tail != 0) cudaMemsetAsync(a.flags, 0, division.flag_bytes, stream);
  if (p.mask) {
    plan_keys<S::kKeys><<<grid_size(p.batch), 256, 0, stream>>>(p, a.key_tiles, plan, addends);
  }
  if constexpr (S::kIntegers) {
    const IntegerBytes bytes(p, division.key_tiles);
    a.integers.query = static_cast<int8_t*>(take(bytes.query));
    a.integers.key = static_cast<int8_t*>(take(bytes.key));
    a.integers.query_scale = static_cast<float*>(take(bytes.query_scale));
    a.integers.key_scale = static_cast<float*>(take(bytes.key_scale));
    a.integers.key_mean = static_cast<float*>(take(bytes.key_mean));
    a.query_map = tensor_map<int8_t, 1>("query", a.integers.query, integer_strides(p, p.queries), p.batch, p.heads,
                                        p.queries, kRows);
    a.key_map = tensor_map<int8_t, 1>("key", a.integers.key, integer_strides(p, p.keys), p.batch, p.key_heads, p.keys,
                                      S::kKeys);
    make_integers<T, S::kKeys>(p, a.integers, a.scale, stream);
  } else {
    a.query_map = tensor_map<T, S::kStacks>("query", p.query, p.query_stride, p.batch, p.heads, p.queries, kRows);
    a.key_map = tensor_map<T, S::kStacks>("key", p.key, p.key_stride, p.batch, p.key_heads, p.keys, S::kKeys);
  }
  hopper_attention_kernel<S><<<static_cast<unsigned>(division.blocks), S::kThreads, sizeof(Shared<S>), stream>>>(a);
  if constexpr (S::kSplits) {
    constexpr int kWarps = 8;  // of a block, a row each
    combine_pieces<S><<<grid_size(ceil_div(p.batch * p.heads * p.queries, kWarps)), kWarps * 32, 0, stream>>>(a);
  }
  check_launch("attention");
}

// ---- The shapes

// Shorter pieces than 1024 and 960 keys are slower (h200-tuning.json). Longer ones would leave multiprocessors idle
// with 4096 keys and 32 heads.
template <typename T>
using Heads128 = Shape<T, 128, 3, 80, 3, 1, 12, false, true>;
template <typename T, bool kFollows>
using Heads128Int8 = Shape<T, 128, 3, 80, 4, 2, 12, true, kFollows, true>;
template <typename T, bool kFollows>
using Heads64 = Shape<T, 64, 3, 128, 4, 1, 8, true, kFollows>;

// Calls `body` with the shape for these heads. Weights in fp16 have no room for kHeadroom, and addends of a mask may be
// farther apart than fp32 allows without following the largest logit.
template <typename Body>
auto with_shape(const HopperAttentionParams& p, const Body& body) {
  const bool adds = p.mask && !p.mask_is_bool;
  const auto whole_or_in_pieces = [&](auto shape) {
    using S = decltype(shape);
    const bool splits = p.queries <= S::kConsumers * kRows && p.keys > S::kPieceTiles * S::kKeys;
    return splits ? body(typename S::InPieces()) : body(shape);
  };
  if (p.is_causal) {  // without a mask
    if (p.dtype == DType::kFloat16) {
      return p.head_dim == 128 ? body(Heads128<__half>::Causal()) : body(Heads64<__half, true>::Causal());
    }
    return p.head_dim == 128 ? body(Heads128<__nv_bfloat16>::Causal()) : body(Heads64<__nv_bfloat16, false>::Causal());
  }
  if (p.int8) {
    return p.dtype == DType::kFloat16 ? body(Heads128Int8<__half, true>()) : body(Heads128Int8<__nv_bfloat16, false>());
  }
  if (p.dtype == DType::kFloat16) {
    return p.head_dim == 128 ? whole_or_in_pieces(Heads128<__half>()) : whole_or_in_pieces(Heads64<__half, true>());
  }
  if (p.head_dim == 128) return whole_or_in_pieces(Heads128<__nv_bfloat16>());
  return adds ? whole_or_in_pieces(Heads64<__nv_bfloat16, true>())
              : whole_or_in_pieces(Heads64<__nv_bfloat16, false>());
}

}  // namespace

// Only the machine code for 9.0a has this kernel. If the driver compiled PTX, that is an older architecture's, with an
// empty kernel.
bool has_hopper_attention(int device) { return has_code<Heads128<__nv_bfloat16>>(device); }

int64_t hopper_attention_workspace(const HopperAttentionParams& p, int device) {
  return with_shape(p, [&](auto shape) { return Division<decltype(shape)>(p, device).bytes(); });
}

void hopper_attention(const HopperAttentionParams& p, const Context& context) {
  with_shape(p, [&](auto shape) { launch<decltype(shape)>(p, context); });
}

}  // namespace ltx
