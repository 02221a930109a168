// kernels: the memory-bound kernels. Each counts its minimal traffic, every operand read once and every result written once, and is
// compared with a copy of as many bytes. On a GPU operands are larger than its caches.
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cross_entropy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/elementwise.h"
#include "sheaf/kernels/embedding.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/norm.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/kernels/random.h"
#include "sheaf/kernels/reduce.h"
#include "sheaf/kernels/rotary.h"
#include "sheaf/kernels/softmax.h"
#include "sheaf/kernels/sum_of_squares.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

namespace cpu = kernels::cpu;
using kernels::BinaryOp;
using kernels::UnaryOp;

// Rows of activations and their width, and the sizes of operands without rows.
struct Sizes {
  int64_t rows, width;
  int64_t parameters;          // elements
  int64_t logits, vocabulary;  // rows of logits
};

class Kernels {
 public:
  /// `suffix` distinguishes lines of the same kernel.
  Kernels(Session& session, const Sizes& sizes, std::string suffix)
      : session_(session),
        device_(session.device()),
        stream_(session.stream()),
        sizes_(sizes),
        suffix_(std::move(suffix)) {}

  /// All kernels of one dtype on activations [rows, width].
  void activations(DType dtype);
  /// Kernels on parameters, tokens and logits.
  void parameters();

