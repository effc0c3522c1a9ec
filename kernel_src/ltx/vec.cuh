// Packs: the 16 bytes that a thread loads and stores at once, and their conversion to fp32 and back.
//
// Which elements a thread owns is fixed by the dtype (a pack is 16 bytes of the row's dtype); whether a pack moves in
// one access or element by element depends on the operand's alignment and strides, so the same row gives the same bits
// from any view.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ltx/params.h"

namespace ltx {

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<__half> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr DType value = DType::kBFloat16;
};

__host__ __device__ constexpr int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <typename T>
constexpr int kPackWidth = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return to_float(from_float<T>(x));
}

// The same with the dtype known at run time (uniform over the grid): eager chains round to the dtypes of their inputs.
__device__ __forceinline__ float round_to(DType dtype, float x) {
  if (dtype == DType::kBFloat16) return round_to<__nv_bfloat16>(x);
  if (dtype == DType::kFloat16) return round_to<__half>(x);
  return x;
}

// torch.promote_types for the three dtypes.
__host__ __device__ __forceinline__ DType promote(DType a, DType b) { return a == b ? a : DType::kFloat32; }

template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T v[kWidth];
};

// kWidth elements of T from `row[column...]`. `packed`: contiguous, aligned and whole packs only; otherwise element by
// element, zero past the row's end.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* row, int64_t column, int64_t column_stride, int64_t width,
                                                     bool packed) {
  Pack<T, kWidth> pack;
  if (packed) {
    pack = *reinterpret_cast<const Pack<T, kWidth>*>(row + column);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      pack.v[i] = column + i < width ? row[(column + i) * column_stride] : from_float<T>(0.f);
    }
  }
  return pack;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_pack(T* row, int64_t column, int64_t column_stride, int64_t width, bool packed,
                                           const Pack<T, kWidth>& pack) {
  if (packed) {
    *reinterpret_cast<Pack<T, kWidth>*>(row + column) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i < width) row[(column + i) * column_stride] = pack.v[i];
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void unpack(const Pack<T, kWidth>& pack, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = to_float(pack.v[i]);
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> to_pack(const float (&x)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.v[i] = from_float<T>(x[i]);
  return pack;
}

// kWidth elements as fp32 from an operand whose dtype is known at run time (uniform over the grid). At most 16 bytes an
// access: an fp32 operand beside a 16-bit row takes two.
template <typename T, int kWidth>
__device__ __forceinline__ void load_floats_as(const void* data, int64_t offset, int64_t column, int64_t column_stride,
                                               int64_t width, bool packed, float (&x)[kWidth]) {
  constexpr int kStep = kWidth < kPackWidth<T> ? kWidth : kPackWidth<T>;
  const T* row = static_cast<const T*>(data) + offset;
#pragma unroll
  for (int s = 0; s < kWidth; s += kStep) {
    const Pack<T, kStep> pack = load_pack<T, kStep>(row, column + s, column_stride, width, packed);
#pragma unroll
    for (int i = 0; i < kStep; ++i) x[s + i] = to_float(pack.v[i]);
  }
}

template <int kWidth>
__device__ __forceinline__ void load_floats(const void* data, DType dtype, int64_t offset, int64_t column,
                                            int64_t column_stride, int64_t width, bool packed, float (&x)[kWidth]) {
  if (dtype == DType::kBFloat16) {
    load_floats_as<__nv_bfloat16, kWidth>(data, offset, column, column_stride, width, packed, x);
  } else if (dtype == DType::kFloat16) {
    load_floats_as<__half, kWidth>(data, offset, column, column_stride, width, packed, x);
  } else {
    load_floats_as<float, kWidth>(data, offset, column, column_stride, width, packed, x);
  }
}

// Whether every access of `width` elements at multiples of it may be one aligned access. `strides`: everything that
// moves the row's start.
inline bool is_packed(const void* data, DType dtype, int width, int64_t columns, int64_t column_stride,
                      const int64_t* strides, int count) {
  if (data == nullptr || column_stride != 1 || columns % width != 0) return false;
  const int bytes = width * element_size(dtype);
  const int64_t alignment = bytes < 16 ? bytes : 16;
  bool aligned = reinterpret_cast<uintptr_t>(data) % alignment == 0;
  for (int i = 0; i < count; ++i) aligned = aligned && strides[i] * element_size(dtype) % alignment == 0;
  return aligned;
}

}  // namespace ltx
