// What the kernels on channels-last tensors share: arithmetic on packs that rounds each step to the tensors' dtype,
// packs in one access, and division by sizes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ltx/activation.cuh"
#include "ltx/vec.cuh"

namespace ltx {

struct Add {
  static __device__ __forceinline__ float apply(float a, float b) { return __fadd_rn(a, b); }
  template <typename Pair>
  static __device__ __forceinline__ Pair apply(Pair a, Pair b) {
    return __hadd2_rn(a, b);
  }
};
struct Multiply {
  static __device__ __forceinline__ float apply(float a, float b) { return __fmul_rn(a, b); }
  template <typename Pair>
  static __device__ __forceinline__ Pair apply(Pair a, Pair b) {
    return __hmul2_rn(a, b);
  }
};

// a op b, rounded to T. The fp32 sum or product of two 16-bit numbers, rounded again to 16 bits, is the number that one
// rounding gives, so pairs and single elements agree.
template <typename Op, typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> rounded(const Pack<T, kWidth>& a, const Pack<T, kWidth>& b) {
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pack<T, kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const Pair pair = Op::apply(reinterpret_cast<const Pair&>(a.word[i]), reinterpret_cast<const Pair&>(b.word[i]));
      result.word[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return result;
  } else {
    float x[kWidth], y[kWidth];
    unpack(a, x);
    unpack(b, y);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = Op::apply(x[i], y[i]);
    return to_pack<T, kWidth>(x);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> filled(float value) {
  float x[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = value;
  return to_pack<T, kWidth>(x);
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load(const void* data, int64_t element) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(data) + element);
}

// In one access: nvcc splits the assignment of a struct whose words are computed one by one.
template <typename T, int kWidth>
__device__ __forceinline__ void store(void* data, int64_t element, const Pack<T, kWidth>& pack) {
  T* const to = static_cast<T*>(data) + element;
  if constexpr (sizeof(pack) == 16) {
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]));
  } else if constexpr (sizeof(pack) == 8) {
    __stwb(reinterpret_cast<uint2*>(to), make_uint2(pack.word[0], pack.word[1]));
  } else {
    *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
  }
}

// Numbers of threads stay below 2^31, so that FastDivide can take them.
inline uint32_t thread_count(const char* op, int64_t threads) {
  if (threads > 0x7fffffff) {
    throw std::runtime_error(std::string(op) + ": expected fewer than 2^31 elements to move, got " +
                             std::to_string(threads));
  }
  return static_cast<uint32_t>(threads);
}

// x * sigmoid(x), the bits of torch's SiLU: bf16 takes the special function unit, whose error no bf16 result shows.
template <typename T>
__device__ __forceinline__ float silu(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return activate<T, Activation::kSilu>(x);
  return __fdiv_rn(x, __fadd_rn(1.f, expf(-x)));
}

// A division of a 31-bit number by one divisor: a product and a shift.
struct FastDivide {
  uint32_t divisor = 1, factor = 0, shift = 0;
  FastDivide() = default;
  explicit FastDivide(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
  __device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t& rest) const {
    const uint32_t quotient = divide(n);
    rest = n - quotient * divisor;
    return quotient;
  }
};

inline bool is_aligned(const void* data, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * element_size(dtype) % 16 == 0;
}

}  // namespace ltx
