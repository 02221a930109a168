// Saving and resuming a model that is not one of the library's, using only the umbrella header.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/sheaf.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace {

using namespace sheaf;
using ::testing::HasSubstr;

struct Layer : nn::Module {
  nn::Linear up, down;
  nn::Parameter gain{{1}, nn::Init::ones()};
  explicit Layer(int64_t width) : up(width, 2 * width + 1), down(2 * width + 1, width) {}
  Tensor forward(const Tensor& x) { return x + gain * down(tanh(up(x))); }
  SHEAF_FIELDS(up, down, gain);
};

/// Sizes that nothing divides; a tied, a frozen and an absent weight, and a buffer.
struct Net : nn::Module {
  std::vector<Layer> layers;
  nn::Linear head;
  nn::Parameter offset{{5}, nn::Init::normal(1)}, absent;
  nn::Buffer scale{{5}, nn::Init::ones()};
  Net() : head(5, 3) {
    for (int i = 0; i < 2; ++i) layers.emplace_back(5);
    tie(layers[1].up.weight, layers[0].up.weight);
    offset.freeze();
  }
  Tensor forward(Tensor x) {
    x = (x + offset) * scale;
    for (Layer& layer : layers) x = layer(x);
    return head(x);
  }
  SHEAF_FIELDS(layers, head, offset, absent, scale);
};

struct How {
  int world = 1;
  Strategy strategy = Strategy::full_shard;
  bool units = true;
  std::string to_string() const { return str("world ", world, " ", name(strategy), units ? "" : ", one unit"); }
};

void make(Net& net, World& world, const How& how) {
  const Mesh mesh = world.mesh({{"data", world.size()}});
  shard(net, mesh, {.units = how.units ? nn::units_of<Layer>() : nn::UnitPolicy(), .strategy = how.strategy});
  materialize(net, world.device(), {.seed = 7});
}

/// Gradients that depend only on name, index and step: with them a step gives the same bits at any world size.
void set_gradients(Net& net, int64_t step) {
  for (const auto& unit : units(net))
    for (FlatBuffer& b : unit->buffers()) {
      if (!b.trainable) continue;
      b.grad = full_like(b.shard, 0.0);
      for (const LocalPiece& piece : unit->pieces(b))
        for (int64_t i = 0; i < piece.runs.numel(); ++i) {
          const Key key = key_of(unit->leaves()[piece.leaf].name, static_cast<uint64_t>(step));
          const auto h = static_cast<double>(random_u32(key, piece.runs.at(i)));
          b.grad.view().as<float>()[piece.shard_offset + i] = static_cast<float>(h / 4e9 - 0.5);
        }
    }
}

void train(Net& net, optim::Optimizer& optimizer, int64_t begin, int64_t end) {
  for (int64_t step = begin; step < end; ++step) {
    set_gradients(net, step);
    clip_grad_norm(net, 0.5);
    optimizer.step({.lr = 0.01});
    optimizer.zero_grad();
  }
}

using Values = std::map<std::string, std::vector<float>>;
Values values(Net& net) {
  Values out;
  for (const nn::Parameter& p : net.parameters()) out[p.name()] = full_parameter(p).to_vector<float>();
  out["scale"] = net.scale.value().to_vector<float>();
  return out;
}

constexpr int64_t kSaved = 3, kEnd = 6;

Values uninterrupted() {
  Values out;
  run_local(1, [&](World& world) {
    Net net;
    make(net, world, {});
    assign(net.scale, Tensor::from<float>({1, 2, 3, 4, 5}, {5}));
    optim::AdamW adam(net);
    train(net, adam, 0, kEnd);
    out = values(net);
  });
  return out;
}

TEST(Checkpoint, ResumesBitwiseAtAnyWorldStrategyAndUnits) {
  const Values expected = uninterrupted();
  const How all[] = {{1}, {2}, {3}, {3, Strategy::replicate}, {2, Strategy::shard_grad_op, false}};
  for (const How& before : all) {
    ScratchFolder folder;
    run_local(before.world, [&](World& world) {
      Net net;
      make(net, world, before);
      assign(net.scale, Tensor::from<float>({1, 2, 3, 4, 5}, {5}));
      optim::AdamW adam(net);
      train(net, adam, 0, kSaved);
      // The checkpoint's number is chosen by the program: the optimizer's steps are saved with it.
      models::save_checkpoint(folder.path(), 1700, net, {&adam}, world, {.state = Json::Object{{"epoch", 4}}});
    }, {.threads_per_rank = 1});
    for (const How& after : all)
      run_local(after.world, [&](World& world) {
        Net net;
        make(net, world, after);
        optim::AdamW adam(net);
        const auto saved = models::load_checkpoint(folder.path(), net, {&adam}, world);
        ASSERT_TRUE(saved);
        EXPECT_EQ(saved->step, 1700);
        EXPECT_EQ(saved->path, folder / "step-1700");
        EXPECT_EQ(saved->state.at("epoch").as_int(), 4);
        EXPECT_EQ(adam.steps(), kSaved);
        train(net, adam, kSaved, kEnd);
        EXPECT_TRUE(values(net) == expected) << before.to_string() << ", then " << after.to_string();
      }, {.threads_per_rank = 1});
  }
}

