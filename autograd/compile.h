// compile(): turns a training step's code into a program. What stays the same from step to step (which ops run on which memory, what
// is gathered when) is determined once; then its tape runs repeatedly, without placement, inference or allocation.
//
//   auto train = compile([&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
//     const Tensor loss = model.loss(tokens, targets);
//     Recording::current()->backward(loss);
//     clip_grad_norm(model, 1.0);
//     optimizer.step({.scalars = scalars});
//     optimizer.zero_grad();
//     return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
//   });
//   for (int64_t step = 0; step < steps; ++step) {
//     const auto [tokens, targets, first_sample] = data.batch(step);
//     const Tensor loss = train({.step = step, .first_sample = first_sample}, tokens, targets, scalars for this step);
//   }
//
// [Note: what a program knows] The first calls run the code, inside a recording. The tapes of the second and the third are compared:
// they must agree node by node, and their leaves in memory or, if they were newly created, in bits. (If they gather units at other
// places, as after an evaluation of the same model, more steps are recorded until two agree.) A leaf that differs would silently keep
// its old value, so it is an error that names it: it must be passed as an input. What changes only in later steps is
// not detected. Side effects of the code (printing, counting, branching on values, train() or eval()) happen in these calls alone,
// except for those registered with Recording::on_rerun() and after_rerun(), such as the optimizer's step count.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "sheaf/autograd/program.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

struct CompileOptions {
  /// Consecutive elementwise ops are fused (passes/fuse_elementwise.h), with the same bits; before `rewrite`.
  bool fuse = true;
  /// Returns the program to run in place of `plain`, the recorded and fused one: plain.with_tape(a rewritten tape). Collectives must
  /// stay congruent on all ranks. See keep_within() (distributed/keep_within.h).
  std::function<Program(const Program& plain)> rewrite = {};
};

/// The result of compile(), untyped. Belongs to its rank's thread; objects that the code refers to must not move.
class CompiledStep {
 public:
  explicit CompiledStep(CompileOptions options) : options_(std::move(options)) {}

  /// Runs one step: the first calls run `code`, which must be the same in all of them. Inputs have the types of the first call's
  /// (ShapeError), and are copied; results belong to the caller. Collective if the code is. Throws ConfigError once two steps can be
  /// compared, if they differ or leave gradients unconsumed.
  std::vector<Tensor> run(const RecordingOptions& options, std::span<const Tensor> inputs, const TensorFunction& code);

  /// Null in the calls that run the code.
  Program* program() { return program_.get(); }

 private:
  struct Recorded {
    Tape tape;
    std::unordered_map<ValueId, Tensor> leaves;
    std::vector<ValueId> results;
  };
  void take_inputs(std::span<const Tensor> inputs);
  Tensor random_state(int64_t after);
  void set_random_state(int64_t after, const Tensor& state) const;
  std::vector<Tensor> record(const RecordingOptions& options, const TensorFunction& code);
  const Recorded* find_same(Recorded& now);
  static void expect_same_leaves(const Recorded& before, const Recorded& now);
  void make_program(const Recorded& step);

  CompileOptions options_;
  std::vector<Tensor> inputs_;
  RecordingOptions now_;                     // of the step under way
  std::map<int64_t, Tensor> random_states_;  // by the offset of their first sample within the step
  int64_t recorded_ = 0;
  std::vector<Recorded> steps_;  // whose tapes differ in the order of gathers
  Reruns reruns_;
  std::unique_ptr<Program> program_;
};

/// A step whose code takes this many Tensors and returns a Tensor or a vector of Tensors.
template <class F>
class Compiled {
 public:
  Compiled(F code, CompileOptions options) : code_(std::move(code)), step_(std::move(options)) {}

  template <class... Inputs>
  auto operator()(const RecordingOptions& options, const Inputs&... inputs) {
    return detail::run_on_list(
        code_, [&](const TensorFunction& code, std::span<const Tensor> all) { return step_.run(options, all, code); }, inputs...);
  }
  Program* program() { return step_.program(); }

 private:
  F code_;
  CompiledStep step_;
};

template <class F>
Compiled<F> compile(F code, CompileOptions options = {}) {
  return {std::move(code), std::move(options)};
}

}  // namespace sheaf
