// Packs: the 16 bytes that a thread loads and stores at once, and their conversion to fp32 and back.
//
// Which elements a thread owns is fixed by the dtype (a pack is 16 bytes of the row's dtype); whether a pack moves in
// one access or element by element depends on the operand's alignment and strides, so the same row gives the same bits
// from any view.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

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

// kWidth elements as they lie in memory, in 32-bit words: held as 16-bit elements, ptxas gives each its own register.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  static constexpr int kPerWord = static_cast<int>(sizeof(Word) / sizeof(T));
  Word word[kBytes / sizeof(Word)];

  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  __device__ __forceinline__ Bits bits(int i) const {
    return static_cast<Bits>(word[i / kPerWord] >> (i % kPerWord * 16));
  }
  __device__ __forceinline__ void set_bits(int i, Bits value) {
    if (i % kPerWord == 0) word[i / kPerWord] = 0;
    word[i / kPerWord] |= static_cast<Word>(static_cast<Word>(value) << (i % kPerWord * 16));
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ void unpack(const Pack<T, kWidth>& pack, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(pack.word[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      // A bf16 is the upper half of an fp32.
      x[i] = __uint_as_float(i % 2 == 0 ? static_cast<uint32_t>(pack.word[i / Pack<T, kWidth>::kPerWord]) << 16
                                        : pack.word[i / Pack<T, kWidth>::kPerWord] & 0xffff0000u);
    } else {
      x[i] = __half2float(__ushort_as_half(pack.bits(i)));
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> to_pack(const float (&x)[kWidth]) {
  Pack<T, kWidth> pack;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.word[i] = __float_as_uint(x[i]);
  } else if constexpr (kWidth % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
        pack.word[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[i], x[i + 1]);
        pack.word[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  } else {
    static_assert(kWidth == 1, "odd packs are single elements");
    const T value = from_float<T>(x[0]);
    pack.word[0] = *reinterpret_cast<const uint16_t*>(&value);
  }
  return pack;
}

// kWidth elements of T from `row[column...]`. `packed`: contiguous, aligned and whole packs only; otherwise element by
// element, zero past the row's end.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* row, int64_t column, int64_t column_stride, int64_t width,
                                                     bool packed) {
  using P = Pack<T, kWidth>;
  P pack;
  if (packed) {
    pack = *reinterpret_cast<const P*>(row + column);
  } else {
    const auto* bits = reinterpret_cast<const typename P::Bits*>(row);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      pack.set_bits(i, column + i < width ? bits[(column + i) * column_stride] : 0);
    }
  }
  return pack;
}

// kCount elements of a row of C, at most 16 bytes an access, held as they lie in memory.
template <typename C, int kCount>
struct Elements {
  static constexpr int kStep = kCount < kPackWidth<C> ? kCount : kPackWidth<C>;
  Pack<C, kStep> pack[kCount / kStep];

  __device__ __forceinline__ void load(const void* row, int64_t column) {
#pragma unroll
    for (int s = 0; s < kCount / kStep; ++s) {
      pack[s] = load_pack<C, kStep>(static_cast<const C*>(row) + column, s * kStep, 1, 0, true);
    }
  }
  __device__ __forceinline__ void get(float (&x)[kCount]) const {
#pragma unroll
    for (int s = 0; s < kCount / kStep; ++s) {
      float part[kStep];
      unpack(pack[s], part);
#pragma unroll
      for (int i = 0; i < kStep; ++i) x[s * kStep + i] = part[i];
    }
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ void store_pack(T* row, int64_t column, int64_t column_stride, int64_t width, bool packed,
                                           const Pack<T, kWidth>& pack) {
  using P = Pack<T, kWidth>;
  if (packed) {
    *reinterpret_cast<P*>(row + column) = pack;
  } else {
    auto* bits = reinterpret_cast<typename P::Bits*>(row);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i < width) bits[(column + i) * column_stride] = pack.bits(i);
    }
  }
}

// A pack that is read once. kPasses: it takes no place in the first cache, which keeps the vectors.
template <bool kPasses, typename P>
__device__ __forceinline__ P load_row_pack(const P* from) {
  static_assert(sizeof(P) == 16);
  if constexpr (!kPasses) return *from;
  P pack;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(from));
  return pack;
}

// A whole pack, in one access: as an assignment of a struct the compiler may write it word by word.
template <typename P>
__device__ __forceinline__ void store_row_pack(P* to, const P& pack) {
  static_assert(sizeof(P) == 16);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.word[0]), "r"(pack.word[1]),
               "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

// Asks for `bytes` to be brought into the L2 cache, a multiple of 16, as the address is: one thread asks for a row.
// Before compute capability 9.0 it does nothing.
__device__ __forceinline__ void prefetch(const void* data, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data), "r"(bytes));
#endif
}

// The same for one number, at any address.
__device__ __forceinline__ void prefetch_number(const void* data) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(data));
#endif
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
    float part[kStep];
    unpack(load_pack<T, kStep>(row, column + s, column_stride, width, packed), part);
#pragma unroll
    for (int i = 0; i < kStep; ++i) x[s + i] = part[i];
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

// The same for a head of `columns` elements, anywhere in its tensor.
inline bool is_packed_head(const void* data, DType dtype, int width, int64_t columns, const HeadStrides& stride) {
  const int64_t strides[] = {stride.batch, stride.sequence, stride.head};
  return is_packed(data, dtype, width, columns, stride.column, strides, 3);
}

}  // namespace ltx
