// Steps on the channels of a pixel, which are an fp32 row: each is rounded to the tensors' dtype.
//
// Included once per instruction set by the ops on channels-last tensors, after simd.h; hence no include guard.

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

constexpr int64_t kStep = kWide * kLanes;

// Floats of a row that every loop below may touch.
inline int64_t padded(int64_t count) { return round_up(count, kStep > kSumLanes ? kStep : kSumLanes); }

inline char* at(const void* data, DType dtype, int64_t element) {
  return static_cast<char*>(const_cast<void*>(data)) + element * static_cast<int64_t>(size_of(dtype));
}

// A contiguous vector as an fp32 row; null where the operand is absent.
inline const float* widened(float* row, const void* data, DType dtype, int64_t element, int64_t count) {
  if (data == nullptr) return nullptr;
  expand(row, at(data, dtype, element), dtype, 1, count);
  return row;
}

// row = r(step(row)) over whole vectors, for fp32 rows that are padded to them.
template <class Step>
LTX_INLINE void each(float* row, int64_t count, DType dtype, const Step& step) {
  for (int64_t c = 0; c < count; c += kLanes) store(row + c, round_to(dtype, step(c, load(row + c))));
}

inline void add(float* row, const float* other, int64_t count, DType dtype) {
  if (other == nullptr) return;
  each(row, count, dtype, [&](int64_t c, F x) { return x + load(other + c); });
}

inline void silu(float* row, int64_t count, DType dtype) {
  for (int64_t c = 0; c < count; c += kStep) {
    Wide x = load_wide(row + c);
    x = times_sigmoid(x, x);
    LTX_EACH_PART x.part[p] = round_to(dtype, x.part[p]);
    store_wide(row + c, x);
  }
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx
