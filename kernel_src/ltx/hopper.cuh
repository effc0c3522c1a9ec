// Hopper's asynchronous units: barriers in shared memory, tensor copies (TMA), products of warpgroups (wgmma).
//
// A warpgroup is four consecutive warps. Tiles in shared memory are stacks of rows of 128 bytes in the order of the
// 128-byte swizzle, which TMA writes and wgmma reads; heads of 128 columns are two such stacks. All functions take
// addresses of the shared window (32 bits): from pointers the compiler would compute them again at each use.
#pragma once

#include <cuda.h>  // CUtensorMap: types alone, no function of the driver is linked
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ltx {

// ---- mbarrier

// A position in a ring of kSize slots, and the parity of the round.
template <int kSize>
struct Ring {
  int at = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++at == kSize) at = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes the initialised barriers visible to TMA. A __syncthreads makes them visible to the block's threads.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over. The phase before the first one counts as over and has parity 1.
__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Named barriers: a synchronisation point of `threads` threads; some may pass without waiting.

__device__ __forceinline__ void named_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Registers of a warpgroup. ptxas wants the number as a constant.

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- TMA

// Copies the box of a five-dimensional map that starts at these coordinates; its bytes complete at the barrier.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int x0, int x1, int x2,
                                         int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// ---- wgmma
//
// Products are asynchronous: between the commit of a group and the wait for it, nothing may touch its registers. The
// compiler does not see that, so results pass through `hold` where they become valid.

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Keeps what follows after the computation of x, which is not negative. ptxas would move a wait for products before the
// computation that has to run beside them. It moves nothing across a loop.
__device__ __forceinline__ void stay_behind(float x) {
  asm volatile(
      "{\n"
      ".reg .pred negative;\n"
      "again_%=:\n"
      "setp.lt.f32 negative, %0, 0f00000000;\n"
      "vote.sync.any.pred negative, negative, 0xffffffff;\n"
      "@!negative bra.uni done_%=;\n"
      "nanosleep.u32 32;\n"
      "bra.uni again_%=;\n"
      "done_%=:\n"
      "}" ::"f"(x)
      : "memory");
}

constexpr int kSwizzleBytes = 128;  // of a row of a stack

// The descriptor of a tile in shared memory. A sum with n describes the tile n * 16 bytes further. `stack_bytes`: from
// one stack of rows to the next, for tiles that are read along their rows (a stack holds 64 of the columns).
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t tile, int stack_bytes = 0) {
  constexpr uint64_t kSwizzle128 = 1, kEightRows = 8 * kSwizzleBytes / 16;
  return kSwizzle128 << 62 | kEightRows << 32 | static_cast<uint64_t>(stack_bytes / 16) << 16 | (tile & 0x3ffff) / 16;
}

// Products of 64 rows, 16 columns of a (16 rows of b) at a time, with kColumns columns in fp32. Of each 8 columns a
// thread holds (2t, 2t + 1) of rows g and g + 8 of its warp's 16 rows, with g = lane / 4 and t = lane % 4:
// sum[4 * block + 2 * half + i].
//   start:         sum  = a b^T    a and b in shared memory, both [row][column] ("K-major")
//   add:           sum += a b^T
//   add_registers: sum += a b      a: a thread's four words; b in shared memory, [row][column]
template <typename T, int kColumns>
struct Products;

#define LTX_FLOATS_8(constraint, i)                                                                                   \
  constraint(sum[i]), constraint(sum[i + 1]), constraint(sum[i + 2]), constraint(sum[i + 3]), constraint(sum[i + 4]), \
      constraint(sum[i + 5]), constraint(sum[i + 6]), constraint(sum[i + 7])
#define LTX_FLOATS_32(constraint, i)                                                              \
  LTX_FLOATS_8(constraint, i), LTX_FLOATS_8(constraint, i + 8), LTX_FLOATS_8(constraint, i + 16), \
      LTX_FLOATS_8(constraint, i + 24)
