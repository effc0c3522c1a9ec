// out = relu(gate)^2 * up. Reads two tensors and writes one; nothing can move fewer bytes.
//
// A thread owns 16 bytes, the widest access before Blackwell. Products are computed in float32 and rounded once.
#include <cuda_bf16.h>

#include <stdexcept>
#include <string>

#include "relu_squared_gate.h"

namespace {

constexpr int kThreads = 128;

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T from_float(float x) {
  return T(x);
}

template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T element[kWidth];
};

template <typename T>
__device__ T gated(T gate, T up) {
  const float g = to_float(gate), positive = g < 0.f ? 0.f : g;  // fmaxf would turn NaN into 0
  return from_float<T>(positive * positive * to_float(up));
}

template <typename T, int kWidth>
__global__ void kernel(const T* gate, const T* up, T* out, int64_t count) {
  using P = Pack<T, kWidth>;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (first + kWidth <= count) {
    const P g = *reinterpret_cast<const P*>(gate + first), u = *reinterpret_cast<const P*>(up + first);
    P result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.element[i] = gated(g.element[i], u.element[i]);
    *reinterpret_cast<P*>(out + first) = result;
  } else {
    for (int64_t i = first; i < count; ++i) out[i] = gated(gate[i], up[i]);
  }
}

template <typename T, int kWidth>
void launch_packs(const ReluSquaredGate& p, cudaStream_t stream) {
  constexpr int64_t kPerBlock = static_cast<int64_t>(kThreads) * kWidth;
  const int64_t blocks = (p.count + kPerBlock - 1) / kPerBlock;
  kernel<T, kWidth><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(p.gate), static_cast<const T*>(p.up), static_cast<T*>(p.out), p.count);
}

// A view may begin at any element, and an access of 16 bytes faults where the address is not a multiple of 16.
template <typename T>
void launch(const ReluSquaredGate& p, cudaStream_t stream) {
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(p.gate) | reinterpret_cast<uintptr_t>(p.up) | reinterpret_cast<uintptr_t>(p.out);
  addresses % 16 == 0 ? launch_packs<T, 16 / sizeof(T)>(p, stream) : launch_packs<T, 1>(p, stream);
}

}  // namespace

void relu_squared_gate(const ReluSquaredGate& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  p.bfloat16 ? launch<__nv_bfloat16>(p, cuda_stream) : launch<float>(p, cuda_stream);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}
