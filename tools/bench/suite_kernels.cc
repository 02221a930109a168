// kernels: those that wait for memory. Each is charged the bytes that it cannot avoid, every
// operand read once and every result written once, and stands beside a copy of as many bytes.
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cross_entropy.h"
#include "sheaf/kernels/elementwise.h"
#include "sheaf/kernels/embedding.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/norm.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/kernels/random.h"
#include "sheaf/kernels/softmax.h"
#include "sheaf/kernels/sum_of_squares.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

namespace cpu = kernels::cpu;
using kernels::BinaryOp;
using kernels::UnaryOp;

class Kernels {
 public:
  explicit Kernels(Session& session)
      : session_(session), rows_(session.options().quick ? 64 : 16384) {}

  /// Everything of one dtype on activations [rows, 768].
  void activations(DType dtype);
  /// What handles parameters, tokens and logits.
  void parameters();

 private:
  /// Adds the line `name` if it is asked for. `make` is called then, and returns the kernel's call
  /// and its bytes; what it allocates lives as long as the call.
  template <class Make>
  void measure(const std::string& name, Make&& make) {
    if (!session_.wants("kernels", name)) return;
    Comparison c{.name = name, .unit = Unit::gigabytes_per_second};
    c.by_memory = true;
    c.peer = "copy";
    c.prepare = [&] {
      auto [run, bytes] = make();
      c.run = std::move(run);
      c.amount = c.peer_amount = bytes;
      c.peer_run = [this, bytes = bytes] { session_.probe().run_copy(static_cast<size_t>(bytes)); };
    };
    session_.compare("kernels", c);
  }

  // A call that owns its arrays.
  using Call = std::pair<std::function<void()>, double>;
  using Arrays = std::vector<std::shared_ptr<Array>>;
  static std::shared_ptr<Array> array(DType dtype, const Shape& shape) {
    return std::make_shared<Array>(dtype, shape);
  }

  /// `f` on `count` arrays of one type, all of them read or written.
  template <class F>
  void elementwise(const std::string& name, DType dtype, int count, F f) {
    measure(name + "-" + std::string(sheaf::name(dtype)), [&]() -> Call {
      Arrays a;
      for (int i = 0; i < count; ++i) a.push_back(array(dtype, {rows_, kWidth}));
      const double bytes = a[0]->bytes() * count;
      return {[a, f] { f(a); }, bytes};
    });
  }

  static constexpr int64_t kWidth = 768;
  Session& session_;
  const int64_t rows_;
};

void Kernels::activations(DType dtype) {
  elementwise("copy", dtype, 2, [](const Arrays& a) { cpu::copy(*a[0], *a[1]); });
  elementwise("add", dtype, 3,
              [](const Arrays& a) { cpu::binary(BinaryOp::add, *a[0], *a[1], *a[2]); });
  elementwise("gelu", dtype, 2,
              [](const Arrays& a) { cpu::unary(UnaryOp::gelu_tanh, *a[0], *a[1]); });
  elementwise("gelu-backward", dtype, 3,
              [](const Arrays& a) { cpu::gelu_backward(UnaryOp::gelu_tanh, *a[0], *a[1], *a[2]); });
  elementwise("swiglu", dtype, 3, [](const Arrays& a) { cpu::swiglu(*a[0], *a[1], *a[2]); });
  elementwise("swiglu-backward", dtype, 5,
              [](const Arrays& a) { cpu::swiglu_backward(*a[0], *a[1], *a[2], *a[3], *a[4]); });
  elementwise("softmax", dtype, 2, [](const Arrays& a) { cpu::softmax(*a[0], *a[1]); });
  elementwise("softmax-backward", dtype, 3,
              [](const Arrays& a) { cpu::softmax_backward(*a[0], *a[1], *a[2]); });
  elementwise("dropout", dtype, 2, [](const Arrays& a) {
    const View x = *a[0];
    cpu::dropout(x, 0.1, Key{}, kernels::GlobalIndex::whole(x.shape), *a[1]);
  });
  // The rows' weights, means and deviations are too few to count.
  const auto vector = [dtype] { return array(dtype, {kWidth}); };
  const auto statistics = [this] { return array(kF32, {rows_}); };
  elementwise("layer-norm", dtype, 2,
              [w = vector(), b = vector(), mean = statistics(), rstd = statistics()](
                  const Arrays& a) { cpu::layer_norm(*a[0], *w, *b, 1e-5, *a[1], *mean, *rstd); });
  elementwise("rms-norm", dtype, 2, [w = vector(), rstd = statistics()](const Arrays& a) {
    cpu::rms_norm(*a[0], *w, 1e-5, *a[1], *rstd);
  });
  const View any = View::dense(nullptr, dtype, {rows_, kWidth}),
             any_vector = View::dense(nullptr, dtype, {kWidth});
  elementwise("layer-norm-backward", dtype, 3,
              [w = vector(), dw = vector(), db = vector(), mean = statistics(), rstd = statistics(),
               scratch = std::make_shared<Scratch>(cpu::layer_norm_backward_workspace(
                   any, any, any_vector, any_vector))](const Arrays& a) {
                cpu::layer_norm_backward(*a[0], *a[1], *w, *mean, *rstd, *a[2], *dw, *db, *scratch);
              });
  elementwise("rms-norm-backward", dtype, 3,
              [w = vector(), dw = vector(), rstd = statistics(),
               scratch = std::make_shared<Scratch>(
                   cpu::rms_norm_backward_workspace(any, any, any_vector))](const Arrays& a) {
                cpu::rms_norm_backward(*a[0], *a[1], *w, *rstd, *a[2], *dw, *scratch);
              });
  elementwise("bias-gradient", dtype, 1,
              [db = vector()](const Arrays& a) { cpu::linear_bias_gradient(*a[0], *db); });
}

