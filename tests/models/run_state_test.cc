// A checkpoint's description of its run, and what a run must have in common with it to resume.
#include "sheaf/models/run_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "sheaf/models/token_file.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RunState a_run() {
  RunState s;
  s.step = 7;
  s.vocab = 3;
  s.tokenizer = make_char_tokenizer("abc");
  s.val_fraction = 0.1;
  s.order = "shuffled";
  s.train_data = {90, "00aa"};
  s.val_data = {10, "00bb"};
  return s;
}

std::string mismatch(const RunState& saved, const RunState& now) {
  return message_of<Error>(ExitCode::kResumeMismatch, [&] { check_resumable(saved, now); });
}

/// The object without one of its members.
Json without(const Json& json, std::string_view key) {
  Json out;
  for (const auto& [name, value] : json.as_object())
    if (name != key) out.set(name, value);
  return out;
}

TEST(RunState, DigestsOfLongDataOfOlderCheckpointsAreNotCompared) {
  RunState now = a_run();
  Json json = now.to_json();
  Json::Object data;
  for (const auto& [name, value] : json.at("data").as_object())
    data.emplace_back(name, name == "train" || name == "val" ? without(value, "of_blocks") : value);
  const RunState old = RunState::from_json(without(json, "data").set("data", Json(data)));
  check_resumable(old, now);
  now.train_data->xxh3 = "00cc";  // short data have one digest, before and now
  EXPECT_THAT(mismatch(old, now), HasSubstr("the training data was 90 tokens with XXH3 00aa"));
  RunState old_long = old;
  old_long.train_data->tokens = now.train_data->tokens = kDigestBlock + 1;
  check_resumable(old_long, now);
  now.train_data->tokens += 1;
  EXPECT_THAT(mismatch(old_long, now), HasSubstr("the training data was 67108865 tokens"));
  RunState saved = now;
  now.train_data->xxh3 = "00dd";
  EXPECT_THAT(mismatch(saved, now), HasSubstr("the training data was 67108866 tokens with XXH3 00cc"));
}

TEST(RunState, ReadsBackWhatItWrites) {
  const RunState s = a_run(), again = RunState::from_json(Json::parse(s.to_json().dump(), "state"));
  EXPECT_EQ(again.to_json(), s.to_json());
  EXPECT_EQ(again.train.dtype, "f32");
  check_resumable(again, s);
}

// GPT-2 with separate documents: before this member existed, learned positions were counted from the window's start.
TEST(RunState, OlderCheckpointsHaveOtherPositions) {
  RunState run = a_run();
  run.model.type = "gpt2";
  const auto older = [&] { return RunState::from_json(without(run.to_json(), "positions_of_documents")); };
  run.model.end_of_text = -1;
  check_resumable(older(), run);
  run.model.end_of_text = 3;
  check_resumable(RunState::from_json(run.to_json()), run);
  EXPECT_THAT(mismatch(older(), run), HasSubstr("a learned position was counted from the window's first token in the checkpoint"));
  run.model.type = "llama";
  check_resumable(older(), run);
}

