// A user-defined language model: blocks of parallel attention and MLP (as in PaLM, https://arxiv.org/abs/2204.02311). Only its parts are
// defined here; models::Decoder provides the rest: losses, logits, generation and pipeline stages, in addition to all that shard() does.
#include <gtest/gtest.h>

#include "sheaf/sheaf.h"

namespace examples {
namespace {

using namespace sheaf;

struct ParallelBlock : models::DecoderBlock {
  nn::RMSNorm norm;
  nn::SelfAttention attention;
  nn::MLP mlp;

  ParallelBlock(const nn::AttentionConfig& a, const nn::MlpConfig& m) : norm(a.width), attention(a), mlp(m) {}
  nn::Residual forward(nn::Residual stream, nn::KeyValueCache* cache) override {
    const Tensor begins_BT = stream.begins;  // of documents, if they are kept apart
    const NormedSum x_BTC = norm(std::move(stream));
    return {x_BTC.sum, attention(x_BTC.normed, cache, begins_BT) + mlp(x_BTC.normed), begins_BT};
  }
  SHEAF_FIELDS(norm, attention, mlp);
};

struct ParallelDecoder : models::Decoder {
  nn::Embedding tokens;
  std::vector<ParallelBlock> blocks;
  nn::RMSNorm norm;

  ParallelDecoder(int64_t layers, int64_t width, int64_t vocab, int64_t context)
      : Decoder({.type = "parallel", .layers = layers, .width = width, .vocab = vocab, .context = context, .end_of_text = -1,
                 .tied = true}),
        tokens(models::token_table(vocab, width)),
        norm(width) {
    const nn::Init writes = models::residual_init(layers);
    for (int64_t i = 0; i < layers; ++i)
      blocks.emplace_back(nn::AttentionConfig{.width = width, .heads = 4, .bias = false, .rope_theta = 1e4, .projection_init = writes},
                          nn::MlpConfig{.width = width, .bias = false, .projection_init = writes});
  }
  SHEAF_FIELDS(tokens, blocks, norm, head);

 private:
  nn::Embedding& table() override { return tokens; }
  ParallelBlock& block(int64_t i) override { return blocks[static_cast<size_t>(i)]; }
  nn::Residual embedded(const Tensor& tokens_BT, int64_t /*position*/, const Tensor& /*begins_BT*/) override { return {.x = tokens(tokens_BT)}; }
  Tensor normed(nn::Residual stream) override { return norm(std::move(stream)).normed; }
};

constexpr int64_t kLayers = 4, kVocab = 24, kContext = 8, kRows = 4;

/// Rows [begin, begin + rows) of tokens, each the next ones of a sequence.
Tensor rows_of(int64_t begin, int64_t rows, int64_t shift) {
  std::vector<int32_t> all;
  for (int64_t i = 0; i < rows * kContext; ++i) all.push_back(static_cast<int32_t>((begin * kContext + i + shift) * 7 % kVocab));
  return Tensor::from(all, {rows, kContext});
}

using Gradients = std::vector<std::vector<double>>;

/// The gradients of a step with micro-batches of one row, through `stages` stages of two runs of blocks each.
Gradients gradients(int stages, int data, int model_ranks) {
  Gradients out;
  run_local(stages * data * model_ranks, [&](World& world) {
    const Mesh mesh = world.mesh({{"stage", stages, /*chain=*/true, /*ring=*/true}, {"data", data}, {"model", model_ranks}});
    ParallelDecoder model(kLayers, 16, kVocab, kContext);
    const StageCut cut(kLayers, stages, /*runs=*/2);
    shard(model, mesh, {.tensor_axis = "model",
                        .stage_axis = "stage",
                        .stage_of = [&](const nn::Module& m, const std::string&) { return model.stage_of(m, cut); },
                        .units = nn::units_of<ParallelBlock>()});
    materialize(model, world.device(), {.seed = 1, .dtype = kF64});
    const int stage = mesh.coordinate("stage");
    const int64_t micro_batches = kRows / data;
    Layout batch(mesh.spec, Placement::shard(0));
    batch = batch.with(mesh.spec->axis("model"), Placement::shard(1));  // sequences' tokens
    const auto on = [&](int s) { return batch.with(mesh.spec->axis("stage"), Placement::on(s)); };
    Recording recording;
    std::vector<models::ForwardProgress> at(static_cast<size_t>(micro_batches));
    std::vector<Tensor> losses(at.size());
    for (const auto [kind, micro, run] : one_forward_one_backward(stage, stages, micro_batches, /*runs=*/2)) {
      const auto m = static_cast<size_t>(micro);
      if (kind == Turn::backward) {
        recording.backward(losses[m], {.last_micro_batch = micro + 1 == micro_batches, .last_part_only = true});
        continue;
      }
      run == 0 ? recording.next_micro_batch(data * micro) : recording.resume_micro_batch(data * micro);
      losses[m] = model.loss_until(cut.end_of_run(run, stage), at[m], redistribute(rows_of(data * micro, data, 0), on(0)),
                                   redistribute(rows_of(data * micro, data, 1), on(stages - 1)), {.divide_by = kRows * kContext});
    }
    recording.take();
    for (const nn::Parameter& p : model.parameters()) {
      const Tensor g = full_gradient(p);
      if (world.rank() == 0) out.push_back(g.to_vector<double>());
    }
  });
  return out;
}

TEST(OwnDecoder, HasTheGradientsOfOneRank) {
  const Gradients expected = gradients(1, 1, 1);
  for (const auto& [stages, data, model_ranks] : {std::tuple{1, 2, 1}, {2, 1, 1}, {1, 1, 2}, {2, 2, 2}}) {
    const Gradients actual = gradients(stages, data, model_ranks);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t p = 0; p < expected.size(); ++p)
      for (size_t i = 0; i < expected[p].size(); ++i)
        ASSERT_NEAR(actual[p][i], expected[p][i], 1e-12) << stages << " x " << data << " x " << model_ranks;
  }
}

TEST(OwnDecoder, GeneratesFromItsCache) {
  ParallelDecoder model(2, 16, kVocab, kContext);
  materialize(model, Device::cpu(), {.seed = 1});
  const Tensor all = rows_of(0, 2, 0);
  nn::KeyValueCache cache(kContext);
  model.next_logits(slice(all, 1, 0, 5), cache);
  EXPECT_TRUE(equal(model.next_logits(slice(all, 1, 5, kContext), cache), slice(model.logits(all), 1, kContext - 1, kContext)));
}

}  // namespace
}  // namespace examples