void Kernels::parameters() {
  const bool quick = session_.options().quick;
  const int64_t elements = quick ? 65536 : int64_t{12} << 20, vocabulary = quick ? 1000 : 50257;
  for (DType to : {kBF16, kF32})
    measure(to == kBF16 ? "cast-f32-bf16" : "cast-bf16-f32", [&]() -> Call {
      auto a = array(to == kBF16 ? kF32 : kBF16, {elements}), b = array(to, {elements});
      return {[a, b] { cpu::copy(*a, *b); }, a->bytes() + b->bytes()};
    });
  measure("add-into-f32", [&]() -> Call {  // accumulating gradients: reads two, writes one
    auto a = array(kF32, {elements}), b = array(kF32, {elements});
    return {[a, b] { cpu::add_into(*a, *b); }, 3 * a->bytes()};
  });
  measure("adamw", [&]() -> Call {
    Arrays a;  // parameter, gradient, m, v: all read, all but the gradient written
    for (int i = 0; i < 4; ++i) a.push_back(array(kF32, {elements}));
    cpu::unary(UnaryOp::square, *a[3], *a[3]);
    auto segments = array(kI64, {1, 3}), scalars = array(kF64, {cpu::kAdamWScalars});
    segments->as<int64_t>()[1] = elements;
    segments->as<int64_t>()[2] = 1;
    const double values[cpu::kAdamWScalars] = {1e-4, 0.9, 0.99, 1e-8, 0.1, 0.5, 0.5, 1.0};
    std::copy(std::begin(values), std::end(values), scalars->as<double>());
    return {[=] { cpu::adamw(*a[0], *a[1], *a[2], *a[3], *segments, *scalars); },
            7 * a[0]->bytes()};
  });
  measure("sum-of-squares", [&]() -> Call {
    auto x = array(kF32, {elements}), limbs = array(kI64, {cpu::kSquareLimbs});
    auto scratch = std::make_shared<Scratch>(cpu::sum_of_squares_workspace(*x));
    return {[=] { cpu::sum_of_squares(*x, *limbs, *scratch); }, x->bytes()};
  });
  measure("embedding-f32", [&]() -> Call {
    auto tokens = std::make_shared<Array>(Array::indices({rows_}, vocabulary));
    auto table = array(kF32, {vocabulary, kWidth}), out = array(kF32, {rows_, kWidth});
    return {[=] { cpu::embedding(*tokens, *table, *out); }, 2 * out->bytes()};
  });
  measure("embedding-backward-f32", [&]() -> Call {  // reads the rows, writes the whole table
    auto tokens = std::make_shared<Array>(Array::indices({rows_}, vocabulary));
    auto table = array(kF32, {vocabulary, kWidth}), out = array(kF32, {rows_, kWidth});
    auto scratch =
        std::make_shared<Scratch>(cpu::embedding_backward_workspace(*tokens, *out, *table));
    return {[=] { cpu::embedding_backward(*tokens, *out, *table, false, *scratch); },
            out->bytes() + table->bytes()};
  });
  for (bool backward : {false, true})
    measure(backward ? "cross-entropy-backward-f32" : "cross-entropy-f32", [&]() -> Call {
      const int64_t rows = quick ? 64 : 256;
      auto targets = std::make_shared<Array>(Array::indices({rows}, vocabulary));
      auto logits = array(kF32, {rows, vocabulary}), losses = array(kF32, {rows}),
           lse = array(kF32, {rows}), scale = array(kF32, {});
      if (!backward)
        return {[=] { cpu::cross_entropy(*logits, *targets, -1, *losses, *lse); }, logits->bytes()};
      auto gradient = array(kF32, {rows, vocabulary});
      return {[=] { cpu::cross_entropy_backward(*logits, *targets, -1, *lse, *scale, *gradient); },
              2 * logits->bytes()};
    });
}

}  // namespace

void kernels_suite(Session& session) {
  Kernels kernels(session);
  kernels.activations(kF32);
  kernels.activations(kBF16);
  kernels.parameters();
}

}  // namespace sheaf::bench