 private:
  /// Adds the line `name` if it is selected. Only then is `make` called; it returns the kernel's call and its bytes. Its allocations
  /// live as long as the call.
  template <class Make>
  void measure(const std::string& name, Make&& make) {
    if (!session_.wants("kernels", name + suffix_)) return;
    Comparison c{.name = name + suffix_, .unit = Unit::gigabytes_per_second};
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
  std::shared_ptr<Array> array(DType dtype, const Shape& shape) const {
    return placed(Array(dtype, shape));
  }
  std::shared_ptr<Array> tokens(int64_t count) const {
    return placed(Array::indices({count}, sizes_.vocabulary));
  }
  std::shared_ptr<Array> placed(Array&& a) const {
    return std::make_shared<Array>(std::move(a).on(device_));
  }
  std::shared_ptr<Scratch> scratch(int64_t bytes) const {
    return std::make_shared<Scratch>(static_cast<size_t>(bytes), device_);
  }

  /// `f`, given the stream and `count` arrays of one type, which are each read or written once.
  template <class F>
  void elementwise(const std::string& name, DType dtype, int count, F f) {
    measure(name + "-" + std::string(sheaf::name(dtype)), [&]() -> Call {
      Arrays a;
      for (int i = 0; i < count; ++i) a.push_back(array(dtype, {sizes_.rows, sizes_.width}));
      const double bytes = a[0]->bytes() * count;
      return {[a, f, stream = stream_] { f(stream, a); }, bytes};
    });
  }

  Session& session_;
  const Device device_;
  const Stream stream_;
  const Sizes sizes_;
  const std::string suffix_;
};

void Kernels::activations(DType dtype) {
  elementwise("copy", dtype, 2,
              [](Stream s, const Arrays& a) { SHEAF_ON_DEVICE(s, copy, *a[0], *a[1]); });
  elementwise("add", dtype, 3, [](Stream s, const Arrays& a) {
    SHEAF_ON_DEVICE(s, binary, BinaryOp::add, *a[0], *a[1], *a[2]);
  });
  elementwise("gelu", dtype, 2, [](Stream s, const Arrays& a) {
    SHEAF_ON_DEVICE(s, unary, UnaryOp::gelu_tanh, *a[0], *a[1]);
  });
  elementwise("gelu-backward", dtype, 3, [](Stream s, const Arrays& a) {
    SHEAF_ON_DEVICE(s, activation_backward, kernels::BackwardOp::gelu_tanh, *a[0], *a[1], *a[2]);
  });
  elementwise("swiglu", dtype, 3,
              [](Stream s, const Arrays& a) { SHEAF_ON_DEVICE(s, swiglu, *a[0], *a[1], *a[2]); });
  elementwise("swiglu-backward", dtype, 5, [](Stream s, const Arrays& a) {
    SHEAF_ON_DEVICE(s, swiglu_backward, *a[0], *a[1], *a[2], *a[3], *a[4]);
  });
  elementwise("softmax", dtype, 2,
              [](Stream s, const Arrays& a) { SHEAF_ON_DEVICE(s, softmax, *a[0], *a[1]); });
  elementwise("softmax-backward", dtype, 3, [](Stream s, const Arrays& a) {
    SHEAF_ON_DEVICE(s, softmax_backward, *a[0], *a[1], *a[2]);
  });
  elementwise("dropout", dtype, 2, [](Stream s, const Arrays& a) {
    const View x = *a[0];
    SHEAF_ON_DEVICE(s, dropout, x, 0.1, Key{}, kernels::GlobalIndex::whole(x.shape), *a[1]);
  });
  measure("sum-pairs-" + std::string(sheaf::name(dtype)), [&]() -> Call {  // of rows, as copies of heads are
    const int64_t pairs = sizes_.rows / 2, width = sizes_.width;
    auto x = array(dtype, {pairs, 2, width}), out = array(dtype, {pairs, 1, width});
    auto work = scratch(SHEAF_GPU_WORKSPACE(device_, sum, x->view(), out->view()));
    return {[=, s = stream_] { SHEAF_ON_DEVICE_SCRATCH(s, *work, sum, *x, *out, 1.0); }, x->bytes() + out->bytes()};
  });
  // One sequence of all rows, head size 64.
  const auto rotated = [this](const Array& a) {
    return View::dense(a.view().data, a.view().dtype, {1, sizes_.rows, sizes_.width / 64, 64});
  };
  const View unrotated = View::dense(nullptr, dtype, {1, sizes_.rows, sizes_.width / 64, 64});
  const kernels::RotaryPart all{sizes_.width / 64, 64};
  elementwise(
      "rotary", dtype, 2,
      [rotated, all, work = scratch(SHEAF_WORKSPACE(device_, rotary, unrotated, all))](Stream s, const Arrays& a) {
        SHEAF_ON_DEVICE(s, rotary, rotated(*a[0]), 1e4, RotaryScaling(), 0, all, false,
                        rotated(*a[1]), *work);
      });
  // The rows' weights, means and deviations are negligible.
  const auto vector = [this, dtype] { return array(dtype, {sizes_.width}); };
  const auto statistics = [this] { return array(kF32, {sizes_.rows}); };
  elementwise("layer-norm", dtype, 2,
              [w = vector(), b = vector(), mean = statistics(), rstd = statistics()](
                  Stream s, const Arrays& a) {
                SHEAF_ON_DEVICE(s, layer_norm, *a[0], *w, *b, 1e-5, *a[1], *mean, *rstd);
              });
  elementwise("rms-norm", dtype, 2, [w = vector(), rstd = statistics()](Stream s, const Arrays& a) {
    SHEAF_ON_DEVICE(s, rms_norm, *a[0], *w, 1e-5, *a[1], *rstd);
  });
  const View any = View::dense(nullptr, dtype, {sizes_.rows, sizes_.width}),
             any_vector = View::dense(nullptr, dtype, {sizes_.width});
  elementwise("add-layer-norm", dtype, 4,
              [w = vector(), b = vector(), mean = statistics(), rstd = statistics()](
                  Stream s, const Arrays& a) {
                SHEAF_ON_DEVICE(s, add_layer_norm, *a[0], *a[1], *w, *b, 1e-5, *a[2], *a[3], *mean,
                                *rstd);
              });
  elementwise("layer-norm-backward", dtype, 3,
              [w = vector(), dw = vector(), db = vector(), mean = statistics(), rstd = statistics(),
               work = scratch(SHEAF_WORKSPACE(device_, layer_norm_backward, any, any, any_vector,
                                              any_vector))](Stream s, const Arrays& a) {
                SHEAF_ON_DEVICE(s, layer_norm_backward, *a[0], *a[1], *w, *mean, *rstd, *a[2], *dw,
                                *db, *work);
              });
  elementwise("add-layer-norm-backward", dtype, 4,
              [w = vector(), dw = vector(), db = vector(), mean = statistics(), rstd = statistics(),
               work = scratch(SHEAF_WORKSPACE(device_, layer_norm_backward, any, any, any_vector,
                                              any_vector))](Stream s, const Arrays& a) {
                SHEAF_ON_DEVICE(s, layer_norm_backward, *a[0], *a[1], *w, *mean, *rstd, *a[2], *dw,
                                *db, *work, *a[3]);
              });
  elementwise("rms-norm-backward", dtype, 3,
              [w = vector(), dw = vector(), rstd = statistics(),
               work = scratch(SHEAF_WORKSPACE(device_, rms_norm_backward, any, any, any_vector))](
                  Stream s, const Arrays& a) {
                SHEAF_ON_DEVICE(s, rms_norm_backward, *a[0], *a[1], *w, *rstd, *a[2], *dw, *work);
              });
  elementwise("bias-gradient", dtype, 1,
              [db = vector(),
               work = scratch(SHEAF_GPU_WORKSPACE(device_, linear_bias_gradient, any, any_vector))](
                  Stream s, const Arrays& a) {
                SHEAF_ON_DEVICE_SCRATCH(s, *work, linear_bias_gradient, *a[0], *db);
              });
}

void Kernels::parameters() {
  const int64_t elements = sizes_.parameters, vocabulary = sizes_.vocabulary, width = sizes_.width;
  const Stream s = stream_;
  for (DType to : {kBF16, kF32})
    measure(to == kBF16 ? "cast-f32-bf16" : "cast-bf16-f32", [&]() -> Call {
      auto a = array(to == kBF16 ? kF32 : kBF16, {elements}), b = array(to, {elements});
      return {[=] { SHEAF_ON_DEVICE(s, copy, *a, *b); }, a->bytes() + b->bytes()};
    });
  measure("add-into-f32", [&]() -> Call {  // accumulating gradients: reads two, writes one
    auto a = array(kF32, {elements}), b = array(kF32, {elements});
    return {[=] { SHEAF_ON_DEVICE(s, add_into, *a, *b); }, 3 * a->bytes()};
  });
  for (const DType state : {kF32, kBF16})
    measure(state == kF32 ? "adamw" : "adamw-bf16-state", [&]() -> Call {
      Arrays a;  // parameter, gradient, m, v: all read, all but the gradient written
      for (int i = 0; i < 4; ++i) a.push_back(array(i < 2 ? kF32 : state, {elements}));
      SHEAF_ON_DEVICE(s, unary, UnaryOp::square, *a[3], *a[3]);
      auto segments = placed(Array::of<double>({1, 4}, {0, static_cast<double>(elements), 1, 1}));
      auto scalars = placed(Array::of<double>({cpu::kAdamWScalars},
                                              {1e-4, 0.9, 0.99, 1e-8, 0.1, 0.5, 0.5, 1.0, 3.0}));
      return {[=] { SHEAF_ON_DEVICE(s, adamw, *a[0], *a[1], *a[2], *a[3], *segments, *scalars); },
              3 * a[0]->bytes() + 4 * a[2]->bytes()};
    });
  measure("sum-of-squares", [&]() -> Call {
    auto x = array(kF32, {elements}), limbs = array(kI64, {cpu::kSquareLimbs});
    auto work = scratch(SHEAF_WORKSPACE(device_, sum_of_squares, *x));
    return {[=] { SHEAF_ON_DEVICE(s, sum_of_squares, *x, *limbs, *work); }, x->bytes()};
  });
  measure("embedding-f32", [&]() -> Call {
    auto of = tokens(sizes_.rows), table = array(kF32, {vocabulary, width}),
         out = array(kF32, {sizes_.rows, width});
    const kernels::TablePart whole{0, vocabulary};
    return {[=] { SHEAF_ON_DEVICE(s, embedding, *of, *table, whole, *out); }, 2 * out->bytes()};
  });
  measure("embedding-backward-f32", [&]() -> Call {  // reads the rows, writes the whole table
    auto of = tokens(sizes_.rows), table = array(kF32, {vocabulary, width}),
         out = array(kF32, {sizes_.rows, width});
    auto work = scratch(SHEAF_WORKSPACE(device_, embedding_backward, *of, *out, *table));
    const kernels::TablePart whole{0, vocabulary};
    return {[=] { SHEAF_ON_DEVICE(s, embedding_backward, *of, *out, whole, *table, false, *work); },
            out->bytes() + table->bytes()};
  });
  for (bool backward : {false, true})
    measure(backward ? "cross-entropy-backward-f32" : "cross-entropy-f32", [&]() -> Call {
      const int64_t rows = sizes_.logits;
      auto targets = tokens(rows), logits = array(kF32, {rows, vocabulary}),
           losses = array(kF32, {rows}), lse = array(kF32, {rows}), scale = array(kF32, {});
      if (!backward)
        return {[=] { SHEAF_ON_DEVICE(s, cross_entropy, *logits, *targets, -1, *losses, *lse); },
                logits->bytes()};
      auto gradient = array(kF32, {rows, vocabulary});
      return {[=] {
                SHEAF_ON_DEVICE(s, cross_entropy_backward, *logits, *targets, -1, *lse, *scale,
                                *gradient);
              },
              2 * logits->bytes()};
    });
}

}  // namespace

void kernels_suite(Session& session) {
  const bool quick = session.options().quick;
  const auto measure = [&](const Sizes& sizes, const std::string& suffix, bool parameters) {
    Kernels kernels(session, sizes, suffix);
    kernels.activations(kF32);
    kernels.activations(kBF16);
    if (parameters) kernels.parameters();
  };
  if (quick) return measure({64, 768, 65536, 64, 1000}, "", true);
  if (!session.on_gpu()) return measure({16384, 768, int64_t{12} << 20, 256, 50257}, "", true);
  // GPT-2's width and Llama 3 8B's: a row that fits a warp's registers, and one that needs a block.
  measure({131072, 768, int64_t{128} << 20, 4096, 50257}, "-131072x768", true);
  measure({32768, 4096, 0, 0, 0}, "-32768x4096", false);
}

}  // namespace sheaf::bench
