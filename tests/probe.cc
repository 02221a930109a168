#include "sheaf/tests/probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

#include "sheaf/autograd/op.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"

namespace sheaf::testing {
namespace {

template <class T>
double to_double(T x) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) return static_cast<double>(static_cast<float>(x));
  else return static_cast<double>(x);
}
template <class T>
T from_double(double x) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) return T(static_cast<float>(x));
  else return static_cast<T>(x);
}

// Calls f(i, pointer) for the elements of a view in row-major order.
template <class F>
void each_element(const View& v, F&& f) {
  const auto size = static_cast<int64_t>(size_of(v.dtype));
  const int64_t n = v.numel();
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = i, offset = 0;
    for (int d = v.rank() - 1; d >= 0; --d) {
      offset += rest % v.shape[d] * v.strides[d];
      rest /= v.shape[d];
    }
    f(i, v.as<char>() + offset * size);
  }
}

Values read(const View& v) {
  Values out(static_cast<size_t>(v.numel()));
  visit_dtype("probe", v.dtype, [&]<class T>() {
    each_element(v, [&](int64_t i, char* p) {
      T x;
      std::memcpy(&x, p, sizeof(T));
      out[static_cast<size_t>(i)] = to_double(x);
    });
  });
  return out;
}

void write(const View& v, const Values& values) {
  visit_dtype("probe", v.dtype, [&]<class T>() {
    each_element(v, [&](int64_t i, char* p) {
      const T x = from_double<T>(values[static_cast<size_t>(i)]);
      std::memcpy(p, &x, sizeof(T));
    });
  });
}

Values read(const Tensor& t) { return read(t.to(Device::cpu()).view()); }

// An output that the host fills, on any device.
class HostOutput {
 public:
  HostOutput(Execute& c, int output) : c_(c), stream_(c.stream()), there_(c.output(output)), view_(there_) {
    if (c.device().is_cuda()) {
      here_ = Tensor::empty({there_.dtype, there_.shape, {}});
      view_ = here_.view();
    }
  }
  ~HostOutput() {
    if (!here_) return;
    RankContext::current().gpu_of(c_.device()).copy(stream_, there_.data, view_.data, static_cast<size_t>(there_.bytes()), Gpu::Copy::to_device);
  }
  const View& view() const { return view_; }

 private:
  Execute& c_;
  Stream stream_;
  View there_, view_;
  Tensor here_;
};

bool contributes(const Layout& l, const Layout& scalar) {
  for (int a = 0; a < scalar.num_axes(); ++a) {
    const bool same_everywhere = l.mesh() ? l[a].is_replicate() : true;
    if (same_everywhere && !scalar[a].is_invariant() && RankContext::current().coordinate(scalar.mesh(), a) != 0)
      return false;
  }
  return true;
}

Tensor probe_gradient(const Tensor& x, const Tensor& scale, const Type& type, bool strided);

struct Probe {  // inputs: o1 … ok, w1 … wk
  static constexpr const char* kName = "probe";
  struct Attrs { bool strided; };
  static constexpr uint64_t kSavedInputs = ~uint64_t{0};
  static void execute(const Attrs&, Execute& c) {
    const int k = c.num_inputs() / 2;
    double sum = 0;
    for (int i = 0; i < k; ++i) {
      if (!contributes(c.input_type(i).layout, c.output_type(0).layout)) continue;
      const Values x = read(c.input_tensor(i)), w = read(c.input_tensor(k + i));
      for (size_t j = 0; j < x.size(); ++j) sum += x[j] * w[j];
    }
    write(HostOutput(c, 0).view(), {sum});
  }
  static void vjp(const Attrs& a, Vjp& c) {
    const int k = c.num_inputs() / 2;
    for (int i = 0; i < 2 * k; ++i)
      if (c.needs(i)) c.set(i, probe_gradient(c.input(i < k ? i + k : i - k), c.grad(), c.input_type(i).dual(), a.strided));
  }
};

struct ProbeGradient {  // inputs: x, a scalar; output: the product, zero where the probe did not read
  static constexpr const char* kName = "probe_gradient";
  struct Attrs { bool strided; };
  static constexpr uint64_t kSavedInputs = 3;
  static void execute(const Attrs&, Execute& c) {
    Values x = read(c.input_tensor(0));
    const double scale = read(c.input_tensor(1))[0];
    const bool mine = contributes(c.output_type(0).layout.dual(), c.input_type(1).layout);
    for (double& v : x) v = mine ? v * scale : 0;
    write(HostOutput(c, 0).view(), x);
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (c.needs(0)) c.set(0, probe_gradient(c.grad(), c.input(1), c.input_type(0).dual(), a.strided));
    if (c.needs(1)) c.set(1, probe(std::span(&c.grad(), 1), std::vector{c.input(0)}, {a.strided}));
  }
};