#define LTX_OPERANDS_32(constraint) LTX_FLOATS_32(constraint, 0)
#define LTX_OPERANDS_40(constraint) LTX_FLOATS_32(constraint, 0), LTX_FLOATS_8(constraint, 32)
#define LTX_OPERANDS_64(constraint) LTX_FLOATS_32(constraint, 0), LTX_FLOATS_32(constraint, 32)
#define LTX_SUMS_32                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define LTX_SUMS_40 LTX_SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LTX_SUMS_64                                                                                   \
  LTX_SUMS_40                                                                                         \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
  "%59, %60, %61, %62, %63"

// `sums`, p0 to p4: the numbers of the operands, of which the sums come first.
#define LTX_PRODUCTS(T, type, columns, operands, sums, p0, p1, p2, p3, p4)                                           \
  template <>                                                                                                        \
  struct Products<T, columns> {                                                                                      \
    using Sum = float[columns / 2];                                                                                  \
    static __device__ __forceinline__ void start(Sum& sum, uint64_t a, uint64_t b) {                                 \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" sums "}, " p0 ", " p1  \
                   ", 0, 1, 1, 0, 0;"                                                                                \
                   : operands("=f")                                                                                  \
                   : "l"(a), "l"(b));                                                                                \
    }                                                                                                                \
    static __device__ __forceinline__ void add(Sum& sum, uint64_t a, uint64_t b) {                                   \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" sums "}, " p0 ", " p1  \
                   ", 1, 1, 1, 0, 0;"                                                                                \
                   : operands("+f")                                                                                  \
                   : "l"(a), "l"(b));                                                                                \
    }                                                                                                                \
    static __device__ __forceinline__ void add_registers(Sum& sum, const uint32_t* a, uint64_t b) {                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" sums "}, {" p0 ", " p1 \
                   ", " p2 ", " p3 "}, " p4 ", 1, 1, 1, 1;"                                                          \
                   : operands("+f")                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }                                                                                                                \
  };
#define LTX_PRODUCTS_OF_BOTH(columns, operands, sums, p0, p1, p2, p3, p4)          \
  LTX_PRODUCTS(__nv_bfloat16, "bf16", columns, operands, sums, p0, p1, p2, p3, p4) \
  LTX_PRODUCTS(__half, "f16", columns, operands, sums, p0, p1, p2, p3, p4)

LTX_PRODUCTS_OF_BOTH(64, LTX_OPERANDS_32, LTX_SUMS_32, "%32", "%33", "%34", "%35", "%36")
LTX_PRODUCTS_OF_BOTH(80, LTX_OPERANDS_40, LTX_SUMS_40, "%40", "%41", "%42", "%43", "%44")
LTX_PRODUCTS_OF_BOTH(128, LTX_OPERANDS_64, LTX_SUMS_64, "%64", "%65", "%66", "%67", "%68")

// The same with integers of 8 bits, 32 columns at a time, and sums of 32 bits.
template <int kColumns>
struct IntegerProducts;
template <>
struct IntegerProducts<80> {
  using Sum = uint32_t[40];
  static __device__ __forceinline__ void start(Sum& sum, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n80k32.s32.s8.s8 {" LTX_SUMS_40 "}, %40, %41, 0;"
                 : LTX_OPERANDS_40("=r")
                 : "l"(a), "l"(b));
  }
  static __device__ __forceinline__ void add(Sum& sum, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n80k32.s32.s8.s8 {" LTX_SUMS_40 "}, %40, %41, 1;"
                 : LTX_OPERANDS_40("+r")
                 : "l"(a), "l"(b));
  }
};

#undef LTX_PRODUCTS_OF_BOTH
#undef LTX_PRODUCTS
#undef LTX_SUMS_64
#undef LTX_SUMS_40
#undef LTX_SUMS_32
#undef LTX_OPERANDS_64
#undef LTX_OPERANDS_40
#undef LTX_OPERANDS_32
#undef LTX_FLOATS_32
#undef LTX_FLOATS_8

}  // namespace ltx
