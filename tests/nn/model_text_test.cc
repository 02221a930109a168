// A model as text: before it is sharded, and with the units and placements of a rank.
#include "sheaf/nn/model_text.h"

#include <gtest/gtest.h>

#include <map>

#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/embedding.h"
#include "sheaf/nn/layers/mlp.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

struct Block : nn::Module {
  nn::Linear up, down;
  explicit Block(bool bias) : up(4, 8, {.bias = bias, .cut = OwnershipMap::even(0)}), down(8, 4, {.bias = bias, .cut = OwnershipMap::even(1)}) {}
  SHEAF_FIELDS(up, down);
};

struct Net : nn::Module {
  nn::Embedding tokens{6, 4};
  std::vector<Block> blocks;
  std::map<std::string, nn::Linear> heads;
  nn::Buffer mean{{4}, nn::Init::zeros()};
  Net() {
    for (const bool bias : {true, true, false}) blocks.emplace_back(bias);
    heads.emplace("left", nn::Linear(4, 6, {.bias = false})), heads.emplace("right", nn::Linear(4, 6));
    nn::tie(heads.at("left").weight, tokens.weight);
    nn::freeze(heads.at("right"));
  }
  SHEAF_FIELDS(tokens, blocks, heads, mean);
};

TEST(ModelText, ShowsAModelThatIsNotSharded) {
  Net net;
  EXPECT_EQ(nn::to_text(net), R"(Net: 270 parameters, 30 of them frozen
  tokens: Embedding
    weight  f32[6,4]  a table
  blocks.0 to blocks.1: Block
    up: Linear
      weight  f32[8,4]
      bias  f32[8]
    down: Linear
      weight  f32[4,8]
      bias  f32[4]
  blocks.2: Block
    up: Linear
      weight  f32[8,4]
    down: Linear
      weight  f32[4,8]
  heads.left: Linear
    weight  is tokens.weight
  heads.right: Linear
    weight  f32[6,4]  frozen
    bias  f32[6]  frozen
  mean  f32[4]  a buffer
)");
}

TEST(ModelText, ShowsUnitsAndWhatIsCut) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}, {"model", 2}});
    Net net;
    shard(net, mesh, {.tensor_axis = "model", .units = nn::units_of<Block>(), .compute_dtype = kBF16});
    EXPECT_NE(nn::to_text(net).find("blocks.0 to blocks.1: Block, each a unit\n"), std::string::npos) << nn::to_text(net);
    materialize(net, w.device());
    const std::string text = nn::to_text(net);
    for (const char* line : {"Net: 270 parameters, 30 of them frozen; masters of 4 units, ",
                             "\nthe root is a unit: f32[", " Shard(flat)@data", " computing in bf16; f32[",
                             "\n      weight  f32[8,4]  Shard(0)@model\n", "\n      weight  f32[4,8]  Shard(1)@model\n", "  heads.right: Linear\n"})
      EXPECT_NE(text.find(line), std::string::npos) << line << " in\n" << text;
  });
}

}  // namespace
}  // namespace sheaf
