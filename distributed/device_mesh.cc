#include "sheaf/distributed/device_mesh.h"

namespace sheaf {

DeviceMesh::DeviceMesh(const MeshSpec* spec, int rank, Transport& transport) : coordinates_(spec->num_axes()) {
  const int axes = spec->num_axes();
  std::vector<int> stride(axes, 1);  // in ranks
  for (int a = axes - 2; a >= 0; --a) stride[a] = stride[a + 1] * spec->size(a + 1);
  for (int a = 0; a < axes; ++a) coordinates_[a] = rank / stride[a] % spec->size(a);

  links_.resize(static_cast<size_t>(axes));
  for (int a = 0; a < axes; ++a) {
    CommunicatorGroup group{.name = {}, .members = {}, .index = coordinates_[a], .world = spec->num_ranks()};
    const int first = rank - coordinates_[a] * stride[a];
    for (int i = 0; i < spec->size(a); ++i) group.members.push_back(first + i * stride[a]);
    const std::string name = str(spec->to_string(), '/', spec->name(a), '/', first);
    group.name = name + "/gather";
    gather_.push_back(transport.connect(group));
    group.name = name + "/reduce";
    reduce_.push_back(transport.connect(group));
    if (!spec->is_chain(a)) continue;
    const std::vector<int> chain = group.members;
    for (int i = 0; i + 1 < spec->size(a); ++i) {
      if (coordinates_[a] != i && coordinates_[a] != i + 1) continue;
      group.members = {chain[i], chain[i + 1]};
      group.index = coordinates_[a] - i;
      Links& links = links_[a];
      group.name = str(name, "/forward/", i);
      (group.index == 0 ? links.to_next : links.from_before) = transport.connect(group);
      group.name = str(name, "/back/", i);
      (group.index == 0 ? links.from_next : links.to_before) = transport.connect(group);
    }
  }
}

Communicator& DeviceMesh::link(int axis, int from, int to) {
  const Links& links = links_[axis];
  const int me = coordinates_[axis];
  const auto& link = from == me ? (to == me + 1 ? links.to_next : links.to_before)
                                : (from == me - 1 ? links.from_before : links.from_next);
  if (!link || (from != me && to != me) || std::abs(from - to) != 1)
    fail<PlacementError>("[mesh] rank ", me, " along axis ", axis, " has no link from rank ", from, " to rank ", to);
  return *link;
}

}  // namespace sheaf
