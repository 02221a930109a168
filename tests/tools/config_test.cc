#include "sheaf/tools/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "sheaf/core/file.h"
#include "sheaf/models/run_state.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::tools {
namespace {

using models::TrainConfig;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Config : public ::testing::Test {
 protected:
  ScratchFolder folder;
  TrainConfig load(const std::string& toml, const std::vector<std::string>& overrides = {}) {
    write_file(folder / "c.toml", toml);
    return load_config(folder / "c.toml", overrides);
  }
  std::string error(const std::string& toml, const std::vector<std::string>& overrides = {}) {
    const std::string text = message_of<ConfigError>(ExitCode::kConfig, [&] { load(toml, overrides); });
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  }
};

TEST_F(Config, FileThenCommandLine) {
  const TrainConfig c = load("[model]\nlayers = 6\nbias = true\n[train]\nlr = 1\nsteps = 10\n[data]\ncorpus = 'a.txt'\n",
                             {"--train.steps", "20", "--train.min_lr=2.5e-4", "--model.bias", "false",
                              "--generate.prompt=a=b", "--generate.prompt", "--x", "--sharding.prefetch_bytes", "-1"});
  EXPECT_EQ(c.model.layers, 6);
  EXPECT_FALSE(c.model.bias);
  EXPECT_EQ(c.train.lr, 1.0);
  EXPECT_EQ(c.train.steps, 20);
  EXPECT_EQ(c.train.min_lr, 2.5e-4);
  EXPECT_EQ(c.data.corpus, "a.txt");
  EXPECT_EQ(c.generate.prompt, "--x");
  EXPECT_EQ(c.sharding.prefetch_bytes, -1);
  EXPECT_EQ(c.train.batch, TrainConfig().train.batch);
}

TEST_F(Config, UnknownKeysNameTheNearest) {
  EXPECT_THAT(error("[train]\nsteps = 1\nlearing_rate = 1\n"),
              AllOf(HasSubstr("c.toml:3: unknown key \"train.learing_rate\""), HasSubstr("see --help")));
  EXPECT_THAT(error("\n[train]\nwarmpu = 1\n"), HasSubstr("c.toml:3: unknown key \"train.warmpu\"; did you mean \"train.warmup\"?"));
  EXPECT_THAT(error("[model]\nlr = 1\n"), HasSubstr("did you mean \"train.lr\"?"));
  EXPECT_THAT(error("[train]\n" + std::string(1 << 20, 'a') + " = 1\n"), HasSubstr("aaa...\"; see --help"));
  std::string deep = "a";
  for (int i = 0; i < 100'000; ++i) deep += ".a";
  EXPECT_THAT(error("[train]\n" + deep + " = 1\n"), HasSubstr(":2: a key of more than 100 parts"));
  EXPECT_THAT(error("[" + deep + "]\n"), HasSubstr(":1: a key of more than 100 parts"));
  EXPECT_THAT(error("[trian]\nlr = 1\n"), HasSubstr("c.toml:1: unknown key \"[trian]\""));
  EXPECT_THAT(error("steps = 1\n"), HasSubstr("did you mean \"train.steps\"?"));
  EXPECT_THAT(error("", {"--model.expert_groups", "1"}), HasSubstr("did you mean \"model.capacity_groups\"?"));
  EXPECT_THAT(error("[model]\nexpert_parts = 1\n"), HasSubstr("did you mean \"model.routing_groups\"?"));
  EXPECT_THAT(error("", {"--train.step", "1"}), HasSubstr("command line: unknown key \"train.step\"; did you mean \"train.steps\"?"));
  EXPECT_THAT(error("[train]\n\"a\\nb\" = 1"), HasSubstr("train.a\\nb"));
}

TEST_F(Config, TypesAndRanges) {
  EXPECT_THAT(error("[train]\nsteps = 1.5\n"), HasSubstr("c.toml:2: 'train.steps' takes an integer, not 1.5"));
  EXPECT_THAT(error("[train]\nsteps = 2.0\n"), HasSubstr("takes an integer, not 2.0"));
  EXPECT_THAT(error("", {"--train.batch", "9223372036854775807"}), HasSubstr("must be in [1, 1e+09], not 9223372036854775807"));
  EXPECT_THAT(error("[train]\nsteps = '1'\n"), HasSubstr("takes an integer, not \"1\""));
  EXPECT_THAT(error("[train]\nlr = true\n"), HasSubstr("takes a number, not true"));
  EXPECT_THAT(error("[train]\nlr = nan\n"), HasSubstr("must be"));
  EXPECT_THAT(error("[train]\nlr = inf\n"), HasSubstr("must be in [0, 1e+06], not inf"));
  EXPECT_THAT(error("[model]\nbias = 1\n"), HasSubstr("takes true or false, not 1"));
  EXPECT_THAT(error("[model]\nlayers = [1]\n"), HasSubstr("not an array"));
  EXPECT_THAT(error("model = 1\n"), HasSubstr("[model] is a section"));
  EXPECT_THAT(error("[model]\ntype = 'gpt3'\n"), HasSubstr("'model.type' is one of gpt2, llama; not \"gpt3\""));
  EXPECT_THAT(error("[model]\nlayers = 0\n"), HasSubstr("must be in [1, 10000], not 0"));
  EXPECT_THAT(error("[model]\npreset = 'gpt2-1b'\n"), HasSubstr("gpt2-124m"));
  for (const char* text : {"1x", "", "1.5", "0x1", " 1", "99999999999999999999"}) {
    EXPECT_THAT(error("", {"--train.steps", text}), HasSubstr("'train.steps' takes an integer")) << text;
  }
  EXPECT_THAT(error("", {"--model.bias", "1"}), HasSubstr("takes true or false"));
  EXPECT_THAT(error("", {"--train.lr"}), HasSubstr("--train.lr lacks a value"));
  EXPECT_THAT(error("", {"train.lr", "1"}), HasSubstr("expected --section.key, found \"train.lr\""));
  // As the shell expands an unquoted pattern.
  for (const char* key : {"--data.train_file", "--data.val_file"})
    EXPECT_THAT(error("", {"--train.lr", "1", key, "a_1.bin", "a_2.bin"}),
                HasSubstr(str("found \"a_2.bin\"; a pattern of several files needs quotes to keep the shell from it: ", key)));
  EXPECT_THAT(error("", {"--train.lr", "1", "2"}), ::testing::EndsWith("found \"2\""));
}

TEST_F(Config, BadFiles) {
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { load_config(folder / "none.toml"); }),
              AllOf(HasSubstr("none.toml"), HasSubstr("No such file")));
  EXPECT_THAT(error("[train]\nsteps = \n"), HasSubstr("c.toml:2: "));
  EXPECT_THAT(error("[train]\nsteps = 1\nsteps = 2\n"), HasSubstr("c.toml:3: "));
  EXPECT_THAT(error("a = '\xff'"), HasSubstr("c.toml:1: "));
  EXPECT_THAT(error(std::string(100'000, '[')), HasSubstr("c.toml:1: "));
}

TEST_F(Config, PresetsGiveWhatWasNotGiven) {
  const TrainConfig c = load("[model]\ncontext = 256\npreset = 'gpt2-1558m'\n", {"--model.layers", "2"});
  EXPECT_EQ(c.model.layers, 2);
  EXPECT_EQ(c.model.context, 256);
  EXPECT_EQ(c.model.heads, 25);
  EXPECT_EQ(c.model.width, 1600);
  EXPECT_EQ(c.model.vocab, 50257);
  EXPECT_TRUE(c.model.bias);
  const TrainConfig l = load_config("", std::vector<std::string>{"--model.preset=llama3-8b"});
  EXPECT_EQ(l.model.type, "llama");
  EXPECT_EQ(l.model.kv_heads, 8);
  EXPECT_EQ(l.model.mlp_width, 14336);
  EXPECT_FALSE(l.model.tie_embeddings);
}

TEST_F(Config, APresetOfTheCommandLineWinsOverTheFilesShape) {
  const std::string file = "[model]\ntype = 'llama'\nlayers = 3\nwidth = 96\ncontext = 32\nqk_norm = true\nexperts = 4\ndropout = 0.1\n"
                           "lora_rank = 8\nrope_scaling.rope_type = 'llama3'\n[train]\nbatch = 7\n";
  const models::ModelConfig preset = load("", {"--model.preset", "gpt2-124m"}).model;
  const TrainConfig c = load(file, {"--model.preset", "gpt2-124m"});
  EXPECT_EQ(c.model.type, "gpt2");
  EXPECT_EQ(c.model.layers, 12);
  EXPECT_EQ(c.model.width, 768);
  EXPECT_EQ(c.model.context, 1024);
  EXPECT_EQ(c.model.vocab, 50257);
  // Fields of the run itself stay.
  EXPECT_EQ(c.model.dropout, 0.1);
  EXPECT_EQ(c.model.lora_rank, 8);
  EXPECT_EQ(c.train.batch, 7);
  TrainConfig shape = c;
  shape.model.dropout = 0, shape.model.lora_rank = 0;
  TrainConfig alone;
  alone.train.batch = 7, alone.model = preset;
  EXPECT_EQ(print_config(shape), print_config(alone));
  // Fields on the command line override it, regardless of order; they also override a file's preset.
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--model.context=64", "--model.preset=gpt2-124m"},
                                                {"--model.preset=gpt2-124m", "--model.context=64"}}) {
    EXPECT_EQ(load(file, flags).model.context, 64);
    EXPECT_EQ(load(file, flags).model.layers, 12);
  }
  EXPECT_EQ(load("[model]\npreset = 'llama3-8b'\ncontext = 32\n", {"--model.preset", "gpt2-124m"}).model.context, 1024);
  EXPECT_EQ(load("[model]\npreset = 'gpt2-124m'\ncontext = 32\n", {"--model.preset", "gpt2-124m"}).model.context, 1024);
  EXPECT_EQ(load("[model]\npreset = 'gpt2-124m'\ncontext = 32\n", {"--model.preset="}).model.context, 32);
  EXPECT_THAT(error(file, {"--model.preset", "llama3-8b", "--model.heads", "4"}), HasSubstr("model.kv_heads 8 (of the preset llama3-8b)"));
}

// On resuming, the same preset says nothing new.
TEST_F(Config, ARunThatGoesOnKeepsWhatWasGivenBesideItsPreset) {
  write_file(folder / "config.toml", print_config(load("", {"--model.preset", "gpt2-124m", "--model.context", "64"})));
  const auto resumed = [&](const char* preset, bool resume) {
    return load_config(folder / "config.toml", std::vector<std::string>{"--output.folder", folder.path(), "--model.preset", preset}, resume).model;
  };
  EXPECT_EQ(resumed("gpt2-124m", true).context, 64);
  EXPECT_EQ(resumed("gpt2-124m", false).context, 1024);
  EXPECT_EQ(resumed("gpt2-355m", true).context, 1024);
}

TEST_F(Config, WhatFollowsFromAPresetsSizesFollowsFromThoseGiven) {
  const TrainConfig c = load("", {"--model.preset", "gpt2-124m", "--model.heads", "2", "--model.width", "384"});
  EXPECT_EQ(models::resolved(c.model).kv_heads, 2);
  EXPECT_EQ(models::resolved(c.model).mlp_width, 4 * 384);
  EXPECT_EQ(models::resolved(load("", {"--model.preset", "gpt2-124m"}).model).mlp_width, 3072);
  // A Llama's key and value heads and hidden size have no defaults that depend on other fields.
  EXPECT_THAT(error("", {"--model.preset", "llama3-8b", "--model.heads", "4"}),
              HasSubstr("model.heads 4 is not a multiple of model.kv_heads 8 (of the preset llama3-8b)"));
  EXPECT_THAT(error("[model]\npreset = 'llama3-8b'\nwidth = 100\n"),
              HasSubstr("model.width 100 is not a multiple of model.heads 32 (of the preset llama3-8b)"));
}

TEST_F(Config, AFlagMayTurnOffWhatTheFileHasGiven) {
  const std::string file = "[train]\nrecompute = 'block'\nrecompute_blocks = 1\n";
  EXPECT_THAT(error(file, {"--train.recompute", "none"}),
              AllOf(HasSubstr("'train.recompute_blocks' would change nothing: "),
                    HasSubstr("; --train.recompute_blocks -1 sets it back to the default")));
  EXPECT_EQ(load(file, {"--train.recompute", "none", "--train.recompute_blocks", "-1"}).train.recompute_blocks, -1);
  EXPECT_THAT(error("", {"--train.recompute_blocks", "-1"}), HasSubstr("'train.recompute_blocks' would change nothing"));
}

TEST_F(Config, StringsThatConfigTomlCouldNotHoldAreRefused) {
  EXPECT_THAT(error("", {"--data.corpus", "caf\xe9/c.txt"}), AllOf(HasSubstr("'data.corpus' takes UTF-8"), HasSubstr("(byte 3)")));
  EXPECT_EQ(load("", {"--data.corpus", "caf\xc3\xa9/c.txt"}).data.corpus, "caf\xc3\xa9/c.txt");
}

TEST_F(Config, WhatWouldChangeNothingIsRefused) {
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.bias", "false"}),
              HasSubstr("'model.bias' would change nothing: only model.type gpt2 has biases"));
  EXPECT_THAT(error("", {"--model.head_dim", "64"}), HasSubstr("only model.type llama has heads of another width"));
  EXPECT_THAT(error("", {"--model.qk_norm", "true"}), HasSubstr("only model.type llama has such norms"));
  EXPECT_THAT(error("", {"--model.full_attention_every", "2"}),
              HasSubstr("would change nothing: without model.window and model.linear_key_heads all blocks see all"));
  EXPECT_THAT(error("", {"--model.window", "8", "--model.full_attention_every", "1"}),
              HasSubstr("would change nothing: with model.full_attention_every 1 all blocks see all keys"));
  EXPECT_THAT(error("", {"--model.window", "-1"}), HasSubstr("model.window"));
  EXPECT_THAT(error("", {"--model.rope_theta", "10000"}), HasSubstr("only model.type llama has rotary embeddings"));
  EXPECT_THAT(error("", {"--model.experts", "8"}), HasSubstr("only model.type llama has mixtures of experts"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.aux_loss", "0.1"}), HasSubstr("only mixtures of experts (model.experts)"));
  EXPECT_THAT(error("", {"--model.preset", "mixtral-8x7b", "--model.capacity_groups", "4"}),
              HasSubstr("without model.capacity_factor nothing is counted"));
  EXPECT_EQ(load("", {"--model.preset", "mixtral-8x7b", "--model.capacity_factor", "1.25"}).model.experts, 8);
  for (const char* key : {"--model.attention_sinks", "--model.out_bias"})
    EXPECT_THAT(error("", {key, "true"}), HasSubstr("only model.type llama has it"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.expert_linear_bias", "true"}), HasSubstr("only mixtures of experts (model.experts)"));
  EXPECT_THAT(error("", {"--model.preset", "mixtral-8x7b", "--model.expert_gate_alpha", "2"}),
              HasSubstr("without model.expert_gate_limit gates are SwiGLU's"));
  EXPECT_EQ(load("", {"--model.preset", "gpt-oss-20b", "--model.expert_gate_alpha", "2"}).model.expert_gate_limit, 7);
  const auto latent = [](std::vector<std::string> more) {
    std::vector<std::string> all{"--model.type", "llama", "--model.kv_lora_rank", "8"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  EXPECT_EQ(load("", latent({"--model.width", "100", "--model.heads", "8", "--model.qk_nope_head_dim", "16"})).model.kv_lora_rank, 8);
  EXPECT_THAT(error("", {"--model.kv_lora_rank", "8"}), HasSubstr("only model.type llama has latent attention"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.q_lora_rank", "8"}), HasSubstr("only latent attention (model.kv_lora_rank) has it"));
  EXPECT_THAT(error("", latent({"--model.qk_norm", "true"})), HasSubstr("neither model.qk_norm nor model.qkv_bias"));
  EXPECT_THAT(error("", latent({"--model.attention_sinks", "true"})),
              HasSubstr("neither model.out_bias, model.attention_sinks nor model.attention_gate"));
  EXPECT_THAT(error("", latent({"--model.kv_heads", "2"})), HasSubstr("each head has keys of its own"));
  EXPECT_THAT(error("", latent({"--model.head_dim", "32"})), HasSubstr("follows from model.qk_nope_head_dim 32 and model.qk_rope_head_dim 16"));
  EXPECT_THAT(error("", latent({"--model.qk_rope_head_dim", "3"})), HasSubstr("model.qk_rope_head_dim 3"));
  EXPECT_EQ(load("", {"--model.preset", "deepseek-v2-lite", "--model.heads", "8", "--model.qk_rope_head_dim", "32"}).model.heads, 8);
  for (const char* key : {"--model.attention_gate", "--model.rotary_dim"})
    EXPECT_THAT(error("", {key, key == std::string_view("--model.rotary_dim") ? "2" : "true"}), HasSubstr("only model.type llama has it"));
  EXPECT_THAT(error("", latent({"--model.rotary_dim", "8"})), HasSubstr("model.qk_rope_head_dim says how much is rotated"));
  EXPECT_THAT(error("", latent({"--model.attention_gate", "true"})), HasSubstr("nor model.attention_gate"));
  for (const char* width : {"3", "34"})
    EXPECT_THAT(error("", {"--model.type", "llama", "--model.rotary_dim", width}), HasSubstr("an even number of elements of a head, which has 32"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.experts", "4", "--model.shared_expert_gate", "true"}),
              HasSubstr("without model.shared_experts there is nothing to gate"));
  const auto linear = [](std::vector<std::string> more) {
    std::vector<std::string> all{"--model.type", "llama", "--model.linear_key_heads", "2"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  EXPECT_EQ(load("", linear({"--model.full_attention_every", "4", "--model.linear_value_heads", "6"})).model.linear_key_heads, 2);
  EXPECT_THAT(error("", {"--model.linear_key_heads", "2"}), HasSubstr("only model.type llama has linear attention"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.linear_conv_kernel", "2"}),
              HasSubstr("only linear attention (model.linear_key_heads) has it"));
  EXPECT_THAT(error("", linear({"--model.linear_value_heads", "5"})), HasSubstr("model.linear_value_heads 5"));
  EXPECT_THAT(error("", linear({"--model.window", "8"})), HasSubstr("blocks without linear attention see all keys"));
  EXPECT_THAT(error("", linear({"--model.attention_sinks", "true"})), HasSubstr("all blocks have linear attention; see model.full_attention_every"));
  EXPECT_EQ(load("", {"--model.preset", "qwen3-next-80b-a3b", "--model.linear_key_heads", "0"}).model.linear_value_heads, 0);
  EXPECT_THAT(error("", linear({"--model.full_attention_every", "1"})),
              HasSubstr("with model.full_attention_every 1 all blocks have full attention"));
  EXPECT_THAT(error("", {"--sharding.min_parameters", "1000000"}), HasSubstr("only sharding.units count"));
  EXPECT_THAT(error("[sharding]\nmin_parameters = 1000\n"), HasSubstr("only sharding.units count"));
  EXPECT_EQ(load("[sharding]\nmin_parameters = 1000\n", {"--sharding.units", "count"}).sharding.min_parameters, 1000);
  EXPECT_THAT(error("", {"--data.end_of_text", "5"}), HasSubstr("only data.separate_documents asks where documents end"));
  EXPECT_EQ(load("", {"--data.end_of_text", "5", "--data.separate_documents", "true"}).data.end_of_text, 5);
  EXPECT_THAT(error("", {"--train.momentum", "0.95"}), HasSubstr("only train.optimizer muon has momentum"));
  EXPECT_EQ(load("", {"--train.momentum", "0.9", "--train.optimizer", "muon"}).train.momentum, 0.9);
  for (const char* key : {"--train.decay_start", "--train.decay_end", "--train.min_lr"})
    EXPECT_THAT(error("", {"--train.schedule", "constant", key, "500"}),
                HasSubstr("would change nothing: train.schedule constant has no decay"));
  EXPECT_EQ(load("[train]\nmin_lr = 1e-5\nfuse = false\n", {"--train.schedule", "constant"}).train.min_lr, 1e-5);
  EXPECT_EQ(load("[train]\nmin_lr = 1e-3\n", {"--train.schedule", "constant", "--train.lr", "1e-4"}).train.lr, 1e-4);
  EXPECT_THAT(error("", {"--train.fuse", "false"}), HasSubstr("'train.fuse' would change nothing: only train.compile fuses"));
  EXPECT_FALSE(load("", {"--train.fuse", "false", "--train.compile", "true"}).train.fuse);
  load("[model]\ntype = 'llama'\nbias = false\n");
  // A preset of another type gives only the fields that this type has.
  EXPECT_FALSE(load("", {"--model.preset", "gpt2-124m", "--model.type", "llama"}).model.bias);
  EXPECT_FALSE(load("", {"--model.preset", "qwen3-0.6b", "--model.type", "gpt2", "--model.kv_heads", "0"}).model.qk_norm);
  const TrainConfig c = load("", {"--model.preset", "llama3-8b", "--model.type", "gpt2", "--model.kv_heads", "0"});
  EXPECT_EQ(print_config(load(print_config(c))), print_config(c));
}

TEST_F(Config, ScaledRotaryPositions) {
  const std::vector<std::string> llama = {"--model.type=llama", "--model.rope_scaling.rope_type=llama3"};
  EXPECT_TRUE(models::rotary_scaling(load("", llama).model.rope_scaling) == RotaryScaling::llama3(8, 1, 4, 8192));
  // In a file in any of TOML's notations.
  for (const char* toml : {"[model]\ntype = 'llama'\nrope_scaling.rope_type = 'llama3'\nrope_scaling.factor = 32\n",
                           "[model]\ntype = 'llama'\n[model.rope_scaling]\nrope_type = 'llama3'\nfactor = 32.0\n",
                           "[model]\ntype = 'llama'\nrope_scaling = {rope_type = 'llama3', factor = 32}\n"}) {
    const TrainConfig c = load(toml, {"--model.rope_scaling.original_max_position_embeddings", "4096"});
    EXPECT_TRUE(models::rotary_scaling(c.model.rope_scaling) == RotaryScaling::llama3(32, 1, 4, 4096));
    EXPECT_EQ(print_config(load(print_config(c))), print_config(c));
  }
  const TrainConfig preset = load("", {"--model.preset", "llama3.2-1b"});
  EXPECT_TRUE(models::rotary_scaling(preset.model.rope_scaling) == RotaryScaling::llama3(32));
  EXPECT_EQ(print_config(load(print_config(preset))), print_config(preset));
  const TrainConfig plain = load("", {"--model.preset", "llama3.2-1b", "--model.rope_scaling.rope_type", "default"});
  EXPECT_TRUE(models::rotary_scaling(plain.model.rope_scaling) == RotaryScaling());
  load("", {"--model.preset", "llama3.2-1b", "--model.type", "gpt2", "--model.kv_heads", "0"});

  const auto refused = [&](const std::string& key, const std::string& value, const std::string& type = "llama3") {
    return error("", {"--model.type=llama", "--model.rope_scaling.rope_type", type, "--model.rope_scaling." + key, value});
  };
  EXPECT_THAT(error("", {"--model.type=llama", "--model.rope_scaling.rope_type=dynamic"}),
              HasSubstr("'model.rope_scaling.rope_type' cannot be \"dynamic\" yet; it is one of default, linear, llama3, yarn, longrope"));
  const TrainConfig yarn = load("", {"--model.type=llama", "--model.rope_scaling.rope_type=yarn", "--model.rope_scaling.factor=4",
                                     "--model.rope_scaling.original_max_position_embeddings=32768"});
  EXPECT_TRUE(models::rotary_scaling(yarn.model.rope_scaling) == RotaryScaling::yarn(4, 32768));
  EXPECT_EQ(print_config(load(print_config(yarn))), print_config(yarn));
  EXPECT_THAT(refused("beta_fast", "0.5", "yarn"), HasSubstr("model.rope_scaling.beta_fast is 0.5: expected a number not below beta_slow, 1"));
  EXPECT_THAT(refused("low_freq_factor", "2", "yarn"), HasSubstr("would change nothing: only model.rope_scaling.rope_type llama3"));
  EXPECT_THAT(refused("attention_factor", "3"), HasSubstr("would change nothing: only model.rope_scaling.rope_type yarn and longrope have it"));
  for (const char* key : {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
    EXPECT_THAT(refused(key, "3"), HasSubstr("would change nothing: only model.rope_scaling.rope_type yarn has it"));
  EXPECT_THAT(error("", {"--model.rope_scaling.rope_type", "llama3"}), HasSubstr("only model.type llama has rotary embeddings"));
  EXPECT_THAT(refused("factor", "0.5"), HasSubstr("'model.rope_scaling.factor' must be in [1, 1e+06], not 0.5"));
  EXPECT_THAT(refused("factor", "nan"), HasSubstr("not nan"));
  EXPECT_THAT(refused("factor", "8", "default"),
              HasSubstr("would change nothing: only model.rope_scaling.rope_type linear, llama3, yarn and longrope have it"));
  EXPECT_THAT(refused("low_freq_factor", "1", "linear"), HasSubstr("would change nothing: only model.rope_scaling.rope_type llama3"));
  EXPECT_THAT(refused("low_freq_factor", "0"), HasSubstr("model.rope_scaling.low_freq_factor is 0: expected a positive number"));
  EXPECT_THAT(refused("low_freq_factor", "4"),
              HasSubstr("model.rope_scaling.high_freq_factor is 4: expected a number above low_freq_factor, 4"));
  EXPECT_THAT(refused("original_max_position_embeddings", "0"), HasSubstr("must be in [1, 1e+09], not 0"));
  EXPECT_THAT(error("", {"--model.rope_scaling", "llama3"}), HasSubstr("did you mean \"model.rope_scaling.rope_type\"?"));
  EXPECT_THAT(error("[model]\nrope_scaling = 'llama3'\n"),
              HasSubstr("c.toml:2: [model.rope_scaling] is a section, not a value"));
  EXPECT_THAT(error("[model.rope_scaling]\nfactr = 2\n"),
              HasSubstr("unknown key \"model.rope_scaling.factr\"; did you mean \"model.rope_scaling.factor\"?"));
  EXPECT_THAT(error("[model]\nlayers = {n = 1}\n"), HasSubstr("'model.layers' takes an integer, not a table"));
}

// Lists of numbers are words of a text.
TEST_F(Config, FactorsOfRotaryPairs) {
  const std::vector<std::string> longrope = {"--model.type=llama", "--model.rope_scaling.rope_type=longrope", "--model.width=24", "--model.heads=4",
                                             "--model.rope_scaling.original_max_position_embeddings=32", "--model.rope_scaling.factor=2"};
  const auto with = [&](const std::string& short_factor, const std::string& long_factor, std::vector<std::string> more = {}) {
    more.insert(more.begin(), longrope.begin(), longrope.end());
    for (const std::string& flag : {"short_factor=" + short_factor, "long_factor=" + long_factor}) more.push_back("--model.rope_scaling." + flag);
    return more;
  };
  const TrainConfig c = load("", with("1 1.05 1.1", "  2e0 3.50 \t4"));
  EXPECT_TRUE(models::rotary_scaling(c.model.rope_scaling) == RotaryScaling::longrope({1, 1.05, 1.1}, {2, 3.5, 4}, 2, 32));
  EXPECT_EQ(print_config(load(print_config(c))), print_config(c));
  const TrainConfig by_file = load("[model]\ntype = 'llama'\nrotary_dim = 4\nrope_scaling = {rope_type = 'longrope', short_factor = '1 2', "
                                   "long_factor = '3 4', attention_factor = 1.5}\n");
  EXPECT_EQ(models::rotary_scaling(by_file.model.rope_scaling).amplitude, 1.5);
  EXPECT_THAT(error("", with("1 x 3", "1 2 3")),
              HasSubstr("model.rope_scaling.short_factor '1 x 3': numbers separated by spaces, \"1 1.05 1.1\"; found 'x'"));
  EXPECT_THAT(error("", with("1, 2, 3", "1 2 3")), HasSubstr("found '1,'"));
  EXPECT_THAT(error("", with("1 2 3", "1 2")),
              HasSubstr("model.rope_scaling.long_factor has 2 numbers: expected one for each of the 3 pairs of a head's rotated elements"));
  EXPECT_THAT(error("", with("1 2 3", "1 2 3", {"--model.rotary_dim=4"})), HasSubstr("model.rope_scaling.short_factor has 3 numbers: expected one"));
  EXPECT_THAT(error("", with("1 2 nan", "1 2 3")), HasSubstr("model.rope_scaling.short_factor[2] is nan: expected a positive number"));
  EXPECT_THAT(error("", longrope), HasSubstr("model.rope_scaling.short_factor has 0 numbers"));
  EXPECT_THAT(error("", {"--model.type=llama", "--model.rope_scaling.rope_type=yarn", "--model.rope_scaling.long_factor=1"}),
              HasSubstr("would change nothing: only model.rope_scaling.rope_type longrope has it"));
  EXPECT_THAT(error("", with("1 2 3", "1 2 3", {"--model.rope_scaling.beta_fast=2"})), HasSubstr("only model.rope_scaling.rope_type yarn has it"));
}

TEST_F(Config, SamplingStartsFromItsSectionOnly) {
  write_file(folder / "run.toml", "[model]\nlayers = 'of another program'\n[generate]\ntokens = 7\nseed = 3\n");
  const auto sampling = [&](const std::vector<std::string>& overrides) {
    return load_generate_config(folder / "run.toml", overrides);
  };
  EXPECT_EQ(sampling({}).tokens, 7);
  EXPECT_EQ(sampling({"--generate.tokens", "8"}).tokens, 8);
  EXPECT_EQ(sampling({"--generate.tokens", "8"}).seed, 3);
  EXPECT_EQ(load_generate_config(folder / "none", {}).tokens, models::GenerateConfig().tokens);
  const auto refused = [&](const std::vector<std::string>& overrides) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { sampling(overrides); });
  };
  EXPECT_THAT(refused({"--model.layers", "99"}), HasSubstr("[generate] --model.layers is not for sampling"));
  EXPECT_THAT(refused({"--generate.token", "9"}), HasSubstr("did you mean \"generate.tokens\"?"));
  EXPECT_THAT(config_help("generate."), AllOf(HasSubstr("--generate.seed "), ::testing::Not(HasSubstr("--train"))));
}

TEST_F(Config, PrintedTextGivesTheSameConfiguration) {
  TrainConfig c = load("", {"--model.preset", "gpt2-124m", "--train.lr", "0.1234567890123456789", "--generate.prompt",
                            "a\"\\\n\t\x7f é", "--train.seed", "9007199254740993", "--model.layers", "7"});
  const std::string text = print_config(c);
  EXPECT_EQ(print_config(load(text)), text);
  const TrainConfig again = load(text);
  EXPECT_EQ(again.generate.prompt, c.generate.prompt);
  EXPECT_EQ(again.train.lr, c.train.lr);
  EXPECT_EQ(again.train.seed, 9007199254740993);
  EXPECT_EQ(again.model.layers, 7);
  EXPECT_THAT(text, HasSubstr("[model]\ntype = \"gpt2\"\n"));
}

TEST_F(Config, FieldsThatDoNotFitTogether) {
  EXPECT_THAT(error("", {"--model.heads", "3"}), HasSubstr("model.width 128 is not a multiple of model.heads 3"));
  EXPECT_THAT(error("", {"--model.kv_heads", "2"}), HasSubstr("gpt2"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.head_dim", "7"}),
              HasSubstr("model.head_dim 7: rotary embedding needs an even size"));
  EXPECT_EQ(load("", {"--model.type", "llama", "--model.heads", "3", "--model.head_dim", "8"}).model.head_dim, 8);
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.kv_heads", "3"}), HasSubstr("model.kv_heads 3"));
  EXPECT_THAT(error("", {"--train.micro_batches", "13"}), HasSubstr("less than train.micro_batches"));
  EXPECT_THAT(error("", {"--train.lr", "1e-5", "--train.min_lr", "1e-4"}), HasSubstr("train.min_lr 0.0001 is above train.lr 1e-05"));
  EXPECT_THAT(error("", {"--train.min_lr", "-0.5"}), HasSubstr("train.min_lr -0.5 is no learning rate"));
  EXPECT_EQ(models::resolved(load("", {"--train.lr", "2e-5"}).train).min_lr, 2e-5 / 10);
  EXPECT_THAT(error("", {"--train.steps", "20", "--output.trace_step", "21"}), HasSubstr("output.trace_step 21: the run has 20 steps"));
  EXPECT_THAT(error("", {"--train.decay_start", "99"}),
              HasSubstr("train.decay_start 99 lies in the warm-up: train.warmup is 100"));
  EXPECT_THAT(error("", {"--train.decay_end", "100"}),
              HasSubstr("the decay would start at step 100 (train.warmup) and end at step 100 (train.decay_end)"));
  EXPECT_THAT(error("", {"--train.decay_start", "2000"}),
              HasSubstr("the decay would start at step 2000 (train.decay_start) and end at step 2000 (train.steps)"));
  load("", {"--train.decay_start", "1999"});
  load("", {"--train.decay_start", "100", "--train.decay_end", "101"});
  load("", {"--train.steps", "10"});  // all of it warm-up
  EXPECT_THAT(error("", {"--data.train_file", "x"}), HasSubstr("go together"));
  EXPECT_THAT(error("", {"--data.train_file", "x", "--data.val_file", "y", "--data.corpus", "z"}), HasSubstr("exclude"));
  EXPECT_THAT(error("", {"--output.keep_checkpoints", "1"}), HasSubstr("at least 2"));
  EXPECT_THAT(error("", {"--sharding.pipeline", "2", "--sharding.pipeline_head", "-0.5"}),
              HasSubstr("sharding.pipeline_head -0.5 is no number of blocks"));
  load("", {"--sharding.pipeline", "2", "--sharding.pipeline_head", "-1"});
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.experts", "4", "--model.gelu_gate", "true"}),
              HasSubstr("mixtures of experts (model.experts 4) are SwiGLU"));
  EXPECT_THAT(error("", {"--model.type", "llama", "--model.window_rope_theta", "5"}), HasSubstr("only model.type llama has it, with model.window"));
  const models::ModelConfig gemma = load("", {"--model.preset", "gemma3-1b"}).model,
                            whole = load("", {"--model.preset", "gemma3-1b", "--model.window", "0"}).model;
  EXPECT_EQ(gemma.window_rope_theta, 10000);
  EXPECT_TRUE(whole.window == 0 && whole.full_attention_every == 0 && whole.window_rope_theta == 0 && whole.post_norms);
  const auto of_islands = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--train.islands", "2", "--train.inner_steps", "50"});
    return error("", more);
  };
  load("", {"--train.islands", "2"});  // with the default evaluations
  EXPECT_THAT(of_islands({"--train.batch", "7"}), HasSubstr("train.batch 7 has no equal part for each"));
  EXPECT_THAT(of_islands({"--train.micro_batches", "7"}),
              HasSubstr("train.islands 2 have 6 sequences each of train.batch 12, less than train.micro_batches 7"));
  EXPECT_THAT(of_islands({"--train.eval_every", "60"}), HasSubstr("train.eval_every 60 is no multiple"));
  EXPECT_THAT(of_islands({"--train.dtype", "f16"}), HasSubstr("each would skip steps of its own"));
  EXPECT_THAT(error("", {"--train.inner_steps", "50"}),
              HasSubstr("'train.inner_steps' would change nothing: without train.islands there is one model"));
  load("", {"--sharding.pipeline", "2", "--sharding.pipeline_head", "0.5"});
}

// A field missing in the table would leave 8 bytes or more of its section untouched, unless it is a bool.
TEST_F(Config, EveryFieldIsInTheTable) {
  TrainConfig c;
  std::set<const void*> targets;
  std::set<std::string> keys;
  const std::map<std::string, size_t> sizes = {
      {"model", sizeof c.model - sizeof c.model.rope_scaling - sizeof c.model.end_of_text},  // which follows from [data]
      {"model.rope_scaling", sizeof c.model.rope_scaling},
      {"data", sizeof c.data - sizeof c.data.examples},  // which follows from the files
      {"train", sizeof c.train},
      {"sharding", sizeof c.sharding},
      {"output", sizeof c.output},
      {"generate", sizeof c.generate}};
  std::map<std::string, size_t> missing = sizes;
  for (const auto& field : config_fields(c)) {
    std::visit(
        [&](auto* target) {
          EXPECT_TRUE(targets.insert(target).second) << field.key;
          missing.at(field.key.substr(0, field.key.rfind('.'))) -= sizeof *target;
        },
        field.target);
    EXPECT_TRUE(keys.insert(field.key).second) << field.key;
    EXPECT_FALSE(field.doc.empty()) << field.key;
    EXPECT_THAT(config_help(), HasSubstr("--" + field.key + " "));
  }
  size_t whole = 0;
  for (const auto& [section, bytes] : missing) EXPECT_LT(bytes, 8u) << section;
  for (const auto& [section, size] : sizes) whole += size;
  EXPECT_EQ(whole + sizeof c.model.end_of_text + sizeof c.data.examples, sizeof c);  // no section is forgotten
}

// Everything that determines values must be the same on resuming: a field missing in models::RunState could change silently.
TEST_F(Config, EveryFieldOfAModelIsAskedForByResume) {
  // Names, whose effect other fields describe, and the vocabulary, which is compared as the data's.
  const std::set<std::string> others = {"model.preset", "model.weights", "model.vocab"};
  const auto state = [](const TrainConfig& c) {
    models::RunState s;
    s.model = c.model;
    s.train = c.train;
    return s;
  };
  TrainConfig saved, now;
  saved.model.type = now.model.type = "llama";
  saved.model.lora_rank = now.model.lora_rank = 4;
  for (const auto& field : config_fields(now)) {
    if (!field.key.starts_with("model.") || others.contains(field.key)) continue;
    const models::ModelConfig before = now.model;
    std::visit(
        [&](auto* target) {
          using T = std::remove_pointer_t<decltype(target)>;
          if constexpr (std::is_same_v<T, std::string>)
            *target = field.choices.empty() ? "1 2" : *target == field.choices.at(0) ? field.choices.at(1) : field.choices.at(0);
          else if constexpr (std::is_same_v<T, bool>) *target = !*target;
          else *target += 1;
        },
        field.target);
    const auto resume = [&] { check_resumable(state(saved), state(now)); };
    EXPECT_THAT(message_of<Error>(ExitCode::kResumeMismatch, resume), HasSubstr(field.key + " was "));
    now.model = before;
  }
}

}  // namespace
}  // namespace sheaf::tools
