// Recurrent layers: a GRU, token by token, and a gated recurrence that is linear in its state, in chunks of tokens, by
// gated_delta_rule().
//
//   B sequences   T tokens   I features   W width
#include <algorithm>
#include <cmath>
#include <utility>

#include "sheaf/examples/expect_gradients.h"

namespace examples {
namespace {

using namespace sheaf;

/// Gated recurrent units (Cho et al., https://arxiv.org/abs/1406.1078), with the reset gate where cuDNN has it.
struct Gru : nn::Module {
  nn::Linear input, state;  // to both gates and the candidate, next to each other

  Gru(int64_t in, int64_t width) : input(in, 3 * width), state(width, 3 * width) {}
  Tensor forward(const Tensor& x_BTI) {
    const Tensor input_BTG = input(x_BTI);  // of all tokens in one product
    Tensor h_B1W = full_of({input_BTG.dtype(), {x_BTI.size(0), 1, state.weight.shape()[1]}, x_BTI.layout()}, 0);
    std::vector<Tensor> out;
    for (const Tensor& token : chunk(input_BTG, input_BTG.size(1), 1)) {
      const auto x = chunk(token, 3, 2), h = chunk(state(h_B1W), 3, 2);
      const Tensor reset = sigmoid(x[0] + h[0]), keep = sigmoid(x[1] + h[1]), candidate = tanh(x[2] + reset * h[2]);
      h_B1W = candidate + keep * (h_B1W - candidate);
      out.push_back(h_B1W);
    }
    return concat(out, 1);
  }
  SHEAF_FIELDS(input, state);
};

/// h = (1 - z) h + z v for each token and channel, z and v functions of the token alone (minGRU: Feng et al.,
/// https://arxiv.org/abs/2410.01201). In the terms of the gated delta rule: keys and queries are the number 1, beta is z, and nothing
/// decays otherwise.
struct GatedAverage : nn::Module {
  nn::Linear value, gate;

  GatedAverage(int64_t in, int64_t width) : value(in, width), gate(in, width) {}
  Tensor forward(const Tensor& x_BTI) {
    const Tensor v_BTW = value(x_BTI), z_BTW = sigmoid(cast(gate(x_BTI), kF32));
    const Tensor ones_BT2 = full_of({v_BTW.dtype(), {v_BTW.size(0), v_BTW.size(1), 2}, v_BTW.layout()}, 1);  // a query and a key
    const GatedDeltaRuleOptions options{.heads = v_BTW.size(2), .key_heads = 1, .key_width = 1, .scale = 1, .norm_eps = 0};
    return gated_delta_rule(concat({ones_BT2, v_BTW}, 2), full_like(z_BTW, 0), z_BTW, options).out;
  }
  SHEAF_FIELDS(value, gate);
};

constexpr int64_t kB = 5, kT = 70, kI = 3, kW = 4;

double x_at(int64_t b, int64_t t, int64_t i) {
  const int64_t at = (b * kT + t) * kI + i;
  return static_cast<double>(static_cast<float>(std::sin(static_cast<double>(at * at))));
}

Tensor sequences(World& world, const Mesh& mesh) {
  std::vector<float> x;
  for (int64_t b = 0; b < kB; ++b)
    for (int64_t t = 0; t < kT; ++t)
      for (int64_t i = 0; i < kI; ++i) x.push_back(static_cast<float>(x_at(b, t, i)));
  return redistribute(Tensor::from(x, {kB, kT, kI}).to(world.device()), Layout(mesh.spec, Placement::shard(0)));
}

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

/// Row `row` of a layer's weight, without its bias, which is 0, times a vector.
double row_times(const std::vector<double>& weight, int64_t row, std::span<const double> x) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += weight[static_cast<size_t>(row) * x.size() + i] * x[i];
  return sum;
}

/// The states of all sequences after each position: `advance` gets an input and the state before, and returns the next.
template <class F>
std::vector<double> states(F&& advance) {
  std::vector<double> out;
  for (int64_t b = 0; b < kB; ++b) {
    std::vector<double> h(kW, 0.0);
    for (int64_t t = 0; t < kT; ++t) {
      h = advance(std::vector<double>{x_at(b, t, 0), x_at(b, t, 1), x_at(b, t, 2)}, std::as_const(h));
      out.insert(out.end(), h.begin(), h.end());
    }
  }
  return out;
}

std::vector<double> by_definition(const Gru& model) {
  const auto input = full_parameter(model.input.weight).to_vector<double>(), state = full_parameter(model.state.weight).to_vector<double>();
  return states([&](const std::vector<double>& x, const std::vector<double>& before) {
    std::vector<double> h(kW);
    for (int64_t w = 0; w < kW; ++w) {
      const double reset = logistic(row_times(input, w, x) + row_times(state, w, before));
      const double keep = logistic(row_times(input, kW + w, x) + row_times(state, kW + w, before));
      const double candidate = std::tanh(row_times(input, 2 * kW + w, x) + reset * row_times(state, 2 * kW + w, before));
      h[static_cast<size_t>(w)] = (1 - keep) * candidate + keep * before[static_cast<size_t>(w)];
    }
    return h;
  });
}

std::vector<double> by_definition(const GatedAverage& model) {
  const auto value = full_parameter(model.value.weight).to_vector<double>(), gate = full_parameter(model.gate.weight).to_vector<double>();
  return states([&](const std::vector<double>& x, std::vector<double> h) {
    for (int64_t w = 0; w < kW; ++w) {
      const double z = logistic(row_times(gate, w, x));
      h[static_cast<size_t>(w)] += z * (row_times(value, w, x) - h[static_cast<size_t>(w)]);
    }
    return h;
  });
}

// Its values are those of its definition, its gradients those of one rank, and a step has no op of this name.
template <class Layer>
void check(const std::string& absent = "") {
  Gradients expected;
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      Layer model(kI, kW);
      shard(model, mesh);
      materialize(model, world.device(), {.seed = 1});
      Tensor y;
      {
        Recording recording;
        y = model(sequences(world, mesh));
        recording.backward(mean(square(y)));
        const Tape& tape = recording.tape();
        for (NodeId id = 0; id < tape.num_nodes(); ++id) EXPECT_NE(tape.op_name(tape.node(id)), absent);
      }
      const auto values = full_tensor(y).to_vector<double>(), by_loop = by_definition(model);
      ASSERT_EQ(values.size(), by_loop.size());
      for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], by_loop[i], 2e-6);
      expect_gradients(model, expected, world.rank(), str(ranks, " ranks"));
    });
}

TEST(Gru, IsItsDefinition) { check<Gru>("pad"); }  // the gradient of a slice

TEST(GatedAverage, IsItsDefinition) { check<GatedAverage>(); }

}  // namespace
}  // namespace examples
