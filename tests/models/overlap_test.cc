// Gradients of weights that are computed while other gradients are in flight: the bits of a run that waits for all, and which nodes the
// tape has between a start and its wait.
#include <gtest/gtest.h>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/ops/pending_redistribute.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

models::TrainConfig config_of(const std::string& type, int64_t tensor, int64_t context) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_model(type, 6, 3);
  c.model.mlp_width = 48;
  c.model.dropout = 0.1;
  c.sharding.tensor = tensor, c.sharding.context = context;
  c.sharding.piece_rows = 1;
  c.train.micro_batches = 2;
  return c;
}

constexpr int kSteps = 4;

// With `overlap`, communication overlaps with compute as it does on fast links.
TrainedRun trained(const models::TrainConfig& config, int world, bool overlap, Tape* tape = nullptr) {
  TrainedRun run;
  Whole whole;
  run_local(world, [&](World& w) {
    models::TrainingStepOptions options = tiny_options(config);
    options.overlap = overlap;
    models::TrainingStep step(config, config.model.vocab, w, Device::cpu(), options);
    models::RecordedStep recorded;
    for (int s = 0; s < kSteps; ++s) {
      const auto result = step.run(s, tiny_data(config), s + 1 == kSteps ? &recorded : nullptr);
      if (w.rank() != 0) continue;
      run.losses.push_back(result.loss.item());
      run.norms.push_back(result.grad_norm.item());
    }
    whole.collect(step.model(), false);
    if (tape && w.rank() == 0) *tape = recorded.tape;
  }, {.bytes_per_second = overlap ? 2e7 : 0, .threads_per_rank = 1});
  run.parameters = whole.values();
  return run;
}

void expect_bits_of_waiting(const models::TrainConfig& plain, int world, const std::string& name) {
  std::vector<std::pair<const char*, models::TrainConfig>> ways(6, {"", plain});
  ways[1].first = "in blocks again", ways[1].second.train.recompute = "block";
  ways[2].first = "selective", ways[2].second.train.recompute = "selective";
  ways[3].first = "a unit for each layer", ways[3].second.sharding.units = "count", ways[3].second.sharding.min_parameters = 1;
  ways[4].first = "program", ways[4].second.train.compile = true;
  ways[5].first = "zero1", ways[5].second.sharding.strategy = "zero1";
  for (const auto& [what, config] : ways) {
    SCOPED_TRACE(str(name, " of ", world, ": ", what));
    expect_same_bits(trained(config, world, false), trained(config, world, true));
  }
}

TEST(Overlap, ChangesNoBit) {
  for (const char* type : {"gpt2", "untied llama"})
    for (const auto& [tensor, context, world] : {std::tuple(2, 1, 2), {3, 1, 3}, {2, 1, 4}, {1, 2, 2}, {2, 2, 4}})
      expect_bits_of_waiting(config_of(type, tensor, context), world, str(type, ' ', tensor, " x ", context));
}

// Keys and values arrive in groups of heads: six heads, three, and also a rank's part of six that a tensor axis cuts.
TEST(Overlap, OfGatheredKeysChangesNoBit) {
  for (const auto& [type, tensor, context, world] :
       {std::tuple("gpt2", 1, 2, 2), {"gpt2", 2, 2, 4}, {"untied llama", 1, 3, 3}, {"latent", 1, 2, 2}}) {
    models::TrainConfig c = config_of(type, tensor, context);
    if (type == std::string("latent")) c.model = tiny_model(type, 6, 6);
    c.sharding.context_comm = "all_gather";
    expect_bits_of_waiting(c, world, str(type, ' ', tensor, " x ", context, " gathered"));
    Tape tape;
    trained(c, world, true, &tape);
    int64_t by_heads = 0;
    for (NodeId id = 0; id < tape.num_nodes(); ++id)
      by_heads += tape.node(id).op == &in_pieces_op() && tape.type(tape.output(tape.node(id))).shape.rank() == 4;
    EXPECT_EQ(by_heads, type == std::string("latent") ? 0 : 2 * 2 * c.model.layers);  // of two micro-batches, and once more in the backward
  }
}

