// Random values and dropout. Values depend on a key and on the element's global index, never on which rank computes them.
//
// [Note: random keys] Given a Key, an op uses it as it is. Otherwise the key is derived from the recording: module path and number of
// the call on that path are attributes, seed, step and first sample are the input `random_state`, so that a replayed step draws what
// its inputs say. The kernel reads it (kernels/random.h, DrawKey): on a GPU it is in device memory, and a relaunched graph finds the
// next step's values. Dimension 0 counts samples, or groups of rows of them: the first sample's global index is added to it, and inside of
// rowwise() that of the first local row.
#include "sheaf/kernels/random.h"

#include <algorithm>

#include "sheaf/autograd/ops/common.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/rowwise.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

struct KeySource {
  uint64_t key;  ///< the key, or that of the module path
  int64_t call;  ///< >= 0: derive from random_state
  int64_t first_row = first_local_row();
};

int64_t row_numel(const Shape& global) {
  if (global.rank() == 0) return 1;
  return global[0] > 0 ? global.numel() / global[0] : 0;
}

// Rows that stay together where dimension 0 is cut, as a sample's tokens behind reshape(x, {-1, C}), are of one sample.
int64_t sample_numel(const Type& type) {
  int64_t rows = 1;
  for (int a = 0; a < type.layout.num_axes(); ++a)
    if (const Placement& p = type.layout[a]; p.is_shard(0) && !p.map().is_scattered()) rows = std::max(rows, p.map().granule());
  return rows * row_numel(type.shape);
}

/// The random key of one execution; input `state` is random_state.
kernels::DrawKey key_for(const KeySource& s, const Execute& c, int state) {
  if (s.call < 0) return Key{s.key};
  return {Key{s.key}, static_cast<uint64_t>(s.call), c.input(state).as<int64_t>(),
          sample_numel(c.output_type(0))};
}

KeySource recorded_source(const char* op, Recording*& recording) {
  recording = Recording::current();
  if (!recording) fail<ConfigError>("[", op, "] needs a Key outside of a recording (evaluation of a model: model.eval())");
  const std::string& path = PathScope::current();
  return {key_of(str(path, "/", op), 0).value, recording->next_call(path)};
}

/// Where output 0's local part is in the global tensor, if its first row is `first_row`.
kernels::GlobalIndex global_index(const Type& type, int64_t first_row) {
  bool flat = false;
  for (int i = 0; i < type.layout.num_axes(); ++i)
    flat = flat || (type.layout[i].is_shard() && type.layout[i].map().is_flat());
  kernels::GlobalIndex where{type.shape, Shape::filled(type.shape.rank(), 0)};
  if (type.layout.mesh()) where.start = type.layout.local_start(type.shape);
  if (type.shape.rank() == 0) return {{1}, {first_row}};
  if (flat)
    return {{type.shape.numel()}, {where.start[0] + first_row * row_numel(type.shape)}};
  where.start[0] += first_row;
  return where;
}

/// Calls f(where, part) for the blocks that output 0's local part consists of: one, except for scattered shards; part(view) is a
/// block of a local view.
template <class F>
void for_each_block(const Type& type, int64_t first_row, F&& f) {
  bool scattered = false;
  for (int i = 0; i < type.layout.num_axes(); ++i)
    scattered = scattered || (type.layout[i].is_shard() && type.layout[i].map().is_scattered());
  if (!scattered) return f(global_index(type, first_row), [](const View& v) { return v; });
  std::vector<std::vector<Interval>> rows;
  for (int d = 0; d < type.shape.rank(); ++d) rows.push_back(type.layout.local_rows(type.shape, d));
  const auto along = [&](auto& self, int d, Shape start, Shape at, Shape size) -> void {
    if (d == type.shape.rank()) {
      start[0] += first_row;
      return f(kernels::GlobalIndex{type.shape, start}, [&](View v) {
        for (int e = 0; e < d; ++e)
          v.data = v.as<char>() + at[e] * v.strides[e] * static_cast<int64_t>(size_of(v.dtype));
        v.shape = size;
        return v;
      });
    }
    at[d] = 0;
    for (const Interval& i : rows[static_cast<size_t>(d)]) {
      start[d] = i.begin, size[d] = i.size();
      self(self, d + 1, start, at, size);
      at[d] += i.size();
    }
  };
  const Shape zeros = Shape::filled(type.shape.rank(), 0);
  along(along, 0, zeros, zeros, zeros);
}
/// A scalar as a vector of one element, for kernels that need an index.
View at_least_1d(const View& v) { return v.rank() > 0 ? v : View::dense(v.data, v.dtype, {1}); }

