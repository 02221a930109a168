#include "sheaf/tests/op_samples.h"

#include "sheaf/autograd/ops.h"

namespace sheaf::testing {

const std::vector<OpSample>& op_samples() {
  static const auto* table = new std::vector<OpSample>{
      // ---- memory -----------------------------------------------------------------------------------------------------
      {.op = "contiguous", .inputs = {{3, 5}}, .f = [](Args x) { return contiguous(x[0]); }, .exact = true,
       .rules = {"S0 -> S0", "S1 -> S1", "P -> P"}},

      // ---- group A: elementwise, reductions, shape, indexing, random -----------------------------------------------

      // ---- group B: products, normalisation, attention, losses -----------------------------------------------------
  };
  return *table;
}

}  // namespace sheaf::testing