// Steps with gradients of data, at one world size: a program's loop that was stopped and started again.
TEST(Checkpoint, ARunThatWasStoppedGoesOnBitForBit) {
  for (int ranks : {1, 2, 3}) {
    ScratchFolder folder;
    std::mutex mutex;
    Values whole, halves;
    const auto run = [&](int64_t until, bool saves, Values* out) {
      run_local(ranks, [&](World& world) {
        Net net;
        make(net, world, {ranks});
        optim::SGD sgd(net, {.lr = 0.1, .momentum = 0.9});
        const Layout rows(world.mesh({{"data", ranks}}).spec, Placement::shard(0));
        int64_t step = 0;
        if (const auto saved = models::load_checkpoint(folder.path(), net, {&sgd}, world)) step = saved->step;
        for (; step < until; ++step) {
          const Tensor x = redistribute(randn({kF32, {7, 5}, {}}, key_of("x", static_cast<uint64_t>(step))), rows);
          Recording recording({.step = step});
          recording.backward(mean(square(net(x))));
          sgd.step();
          sgd.zero_grad();
        }
        if (saves) models::save_checkpoint(folder.path(), step, net, {&sgd}, world);
        const Values v = values(net);
        std::lock_guard lock(mutex);
        if (world.rank() == 0) *out = v;
      }, {.threads_per_rank = 1});
    };
    run(6, false, &whole);
    run(3, true, &halves);
    EXPECT_FALSE(whole == halves);
    run(6, true, &halves);
    EXPECT_TRUE(whole == halves) << ranks << " ranks";
  }
}

TEST(Checkpoint, OfTwoModelsThatAreTrainedTogether) {
  ScratchFolder folder;
  for (int ranks : {1, 2})
    run_local(ranks, [&](World& world) {
      const auto train = [&](Net& net, optim::SGD& sgd, int64_t steps) {
        const Layout rows(world.mesh({{"data", ranks}}).spec, Placement::shard(0));
        for (int64_t step = 0; step < steps; ++step) {
          const Tensor x = redistribute(randn({kF32, {7, 5}, {}}, key_of("x", static_cast<uint64_t>(step))), rows);
          Recording recording({.step = step});
          recording.backward(mean(square(net(x))));
          sgd.step(), sgd.zero_grad();
        }
      };
      Net a, b, c, d;
      for (Net* net : {&a, &b, &c, &d}) make(*net, world, {ranks});
      optim::SGD of_a(a, {.lr = 0.1, .momentum = 0.9}), of_b(b, {.lr = 0.1, .momentum = 0.9}), of_c(c, {.lr = 0.1, .momentum = 0.9}),
          of_d(d, {.lr = 0.1, .momentum = 0.9});
      train(a, of_a, 2), train(b, of_b, 3);
      const std::string path = folder / std::to_string(ranks);
      models::save_checkpoint(path, 2, a, {&of_a, &of_b}, world, {.also = {{"other.", &b}}});
      EXPECT_TRUE(models::load_checkpoint(path, c, {&of_c, &of_d}, world, {.also = {{"other.", &d}}}));
      EXPECT_EQ(of_d.steps(), 3);
      train(a, of_a, 2), train(b, of_b, 2), train(c, of_c, 2), train(d, of_d, 2);
      EXPECT_TRUE(values(a) == values(c));
      EXPECT_TRUE(values(b) == values(d));
      EXPECT_FALSE(values(a) == values(b));
    }, {.threads_per_rank = 1});
}

