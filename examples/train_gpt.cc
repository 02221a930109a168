// A GPT trained fully sharded, built from the parts of the library: what `sheaf train` does, without its options.
//
//   bazel build //examples:train_gpt //tools:sheaf
//   bazel-bin/tools/sheaf launch --nproc-per-node 2 -- bazel-bin/examples/train_gpt TEXT [STEPS]
#include <iostream>
#include <sstream>

#include "sheaf/sheaf.h"

using namespace sheaf;

int main(int argc, char** argv) try {
  const std::string text = argc > 1 ? argv[1] : "out/bible.txt";
  std::istringstream number(argc > 2 ? argv[2] : "200");
  int64_t steps = 0;
  check<ConfigError>(number >> steps && number.eof(), "STEPS: '", number.str(), "' is not a number");

  World world = distributed::init_from_env();  // the ranks that a launcher started, or one
  const Mesh mesh = world.mesh({{"data", world.size()}});
  const models::Corpus corpus = models::load_text_corpus(text, "char", /*val_fraction=*/0.1);

  models::Gpt model({.layers = 2, .heads = 4, .width = 64, .context = 64, .vocab = corpus.vocab});  // no memory yet
  shard(model, mesh, {.axis = "data", .units = nn::units_of<models::Block>(), .strategy = Strategy::full_shard});
  materialize(model, world.device(), {.seed = 1337});  // each rank fills only what it owns
  optim::AdamW optimizer(model, {.weight_decay = 0.1});
  check<ConfigError>(16 % world.size() == 0, "[train_gpt] ", world.size(), " ranks do not divide a batch of 16");
  const models::TokenStream data(corpus.train, {.batch_per_rank = 16 / world.size(), .context = 64}, mesh);

  for (int64_t step = 0; step < steps; ++step) {
    const auto [tokens, targets, first_sample] = data.batch(step);  // Shard(0) over "data"
    Recording recording({.step = step, .first_sample = first_sample, .seed = 1337});
    const Tensor loss = model.loss(tokens, targets);  // the mean over all ranks' targets: Partial
    recording.backward(loss);                         // gathers, discards and reduce-scatters are on the tape
    clip_grad_norm(model, 1.0);
    optimizer.step({.lr = optim::cosine(step, {.peak = 3e-3, .warmup = 10, .total = steps})});
    optimizer.zero_grad();
    const Tensor mean = redistribute(loss, "data", Placement::invariant());
    if (step % 10 == 0 || step + 1 == steps) world.print("step ", step, "  loss ", mean.item());
  }
} catch (const Error& e) {
  std::cerr << "train_gpt: " << e.what() << '\n';
  return e.exit_code();
}
