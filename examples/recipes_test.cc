// The loops of docs/own_models.md, and that of islands in docs/parallelism.md, compiled and tested: user-defined batches, gradient
// accumulation, half precision, a running mean, a learning rate per part of a model, fine-tuning, tensor and sequence parallelism,
// generation.
#include <cmath>

#include "sheaf/examples/expect_gradients.h"

namespace examples {
namespace {

using namespace sheaf;

constexpr int64_t kFeatures = 5, kClasses = 3;

struct Batch {
  Tensor x, label;  // f32[n, kFeatures] and i64[n], cut along n
};

// Samples [first, first + n) of a data set that is a formula here and would be a file elsewhere. Each rank generates only its own rows.
Batch batch_of(World& world, const Mesh& mesh, int64_t first, int64_t n) {
  const Layout rows(mesh.spec, Placement::shard(0));
  const Type x_type{kF32, {n, kFeatures}, rows}, label_type{kI64, {n}, rows};
  const int64_t begin = first + x_type.local_start()[0];
  const int64_t count = x_type.local_shape()[0];
  std::vector<float> x;
  std::vector<int64_t> label;
  for (int64_t i = begin; i < begin + count; ++i) {
    for (int64_t k = 0; k < kFeatures; ++k)
      x.push_back(static_cast<float>(std::sin(static_cast<double>(7 * i + 3 * k * k))));
    label.push_back(i % kClasses);
  }
  return {Tensor::from_local(x, x_type).to(world.device()),
          Tensor::from_local(label, label_type).to(world.device())};
}

struct Classifier : nn::Module {
  nn::Linear body{kFeatures, 8}, head{8, kClasses};
  nn::Dropout dropout{0.25};
  Tensor forward(const Tensor& x) { return head(dropout(tanh(body(x)))); }
  SHEAF_FIELDS(body, head, dropout);
};

// Layers whose weights enter the forward as their signs.
struct Binary : nn::Module {
  nn::Parameter weight{{kClasses, kFeatures}, nn::Init::uniform(0.5)};
  Tensor forward(const Tensor& x) {
    const Tensor binary = custom_vjp([](const Tensor& w) { return sign(w); }, [](Vjp& c) { c.set(0, c.grad()); },
                                     {.saved_inputs = 0, .saved_outputs = 0}, weight);
    return linear(x, binary);
  }
  SHEAF_FIELDS(weight);
};

// A step over `rows` samples in `micro_batches` parts.
void step_of(World& world, const Mesh& mesh, Classifier& model, int64_t step, int64_t rows,
             int64_t micro_batches) {
  const int64_t first = step * rows, part_rows = rows / micro_batches;
  Recording recording({.step = step, .first_sample = first});
  for (int64_t part = 0; part < micro_batches; ++part) {
    const int64_t begin = first + part * part_rows;
    const Batch batch = batch_of(world, mesh, begin, part_rows);
    recording.next_micro_batch(begin);
    // Not the mean over this micro-batch: the sum over it, divided by the step's number of targets.
    recording.backward(cross_entropy(model(batch.x), batch.label,
                                     {.divide_by = static_cast<double>(rows)}));
  }
}

TEST(OwnDerivatives, TrainWeightsOfTwoLevels) {
  for (int ranks : {1, 2, 3})
    run_local(ranks, [](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      Binary model;
      shard(model, mesh);
      materialize(model, world.device(), {.seed = 1});
      optim::AdamW optimizer(model, {.lr = 0.05});
      const Batch batch = batch_of(world, mesh, 0, 24);
      float first = 0, last = 0;
      for (int64_t step = 0; step < 30; ++step) {
        Recording recording;
        const Tensor loss = cross_entropy(model(batch.x), batch.label);
        recording.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        last = redistribute(loss, "data", Placement::invariant()).item();
        if (step == 0) first = last;
      }
      EXPECT_LT(last, first - 0.1f);
    });
}

TEST(GradientAccumulation, GivesTheGradientOfTheWholeBatch) {
  Gradients expected;
  for (int ranks : {1, 2, 3})
    for (int64_t micro_batches : {1, 2, 4}) {
      const auto body = [&](World& world) {
        const Mesh mesh = world.mesh({{"data", world.size()}});
        Classifier model;
        shard(model, mesh);
        materialize(model, world.device(), {.seed = 1});
        step_of(world, mesh, model, 3, 24, micro_batches);
        expect_gradients(model, expected, world.rank(), str(ranks, " ranks"));
      };
      run_local(ranks, body);
    }
}

// The initial scale is far too large: steps are skipped until it fits.
TEST(HalfPrecision, FindsTheFactorOfTheLoss) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"data", world.size()}});
    Classifier model;
    shard(model, mesh, {.compute_dtype = kF16});
    materialize(model, world.device(), {.seed = 1});
    optim::AdamW optimizer(model, {.lr = 0.02});
    optim::LossScaler scaler(world.device(), {.initial = 0x1p24});
    std::vector<float> losses;
    for (int64_t step = 0; step < 40; ++step) {
      const Batch batch = batch_of(world, mesh, 0, 24);
      Recording recording({.step = step});
      const Tensor x = cast(batch.x, kF16);
      const Tensor loss = cross_entropy(model(x), batch.label);
      recording.backward(scaler.scale(loss));
      clip_grad_norm(model, 1.0, scaler);
      optimizer.step();
      scaler.update();
      optimizer.zero_grad();
      losses.push_back(redistribute(loss, "data", Placement::invariant()).item());
    }
    const int64_t skipped = scaler.state().skipped_steps;
    EXPECT_GE(skipped, 1);
    EXPECT_LE(skipped, 20);
    EXPECT_EQ(optimizer.applied_steps(), 40 - skipped);
    EXPECT_LT(losses.back(), losses.front() - 0.05f);
  });
}

