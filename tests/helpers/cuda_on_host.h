// Runs small CUDA kernels on the host, to compare what they compute: include it before a source that g++ compiles.
//
// A block's threads are threads of the host, and blocks run one after the other, so that static variables serve as
// shared memory: one thread of the host may launch at a time. It has what the templates of skills/cuda-kernels, the
// general kernel of the norm family and the group norms use, and no more. There are no clusters.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace host {

struct Warp {
  std::barrier<> barrier{32};
  uint32_t slots[32];
};

inline thread_local Warp* warp;
inline thread_local int lane;
inline thread_local std::barrier<>* block_barrier;

template <typename To, typename From>
To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// The value of the lane that `source` names, among 32 lanes that all call this.
template <typename T>
T shuffle(T x, int source) {
  warp->slots[lane] = same_bits<uint32_t>(x);
  warp->barrier.arrive_and_wait();
  const T other = same_bits<T>(warp->slots[source]);
  warp->barrier.arrive_and_wait();
  return other;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  const unsigned row = config->blockDim.x, threads = row * config->blockDim.y;
  if (threads % 32 != 0 || config->numAttrs != 0) return cudaErrorInvalidConfiguration;
  const unsigned columns = config->gridDim.x, blocks = columns * config->gridDim.y;
  for (unsigned block = 0; block < blocks; ++block) {
    std::vector<std::unique_ptr<Warp>> warps;
    for (unsigned i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
    std::barrier<> barrier(threads);
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        threadIdx = {t % row, t / row, 0};
        blockIdx = {block % columns, block / columns, 0};
        blockDim = config->blockDim;
        gridDim = config->gridDim;
        warp = warps[t / 32].get();
        lane = static_cast<int>(t % 32);
        block_barrier = &barrier;
        kernel(arguments...);
        barrier.arrive_and_drop();
        warp->barrier.arrive_and_drop();
      });
    }
    for (std::thread& one : running) one.join();
  }
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(dim3 grid, dim3 block, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  return launch(&config, kernel, arguments...);
}

}  // namespace host

#define cudaLaunchKernelEx host::launch
#define cudaGetErrorString(error) "none"
#define cudaGetLastError() cudaSuccess
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaFuncGetAttributes(...) cudaErrorUnknown
#define cudaDeviceGetAttribute(value, ...) (*(value) = 1, cudaSuccess)

inline void __syncthreads() { host::block_barrier->arrive_and_wait(); }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return host::shuffle(x, host::lane ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  return host::shuffle(x, lane);
}
inline int __any_sync(unsigned, int predicate) {
  for (int mask = 1; mask < 32; mask *= 2) predicate |= host::shuffle(predicate, host::lane ^ mask);
  return predicate;
}
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 32); }
// A GPU stops at an address that is no multiple of the pack's bytes.
template <typename T>
void __stwb(T* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0) std::abort();
  *to = value;
}
inline uint32_t __float_as_uint(float x) { return host::same_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return host::same_bits<float>(x); }
inline void __trap() { std::abort(); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
using std::max;
using std::min;