// The nodes that compute between each start in a backward and its wait, by module; and the other collectives of that module that are waited
// for in between.
std::multimap<std::string, std::string> meanwhile(const Tape& tape) {
  std::multimap<std::string, std::string> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& start = tape.node(id);
    if (start.op != &start_op()) continue;
    std::string computed;
    NodeId next = id + 1;
    for (; next < tape.num_nodes(); ++next) {
      const Node& n = tape.node(next);
      if (tape.op_name(n) == "wait" && tape.inputs(n)[0] == tape.output(start)) break;
      const std::string name = tape.op_name(n);
      const bool waits = name == "all_gather" || name == "reduce_scatter" || name == "all_to_all" || name == "all_reduce";
      if (waits && n.op != &start_op() && tape.path(n) == tape.path(start)) computed += (computed.empty() ? "" : ", ") + name + " " + tape.path(n);
      if (name == "matmul" || name.starts_with("linear") || name == "expert_weight_gradient")
        computed += (computed.empty() ? "" : ", ") + name + " " + tape.path(n);
    }
    EXPECT_LT(next, tape.num_nodes()) << "node " << id << " never arrives";
    out.emplace(tape.path(start) + " " + tape.op_name(start), computed);
  }
  return out;
}

TEST(Overlap, TapesShowWhatIsComputedMeanwhile) {
  models::TrainConfig c = config_of("untied llama", 2, 1);
  c.train.micro_batches = 1;
  Tape tape;
  trained(c, 2, true, &tape);
  std::multimap<std::string, std::string> expected;
  for (const std::string block : {"blocks.0", "blocks.1"}) {
    const std::string attention = block + ".attention", mlp = block + ".mlp";
    expected.emplace(mlp + " all_gather", "matmul " + mlp + ".up");
    expected.emplace(mlp + " reduce_scatter", "linear_weight_gradient " + mlp + ".up");
    expected.emplace(attention + ".projection all_gather", "linear_weight_gradient " + mlp + ".gate");
    expected.emplace(attention + " all_gather", "matmul " + attention + ".qkv");
    expected.emplace(attention + " reduce_scatter", "linear_weight_gradient " + attention + ".qkv");
  }
  const auto sorted = [](const auto& map) {
    std::vector<std::pair<std::string, std::string>> all(map.begin(), map.end());
    std::ranges::sort(all);
    return all;
  };
  EXPECT_EQ(sorted(meanwhile(tape)), sorted(expected));
  trained(c, 2, false, &tape);
  EXPECT_TRUE(meanwhile(tape).empty());
}

models::TrainConfig mixture_of(int64_t ranks) {
  models::TrainConfig c = config_of("untied llama", 1, 1);
  c.model = tiny_biased_mixture();
  c.sharding.experts = ranks;
  return c;
}

TEST(Overlap, OfExpertsChangesNoBit) {
  const std::pair<const char*, models::ModelConfig> mixtures[] = {
      {"shared", tiny_biased_mixture()}, {"alone", tiny_mixture()}, {"with places", tiny_mixture(1.1)}, {"with biases", tiny_gpt_oss()}};
  for (const auto& [name, model] : mixtures)
    for (const auto& [ranks, world] : {std::pair(2, 2), {3, 3}, {2, 4}})
      for (const char* recompute : {"none", "block"})
        for (const bool compile : {false, true}) {
          SCOPED_TRACE(str(name, ": ", ranks, " of ", world, ", ", recompute, compile ? ", program" : ""));
          models::TrainConfig c = mixture_of(ranks);
          c.model = model;
          c.train.recompute = recompute, c.train.compile = compile;
          expect_same_bits(trained(c, world, false), trained(c, world, true));
        }
}