// Eager steps, and steps as a program whose units stay gathered.
TEST(Programs, HaveTheBitsOfSteps) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"data", world.size()}});
    std::vector<float> losses[2];
    for (const bool compiled : {false, true}) {
      Classifier model;
      shard(model, mesh, {.units = nn::units_of<nn::Linear>()});
      materialize(model, world.device(), {.seed = 1});
      optim::AdamW optimizer(model);
      const auto code = [&](const Tensor& x, const Tensor& label, const Tensor& scalars) {
        const Tensor loss = cross_entropy(model(x), label);
        Recording::current()->backward(loss);
        clip_grad_norm(model, 1.0);
        optimizer.step({.scalars = scalars});
        optimizer.zero_grad();
        return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
      };
      auto train = compile(code, {.rewrite = keep_within(1 << 30, world, world.device())});
      for (int64_t step = 0; step < 8; ++step) {
        const Batch batch = batch_of(world, mesh, 24 * step, 24);
        const std::vector<double> numbers = optimizer.next_scalars({.lr = 0.1 / static_cast<double>(step + 1)});
        const Tensor scalars = Tensor::from(numbers, {std::ssize(numbers)}).to(world.device());
        const RecordingOptions options{.step = step, .first_sample = 24 * step};
        std::optional<Recording> recording;
        if (!compiled) recording.emplace(options);
        const Tensor loss = compiled ? train(options, batch.x, batch.label, scalars)
                                     : code(batch.x, batch.label, scalars);
        losses[compiled].push_back(loss.item());
      }
    }
    EXPECT_EQ(losses[1], losses[0]);
    EXPECT_LT(losses[1].back(), losses[1].front());
  });
}

// Its hidden units can be sharded over a tensor axis.
struct SharedClassifier : nn::Module {
  nn::Linear up{kFeatures, 12, {.cut = OwnershipMap::even(0)}};    // cut by outputs
  nn::Linear down{12, kFeatures, {.cut = OwnershipMap::even(1)}};  // cut by inputs
  nn::Linear head{kFeatures, kClasses};
  Tensor forward(const Tensor& x) {
    const nn::TensorRegion region(x, up.weight);
    const Tensor hidden = tanh(up(region.enter(x)));  // all rows, this rank's units
    return head(x + region.leave(down(hidden)));      // this rank's rows
  }
  SHEAF_FIELDS(up, down, head);
};

// The same, parallelized from outside.
struct Hidden : nn::Module {
  nn::Linear up{kFeatures, 12}, down{12, kFeatures};
  Tensor forward(const Tensor& x) { return down(tanh(up(x))); }
  SHEAF_FIELDS(up, down);
};
struct PlainClassifier : nn::Module {
  Hidden hidden;
  nn::Linear head{kFeatures, kClasses};
  Tensor forward(const Tensor& x) { return head(x + hidden(x)); }
  SHEAF_FIELDS(hidden, head);
};

