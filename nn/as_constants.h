// AsConstants: a part of a model is read without being trained, for as long as it lives.
#pragma once

#include <vector>

#include "sheaf/nn/module.h"

namespace sheaf::nn {

/// While it lives, the parameters of `module` are constants where they are read, as after stop_gradient(): gradients flow through the
/// module to what comes before it, and it gets none itself, nor are they computed or reduced. For a critic or a value function while
/// what it judges learns:
///
///   Tensor loss;
///   {
///     const nn::AsConstants judge(critic);
///     loss = mean(softplus(-critic(generator(noise))));
///   }
///   recording.backward(loss);  // the generator's alone
///
/// The same module may be trained in the same recording by what is read outside of the scope. Parameters that it shares with other
/// modules (tie()) are constants there, too. freeze() says the same for good, and saves the memory of gradients and optimizer state.
class AsConstants {
 public:
  explicit AsConstants(Module& module) : parameters_(module.parameters()) {
    for (Parameter& p : parameters_) ++p.state().constant_scopes;
  }
  ~AsConstants() {
    for (Parameter& p : parameters_) --p.state().constant_scopes;
  }
  AsConstants(const AsConstants&) = delete;
  AsConstants& operator=(const AsConstants&) = delete;

 private:
  std::vector<Parameter> parameters_;
};

}  // namespace sheaf::nn
