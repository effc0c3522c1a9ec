// The part of cuBLASLt that linear.cpp calls, found in the library that torch has loaded. Its C interface is stable,
// and so is what is declared here (the same in CUDA 12.9 and 13): a build needs neither the library nor its headers,
// and the extension no dependency that torch has not.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ltx::cublaslt {

// Codes of cuBLASLt's enumerations.
constexpr int kSuccess = 0;
constexpr int kCompute32F = 68;                          // CUBLAS_COMPUTE_32F
constexpr int kFloat32 = 0, kBFloat16 = 14, kE4M3 = 28;  // cudaDataType
constexpr int32_t kTranspose = 1;                        // CUBLAS_OP_T
constexpr uint32_t kEpilogueBias = 4;                    // CUBLASLT_EPILOGUE_BIAS
constexpr int32_t kScaleOfEachRow = 3;                   // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
enum DescAttribute {                                     // CUBLASLT_MATMUL_DESC_...
  kTransA = 3,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kFastAccum = 25,
  kBiasDataType = 26,
  kAScaleMode = 31,
  kBScaleMode = 32,
};
enum PreferenceAttribute {  // CUBLASLT_MATMUL_PREF_...
  kMaxWorkspaceBytes = 1,
  kMinAlignmentABytes = 5,
  kMinAlignmentBBytes = 6,
  kMinAlignmentCBytes = 7,
  kMinAlignmentDBytes = 8,
};

using Handle = struct HandleOpaque*;
using Desc = struct DescOpaque*;
using Layout = struct LayoutOpaque*;
using Preference = struct PreferenceOpaque*;

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

struct Api {
  size_t (*GetVersion)() = nullptr;
  int (*Create)(Handle*) = nullptr;
  int (*MatmulDescCreate)(Desc*, int compute_type, int scale_type) = nullptr;
  int (*MatmulDescDestroy)(Desc) = nullptr;
  int (*MatmulDescSetAttribute)(Desc, int attribute, const void* value, size_t bytes) = nullptr;
  int (*MatrixLayoutCreate)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*MatrixLayoutDestroy)(Layout) = nullptr;
  int (*MatmulPreferenceCreate)(Preference*) = nullptr;
  int (*MatmulPreferenceDestroy)(Preference) = nullptr;
  int (*MatmulPreferenceSetAttribute)(Preference, int attribute, const void* value, size_t bytes) = nullptr;
  int (*MatmulAlgoGetHeuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference, int wanted,
                                Heuristic* results, int* found) = nullptr;
  int (*Matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, size_t workspace_bytes,
                void* stream) = nullptr;
};

// Null without a library that knows scales of each row.
inline const Api* api() {
  constexpr size_t kFirstVersion = 120900;
  static const Api* const found = []() -> const Api* {
    void* library = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (!library) library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (!library) return nullptr;
    static Api api;
    bool complete = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      complete = complete && function;
    };
    find(api.GetVersion, "cublasLtGetVersion");
    find(api.Create, "cublasLtCreate");
    find(api.MatmulDescCreate, "cublasLtMatmulDescCreate");
    find(api.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
    find(api.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    find(api.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    find(api.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    find(api.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    find(api.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    find(api.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    find(api.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(api.Matmul, "cublasLtMatmul");
    return complete && api.GetVersion() >= kFirstVersion ? &api : nullptr;
  }();
  return found;
}

}  // namespace ltx::cublaslt
