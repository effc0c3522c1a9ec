// LTX_KERNELS_FORCE takes the choice of kernel and geometry out of the launchers' hands, so that tests reach every path
// with any shape. Read once per process. Comma-separated:
//   norm=packed|general|elements           the kernel of the norm family; elements: the general one without packs
//   norm_packs=1|2|4                       16-byte packs of a row that a thread owns: the order of a row's sums
//   rotary=packed|general|elements|single  the kernel of the rotary family; single: packs of one element
//   glu=packed|general                     the kernel of the activations
//   attention=packed|general               the kernel of the attention; packed: tensor cores
//   quant=packed|general                   the kernel of the quantising ops
//   quant_packs=1|2|4                      as norm_packs, for these
//   channels_last=packed|general           the kernel of the ops on channels-last video tensors
//   linear=cublaslt|torch                  what scaled_linear's op calls
// Anything else is an error, and so is a choice that a call cannot use.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ltx {

enum class Kernel { kAny, kPacked, kGeneral, kElements, kSingle };

struct Forced {
  Kernel norm = Kernel::kAny, rotary = Kernel::kAny, glu = Kernel::kAny, attention = Kernel::kAny, quant = Kernel::kAny,
         channels_last = Kernel::kAny, linear = Kernel::kAny;
  int norm_packs = 0, quant_packs = 0;
};

[[noreturn]] inline void fail_forced(const std::string& expected, const std::string& got) {
  throw std::runtime_error("LTX_KERNELS_FORCE: expected " + expected + ", got " + got);
}

inline Forced parse_forced(const std::string& text) {
  Forced forced;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    begin = end + 1;
    bool known = false;
    const auto choose = [&](const char* choice, auto& field, auto value) {
      if (item != choice) return;
      field = value;
      known = true;
    };
    choose("norm=packed", forced.norm, Kernel::kPacked);
    choose("norm=general", forced.norm, Kernel::kGeneral);
    choose("norm=elements", forced.norm, Kernel::kElements);
    choose("norm_packs=1", forced.norm_packs, 1);
    choose("norm_packs=2", forced.norm_packs, 2);
    choose("norm_packs=4", forced.norm_packs, 4);
    choose("rotary=packed", forced.rotary, Kernel::kPacked);
    choose("rotary=general", forced.rotary, Kernel::kGeneral);
    choose("rotary=elements", forced.rotary, Kernel::kElements);
    choose("rotary=single", forced.rotary, Kernel::kSingle);
    choose("glu=packed", forced.glu, Kernel::kPacked);
    choose("glu=general", forced.glu, Kernel::kGeneral);
    choose("attention=packed", forced.attention, Kernel::kPacked);
    choose("attention=general", forced.attention, Kernel::kGeneral);
    choose("quant=packed", forced.quant, Kernel::kPacked);
    choose("quant=general", forced.quant, Kernel::kGeneral);
    choose("quant_packs=1", forced.quant_packs, 1);
    choose("quant_packs=2", forced.quant_packs, 2);
    choose("quant_packs=4", forced.quant_packs, 4);
    choose("channels_last=packed", forced.channels_last, Kernel::kPacked);
    choose("channels_last=general", forced.channels_last, Kernel::kGeneral);
    choose("linear=cublaslt", forced.linear, Kernel::kPacked);
    choose("linear=torch", forced.linear, Kernel::kGeneral);
    if (!known) fail_forced("a choice that kernel_src/ltx/force.cuh lists", "'" + item + "'");
  }
  return forced;
}

inline const Forced& forced() {
  static const Forced value = [] {
    const char* text = std::getenv("LTX_KERNELS_FORCE");
    return parse_forced(text ? text : "");
  }();
  return value;
}

// Whether a call takes the packed kernel; `fits`: it can.
inline bool takes_packed(const char* family, Kernel kernel, bool fits) {
  if (kernel == Kernel::kPacked && !fits) {
    fail_forced("a kernel that takes this call's shapes, strides and dtypes", std::string(family) + "=packed");
  }
  return fits && (kernel == Kernel::kAny || kernel == Kernel::kPacked);
}

}  // namespace ltx
