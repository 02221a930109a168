// Module: a plain struct whose members are parameters and other modules, by value. One line names them,
//
//   struct Mlp : nn::Module {
//     nn::Linear up, down;
//     Mlp(int64_t width) : up(width, 4 * width), down(4 * width, width) {}
//     Tensor forward(const Tensor& x_BTC) { return down(gelu(up(x_BTC))); }
//     SHEAF_FIELDS(up, down);
//   };
//
// and names, visits, state dict and operator() follow from it. Modules move; they are not copied by accident. A module
// need not have a forward: its methods open its scope by `auto scope = enter();`. Bases list their fields, and a derived
// module lists them again before its own. A field may be a container: a std::vector, array, tuple or pair, whose parts are named by
// number ("blocks.0.up.weight"), or a std::map by std::string, in the order of its keys ("heads.left.weight"); std::optional and
// std::unique_ptr may be empty, and add no name. Layers of several types go through a base with a virtual forward:
//
//   struct Layer : nn::Module {
//     virtual Tensor forward(const Tensor& x) = 0;
//     SHEAF_FIELDS();
//   };
//   struct Stack : nn::Module {
//     std::vector<std::unique_ptr<Layer>> layers;
//     Tensor forward(Tensor x) {
//       for (auto& layer : layers) x = (*layer)(x);
//       return x;
//     }
//     SHEAF_FIELDS(layers);
//   };
#pragma once

#include <array>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/gather_schedule.h"
#include "sheaf/nn/parameter.h"

namespace sheaf {

class Unit;
class GatherSchedule;
class MeshSpec;

namespace nn {

class Module;

/// How C++ writes the type, for messages.
std::string type_name(const std::type_info& type);

/// Walks a module's fields in the order of SHEAF_FIELDS. path() is the path of what is being visited, "" at the start.
class Visitor {
 public:
  virtual ~Visitor() = default;
  template <class T>
  void field(std::string_view name, T& member);
  const std::string& path() const { return path_; }

  virtual void parameter(Parameter&) {}
  virtual void buffer(Buffer&) {}
  /// Calls m.visit(*this); overridden to do something before or after.
  virtual void module(Module& m);

 private:
  std::string path_;
};

/// Placements of the tensors of a module's call along an axis of the mesh, declared from outside: Module::parallelize().
struct CallPlacements {
  std::string axis;  ///< tensors on a mesh without it, or on none, are unchanged
  /// For the call's arguments, and for its result: tensors of any dtype, and those of structs that expose theirs (for_each_tensor),
  /// which join() first. Absent: unchanged.
  std::optional<Placement> inputs = std::nullopt, outputs = std::nullopt;
};

/// The scope of a module's method: its path on the tape and in errors, and its unit, gathered while it lasts.
class ModuleScope {
 public:
  explicit ModuleScope(Module& module, bool opens_unit = true);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

  /// The innermost module whose scope is open on this thread, or null.
  static Module* current();

