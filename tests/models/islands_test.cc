// Training on islands (train.islands): against separate runs of each island with the outer step by hand, and the same on any mesh, with
// programs, and resumed anywhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kInner = 3;

models::TrainConfig islands(int64_t count, int64_t batch = 8) {
  models::TrainConfig c = tiny_config();
  c.train.batch = batch;
  c.train.islands = count;
  c.train.inner_steps = kInner;
  c.train.outer_momentum = 0.8;
  return c;
}

models::TrainConfig with_dropout(models::TrainConfig c) {
  c.model.dropout = 0.2;
  return c;
}

// Reads and writes the whole parameters of a model that one rank has.
Values read(nn::Module& module) {
  Whole whole;
  whole.collect(module, false);
  return whole.values();
}
void write(nn::Module& module, const Values& values) {
  for (const nn::StatePiece& p : nn::state_pieces(module))
    std::copy_n(values.at(p.name).begin() + p.runs.begin, p.runs.numel(), static_cast<double*>(p.data));
}

TEST(Islands, AreRunsWithAnOuterStep) {
  for (const int64_t count : {2, 3}) {
    const models::TrainConfig c = islands(count, 6);
    const int steps = 2 * kInner + 1;  // an outer step follows the last inner one, too
    models::TrainConfig ending = c;
    ending.train.steps = steps, ending.train.schedule = "constant";
    models::TrainConfig alone = ending;
    alone.train.islands = 1;
    alone.train.batch = c.train.batch / count;
    Values q, momentum;
    run_local(1, [&](World& w) {
      std::vector<std::unique_ptr<models::TrainingStep>> runs;
      for (int64_t i = 0; i < count; ++i)
        runs.push_back(std::make_unique<models::TrainingStep>(alone, 13, w, Device::cpu(), models::TrainingStepOptions{.masters = kF64}));
      q = momentum = read(runs[0]->model());
      for (auto& [name, b] : momentum) b.assign(b.size(), 0.0);
      for (int64_t s = 0; s < steps; ++s) {
        for (int64_t i = 0; i < count; ++i)
          runs[static_cast<size_t>(i)]->run(s, [&](int64_t first, int64_t rows, int32_t* inputs, int32_t* targets) {
            fill_tiny(first + s * (c.train.batch - alone.train.batch) + i * alone.train.batch, rows, inputs, targets);
          });
        if ((s + 1) % kInner != 0 && s + 1 != steps) continue;
        std::vector<Values> before;
        for (const auto& run : runs) before.push_back(read(run->model()));
        for (auto& [name, x] : q)
          for (size_t k = 0; k < x.size(); ++k) {
            double mean = 0;
            for (const Values& of : before) mean += of.at(name)[k] / static_cast<double>(count);
            const double g = x[k] - mean;
            double& b = momentum.at(name)[k];
            b = 0.8 * b + g;
            x[k] -= 0.7 * (g + 0.8 * b);
          }
        for (const auto& run : runs) write(run->model(), q);
      }
    });
    EXPECT_LT(max_difference(parameters_f64(ending, static_cast<int>(count), steps), q), 1e-13) << count;
  }
}

// Ways to divide an island over four ranks.
std::vector<std::pair<std::string, models::TrainConfig>> ways() {
  std::vector<std::pair<std::string, models::TrainConfig>> out;
  const auto add = [&](const char* name, auto&& change) {
    models::TrainConfig c = with_dropout(islands(2));
    change(c);
    out.emplace_back(name, c);
  };
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    add(strategy, [&](auto& c) { c.sharding.strategy = strategy; });
  add("replicas", [](auto& c) { c.sharding.replicas = 2; });
  add("secondary", [](auto& c) { c.sharding.replicas = 2, c.sharding.secondary = true; });
  add("tensor", [](auto& c) { c.sharding.tensor = 2; });
  add("context", [](auto& c) { c.sharding.context = 2; });
  add("pipeline", [](auto& c) { c.sharding.pipeline = 2, c.train.micro_batches = 2; });
  add("all gathered", [](auto& c) { c.sharding.context = 2, c.sharding.context_comm = "all_gather", c.sharding.tensor = 2; });
  add("muon", [](auto& c) { c.train.optimizer = "muon"; });
  return out;
}

