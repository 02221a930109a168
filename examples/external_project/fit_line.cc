#include <iostream>

#include "core/tensor.h"

int main() try {
  sheaf::World world = sheaf::distributed::init_from_env();
  const std::vector<float> line = my_project::fit(world);
  world.print("y = ", line[0], " x + ", line[1]);
} catch (const sheaf::Error& e) {
  std::cerr << e.what() << '\n';
  return e.exit_code();
}
