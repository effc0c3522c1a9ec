// The schema, the checks, and the way from tensors to pointers; one source for both backends.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#ifdef CUDA_KERNEL
#include <torch/csrc/stable/accelerator.h>
#endif

#include <stdexcept>
#include <string>

#include "registration.h"
#include "relu_squared_gate.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

[[noreturn]] void fail(const std::string& argument, const std::string& expected, const std::string& got) {
  throw std::runtime_error(argument + ": expected " + expected + ", got " + got);
}

std::string shape_text(const Tensor& tensor) {
  std::string text;
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d ? ", " : "") + std::to_string(tensor.size(d));
  return "shape [" + text + "]";
}

void check(const char* name, const Tensor& tensor, const Tensor& like) {
  using torch::headeronly::toString;
  if (tensor.scalar_type() != like.scalar_type()) {
    fail(name, toString(like.scalar_type()), toString(tensor.scalar_type()));
  }
  if (shape_text(tensor) != shape_text(like)) fail(name, shape_text(like), shape_text(tensor));
  if (tensor.device() != like.device()) fail(name, "a tensor on the device of gate", "one on another device");
  if (!tensor.is_contiguous()) fail(name, "a contiguous tensor", "one with gaps or in another order");
}

Tensor forward(const Tensor& gate, const Tensor& up) {
  const ScalarType dtype = gate.scalar_type();
  const bool bfloat16 = dtype == ScalarType::BFloat16;
  if (!bfloat16 && dtype != ScalarType::Float) {
    fail("gate", "Float or BFloat16", torch::headeronly::toString(dtype));
  }
  check("gate", gate, gate);
  check("up", up, gate);

  Tensor out = torch::stable::empty_like(gate);
  if (gate.numel() == 0) return out;
  void* stream = nullptr;
#ifdef CUDA_KERNEL
  const torch::stable::accelerator::DeviceGuard guard(gate.get_device_index());
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(gate.get_device_index(), &stream) == 0, "no CUDA stream");
#endif
  relu_squared_gate({gate.const_data_ptr(), up.const_data_ptr(), out.mutable_data_ptr(), gate.numel(), bfloat16},
                    stream);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("relu_squared_gate(Tensor gate, Tensor up) -> Tensor");
}

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("relu_squared_gate", TORCH_BOX(&forward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
