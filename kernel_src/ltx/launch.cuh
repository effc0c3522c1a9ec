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

constexpr unsigned kMaxGridY = 65535;  // and of z

// ask(), once a device: a query costs as much as a launch. Every `ask` has a memory of its own.
template <typename Ask>
int once_a_device(int device, const Ask& ask) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // plus one; zero: not asked yet
  int value = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (value == 0) {
    value = ask() + 1;
    if (device < kDevices) known[device].store(value, std::memory_order_relaxed);
  }
  return value - 1;
}

template <cudaDeviceAttr kAttribute>
int device_attribute(int device) {
  return once_a_device(device, [device] {
    int value = 0;
    cudaDeviceGetAttribute(&value, kAttribute, device);
    return value;
  });
}

inline int multiprocessors(int device) { return device_attribute<cudaDevAttrMultiProcessorCount>(device); }

// How many rows ahead of its own a block prefetches, so that `bytes` lie between for each multiprocessor.
inline uint32_t rows_ahead(int64_t bytes, int64_t row_bytes, int device) {
  return static_cast<uint32_t>(bytes * multiprocessors(device) / row_bytes);
}

// Launches `blocks` neighbouring blocks of gridDim.x as one cluster.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, int blocks, cudaStream_t stream,
                     const Arguments&... arguments) {
  if (blocks > 8) {  // rare: rows of more than a quarter of a megabyte
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = blocks > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + " kernel: CUDA error: " + cudaGetErrorString(error));
  }
}

}  // namespace ltx
