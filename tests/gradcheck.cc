#include "sheaf/tests/gradcheck.h"

#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

std::vector<Tensor> selected(const std::vector<Tensor>& x, const GradcheckOptions& options) {
  std::vector<Tensor> out;
  for (size_t i = 0; i < x.size(); ++i)
    if (options.differentiable.empty() ? is_floating(x[i].dtype()) : options.differentiable[i]) out.push_back(x[i]);
  return out;
}

// Whether gradients that are one number in memory, as those of a sum are, lead where dense ones do.
std::string of_plain_sums(const ScalarFunction& f, const std::vector<Tensor>& x, const GradcheckOptions& options) {
  const std::vector<Tensor> wanted = selected(x, options);
  std::vector<Values> of_sums, of_probes;
  for (std::vector<Values>* out : {&of_sums, &of_probes}) {
    Recording recording;
    for (const Tensor& t : wanted) recording.watch(t);
    const std::vector<Tensor> gradients = recording.gradient(f(recording, x), wanted, {.keep = true});
    Tensor total;
    std::vector<Tensor> ones;
    for (const Tensor& g : gradients) {
      ones.push_back(full(g.shape(), 1, kF64));
      total = total ? add(total, sum(g)) : sum(g);
    }
    if (out == &of_probes) total = probe(gradients, ones);
    for (const Tensor& g : recording.gradient(total, wanted)) out->push_back(local_part(g).values);
  }
  for (size_t t = 0; t < wanted.size(); ++t)
    if (scaled_error(of_sums[t], of_probes[t]) > 1e-12)
      return str("tensor ", static_cast<int64_t>(t), " ", wanted[t].type(), " has another second gradient if that of its gradient is a sum's");
  return "";
}

}  // namespace

std::string gradcheck(const ScalarFunction& f, const std::vector<Tensor>& x, const GradcheckOptions& options) {
  std::vector<Tensor> args;
  for (const Tensor& t : x) args.push_back(t.clone());
  const std::vector<Tensor> wanted = selected(args, options);
  std::vector<Values> analytic;
  {
    Recording recording;
    for (const Tensor& t : wanted) recording.watch(t);
    const Tensor y = f(recording, args);
    for (const Tensor& g : recording.gradient(y, wanted)) analytic.push_back(local_part(g).values);
  }
  const auto value = [&] {
    Recording recording;
    for (const Tensor& t : wanted) recording.watch(t);
    return f(recording, args).item<double>();
  };
  double largest = 1e-3, worst = 0;
  std::string where;
  for (size_t t = 0; t < wanted.size(); ++t) {
    double* data = wanted[t].view().as<double>();  // clones are dense
    for (size_t i = 0; i < analytic[t].size(); ++i) {
      const double at = data[i];
      data[i] = at + options.step;
      const double up = value();
      data[i] = at - options.step;
      const double down = value();
      data[i] = at;
      const double numeric = (up - down) / (2 * options.step);
      largest = std::max(largest, std::abs(numeric));
      const double difference = std::abs(numeric - analytic[t][i]);
      if (difference > worst || std::isnan(difference)) {
        worst = std::isnan(difference) ? INFINITY : difference;
        where = str("tensor ", static_cast<int64_t>(t), " ", wanted[t].type(), " element ", static_cast<int64_t>(i),
                    ": gradient ", analytic[t][i], ", central difference ", numeric);
      }
    }
  }
  return worst <= options.tolerance * largest ? "" : str(where, " (largest entry ", largest, ")");
}

std::string gradgradcheck(const ScalarFunction& f, const std::vector<Tensor>& x, const GradcheckOptions& options) {
  const auto paired = [&](Recording& recording, const std::vector<Tensor>& args) {
    const std::vector<Tensor> wanted = selected(args, options);
    const std::vector<Tensor> gradients = recording.gradient(f(recording, args), wanted, {.keep = true});
    std::vector<Tensor> weights;
    Generator draw("gradgradcheck");
    for (const Tensor& g : gradients) {
      Values v(static_cast<size_t>(g.numel()));
      for (double& e : v) e = draw.uniform(-1, 1);
      weights.push_back(make_tensor(v, g.shape(), kF64));
    }
    return probe(gradients, weights);
  };
  const std::string of_paired = gradcheck(paired, x, options);
  return of_paired.empty() ? of_plain_sums(f, x, options) : of_paired;
}

}  // namespace sheaf::testing