TEST(RunState, NamesWhatDiffers) {
  const RunState saved = a_run();
  const auto with = [&](auto&& change) {
    RunState now = a_run();
    change(now);
    return mismatch(saved, now);
  };
  EXPECT_THAT(with([](RunState& s) { s.train.dtype = "bf16"; }),
              HasSubstr("train.dtype was \"f32\" in the checkpoint and is \"bf16\" now"));
  // Only f16 scales its loss.
  EXPECT_FALSE(a_run().to_json().at("options").find("train.loss_scale_interval"));
  check_resumable(saved, [] { RunState s = a_run(); s.train.loss_scale_interval = 5; return s; }());
  RunState half = a_run();
  half.train.dtype = "f16", half.train.loss_scale_interval = 7;
  const RunState again = RunState::from_json(half.to_json());
  check_resumable(again, half);
  half.train.loss_scale = 8;  // a checkpoint has its own scale
  check_resumable(again, half);
  half.train.loss_scale_interval = 5;
  EXPECT_THAT(mismatch(again, half), HasSubstr("train.loss_scale_interval was 7 in the checkpoint and is 5 now"));
  EXPECT_THAT(mismatch(again, saved), HasSubstr("train.dtype was \"f16\" in the checkpoint and is \"f32\" now"));
  EXPECT_THAT(mismatch(saved, again), HasSubstr("train.dtype was \"f32\" in the checkpoint and is \"f16\" now"));
  EXPECT_THAT(with([](RunState& s) { s.val_fraction = 0.5; }), HasSubstr("data.val_fraction was 0.1"));
  EXPECT_THAT(with([](RunState& s) { s.order = "random"; }), HasSubstr("data.order was \"shuffled\" in the checkpoint"));
  EXPECT_THAT(with([](RunState& s) { s.train_data->xxh3 = "00cc"; }),
              HasSubstr("the training data was 90 tokens with XXH3 00aa in the checkpoint and is 90 tokens with XXH3 00cc"));
  EXPECT_THAT(with([](RunState& s) { s.val_data->tokens = 11; }), HasSubstr("the validation data was 10 tokens"));
  EXPECT_THAT(with([](RunState& s) { s.model.rope_scaling.rope_type = "llama3"; }),
              HasSubstr("model.rope_scaling.rope_type was \"default\" in the checkpoint and is \"llama3\" now"));
  EXPECT_THAT(with([](RunState& s) { s.model.rope_scaling.factor = 32; }), HasSubstr("model.rope_scaling.factor was 8"));
  EXPECT_THAT(with([](RunState& s) { s.model.rope_scaling.low_freq_factor = 2; }), HasSubstr("low_freq_factor was 1"));
  EXPECT_THAT(with([](RunState& s) { s.model.rope_scaling.high_freq_factor = 2; }), HasSubstr("high_freq_factor was 4"));
  EXPECT_THAT(with([](RunState& s) { s.model.rope_scaling.original_max_position_embeddings = 2; }),
              HasSubstr("original_max_position_embeddings was 8192"));
  EXPECT_THAT(with([](RunState& s) { s.model.rope_scaling.long_factor = "1 2"; }),
              HasSubstr("model.rope_scaling.long_factor was \"\" in the checkpoint and is \"1 2\" now"));
}

TEST(RunState, OfIslandsTheOuterStepIsCompared) {
  RunState saved = a_run();
  saved.train.islands = 2;
  saved.train.inner_steps = 5;
  for (const char* own : {"train.inner_steps", "train.outer_lr", "train.outer_momentum", "train.outer_dtype"}) {
    Json json = saved.to_json();
    json.set("options", without(json.at("options"), own));
    EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { RunState::from_json(json); }), HasSubstr(own));
  }
  saved = RunState::from_json(saved.to_json());
  RunState now = a_run();
  now.train.islands = 2;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.inner_steps was 5 in the checkpoint and is 50 now"));
  now.train.inner_steps = 5;
  check_resumable(saved, now);
  now.train.outer_momentum = 0;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.outer_momentum was 0.9 in the checkpoint and is 0"));
  now = a_run();
  now.train.outer_lr = 1;  // applies only to islands
  check_resumable(a_run(), now);
}

// Its means are over micro-batches.
TEST(RunState, OfALossForBalanceMicroBatchesAreCompared) {
  RunState saved = a_run();
  saved.model.type = "llama", saved.model.experts = 4, saved.train.micro_batches = 2;
  RunState now = saved;
  now.train.micro_batches = 1;
  check_resumable(RunState::from_json(saved.to_json()), now);
  saved.model.aux_loss = now.model.aux_loss = 0.01;
  EXPECT_THAT(mismatch(RunState::from_json(saved.to_json()), now), HasSubstr("train.micro_batches was 2 in the checkpoint and is 1 now"));
  check_resumable(RunState::from_json(saved.to_json()), saved);
  Json older = saved.to_json();
  older.set("options", without(older.at("options"), "train.micro_batches"));
  check_resumable(RunState::from_json(older), now);
  saved.model.experts = now.model.experts = 0;
  check_resumable(RunState::from_json(saved.to_json()), now);
}

