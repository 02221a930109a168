// gemm: the three products of a linear layer with many tokens, the forward one also with few, the head with its loss, and one token
// with block-quantized weights; each with its fraction of the machine's peak. On a CPU at the shapes of GPT-2 124M against oneDNN's
// plain matmul (in f32 where it has none in bf16), where the peak is that of f32 multiply-adds, or of AMX tiles for bf16. On a GPU at
// those of GPT-2 and Llama 3 8B against a large square product of the same dtype, which is also the peak.
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_cross_entropy.h"
#include "sheaf/kernels/linear_of_blocks.h"
#include "sheaf/kernels/matmul.h"
#include "sheaf/kernels/quantize.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/plain_gemm.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

View transposed(View v) {
  std::swap(v.shape[0], v.shape[1]);
  std::swap(v.strides[0], v.strides[1]);
  return v;
}

// M rows (tokens), I input and O output features.
struct Size {
  int64_t m, i, o;
};

// Where and how a product runs, and the owner of its memory.
struct Place {
  Device device;
  Stream stream;
  DType dtype;
  bool fp8 = false;  // operands are rounded to fp8
  std::vector<std::shared_ptr<void>> held = {};

  template <class T>
  const T& hold(T&& object) {
    auto p = std::make_shared<T>(std::move(object));
    held.push_back(p);
    return *p;
  }
  const Array& array(DType of, const Shape& shape) { return hold(Array(of, shape).on(device)); }
  std::function<void()> plain(const View& a, const View& b, const View& c) const {
    return device.is_cpu() && has_plain_gemm(dtype) ? plain_gemm(a, b, c) : nullptr;
  }
  const Scratch& scratch(int64_t bytes) {
    return hold(Scratch(static_cast<size_t>(bytes), device));
  }
};

/// A call, and on a CPU its peer, if oneDNN has one.
struct Calls {
  std::function<void()> run, peer;
};

struct Product {
  const char* name;
  Calls (*make)(const Size& s, Place& at);
};

// y[M, O] = x[M, I] W[O, I]ᵀ
Calls forward(const Size& s, Place& at) {
  const Array &x = at.array(at.dtype, {s.m, s.i}), &w = at.array(at.dtype, {s.o, s.i}),
              &y = at.array(at.dtype, {s.m, s.o});
  const Scratch& scratch = at.scratch(SHEAF_WORKSPACE(at.device, linear, x, w, View{}, y, at.fp8));
  Calls calls;
  calls.run = [&, stream = at.stream, fp8 = at.fp8] {
    SHEAF_ON_DEVICE(stream, linear, x, w, View{}, y, scratch, fp8);
  };
  calls.peer = at.plain(x, transposed(w), y);
  return calls;
}

// dx[M, I] = dy[M, O] W[O, I]
Calls input_gradient(const Size& s, Place& at) {
  const Array &dy = at.array(at.dtype, {s.m, s.o}), &w = at.array(at.dtype, {s.o, s.i}),
              &dx = at.array(at.dtype, {s.m, s.i});
  const Scratch& scratch = at.scratch(SHEAF_WORKSPACE(at.device, matmul, dy, w, dx, at.fp8));
  Calls calls;
  calls.run = [&, stream = at.stream, fp8 = at.fp8] {
    SHEAF_ON_DEVICE(stream, matmul, dy, w, dx, scratch, fp8);
  };
  calls.peer = at.plain(dy, w, dx);
  return calls;
}

// dW[O, I] = dy[M, O]ᵀ x[M, I], always in f32, which a reduction over ranks takes.
Calls weight_gradient(const Size& s, Place& at) {
  const Array &dy = at.array(at.dtype, {s.m, s.o}), &x = at.array(at.dtype, {s.m, s.i}),
              &dw = at.array(kF32, {s.o, s.i});
  const Scratch& scratch =
      at.scratch(SHEAF_WORKSPACE(at.device, linear_weight_gradient, dy, x, dw, at.fp8));
  Calls calls;
  calls.run = [&, stream = at.stream, fp8 = at.fp8] {
    SHEAF_ON_DEVICE(stream, linear_weight_gradient, dy, x, dw, scratch, fp8);
  };
  calls.peer = at.plain(transposed(dy), x, dw);
  return calls;
}