  /// Brings an argument of the module's call to the module: a Tensor, or a struct that exposes its tensors (for_each_tensor), is
  /// moved from another pipeline stage to the module's (ShardOptions::stage_axis), and placed as parallelize() says. A struct that
  /// can join() its tensors does so before it is moved, and if the module is recomputed: then one tensor is sent, or kept. Other
  /// arguments pass unchanged.
  template <class T>
  decltype(auto) arrive(T&& argument) {
    constexpr bool has_tensors = requires(std::remove_cvref_t<T>& v) { v.for_each_tensor([](Tensor&) {}); };
    using U = std::remove_reference_t<T>;
    if constexpr (std::is_same_v<std::remove_const_t<U>, Tensor> && (std::is_lvalue_reference_v<T> || std::is_const_v<U>)) {
      return arrive(std::as_const(argument));
    } else if constexpr (std::is_same_v<std::remove_cvref_t<T>, Tensor>) {
      if (in_stage_) move_to_stage(argument);
      place(argument, &CallPlacements::inputs);
      return std::forward<T>(argument);
    } else if constexpr (has_tensors) {
      std::remove_cvref_t<T> moved = std::forward<T>(argument);
      bool comes = false;
      if (in_stage_) moved.for_each_tensor([&](Tensor& t) { comes = comes || is_on_another_stage(t); });
      if constexpr (requires { moved.join(); }) {
        if (comes || is_recomputed()) before_region([&] { moved.join(); });
        else if (is_placed(moved, &CallPlacements::inputs)) moved.join();
      }
      if (comes) moved.for_each_tensor([this](Tensor& t) { move_to_stage(t); });
      moved.for_each_tensor([this](Tensor& t) { place(t, &CallPlacements::inputs); });
      return moved;
    } else {
      return std::forward<T>(argument);
    }
  }
  const Tensor& arrive(const Tensor& argument) {
    if (!in_stage_ && !places(argument, &CallPlacements::inputs)) return argument;
    Tensor& arrived = arrived_.emplace_back(argument);
    if (in_stage_) move_to_stage(arrived);
    place(arrived, &CallPlacements::inputs);
    return arrived;
  }
  /// The result of the module's forward, placed as parallelize() says.
  template <class F>
  decltype(auto) leave_with(F&& forward) {
    using Result = std::remove_cv_t<decltype(forward())>;
    constexpr bool has_tensors = requires(Result& v) { v.for_each_tensor([](Tensor&) {}); };
    if constexpr (std::is_same_v<Result, Tensor>) {
      Tensor result = forward();
      place(result, &CallPlacements::outputs);
      GatherSchedule::look_at_current();
      return result;
    } else if constexpr (has_tensors && !std::is_reference_v<Result>) {
      Result result = forward();
      if constexpr (requires { result.join(); })
        if (is_placed(result, &CallPlacements::outputs)) result.join();
      result.for_each_tensor([this](Tensor& t) { place(t, &CallPlacements::outputs); });
      return result;
    } else {
      if (parallelized_) expect_no_outputs();
      return forward();
    }
  }

 private:
  bool is_on_another_stage(const Tensor& t) const;
  void move_to_stage(Tensor& t);
  using Where = std::optional<Placement> CallPlacements::*;
  bool places(const Tensor& t, Where where) const;
  void place(Tensor& t, Where where) const;
  template <class T>
  bool is_placed(T& tensors, Where where) const {
    bool is = false;
    if (parallelized_) tensors.for_each_tensor([&](Tensor& t) { is = is || places(t, where); });
    return is;
  }
  void expect_no_outputs() const;
  void open_region();
  void leave();
  bool is_recomputed() const { return recompute_ && recompute_->is_region(); }
  /// Runs `f`, which is not to be recomputed with the module; called before anything that is.
  template <class F>
  void before_region(F&& f) {
    recompute_.reset();
    f();
    open_region();
  }
  bool in_stage_ = false, parallelized_, opens_unit_;
  std::list<Tensor> arrived_;
  PathScope path_;
  Module* module_;
  Module* previous_;
  std::optional<RecomputeScope> recompute_;
};

class Module {
 public:
  Module() = default;
  Module(Module&&) noexcept = default;
  Module& operator=(Module&&) noexcept = default;
  virtual ~Module() = default;

  /// From SHEAF_FIELDS.
  virtual void visit(Visitor& visitor) = 0;
  /// Copies settings made in `source`, a module of the same type, after its construction, except parameters: for clone().
  virtual void take_settings(const Module& /*source*/) {}

  /// Every leaf once, in visiting order; names those that are not materialized yet.
  std::vector<Parameter> parameters();
  std::vector<Buffer> buffers();
  /// Paths and modules in visiting order, a module before its children; this one has path "".
  std::vector<std::pair<std::string, Module*>> named_modules();

  /// Training mode (the default) or evaluation, for this module and its submodules: dropout acts in training only.
  void train(bool on = true);
  void eval() { train(false); }
  bool training() const { return training_; }