TEST(RunState, ReadsEarlierNamesAndNoUnknownOptions) {
  RunState run = a_run();
  run.model.routing_groups = 8, run.model.routing_groups_per_token = 4, run.model.rotary_dim = 16;
  std::string older = run.to_json().dump();
  for (const auto& [now, before] : {std::pair("model.routing_groups_per_token", "model.expert_parts_per_token"),
                                    {"model.routing_groups", "model.expert_parts"},
                                    {"model.capacity_groups", "model.expert_groups"},
                                    {"model.rotary_dim", "model.rotary_width"}}) {
    const std::string quoted = str('"', now, '"');
    older.replace(older.find(quoted), quoted.size(), str('"', before, '"'));
  }
  EXPECT_EQ(RunState::from_json(Json::parse(older, "state")).to_json(), run.to_json());
  Json newer = run.to_json(), options = newer.at("options");
  newer.set("options", options.set("model.of_tomorrow", 1));
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { RunState::from_json(newer); }),
              HasSubstr("this version of Sheaf does not know its option 'model.of_tomorrow'"));
}

TEST(RunState, RemembersTheWeightsItStartedFrom) {
  RunState saved = a_run(), now = a_run();
  saved.weights = now.weights = {"gpt2", "00dd"};
  const RunState again = RunState::from_json(Json::parse(saved.to_json().dump(), "state"));
  EXPECT_EQ(again.to_json(), saved.to_json());
  now.weights->path = "elsewhere/gpt2";
  check_resumable(again, now);
  now.weights->xxh3 = "00ee";
  EXPECT_THAT(mismatch(again, now), HasSubstr("model.weights was 'gpt2' with XXH3 00dd in the checkpoint and is "
                                              "'elsewhere/gpt2' with XXH3 00ee now"));
  now.weights = std::nullopt;  // they no longer exist, or are not requested any more
  check_resumable(again, now);
  now.weights = saved.weights;
  EXPECT_THAT(mismatch(a_run(), now), HasSubstr("model.weights was empty: the run started from random weights"));
}

TEST(RunState, TokenizersAreToldApartInALine) {
  const RunState saved = a_run();
  RunState now = a_run();
  now.tokenizer = make_char_tokenizer("aBc");
  EXPECT_THAT(mismatch(saved, now), AllOf(HasSubstr("the tokenizer was \"char\" of 3 tokens, token 0 being \"a\", in the"),
                                          HasSubstr("is \"char\" of 3 tokens, token 0 being \"B\", now")));
  now.tokenizer = nullptr;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("is that of token files now"));
}

// Older programs wrote the values that presets filled in; newer ones leave them to the type.
TEST(RunState, WhatZeroStandsForIsTheSame) {
  for (const char* type : {"gpt2", "llama"}) {
    RunState saved = a_run(), now = a_run();
    saved.model.type = now.model.type = type;
    saved.model.kv_heads = 4;
    saved.model.mlp_width = type == std::string("gpt2") ? 512 : 384;
    check_resumable(saved, now);
    saved.model.mlp_width = 640;
    EXPECT_THAT(mismatch(saved, now), HasSubstr("model.mlp_width was 640"));
  }
}

// A run may be extended where that does not change its learning rate so far.
TEST(RunState, StepsCountThroughTheDecay) {
  RunState saved = a_run(), now = a_run();
  now.train.steps = 3000;
  EXPECT_THAT(mismatch(saved, now),
              HasSubstr("train.decay_end, by default train.steps, was 2000 in the checkpoint and is 3000 now"));
  now.train.decay_end = 2000;
  check_resumable(saved, now);
  check_resumable(now, saved);
  now.train.decay_start = 1500;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.decay_start was 100 in the checkpoint and is 1500 now"));
  now.train.decay_start = saved.train.warmup;
  check_resumable(saved, now);
  now.train.decay_start = now.train.decay_end = 0;
  saved.train.schedule = now.train.schedule = "constant";
  check_resumable(saved, now);
}

