// Calling an op: types are inferred, operands placed, memory is allocated, a kernel runs, the call is recorded. See [Note: what happens
// in apply] in op.h.
#include "sheaf/autograd/op.h"

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/profile.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

namespace {

void check_type(const OpDef& op, const Type& want, const Tensor& have) {
  if (!(want == have.type()))
    fail<PlacementError>("[", op.name, "] output ", want, " cannot be stored into ", have.type());
}

// The device of the innermost DeviceScope; unset: the rank's.
thread_local std::optional<Device> default_device_;

}  // namespace

Device detail::device_of(const OpDef& op, std::span<const Tensor> inputs, std::span<const OutputSpec> outputs) {
  std::optional<Device> found;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Device have = inputs[i].device();
    if (!found || *found == have) found = have;
    else if (found->is_meta() || have.is_meta()) found = Device::meta();
    else
      fail<ConfigError>("[", op.name, "] ", path_label(PathScope::current()), ": inputs on ", found->to_string(), " and ",
                        have.to_string());
  }
  if (found) return *found;
  return !outputs.empty() && outputs[0].into ? outputs[0].into.device() : default_device();
}

void expect_defined(const char* op, const Tensor& x, int input) {
  if (!x) fail<LifetimeError>("[", op, "] ", path_label(PathScope::current()), ": input ", input, " is undefined");
}

DeviceScope::DeviceScope(Device device) : previous_(default_device_) { default_device_ = device; }
DeviceScope::~DeviceScope() { default_device_ = previous_; }
Device default_device() { return default_device_.value_or(RankContext::current().device); }

// Out of line, so that it costs nothing without a profile.
[[gnu::noinline]] static void execute_noted(const OpDef& op, const void* attrs, Execute& run) {
  const ProfileSpan span(Profile::kCompute, op.name, PathScope::current());
  detail::execute(op, attrs, run);
}

static Tensors execute_here(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<const OutputSpec> specs,
                            bool add) {
  const Device device = detail::device_of(op, inputs, specs);
  if (device.is_meta())
    for (const OutputSpec& spec : specs)
      if (spec.into && !spec.into.device().is_meta())
        fail<LifetimeError>("[", op.name, "] ", path_label(PathScope::current()), ": a meta tensor has no values for ", spec.into.type(), " on ",
                            spec.into.device().to_string());
  bool views = false;
  const auto fresh = [](const Type& type, Device on, MemoryKind where) { return Tensor::empty(type, on, where); };
  Tensors outputs = detail::place_outputs(op, attrs, inputs, specs, device, views, fresh);
  if (views || !detail::runs_here(op, inputs, specs)) return outputs;
  Execute run(inputs, outputs);
  run.add = add;
  std::shared_ptr<Storage> workspace;
  if (op.workspace) {
    if (const int64_t bytes = detail::workspace_of(op, attrs, run); bytes > 0) {
      const MemoryUse use(HeldFor::temporaries, op.name, PathScope::current());
      workspace = Storage::allocate(device, bytes);
      run.workspace = {workspace->data(), static_cast<size_t>(bytes)};
    }
  }
  if (op.execute && (!device.is_meta() || op.kind == OpKind::redistribute || op.kind == OpKind::discard)) {
    run.will_execute(op.name);
    if (RankContext::current().profile) [[unlikely]] execute_noted(op, attrs, run);
    else detail::execute(op, attrs, run);
  } else {  // on meta, or an op without a kernel (open): lanes may still be filling the inputs
    for (const Tensor& t : inputs) t.storage()->settle();
  }
  if (op.kind == OpKind::step)
    for (size_t i = 0; i < specs.size(); ++i)
      if (specs[i].into) outputs[i].storage()->changed();
  return outputs;
}

// Allocates the outputs and runs the kernel; the memory ledger, if there is one, is told what the memory is for.
Tensors execute_node(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<const OutputSpec> specs, bool add) {
  return detail::located([&] {
    if (!RankContext::current().memory_log) [[likely]] return execute_here(op, attrs, inputs, specs, add);
    const Recording* r = Recording::current();
    const MemoryUse use(r ? r->next_held_for(op) : op.held_for, op.name, PathScope::current());
    return execute_here(op, attrs, inputs, specs, add);
  });
}

Tensors apply_typed(const OpDef& op, const void* attrs, std::span<const Tensor> inputs,
                    std::span<const OutputSpec> specs) {
  Tensors outputs = execute_node(op, attrs, inputs, specs);
  if (Recording* r = Recording::current()) r->record(op, attrs, inputs, outputs, specs);
  return outputs;
}

detail::Inferred::Inferred(const OpDef& op, const void* attrs, std::span<const Tensor> given) : inputs(given), infer_(given) {
  for (size_t i = 0; i < inputs.size(); ++i)
    expect_defined(op.name, inputs[i], static_cast<int>(i));
  detail::located([&] {
    op.infer(attrs, infer_);
    specs = infer_.outputs;
    place(op, attrs, inputs, coerced_, specs);
  });
}

Tensors apply(const OpDef& op, const void* attrs, std::span<const Tensor> given, std::span<const Into> into) {
  const detail::Inferred inferred(op, attrs, given);  // also places the operands
  const std::span<const Tensor> inputs = inferred.inputs;
  const std::span<OutputSpec> specs = inferred.specs;
  bool add = false;
  for (size_t i = 0; i < into.size(); ++i) {
    if (!into[i].to) continue;
    // Memory of a dtype that an op cannot fill is ignored: the caller converts the op's result.
    if (const DType to = into[i].to.dtype(), own = specs[i].type.dtype; to != own) {
      if (!is_wide_of(to, own) || i >= 64 || !(op.stores_wide >> i & 1)) continue;
      specs[i].type.dtype = to;
    }
    detail::located([&] {
      check_type(op, specs[i].type, into[i].to);
      if (into[i].add && !(op.can_add && i == 0))
        fail<LifetimeError>("[", op.name, "] cannot add output ", i, " into given memory");
    });
    specs[i].into = into[i].to;
    add = add || into[i].add;
  }
  Tensors outputs = execute_node(op, attrs, inputs, specs, add);
  if (Recording* r = Recording::current()) r->record(op, attrs, inputs, outputs, specs, add);
  return outputs;
}

}  // namespace sheaf
