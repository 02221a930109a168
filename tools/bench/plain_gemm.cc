#include "sheaf/tools/bench/plain_gemm.h"

#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>

#include "sheaf/core/error.h"
#include "sheaf/core/parallel.h"

namespace sheaf::bench {
namespace {

dnnl::memory::desc describe(const View& v) {
  return {{v.shape[0], v.shape[1]},
          v.dtype == kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32,
          dnnl::memory::dims{v.strides[0], v.strides[1]}};
}

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

}  // namespace

bool has_plain_gemm(DType dtype) try {
  const View square{nullptr, dtype, {16, 16}, {16, 1}};
  const dnnl::matmul::primitive_desc pd({describe(square), describe(square), describe(square)}, cpu());
  return true;
} catch (const dnnl::error&) {
  return false;
}

std::function<void()> plain_gemm(const View& a, const View& b, const View& c) try {
  omp_set_num_threads(num_threads());  // oneDNN uses OpenMP threads
  const auto at = [](const View& v) { return dnnl::memory(describe(v), cpu(), v.data); };
  const dnnl::matmul::primitive_desc pd({describe(a), describe(b), describe(c)}, cpu());
  return [stream = dnnl::stream(cpu()), product = dnnl::matmul(pd), a = at(a), b = at(b),
          c = at(c)]() mutable {
    product.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
    stream.wait();
  };
} catch (const dnnl::error& e) {
  fail<ConfigError>("[bench] oneDNN: ", std::string_view(e.what()));
}

}  // namespace sheaf::bench