TEST(Islands, TrainTheSameOnAnyMesh) {
  const Values one = parameters_f64(with_dropout(islands(2)), 2, 2 * kInner);
  for (const auto& [name, c] : ways()) {
    models::TrainConfig alone = c;
    alone.sharding = {};
    const Values same = c.train.micro_batches == 1 && c.train.optimizer == "adamw" ? one : parameters_f64(alone, 2, 2 * kInner);
    EXPECT_LT(max_difference(parameters_f64(c, 8, 2 * kInner), same), 1e-11) << name;
    for (const char* dtype : {"bf16", "int8"}) {  // blocks have other boundaries
      models::TrainConfig rounded = c;
      rounded.train.outer_dtype = dtype;
      EXPECT_LT(max_difference(parameters_f64(rounded, 8, 2 * kInner), same), 1e-3) << name << ' ' << dtype;
    }
    if (name == "full_shard") {
      EXPECT_LT(max_difference(parameters_f64(c, 6, 2 * kInner), one), 1e-11);
    }
  }
}

// With equal tokens, islands differ only by their dropout masks.
TEST(Islands, HaveDropoutOfTheirOwn) {
  const models::FillBatch alike = [](int64_t, int64_t count, int32_t* inputs, int32_t* targets) {
    for (int64_t s = 0; s < count; ++s) fill_tiny(0, 1, inputs + s * 9, targets + s * 9);
  };
  for (const bool drops : {false, true}) {
    std::mutex mutex;
    std::vector<Values> of;
    run_local(2, [&](World& w) {
      models::TrainingStep step(drops ? with_dropout(islands(2)) : islands(2), 13, w, Device::cpu(), {.masters = kF64});
      step.run(0, alike);
      const std::lock_guard lock(mutex);
      of.push_back(read(step.model()));
    });
    EXPECT_EQ(of[0] == of[1], !drops);
  }
}

TEST(Islands, HaveTheSameBitsWithEveryStrategy) {
  const auto run = [](const std::string& strategy) {
    models::TrainConfig c = with_dropout(islands(2));
    c.sharding.strategy = strategy;
    return train_tiny(c, 4, 2 * kInner);
  };
  const TrainedRun first = run("full_shard");
  for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) expect_same_bits(first, run(strategy));
}

TEST(Islands, GoWithProgramsAndOtherWaysOfComputing) {
  const auto expect_like = [](const char* what, auto&& change) {
    SCOPED_TRACE(what);
    models::TrainConfig plain = with_dropout(islands(2)), changed = plain;
    change(changed);
    expect_same_bits(train_tiny(plain, 4, 3 * kInner), train_tiny(changed, 4, 3 * kInner));
  };
  for (const char* dtype : {"bf16", "int8"})
    for (const bool compile : {false, true}) {
      models::TrainConfig c = with_dropout(islands(2));
      c.train.outer_dtype = dtype;
      const TrainedRun plain = train_tiny(c, 4, 3 * kInner);
      c.train.compile = compile;
      c.sharding.strategy = "zero1";
      expect_same_bits(plain, train_tiny(c, 4, 3 * kInner));
    }
  expect_like("a program", [](auto& c) { c.train.compile = true; });
  expect_like("recomputing", [](auto& c) { c.train.recompute = "block"; });
  expect_like("no prefetch", [](auto& c) { c.sharding.prefetch_bytes = 0; });
}

