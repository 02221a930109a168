#include "sheaf/autograd/compile.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/passes/fuse_elementwise.h"
#include "sheaf/autograd/tape_diff.h"
#include "sheaf/core/transfer.h"

namespace sheaf {
namespace {

// A constant's memory may differ from step to step, as long as its bits do not.
bool stays(const Tensor& before, const Tensor& now) {
  if (before.storage() == now.storage()) return before.byte_offset() == now.byte_offset() && before.local_strides() == now.local_strides();
  return before.device().is_meta() || identical(before, now);
}

}  // namespace

std::vector<Tensor> CompiledStep::run(const RecordingOptions& options, std::span<const Tensor> inputs, const TensorFunction& code) {
  now_ = options;
  take_inputs(inputs);
  for (const auto& [after, state] : random_states_) set_random_state(after, state);
  if (program_) {
    for (const auto& effect : reruns_.before) effect();
    std::vector<Tensor> results = program_->run();
    for (const auto& effect : reruns_.after) effect();
    return results;
  }
  try {
    return record(options, code);
  } catch (...) {
    if (recorded_ == 0) inputs_.clear();  // the types of the first call that succeeds count
    throw;
  }
}

void CompiledStep::take_inputs(std::span<const Tensor> inputs) {
  if (inputs_.empty())
    for (const Tensor& t : inputs) inputs_.push_back(Tensor::empty(t.type(), t.device()));
  if (inputs.size() != inputs_.size())
    fail<ShapeError>("[compile] ", inputs.size(), " inputs, compiled for ", inputs_.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!(inputs[i].type() == inputs_[i].type()) || !(inputs[i].device() == inputs_[i].device()))
      fail<ShapeError>("[compile] input ", i, " is ", inputs[i].type(), " on ", inputs[i].device().to_string(), ", compiled for ",
                       inputs_[i].type(), " on ", inputs_[i].device().to_string());
    if (!inputs[i].device().is_meta()) store_into(inputs_[i], inputs[i]);
  }
}

Tensor CompiledStep::random_state(int64_t after) {
  Tensor& state = random_states_[after];
  if (!state) {
    state = Tensor::empty({kI64, {3}, {}}, default_device());
    set_random_state(after, state);
  }
  return state;
}

void CompiledStep::set_random_state(int64_t after, const Tensor& state) const {
  if (state.device().is_meta()) return;
  const std::vector<int64_t> values{static_cast<int64_t>(now_.seed), now_.step, now_.first_sample + after};
  const Tensor here = Tensor::from(values, {3});
  transfer(state.device(), state.view().data, Device::cpu(), here.view().data, static_cast<size_t>(here.local_bytes()));
}

std::vector<Tensor> CompiledStep::record(const RecordingOptions& options, const TensorFunction& code) {
  constexpr int64_t kUnsettled = 1;  // steps until the order of gathers is known
  RecordingOptions own = options;
  own.random_states = [this](int64_t after) { return random_state(after); };
  Recording recording(own);
  std::vector<Tensor> results = code(inputs_);
  Recorded now;
  for (const Tensor& t : results) {
    check<ConfigError>(t.defined(), "[compile] result ", now.results.size(), " is no tensor");
    now.results.push_back(recording.leaf(t, "result"));  // an input that no op reads is new to the recording
  }
  const auto group = recording.group_with_gradients();
  now.leaves = recording.leaves();
  const Reruns reruns = recording.reruns();
  now.tape = recording.take();
  for (Tensor& t : results)  // inputs and leaves change in the next step
    for (const auto& [v, leaf] : now.leaves)
      if (t.storage() == leaf.storage() && !t.device().is_meta()) t = t.clone();
  if (recorded_++ < kUnsettled) return results;
  if (steps_.empty()) {
    steps_.push_back(std::move(now));
    return results;
  }
  if (group)
    fail<ConfigError>("[compile] the step leaves gradients of unit '", path_label(*group), "' behind, which a program does not: ",
                      "put optimizer.step() and optimizer.zero_grad() at its end");
  if (const Recorded* const before = find_same(now)) {
    expect_same_leaves(*before, now);
    make_program(now);
    steps_.clear();
    reruns_ = reruns;
  } else {
    steps_.push_back(std::move(now));
  }
  return results;
}

// An earlier step with the same tape; null if there may be one later. A step that differs in more than its gathers replaces all others.
const CompiledStep::Recorded* CompiledStep::find_same(Recorded& now) {
  constexpr size_t kOrders = 4;  // of gathers, as those with and without an evaluation before the step
  if (now.tape.num_nodes() == std::ssize(now.tape.leaves()))
    fail<ConfigError>("[compile] the step computes nothing in its recording, which compile() makes: it must not make one of its ",
                      "own");
  std::optional<Finding> difference;
  for (const Recorded& before : steps_) {
    difference = first_difference(before.tape, now.tape);
    if (!difference) return &before;
  }
  const auto moves_units = [&](const Tape& tape) {
    NodeId node = difference->node;
    while (node < tape.num_nodes() && !tape.node(node).op) ++node;  // a leaf belongs to what reads it first: a master to its gather
    if (node >= tape.num_nodes()) return false;
    const OpDef* const op = tape.node(node).op;
    return op->kind == OpKind::redistribute || op->kind == OpKind::discard || op->of_units;
  };
  if (steps_.size() < kOrders && (moves_units(steps_.back().tape) || moves_units(now.tape))) return nullptr;
  steps_.clear();
  steps_.push_back(std::move(now));
  fail<ConfigError>("[compile] two steps differ at ", difference->to_string(), "; what depends on the step has to be an input");
}

void CompiledStep::expect_same_leaves(const Recorded& before, const Recorded& now) {
  for (const ValueId v : now.tape.leaves())
    if (!stays(before.leaves.at(v), now.leaves.at(v)))
      fail<ConfigError>("[compile] leaf '", now.tape.leaf_name(v), "', ", now.tape.type(v), ", used in ",
                        path_label(now.tape.path(now.tape.node(now.tape.value(v).producer))), ", is not what it was in the step ",
                        "before, and would stay as it is: ",
                        now.leaves.at(v).impl().recording ? "it was computed in another recording, of which a program knows nothing"
                                                          : "it has to be an input");
}

void CompiledStep::make_program(const Recorded& step) {
  Program plain(step.tape, [&](ValueId v) { return step.leaves.at(v); }, step.results);
  if (options_.fuse) plain = fuse_elementwise(std::move(plain));
  program_ = std::make_unique<Program>(options_.rewrite ? options_.rewrite(plain) : std::move(plain));
}

}  // namespace sheaf