TEST(Checkpoint, SeveralOptimizersAndNone) {
  ScratchFolder folder;
  const auto make_two = [](Net& net, World& world) {
    shard(net, world.mesh({{"data", world.size()}}), {.units = nn::units_at({"head"})});
    materialize(net, world.device());
  };
  const auto body_of = [](Net& net) {
    std::vector<nn::Parameter> out;
    for (const nn::Parameter& p : net.parameters())
      if (!p.name().starts_with("head.")) out.push_back(p);
    return out;
  };
  run_local(2, [&](World& world) {
    Net net;
    make_two(net, world);
    optim::AdamW body(body_of(net));
    optim::SGD head(net.head, {.momentum = 0.9});
    train(net, body, 0, 2);
    train(net, head, 0, 1);
    models::save_checkpoint(folder.path(), 2, net, {&body, &head}, world);
  });
  run_local(3, [&](World& world) {
    Net net;
    make_two(net, world);
    optim::AdamW body(body_of(net));
    optim::SGD head(net.head, {.momentum = 0.9});
    EXPECT_TRUE(models::load_checkpoint(folder.path(), net, {&body, &head}, world));
    EXPECT_EQ(body.steps(), 2);
    EXPECT_EQ(head.steps(), 1);
    const Values trained = values(net);

    Net weights;  // to evaluate: no optimizer
    make_two(weights, world);
    EXPECT_TRUE(models::load_checkpoint(folder.path(), weights, {}, world));
    EXPECT_EQ(values(weights), trained);
    try {
      (void)models::load_checkpoint(folder.path(), net, {&head}, world);
      ADD_FAILURE() << "the state of the other optimizer was passed over";
    } catch (const CheckpointError& e) {
      EXPECT_THAT(e.what(), HasSubstr("the model has no optimizer."));
    }
  });
}

TEST(Checkpoint, KeepsTheNewestAndPassesOverABrokenOne) {
  ScratchFolder folder;
  run_local(2, [&](World& world) {
    Net net;
    make(net, world, {2});
    EXPECT_FALSE(models::load_checkpoint(folder / "none", net, {}, world));
    for (int64_t step = 1; step <= 4; ++step)
      models::save_checkpoint(folder.path(), step, net, {}, world, {.keep = 3});
    EXPECT_FALSE(std::filesystem::exists(folder / "step-1"));
    EXPECT_TRUE(std::filesystem::exists(folder / "step-2"));
    if (world.rank() == 0) std::ofstream(folder / "step-4/manifest.json") << "{}";
    full_parameter(net.offset);  // collective: the file is broken on every rank from this point on
    std::vector<std::string> warnings;
    const auto saved = models::load_checkpoint(folder.path(), net, {}, world,
                                               {.warn = [&](const std::string& line) { warnings.push_back(line); }});
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->step, 3);
    if (world.rank() == 0) {
      ASSERT_EQ(warnings.size(), 1u);
      EXPECT_THAT(warnings[0], HasSubstr("step-4"));
    }
  });
}

// Its fields are not found at once, as if a disk were slow.
struct Slow : nn::Module {
  nn::Linear layer{4, 3};
  std::chrono::milliseconds time{0};
  void visit(nn::Visitor& visitor) override {
    std::this_thread::sleep_for(time);
    visitor.field("layer", layer);
  }
};

TEST(Checkpoint, ARankMayTakeLongToReadItsPart) {
  ScratchFolder folder;
  run_local(2, [&](World& world) {
    Slow net;
    shard(net, world.mesh({{"data", 2}}));
    materialize(net, world.device());
    models::save_checkpoint(folder.path(), 1, net, {}, world);
    if (world.rank() == 1) net.time = std::chrono::milliseconds(1500);
    EXPECT_TRUE(models::load_checkpoint(folder.path(), net, {}, world));
    net.time = std::chrono::milliseconds(0);
    world.communicator().barrier("test").sync();
  }, {.timeout = std::chrono::seconds(1)});
}