TEST(Islands, MoveBiasesOfExpertsToTheirMean) {
  models::TrainConfig c = islands(2);
  c.model = tiny_biased_mixture();
  std::mutex mutex;
  std::map<std::string, std::vector<std::vector<double>>> biases, after;
  const auto note = [&](models::TrainingStep& step, auto& to) {
    const std::lock_guard lock(mutex);
    for (auto& [name, x] : read(step.model()))
      if (name.ends_with("choice_bias")) to[name].push_back(x);
  };
  run_local(2, [&](World& w) {
    models::TrainingStep step(c, c.model.vocab, w, Device::cpu(), {.masters = kF64});
    for (int s = 0; s + 1 < kInner; ++s) step.run(s, fill_tiny);
    note(step, biases);
    step.outer()->step();
    note(step, after);
  });
  ASSERT_FALSE(biases.empty());
  bool differ = false;
  for (const auto& [name, of] : biases)
    for (size_t i = 0; i < of[0].size(); ++i) {
      differ |= of[0][i] != of[1][i];
      for (const auto& x : after.at(name)) EXPECT_DOUBLE_EQ(x[i], (of[0][i] + of[1][i]) / 2) << name;
    }
  EXPECT_TRUE(differ);
}

// Saved in the middle of a round, when each island has its own model.
void expect_resumes_anywhere(const models::TrainConfig& c, double tolerance = 1e-11) {
  const ScratchFolder folder;
  const int saved = kInner + 2, steps = 2 * kInner + 2;
  Values agreed;
  {
    Whole whole;
    run_local(4, [&](World& w) {
      models::TrainingStep step(c, 13, w, Device::cpu(), {.masters = kF64});
      for (int s = 0; s < steps; ++s) {
        if (s == kInner) whole.collect(step.model(), false);
        if (s == saved)
          models::save_checkpoint(folder.path(), saved, step.model(), {&step.optimizer()}, w, {.outer = step.outer()});
        step.run(s, fill_tiny);
      }
    });
    agreed = whole.values();
  }
  models::TrainConfig tensor = c, stages = c;
  tensor.sharding.tensor = 2, stages.sharding.pipeline = 2;
  for (const auto& [name, to, world] : std::vector<std::tuple<const char*, models::TrainConfig, int>>{
           {"the same", c, 4}, {"one rank", c, 2}, {"three", c, 6}, {"tensor", tensor, 8}, {"stages", stages, 4}}) {
    SCOPED_TRACE(name);
    const auto go_on = [&, &to = to](bool resumes) {
      Whole whole;
      run_local(resumes ? world : 2, [&](World& w) {
        models::TrainingStep step(resumes ? to : c, 13, w, Device::cpu(), {.masters = kF64});
        if (resumes) {
          EXPECT_TRUE(models::load_checkpoint(folder.path(), step.model(), {&step.optimizer()}, w, {.outer = step.outer()}));
        }
        for (int s = resumes ? saved : 0; s < 3 * kInner; ++s) step.run(s, fill_tiny);
        whole.collect(step.model(), false);
      });
      return whole.values();
    };
    EXPECT_LT(max_difference(go_on(true), go_on(false)), tolerance);
  }
  // Loading the model alone gives the parameters of the last outer step.
  run_local(1, [&](World& w) {
    models::TrainConfig one = c;
    one.train.islands = 1;
    models::TrainingStep step(one, 13, w, Device::cpu(), {.masters = kF64});
    EXPECT_TRUE(models::load_checkpoint(folder.path(), step.model(), {}, w));
    EXPECT_EQ(read(step.model()), agreed);
  });
  // On islands, too: an outer step changes nothing then.
  Whole whole, after;
  run_local(4, [&](World& w) {
    models::TrainingStep step(c, 13, w, Device::cpu(), {.masters = kF64});
    EXPECT_TRUE(models::load_checkpoint(folder.path(), step.model(), {}, w, {.outer = step.outer()}));
    whole.collect(step.model(), false);
    step.outer()->step();
    after.collect(step.model(), false);
  });
  EXPECT_EQ(whole.values(), agreed);
  EXPECT_EQ(after.values(), agreed);
}

