#include "sheaf/autograd/rowwise.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/relabel.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {
namespace {

thread_local int64_t first_row = 0;

class FirstRowScope {
 public:
  explicit FirstRowScope(int64_t row) : previous_(std::exchange(first_row, row)) {}
  ~FirstRowScope() { first_row = previous_; }

 private:
  int64_t previous_;
};

bool cuts_rows(const Placement& p) { return p.is_shard(0); }

}  // namespace

int64_t first_local_row() { return first_row; }

std::vector<Tensor> rowwise(const RowFunction& f, std::span<const Tensor> inputs) {
  const auto where = [] { return PathScope::current().empty() ? std::string() : PathScope::current() + ": "; };
  const Tensor* cut = nullptr;  // the input whose layout says how rows are sharded
  for (const Tensor& x : inputs) {
    if (x.rank() == 0 || x.size(0) != inputs[0].size(0))
      fail<ShapeError>("[rowwise] ", where(), "inputs have different numbers of rows: ", inputs[0].type(), " and ",
                       x.type(), " (what is not a row per sample, f captures)");
    for (int a = 0; a < x.layout().num_axes(); ++a)
      if (cuts_rows(x.layout()[a]) && !cut) cut = &x;
  }
  if (!cut) return f(inputs);

  const MeshSpec* mesh = cut->layout().mesh();
  for (int a = 0; a < mesh->num_axes(); ++a)
    if (cuts_rows(cut->layout()[a]) && cut->layout()[a].map().is_scattered() && mesh->size(a) > 1)
      fail<PlacementError>("[rowwise] ", where(), "a rank's rows must be one interval, but on mesh axis ", mesh->name(a), " ",
                           cut->type(), " has several");
  const int64_t rows = cut->layout().local_shape(cut->shape())[0];
  std::vector<Tensor> local;
  for (const Tensor& input : inputs) {
    Tensor x = input;
    Layout want = x.layout().mesh() ? x.layout() : Layout(mesh);
    if (want.mesh() != mesh)
      fail<PlacementError>("[rowwise] ", where(), "inputs on two meshes: ", cut->type(), " and ", x.type());
    for (int a = 0; a < mesh->num_axes(); ++a) {
      const Placement& p = cut->layout()[a];
      if (cuts_rows(p) && want[a].is_replicate() && can_slice(want, a, p)) want[a] = p;
      if (want[a] == p || (!cuts_rows(p) && !cuts_rows(want[a]))) continue;
      fail<PlacementError>("[rowwise] ", where(), "rows are ", p, " and ", want[a], " on mesh axis ", mesh->name(a), " (",
                           cut->type(), " and ", input.type(), "); redistribute one of them");
    }
    x = redistribute(x, want);
    for (int a = 0; a < mesh->num_axes(); ++a)
      if (cuts_rows(cut->layout()[a])) want[a] = Placement::replicate();
    Shape shape = x.shape();
    shape[0] = rows;
    local.push_back(relabel(x, {x.dtype(), shape, want}, /*enters=*/true));
  }

  std::vector<Tensor> out;
  {
    const std::vector<Interval> here = cut->layout().local_rows(cut->shape(), 0);
    const FirstRowScope scope(first_row + (here.empty() ? 0 : here[0].begin));
    const PerRankScope per_rank;
    out = f(local);
  }
  for (Tensor& y : out) {
    if (y.rank() == 0 || y.size(0) != rows)
      fail<ShapeError>("[rowwise] ", where(), "f must return a row for each of its ", rows, " rows, not ", y.type());
    if (!y.layout().mesh()) y = redistribute(y, Layout(mesh));
    Layout layout = y.layout();
    for (int a = 0; a < mesh->num_axes(); ++a) {
      const bool cuts = cuts_rows(cut->layout()[a]);
      if (cuts ? !layout[a].is_replicate() : cuts_rows(layout[a]))
        fail<PlacementError>("[rowwise] ", where(), "f returned ", y.type(), " on mesh axis ", mesh->name(a),
                             ", which is not a value of its rows alone");
      if (cuts) layout[a] = cut->layout()[a];
    }
    Shape shape = y.shape();
    shape[0] = cut->size(0);
    y = relabel(y, {y.dtype(), shape, layout}, /*enters=*/false);
  }
  return out;
}

}  // namespace sheaf
