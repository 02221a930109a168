// Trains the translator of translate.h to write words backwards; its gradients do not depend on the ranks, nor on the padding.
#include "sheaf/examples/translate.h"

#include <algorithm>

#include "sheaf/examples/expect_gradients.h"

namespace examples {
namespace {

using namespace sheaf;

constexpr int64_t kLongest = 6, kLetters = 8, kEnd = kLetters, kVocab = kLetters + 1;

/// Words of 1 to kLongest letters, and themselves backwards. An answer begins with kEnd and ends with it.
struct Words {
  Tensor source, lengths, answer, target;  // i64 [N, kLongest], [N], [N, kLongest + 1] each
};
Words words(int64_t first, int64_t n, int64_t padding = 0) {
  const Key key = key_of("words", 1);
  std::vector<int64_t> source, lengths, answer, target;
  const auto push = [](std::vector<int64_t>& to, int64_t width, const std::vector<int64_t>& row, int64_t rest) {
    to.insert(to.end(), row.begin(), row.end());
    to.insert(to.end(), static_cast<size_t>(width) - row.size(), rest);
  };
  for (int64_t i = first; i < first + n; ++i) {
    const auto draw = [&](int64_t k) { return static_cast<int64_t>(random_u64(key, static_cast<uint64_t>(i * 16 + k)) >> 33); };
    std::vector<int64_t> word;
    for (int64_t k = 0; k <= draw(15) % kLongest; ++k) word.push_back(draw(k) % kLetters);
    lengths.push_back(std::ssize(word));
    push(source, kLongest, word, padding);
    std::reverse(word.begin(), word.end());
    std::vector<int64_t> behind = word;
    behind.push_back(kEnd), word.insert(word.begin(), kEnd);
    push(answer, kLongest + 1, word, padding), push(target, kLongest + 1, behind, -1);
  }
  return {Tensor::from(source, {n, kLongest}), Tensor::from(lengths, {n}), Tensor::from(answer, {n, kLongest + 1}),
          Tensor::from(target, {n, kLongest + 1})};
}

Tensor loss_of(Translator& model, const Words& w, const Layout& rows) {
  const auto place = [&](const Tensor& x) { return redistribute(x, rows); };
  return model.loss(place(w.source), place(w.lengths), place(w.answer), place(w.target));
}

TEST(Translator, HasTheSameGradientsOnAllRanksAndWithAnyPadding) {
  Gradients expected;
  for (const auto& [data, model_ranks, padding] : {std::tuple{1, 1, 0}, {1, 1, 5}, {2, 1, 0}, {3, 1, 0}, {1, 2, 0}, {2, 2, 5}})
    run_local(data * model_ranks, [&, data = data, model_ranks = model_ranks, padding = padding](World& world) {
      const Mesh mesh = world.mesh({{"data", data}, {"model", model_ranks}});
      Translator model(/*layers=*/2, /*width=*/16, /*heads=*/4, kVocab, kLongest + 1);
      shard(model, mesh, {.tensor_axis = "model", .units = nn::units_of<EncoderBlock, DecoderBlock>()});
      materialize(model, world.device(), {.seed = 1});
      {
        Recording recording;
        recording.backward(loss_of(model, words(0, 7, padding), Layout(mesh.spec, Placement::shard(0))));
      }
      expect_gradients(model, expected, world.rank(), str(data, " x ", model_ranks, " padded by ", padding));
    });
}

TEST(Translator, LearnsToWriteBackwards) {
  Translator model(/*layers=*/1, /*width=*/32, /*heads=*/4, kVocab, kLongest + 1);
  materialize(model, Device::cpu(), {.seed = 1});
  optim::AdamW optimizer(model, {});
  constexpr int64_t kSteps = 400, kRows = 32;
  for (int64_t step = 0; step < kSteps; ++step) {
    Recording recording({.step = step});
    const Words w = words(step * kRows, kRows);
    recording.backward(model.loss(w.source, w.lengths, w.answer, w.target));
    clip_grad_norm(model, 1.0);
    optimizer.step({.lr = optim::cosine(step, {.peak = 5e-3, .warmup = 20, .total = kSteps})});
    optimizer.zero_grad();
  }
  const Words unseen = words(1000000, 100);
  const Tensor begins = Translator::documents(unseen.lengths, kLongest), states = model.encode(unseen.source, begins);
  Tensor answer = slice(unseen.answer, 1, 0, 1);
  for (int64_t t = 0; t <= kLongest; ++t) answer = concat({answer, model.next(answer, states, begins)}, 1);
  const auto got = slice(answer, 1, 1, kLongest + 2).to_vector<int64_t>(), want = unseen.target.to_vector<int64_t>();
  int right = 0;  // whole words
  for (size_t i = 0; i < want.size(); i += kLongest + 1) {
    bool all = true;
    for (size_t t = i; t < i + kLongest + 1; ++t) all = all && (want[t] < 0 || got[t] == want[t]);
    right += all;
  }
  EXPECT_GE(right, 95) << "of 100";
}

}  // namespace
}  // namespace examples
