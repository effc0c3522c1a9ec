// torch's headers of its stable ABI, without iostreams: include this file, and none of them.
//
// The library uses no iostreams and no locales, because libstdc++ keeps their state in objects that exist once. Where a
// toolchain links a part of libstdc++ statically, a process has two sets of these objects, and code that mixes them
// crashes when it formats a number. torch's headers use iostreams in four places.
#pragma once

// 1. STD_TORCH_CHECK formats the text of its errors with a stream, unless torch is told to leave the texts out. These
// checks find mistakes in the registration of an op. What users see comes from tensor_checks.h.
#define STRIP_ERROR_MESSAGES

// 2. <iostream> sets up std::cout when a library is loaded. Nothing here prints, and libstdc++ skips the header where
// its include guard is defined.
#include <istream>
#include <ostream>
#define _GLIBCXX_IOSTREAM 1

// 3. TORCH_ERROR_CODE_CHECK. The functions of the headers below use this one.
#include <torch/headeronly/util/shim_utils.h>

#include <stdexcept>
#include <string>

namespace ltx::host {
[[noreturn]] inline void fail_call(const char* call, const char* file, int line) {
  throw std::runtime_error(std::string(call) + " API call failed at " + file + ", line " + std::to_string(line));
}
}  // namespace ltx::host

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                 \
  if ((call) != TORCH_SUCCESS) {                     \
    ltx::host::fail_call(#call, __FILE__, __LINE__); \
  }

// 4. STABLE_TORCH_ERROR_CODE_CHECK, from torch 2.14 on. macros.h defines a function for it that prints to std::cerr.
// The macro below replaces torch's, so that nothing calls that function, and a declaration of std::cerr is enough.
namespace std {
extern ostream cerr;
}
#include <torch/csrc/stable/macros.h>

#undef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
