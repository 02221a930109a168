#include "sheaf/distributed/device_mesh.h"

namespace sheaf {

DeviceMesh::DeviceMesh(const MeshSpec* spec, int rank, Transport& transport) : coordinates_(spec->num_axes()) {
  const int axes = spec->num_axes();
  std::vector<int> stride(axes, 1);  // in ranks
  for (int a = axes - 2; a >= 0; --a) stride[a] = stride[a + 1] * spec->size(a + 1);
  for (int a = 0; a < axes; ++a) coordinates_[a] = rank / stride[a] % spec->size(a);

  for (int a = 0; a < axes; ++a) {
    CommunicatorGroup group{.name = {}, .members = {}, .index = coordinates_[a], .world = spec->num_ranks()};
    const int first = rank - coordinates_[a] * stride[a];
    for (int i = 0; i < spec->size(a); ++i) group.members.push_back(first + i * stride[a]);
    const std::string name = str(spec->to_string(), '/', spec->name(a), '/', first);
    group.name = name + "/gather";
    gather_.push_back(transport.connect(group));
    group.name = name + "/reduce";
    reduce_.push_back(transport.connect(group));
  }
}

}  // namespace sheaf
