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

}  // namespace

std::function<void()> plain_gemm(const View& a, const View& b, const View& c) try {
  omp_set_num_threads(num_threads());  // oneDNN uses OpenMP threads
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  const auto at = [](const View& v) { return dnnl::memory(describe(v), engine, v.data); };
  const dnnl::matmul::primitive_desc pd({describe(a), describe(b), describe(c)}, engine);
  return [stream = dnnl::stream(engine), product = dnnl::matmul(pd), a = at(a), b = at(b),
          c = at(c)]() mutable {
    product.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
    stream.wait();
  };
} catch (const dnnl::error& e) {
  fail<ConfigError>("[bench] oneDNN: ", std::string_view(e.what()));
}

}  // namespace sheaf::bench