struct Random {  // input, if derived from the recording: random_state
  static constexpr const char* kName = "random";
  struct Attrs {
    KeySource source;
    double a, b;  ///< mean and std, or lo and hi
    bool normal;
    char unused[7] = {};
  };
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const kernels::DrawKey key = key_for(a.source, c, 0);
    const View whole = at_least_1d(c.output(0));
    for_each_block(c.output_type(0), a.source.first_row, [&](const kernels::GlobalIndex& where, const auto& part) {
      const View out = part(whole);
      if (a.normal)
        SHEAF_ON_DEVICE(stream, normal, out, key, where, a.a, a.b);
      else
        SHEAF_ON_DEVICE(stream, uniform, out, key, where, a.a, a.b);
    });
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str(a.normal ? "normal " : "uniform ", a.a, " ", a.b);
  }
};

Tensor draw(const Type& type, const Random::Attrs& attrs, std::span<const Tensor> inputs) {
  require_floating(attrs.normal ? "randn" : "uniform", type.dtype);
  if (has_partial(type.layout)) fail<PlacementError>("[random] a Partial value cannot be drawn: ", type);
  const OutputSpec spec{.type = type};
  return apply_typed(op_def<Random>(), &attrs, inputs, std::span(&spec, 1))[0];
}
Tensor draw(const char* op, const Type& type, double a, double b, bool normal) {
  Recording* recording;
  const KeySource source = recorded_source(op, recording);
  const Tensor state = recording->random_state(default_device());
  return draw(type, {source, a, b, normal}, std::span(&state, 1));
}

struct Dropout {  // inputs x and, if derived from the recording, random_state
  static constexpr const char* kName = "dropout";
  struct Attrs {
    KeySource source;
    double p;
  };
  static constexpr uint64_t kSavedInputs = 0b10;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, c.dtype(0));
    check<ConfigError>(a.p >= 0 && a.p < 1, "[dropout] probability ", a.p, " is not in [0, 1)");
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs&, Place& p) {  // linear: the mask does not depend on x
    for (const Placement& in : {p.in(0), kR, kP}) {
      const std::vector<Placement> ins{in, kR};
      p.rule(std::span(ins.data(), static_cast<size_t>(p.num_inputs())), std::span(&in, 1));
    }
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const kernels::DrawKey key = key_for(a.source, c, 1);
    const View x = at_least_1d(c.input(0)), out = at_least_1d(c.output(0));
    for_each_block(c.output_type(0), a.source.first_row, [&](const kernels::GlobalIndex& where, const auto& part) {
      SHEAF_ON_DEVICE(stream, dropout, part(x), a.p, key, where, part(out));
    });
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (!c.needs(0)) return;
    std::vector<Tensor> inputs{c.grad()};
    if (a.source.call >= 0) inputs.push_back(c.input(1));
    c.set(0, apply(op_def<Dropout>(), &a, inputs)[0]);
  }
  static void describe(const Attrs& a, std::string& out) { out += str(a.p); }
};

struct Arange {
  static constexpr const char* kName = "arange";
  struct Attrs {
    double start, step;
  };
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), arange, a.start, a.step, c.output(0));
  }
  static void describe(const Attrs& a, std::string& out) { out += str(a.start, " + i*", a.step); }
};

}  // namespace

Tensor randn(const Type& type, Key key, double mean, double std) {
  return draw(type, {{key.value, -1}, mean, std, true}, {});
}
Tensor uniform(const Type& type, Key key, double lo, double hi) {
  return draw(type, {{key.value, -1}, lo, hi, false}, {});
}
Tensor randn(const Type& type, double mean, double std) {
  return draw("randn", type, mean, std, true);
}
Tensor uniform(const Type& type, double lo, double hi) {
  return draw("uniform", type, lo, hi, false);
}

Tensor dropout(const Tensor& x, double p, Key key) {
  return p == 0 ? x : apply<Dropout>({{key.value, -1}, p}, x);
}
Tensor dropout(const Tensor& x, double p) {
  expect_defined("dropout", x);
  if (p == 0) return x;
  Recording* recording;
  const KeySource source = recorded_source("dropout", recording);
  return apply<Dropout>({source, p}, {x, recording->random_state(x.device())});
}

Tensor full(const Shape& shape, double value, DType dtype) {
  return full_of({dtype, shape, {}}, value);
}
Tensor zeros(const Shape& shape, DType dtype) { return full(shape, 0.0, dtype); }
Tensor ones(const Shape& shape, DType dtype) { return full(shape, 1.0, dtype); }

Tensor arange(double start, double stop, double step, DType dtype) {
  if (step == 0) fail<ConfigError>("[arange] step is 0");
  check_scalar("arange", dtype, start);
  check_scalar("arange", dtype, step);
  const double n = std::ceil((stop - start) / step);
  check<ConfigError>(n < 0x1p63, "[arange] ", n, " numbers from ", start, " to ", stop, " in steps of ", step);
  const Arange::Attrs attrs{start, step};
  const OutputSpec spec{.type = {dtype, {n > 0 ? static_cast<int64_t>(n) : 0}, {}}};
  return apply_typed(op_def<Arange>(), &attrs, {}, std::span(&spec, 1))[0];
}
Tensor arange(int64_t n, DType dtype) { return arange(0, static_cast<double>(n), 1, dtype); }

}  // namespace sheaf
