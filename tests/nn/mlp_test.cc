// The MLP with either gelu, against its formula, on meshes whose ranks share rows and hidden units.
#include "sheaf/nn/layers/mlp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

using Values = std::map<std::string, std::vector<double>>;

constexpr int64_t kRows = 6, kWidth = 5;

nn::MLP mlp_of(GeluKind kind) {
  return nn::MLP({.width = kWidth, .hidden = 6, .gelu = kind, .init = nn::Init::normal(0.7), .projection_init = nn::Init::normal(0.7)});
}

// The output and the gradients of sum(y * c), of the layer or of the ops that it stands for.
Values values_on(const std::vector<MeshSpec::Axis>& axes, GeluKind kind, const std::function<Tensor(nn::MLP&, const Tensor&)>& forward) {
  Values out;
  int ranks = 1;
  for (const auto& axis : axes) ranks *= axis.size;
  run_local(ranks, [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    nn::MLP m = mlp_of(kind);
    Layout layout(mesh.spec, Placement::shard(0));
    if (axes.size() > 1) layout[1] = Placement::shard(1);
    shard(m, mesh, {.tensor_axis = axes.size() > 1 ? "model" : ""});
    materialize(m, w.device(), {.seed = 4, .dtype = kF64});
    const Type type{kF64, {kRows, 4, kWidth}, {}};
    const Tensor x = redistribute(randn(type, Key{1}), layout), factors = redistribute(randn(type, Key{2}), layout);
    {
      Recording recording;
      recording.backward(sum(forward(m, x) * factors));
      recording.take();
    }
    Values mine{{"y", redistribute(forward(m, x), Layout(mesh.spec)).to_vector<double>()}};
    for (const nn::Parameter& p : m.parameters()) mine[p.name()] = full_gradient(p).to_vector<double>();
    if (w.rank() == 0) out = mine;
  }, {.threads_per_rank = 1});
  return out;
}

void expect_near(const Values& actual, const Values& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, want] : expected) {
    const std::vector<double>& got = actual.at(name);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-11) << name << ' ' << i << " on " << what;
  }
}

TEST(Mlp, HasTheGeluOfItsConfig) {
  EXPECT_EQ(nn::MlpConfig().gelu, GeluKind::tanh);
  for (const GeluKind kind : {GeluKind::exact, GeluKind::tanh}) {
    const Values expected = values_on({{"data", 1}}, kind, [&](nn::MLP& m, const Tensor& x) {
      const auto scope = m.enter();
      const Tensor y = linear(x, m.up.weight, m.up.bias);
      return linear(gelu(y, kind), m.down.weight, m.down.bias);
    });
    const auto layer = [](nn::MLP& m, const Tensor& x) { return m(x); };
    for (const int ranks : {1, 2, 3}) {
      expect_near(values_on({{"data", ranks}}, kind, layer), expected, str(ranks, " of data"));
      expect_near(values_on({{"data", 1}, {"model", ranks}}, kind, layer), expected, str(ranks, " of model"));
    }
  }
}

TEST(Mlp, ExactIsByTheNormalDistribution) {
  nn::MLP m = mlp_of(GeluKind::exact);
  materialize(m, Device::cpu(), {.seed = 1, .dtype = kF64});
  const Tensor x = randn({kF64, {3, kWidth}, {}}, Key{1});
  const std::vector<double> in = x.to_vector<double>(), up = full_parameter(m.up.weight).to_vector<double>(),
                            down = full_parameter(m.down.weight).to_vector<double>(), y = m(x).to_vector<double>();
  ASSERT_EQ(y.size(), in.size());
  for (size_t i = 0; i < y.size(); ++i) {
    double want = 0;
    for (size_t h = 0; h < 6; ++h) {
      double u = 0;
      for (size_t c = 0; c < kWidth; ++c) u += in[i / kWidth * kWidth + c] * up[h * kWidth + c];
      want += u * 0.5 * std::erfc(-u / std::sqrt(2.0)) * down[i % kWidth * 6 + h];
    }
    EXPECT_NEAR(y[i], want, 1e-12) << i;
  }
}

}  // namespace
}  // namespace sheaf
