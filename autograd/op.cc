#include "sheaf/autograd/op.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

void Execute::completes_with(const Event& event) {
  for (const Tensor& t : outputs_) t.storage()->filled_by(event);
}

Stream Execute::gpu_stream() const { return RankContext::current().stream(device()); }

void Execute::fail_unasked() const {
  fail<ConfigError>("[", unasked_, "] ", path_label(PathScope::current()), ": inputs on ", device().to_string(),
                    ", but its execute() has a kernel for the CPU alone (it takes memory without asking for stream())");
}

void Execute::join(const Event& event) const {
  if (device().is_cuda()) event.order(stream());
  else event.sync();
}

namespace {

void check_type(const OpDef& op, const Type& want, const Tensor& have) {
  if (!(want == have.type()))
    fail<PlacementError>("[", op.name, "] output ", want, " cannot be stored into ", have.type());
}

Tensor allocate_output(const OutputSpec& spec, std::span<const Tensor> earlier, Device device, MemoryKind where) {
  if (spec.within >= 0) return Tensor::view_into(earlier[spec.within], spec.type, spec.byte_offset);
  if (spec.into) return spec.into.type() == spec.type ? spec.into.alias() : Tensor::view_into(spec.into, spec.type, 0);
  return Tensor::empty(spec.type, device, where);
}

// Of the innermost DeviceScope.
thread_local std::optional<Device> default_device_;

// An op's device is that of its inputs; constants on cpu go with meta inputs.
Device device_of(const OpDef& op, std::span<const Tensor> inputs, std::span<const OutputSpec> outputs) {
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

}  // namespace

DeviceScope::DeviceScope(Device device) : previous_(default_device_) { default_device_ = device; }
DeviceScope::~DeviceScope() { default_device_ = previous_; }
Device default_device() { return default_device_.value_or(RankContext::current().device); }

Tensors execute_node(const OpDef& op, const void* attrs, std::span<const Tensor> inputs,
                     std::span<const OutputSpec> specs, bool add) {
  const Device device = device_of(op, inputs, specs);
  Tensors outputs;
  outputs.reserve(specs.size());
  if (op.alias) {
    const OutputSpec& spec = specs[0];
    char* const base = reinterpret_cast<char*>(size_t{1} << 20);  // only differences of addresses are used
    View in = inputs[0].view_unsynced(), out;
    in.data = base;
    out.dtype = spec.type.dtype;
    out.shape = spec.type.local_shape();
    if (op.alias(attrs, in, out)) {
      outputs.push_back(Tensor::over(inputs[0].storage(), inputs[0].byte_offset() + (static_cast<char*>(out.data) - base),
                                     spec.type, out.shape, out.strides));
      return outputs;
    }
  }
  for (const OutputSpec& spec : specs) outputs.push_back(allocate_output(spec, outputs, device, op.memory));
  Execute run(inputs, outputs);
  run.add = add;
  std::shared_ptr<Storage> workspace;
  if (op.workspace) {
    if (const int64_t bytes = op.workspace(attrs, run); bytes > 0) {
      workspace = Storage::allocate(device, bytes);
      run.workspace = {workspace->data(), static_cast<size_t>(bytes)};
    }
  }
  if (op.execute && (!device.is_meta() || op.kind == OpKind::redistribute || op.kind == OpKind::discard)) {
    run.will_execute(op.name);
    op.execute(attrs, run);
  }
  if (op.kind == OpKind::step)
    for (size_t i = 0; i < specs.size(); ++i)
      if (specs[i].into) outputs[i].storage()->changed();
  return outputs;
}

Tensors apply_typed(const OpDef& op, const void* attrs, std::span<const Tensor> inputs,
                    std::span<const OutputSpec> specs) {
  Tensors outputs = execute_node(op, attrs, inputs, specs);
  if (Recording* r = Recording::current()) r->record(op, attrs, inputs, outputs, specs);
  return outputs;
}

namespace detail {
// place.cc: coerces `inputs` and fills in the layouts of `outputs`.
void place(const OpDef& op, const void* attrs, std::span<const Tensor>& inputs, std::vector<Tensor>& coerced,
           std::span<OutputSpec> outputs);
}  // namespace detail

Tensors apply(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<const Into> into) {
  for (const Tensor& t : inputs)
    if (!t.defined()) fail<LifetimeError>("[", op.name, "] ", path_label(PathScope::current()), ": an input is undefined");
  Infer infer(inputs);
  op.infer(attrs, infer);
  std::vector<Tensor> coerced;
  const std::span<OutputSpec> specs(infer.outputs);
  detail::place(op, attrs, inputs, coerced, specs);
  bool add = false;
  for (size_t i = 0; i < into.size(); ++i) {
    if (!into[i].to) continue;
    // Memory of a dtype that an op cannot fill is left to the caller, who converts what the op gives.
    if (const DType to = into[i].to.dtype(), own = specs[i].type.dtype; to != own) {
      if (!is_wide_of(to, own) || !(op.stores_wide >> i & 1)) continue;
      specs[i].type.dtype = to;
    }
    check_type(op, specs[i].type, into[i].to);
    if (into[i].add && !(op.can_add && i == 0))
      fail<LifetimeError>("[", op.name, "] cannot add output ", i, " into given memory");
    specs[i].into = into[i].to;
    add = add || into[i].add;
  }
  Tensors outputs = execute_node(op, attrs, inputs, specs, add);
  if (Recording* r = Recording::current()) r->record(op, attrs, inputs, outputs, specs, add);
  return outputs;
}

}  // namespace sheaf
