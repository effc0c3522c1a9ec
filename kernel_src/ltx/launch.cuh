// Host side of a launch: dtype dispatch and error checks.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "ltx/vec.cuh"

namespace ltx {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int next_power_of_two(int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Calls `body` with a value of the row's dtype, as in: dispatch(p.dtype, [&](auto zero) { using T = decltype(zero); ...
template <typename Body>
void dispatch(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) return body(__nv_bfloat16());
  if (dtype == DType::kFloat16) return body(__half());
  return body(float());
}

// gridDim.x, whose limit no tensor that fits a GPU reaches.
inline unsigned grid_size(int64_t blocks) {
  if (blocks > 0x7fffffff)
    throw std::runtime_error("input: expected fewer rows, got a grid of more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

inline int multiprocessors(int device) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // asked once: a query costs as much as a launch
  int count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + " kernel: CUDA error: " + cudaGetErrorString(error));
  }
}

}  // namespace ltx
