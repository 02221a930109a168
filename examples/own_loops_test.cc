// More of docs/own_models.md, compiled and tested: a contrastive loss over all ranks' samples, two views of each sample in one batch,
// validation, the key of dropout, inputs and buffers in half precision, tied and frozen parameters.
#include <algorithm>
#include <cmath>

#include "sheaf/examples/expect_gradients.h"

namespace examples {
namespace {

using namespace sheaf;

constexpr int64_t kFeatures = 5, kClasses = 3, kWidth = 4;

// Samples [first, first + n) of a data set that is a formula. Every rank generates all of them and keeps its own rows.
Tensor samples(World& world, const Mesh& mesh, int64_t first, int64_t n) {
  std::vector<float> x;
  for (int64_t i = first * kFeatures; i < (first + n) * kFeatures; ++i) x.push_back(static_cast<float>(std::sin(static_cast<double>(i * i))));
  return redistribute(Tensor::from(x, {n, kFeatures}).to(world.device()), Layout(mesh.spec, Placement::shard(0)));
}
Tensor labels(World& world, const Mesh& mesh, int64_t first, int64_t n) {
  std::vector<int64_t> label;
  for (int64_t i = first; i < first + n; ++i) label.push_back(i % kClasses);
  return redistribute(Tensor::from(label, {n}).to(world.device()), Layout(mesh.spec, Placement::shard(0)));
}

// Learns which image belongs to which text of a batch, which is that of all ranks (CLIP: Radford et al.,
// https://arxiv.org/abs/2103.00020).
struct TwoTowers : nn::Module {
  nn::Linear image{kFeatures, kWidth}, text{kFeatures, kWidth};
  nn::Parameter log_scale{{1}, nn::Init::constant(std::log(10.0))};

  Tensor loss(const Tensor& images, const Tensor& texts) {
    const auto scope = enter();
    const double norm = std::sqrt(static_cast<double>(kWidth));
    const Tensor u = rms_norm(image(images), {}, 1e-12) / norm, v = rms_norm(text(texts), {}, 1e-12) / norm;  // rows of length 1
    const Tensor partner = arange(u.size(0));
    const auto find = [&](const Tensor& mine, const Tensor& others) {
      const Tensor all = redistribute(others, "data", Placement::replicate());
      return cross_entropy(exp(log_scale) * matmul(mine, transpose(all, 0, 1)), partner);
    };
    return 0.5 * (find(u, v) + find(v, u));
  }
  SHEAF_FIELDS(image, text, log_scale);
};

TEST(ContrastiveLoss, ComparesTheSamplesOfAllRanks) {
  Gradients expected;
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      TwoTowers model;
      shard(model, mesh);
      materialize(model, world.device(), {.seed = 1});
      int reduced = 0;
      {
        Recording recording;
        const Tensor loss = model.loss(samples(world, mesh, 0, 7), samples(world, mesh, 100, 7));
        EXPECT_TRUE(loss.layout()[0].is_partial());
        recording.backward(loss);
        const Tape& tape = recording.tape();
        for (NodeId id = 0; id < tape.num_nodes(); ++id) {  // the adjoints of the two gathers: matrices, as opposed to a unit's buffer
          const Node& n = tape.node(id);
          reduced += n.phase == Phase::backward && tape.op_name(n) == "reduce_scatter" && tape.type(tape.output(n)).shape == Shape{7, kWidth};
        }
      }
      EXPECT_EQ(reduced, ranks > 1 ? 2 : 0);
      expect_gradients(model, expected, world.rank(), str(ranks, " ranks"));
    });
}

struct Classifier : nn::Module {
  nn::Linear body{kFeatures, 8}, head{8, kClasses};
  nn::Dropout dropout{0.25};
  Tensor forward(const Tensor& x) { return head(dropout(tanh(body(x)))); }
  SHEAF_FIELDS(body, head, dropout);
};

