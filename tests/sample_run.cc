#include "sheaf/tests/sample_run.h"

#include <algorithm>
#include <cmath>

namespace sheaf::testing {

std::string name_of(const OpSample& sample) {
  return sample.variant.empty() ? sample.op : sample.op + ", " + sample.variant;
}

std::vector<Values> draw_inputs(const OpSample& sample, const std::string& stream) {
  std::vector<Values> out;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    const In& in = sample.inputs[i];
    Generator draw(str(name_of(sample), '/', stream, '/', static_cast<int64_t>(i)));
    Values v(static_cast<size_t>(in.shape.numel()));
    const auto n = static_cast<double>(v.size());
    for (size_t k = 0; k < v.size(); ++k) {
      if (in.distinct) {
        v[k] = in.low + (in.high - in.low) * (static_cast<double>(k) + 0.5) / n;
      } else if (is_integral(in.dtype)) {
        v[k] = std::floor(draw.uniform(in.low, in.high));
      } else if (sample.exact) {
        v[k] = static_cast<double>(draw.below(7) - 3);
      } else {
        const double margin = (in.high - in.low) / 16;
        do v[k] = draw.uniform(in.low, in.high);
        while (std::any_of(in.avoid.begin(), in.avoid.end(), [&](double a) { return std::abs(v[k] - a) < margin; }));
      }
    }
    if (in.distinct)
      for (size_t k = v.size(); k > 1; --k) std::swap(v[k - 1], v[static_cast<size_t>(draw.below(static_cast<int64_t>(k)))]);
    out.push_back(std::move(v));
  }
  return out;
}

Values draw_weights(const OpSample& sample, size_t output, const Shape& shape) {
  Generator draw(str(name_of(sample), "/weights/", static_cast<int64_t>(output)));
  Values w(static_cast<size_t>(shape.numel()));
  for (double& e : w) e = sample.exact ? static_cast<double>(draw.below(7) - 3) : draw.uniform(-1, 1);
  return w;
}

std::vector<Tensor> make_inputs(const OpSample& sample, const std::vector<Values>& values, DType dtype) {
  std::vector<Tensor> out;
  for (size_t i = 0; i < values.size(); ++i) {
    const In& in = sample.inputs[i];
    out.push_back(make_tensor(values[i], in.shape, in.dtype == kF64 ? dtype : in.dtype));
  }
  return out;
}

Run run_sample(const OpSample& sample, Recording& recording, const std::vector<Tensor>& inputs,
               const ProbeOptions& options, bool second) {
  Run run;
  std::vector<Tensor> wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!sample.inputs[i].differentiable || !is_floating(inputs[i].dtype())) continue;
    wanted.push_back(recording.watch(inputs[i]));
    run.differentiated.push_back(i);
  }
  run.outputs = sample.f(inputs);
  std::vector<Tensor> floating, weights;
  const auto pair_with_weight = [&](const Tensor& y, size_t stream) {
    const Type type{y.dtype(), y.shape(), probe_weight_layout(y.layout())};
    floating.push_back(y);
    weights.push_back(y.device().is_meta() ? Tensor::empty(type, y.device())
                                           : make_local(draw_weights(sample, stream, y.shape()), type, "weights").to(y.device()));
  };
  for (size_t o = 0; o < run.outputs.size(); ++o)
    if (is_floating(run.outputs[o].dtype())) pair_with_weight(run.outputs[o], o);
  if (wanted.empty() || floating.empty()) return run;
  second = second && sample.no_second.empty();
  run.gradients = recording.gradient(probe(floating, weights, options), wanted, {.keep = second});
  if (!second) return run;
  floating.clear(), weights.clear();
  for (size_t i = 0; i < run.gradients.size(); ++i) pair_with_weight(run.gradients[i], 100 + i);
  run.seconds = recording.gradient(probe(floating, weights, options), wanted);
  return run;
}

Result evaluate(const OpSample& sample, const std::vector<Tensor>& inputs, const ProbeOptions& options, bool second) {
  Recording recording;
  const Run run = run_sample(sample, recording, inputs, options, second);
  Result result;
  for (const Tensor& t : run.outputs) {
    result.outputs.push_back(local_part(t).values);
    result.output_types.push_back(t.type());
  }
  for (const Tensor& t : run.gradients) result.gradients.push_back(local_part(t).values);
  for (const Tensor& t : run.seconds) result.seconds.push_back(local_part(t).values);
  return result;
}

std::string compare(const Result& got, const Result& want, double bound, double of_seconds) {
  std::string out;
  const auto one = [&](const char* what, const std::vector<Values>& a, const std::vector<Values>& b, double bound) {
    if (a.size() != b.size()) {
      out += str(static_cast<int64_t>(a.size()), ' ', what, "s instead of ", static_cast<int64_t>(b.size()), "; ");
      return;
    }
    for (size_t i = 0; i < a.size(); ++i)
      if (const double e = scaled_error(a[i], b[i]); !(e <= bound))
        out += str(what, ' ', static_cast<int64_t>(i), " is off by ", e, " (bound ", bound, "); ");
  };
  one("output", got.outputs, want.outputs, bound);
  one("gradient", got.gradients, want.gradients, bound);
  one("second gradient", got.seconds, want.seconds, of_seconds < 0 ? bound : of_seconds);
  return out;
}

}  // namespace sheaf::testing
