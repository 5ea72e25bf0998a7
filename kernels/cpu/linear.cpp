// quantbench::cpu_linear: x times a packed weight, transposed, for a few rows of x. The weight is
// read once, each of its rows by one thread, in an order that does not depend on how many there are.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "isa.h"
#include "linear.h"

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t ALONE = 64 << 10;  // bytes that one thread reads faster than others wake up

template <typename T>
void read_rows(const Tensor& x, int64_t padded, float* to) {
  const T* from = static_cast<const T*>(x.const_data_ptr());
  const int64_t M = x.size(0), K = x.size(1), row = x.stride(0), step = x.stride(1);
  for (int64_t m = 0; m < M; ++m, to += padded) {
    if (step == 1)
      for (int64_t k = 0; k < K; ++k) to[k] = float(from[m * row + k]);
    else
      for (int64_t k = 0; k < K; ++k) to[k] = float(from[m * row + k * step]);
    std::fill(to + K, to + padded, 0.0f);
  }
}

// quantize/activation.py's roundings, operation by operation. Returns the scale.
float round_row(Rounding how, float* x, int64_t K) {
  constexpr float SMALLEST = std::numeric_limits<float>::epsilon();
  float low = 0, high = 0;
  bool finite = true;
  for (int64_t k = 0; k < K; ++k) {
    low = std::min(low, x[k]);
    high = std::max(high, x[k]);
    finite &= std::isfinite(x[k]);
  }
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  if (how == Rounding::int8) {
    const float scale = std::max(std::max(-low, high) / 127.5f, SMALLEST);
    for (int64_t k = 0; k < K; ++k)
      x[k] = std::min(std::max(std::nearbyint(x[k] / scale), -128.0f), 127.0f);
    return scale;
  }
  const float scale = std::max((high - low) / 255.0f, SMALLEST);
  const float zero = std::min(std::max(-128.0f - std::nearbyint(low / scale), -128.0f), 127.0f);
  for (int64_t k = 0; k < K; ++k) {
    float code = std::min(std::max(std::nearbyint(x[k] / scale) + zero, -128.0f), 127.0f);
    x[k] = code - zero;
  }
  return scale;
}

struct Version {
  void (*prepare)(const Problem&, const float*);
  void (*multiply)(const Problem&, int64_t, int64_t);
};

Version version() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512vnni) return {prepare_avx512vnni, multiply_avx512vnni};
  if (isa() >= Isa::avx2) return {prepare_avx2, multiply_avx2};
#endif
  return {prepare_portable, multiply_portable};
}

// Memory for what x becomes, kept from call to call by each thread that calls.
struct Scratch {
  std::vector<char> bytes;
  char* next = nullptr;

  void reserve(int64_t size) {
    if (int64_t(bytes.size()) < size + 64) bytes.resize(size + 64);
    next = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
  }
  template <typename T>
  T* take(int64_t count) {
    T* found = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 63) / 64 * 64;
    return found;
  }
};

Tensor linear(const Tensor& x, const Tensor& packed, int64_t rows) {
  STD_TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte &&
                      packed.numel() >= int64_t(sizeof(Header)),
                  "this is no weight packed by cpu_pack_linear");
  Header header;
  const uint8_t* bytes = static_cast<const uint8_t*>(packed.const_data_ptr());
  std::memcpy(&header, bytes, sizeof header);
  STD_TORCH_CHECK(header.magic == MAGIC, "this is no weight packed by cpu_pack_linear");
  const Geometry g = geometry(header);
  STD_TORCH_CHECK(packed.numel() == int64_t(sizeof header) + g.blocks * g.block_bytes,
                  "a packed weight has not the size that its header says");
  STD_TORCH_CHECK(header.rows == rows, "the weight has ", header.rows, " rows, not ", rows);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == header.columns,
                  "x has to be (M, ", header.columns, ")");
  const ScalarType type = x.scalar_type();
  const int64_t M = x.size(0), padded = g.padded_columns();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half, "x has to be float32, bfloat16 or float16");
  Tensor y = torch::stable::new_empty(x, {M, rows});
  if (!M || !rows) return y;

  const bool floats = as_floats(header.coding), rounded = header.rounding != Rounding::none;
  Problem problem{};
  problem.header = &header;
  problem.geometry = g;
  problem.blocks = bytes + sizeof header;
  problem.outputs = M;
  problem.tokens = type == ScalarType::Float && !floats && !rounded ? 2 * M : M;
  problem.y = y.mutable_data_ptr();
  problem.y_type = type == ScalarType::Float ? 0 : type == ScalarType::BFloat16 ? 1 : 2;
  thread_local Scratch scratch;
  const int64_t tokens = problem.tokens;
  scratch.reserve(4 * (M * (padded + 16) + tokens * (padded + padded / 8 + g.chunks + 64)));
  float* numbers = scratch.take<float>(M * padded);
  float* token_scales = scratch.take<float>(M);
  problem.floats = scratch.take<float>(floats ? tokens * padded : 0);
  problem.quads = scratch.take<int32_t>(floats ? 0 : tokens * padded / 2);
  problem.sums = scratch.take<int32_t>(floats ? 0 : tokens * padded / 8);
  problem.scales = scratch.take<float>(floats ? 0 : tokens * g.chunks);
  switch (type) {
    case ScalarType::Float: read_rows<float>(x, padded, numbers); break;
    case ScalarType::BFloat16: read_rows<BFloat16>(x, padded, numbers); break;
    default: read_rows<Half>(x, padded, numbers); break;
  }
  if (rounded) {
    for (int64_t m = 0; m < M; ++m)
      token_scales[m] = round_row(header.rounding, numbers + m * padded, header.columns);
    problem.token_scales = token_scales;
  }
  const Version run = version();
  run.prepare(problem, numbers);
  const bool alone = g.blocks * g.block_bytes <= ALONE;
  torch::stable::parallel_for(0, g.blocks, alone ? g.blocks : 1, [&](int64_t begin, int64_t end) {
    run.multiply(problem, begin, end);
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_linear", TORCH_BOX(&linear));
}