TEST(TensorParallel, FromOutsideGivesTheGradientsOfOneRank) {
  Gradients expected;
  for (const auto& [data, model_ranks] : {std::pair{1, 1}, {1, 2}, {2, 3}}) {
    const auto body = [&, data = data, ranks = model_ranks](World& world) {
      const Mesh mesh = world.mesh({{"data", data}, {"model", ranks}});
      PlainClassifier model;
      for (nn::Parameter* p : {&model.hidden.up.weight, &model.hidden.up.bias}) p->set_cut(OwnershipMap::even(0));
      model.hidden.down.weight.set_cut(OwnershipMap::even(1));
      model.hidden.parallelize({.axis = "model", .inputs = Placement::replicate(), .outputs = Placement::shard(0)});
      shard(model, mesh, {.tensor_axis = "model"});
      materialize(model, world.device(), {.seed = 1});
      const Batch batch = batch_of(world, mesh, 0, 13);  // rows are cut over both axes
      {
        Recording recording;
        recording.backward(cross_entropy(model(batch.x), batch.label));
      }
      expect_gradients(model, expected, world.rank(), str(data, " x ", ranks));
    };
    run_local(data * model_ranks, body);
  }
}

TEST(TensorParallel, GivesTheGradientsOfOneRank) {
  Gradients expected;
  for (const auto& [data, model_ranks] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {1, 5}, {2, 3}}) {
    const auto body = [&, data = data, ranks = model_ranks](World& world) {
      const Mesh mesh = world.mesh({{"data", data}, {"model", ranks}});
      SharedClassifier model;
      shard(model, mesh, {.tensor_axis = "model"});
      materialize(model, world.device(), {.seed = 1});
      const Batch batch = batch_of(world, mesh, 0, 13);  // rows are cut over both axes
      {
        Recording recording;
        recording.backward(cross_entropy(model(batch.x), batch.label));
      }
      EXPECT_EQ(model.up.weight.cut_axis(), 1);
      expect_gradients(model, expected, world.rank(), str(data, " x ", ranks));
    };
    run_local(data * model_ranks, body);
  }
}

// Every token attends to every other. Its sequences can be sharded over a context axis.
struct SharedAttention : nn::Module {
  static constexpr int64_t kHeads = 5, kWidth = 10;
  nn::Linear read{kWidth, 3 * kWidth}, write{kWidth, kWidth};
  Tensor forward(const Tensor& x_BTC) {
    nn::ContextRegion region;  // after `read`: all tokens, this rank's heads
    const Tensor qkv = read(x_BTC, region.output_layout(OwnershipMap::parts(2, {kWidth, kWidth, kWidth}, kHeads)));
    const Tensor mixed = packed_attention(qkv, kHeads, kHeads);
    return x_BTC + write(region.leave(mixed));
  }
  SHEAF_FIELDS(read, write);
};

TEST(ContextParallel, GivesTheGradientsOfOneRank) {
  Gradients expected;
  for (const auto& [data, context] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}, {1, 5}, {2, 3}}) {
    const auto body = [&, data = data, context = context](World& world) {
      const Mesh mesh = world.mesh({{"data", data}, {"context", context}});
      SharedAttention model;
      shard(model, mesh, {.context_axis = "context"});
      materialize(model, world.device(), {.seed = 1});
      const Layout tokens(mesh.spec, {Placement::shard(0), Placement::shard(1)});
      const Shape shape{3, 7, SharedAttention::kWidth};
      std::vector<float> values;
      for (int64_t i = 0; i < shape.numel(); ++i) values.push_back(static_cast<float>(std::sin(i * i)));
      const Tensor x = redistribute(Tensor::from(values, shape).to(world.device()), tokens);
      {
        Recording recording;
        recording.backward(mean(square(model(x))));
      }
      expect_gradients(model, expected, world.rank(), str(data, " x ", context));
    };
    run_local(data * context, body);
  }
}

