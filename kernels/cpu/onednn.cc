#include "sheaf/kernels/cpu/onednn.h"

#include <mutex>
#include <unordered_map>

#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "sheaf/core/error.h"

namespace sheaf::kernels::cpu {
namespace {

using dnnl::memory;

const dnnl::engine& cpu_engine() {
  static const dnnl::engine* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

memory::data_type data_type(DType d) {
  return d == kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc describe(const MatrixLayout& m) {
  // A stride along a dimension of size 1 means nothing, but oneDNN would take it for a strange
  // layout.
  memory::dims strides{m.row_stride, m.col_stride};
  if (m.cols == 1) strides[1] = 1;
  if (m.rows == 1) strides[0] = m.col_stride == 1 || m.cols == 1 ? m.cols : 1;
  return memory::desc({m.rows, m.cols}, data_type(m.dtype), strides);
}

constexpr size_t kAlign = 128;
size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

class DnnlProduct : public Product {
 public:
  explicit DnnlProduct(const ProductSpec& spec) : plain_b_(describe(spec.b)) {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (spec.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    const memory::desc b = spec.pack
                               ? memory::desc({spec.b.rows, spec.b.cols}, data_type(spec.b.dtype),
                                              memory::format_tag::any)
                               : plain_b_;
    const memory::desc a = describe(spec.a), c = describe(spec.c);
    const auto description =
        spec.bias ? dnnl::matmul::desc(a, b,
                                       memory::desc({1, spec.c.cols}, data_type(spec.bias_dtype),
                                                    memory::format_tag::ab),
                                       c)
                  : dnnl::matmul::desc(a, b, c);
    const dnnl::matmul::primitive_desc pd(description, attributes, cpu_engine());
    matmul_ = dnnl::matmul(pd);
    a_ = pd.src_desc(), b_ = pd.weights_desc(), c_ = pd.dst_desc(), scratch_ = pd.scratchpad_desc();
    if (spec.bias) bias_ = pd.bias_desc();
    bytes_ = aligned(scratch_.get_size());
    if (spec.pack && b_ != plain_b_) {
      const dnnl::reorder::primitive_desc rd(cpu_engine(), plain_b_, cpu_engine(), b_,
                                             attributes_for_reorder());
      reorder_ = dnnl::reorder(rd);
      reorder_scratch_ = rd.scratchpad_desc();
      packed_at_ = bytes_;
      bytes_ += aligned(b_.get_size());
      reorder_scratch_at_ = bytes_;
      bytes_ += aligned(reorder_scratch_.get_size());
      packs_ = true;
    }
  }

  size_t workspace() const override { return bytes_; }

  void run(const void* a, const void* b, const void* bias, void* c,
           void* workspace) const override {
    const dnnl::engine& engine = cpu_engine();
    dnnl::stream stream(engine);
    char* base = static_cast<char*>(workspace);
    auto at = [&](const memory::desc& d, const void* p) {
      return memory(d, engine, const_cast<void*>(p));
    };
    if (packs_) {
      reorder_.execute(stream,
                       {{DNNL_ARG_FROM, at(plain_b_, b)},
                        {DNNL_ARG_TO, at(b_, base + packed_at_)},
                        {DNNL_ARG_SCRATCHPAD, at(reorder_scratch_, base + reorder_scratch_at_)}});
      b = base + packed_at_;
    }
    std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, at(a_, a)},
                                              {DNNL_ARG_WEIGHTS, at(b_, b)},
                                              {DNNL_ARG_DST, at(c_, c)},
                                              {DNNL_ARG_SCRATCHPAD, at(scratch_, base)}};
    if (bias) arguments.emplace(DNNL_ARG_BIAS, at(bias_, bias));
    matmul_.execute(stream, arguments);
  }

 private:
  static dnnl::primitive_attr attributes_for_reorder() {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return attributes;
  }

  memory::desc plain_b_, a_, b_, c_, bias_, scratch_, reorder_scratch_;
  dnnl::matmul matmul_;
  dnnl::reorder reorder_;
  size_t bytes_ = 0, packed_at_ = 0, reorder_scratch_at_ = 0;
  bool packs_ = false;
};

struct SpecHash {
  size_t operator()(const ProductSpec& s) const {
    size_t h = static_cast<size_t>(s.threads);
    auto mix = [&](int64_t x) {
      h = (h ^ static_cast<size_t>(x)) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
    };
    for (const MatrixLayout* m : {&s.a, &s.b, &s.c})
      mix(m->rows), mix(m->cols), mix(m->row_stride), mix(m->col_stride),
          mix(static_cast<int64_t>(m->dtype));
    mix(s.bias + 2 * s.accumulate + 4 * s.pack + 8 * static_cast<int>(s.bias_dtype));
    return h;
  }
};

/// oneDNN fixes a primitive's thread count when it is made.
class OmpThreads {
 public:
  explicit OmpThreads(int threads) : before_(omp_get_max_threads()) {
    omp_set_num_threads(threads);
  }
  ~OmpThreads() { omp_set_num_threads(before_); }

 private:
  int before_;
};

}  // namespace

std::shared_ptr<const Product> product(const ProductSpec& spec) {
  // Shapes are few in training; a program that keeps inventing new ones starts over rather than
  // growing without end.
  constexpr size_t kMost = 4096;
  static std::mutex& mutex = *new std::mutex;
  static auto& cache =
      *new std::unordered_map<ProductSpec, std::shared_ptr<const Product>, SpecHash>;
  std::lock_guard lock(mutex);
  auto found = cache.find(spec);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kMost) cache.clear();
  OmpThreads threads(spec.threads);
  try {
    return cache.emplace(spec, std::make_shared<DnnlProduct>(spec)).first->second;
  } catch (const dnnl::error& e) {
    fail<ConfigError>("[matmul] oneDNN refuses a product of [", spec.a.rows, ",", spec.a.cols,
                      "] and [", spec.b.rows, ",", spec.b.cols, "] in ", spec.a.dtype, ": ",
                      std::string_view(e.what()));
  }
}

bool has_bf16_products() {
  static const bool has = dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core;
  return has;
}

}  // namespace sheaf::kernels::cpu
