// gemm: the three products of a linear layer, at the shapes of GPT-2 124M, against oneDNN's plain
// matmul, and the head with its loss; beside it the fraction of the machine's FMA peak, or of the
// tile peak for bf16.
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_cross_entropy.h"
#include "sheaf/kernels/matmul.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/plain_gemm.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

namespace cpu = kernels::cpu;

View transposed(View v) {
  std::swap(v.shape[0], v.shape[1]);
  std::swap(v.strides[0], v.strides[1]);
  return v;
}

// M rows (tokens), I inputs and O outputs of the layer.
struct Size {
  int64_t m, i, o;
};

struct Product {
  const char* name;
  // Makes the call and its peer on memory that `hold` keeps alive.
  void (*make)(const Size& s, DType dtype, std::vector<std::shared_ptr<void>>& hold,
               std::function<void()>& run, std::function<void()>& peer);
};

template <class T, class... Arguments>
const T& held(std::vector<std::shared_ptr<void>>& hold, Arguments&&... arguments) {
  auto p = std::make_shared<T>(std::forward<Arguments>(arguments)...);
  hold.push_back(p);
  return *p;
}

// y[M, O] = x[M, I] W[O, I]ᵀ
void forward(const Size& s, DType dtype, std::vector<std::shared_ptr<void>>& hold,
             std::function<void()>& run, std::function<void()>& peer) {
  const Array &x = held<Array>(hold, dtype, Shape{s.m, s.i}),
              &w = held<Array>(hold, dtype, Shape{s.o, s.i}),
              &y = held<Array>(hold, dtype, Shape{s.m, s.o});
  const Scratch& scratch = held<Scratch>(hold, cpu::linear_workspace(x, w, View{}, y));
  run = [&] { cpu::linear(x, w, View{}, y, scratch); };
  peer = plain_gemm(x, transposed(w), y);
}

// dx[M, I] = dy[M, O] W[O, I]
void input_gradient(const Size& s, DType dtype, std::vector<std::shared_ptr<void>>& hold,
                    std::function<void()>& run, std::function<void()>& peer) {
  const Array &dy = held<Array>(hold, dtype, Shape{s.m, s.o}),
              &w = held<Array>(hold, dtype, Shape{s.o, s.i}),
              &dx = held<Array>(hold, dtype, Shape{s.m, s.i});
  const Scratch& scratch = held<Scratch>(hold, cpu::matmul_workspace(dy, w, dx));
  run = [&] { cpu::matmul(dy, w, dx, scratch); };
  peer = plain_gemm(dy, w, dx);
}

// dW[O, I] = dy[M, O]ᵀ x[M, I], in f32 always: that is what a reduction over ranks takes.
void weight_gradient(const Size& s, DType dtype, std::vector<std::shared_ptr<void>>& hold,
                     std::function<void()>& run, std::function<void()>& peer) {
  const Array &dy = held<Array>(hold, dtype, Shape{s.m, s.o}),
              &x = held<Array>(hold, dtype, Shape{s.m, s.i}),
              &dw = held<Array>(hold, kF32, Shape{s.o, s.i});
  const Scratch& scratch = held<Scratch>(hold, cpu::linear_weight_gradient_workspace(dy, x, dw));
  run = [&] { cpu::linear_weight_gradient(dy, x, dw, scratch); };
  peer = plain_gemm(transposed(dy), x, dw);
}

// The head with its loss and both gradients as one kernel, as training calls it: three products,
// and the softmax between them. No library has it, so its peer is the machine's multiply-adds.
void head_line(Session& session, DType dtype, int64_t rows) {
  const std::string name = str("head-and-loss-", dtype, "-", rows, "x768x50257");
  if (!session.wants("gemm", name)) return;
  const bool quick = session.options().quick;
  const Size s = quick ? Size{rows / 8, 96, 6282} : Size{rows, 768, 50257};
  const Array x(dtype, {s.m, s.i}), w(dtype, {s.o, s.i}), dx(dtype, {s.m, s.i}),
      dw(kF32, {s.o, s.i}), loss(kF32, {}), targets = Array::indices({s.m}, s.o);
  Comparison c{.name = name, .unit = Unit::gigaflops};
  c.amount = 6.0 * static_cast<double>(s.m * s.i * s.o);
  c.peak = dtype == kBF16 ? Peak::bf16 : Peak::f32;
  c.peer = "FMA peak";
  c.peer_run = [&] { session.probe().run_fma(); };
  c.peer_amount = session.probe().flops_per_piece();
  std::unique_ptr<Scratch> scratch;
  c.prepare = [&] {
    scratch = std::make_unique<Scratch>(cpu::linear_cross_entropy_fused_workspace(x, w, dx, dw));
  };
  c.run = [&] { cpu::linear_cross_entropy_fused(x, w, targets, -1, loss, dx, dw, *scratch); };
  session.compare("gemm", c);
}

}  // namespace

void gemm_suite(Session& session) {
  constexpr Product kProducts[] = {{"forward", forward},
                                   {"input-gradient", input_gradient},
                                   {"weight-gradient", weight_gradient}};
  // Queries, keys and values; attention's output; MLP up and down; head.
  constexpr std::pair<int64_t, int64_t> kLayers[] = {
      {768, 2304}, {768, 768}, {768, 3072}, {3072, 768}, {768, 50257}};
  for (DType dtype : {kF32, kBF16})
    for (int64_t m : {256, 1024})
      for (const auto& [i, o] : kLayers)
        for (const Product& p : kProducts) {
          const std::string name = str(p.name, "-", dtype, "-", m, "x", i, "x", o);
          if (!session.wants("gemm", name)) continue;
          const Size size = session.options().quick ? Size{m / 8, i / 8, o / 8} : Size{m, i, o};
          std::vector<std::shared_ptr<void>> hold;
          Comparison c{.name = name, .unit = Unit::gigaflops, .peer = "oneDNN matmul"};
          c.amount = c.peer_amount = 2.0 * static_cast<double>(size.m * size.i * size.o);
          c.peak = dtype == kBF16 ? Peak::bf16 : Peak::f32;
          c.prepare = [&] { p.make(size, dtype, hold, c.run, c.peer_run); };
          session.compare("gemm", c);
        }
  for (DType dtype : {kF32, kBF16})
    for (int64_t rows : {256, 1024}) head_line(session, dtype, rows);
}

}  // namespace sheaf::bench