// Whatever changes the numbers of a run is compared; what changes only its speed or its lines is not.
TEST(RunState, EveryOptionOfTheOptimizationIsCompared) {
  RunState saved = a_run();
  saved.train.islands = 2, saved.train.dtype = "f16";
  const std::vector<std::pair<const char*, std::function<void(OptimizationConfig&)>>> changes = {
      {"batch", [](auto& t) { t.batch = 13; }},
      {"seed", [](auto& t) { t.seed = 3; }},
      {"lr", [](auto& t) { t.lr = 0.5; }},
      {"lr_factors", [](auto& t) { t.lr_factors = "2 *"; }},
      {"min_lr", [](auto& t) { t.min_lr = 0.25; }},
      {"warmup", [](auto& t) { t.warmup = 7; }},
      {"schedule", [](auto& t) { t.schedule = "linear"; }},
      {"decay_start", [](auto& t) { t.decay_start = 200; }},
      {"decay_end", [](auto& t) { t.decay_end = 300; }},
      {"optimizer", [](auto& t) { t.optimizer = "muon"; }},
      {"momentum", [](auto& t) { t.momentum = 0.5; }},
      {"weight_decay", [](auto& t) { t.weight_decay = 0.2; }},
      {"weight_decay_factors", [](auto& t) { t.weight_decay_factors = "2 *"; }},
      {"beta1", [](auto& t) { t.beta1 = 0.5; }},
      {"beta2", [](auto& t) { t.beta2 = 0.5; }},
      {"eps", [](auto& t) { t.eps = 0.5; }},
      {"clip", [](auto& t) { t.clip = 0.5; }},
      {"z_loss", [](auto& t) { t.z_loss = 0.5; }},
      {"dtype", [](auto& t) { t.dtype = "bf16"; }},
      {"state_dtype", [](auto& t) { t.state_dtype = "bf16"; }},
      {"fp8", [](auto& t) { t.fp8 = "all"; }},
      {"islands", [](auto& t) { t.islands = 3; }},
      {"inner_steps", [](auto& t) { t.inner_steps = 5; }},
      {"outer_lr", [](auto& t) { t.outer_lr = 0.5; }},
      {"outer_momentum", [](auto& t) { t.outer_momentum = 0.5; }},
      {"outer_dtype", [](auto& t) { t.outer_dtype = "bf16"; }},
      {"loss_scale_interval", [](auto& t) { t.loss_scale_interval = 5; }}};
  for (const auto& [name, change] : changes) {
    RunState now = saved;
    change(now.train);
    EXPECT_THAT(mismatch(RunState::from_json(saved.to_json()), now), HasSubstr(" was ")) << name;
    EXPECT_THAT(mismatch(RunState::from_json(now.to_json()), saved), HasSubstr(" was ")) << name;
  }
  RunState now = saved;
  OptimizationConfig& t = now.train;
  t.micro_batches = 3, t.eval_every = 7, t.log_every = 7, t.save_every = 7, t.recompute = "block", t.save_async = t.compile = true;
  check_resumable(RunState::from_json(saved.to_json()), now);
}

// There the learning rate has not begun to decay.
TEST(RunState, StepsThatWereAllWarmUpMayBecomeMore) {
  RunState saved = a_run(), now = a_run();
  saved.train.steps = saved.train.warmup;
  check_resumable(RunState::from_json(saved.to_json()), now);
  now.train.decay_end = 500;
  check_resumable(RunState::from_json(saved.to_json()), now);
  saved.train.steps = saved.train.warmup + 1;
  EXPECT_THAT(mismatch(RunState::from_json(saved.to_json()), now), HasSubstr("train.decay_end"));
}