struct Spread {  // x[..., 2]: x and NaN in turn
  static constexpr const char* kName = "spread";
  struct Attrs {};
  static void infer(const Attrs&, Infer& c) {
    Shape s = c.shape(0);
    s.push_back(2);
    c.output(c.dtype(0), s);
  }
  static void execute(const Attrs&, Execute& c) {
    const HostOutput out(c, 0);
    std::memset(out.view().data, 0xff, static_cast<size_t>(out.view().bytes()));
    View even = out.view();
    even.shape.erase(even.rank() - 1);
    even.strides.erase(even.strides.rank() - 1);
    write(even, read(c.input_tensor(0)));
  }
  static void vjp(const Attrs&, Vjp&);
};

struct Pick {  // the even elements as a view
  static constexpr const char* kName = "pick";
  struct Attrs {};
  static void infer(const Attrs&, Infer& c) {
    Shape s = c.shape(0);
    s.erase(s.rank() - 1);
    c.output(c.dtype(0), s);
  }
  static bool alias(const Attrs&, const View& in, View& out) {
    out.data = in.data;
    out.strides = in.strides;
    out.strides.erase(in.rank() - 1);
    return true;
  }
  static void vjp(const Attrs&, Vjp&) { fail<LifetimeError>("[pick] is for first derivatives"); }
};

void Spread::vjp(const Attrs&, Vjp&) { fail<LifetimeError>("[spread] is for first derivatives"); }

Tensor probe_gradient(const Tensor& x, const Tensor& scale, const Type& type, bool strided) {
  const ProbeGradient::Attrs attrs{strided};
  const OutputSpec spec{.type = type};
  const Tensor inputs[] = {x, scale};
  const Tensor g = apply_typed(op_def<ProbeGradient>(), &attrs, inputs, std::span(&spec, 1))[0];
  if (!strided || type.layout.mesh() || type.shape.rank() == kMaxDims) return g;
  return apply<Pick>({}, apply<Spread>({}, g));
}

}  // namespace

Tensor probe(std::span<const Tensor> outputs, std::span<const Tensor> weights, const ProbeOptions& options) {
  std::vector<Tensor> inputs(outputs.begin(), outputs.end());
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  Layout layout;
  for (const Tensor& t : outputs)
    if (t.layout().mesh()) layout = Layout(t.layout().mesh(), Placement::partial());
  for (const Tensor& t : outputs)
    for (int a = 0; a < t.layout().num_axes(); ++a)
      if (t.layout()[a].is_invariant()) layout[a] = Placement::invariant();
  const Probe::Attrs attrs{options.strided_gradients};
  const OutputSpec spec{.type = {kF64, {}, layout}};
  return apply_typed(op_def<Probe>(), &attrs, inputs, std::span(&spec, 1))[0];
}

Layout probe_weight_layout(const Layout& layout) {
  Layout out = layout;
  for (int a = 0; a < layout.num_axes(); ++a)
    if (layout[a].is_partial()) out[a] = Placement::replicate();
  return out;
}

Generator::Generator(const std::string& name) : state_(14695981039346656037ull) {
  for (char c : name) state_ = (state_ ^ static_cast<unsigned char>(c)) * 1099511628211ull;
}

uint64_t Generator::bits() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

Tensor make_tensor(const Values& values, const Shape& shape, DType dtype) {
  Tensor t = Tensor::empty({dtype, shape, {}});
  write(t.view(), values);
  return t;
}

OwnershipMap parts_of(int dim, int64_t rows) {
  if (rows > 4 && rows % 4 == 0) return OwnershipMap::parts(dim, {rows / 2, rows / 4, rows / 4}, rows / 4);
  if (rows % 3 == 0 && rows > 3) return OwnershipMap::parts(dim, {rows / 3 * 2, rows / 3}, rows / 3);
  if (rows % 2 == 0) return OwnershipMap::parts(dim, {rows / 2, rows / 2}, std::max<int64_t>(rows / 2, 1));
  return OwnershipMap::parts(dim, {rows - 1, 1}, 1);
}

OwnershipMap owned_of(int dim, int64_t rows, int ranks) {
  std::vector<int64_t> sizes;
  std::vector<int> owners;
  for (int i = 0; rows > 0; ++i) {  // 1, 2, 1, 2, .. rows from the last rank to the first, and again
    const int owner = ranks - 1 - i % ranks;
    if (owner == 1 && ranks > 2) continue;
    sizes.push_back(std::min<int64_t>(1 + i % 2, rows));
    owners.push_back(owner);
    rows -= sizes.back();
  }
  return OwnershipMap::by_owner(dim, sizes, owners);
}