// If tokens are gathered, the router overlaps as well.
TEST(Overlap, RoutersComputeWhileTokensAreGathered) {
  models::TrainConfig c = mixture_of(2);
  c.train.micro_batches = 1;
  Tape tape;
  trained(c, 2, true, &tape);
  std::multimap<std::string, std::string> expected;
  for (int64_t i = c.model.dense_layers; i < c.model.layers; ++i) {
    const std::string moe = str("blocks.", i, ".moe"), shared = moe + ".shared";
    expected.emplace(moe + " all_gather", str("linear ", moe, ".router, linear ", shared, ".gate, linear ", shared, ".up, linear ", shared,
                                              ".down, all_gather ", moe));  // of choices, after everything that can be computed meanwhile
    std::string back;
    for (const std::string& layer : {shared + ".down", shared + ".up", shared + ".gate", moe + ".router"})
      back += str(back.empty() ? "" : ", ", "matmul ", layer, ", linear_weight_gradient ", layer);
    expected.emplace(moe + " reduce_scatter", back);
  }
  EXPECT_EQ(meanwhile(tape), expected);
}

// In pieces: tokens sent to experts, results sent back, and the results' gradients. The gradients of the sent tokens overlap with gradients
// of weights instead.
TEST(Overlap, RowsOfExpertsTravelInPieces) {
  for (const bool shared : {false, true}) {
    models::TrainConfig c = mixture_of(2);
    if (!shared) c.model = tiny_gpt_oss();
    else c.model.experts_per_token = 2;  // otherwise there are fewer tokens than rows, and they are gathered
    c.train.micro_batches = 1;
    Tape tape;
    trained(c, 2, true, &tape);
    int64_t come = 0, go = 0;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) come += tape.node(id).op == &in_pieces_op(), go += tape.node(id).op == &output_in_pieces_op();
    const int64_t mixtures = c.model.layers - c.model.dense_layers;
    EXPECT_EQ(come, mixtures * (shared ? 1 : 2));  // with shared experts tokens are sent whole
    EXPECT_EQ(go, mixtures);
  }
}

// The MLP for all tokens is computed while tokens are sent to experts; also in the backward.
TEST(Overlap, SharedExpertsComputeWhileTokensTravel) {
  models::TrainConfig c = mixture_of(2);
  c.model.experts_per_token = 2;
  c.train.micro_batches = 1;
  Tape tape;
  trained(c, 2, true, &tape);
  std::multimap<std::string, std::string> expected;
  const int64_t mixtures = c.model.layers - c.model.dense_layers;
  ASSERT_GT(mixtures, 0);
  for (int64_t i = c.model.dense_layers; i < c.model.layers; ++i) {
    const std::string moe = str("blocks.", i, ".moe"), shared = moe + ".shared", weights = "expert_weight_gradient " + moe + ".experts";
    expected.emplace(moe + " all_to_all", str("linear ", shared, ".gate, linear ", shared, ".up, linear ", shared, ".down"));
    std::string back = weights + ", " + weights;
    for (const char* layer : {".down", ".up", ".gate"})
      back += str(", matmul ", shared, layer, ", linear_weight_gradient ", shared, layer);
    expected.emplace(moe + ".experts all_to_all", back);
  }
  const std::multimap<std::string, std::string> actual = meanwhile(tape);
  EXPECT_EQ((std::vector<std::pair<std::string, std::string>>(actual.begin(), actual.end())),
            (std::vector<std::pair<std::string, std::string>>(expected.begin(), expected.end())));
}

// Planned to the byte, including what is lent to the lanes.
TEST(Overlap, PlansAreMeasured) {
  for (const char* type : {"gpt2", "untied llama"})
    for (const bool compile : {false, true}) {
      models::TrainConfig c = config_of(type, 2, 2);
      c.train.compile = compile;
      expect_planned_tapes(c, 4);
      for (const char* recompute : {"none", "block", "selective"}) {  // the peak is in a forward, in a recomputed one, or at a product
        c = config_of(type, 2, 1);
        c.train.compile = compile, c.train.recompute = recompute;
        c.model.mlp_width = 96;
        expect_planned_tapes(c, 2);
      }
      c = mixture_of(2);
      c.train.compile = compile;
      expect_planned_tapes(c, 4);
    }
}

}  // namespace
}  // namespace sheaf::testing