TEST(RunState, WhatAnOlderCheckpointDoesNotSayIsNotCompared) {
  Json json = without(a_run().to_json(), "data");
  for (const char* key : {"train.dtype", "train.decay_start", "train.decay_end", "train.optimizer", "train.momentum",
                          "train.state_dtype", "train.fp8", "train.islands", "model.end_of_text", "model.window", "model.full_attention_every",
                          "model.linear_key_heads", "model.linear_value_heads", "model.linear_key_head_dim", "model.linear_value_head_dim",
                          "model.linear_conv_kernel", "model.attention_gate", "model.rotary_dim", "model.shared_expert_gate"})
    json.set("options", without(json.at("options"), key));
  for (const char* name : {"rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
                           "beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim", "short_factor",
                           "long_factor"})
    json.set("options", without(json.at("options"), str("model.rope_scaling.", name)));
  const RunState saved = RunState::from_json(json);
  RunState now = a_run();
  now.train.dtype = "bf16";
  now.val_fraction = 0.5;
  now.train_data->tokens = 1;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("data.order was \"random\" in the checkpoint and is \"shuffled\" now"));
  now.order = "random";
  check_resumable(saved, now);
  // Its only decay was over all its steps after the warm-up.
  now.train.decay_end = 1999;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.decay_end, by default train.steps, was 2000"));
  // Its optimizer was AdamW.
  now = a_run();
  now.train.optimizer = "muon";
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.optimizer was \"adamw\" in the checkpoint and is \"muon\""));
  // Its state was f32.
  now = a_run();
  now.train.state_dtype = "bf16";
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.state_dtype was \"f32\" in the checkpoint and is \"bf16\""));
  // Its products were not in FP8.
  now = a_run();
  now.train.fp8 = "all";
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.fp8 was \"none\" in the checkpoint and is \"all\""));
  // It had one model.
  now = a_run();
  now.train.islands = 2;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("train.islands was 1 in the checkpoint and is 2"));
  // Its windows were at random places.
  Json with_data = a_run().to_json();
  with_data.set("data", without(with_data.at("data"), "order"));
  now = a_run();
  EXPECT_THAT(mismatch(RunState::from_json(with_data), now), HasSubstr("data.order was \"random\" in the checkpoint and is \"shuffled\""));
  now.order = "random";
  check_resumable(RunState::from_json(with_data), now);
  // Its rotary positions were not scaled.
  now = a_run();
  now.model.rope_scaling.rope_type = "linear";
  EXPECT_THAT(mismatch(saved, now), HasSubstr("model.rope_scaling.rope_type was \"default\" in the checkpoint and is \"linear\""));
  // Its documents were not separated.
  now = a_run();
  now.model.end_of_text = 7;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("keeps documents apart (data.separate_documents; -1: they are not) was -1 in the "
                                              "checkpoint and is 7 now"));
  // Its attention saw all keys.
  now = a_run();
  now.model.window = 7;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("model.window was 0 in the checkpoint and is 7 now"));
  now.model.window = 0, now.model.full_attention_every = 2;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("model.full_attention_every was 0 in the checkpoint and is 2 now"));
  // Nor had it gates, and it rotated whole heads.
  now = a_run();
  now.model.attention_gate = true;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("model.attention_gate was false in the checkpoint and is true now"));
  now.model.attention_gate = false, now.model.rotary_dim = 2;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("model.rotary_dim was 0 in the checkpoint and is 2 now"));
  now.model.rotary_dim = 0, now.model.shared_expert_gate = true;
  EXPECT_THAT(mismatch(saved, now), HasSubstr("model.shared_expert_gate was false in the checkpoint and is true now"));
  // All other options are in every checkpoint.
  json.set("options", without(json.at("options"), "train.lr"));
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { RunState::from_json(json); }), HasSubstr("train.lr"));
}

}  // namespace
}  // namespace sheaf::models
