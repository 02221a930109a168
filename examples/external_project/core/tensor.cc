#include "core/tensor.h"

namespace my_project {

sheaf::Tensor squared_error(const sheaf::Tensor& a, const sheaf::Tensor& b) {
  const sheaf::Tensor d = a - b;
  return mean(d * d);
}

std::vector<float> fit(sheaf::World& world) {
  const sheaf::Mesh mesh = world.mesh({{"data", world.size()}});
  const sheaf::Layout rows(mesh.spec, sheaf::Placement::shard(0));
  const sheaf::Tensor x = redistribute(sheaf::arange(-1, 1, 0.25, sheaf::kF32), rows),
                      y = 3 * x - 1;

  Line line;
  shard(line, mesh);
  materialize(line, world.device());
  sheaf::optim::SGD optimizer(line, {.lr = 0.5});
  for (int step = 0; step < 100; ++step) {
    sheaf::Recording recording;
    recording.backward(squared_error(line(x), y));
    optimizer.step();
    optimizer.zero_grad();
  }
  return {sheaf::full_parameter(line.slope).item(), sheaf::full_parameter(line.offset).item()};
}

}  // namespace my_project