constexpr Product kProducts[] = {
    {"forward", forward}, {"input-gradient", input_gradient}, {"weight-gradient", weight_gradient}};

// Algorithms are chosen by timing, as in training.
void tune(const std::function<void()>& run) {
  const kernels::cuda::TuneProducts tuning;
  run();
}

// A quick run divides every size by eight.
int64_t eighth(const Session& session, int64_t n) {
  return session.options().quick ? std::max<int64_t>(n / 8, 1) : n;
}

void layer_line(Session& session, const Product& product, DType dtype, const Size& full) {
  const std::string name = str(product.name, "-", dtype, "-", full.m, "x", full.i, "x", full.o);
  if (!session.wants("gemm", name)) return;
  const Size size{eighth(session, full.m), eighth(session, full.i), eighth(session, full.o)};
  Place at{session.device(), session.stream(), dtype}, in_f32{session.device(), session.stream(), kF32};
  Comparison c{.name = name, .unit = session.flops_unit(), .peer = "oneDNN matmul"};
  c.amount = c.peer_amount = 2.0 * static_cast<double>(size.m * size.i * size.o);
  c.arithmetic = dtype;
  c.prepare = [&] {
    const Calls calls = product.make(size, at);
    c.run = calls.run;
    if (session.on_gpu()) return tune(c.run);
    c.peer_run = calls.peer;
    if (!c.peer_run) c.peer_run = product.make(size, in_f32).peer, c.peer = "oneDNN matmul, f32";
  };
  if (session.on_gpu())
    session.compare_with_peak("gemm", c);
  else
    session.compare("gemm", c);
}

// The same in FP8, including rounding, against bf16.
void fp8_line(Session& session, const Product& product, const Size& full) {
  const std::string name = str(product.name, "-fp8-", full.m, "x", full.i, "x", full.o);
  if (!session.wants("gemm", name)) return;
  const Size size{eighth(session, full.m), eighth(session, full.i), eighth(session, full.o)};
  Place at{session.device(), session.stream(), kBF16}, rounding = at;
  rounding.fp8 = true;
  Comparison c{.name = name, .unit = session.flops_unit(), .peer = "bf16"};
  c.amount = c.peer_amount = 2.0 * static_cast<double>(size.m * size.i * size.o);
  c.prepare = [&] {
    c.run = product.make(size, rounding).run;
    c.peer_run = product.make(size, at).run;
    tune(c.run), tune(c.peer_run);
  };
  session.compare("gemm", c);
}

// One token through a layer, as in text generation: time is proportional to the bytes of the weight. Block-quantized against f32.
void block_line(Session& session, BlockFormat format, const Size& full) {
  const std::string name = str("one-row-", sheaf::name(format), "-", full.i, "x", full.o);
  if (!session.wants("gemm", name)) return;
  const int64_t inputs = std::max(eighth(session, full.i) / kBlockSize, int64_t{1}) * kBlockSize, outputs = eighth(session, full.o);
  Comparison c{.name = name, .unit = session.flops_unit(), .peer = "f32"};
  c.amount = c.peer_amount = 2.0 * static_cast<double>(inputs * outputs);
  Place at{session.device(), session.stream(), kF32};
  c.prepare = [&] {
    const Array &x = at.array(kF32, {1, inputs}), &w = at.array(kF32, {outputs, inputs}), &y = at.array(kF32, {1, outputs});
    Array in_blocks(kU8, blocks_shape({outputs, inputs}, format));
    {
      const Array values(kF32, {outputs, inputs});
      kernels::cpu::quantize(std::span(values.view().as<float>(), static_cast<size_t>(outputs * inputs)), format, in_blocks.view().as<uint8_t>());
    }
    const Array& blocks = at.hold(std::move(in_blocks).on(at.device));
    const Scratch &scratch = at.scratch(SHEAF_WORKSPACE(at.device, linear_of_blocks, x, blocks, format, View{}, y)),
                  &plain = at.scratch(SHEAF_WORKSPACE(at.device, linear, x, w, View{}, y));
    c.run = [&, format, stream = at.stream] { SHEAF_ON_DEVICE(stream, linear_of_blocks, x, blocks, format, View{}, y, scratch); };
    c.peer_run = [&, stream = at.stream] { SHEAF_ON_DEVICE(stream, linear, x, w, View{}, y, plain); };
  };
  session.compare("gemm", c);
}

