// Tells two spirals apart, with a layer and an op of its own (snake.h), fully sharded over ranks
// that are threads here.
//
//   bazel run //examples:classifier -- [RANKS]
#include <cmath>
#include <iostream>
#include <numbers>

#include "sheaf/examples/snake.h"

namespace examples {
namespace {

using namespace sheaf;

struct Classifier : nn::Module {
  SnakeLayer first, second;
  nn::Linear head;

  explicit Classifier(int64_t width) : first(2, width), second(width, width), head(width, 2) {}
  Tensor forward(const Tensor& x_B2) { return head(second(first(x_B2))); }
  SHEAF_FIELDS(first, second, head);
};

struct Points {
  Tensor x, label;  // f32[n, 2] and i64[n]
};

// Two arms of 1.5 turns, `shift` of a point's distance further along.
Points spirals(int64_t n, double shift) {
  std::vector<float> x;
  std::vector<int64_t> label;
  for (int64_t i = 0; i < n; ++i) {
    const double t = (static_cast<double>(i / 2) + shift + 0.5) / (static_cast<double>(n) / 2);
    const double angle = 3 * std::numbers::pi * t + (i % 2) * std::numbers::pi;
    x.push_back(static_cast<float>(3 * t * std::cos(angle)));
    x.push_back(static_cast<float>(3 * t * std::sin(angle)));
    label.push_back(i % 2);
  }
  return {Tensor::from(x, {n, 2}), Tensor::from(label, {n})};
}

void train(World& world) {
  const Mesh mesh = world.mesh({{"data", world.size()}});
  const Layout rows(mesh.spec, Placement::shard(0)), everywhere(mesh.spec, Placement::invariant());
  // Every rank makes all points and takes its rows of them, so this slice moves no byte.
  const auto place = [&](const Points& p) {
    return Points{redistribute(p.x, rows), redistribute(p.label, rows)};
  };
  const Points seen = place(spirals(301, 0.0)), unseen = place(spirals(301, 0.4));

  Classifier model(32);
  shard(model, mesh, {.units = nn::units_of<SnakeLayer>()});
  materialize(model, world.device(), {.seed = 1});
  optim::AdamW optimizer(model, {.weight_decay = 0.0});
  for (int64_t step = 0; step < 300; ++step) {
    Recording recording({.step = step});
    const Tensor loss = cross_entropy(model(seen.x), seen.label);
    recording.backward(loss);
    optimizer.step({.lr = optim::cosine(step, {.peak = 2e-2, .warmup = 10, .total = 300})});
    optimizer.zero_grad();
    const Tensor mean = redistribute(loss, everywhere);
    if (step % 100 == 99) world.print("step ", step + 1, "  loss ", mean.item());
  }
  // Counts of right answers on each rank are addends; summed, they are the same on all.
  const Tensor right = sum(cast(eq(argmax(model(unseen.x)), unseen.label), kF32));
  const float accuracy =
      redistribute(right, everywhere).item() / static_cast<float>(unseen.x.size(0));
  world.print("accuracy on unseen points ", accuracy);
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) try {
  sheaf::run_local(argc > 1 ? std::stoi(argv[1]) : 2, examples::train);
} catch (const sheaf::Error& e) {
  std::cerr << "classifier: " << e.what() << '\n';
  return e.exit_code();
}
