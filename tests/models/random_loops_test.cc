// Random user-defined loops: what `sheaf train` never does, on meshes that random_training.h draws. Parameters that do not train, SGD,
// micro-batches in separate recordings, in a program of compile() or without marking the last one, backwards in another order, blocks with
// their own strategies: in f64 all have the numbers of one rank that does everything at once, also when resumed from another mesh's
// checkpoint.
//
// A case is a seed; random_seeds() chooses the seeds: bazel test --test_env=SHEAF_SEED=1037 --test_env=SHEAF_SEEDS=1 ...
#include <gtest/gtest.h>


#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/keep_within.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/muon.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/models/random_training.h"

namespace sheaf::testing {
namespace {

constexpr int kLoopSteps = 5, kSaveAfter = 1;

struct Task {
  models::TrainConfig config;
  uint64_t frozen = 0;    // parameters, as bits by their indices
  std::string optimizer = "adamw";  // or "sgd"
  double momentum = 0;
};

struct Loop {
  Way way;
  enum { one, each, program } recordings = one;  // of a step: one, one for each micro-batch, or compile()
  int64_t keeps = 0;                             // bytes, the budget for units that a program keeps
  bool says_last = true, reversed = false;       // mark the last micro-batch, reverse the order of backwards
  std::vector<std::string> inner = {};  // the first blocks' own strategies; "": the model's
};

std::string to_string(const Task& task, const Loop& loop) {
  std::string inner;
  for (const std::string& strategy : loop.inner) inner += str(", ", strategy.empty() ? "-" : strategy);
  return str(to_string(loop.way), ", frozen ", task.frozen, ", ", task.optimizer, " ", task.momentum,
             loop.recordings == Loop::each      ? ", recordings"
             : loop.recordings == Loop::program ? str(", program within ", loop.keeps)
                                                : "",
             loop.says_last ? "" : ", not told the last", loop.reversed ? ", backwards reversed" : "", inner);
}

Axes axes_of(const Way& way) {
  const models::ShardingConfig& s = way.config.sharding;
  Axes axes;
  int rest = way.world;
  const auto add = [&](const char* name, int64_t size, bool chain = false) {
    rest /= static_cast<int>(size);
    if (size > 1) axes.push_back({name, static_cast<int>(size), chain});
  };
  add("stage", s.pipeline, true);
  add(s.secondary ? "secondary" : "replica", s.replicas);
  const size_t data = axes.size();
  add("expert", s.experts);
  add("context", s.context);
  add("model", s.tensor);
  axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(data), {"data", rest});
  return axes;
}

std::unique_ptr<optim::Optimizer> optimizer_of(const Task& task, nn::Module& module) {
  if (task.optimizer == "sgd")
    return std::make_unique<optim::SGD>(module, optim::SgdOptions{.momentum = task.momentum, .nesterov = task.momentum > 0.5, .weight_decay = 0.1});
  if (task.optimizer == "muon") return std::make_unique<optim::Muon>(module);
  return std::make_unique<optim::AdamW>(module);
}

std::unique_ptr<models::Decoder> model_of(const Task& task, const Loop& loop, const Mesh& mesh) {
  const models::TrainConfig& c = loop.way.config;
  const auto prepare = [&](models::Decoder& model, const ShardOptions& options) {
    std::vector<nn::Parameter> parameters = model.parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      if (task.frozen >> (i % 64) & 1) parameters[i].freeze();
    size_t block = 0;
    for (auto& [path, module] : model.named_modules()) {
      if (!model.is_block(*module)) continue;
      if (c.train.recompute != "none") module->recompute({.selective = c.train.recompute == "selective"});
      if (block++ >= loop.inner.size() || loop.inner[block - 1].empty()) continue;
      ShardOptions own = options;
      own.units = {}, own.strategy = loop.inner[block - 1], own.prefetch_bytes = 0;
      own.secondary = own.secondary && own.strategy.value != Strategy::replicate;
      shard(*module, mesh, own);
    }
  };
  return tiny_model_f64(mesh, {.strategy = c.sharding.strategy, .prefetch_bytes = c.sharding.prefetch_bytes}, {}, 5, models::model_of(c),
                        prepare);
}

struct Trained {
  std::vector<double> numbers;  // losses and norms
  Values parameters;
};

/// Micro-batches of step s: tokens and targets, alternating, and the optimizer's numbers.
std::vector<Tensor> inputs_of(const Mesh& mesh, const models::TrainConfig& c, int s, const optim::Optimizer& optimizer) {
  std::vector<Tensor> out;
  const int64_t rows = c.train.batch, parts = c.train.micro_batches;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t first = s * rows + rows * i / parts, end = s * rows + rows * (i + 1) / parts;
    const TinyBatch batch = tiny_batch(mesh, first, end - first);
    out.push_back(batch.tokens), out.push_back(batch.targets);
  }
  const std::vector<double> scalars = optimizer.next_scalars({.lr = 0.01});
  out.push_back(Tensor::from(scalars, {std::ssize(scalars)}));
  return out;
}

