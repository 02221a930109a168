// tape: the overhead of a node beyond its kernel. Chains of scalar multiplications (which save nothing for backward) and of
// hyperbolic tangents (which save their output), on the meta device, which has neither kernels nor memory, and on CPU tensors of one
// element, where both are minimal.
//
//   record    Everything between calling an op and its return, over a recording of 4,096 ops:
//             inference, placement, the output's handle and storage, the node, saving for
//             backward; on the CPU also the kernel. Includes creating and destroying the
//             recording. The peer is the same chain without a recording: the difference is
//             the tape's cost.
//   run       A program's run of the chain's tape on the CPU, per op. The peer is the same chain
//             without a recording: the difference is inference, placement and memory.
//   backward  A backward pass over the same chain, per node that it records, with everything in
//             it: the vjp, the ops it calls, gradients stored and released. The peer is as many
//             multiplications without a recording.
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/program.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

constexpr int kChain = 4096;

enum class Link { mul, tanh };

Tensor chain(Link link, Tensor x) {
  for (int i = 0; i < kChain; ++i) x = link == Link::mul ? mul(x, 1.0001) : tanh(x);
  return x;
}

Tensor start(Device device) {
  Tensor x = Tensor::empty({kF32, {}, Layout()}, device);
  if (!device.is_meta()) *x.view().as<float>() = 0.5f;
  return x;
}

void record_line(Session& session, const std::string& name, Link link, Device device) {
  if (!session.wants("tape", name)) return;
  const DeviceScope scope(device);
  const Tensor x = start(device);
  Comparison c{.name = name, .unit = Unit::nanoseconds};
  c.amount = c.peer_amount = kChain;
  c.run = [&] {
    Recording recording;
    chain(link, recording.watch(x));
  };
  c.peer = "no recording";
  c.peer_run = [&] { chain(link, x); };
  session.compare("tape", c);
}

void run_line(Session& session, const std::string& name, Link link) {
  if (!session.wants("tape", name)) return;
  const Tensor x = start(Device::cpu());
  Recording recording;
  const Tensor y = chain(link, x);
  const ValueId wanted[] = {recording.value_of(y)};
  Program program(recording.take(), [&](ValueId) { return x; }, wanted);
  Comparison c{.name = name, .unit = Unit::nanoseconds};
  c.amount = c.peer_amount = kChain;
  c.run = [&] { program.run(); };
  c.peer = "no recording";
  c.peer_run = [&] { chain(link, x); };
  session.compare("tape", c);
}

// A backward pass cannot be repeated without its recording, so Google Benchmark's loop does not fit; 4,096 nodes are enough for a
// plain clock.
void backward_line(Session& session, const std::string& name, Link link, Device device) {
  if (!session.wants("tape", name)) return;
  const DeviceScope scope(device);
  const Tensor x = start(device);
  session.line("tape", name, Unit::nanoseconds, [&](Line& line) {
    int nodes = 1;
    const auto backward = [&] {
      Recording recording;
      const Tensor leaf = recording.watch(x), y = chain(link, leaf);
      const int before = recording.tape().num_nodes();
      const double begin = now();
      recording.gradient(y, std::span(&leaf, 1));
      const double seconds = now() - begin;
      nodes = recording.tape().num_nodes() - before;
      return seconds;
    };
    const auto by_hand = [&] {
      const double begin = now();
      chain(Link::mul, x);
      return now() - begin;
    };
    backward();
    auto [own, peers] = session.turns(backward, by_hand);
    line.samples_s = std::move(own);
    set_figures(line, nodes);
    line.peer = "no recording";
    line.peer_value = figure(line.unit, kChain, quantile(peers, 0.5));
    line.more = {{"nodes per op", static_cast<double>(nodes) / kChain}};
  });
}

}  // namespace

void tape_suite(Session& session) {
  for (Device device : {Device::meta(), Device::cpu()})
    for (Link link : {Link::mul, Link::tanh}) {
      const std::string what =
          std::string(link == Link::mul ? "mul" : "tanh") + (device.is_meta() ? "-meta" : "-cpu");
      record_line(session, "record-" + what, link, device);
      backward_line(session, "backward-" + what, link, device);
      if (device.is_cpu()) run_line(session, "run-" + what, link);
    }
}

}  // namespace sheaf::bench
