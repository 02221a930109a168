// A small GPT that first imitates demonstrations, half of which are wrong, and then learns from rewards alone (grpo.h).
//
//   bazel build //examples:grpo //tools:sheaf
//   bazel-bin/tools/sheaf launch --nproc-per-node 2 -- bazel-bin/examples/grpo [STEPS]
#include "sheaf/examples/grpo.h"

#include <iostream>
#include <sstream>

#include "sheaf/examples/letters.h"

using namespace examples;

namespace {

constexpr int64_t kImitated = 300, kPrompts = 16;  // steps, and prompts of a step

/// A step's demonstrations: answers are targets, prompts are not.
void imitate(models::Gpt& model, optim::Optimizer& optimizer, int64_t step, const Layout& rows) {
  constexpr int64_t kRows = 64;
  const Type type{kI32, {kRows, Letters::kContext}, rows};
  std::vector<int32_t> tokens, targets;
  const int64_t first = step * kRows + type.local_start()[0];
  for (int64_t row = first; row < first + type.local_shape()[0]; ++row) {
    std::vector<int32_t> all = Letters::prompt(row);
    const std::vector<int32_t> answer = Letters::demonstration(row);
    const auto asked = std::ssize(all);
    all.insert(all.end(), answer.begin(), answer.end());
    tokens.insert(tokens.end(), all.begin(), all.end() - 1);
    for (int64_t t = 1; t < std::ssize(all); ++t) targets.push_back(t < asked ? -1 : all[static_cast<size_t>(t)]);
  }
  Recording recording({.step = step});
  const Device device = device_of(model);
  recording.backward(model.loss(Tensor::from_local(tokens, type).to(device), Tensor::from_local(targets, type).to(device)));
  clip_grad_norm(model, 1.0);
  optimizer.step({.lr = optim::cosine(step, {.peak = 3e-3, .warmup = 20, .total = kImitated})});
  optimizer.zero_grad();
}

}  // namespace

int main(int argc, char** argv) try {
  std::istringstream number(argc > 1 ? argv[1] : "60");
  int64_t steps = 0;
  check<ConfigError>(number >> steps && number.eof(), "STEPS: '", number.str(), "' is not a number");

  World world = distributed::init_from_env();
  check<ConfigError>(kPrompts % world.size() == 0, "[grpo] ", kPrompts, " prompts for ", world.size(), " ranks: each has as many");
  const Mesh mesh = world.mesh({{"data", world.size()}});
  const Layout rows(mesh.spec, Placement::shard(0));
  models::Gpt model({.layers = 2, .heads = 4, .width = 64, .context = Letters::kContext, .vocab = Letters::kVocab});
  shard(model, mesh, {.units = nn::units_of<models::Block>()});
  materialize(model, world.device(), {.seed = 1});
  {
    optim::AdamW optimizer(model);
    for (int64_t step = 0; step < kImitated; ++step) imitate(model, optimizer, step, rows);
  }
  optim::AdamW optimizer(model, {.lr = 3e-4});
  GrpoOptions options;
  options.draw.temperature = 1;
  const int64_t mine = kPrompts / world.size();
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t first = step * kPrompts + world.rank() * mine;
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t i = first; i < first + mine; ++i) prompts.push_back(Letters::prompt(1'000'000 + i));  // not among the demonstrations
    const Answers answers = answer(model, prompts, first, Letters::reward, Letters::kEnd, Letters::kContext, Letters::kVocab, rows, options);
    const double loss = learn(model, nullptr, optimizer, answers, step, options);
    if (step % 5 == 0 || step + 1 == steps) world.print("step ", step, "  right ", answers.mean_reward, "  loss ", loss);
  }
} catch (const Error& e) {
  std::cerr << "grpo: " << e.what() << '\n';
  return e.exit_code();
}
