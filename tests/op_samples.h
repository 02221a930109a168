// The single table that drives the generated tests of every op: gradients, second derivatives, f32 and bf16 against f64, strides, zero
// sizes, meta, replay and every placement rule at worlds 1 to 5. One row in op_samples.cc is one sample:
//
//     {.op = "matmul", .inputs = {{3, 5}, {5, 4}}, .f = [](Args x) { return matmul(x[0], x[1]); }, .exact = true,
//      .rules = {"S0 R -> S0", "S1 S0 -> P"}},
//
// Sizes: small (a gradient check evaluates f twice per element), different for dimensions that mean different things (a zero-size test sets
// all dimensions of one size to 0), and not multiples of anything.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf::testing {

/// The arguments of the function under test: one tensor per In.
using Args = const std::vector<Tensor>&;

/// Its result: one tensor or several.
struct Outputs : std::vector<Tensor> {
  Outputs(const Tensor& t) : std::vector<Tensor>{t} {}                       // NOLINT: implicit by design
  Outputs(const Tensors& ts) : std::vector<Tensor>(ts.begin(), ts.end()) {}  // NOLINT
  Outputs(std::vector<Tensor> t) : std::vector<Tensor>(std::move(t)) {}      // NOLINT
};

/// One input: shape and the values to draw. A plain {3, 4} is uniform in [-1, 1), in the dtype under test.
struct In {
  In(std::initializer_list<int64_t> sizes) : shape(sizes) {}  // NOLINT: implicit by design
  In(const Shape& s) : shape(s) {}                            // NOLINT

  Shape shape;
  double low = -1, high = 1;
  DType dtype = kF64;              ///< kF64 stands for the dtype under test; integral types are taken as they are
  bool differentiable = true;      ///< false: a constant, or a tensor that takes no gradient
  bool distinct = false;           ///< evenly spaced values, shuffled: no ties even in bf16
  std::vector<double> avoid = {};  ///< where f is not smooth: values stay 1/16 of the range away
};

/// Uniform in [low, high).
inline In uniform(const Shape& shape, double low, double high) {
  In in(shape);
  in.low = low, in.high = high;
  return in;
}
/// Uniform in [-1, 1) but not near `kinks`.
inline In away_from(const Shape& shape, std::vector<double> kinks, double low = -1, double high = 1) {
  In in = uniform(shape, low, high);
  in.avoid = std::move(kinks);
  return in;
}
/// All values are distinct.
inline In distinct(const Shape& shape, double low = -1, double high = 1) {
  In in = uniform(shape, low, high);
  in.distinct = true;
  return in;
}
/// Integers in [0, count), or in [low, count).
inline In integers(const Shape& shape, int64_t count, DType dtype = kI64, int64_t low = 0) {
  In in = uniform(shape, static_cast<double>(low), static_cast<double>(count));
  in.dtype = dtype;
  in.differentiable = false;
  return in;
}
inline In booleans(const Shape& shape) { return integers(shape, 2, kBool); }
/// The same values, but f has no gradient with respect to this input.
inline In constant(In in) {
  in.differentiable = false;
  return in;
}

struct OpSample {
  std::string op = "";       ///< name of the public function
  std::string variant = "";  ///< tells the samples of one op apart
  std::vector<In> inputs = {};
  /// Must be a pure function of its arguments. Dropout may take its key from the recording, which always exists.
  std::function<Outputs(Args)> f = {};

  /// Multilinear in its inputs: on integers every result, including gradients, is exact, and the placement test compares without tolerance.
  bool exact = false;
  /// The backward op that cannot be differentiated; "" if second derivatives work.
  std::string no_second = "";
  /// Factor on the tolerances of f32 and bf16 against f64.
  double tolerance = 1;
  /// Placement rules that must be accepted on one mesh axis, as "S0 R -> S0": R, P, S<dim>, F (flat) per input, then per output. Other
  /// accepted ones are tested as well.
  std::vector<std::string> rules = {};
  /// Inputs of which f accepts a cut of rows if each rank has one run: S0, unless that is a cut of parts.
  std::vector<int> tables = {};
  bool cuts_a_table(const std::vector<std::string>& placements) const {
    return std::ranges::any_of(tables, [&](int i) { return placements[static_cast<size_t>(i)] == "S0"; });
  }
  /// If the first of them is cut this way, f communicates, by its own redistributions.
  bool redistributes = false;
  /// False for functions that only make sense unsharded.
  bool placements = true;
  /// Accepts only Replicate and Invariant.
  bool replicate_only = false;
  /// False if no dimension may be empty.
  bool zero_size = true;
  bool low_precision = true;  ///< f32 and bf16 exist
};

/// The table.
const std::vector<OpSample>& op_samples();

}  // namespace sheaf::testing