  /// This module's intermediate values are not kept for the backward but recomputed there: activation checkpointing, for a module
  /// whose inputs are small compared with its intermediate values. See RecomputeScope.
  void recompute(bool on = true) { on ? recompute(RecomputeOptions{}) : recompute_.reset(); }
  void recompute(const RecomputeOptions& options) { recompute_ = options; }

  /// Distributes it over ranks without a change to its code: operator() redistributes its inputs and results along an axis to these
  /// placements, in nodes under the module's path. Call it once for each axis. Gathered inputs are not kept for gradients but
  /// gathered again.
  void parallelize(const CallPlacements& placements) { call_placements_.push_back(placements); }

  /// Opens this module's scope: for methods other than forward, `auto scope = enter();`. operator() does so itself.
  [[nodiscard]] ModuleScope enter() { return ModuleScope(*this); }
  /// The same for methods that use submodules, but no parameter of this one's own unit: that is not gathered.
  [[nodiscard]] ModuleScope enter_without_unit() { return ModuleScope(*this, /*opens_unit=*/false); }

  /// Its path in the model that was sharded or materialized.
  const std::string& path() const { return path_; }
  /// The unit whose scope is this module, or null.
  const std::shared_ptr<Unit>& unit() const { return unit_; }
  /// The C++ type, for messages.
  std::string type_name() const { return nn::type_name(typeid(*this)); }
  /// Type and path, if it is materialized, for messages: "Block 'blocks.3'", "Model (root)".
  std::string description() const;

  /// Set by shard(): a mark that materialize() turns into a unit.
  struct UnitMark;

 private:
  friend class EvalScope;
  friend class ModuleScope;
  friend struct ModuleAccess;
  std::string path_;
  bool listed_ = false;  // reached by some SHEAF_FIELDS
  bool training_ = true;
  std::optional<RecomputeOptions> recompute_;
  std::vector<CallPlacements> call_placements_;
  std::shared_ptr<const UnitMark> mark_;
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<GatherSchedule> schedule_;  // of a root without a unit: it begins the passes
};

/// A module and its submodules are in evaluation mode while it lives; then each is in the mode that it was in before.
class EvalScope {
 public:
  explicit EvalScope(Module& module);
  ~EvalScope();
  EvalScope(const EvalScope&) = delete;
  EvalScope& operator=(const EvalScope&) = delete;