// The head with its loss and both gradients as one fused kernel, as training calls it: three products and the softmax between them.
// No library has it, so its peer is the machine's arithmetic.
void head_line(Session& session, DType dtype, const Size& full) {
  const std::string name = str("head-and-loss-", dtype, "-", full.m, "x", full.i, "x", full.o);
  if (!session.wants("gemm", name)) return;
  const Size s{eighth(session, full.m), eighth(session, full.i), eighth(session, full.o)};
  Comparison c{.name = name, .unit = session.flops_unit()};
  c.amount = 6.0 * static_cast<double>(s.m * s.i * s.o);
  c.arithmetic = dtype;
  Place at{session.device(), session.stream(), dtype};
  c.prepare = [&] {
    const Array &x = at.array(dtype, {s.m, s.i}), &w = at.array(dtype, {s.o, s.i}),
                &dx = at.array(dtype, {s.m, s.i}), &dw = at.array(kF32, {s.o, s.i}),
                &loss = at.array(kF32, {}),
                &targets = at.hold(Array::indices({s.m}, s.o).on(at.device));
    const Scratch& scratch =
        at.scratch(SHEAF_WORKSPACE(at.device, linear_cross_entropy_fused, x, w, dx, dw));
    c.run = [&, stream = at.stream] {
      SHEAF_ON_DEVICE(stream, linear_cross_entropy_fused, x, w, targets, -1, loss, dx, dw, scratch);
    };
    if (session.on_gpu()) tune(c.run);
  };
  session.compare_with_peak("gemm", c);
}

}  // namespace

void gemm_suite(Session& session) {
  // Queries, keys and values; attention's output; MLP up and down; head.
  constexpr std::pair<int64_t, int64_t> kGpt2[] = {
      {768, 2304}, {768, 768}, {768, 3072}, {3072, 768}, {768, 50257}};
  const auto layers = [&](DType dtype, int64_t m, std::span<const std::pair<int64_t, int64_t>> of) {
    for (const auto& [i, o] : of)
      for (const Product& p : kProducts) layer_line(session, p, dtype, {m, i, o});
  };
  for (const BlockFormat format : {BlockFormat::int8, BlockFormat::nf4})
    for (const auto& [i, o] : {std::pair(4096, 4096), {4096, 14336}, {14336, 4096}}) block_line(session, format, {1, i, o});
  if (!session.on_gpu()) {
    // With few tokens, as in text generation: time is determined first by the bytes of the weight, then by its packing.
    for (DType dtype : {kF32, kBF16})
      for (int64_t m : {1, 8, 32})
        for (const auto& [i, o] : {std::pair(768, 50257), {4096, 4096}, {4096, 14336}}) layer_line(session, kProducts[0], dtype, {m, i, o});
    for (DType dtype : {kF32, kBF16})
      for (int64_t m : {256, 1024}) layers(dtype, m, kGpt2);
    for (DType dtype : {kF32, kBF16})
      for (int64_t m : {256, 1024}) head_line(session, dtype, {m, 768, 50257});
    return;
  }
  // The heads as layers that materialise all logits: they have separate lines.
  constexpr std::pair<int64_t, int64_t> kGpt2Xl[] = {
      {1600, 4800}, {1600, 1600}, {1600, 6400}, {6400, 1600}};
  constexpr std::pair<int64_t, int64_t> kLlama8B[] = {
      {4096, 6144}, {4096, 4096}, {4096, 14336}, {14336, 4096}};
  // GPT-2's vocabulary is odd, which may exclude cuBLASLt kernels: also measured padded to whole tiles.
  constexpr Size kHeads[] = {
      {16384, 768, 50257}, {16384, 768, 50304}, {16384, 1600, 50257}, {8192, 4096, 128256}};
  for (DType dtype : {kBF16, kF16, kF32}) {
    layers(dtype, 16384, std::span(kGpt2).first(4));
    layers(dtype, 16384, kGpt2Xl);
    layers(dtype, 8192, kLlama8B);
    if (dtype != kBF16) continue;
    for (const Size& s : kHeads) head_line(session, dtype, s);
    for (const auto& [i, o] : kLlama8B)
      for (const Product& p : kProducts) fp8_line(session, p, {8192, i, o});
  }
}

}  // namespace sheaf::bench