TEST(Views, AreStackedBesideEachOther) {
  Gradients expected;
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      constexpr int64_t n = 7;
      const Tensor a = samples(world, mesh, 0, n), b = samples(world, mesh, 100, n), label = labels(world, mesh, 0, n);
      EXPECT_THROW(concat({a, b}), PlacementError);
      EXPECT_THROW(slice(a, 0, 0, 2), PlacementError);
      EXPECT_THROW(split(a, {3, 4}), PlacementError);

      Classifier model;
      model.eval();
      shard(model, mesh);
      materialize(model, world.device(), {.seed = 1});
      {
        Recording recording;
        const Tensor both = reshape(stack({a, b}, 1), {2 * n, kFeatures});  // a0, b0, a1, b1, ...
        const Tensor label_of_both = reshape(stack({label, label}, 1), {2 * n});
        EXPECT_EQ(both.layout()[0].to_string(), "Shard(0 by 2)");
        const Tensor y = model(both);
        const Tensor loss = cross_entropy(y, label_of_both);
        const auto views = chunk(reshape(y, {n, 2, kClasses}), 2, 1);  // apart again, [n, 1, kClasses] each
        EXPECT_TRUE(views[1].layout()[0] == a.layout()[0]);
        recording.backward(loss + 0.1 * mean(square(views[0] - views[1])));
        const Tensor alone = 0.5 * (cross_entropy(model(a), label) + cross_entropy(model(b), label));
        EXPECT_NEAR(redistribute(loss, "data", Placement::invariant()).item(), redistribute(alone, "data", Placement::invariant()).item(), 1e-6);
      }
      expect_gradients(model, expected, world.rank(), str(ranks, " ranks"));
    });
}

struct Score {
  double loss, accuracy;
};

// Over `n` samples, in batches of `rows`.
Score validate(Classifier& model, World& world, const Mesh& mesh, int64_t n, int64_t rows) {
  model.eval();                      // without dropout
  const nn::Unsharded whole(model);  // gathered once for all batches
  Tensor sums;                       // of losses and of right answers: Partial
  for (int64_t first = 0; first < n; first += rows) {
    const int64_t count = std::min(rows, n - first);
    const Tensor label = labels(world, mesh, first, count), logits = model(samples(world, mesh, first, count));
    const Tensor loss = cross_entropy(logits, label, {.divide_by = 1});  // the sum, not the mean
    const Tensor right = sum(cast(eq(argmax(logits), label), kF32));
    const Tensor both = stack({loss, right});
    sums = sums ? sums + both : both;
  }
  model.train();
  const auto totals = redistribute(sums, "data", Placement::invariant()).to_vector<double>();
  return {totals[0] / static_cast<double>(n), totals[1] / static_cast<double>(n)};
}

TEST(Validation, CountsEachSampleOnce) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      Classifier model;
      shard(model, mesh, {.units = nn::units_of<nn::Linear>()});
      materialize(model, world.device(), {.seed = 1});
      constexpr int64_t n = 22;
      const Score score = validate(model, world, mesh, n, 5);  // the last batch has 2 samples: one of three ranks has none
      EXPECT_TRUE(model.training());
      EXPECT_THROW(model(samples(world, mesh, 0, 5)), ConfigError) << "dropout outside of a recording";

      // The definition, on one rank.
      const auto weights = [](const nn::Parameter& p) { return full_parameter(p).to_vector<double>(); };
      const auto body = weights(model.body.weight), head = weights(model.head.weight);  // biases are 0
      double loss = 0, right = 0;
      for (int64_t i = 0; i < n; ++i) {
        double hidden[8], logit[kClasses], sum = 0;
        for (int64_t k = 0; k < 8; ++k) {
          double h = 0;
          for (int64_t j = 0; j < kFeatures; ++j) {
            const int64_t at = i * kFeatures + j;
            h += body[static_cast<size_t>(k * kFeatures + j)] * std::sin(static_cast<double>(at * at));
          }
          hidden[k] = std::tanh(h);
        }
        for (int64_t c = 0; c < kClasses; ++c) {
          logit[c] = 0;
          for (int64_t k = 0; k < 8; ++k) logit[c] += head[static_cast<size_t>(c * 8 + k)] * hidden[k];
          sum += std::exp(logit[c]);
        }
        loss += std::log(sum) - logit[i % kClasses];
        right += std::max_element(logit, logit + kClasses) - logit == i % kClasses;
      }
      EXPECT_NEAR(score.loss, loss / n, 1e-6);
      EXPECT_NEAR(score.accuracy, right / n, 1e-12);
    });
}

TEST(Dropout, HasTheKeyOfItsRecording) {
  std::vector<float> expected;
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      constexpr int64_t kRows = 7, kColumns = 50;
      const Tensor x = redistribute(ones({kRows, kColumns}), Layout(mesh.spec, Placement::shard(0)));
      nn::Dropout dropout(0.5);
      const auto dropped = [&](const RecordingOptions& options) {
        Recording recording(options);
        return full_tensor(dropout(x)).to_vector();
      };
      const std::vector<float> first = dropped({});
      EXPECT_EQ(dropped({}), first) << "a default recording repeats its masks";
      EXPECT_NE(dropped({.step = 1}), first);
      EXPECT_NE(dropped({.seed = 1}), first);
      const std::vector<float> later = dropped({.first_sample = 2});  // samples 2, 3, ...
      for (size_t i = 0; i < (kRows - 2) * kColumns; ++i) EXPECT_EQ(later[i], first[i + 2 * kColumns]);
      {
        Recording recording;
        EXPECT_FALSE(equal(dropout(x), dropout(x))) << "calls are counted";
      }
      if (world.rank() != 0) return;
      if (ranks == 1) expected = first;
      EXPECT_EQ(first, expected) << ranks << " ranks";
    });
}

