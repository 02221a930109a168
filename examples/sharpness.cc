// How sharp the loss is along gradient descent: the largest eigenvalue of its Hessian, while a small GPT overfits one batch. It grows until
// it reaches 2 / lr, beyond which a step along its eigenvector overshoots, and stays about there (the "edge of stability": Cohen et al.
// 2021, https://arxiv.org/abs/2103.00065). Parameters, gradients and the direction are sharded: no rank ever holds a whole vector of the
// model's size.
//
//   bazel build //examples:sharpness //tools:sheaf
//   bazel-bin/tools/sheaf launch --nproc-per-node 2 -- bazel-bin/examples/sharpness TEXT STEPS LR
#include <cmath>
#include <iostream>
#include <sstream>

#include "sheaf/sheaf.h"

using namespace sheaf;

namespace {

template <class T>
T number(const char* name, const char* text) {
  std::istringstream in(text);
  T value = 0;
  check<ConfigError>(in >> value && in.eof() && value > 0, name, ": '", text,
                     "' is not a positive ", std::is_integral_v<T> ? "whole number" : "number");
  return value;
}

/// The eigenvalue of largest magnitude, by power iteration from `v`, which becomes the eigenvector.
template <class Loss>
double largest_eigenvalue(models::Gpt& model, models::Gpt& v, const Loss& loss) {
  double value = 0;
  for (int i = 0; i < 50; ++i) {
    zero_grad(model);
    {
      Recording recording({.higher_order = true});
      recording.backward(derivative_along(loss(), model, v));  // H v, where gradients are
    }
    const double before = value;
    value = gradient_along(model, v).item<double>();  // <H v, v>, where |v| = 1
    set_to_gradient(v, model, 1 / grad_norm(model).item<double>());
    if (i > 1 && std::abs(value - before) < 1e-2 * std::abs(value)) break;
  }
  zero_grad(model);
  return value;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string text = argc > 1 ? argv[1] : "out/bible.txt";
  const int64_t steps = argc > 2 ? number<int64_t>("STEPS", argv[2]) : 400;
  const double lr = argc > 3 ? number<double>("LR", argv[3]) : 0.1;

  World world = distributed::init_from_env();
  const Mesh mesh = world.mesh({{"data", world.size()}});
  const models::Corpus corpus = models::load_text_corpus(text, "char", /*val_fraction=*/0.1);
  const models::GptConfig options{
      .layers = 2, .heads = 2, .width = 32, .context = 32, .vocab = corpus.vocab};
  models::Gpt model(options), v(options);  // a direction is a model of the same shape
  for (nn::Parameter p : v.parameters()) p.set_init(nn::Init::normal(1));
  for (models::Gpt* m : {&model, &v}) {
    shard(*m, mesh, {.units = nn::units_of<models::Block>()});
    materialize(*m, world.device(), {.seed = 1337});
  }
  optim::SGD optimizer(model, {.lr = lr});
  const models::TokenStream data(corpus.train, {.batch_per_rank = 32 / world.size(), .context = 32},
                                 mesh);
  const auto [tokens, targets, first_sample] = data.batch(0);  // always the same
  const auto loss = [&] { return model.loss(tokens, targets); };

  for (int64_t step = 0; step <= steps; ++step) {
    if (step % 40 == 0) {
      const double sharpness = largest_eigenvalue(model, v, loss);
      const Tensor mean = redistribute(loss(), "data", Placement::invariant());
      world.print("step ", step, "  loss ", mean.item(), "  sharpness ", sharpness, "  of 2 / lr ",
                  sharpness * lr / 2);
    }
    Recording recording({.step = step});
    recording.backward(loss());
    optimizer.step();
    optimizer.zero_grad();
  }
} catch (const Error& e) {
  std::cerr << "sharpness: " << e.what() << '\n';
  return e.exit_code();
}
