#include "sheaf/models/parameter_factors.h"

#include <map>

#include <gtest/gtest.h>

#include "sheaf/models/gpt.h"

namespace sheaf::models {
namespace {

std::map<std::string, double> factors(const std::string& text, const optim::FactorRule& otherwise = {}) {
  Gpt model({.layers = 2, .heads = 1, .width = 4, .context = 4, .vocab = 5});
  const optim::FactorRule rule = factors_by_name("train.lr_factors", text, model, otherwise);
  std::map<std::string, double> out;
  for (const nn::Parameter& p : model.parameters()) out[p.name()] = rule(p);
  return out;
}

TEST(ParameterFactors, TheFirstPatternThatMatchesSaysIt) {
  for (const auto& [name, factor] : factors(" 0.5 blocks.1.*\t3e0 *.mlp.* 0 wte.weight\n"))
    EXPECT_EQ(factor, name.starts_with("blocks.1.") ? 0.5 : name.starts_with("blocks.0.mlp.") ? 3 : name == "wte.weight" ? 0 : 1) << name;
}

TEST(ParameterFactors, OthersAreLeftToTheRule) {
  const auto all = factors("7 blocks.[0-9].mlp.up.*", optim::decays_matrices);
  EXPECT_EQ(all.at("blocks.0.mlp.up.weight"), 7);
  EXPECT_EQ(all.at("blocks.1.mlp.down.weight"), 1);
  for (const auto& [name, factor] : all)
    if (name.find("norm") != std::string::npos) {
      EXPECT_EQ(factor, 0) << name;
    }
  EXPECT_EQ(factors("")["wte.weight"], 1);
}

}  // namespace
}  // namespace sheaf::models