// Its rates of decay are close to 1, where bf16 has three digits: they are computed in f32.
struct Faded : nn::Module {
  nn::Buffer mean{{kFeatures}, nn::Init::constant(0.1)};
  nn::Linear body{kFeatures, 8}, head{8, kClasses};
  nn::Parameter a_log{{8}, nn::Init::between(-6, -3)};
  Faded() { a_log.keep_exact(); }
  Tensor forward(const Tensor& x) {
    const Tensor h = body(x - cast(mean, x.dtype()));              // buffers have their own dtype
    const Tensor faded = exp(-exp(a_log)) * cast(h, a_log.dtype());  // f32
    return head(cast(faded, h.dtype()));
  }
  SHEAF_FIELDS(mean, body, head, a_log);
};

TEST(HalfPrecision, TakesInputsInTheComputeDtype) {
  Gradients exact;
  for (const DType dtype : {kF32, kBF16})
    run_local(2, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      Faded model;
      shard(model, mesh, {.compute_dtype = dtype});
      materialize(model, world.device(), {.seed = 1});
      EXPECT_EQ(model.body.weight.value().dtype(), dtype);
      EXPECT_EQ(model.a_log.value().dtype(), kF32);
      EXPECT_EQ(model.mean.value().dtype(), kF32);
      const Tensor x = samples(world, mesh, 0, 12), label = labels(world, mesh, 0, 12);
      if (dtype == kBF16) {
        EXPECT_THROW(model(x), DTypeError);
      }
      {
        Recording recording;
        recording.backward(cross_entropy(model(cast(x, dtype)), label));
      }
      expect_gradients(model, exact, world.rank(), str(dtype), dtype == kF32 ? 1e-6 : 5e-3);
    });
}

constexpr int64_t kVocab = 11;

struct NextToken : nn::Module {
  nn::Embedding table{kVocab, kWidth};
  nn::Linear body{kWidth, kWidth}, head{kWidth, kVocab, {.bias = false}};
  explicit NextToken(bool tied) {
    if (tied) nn::tie(head.weight, table.weight);
  }
  Tensor forward(const Tensor& tokens) { return head(tanh(body(table(tokens)))); }
  SHEAF_FIELDS(table, body, head);
};

// A step over tokens whose next one follows by a formula.
Tensor loss_of(NextToken& model, World& world, const Mesh& mesh) {
  std::vector<int32_t> tokens, targets;
  for (int32_t i = 0; i < 9; ++i) tokens.push_back(i * i % kVocab), targets.push_back((i * i + 3) % kVocab);
  const auto place = [&](const std::vector<int32_t>& x) {
    return redistribute(Tensor::from(x, {9}).to(world.device()), Layout(mesh.spec, Placement::shard(0)));
  };
  return cross_entropy(model(place(tokens)), place(targets));
}

TEST(Tied, IsOneParameterWithTheSumOfBothGradients) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      NextToken tied(true), apart(false);
      for (NextToken* model : {&tied, &apart}) {
        shard(*model, mesh, {.units = nn::units_of<nn::Linear>()});
        materialize(*model, world.device(), {.seed = 1});
      }
      EXPECT_EQ(tied.parameters().size(), 3u);
      EXPECT_EQ(tied.head.weight.name(), "table.weight");
      assign(apart.head.weight, full_parameter(tied.table.weight));
      for (NextToken* model : {&tied, &apart}) {
        Recording recording;
        recording.backward(loss_of(*model, world, mesh));
      }
      const auto both = full_gradient(tied.table.weight).to_vector();
      const auto table = full_gradient(apart.table.weight).to_vector(), head = full_gradient(apart.head.weight).to_vector();
      for (size_t i = 0; i < both.size(); ++i) EXPECT_NEAR(both[i], table[i] + head[i], 1e-6);
    });
}

TEST(Frozen, StaysAsItIs) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      NextToken model(false);
      for (nn::Parameter p : model.body.parameters()) p.freeze();
      shard(model, mesh);
      materialize(model, world.device(), {.seed = 1});
      optim::AdamW optimizer(model, {.lr = 0.1});
      const Tensor body = full_parameter(model.body.weight), head = full_parameter(model.head.weight);
      {
        Recording recording;
        recording.backward(loss_of(model, world, mesh));
        recording.take();
        EXPECT_FALSE(full_gradient(model.body.weight).defined());
        EXPECT_TRUE(full_gradient(model.table.weight).defined()) << "the gradient flows through what is frozen";
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_TRUE(identical(full_parameter(model.body.weight), body));
      EXPECT_FALSE(identical(full_parameter(model.head.weight), head));
    });
}