// Subtracts the running mean of what it has seen.
struct Center : nn::Module {
  nn::Buffer mean{{kFeatures}, nn::Init::zeros()};
  Tensor seen;  // the mean of the last batch; not a field, as it is not part of the model

  Tensor forward(const Tensor& x) {
    if (training()) seen = sheaf::mean(x, 0);
    return x - mean;
  }
  // Between recordings. With a sharded batch `seen` is Partial; summed, it is the same on all ranks.
  void update(double momentum) {
    const Tensor whole = redistribute(seen, "data", Placement::invariant());
    assign(mean, momentum * mean + (1 - momentum) * whole);
  }
  SHEAF_FIELDS(mean);
};

struct Centered : nn::Module {
  Center center;
  nn::Linear head{kFeatures, kClasses};
  Tensor forward(const Tensor& x) { return head(center(x)); }
  SHEAF_FIELDS(center, head);
};

TEST(RunningMean, IsAssignedBetweenRecordings) {
  std::vector<float> expected;
  for (int ranks : {1, 2, 3}) {
    const auto body = [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      Centered model;
      shard(model, mesh);
      materialize(model, world.device());
      for (int64_t step = 0; step < 3; ++step) {
        const Batch batch = batch_of(world, mesh, step * 6, 6);
        Recording recording({.step = step});
        recording.backward(cross_entropy(model(batch.x), batch.label));
        recording.take();  // the recording is over: buffers may change
        model.center.update(0.5);
      }
      model.eval();
      model(batch_of(world, mesh, 0, 6).x);  // in evaluation nothing changes
      const std::vector<float> mean = model.center.mean.value().to_vector();
      if (world.rank() != 0) return;
      if (ranks == 1) {
        expected = std::vector<float>(kFeatures, 0.0f);
        for (int64_t step = 0; step < 3; ++step) {
          const std::vector<float> x = batch_of(world, mesh, step * 6, 6).x.to_vector();
          for (size_t k = 0; k < kFeatures; ++k) {
            float sum = 0;
            for (size_t i = 0; i < 6; ++i) sum += x[i * kFeatures + k];
            expected[k] = 0.5f * expected[k] + 0.5f * sum / 6;
          }
        }
      }
      for (size_t k = 0; k < kFeatures; ++k) EXPECT_NEAR(mean[k], expected[k], 1e-6);
    };
    run_local(ranks, body);
  }
}

TEST(LearningRates, DifferBetweenUnits) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"data", world.size()}});
    Classifier model;
    shard(model, mesh, {.units = nn::units_at({"body", "head"})});
    materialize(model, world.device(), {.seed = 1});
    optim::AdamW body(model.body, {.lr = 0.0}), head(model.head, {.lr = 0.1});
    const Tensor before = full_parameter(model.body.weight);
    const Tensor head_before = full_parameter(model.head.weight);
    {
      Recording recording;
      const Batch batch = batch_of(world, mesh, 0, 6);
      recording.backward(cross_entropy(model(batch.x), batch.label));
      clip_grad_norm(model, 1.0);  // of all together
      for (optim::AdamW* optimizer : {&body, &head}) {
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    EXPECT_TRUE(identical(full_parameter(model.body.weight), before));
    EXPECT_FALSE(identical(full_parameter(model.head.weight), head_before));
    EXPECT_THROW(optim::AdamW(std::vector{model.head.weight}), ConfigError) << "half of a unit";
  });
}

