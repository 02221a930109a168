#include "sheaf/models/norm_metrics.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "sheaf/distributed/unit.h"
#include "sheaf/nn/parameter_norms.h"

namespace sheaf::models {

std::vector<Metric> norm_metrics(TrainingStep& step, const Tensor& grad_norms, bool by_parameter) {
  const std::vector<nn::Parameter> parameters = step.trained();
  const std::vector<double> gradients = grad_norms.to_vector<double>(), weights = parameter_norms(parameters).to_vector<double>();
  struct Squares {
    std::string name;
    double gradients = 0, weights = 0;
  };
  std::vector<Squares> all;  // in the order of parameters
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string name(by_parameter ? parameters[i].name() : path_label(parameters[i].unit()->name()));
    auto of = std::ranges::find(all, name, &Squares::name);
    if (of == all.end()) of = all.insert(of, {name});
    of->gradients += gradients[i] * gradients[i], of->weights += weights[i] * weights[i];
  }
  std::vector<double> norms;
  for (const Squares& of : all) norms.insert(norms.end(), {std::sqrt(of.gradients), std::sqrt(of.weights)});
  step.mean_over_islands(norms);
  std::vector<Metric> out;
  for (size_t i = 0; i < all.size(); ++i) {
    out.push_back({"grad_norm/" + all[i].name, norms[2 * i]});
    out.push_back({"weight_norm/" + all[i].name, norms[2 * i + 1]});
  }
  return out;
}

}  // namespace sheaf::models
