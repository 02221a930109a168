#include "core/tensor.h"

namespace my_project {

sheaf::Tensor squared_error(const sheaf::Tensor& a, const sheaf::Tensor& b) {
  const sheaf::Tensor d = a - b;
  return mean(d * d);
}

std::vector<float> fit(sheaf::World& world, const std::string& folder, int64_t steps) {
  const sheaf::Mesh mesh = world.mesh({{"data", world.size()}});
  const sheaf::Layout rows(mesh.spec, sheaf::Placement::shard(0));
  const sheaf::Tensor x = redistribute(sheaf::arange(-1, 1, 0.25, sheaf::kF32), rows),
                      y = 3 * x - 1;

  Line line;
  shard(line, mesh);
  materialize(line, world.device());
  sheaf::optim::SGD optimizer(line, {.lr = 0.5});
  int64_t step = 0;
  if (const auto saved = sheaf::models::load_checkpoint(folder, line, {&optimizer}, world))
    step = saved->step;
  for (; step < steps; ++step) {
    sheaf::Recording recording;
    recording.backward(squared_error(line(x), y));
    optimizer.step();
    optimizer.zero_grad();
  }
  if (!folder.empty())
    sheaf::models::save_checkpoint(folder, step, line, {&optimizer}, world);
  return {sheaf::full_parameter(line.slope).item(), sheaf::full_parameter(line.offset).item()};
}

}  // namespace my_project