// Saved between two outer steps, when each island has its own model.
TEST(Islands, GoOnWhereTheyWereSaved) {
  const std::string folder = ::testing::TempDir() + "/islands";
  constexpr int64_t kRound = 4, kSteps = 3 * kRound, kSaved = 6;
  Gradients once;
  const auto train = [&](int ranks, bool resumed) {
    run_local(ranks, [&](World& world) {
      const Mesh all = world.mesh({{"island", 2}, {"data", world.size() / 2}});
      const Mesh mesh = world.slice(all, "island");
      Classifier model;
      shard(model, mesh);
      materialize(model, world.device(), {.seed = 3});
      optim::AdamW optimizer(model, {.lr = 0.02});
      optim::DiLoCo outer(model, all, "island");
      int64_t step = 0;
      if (resumed)
        step = models::load_checkpoint(folder, model, {&optimizer}, world, {.outer = &outer})->step;
      EXPECT_EQ(step, resumed ? kSaved : 0);
      for (; step < kSteps; ++step) {
        if (step == kSaved && !resumed)
          models::save_checkpoint(folder, step, model, {&optimizer}, world, {.outer = &outer});
        const int64_t first = (step * outer.islands() + outer.island()) * 12;
        const auto [x, label] = batch_of(world, mesh, first, 12);
        {
          Recording recording({.step = step, .first_sample = first});
          recording.backward(cross_entropy(model(x), label));
        }
        optimizer.step();
        optimizer.zero_grad();
        if ((step + 1) % kRound == 0) outer.step();
      }
      for (const nn::Parameter& p : model.parameters()) {
        const std::vector<float> values = full_parameter(p).to_vector<float>();
        if (world.rank() == 0 && !resumed) once[p.name()] = values;
        if (!resumed) continue;
        for (size_t i = 0; i < values.size(); ++i)
          EXPECT_NEAR(values[i], once.at(p.name())[i], 1e-5) << p.name() << " of rank " << world.rank();
      }
    });
  };
  train(4, false);
  for (const int ranks : {4, 2, 6}) train(ranks, true);
}

TEST(FineTuning, TrainsAdaptersOfASavedModel) {
  const std::string folder = ::testing::TempDir() + "/fine_tuning";
  run_local(2, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", 2}});
    const auto loss_of = [&](Classifier& model, optim::AdamW& optimizer, int64_t step) {
      const auto [x, label] = batch_of(world, mesh, 0, 12);
      Recording recording({.step = step});
      const Tensor loss = cross_entropy(model(x), label);
      recording.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      return redistribute(loss, "data", Placement::invariant()).item();
    };
    Classifier saved;
    saved.eval();
    shard(saved, mesh);
    materialize(saved, world.device(), {.seed = 5});
    models::save_checkpoint(folder, 1, saved, {}, world);
    optim::AdamW of_saved(saved, {.lr = 1e-3});

    Classifier model;
    model.eval();
    EXPECT_EQ(nn::add_lora(model, {.rank = 2, .alpha = 4}, [](const std::string& path) { return path == "body"; }), 1);
    shard(model, mesh);
    materialize(model, world.device(), {.seed = 1});
    EXPECT_TRUE(models::load_checkpoint(folder, model, {}, world));  // of the model without adapters, which contribute nothing yet
    optim::AdamW optimizer(model, {.lr = 1e-3});                     // has state only for adapters

    const double first = loss_of(saved, of_saved, 0);
    EXPECT_EQ(loss_of(model, optimizer, 0), first);
    double last = first;
    for (int64_t step = 1; step < 20; ++step) last = loss_of(model, optimizer, step);
    EXPECT_LT(last, first);
    EXPECT_GT(max(abs(full_parameter(model.body.lora->b))).item(), 0);
  });
}

TEST(FineTuning, KeepsFrozenMatricesInBlocks) {
  nn::MLP model({.width = 64});
  nn::add_lora(model, {.rank = 2, .alpha = 4});
  EXPECT_EQ(nn::quantize(model, BlockFormat::nf4), 2);
  materialize(model, Device::cpu(), {.seed = 1});
  EXPECT_EQ(model(full({2, 64}, 0.5)).shape(), (Shape{2, 64}));
}

TEST(Generation, ReadsEachTokenOnce) {
  models::Gpt model({.layers = 2, .heads = 2, .width = 16, .context = 12, .vocab = 23});
  materialize(model, Device::cpu(), {.seed = 1});
  const Tensor prompt = Tensor::from<int32_t>({3, 1, 4, 22, 7, 18}, {2, 3});

  nn::KeyValueCache cache(model.config.context);
  Tensor token = prompt, text = cast(prompt, kI64);
  while (cache.length() + token.size(1) <= model.config.context) {
    const Tensor expected = model.logits(text), logits = model.next_logits(token, cache);
    const int64_t length = text.size(1);
    EXPECT_TRUE(equal(logits, slice(expected, 1, length - 1, length))) << "after " << length;
    token = argmax(logits);
    text = concat({text, token}, 1);
  }
  EXPECT_EQ(text.size(1), 13);
}

}  // namespace
}  // namespace examples
