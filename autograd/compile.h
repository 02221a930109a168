// compile(): a training step's code as a program. What stays the same from step to step (which ops run on which memory, what
// is gathered when) is found out once; then its tape runs again and again, with nothing placed, inferred or allocated anew.
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
// [Note: what a program knows] The first calls run the code, inside a recording. The tapes of the second and the third are
// compared: they must agree node by node, and their leaves in memory or, if they were made anew, in bits. What differs would
// silently keep the value it had, so it is an error that names it: it has to come in as an input. What changes only later is
// not found out. What the code does besides (printing, counting, looking at values and deciding, train() or eval()) happens in
// these calls alone, except for what Recording::on_rerun() was told, such as the optimizer's count of steps.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "sheaf/autograd/program.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tensor_function.h"

namespace sheaf {

struct CompileOptions {
  /// Elementwise ops in a row run as one (passes/fuse_elementwise.h), with the same bits; before `rewrite`.
  bool fuse = true;
  /// What is run instead of the program, `plain`, as it was recorded and fused: plain.with_tape(what a pass made of its tape). On
  /// all ranks collectives must stay alike. See keep_within() (distributed/keep_within.h).
  std::function<Program(const Program& plain)> rewrite = {};
};

/// What compile() gives, without types. Belongs to its rank's thread; what the code refers to must stay where it is.
class CompiledStep {
 public:
  explicit CompiledStep(CompileOptions options) : options_(std::move(options)) {}

  /// Runs one step: its code in the first calls, which is the same in all of them. Inputs have the types of the first call's
  /// (ShapeError), and are copied; results are the caller's. Collective as the code is. Throws ConfigError once two steps can
  /// be compared, if they differ, or leave gradients behind.
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
  static void expect_same(const Recorded& before, const Recorded& now);
  void make_program();

  CompileOptions options_;
  std::vector<Tensor> inputs_;
  RecordingOptions now_;                    // of the step under way
  std::map<int64_t, Tensor> random_states_;  // by where in a step's samples they begin
  int64_t recorded_ = 0;
  std::optional<Recorded> last_;
  std::vector<std::function<void()>> reruns_;
  std::unique_ptr<Program> program_;
};

/// A step whose code takes so many Tensors, and returns a Tensor or a vector of them.
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
