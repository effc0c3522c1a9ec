// Runs small CUDA kernels on the host, to compare what they compute: include it before a source that g++ compiles.
//
// A block's threads are threads of the host, and blocks run one after the other, so that static variables serve as
// shared memory. It has what the templates of skills/cuda-kernels use, and no more.
#pragma once

#include <cuda_runtime.h>

#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(threads)

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim;

namespace host {

struct Warp {
  std::barrier<> barrier{32};
  float slots[32];
};

inline thread_local Warp* warp;
inline thread_local std::barrier<>* block_barrier;

// The value of the lane that `source` names, among 32 lanes that all call this.
inline float shuffle(float x, int source) {
  warp->slots[threadIdx.x % 32] = x;
  warp->barrier.arrive_and_wait();
  const float other = warp->slots[source];
  warp->barrier.arrive_and_wait();
  return other;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  const unsigned threads = config->blockDim.x;
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    std::vector<std::unique_ptr<Warp>> warps;
    for (unsigned i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
    std::barrier<> barrier(threads);
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        threadIdx = {t, 0, 0};
        blockIdx = {block, 0, 0};
        blockDim = config->blockDim;
        warp = warps[t / 32].get();
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

}  // namespace host

#define cudaLaunchKernelEx host::launch
#define cudaGetErrorString(error) "none"

inline void __syncthreads() { host::block_barrier->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return host::shuffle(x, static_cast<int>(threadIdx.x % 32) ^ mask);
}
inline float __shfl_sync(unsigned, float x, int lane) { return host::shuffle(x, lane); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
