#include "sheaf/autograd/local_map.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/relabel.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {
namespace {

std::string where() { return str(path_label(PathScope::current()), ": "); }

// The mesh of all of these; null if none has one.
const MeshSpec* common_mesh(std::span<const Type> outputs, std::span<const Tensor> inputs) {
  const MeshSpec* mesh = nullptr;
  const auto take = [&](const Layout& layout) {
    if (!mesh) mesh = layout.mesh();
    if (layout.mesh() && layout.mesh() != mesh)
      fail<PlacementError>("[local_map] ", where(), "one mesh is ", mesh->to_string(), ", another ", layout.mesh()->to_string());
  };
  for (const Tensor& x : inputs) take(x.layout());
  for (const Type& y : outputs) take(y.layout);
  return mesh;
}

void expect_local(const Type& type, const char* what) {
  for (int a = 0; a < type.layout.num_axes(); ++a)
    if (type.layout[a].is_invariant() || type.layout[a].is_single())
      fail<PlacementError>("[local_map] ", where(), what, ' ', type, " is ", type.layout[a], " on mesh axis ",
                           type.layout.mesh()->name(a), ": Replicate, Shard and Partial have a part on each rank; redistribute it");
}

}  // namespace

std::vector<Tensor> local_map(const TensorFunction& f, std::span<const Type> outputs, std::span<const Tensor> inputs) {
  const MeshSpec* mesh = common_mesh(outputs, inputs);
  for (const Tensor& x : inputs) expect_local(x.type(), "the input");
  for (const Type& y : outputs) expect_local(y, "the output");
  std::vector<Tensor> local;
  for (const Tensor& x : inputs) {  // the gradient of a constant without a mesh is Partial: it goes through Replicate
    const Tensor here = mesh && !x.layout().mesh() ? redistribute(x, Layout(mesh)) : x;
    local.push_back(mesh ? relabel(here, {x.dtype(), x.local_shape(), Layout(mesh)}, /*enters=*/true) : x);
  }
  std::vector<Tensor> out = [&] {
    const PerRankScope per_rank;
    return f(local);
  }();
  if (out.size() != outputs.size())
    fail<ShapeError>("[local_map] ", where(), "f returned ", out.size(), " tensors where ", outputs.size(), " are declared");
  for (size_t i = 0; i < out.size(); ++i) {
    Tensor& y = out[i];
    const Type& declared = outputs[i];
    if (y.dtype() != declared.dtype) fail<DTypeError>("[local_map] ", where(), "f returned ", y.type(), ", not ", declared);
    if (!(y.shape() == declared.local_shape()))
      fail<ShapeError>("[local_map] ", where(), "f returned ", y.type(), " where this rank's part of ", declared, " has the shape ",
                       declared.local_shape());
    if (!mesh) continue;
    if (!y.layout().mesh()) y = redistribute(y, Layout(mesh));
    if (!(y.layout() == Layout(mesh)))
      fail<PlacementError>("[local_map] ", where(), "f returned ", y.type(), ", which is no value of one rank: what it captures has to be ",
                           "Replicate");
    y = relabel(y, declared.layout.mesh() ? declared : Type{declared.dtype, declared.shape, Layout(mesh)}, /*enters=*/false);
  }
  return out;
}

}  // namespace sheaf
