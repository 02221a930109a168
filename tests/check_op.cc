#include "sheaf/tests/check_op.h"

#include <set>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/tape_diff.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/tests/gradcheck.h"
#include "sheaf/tests/poison.h"
#include "sheaf/tests/sample_run.h"

namespace sheaf::testing {
namespace {

// f's floating outputs paired with weights that are arguments too: the gradient then depends on all of them.
struct Paired {
  ScalarFunction f;
  std::vector<Tensor> arguments;
  GradcheckOptions options;
};

Paired paired(const OpSample& sample) {
  Paired p;
  p.arguments = make_inputs(sample, draw_inputs(sample, "gradient"), kF64);
  for (const In& in : sample.inputs) p.options.differentiable.push_back(in.differentiable && is_floating(in.dtype));
  const size_t n = sample.inputs.size();
  std::vector<size_t> floating;
  {
    const Recording recording;
    const Outputs outputs = sample.f(p.arguments);
    for (size_t o = 0; o < outputs.size(); ++o) {
      if (!is_floating(outputs[o].dtype())) continue;
      floating.push_back(o);
      p.arguments.push_back(make_tensor(draw_weights(sample, o, outputs[o].shape()), outputs[o].shape(), kF64));
      p.options.differentiable.push_back(true);
    }
  }
  p.f = [&sample, n, floating](Recording&, const std::vector<Tensor>& x) {
    const Outputs outputs = sample.f({x.begin(), x.begin() + static_cast<std::ptrdiff_t>(n)});
    std::vector<Tensor> y;
    for (size_t o : floating) y.push_back(outputs[o]);
    return probe(y, std::span(x).subspan(n));
  };
  return p;
}

bool differentiable(const Paired& p, size_t inputs) {
  const auto& d = p.options.differentiable;
  return p.arguments.size() > inputs && std::find(d.begin(), d.begin() + static_cast<std::ptrdiff_t>(inputs), true) !=
                                            d.begin() + static_cast<std::ptrdiff_t>(inputs);
}

std::string prefixed(const OpSample& sample, const char* check, const std::string& finding) {
  return finding.empty() ? "" : str('[', name_of(sample), "] ", check, ": ", finding, '\n');
}

// An exception from a check is a finding as well.
template <class F>
std::string guarded(const OpSample& sample, const char* check, F&& f) {
  try {
    return prefixed(sample, check, f());
  } catch (const std::exception& e) {
    return prefixed(sample, check, str("threw ", e.what()));
  }
}

std::vector<Tensor> on(Device device, std::vector<Tensor> tensors) {
  for (Tensor& t : tensors) t = t.to(device);
  return tensors;
}

}  // namespace

std::string check_gradient(const OpSample& sample) {
  return guarded(sample, "gradient", [&]() -> std::string {
    const Paired p = paired(sample);
    return differentiable(p, sample.inputs.size()) ? gradcheck(p.f, p.arguments, p.options) : "";
  });
}

std::string check_second_gradient(const OpSample& sample) {
  return guarded(sample, "second gradient", [&]() -> std::string {
    const Paired p = paired(sample);
    if (!differentiable(p, sample.inputs.size())) return "";
    if (sample.no_second.empty()) {
      std::string finding = gradgradcheck(p.f, p.arguments, p.options);
      // And with all other inputs constant: then some of what a second derivative is made of does not exist.
      for (size_t i = 0; finding.empty() && sample.inputs.size() > 1 && i < sample.inputs.size(); ++i) {
        if (!p.options.differentiable[i]) continue;
        GradcheckOptions alone = p.options;
        for (size_t j = 0; j < sample.inputs.size(); ++j) alone.differentiable[j] = j == i;
        if (finding = gradgradcheck(p.f, p.arguments, alone); !finding.empty()) finding = str("of input ", i, " alone: ", finding);
      }
      return finding;
    }
    try {
      gradgradcheck(p.f, p.arguments, p.options);
    } catch (const LifetimeError& e) {
      const std::string want = "[" + sample.no_second + "] root: it has no derivative";
      return std::string(e.what()).find(want) == std::string::npos
                 ? str("the error should say \"", want, "\", not \"", e.what(), '"')
                 : "";
    }
    return "works, though the sample says that " + sample.no_second + " has no derivative";
  });
}

std::string check_precision(const OpSample& sample, DType dtype, Device device) {
  return guarded(sample, str(dtype, " on ", device).c_str(), [&]() -> std::string {
    const std::vector<Tensor> low = make_inputs(sample, draw_inputs(sample, "precision"), dtype);
    std::vector<Tensor> high;
    for (size_t i = 0; i < low.size(); ++i) {
      const bool rounded = sample.inputs[i].dtype == kF64;
      high.push_back(make_tensor(local_part(low[i]).values, low[i].shape(), rounded ? kF64 : low[i].dtype()));
    }
    const bool narrow = dtype == kBF16 || dtype == kF16;
    const double unit = dtype == kF64 ? 0x1p-46 : dtype == kF32 ? 0x1p-23 : dtype == kF16 ? 0x1p-11 : 0x1p-8;
    // All memory must be written: one run starts with zeros in its memory, the other with NaN.
    Result got, want;
    {
      const PoisonScope zeros(0);
      want = evaluate(sample, high, {}, /*second=*/true);
    }
    {
      const PoisonScope poison;
      const DeviceScope scope(device);
      got = evaluate(sample, on(device, low), {}, /*second=*/true);
    }
    const double bound = (narrow ? 4 : 16) * unit * sample.tolerance;
    return compare(got, want, bound, 4 * bound);  // second derivatives are differences, with more rounding error
  });
}

namespace {

enum class Strides { transposed, spread, sliced, expanded };
constexpr const char* kStrideNames[] = {"transposed", "spread", "sliced", "expanded"};

// The same elements with other strides; the gaps between them are NaN (all bits set).
Tensor restrided(const Tensor& dense, Strides how) {
  const Shape& s = dense.shape();
  const int rank = s.rank();
  if (rank == 0) return dense;
  Shape strides = s.contiguous_strides();
  int64_t offset = 0, elements = 0;
  if (how == Strides::transposed) {
    int64_t n = 1;
    for (int d = 0; d < rank; ++d) strides[d] = n, n *= s[d];
    elements = n;
  } else {
    // Spread: every second element along every dimension. Sliced: rows are dense, but part of longer rows, one element in.
    int64_t n = how == Strides::spread ? 2 : 1;
    for (int d = rank - 1; d >= 0; --d) strides[d] = n, n *= s[d] + (how == Strides::spread ? 1 : 2);
    offset = 1;
    elements = n + 2;
  }
  if (how == Strides::expanded) {
    strides = s.contiguous_strides();
    strides[0] = 0;
    offset = 0;
    elements = s.numel();
  }
  const PoisonScope poison;
  const auto size = static_cast<int64_t>(size_of(dense.dtype()));
  Tensor t = Tensor::over(Storage::allocate(Device::cpu(), elements * size), offset * size, dense.type(), s, strides);
  const View from = dense.view(), to = t.view();
  for (int64_t i = 0; i < s.numel(); ++i) {
    int64_t rest = i, at = 0;
    for (int d = rank - 1; d >= 0; --d) at += rest % s[d] * strides[d], rest /= s[d];
    std::memcpy(to.as<char>() + at * size, from.as<char>() + i * size, static_cast<size_t>(size));
  }
  return t;
}

}  // namespace

std::string check_strides(const OpSample& sample, Device device) {
  return guarded(sample, "strides", [&]() -> std::string {
    std::string out;
    for (const DType dtype : {kF64, kF32}) {
      if (dtype == kF32 && !sample.low_precision) continue;
      for (const Strides how : {Strides::transposed, Strides::spread, Strides::sliced, Strides::expanded}) {
        std::vector<Values> values = draw_inputs(sample, "strides");
        if (how == Strides::expanded) {  // all of dimension 0 is its first row
          if (std::any_of(sample.inputs.begin(), sample.inputs.end(), [](const In& in) { return in.distinct; })) continue;
          for (size_t i = 0; i < values.size(); ++i) {
            const Shape& s = sample.inputs[i].shape;
            const size_t row = s.rank() && s[0] ? values[i].size() / static_cast<size_t>(s[0]) : 0;
            for (size_t k = row; row && k < values[i].size(); ++k) values[i][k] = values[i][k % row];
          }
        }
        const std::vector<Tensor> dense = make_inputs(sample, values, dtype);
        std::vector<Tensor> strided;
        for (const Tensor& t : dense) strided.push_back(restrided(t, how));
        const DeviceScope scope(device);
        const std::string finding = compare(evaluate(sample, on(device, strided), {.strided_gradients = true}),
                                            evaluate(sample, on(device, dense)), dtype == kF64 ? 1e-13 : 16 * 0x1p-23);
        if (!finding.empty()) out += str(kStrideNames[static_cast<int>(how)], ' ', dtype, ": ", finding);
      }
    }
    return out;
  });
}

std::string check_zero_size(const OpSample& sample) {
  if (!sample.zero_size) return "";
  return guarded(sample, "zero size", [&]() -> std::string {
    std::set<int64_t> sizes;
    for (const In& in : sample.inputs) sizes.insert(in.shape.begin(), in.shape.end());
    sizes.erase(1);
    bool any = sizes.empty();
    std::string out, refused;
    for (const int64_t size : sizes) {
      OpSample empty = sample;
      for (In& in : empty.inputs)
        for (int d = 0; d < in.shape.rank(); ++d)
          if (in.shape[d] == size) in.shape[d] = 0;
      try {
        Result plain, poisoned;  // values are the same whether memory was full of zeros or of NaN
        const std::vector<Values> values = draw_inputs(empty, "zero");
        {
          const PoisonScope zeros(0);
          plain = evaluate(empty, make_inputs(empty, values, kF64), {}, /*second=*/true);
        }
        {
          const PoisonScope poison;
          poisoned = evaluate(empty, make_inputs(empty, values, kF64), {}, /*second=*/true);
        }
        any = true;
        for (size_t i = 0; i < plain.outputs.size(); ++i)
          if (static_cast<int64_t>(plain.outputs[i].size()) != plain.output_types[i].shape.numel())
            out += str("size ", size, " as 0: wrong number of elements; ");
        if (const std::string f = compare(poisoned, plain, 0); !f.empty()) out += str("size ", size, " as 0: ", f);
      } catch (const ShapeError& e) {
        refused += str(e.what(), "; ");
      } catch (const DataError& e) {  // an index into an empty dimension
        refused += str(e.what(), "; ");
      }
    }
    return any ? out : "every size was refused: " + refused;
  });
}

std::string check_tape(const OpSample& sample) {
  return guarded(sample, "tape", [&]() -> std::string {
    std::string out;
    const std::vector<Tensor> inputs = make_inputs(sample, draw_inputs(sample, "tape"), kF64);
    std::vector<Tensor> meta;
    for (const Tensor& t : inputs) meta.push_back(Tensor::empty(t.type(), Device::meta()));
    const RankContext& context = RankContext::current();

    struct Measured { std::vector<Type> types; int64_t peak; };
    const auto measure = [&](const std::vector<Tensor>& x, Allocator& allocator) {
      Measured m;
      allocator.reset_peak();
      const int64_t before = allocator.stats().live;
      Recording recording;
      const Run run = run_sample(sample, recording, x);
      for (const Tensor& t : run.outputs) m.types.push_back(t.type());
      for (const Tensor& t : run.gradients) m.types.push_back(t.type());
      m.peak = allocator.stats().peak - before;
      return m;
    };
    const Measured on_cpu = measure(inputs, *context.cpu);
    {
      const DeviceScope device(Device::meta());
      const Measured on_meta = measure(meta, *context.meta);
      if (!(on_cpu.types == on_meta.types)) out += "types on meta differ; ";
      if (on_cpu.peak != on_meta.peak) out += str("peak on cpu ", on_cpu.peak, ", on meta ", on_meta.peak, " bytes; ");
    }

    Tape tape;
    std::vector<Tensor> results;
    std::vector<ValueId> ids;
    std::unordered_map<ValueId, Tensor> leaves;
    {
      Recording recording({.capture_leaves = true});
      const Run run = run_sample(sample, recording, inputs);
      for (const auto* group : {&run.outputs, &run.gradients}) {
        for (const Tensor& t : *group) {
          if (recording.value_of(t) < 0) continue;  // a function that returns its argument
          results.push_back(t);
          ids.push_back(recording.value_of(t));
        }
      }
      leaves = recording.captured();
      tape = recording.take();
    }
    {  // the same again: attributes compare by meaning, not by their bytes
      const auto litter = [](auto&& self, int depth) -> int {
        volatile char on_the_stack[4096];
        for (volatile char& c : on_the_stack) c = static_cast<char>(0x5a + depth);
        return depth > 0 ? self(self, depth - 1) : on_the_stack[17];
      };
      litter(litter, 8);
      Recording recording;
      run_sample(sample, recording, inputs);
      if (const auto difference = first_difference(tape, recording.take())) out += str("another tape: ", *difference, "; ");
    }
    for (const Finding& f : check_types(tape)) out += str("T: ", f, "; ");
    for (const Finding& f : check_cotangents(tape)) out += str("D: ", f, "; ");
    const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return leaves.at(v); }, ids);
    for (size_t i = 0; i < ids.size(); ++i)
      if (!identical(again[i].clone(), results[i].clone())) out += str("replay gives another %", ids[i], "; ");
    return out;
  });
}

std::string check_op(const OpSample& sample) {
  std::string out = check_gradient(sample) + check_second_gradient(sample) + check_strides(sample) +
                    check_zero_size(sample) + check_tape(sample) + check_slots(sample);
  if (sample.low_precision) out += check_precision(sample, kF32) + check_precision(sample, kBF16);
  for (int ranks = 1; ranks <= 5; ++ranks) out += check_placements(sample, ranks);
  return out + check_axes(sample);
}

}  // namespace sheaf::testing
