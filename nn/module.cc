#include "sheaf/nn/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <unordered_set>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/layers/tensor_region.h"
#include "sheaf/nn/unit_mark.h"

namespace sheaf::nn {
namespace {

// Per thread, as ranks may be threads.
thread_local Module* current_module = nullptr;

}  // namespace

void detail::expect_level(const std::string& path, const std::string& key) {
  check<ConfigError>(!key.empty() && key.find('.') == std::string::npos, "[module] key '", key, "' of '", path,
                     "': keys are parts of names, so they are not empty and have no dot");
}

void Visitor::module(Module& m) { m.visit(*this); }

Module* ModuleScope::current() { return current_module; }

ModuleScope::ModuleScope(Module& module, bool opens_unit)
    : parallelized_(!module.call_placements_.empty()),
      opens_unit_(opens_unit),
      path_(module.path_),
      module_(&module),
      previous_(current_module) {
  if (previous_ && previous_->listed_ && !module.listed_)
    fail<LifetimeError>("[module] a ", module.type_name(), " used by ", previous_->description(),
                        " is not listed in its SHEAF_FIELDS (or was added after materialize())");
  in_stage_ = module.unit_ && module.unit_->stage_axis() >= 0;
  if (module.unit_ && opens_unit_) module.unit_->enter();
  else if (module.unit_) module.unit_->schedule()->enter_scope();
  else if (module.schedule_) module.schedule_->enter_scope();
  current_module = &module;
  try {
    open_region();
  } catch (...) {  // the scope was never entered
    leave();
    throw;
  }
}

void ModuleScope::open_region() {
  if (module_->recompute_) recompute_.emplace(*module_->recompute_);
}

bool ModuleScope::is_on_another_stage(const Tensor& t) const {
  if (!t || !t.layout().mesh()) return false;
  const Placement& p = t.layout()[module_->unit_->stage_axis()];
  return p.is_single() && p.map().owner() != module_->unit_->stage();
}

void ModuleScope::move_to_stage(Tensor& t) {
  if (!is_on_another_stage(t)) return;
  // Values sent between stages are not sent again in the backward.
  const Unit& unit = *module_->unit_;
  before_region([&] { t = redistribute(t, t.layout().with(unit.stage_axis(), Placement::on(unit.stage()))); });
}

bool ModuleScope::places(const Tensor& t, Where where) const {
  if (!parallelized_ || !t || !t.layout().mesh()) return false;
  const MeshSpec& mesh = *t.layout().mesh();
  return std::ranges::any_of(module_->call_placements_, [&](const CallPlacements& call) {
    return (call.*where).has_value() && mesh.has_axis(call.axis);
  });
}

void ModuleScope::place(Tensor& t, Where where) const {
  if (!places(t, where)) return;
  const MeshSpec& mesh = *t.layout().mesh();
  for (const CallPlacements& call : module_->call_placements_)
    if (const auto& placement = call.*where; placement && mesh.has_axis(call.axis)) {
      const Layout to = t.layout().with(mesh.axis(call.axis), *placement);
      t = where == &CallPlacements::inputs ? gather_again(t, to) : redistribute(t, to);
    }
}

void ModuleScope::expect_no_outputs() const {
  for (const CallPlacements& call : module_->call_placements_)
    if (call.outputs)
      fail<ConfigError>("[module] ", path_label(PathScope::current()), ": a ", module_->type_name(), " returns no Tensor, nor a ",
                        "struct of them by value, that could be ", *call.outputs, " on mesh axis ", call.axis,
                        " (CallPlacements::outputs)");
}

ModuleScope::~ModuleScope() {
  recompute_.reset();
  leave();
}

void ModuleScope::leave() {
  current_module = previous_;
  if (module_->unit_ && opens_unit_) module_->unit_->leave();
  else if (module_->unit_) module_->unit_->schedule()->leave_scope();
  else if (module_->schedule_) module_->schedule_->leave_scope();
}

std::string Module::description() const {
  return !listed_ ? type_name() : str(type_name(), path_.empty() ? " (root)" : " '" + path_ + "'");
}

std::string type_name(const std::type_info& type) {
  int status = 0;
  char* text = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string out = status == 0 ? text : type.name();
  std::free(text);
  return out;
}

std::vector<Parameter> Module::parameters() {
  struct Collect : Visitor {
    std::vector<Parameter> out;
    std::unordered_set<const Parameter::State*> seen;
    void parameter(Parameter& p) override {
      if (!seen.insert(p.id()).second) return;
      if (!p.unit()) p.state().name = path();
      out.push_back(p);
    }
  } collect;
  visit(collect);
  return std::move(collect.out);
}

std::vector<Buffer> Module::buffers() {
  struct Collect : Visitor {
    std::vector<Buffer> out;
    std::unordered_set<const Buffer::State*> seen;
    void buffer(Buffer& b) override {
      if (!seen.insert(b.id()).second) return;
      if (!b.state().value) b.state().name = path();
      out.push_back(b);
    }
  } collect;
  visit(collect);
  return std::move(collect.out);
}

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  struct Collect : Visitor {
    std::vector<std::pair<std::string, Module*>> out;
    void module(Module& m) override {
      out.emplace_back(path(), &m);
      m.visit(*this);
    }
  } collect;
  collect.module(*this);
  return std::move(collect.out);
}

void freeze(Module& module) {
  for (Parameter& p : module.parameters()) p.freeze();
}

void Module::train(bool on) {
  for (auto& [path, module] : named_modules()) module->training_ = on;
}

EvalScope::EvalScope(Module& module) {
  for (auto& [path, part] : module.named_modules())
    if (std::exchange(part->training_, false)) training_.push_back(part);
}
EvalScope::~EvalScope() {
  for (Module* part : training_) part->training_ = true;
}

}  // namespace sheaf::nn