TEST(IgnoredLabels, AreNotCountedOnDemand) {
  for (const int ranks : {1, 2, 3, 6})  // of 6 ranks one has no samples, and two have none that counts
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      const Layout rows(mesh.spec, Placement::shard(0));
      const Tensor labels = redistribute(Tensor::from<int64_t>({2, -100, 0, -100, 1}, {5}), rows), logits = samples(world, mesh, 0, 5);
      const Tensor head = Tensor::from<float>({1, 0, 2, 0, 1, -1, 1, 0, 0.5f, 0, 2, 0, 1, 1, 0}, {kClasses, kFeatures});
      const auto value = [](const Tensor& loss) { return redistribute(loss, "data", Placement::invariant()).item(); };
      const CrossEntropyOptions all{.ignore_index = -100}, counted{.ignore_index = -100, .mean_of_counted = true};
      EXPECT_NEAR(value(cross_entropy(logits, labels, counted)), value(cross_entropy(logits, labels, all)) * 5 / 3, 1e-6);
      EXPECT_NEAR(value(linear_cross_entropy(logits, head, labels, counted)), value(linear_cross_entropy(logits, head, labels, all)) * 5 / 3,
                  1e-6);
      const Tensor none = full_of(labels.type(), -100);
      EXPECT_EQ(value(cross_entropy(logits, none, counted)), 0);
    });
}

// Losses that consist of log-probabilities: of classes with weights, of labels that are distributions.
TEST(OwnLosses, AreSumsOfLogProbabilities) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", world.size()}});
      const Tensor logits = samples(world, mesh, 0, 7), label = labels(world, mesh, 0, 7);
      const auto value = [](const Tensor& loss) { return redistribute(loss, "data", Placement::invariant()).item<double>(); };

      const Tensor of_class = Tensor::from<float>({1, 0.5f, 2, 1, 1}, {kFeatures}), weight = take(of_class, label);
      const Tensor losses = cross_entropy(logits, label, {.per_target = true});
      const Tensor weighted = sum(weight * losses) / full_tensor(sum(weight));
      const Tensor one_hot = cast(eq(unsqueeze(label, {1}), arange(kFeatures)), kF32);
      const Tensor soft = 0.9 * one_hot + 0.1 / static_cast<double>(kFeatures);
      const Tensor of_soft = -1.0 * mean(sum(soft * log_softmax(logits), {1}));

      double want = 0, weights = 0;
      const auto l = full_tensor(losses).to_vector<double>();
      const auto of = full_tensor(label).to_vector<int64_t>();
      const auto w = of_class.to_vector<double>();
      for (size_t i = 0; i < of.size(); ++i) want += w[static_cast<size_t>(of[i])] * l[i], weights += w[static_cast<size_t>(of[i])];
      EXPECT_NEAR(value(weighted), want / weights, 1e-6);
      EXPECT_NEAR(value(of_soft), value(cross_entropy(logits, label, {.label_smoothing = 0.1})), 1e-6);
    });
}

// Of its two heads a step uses one.
struct TwoHeads : nn::Module {
  nn::Linear body{kFeatures, kWidth}, first{kWidth, kClasses}, second{kWidth, kClasses};
  SHEAF_FIELDS(body, first, second);
};

TEST(Unused, UnitsAreSkippedAndParametersBesideUsedOnesDecay) {
  for (const int ranks : {1, 2, 3})
    for (const bool units : {false, true})
      run_local(ranks, [&](World& world) {
        const Mesh mesh = world.mesh({{"data", world.size()}});
        TwoHeads model;
        shard(model, mesh, {.units = units ? nn::units_of<nn::Linear>() : nn::UnitPolicy()});
        materialize(model, world.device(), {.seed = 1});
        optim::AdamW optimizer(model, {.lr = 0.1, .weight_decay = 0.5});
        const auto before = full_parameter(model.second.weight).to_vector();
        {
          Recording recording;
          recording.backward(cross_entropy(model.first(model.body(samples(world, mesh, 0, 7))), labels(world, mesh, 0, 7)));
          optimizer.step();
          optimizer.zero_grad();
        }
        const auto after = full_parameter(model.second.weight).to_vector();
        for (size_t i = 0; i < before.size(); ++i) EXPECT_FLOAT_EQ(after[i], units ? before[i] : before[i] * 0.95f);
      });
}

}  // namespace
}  // namespace examples