 private:
  std::vector<Module*> training_;
};

namespace detail {

template <class T> struct IsVector : std::false_type {};
template <class T, class A> struct IsVector<std::vector<T, A>> : std::true_type {};
template <class T> struct IsArray : std::false_type {};
template <class T, size_t N> struct IsArray<std::array<T, N>> : std::true_type {};
template <class T> struct IsMap : std::false_type {};
template <class T, class C, class A> struct IsMap<std::map<std::string, T, C, A>> : std::true_type {};
template <class T> struct IsTuple : std::false_type {};
template <class... T> struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B> struct IsTuple<std::pair<A, B>> : std::true_type {};
template <class T> struct IsPointer : std::false_type {};
template <class T, class D> struct IsPointer<std::unique_ptr<T, D>> : std::true_type {};
template <class T> struct IsPointer<std::optional<T>> : std::true_type {};

/// A key of a map is one level of a path: ConfigError, naming the field at `path`, if it is empty or has a dot.
void expect_level(const std::string& path, const std::string& key);

/// Takes the next name off a list like "up, down".
inline std::string_view next_name(std::string_view& list) {
  const size_t comma = list.find(',');
  std::string_view name = list.substr(0, comma);
  list = comma == std::string_view::npos ? std::string_view() : list.substr(comma + 1);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  while (!name.empty() && name.back() == ' ') name.remove_suffix(1);
  return name;
}

template <class... Fields>
void visit_fields(Visitor& visitor, [[maybe_unused]] std::string_view names, Fields&... fields) {
  (visitor.field(next_name(names), fields), ...);
}

}  // namespace detail

template <class T>
void Visitor::field(std::string_view name, T& member) {
  const size_t length = path_.size();
  if (length) path_ += '.';
  path_ += name;
  if constexpr (std::is_same_v<T, Parameter>) {
    if (member.defined()) parameter(member);
  } else if constexpr (std::is_same_v<T, Buffer>) {
    if (member.defined()) buffer(member);
  } else if constexpr (std::is_base_of_v<Module, T>) {
    module(member);
  } else if constexpr (detail::IsPointer<T>::value) {  // an optional member has its own name, without a further level
    path_.resize(length);
    if (member) field(name, *member);
  } else if constexpr (detail::IsVector<T>::value || detail::IsArray<T>::value) {
    for (size_t i = 0; i < member.size(); ++i) field(std::to_string(i), member[i]);
  } else if constexpr (detail::IsTuple<T>::value) {
    size_t i = 0;
    std::apply([&](auto&... parts) { (field(std::to_string(i++), parts), ...); }, member);
  } else if constexpr (detail::IsMap<T>::value) {  // ordered, so that all ranks visit it alike
    for (auto& [key, part] : member) {
      detail::expect_level(path_, key);
      field(key, part);
    }
  } else {
    static_assert(std::is_same_v<T, Parameter>, "SHEAF_FIELDS takes parameters, buffers, modules, and vectors, arrays, tuples, pairs, "
                                                "maps by std::string, optionals and unique_ptrs of them");
  }
  path_.resize(length);
}

/// Parameter::freeze() for all parameters of a module: a body that is not fine-tuned, a teacher. Those that it shares with other modules
/// (tie()) are frozen there, too. Before materialize(); ConfigError, naming the parameter, after it.
void freeze(Module& module);

/// A model like `source`: constructed by M(args...), with the same sharding, the same frozen parameters, the settings that use_fp8()
/// and shard() have made in layers, and, if `source` is materialized, the same values on the same device: the reference of a
/// fine-tuned model, or an average of its weights. Throws ConfigError if the new one has other parameters, or if `source` is a part of a
/// model and its parameters are in units around it.
template <class M, class... Args>
M clone(M& source, Args&&... args);

/// A name of the model that `module` is a part of, such as a parameter's or a unit's below it, relative to `module`: as its clone(), a
/// model of its own, has it.
std::string_view name_within(const Module& module, std::string_view name);

/// The untyped part of clone().
void copy_model(Module& source, Module& target);

template <class M, class... Args>
M clone(M& source, Args&&... args) {
  M copy(std::forward<Args>(args)...);
  copy_model(source, copy);
  return copy;
}

}  // namespace nn
}  // namespace sheaf

/// Names the fields of a module (parameters, buffers, modules and containers of them; a base's too) and gives it
/// operator(), which opens the module's scope and calls `forward`, whatever its signature, if there is one. Put it into the
/// public part of the struct; methods that call (*this)(...) must be below it.
#define SHEAF_FIELDS(...)                                                               \
  void visit(::sheaf::nn::Visitor& sheaf_visitor) override {                            \
    ::sheaf::nn::detail::visit_fields(sheaf_visitor, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  }                                                                                     \
  template <class... SheafArgs>                                                         \
  decltype(auto) operator()(SheafArgs&&... sheaf_args) {                                \
    ::sheaf::nn::ModuleScope sheaf_scope(*this);                                        \
    /* `forward` is looked up when this is called: the module may have none. */         \
    return [&](auto& sheaf_self) -> decltype(auto) {                                    \
      return sheaf_scope.leave_with([&]() -> decltype(auto) {                           \
        return sheaf_self.forward(sheaf_scope.arrive(std::forward<SheafArgs>(sheaf_args))...); \
      });                                                                               \
    }(*this);                                                                           \
  }                                                                                     \
  static_assert(true)