// A model and its average in one checkpoint, saved by some ranks and read by others.
TEST(Checkpoint, WithAFurtherModule) {
  const How all[] = {{1}, {2}, {3}, {3, Strategy::replicate}, {2, Strategy::shard_grad_op, false}};
  const auto set = [](Net& net, float first) { assign(net.scale, Tensor::from<float>({first, 2, 3, 4, 5}, {5})); };
  for (const bool async : {false, true})
    for (const How& before : all) {
      if (async && before.world == 3) continue;
      ScratchFolder folder;
      Values of_model, of_average;
      std::mutex mutex;
      run_local(before.world, [&](World& world) {
        Net net;
        make(net, world, before);
        Net average = nn::clone(net);
        optim::AdamW adam(net);
        optim::Ema ema(net, average, 0.5);
        for (int64_t step = 0; step < kSaved; ++step) {
          set(net, static_cast<float>(step + 10));
          train(net, adam, step, step + 1);
          ema.update();
        }
        const models::SaveOptions options{.also = {{"average.", &average}}};
        if (async) {
          models::AsyncSaver saver(world);
          saver.save(folder.path(), kSaved, net, {&adam}, options);
          saver.finish();
        } else {
          models::save_checkpoint(folder.path(), kSaved, net, {&adam}, world, options);
        }
        const Values model = values(net), mean = values(average);
        const std::lock_guard lock(mutex);
        if (world.rank() == 0) of_model = model, of_average = mean;
      }, {.threads_per_rank = 1});
      EXPECT_NE(of_model, of_average);
      EXPECT_EQ(of_average.at("scale"), (std::vector<float>{12, 2, 3, 4, 5}));
      for (const How& after : all)
        run_local(after.world, [&](World& world) {
          Net net, average;
          make(net, world, after);
          make(average, world, after);
          optim::AdamW adam(net);
          const auto saved = models::load_checkpoint(folder.path(), net, {&adam}, world, {.also = {{"average.", &average}}});
          ASSERT_TRUE(saved);
          EXPECT_EQ(saved->step, kSaved);
          EXPECT_EQ(adam.steps(), kSaved);
          EXPECT_EQ(values(net), of_model) << before.to_string() << ", then " << after.to_string();
          EXPECT_EQ(values(average), of_average) << before.to_string() << ", then " << after.to_string();
          Net alone;  // without the average, if that is said
          make(alone, world, after);
          ASSERT_TRUE(models::load_checkpoint(folder.path(), alone, {}, world, {.passes_over = "average."}));
          EXPECT_EQ(values(alone), of_model);
          EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { (void)models::load_checkpoint(folder.path(), alone, {}, world); }),
                      HasSubstr("the model has no average.head.bias"));
        }, {.threads_per_rank = 1});
    }
}

TEST(Checkpoint, FurtherModulesAreThereIfTheyAreAskedFor) {
  for (const int ranks : {1, 2, 3}) {
    ScratchFolder folder;
    run_local(ranks, [&](World& world) {
      Net net;
      make(net, world, {ranks});
      Net average = nn::clone(net);
      models::save_checkpoint(folder.path(), 1, net, {}, world);
      EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] {
                    (void)models::load_checkpoint(folder.path(), net, {}, world, {.also = {{"average.", &average}}});
                  }), HasSubstr("has no tensor \"average."));
      EXPECT_TRUE(models::load_checkpoint(folder.path(), net, {}, world));
      const auto refusal = [&](const models::PrefixedModules& also) {
        return message_of<ConfigError>(ExitCode::kConfig, [&] { models::save_checkpoint(folder.path(), 2, net, {}, world, {.also = also}); });
      };
      EXPECT_THAT(refusal({{"", &average}}), HasSubstr("as the prefix of a"));
      EXPECT_THAT(refusal({{"optimizer.average.", &average}}), HasSubstr("'optimizer.average.' as the prefix of a"));
      EXPECT_THAT(refusal({{"a.", &average}, {"a.", &net}}), HasSubstr("two modules have the prefix 'a.'"));
      EXPECT_THAT(refusal({{"a.", nullptr}}), HasSubstr("'a.' is the prefix of no module"));
      Net alone;  // each rank's own
      materialize(alone);
      if (ranks > 1) {
        EXPECT_THAT(refusal({{"a.", &alone}}), HasSubstr("call shard(model, mesh)"));
      }
      EXPECT_FALSE(std::filesystem::exists(folder / "step-2"));
    }, {.threads_per_rank = 1});
  }
}

// A run in f16 goes on with all of its scaler's counts, and with the number of steps that were not skipped; whoever only wants the weights
// needs no scaler.
TEST(Checkpoint, OfARunWithALossScaler) {
  const ScratchFolder folder;
  const optim::LossScaler::State state{4, 5, 6, 7};
  run_local(2, [&](World& world) {
    Net net;
    make(net, world, {});
    optim::AdamW adam(net);
    optim::LossScaler scaler(world.device());
    scaler.set_state(state);
    adam.set_steps(9), adam.set_applied_steps(2);
    models::save_checkpoint(folder.path(), 9, net, {&adam}, world, {.scaler = &scaler});
  }, {.threads_per_rank = 1});
  for (int ranks : {1, 3})
    run_local(ranks, [&](World& world) {
      Net net, weights;
      make(net, world, {}), make(weights, world, {});
      optim::AdamW adam(net);
      optim::LossScaler scaler(world.device());
      ASSERT_TRUE(models::load_checkpoint(folder.path(), net, {&adam}, world, {.scaler = &scaler}));
      EXPECT_EQ(scaler.state(), state);
      EXPECT_EQ(adam.steps(), 9);
      EXPECT_EQ(adam.applied_steps(), 2);
      EXPECT_TRUE(models::load_checkpoint(folder.path(), weights, {}, world));
      EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { (void)models::load_checkpoint(folder.path(), net, {&adam}, world); }),
                  HasSubstr("was saved with a loss scaler"));
    }, {.threads_per_rank = 1});
}

