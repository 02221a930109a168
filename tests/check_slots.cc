// Gradients that are stored into, then accumulated into, given memory: as units do with the gradients of parameters.
#include "sheaf/autograd/ops.h"
#include "sheaf/tests/check_op.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/sample_run.h"

namespace sheaf::testing {
namespace {

// A unit without communication: leaves at rest are the values, and slots are contiguous in one buffer full of NaN.
class Slots final : public LeafGroup {
 public:
  explicit Slots(std::vector<Tensor> values) : values_(std::move(values)), contributed_(values_.size(), false) {
    int64_t bytes = 0;
    for (const Tensor& t : values_) offsets_.push_back(bytes), bytes += t.local_bytes();
    const PoisonScope poison;
    buffer_ = Tensor::empty({kU8, {bytes}, {}});
  }
  Tensor value(int i) override { return values_[static_cast<size_t>(i)]; }
  Tensor slot(int i) override {
    const auto k = static_cast<size_t>(i);
    return Tensor::over(buffer_.storage(), offsets_[k], values_[k].type(), values_[k].shape(),
                        values_[k].shape().contiguous_strides());
  }
  Tensor memory_like_slot(int i) override {
    const PoisonScope poison;
    return Tensor::empty(slot(i).type());
  }
  void release() override {}
  void release_values() override {}
  void finish(const std::vector<bool>& contributed) override { contributed_ = contributed; }
  int num_leaves() const override { return static_cast<int>(values_.size()); }
  bool trainable(int) const override { return true; }
  uint64_t version() const override { return 0; }
  const std::string& group_name() const override { return name_; }
  void backward_ended() override {}
  void recording_ended(uint64_t) override {}
  void close_for_change() override {}
  bool holds_gradients() const override { return false; }

  Values gradient(int i) {
    if (contributed_[static_cast<size_t>(i)]) return local_part(slot(i)).values;
    return Values(static_cast<size_t>(values_[static_cast<size_t>(i)].numel()), 0.0);
  }

 private:
  std::string name_ = "slots";
  std::vector<Tensor> values_;
  std::vector<int64_t> offsets_;
  std::vector<bool> contributed_;
  Tensor buffer_;
};

// The sum of the weighted floating outputs of `uses` calls of f.
Tensor loss_of(const OpSample& sample, const std::vector<Tensor>& inputs, int uses) {
  std::vector<Tensor> y, w;
  for (int u = 0; u < uses; ++u) {
    const Outputs outputs = sample.f(inputs);
    for (size_t o = 0; o < outputs.size(); ++o) {
      if (!is_floating(outputs[o].dtype())) continue;
      y.push_back(outputs[o]);
      w.push_back(make_tensor(draw_weights(sample, o + 8 * static_cast<size_t>(u), outputs[o].shape()),
                              outputs[o].shape(), outputs[o].dtype()));
    }
  }
  return y.empty() ? Tensor() : probe(y, w);
}

}  // namespace

std::string check_slots(const OpSample& sample) {
  std::string out;
  try {
    for (const int uses : {1, 2}) {
      const std::vector<Tensor> inputs = make_inputs(sample, draw_inputs(sample, "slots"), kF64);
      std::vector<Tensor> leaves;
      for (size_t i = 0; i < inputs.size(); ++i)
        if (sample.inputs[i].differentiable && is_floating(inputs[i].dtype())) leaves.push_back(inputs[i]);
      if (leaves.empty()) return "";
      std::vector<Values> want, got, later;
      {
        Recording recording;
        for (const Tensor& t : leaves) recording.watch(t);
        const Tensor loss = loss_of(sample, inputs, uses);
        if (!loss) return "";
        for (const Tensor& g : recording.gradient(loss, leaves)) want.push_back(local_part(g).values);
      }
      for (std::vector<Values>* const to : {&got, &later}) {
        Recording recording;
        const auto group = std::make_shared<Slots>(leaves);
        for (const Tensor& t : leaves) recording.leaf(t, "parameter");
        recording.bind_group(group, leaves);
        recording.use_group(group.get());
        recording.backward(loss_of(sample, inputs, uses), {.defer_weights = to == &later});
        if (to == &later) recording.backward_weights();
        for (int i = 0; i < std::ssize(leaves); ++i) to->push_back(group->gradient(i));
      }
      if (later != got) out += str("gradients that come later are others", uses == 1 ? "; " : " after two uses; ");
      for (size_t i = 0; i < want.size(); ++i)
        if (const double e = scaled_error(got[i], want[i]); !(e <= 1e-13))
          out += str("gradient ", static_cast<int64_t>(i), " in its slot is off by ", e, uses == 1 ? "; " : " after two uses; ");
    }
  } catch (const std::exception& e) {
    out += str("threw ", e.what());
  }
  return out.empty() ? "" : str('[', name_of(sample), "] slots: ", out, '\n');
}

}  // namespace sheaf::testing
