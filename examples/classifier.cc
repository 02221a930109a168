// Tells two spirals apart with a user-defined layer and op (snake.h), fully sharded over ranks that are threads in this process, on the GPU
// if there is one. With a FOLDER it saves checkpoints to it and resumes from the latest one, with any number of ranks.
//
//   bazel run //examples:classifier -- [RANKS [FOLDER [STEPS]]]
#include <cmath>
#include <iostream>
#include <numbers>
#include <sstream>

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

// Two arms of 1.5 turns; `shift` moves a point along its arm by that fraction of the distance to the next point.
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

constexpr int64_t kSteps = 300;

void train(World& world, const std::string& folder, int64_t stop) {
  const Mesh mesh = world.mesh({{"data", world.size()}});
  const Layout rows(mesh.spec, Placement::shard(0)), everywhere(mesh.spec, Placement::invariant());
  // Every rank generates all points and slices out its own rows, so this slice needs no communication.
  const auto place = [&](const Points& p) {
    return Points{redistribute(p.x.to(world.device()), rows),
                  redistribute(p.label.to(world.device()), rows)};
  };
  const Points seen = place(spirals(301, 0.0)), unseen = place(spirals(301, 0.4));

  Classifier model(32);
  shard(model, mesh, {.units = nn::units_of<SnakeLayer>()});
  materialize(model, world.device(), {.seed = 1});
  optim::AdamW optimizer(model, {.weight_decay = 0.0});
  int64_t step = 0;
  if (const auto saved = models::load_checkpoint(folder, model, {&optimizer}, world)) {
    step = saved->step;
    world.print("resumed from ", saved->path);
  }
  for (; step < stop; ++step) {
    Tensor loss;
    {
      Recording recording({.step = step});
      loss = cross_entropy(model(seen.x), seen.label);
      recording.backward(loss);
      optimizer.step({.lr = optim::cosine(step, {.peak = 2e-2, .warmup = 10, .total = kSteps})});
      optimizer.zero_grad();
    }  // values outlive their recording; saving happens outside any recording
    const int64_t done = step + 1;
    if (done % 100 != 0 && done != stop) continue;
    const float mean = redistribute(loss, everywhere).item();
    world.print("step ", done, "  loss ", mean);
    if (!folder.empty()) models::save_checkpoint(folder, done, model, {&optimizer}, world);
  }
  // Each rank's count of correct answers is a partial sum; summed, it is the same on all ranks.
  const Tensor right = sum(cast(eq(argmax(model(unseen.x)), unseen.label), kF32));
  const float accuracy =
      redistribute(right, everywhere).item() / static_cast<float>(unseen.x.size(0));
  world.print("accuracy on unseen points ", accuracy);
}

int number(const char* text) {
  std::istringstream in(text);
  int value = 0;
  check<ConfigError>(in >> value && in.eof(), "'", text, "' is not a number");
  return value;
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) try {
  const int ranks = argc > 1 ? examples::number(argv[1]) : 2;
  const std::string folder = argc > 2 ? argv[2] : "";
  const int64_t steps = argc > 3 ? examples::number(argv[3]) : examples::kSteps;
  sheaf::run_local(
      ranks, [&](sheaf::World& world) { examples::train(world, folder, steps); },
      {.device = sheaf::distributed::init_device()});
} catch (const sheaf::Error& e) {
  std::cerr << "classifier: " << e.what() << '\n';
  return e.exit_code();
}