TEST(Checkpoint, OfAChosenStep) {
  for (const int ranks : {1, 2, 3}) {
    ScratchFolder folder;
    run_local(ranks, [&](World& world) {
      Net net;
      make(net, world, {ranks});
      const auto set = [&](float value) { assign(net.scale, Tensor::from<float>(std::vector<float>(5, value), {5})); };
      for (int64_t step = 1; step <= 3; ++step) {
        set(static_cast<float>(step));
        models::save_checkpoint(folder.path(), step, net, {}, world, {.keep = 0});
      }
      for (const int64_t step : {2, 1, 3}) {
        const auto saved = models::load_checkpoint(folder.path(), net, {}, world, {.step = step});
        ASSERT_TRUE(saved);
        EXPECT_EQ(saved->step, step);
        EXPECT_EQ(net.scale.value().to_vector<float>(), std::vector<float>(5, static_cast<float>(step)));
      }
      const auto message = [&](const std::string& path, int64_t step) {
        return message_of<CheckpointError>(ExitCode::kData, [&] { (void)models::load_checkpoint(path, net, {}, world, {.step = step}); });
      };
      EXPECT_THAT(message(folder.path(), 7), HasSubstr("no checkpoint of step 7 in '" + folder.path() + "'; there are 3, 2, 1"));
      EXPECT_THAT(message(folder / "none", 7), HasSubstr("no checkpoint of step 7 in"));
      if (world.rank() == 0) std::ofstream(folder / "step-2/shard-00000-of-0000" + std::to_string(ranks) + ".safetensors") << "?";
      full_parameter(net.offset);  // collective: the file is broken on every rank from this point on
      EXPECT_THAT(message(folder.path(), 2), HasSubstr("step-2"));
      EXPECT_TRUE(models::load_checkpoint(folder.path(), net, {}, world, {.step = 3})) << "others can be read";
    });
  }
}

TEST(Checkpoint, RefusesWhatItCannotMean) {
  ScratchFolder folder;
  run_local(2, [&](World& world) {
    Net net;
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::save_checkpoint(folder.path(), 1, net, {}, world); }),
                HasSubstr("call shard(model, mesh)"));
    materialize(net);  // each rank has its own model
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { (void)models::load_checkpoint(folder.path(), net, {}, world); }),
                HasSubstr("2 ranks"));
  });
  run_local(2, [&](World& world) {  // the head's unit has other parameters, too
    Net net;
    shard(net, world.mesh({{"data", 2}}));
    materialize(net);
    const auto expect_refused = [](const std::string& message) { EXPECT_THAT(message, HasSubstr("'head.weight' is in unit 'root' of a model around")); };
    expect_refused(message_of<ConfigError>(ExitCode::kConfig, [&] { models::save_checkpoint(folder.path(), 1, net.head, {}, world); }));
    expect_refused(message_of<ConfigError>(ExitCode::kConfig, [&] { (void)models::load_checkpoint(folder.path(), net.head, {}, world); }));
    expect_refused(message_of<ConfigError>(ExitCode::kConfig, [&] { (void)models::checkpoint_pieces(net.head, {}, {}); }));
  });
  run_local(1, [&](World& world) {
    Net net;
    make(net, world, {});
    {
      Recording recording;
      EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { models::save_checkpoint(folder.path(), 1, net, {}, world); }),
                  HasSubstr("recording.take()"));
    }
    models::save_checkpoint(folder.path(), 1, net, {}, world);
    optim::AdamW adam(net);
    EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { (void)models::load_checkpoint(folder.path(), net, {&adam}, world); }),
                HasSubstr("has no tensor \"optimizer.m."));
    Net another;
    make(another, world, {});
    optim::AdamW of_another(another);
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { models::save_checkpoint(folder.path(), 2, net, {&of_another}, world); }),
                HasSubstr("is neither this model's nor that of a module in `also`"));
    Layer other(5);
    materialize(other);
    EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { (void)models::load_checkpoint(folder.path(), other, {}, world); }),
                HasSubstr("has no tensor \"up.weight\""));
  });
}

}  // namespace
