// fuse: chains of elementwise ops as one kernel (autograd/passes/fuse_elementwise.h), against the same ops one after another,
// alternating: an activation written by hand, forward and backward; a bias, a gate and a residual.
#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tools/bench/gpu_time.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

// The sums of x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) dy and of its gradient.
std::vector<Tensor> gelu_by_hand(const Tensor& x, const Tensor& dy, const Tensor&) {
  Recording& recording = *Recording::current();
  recording.watch(x);
  const Tensor inner = mul(add(x, mul(mul(square(x), x), 0.044715)), 0.7978845608028654);
  const Tensor y = mul(mul(x, 0.5), add(tanh(inner), 1.0)), loss = sum(mul(y, dy));
  return {loss, sum(recording.gradient(loss, std::vector{x})[0])};
}

// A bias, a gate and a residual: the elementwise ops between two products.
std::vector<Tensor> gated(const Tensor& x, const Tensor& y, const Tensor& bias) {
  return {sum(add(mul(sigmoid(add(x, bias)), y), mul(x, 0.5)))};
}

using Code = std::vector<Tensor> (*)(const Tensor&, const Tensor&, const Tensor&);

void measure(Session& session, World& world, Code code, DType dtype, Line& line) {
  const int64_t rows = session.options().quick ? 64 : session.on_gpu() ? 16384 : 4096, columns = session.options().quick ? 96 : 3072;
  const Device device = world.device();
  const auto operand = [&](const Shape& shape, uint64_t key) {
    return randn({dtype, shape, {}}, Key{key}).to(device);
  };
  // The programs take no inputs, which would be copied, and return sums.
  const Tensor x = operand({rows, columns}, 1), y = operand({rows, columns}, 2), bias = operand({columns}, 3);
  const auto step = [&] { return code(x, y, bias); };
  auto fused = compile(step), plain = compile(step, {.fuse = false});
  const auto timed = [](auto& program) { return device_seconds([&] { program({}); }); };
  for (int warm = 0; warm < 5; ++warm) timed(fused), timed(plain);
  auto [own, peers] = session.turns([&] { return timed(fused); }, [&] { return timed(plain); });
  line.samples_s = std::move(own);
  line.peer = "op by op";
  line.peer_value = quantile(peers, 0.5);
  const auto mib = [](auto& program) { return static_cast<double>(program.program()->arena_bytes()) / (1 << 20); };
  line.more = {{"MiB", mib(fused)}, {"MiB op by op", mib(plain)}};
}

}  // namespace

void fuse_suite(Session& session) {
  const auto add = [&](const char* name, Code code, DType dtype) {
    session.line("fuse", name, Unit::seconds, [&](Line& line) {
      run_local(1, [&](World& world) { measure(session, world, code, dtype, line); },
                {.threads_per_rank = session.machine().threads, .device = session.device()});
    });
  };
  add("gelu-f32", gelu_by_hand, kF32);
  add("gelu-bf16", gelu_by_hand, kBF16);
  add("gated-f32", gated, kF32);
  add("gated-bf16", gated, kBF16);
}

}  // namespace sheaf::bench