Trained train(const Task& task, const Loop& loop, bool resume, const std::string& folder) {
  const models::TrainConfig& c = loop.way.config;
  Trained out;
  Whole whole;
  run_local(loop.way.world, [&](World& w) {
    const Mesh mesh = w.mesh(axes_of(loop.way));
    const auto model = model_of(task, loop, mesh);
    const auto optimizer = optimizer_of(task, *model);
    if (resume) {
      ASSERT_TRUE(models::load_checkpoint(folder, *model, {optimizer.get()}, w));
    }
    const int64_t parts = c.train.micro_batches, rows = c.train.batch;
    std::optional<Recording> own;  // where each micro-batch has one
    const auto code = [&](std::span<const Tensor> inputs) -> std::vector<Tensor> {
      std::vector<Tensor> losses(static_cast<size_t>(parts));
      Tensor sum;
      const RecordingOptions options = Recording::current()->options();
      const auto differentiate = [&](int64_t i, bool last) {
        const Tensor loss = std::exchange(losses[static_cast<size_t>(i)], {});
        Recording::current()->backward(loss, {.last_micro_batch = last && loop.says_last});
        sum = sum ? add(sum, loss) : loss;
      };
      for (int64_t i = 0; i < parts; ++i) {
        Recording::current()->next_micro_batch(options.first_sample + rows * i / parts);
        losses[static_cast<size_t>(i)] = model->loss(inputs[2 * static_cast<size_t>(i)], inputs[2 * static_cast<size_t>(i) + 1],
                                                     {.divide_by = static_cast<double>(rows * c.model.context)});
        if (loop.reversed) continue;
        differentiate(i, i + 1 == parts);
        if (loop.recordings == Loop::each && i + 1 < parts) own.reset(), own.emplace(options);
      }
      if (loop.reversed)
        for (int64_t i = parts; i-- > 0;) differentiate(i, i == 0);
      const Tensor norm = clip_grad_norm(*model, c.train.clip > 0 ? c.train.clip : 1e9);
      optimizer->step({.scalars = inputs.back()});
      optimizer->zero_grad();
      return {redistribute(sum, Layout(mesh.spec, Placement::invariant())), norm};
    };
    CompiledStep compiled({.rewrite = loop.keeps > 0 ? keep_within(loop.keeps, w, Device::cpu()) : nullptr});
    for (int s = resume ? kSaveAfter : 0; s < kLoopSteps; ++s) {
      const std::vector<Tensor> inputs = inputs_of(mesh, c, s, *optimizer);
      const RecordingOptions options{.step = s, .first_sample = s * rows, .seed = 3};
      std::vector<Tensor> results;
      if (loop.recordings == Loop::program) {
        results = compiled.run(options, inputs, code);
      } else {
        own.emplace(options);
        results = code(inputs);
        own.reset();
      }
      if (w.rank() == 0)
        for (const Tensor& x : results) out.numbers.push_back(x.item<double>());
      if (!resume && s + 1 == kSaveAfter && !folder.empty())
        models::save_checkpoint(folder, s + 1, *model, {optimizer.get()}, w);
    }
    whole.collect(*model, false);
  }, {.bytes_per_second = loop.way.bytes_per_second, .timeout = std::chrono::seconds(60), .threads_per_rank = 1});
  out.parameters = whole.values();
  return out;
}

void expect_near(const Trained& got, const Trained& want) {
  const std::vector<double>&a = got.numbers, &b = want.numbers;
  for (size_t i = 1; i <= a.size(); ++i)  // from the end: a resumed run has fewer
    EXPECT_NEAR(a[a.size() - i], b[b.size() - i], 1e-10 * std::max(1.0, std::abs(b[b.size() - i]))) << "the last but " << i - 1;
  for (const auto& [name, values] : want.parameters)
    EXPECT_LE(max_difference({{name, got.parameters.at(name)}}, {{name, values}}), 1e-9) << name;
}

class RandomLoops : public ::testing::TestWithParam<int> {
 protected:
  static void TearDownTestSuite() { EXPECT_LE(4 * refused, drawn) << "most configurations can be trained"; }
  static inline int drawn = 0, refused = 0;
};

TEST_P(RandomLoops, HaveTheNumbersOfOneRank) {
  Draw draw(static_cast<uint64_t>(GetParam()));
  Task task{.config = drawn_task(draw)};
  task.config.model.context = 9, task.config.model.vocab = 13;  // tiny_batch()'s
  if (task.config.data.separate_documents) task.config.data.end_of_text = 5;
  task.frozen = draw.one_in(4) ? 0 : draw.bits() & draw.bits();
  task.optimizer = draw.one_in(2) ? task.config.train.optimizer : "sgd";
  task.momentum = draw.of<double>({0, 0.5, 0.9});
  const auto drawn_loop = [&] {
    Loop loop{.way = drawn_way(task.config, draw)};
    loop.recordings = draw.of<decltype(loop.recordings)>({Loop::one, Loop::each, Loop::program});
    loop.keeps = draw.of<int64_t>({0, 60'000, 1LL << 40});
    loop.says_last = draw.one_in(2);
    loop.reversed = loop.recordings != Loop::each && draw.one_in(3);
    if (loop.way.config.sharding.pipeline == 1 && draw.one_in(3))
      for (int i = 0; i < 3; ++i) loop.inner.push_back(draw.of<std::string>({"", "full_shard", "shard_grad_op", "zero1", "replicate"}));
    return loop;
  };
  const Loop loop = drawn_loop(), other = drawn_loop();
  SCOPED_TRACE(to_string(task, loop));
  ++drawn;
  const ScratchFolder folder;
  const Trained want = train(task, {.way = {.config = task.config}}, false, "");
  try {
    expect_near(train(task, loop, false, folder.path()), want);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kConfig)) << error.what();
    std::cout << error.what() << '\n';
    ++refused;
    return;
  }
  SCOPED_TRACE(str("goes on on ", to_string(task, other)));
  try {
    expect_near(train(task, other, true, folder.path()), want);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kConfig)) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomLoops, ::testing::ValuesIn(random_seeds(60)), [](const auto& seed) { return str(seed.param); });

}  // namespace
}  // namespace sheaf::testing