TEST(Islands, ResumeAnywhere) {
  expect_resumes_anywhere(with_dropout(islands(2)));
}

TEST(Islands, ResumeWhereTheyHaveAgreedInFewerBits) {
  for (const char* dtype : {"bf16", "int8"}) {
    models::TrainConfig c = islands(2);
    c.train.outer_dtype = dtype;
    expect_resumes_anywhere(c, 1e-3);
  }
}

TEST(Islands, OfAdaptersHaveFrozenWeightsInCommon) {
  models::TrainConfig c = islands(2);
  c.model.lora_rank = 2;
  expect_resumes_anywhere(c);
}

TEST(Islands, EvaluateTogether) {
  const models::TrainConfig c = islands(2);
  std::vector<int32_t> ids;
  for (int i = 0; i < 9 * 21 + 5; ++i) ids.push_back((i * i + 3 * i) % 13);
  const auto loss = [&](const models::TrainConfig& config, int world) {
    double out = 0;
    run_local(world, [&](World& w) {
      models::TrainingStep step(config, 13, w, Device::cpu(), {.masters = kF64});
      const models::SequentialWindows windows(models::Tokens::from_ids(ids, 13, "test"), config.model.context);
      const double here = step.evaluate(windows);
      if (w.rank() == 0) out = here;
      double all[] = {here};
      step.mean_over_islands(all);
      EXPECT_DOUBLE_EQ(all[0], here);
    });
    return out;
  };
  models::TrainConfig one = c;
  one.train.islands = 1;
  const double want = loss(one, 1);
  EXPECT_GT(want, 1);
  for (const int world : {2, 4}) EXPECT_NEAR(loss(c, world), want, 1e-12 * want);
}

TEST(Islands, TakeTheBytesOfTheirPlans) {
  models::TrainConfig alone = islands(2, 2);  // whose outer step takes more memory than its inner ones
  alone.train.inner_steps = 1;
  alone.sharding.units = "none";
  expect_planned_tapes(alone, 2);
  for (const bool compile : {false, true}) {
    models::TrainConfig c = with_dropout(islands(2));
    c.train.inner_steps = 1;
    c.train.compile = compile;
    expect_planned_tapes(c, 4);
    expect_planned_tapes(c, 6);
    c.sharding.tensor = 2;
    expect_planned_tapes(c, 4);
    for (const char* dtype : {"bf16", "int8"}) {
      c.train.outer_dtype = dtype;
      expect_planned_tapes(c, 4);
    }
  }
}

TEST(Islands, RefuseWhatDoesNotFit) {
  const auto message = [](int world, auto&& change) {
    models::TrainConfig c = islands(2);
    change(c);
    return refusal(world, c);
  };
  EXPECT_EQ(message(2, [](auto&) {}), "");
  EXPECT_THAT(message(3, [](auto&) {}), HasSubstr("[train] train.islands 2: 3 ranks cannot be divided into as many equal groups"));
  EXPECT_THAT(message(2, [](auto& c) { c.train.batch = 7; }), HasSubstr("train.batch 7 has no equal part for each of train.islands 2"));
  EXPECT_THAT(message(2, [](auto& c) { c.train.dtype = "f16"; }), HasSubstr("each would skip steps of its own"));
  EXPECT_THAT(message(8, [](auto& c) { c.sharding.replicas = c.sharding.tensor = c.sharding.context = 2; }), HasSubstr("cannot be divided"));
  EXPECT_THAT(message(32, [](auto& c) { c.sharding.replicas = c.sharding.tensor = c.sharding.context = c.sharding.pipeline = 2; }),
              HasSubstr("a mesh has at most 4 axes, of which each island has 4 and train.islands is one more"));
}

}  // namespace
}  // namespace sheaf::testing