namespace {

// Positions of a rank's elements in the row-major order of the whole.
std::vector<int64_t> positions(const Type& type, const std::vector<int>& coordinates) {
  const Shape local = type.layout.mesh() ? type.layout.local_shape(type.shape, coordinates.data()) : type.shape;
  std::vector<int64_t> out(static_cast<size_t>(local.numel()));
  for (int a = 0; a < type.layout.num_axes(); ++a) {
    if (!type.layout[a].is_shard() || !type.layout[a].map().is_flat()) continue;
    std::iota(out.begin(), out.end(), type.layout.local_start(type.shape, coordinates.data())[0]);
    return out;
  }
  const Shape strides = type.shape.contiguous_strides();
  std::vector<std::vector<int64_t>> rows(static_cast<size_t>(local.rank()));  // of the global tensor, per dimension
  for (int d = 0; d < local.rank(); ++d)
    for (const Interval& here : type.layout.local_rows(type.shape, d, coordinates.data()))
      for (int64_t row = here.begin; row < here.end; ++row) rows[static_cast<size_t>(d)].push_back(row);
  for (int64_t i = 0; i < local.numel(); ++i) {
    int64_t rest = i;
    for (int d = local.rank() - 1; d >= 0; --d) {
      out[static_cast<size_t>(i)] += rows[static_cast<size_t>(d)][static_cast<size_t>(rest % local[d])] * strides[d];
      rest /= local[d];
    }
  }
  return out;
}

std::vector<int> coordinates_here(const Layout& l) {
  std::vector<int> out;
  for (int a = 0; a < l.num_axes(); ++a) out.push_back(RankContext::current().coordinate(l.mesh(), a));
  return out;
}

}  // namespace

Tensor make_local(const Values& whole, const Type& type, const std::string& stream) {
  const Layout& l = type.layout;
  const std::vector<int> here = coordinates_here(l);
  Values mine = whole;
  for (int a = 0; a < l.num_axes(); ++a) {  // this rank's addend, as a whole tensor
    if (!l[a].is_partial()) continue;
    const int n = l.mesh()->size(a);
    Values addend = mine;
    for (size_t i = 0; i < mine.size(); ++i) {
      const bool integer = mine[i] == std::floor(mine[i]);
      Generator draw(str(stream, '/', a, '/', static_cast<int64_t>(i)));
      double rest = mine[i];
      for (int r = 0; r < n; ++r) {
        const double d = integer ? static_cast<double>(draw.below(7) - 3) : draw.uniform(-1, 1);
        const double share = r == n - 1 ? rest : d;
        rest -= share;
        if (r == here[static_cast<size_t>(a)]) addend[i] = share;
      }
    }
    mine = addend;
  }
  Tensor t = Tensor::empty(type);
  Values local;
  for (int64_t p : positions(type, here)) local.push_back(mine[static_cast<size_t>(p)]);
  write(t.view(), local);
  return t;
}

LocalPart local_part(const Tensor& t) {
  return {t.type(), read(t.to(Device::cpu()).view()), coordinates_here(t.layout())};
}

Values assemble(std::span<const LocalPart> parts, std::string& error) {
  const Type& type = parts[0].type;
  const auto n = static_cast<size_t>(type.shape.numel());
  // Addends of the same elements are summed over the coordinates on Partial axes; all other copies must agree.
  std::map<std::vector<int>, Values> by_others;
  const double kMissing = std::numeric_limits<double>::quiet_NaN();
  Values whole(n, kMissing);
  std::vector<bool> have(n, false);
  for (const LocalPart& part : parts) {
    if (!(part.type == type)) error += str("ranks hold ", type, " and ", part.type, "; ");
    std::vector<int> others = part.coordinates;
    if (!type.layout.mesh()) others = {static_cast<int>(&part - parts.data())};  // every rank has all of it
    for (int a = 0; a < type.layout.num_axes(); ++a)
      if (type.layout[a].is_partial()) others[static_cast<size_t>(a)] = 0;
    const std::vector<int64_t> at = positions(type, part.coordinates);
    if (at.size() != part.values.size()) {
      error += str("a rank holds ", part.values.size(), " elements of ", type, ", not ", at.size(), "; ");
      return whole;
    }
    Values& sum = by_others[others];
    if (sum.empty()) sum.assign(part.values.size(), 0);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part.values[i];
  }
  for (const auto& [others, values] : by_others) {
    const std::vector<int64_t> at = positions(type, others);
    for (size_t i = 0; i < at.size(); ++i) {
      const auto p = static_cast<size_t>(at[i]);
      if (have[p] && !(whole[p] == values[i] || (std::isnan(whole[p]) && std::isnan(values[i]))))
        error += str("ranks disagree on element ", at[i], " of ", type, ": ", whole[p], " and ", values[i], "; ");
      whole[p] = values[i];
      have[p] = true;
    }
  }
  for (size_t p = 0; p < n; ++p)
    if (!have[p]) error += str("no rank holds element ", p, " of ", type, "; ");
  return whole;
}

double scaled_error(const Values& a, const Values& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) {
      if (std::isfinite(b[i])) largest = std::max(largest, std::abs(b[i]));
      continue;
    }
    const double d = std::abs(a[i] - b[i]);
    if (!std::isfinite(d)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, d);
    largest = std::max(largest, std::abs(b[i]));
  }
  return largest > 0 ? difference / largest : difference;
}

}  // namespace sheaf::testing
