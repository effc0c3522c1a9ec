// Compiles the kernels of one .cpp file once per instruction set.
//
// The file defines LTX_ISA_FILE as its own name and includes this header, which includes the file again for every
// instruction set: on x86-64 as ltx::cpu::baseline (SSE2), ltx::cpu::avx2 and ltx::cpu::avx512, elsewhere as
// ltx::cpu::baseline alone. A region pragma sets the target, so that no -march flag is needed and helpers, templates
// and vector types all belong to the instruction set of the pass. (target_clones would clone one function only and
// needs ifunc; a target attribute does not reach the templates that a function calls.)
//
// Within a pass LTX_ISA is the namespace and LTX_ISA_LEVEL is 0, 1 or 2. Standard headers must be included before, as
// they must not be compiled for a target. LTX_CPU_MAX_ISA limits the choice at run time (to test the lower levels).

#include <cmath>

#include "cpu/parallel.h"
#include "ltx/params.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "the CPU backend knows x86_64 and aarch64"
#endif

#ifndef LTX_CPU_MAX_ISA
#define LTX_CPU_MAX_ISA 2
#endif

#define LTX_INLINE inline __attribute__((always_inline))
#define LTX_COLD inline __attribute__((noinline, cold))

#if defined(__GNUC__) && !defined(__clang__)
// Vectors are passed by value only between functions of one instruction set in one file; the warning is about others.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__x86_64__)

#define LTX_ISA avx512
#define LTX_ISA_LEVEL 2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")
#endif
#include "cpu/simd.h"
#include LTX_ISA_FILE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LTX_ISA
#undef LTX_ISA_LEVEL

#define LTX_ISA avx2
#define LTX_ISA_LEVEL 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#include "cpu/simd.h"
#include LTX_ISA_FILE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LTX_ISA
#undef LTX_ISA_LEVEL

#endif  // __x86_64__

#define LTX_ISA baseline
#define LTX_ISA_LEVEL 0
#include "cpu/simd.h"
#include LTX_ISA_FILE
#undef LTX_ISA
#undef LTX_ISA_LEVEL

namespace ltx {
namespace cpu {
namespace {

#if defined(__x86_64__)
inline int best_isa() {
  static const int best = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    // __builtin_cpu_supports("f16c") is younger than the compilers supported; it also asks the OS for the rest.
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    if (!f16c || !__builtin_cpu_supports("avx2")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 2
               : 1;
  }();
  return best < LTX_CPU_MAX_ISA ? best : LTX_CPU_MAX_ISA;
}
#define LTX_DISPATCH(function, ...)                                 \
  do {                                                              \
    const int isa = ::ltx::cpu::best_isa();                         \
    if (isa == 2) return ::ltx::cpu::avx512::function(__VA_ARGS__); \
    if (isa == 1) return ::ltx::cpu::avx2::function(__VA_ARGS__);   \
    return ::ltx::cpu::baseline::function(__VA_ARGS__);             \
  } while (false)
#else
#define LTX_DISPATCH(function, ...) return ::ltx::cpu::baseline::function(__VA_ARGS__)
#endif

}  // namespace
}  // namespace cpu
}  // namespace ltx
