#include "sheaf/distributed/device_mesh.h"

#include <algorithm>

namespace sheaf {

DeviceMesh::DeviceMesh(const MeshSpec* spec, int rank, Transport& transport) : spec_(spec), coordinates_(spec->num_axes()) {
  const int axes = spec->num_axes();
  std::vector<int> stride(axes, 1);  // in ranks
  for (int a = axes - 2; a >= 0; --a) stride[a] = stride[a + 1] * spec->size(a + 1);
  for (int a = 0; a < axes; ++a) coordinates_[a] = rank / stride[a] % spec->size(a);

  std::string mesh = spec->to_string();  // meshes that differ in their links are different meshes
  for (int a = 0; a < axes; ++a)
    if (spec->is_chain(a)) mesh += str(' ', spec->name(a), spec->is_ring(a) ? " ring" : " chain");
  links_.resize(static_cast<size_t>(axes));
  for (int a = 0; a < axes; ++a) {
    CommunicatorGroup group{.name = {}, .members = {}, .index = coordinates_[a], .world = spec->num_ranks()};
    const int first = rank - coordinates_[a] * stride[a];
    for (int i = 0; i < spec->size(a); ++i) group.members.push_back(first + i * stride[a]);
    const std::string name = str(mesh, '/', spec->name(a), '/', first);
    group.name = name + "/gather";
    gather_.push_back(transport.connect(group));
    group.name = name + "/reduce";
    reduce_.push_back(transport.connect(group));
    if (!spec->is_chain(a)) continue;
    const std::vector<int> chain = group.members;
    const int size = spec->size(a), me = coordinates_[a];
    for (int i = 0; i < size - (spec->is_ring(a) && size > 1 ? 0 : 1); ++i) {
      const int next = (i + 1) % size;
      if (me != i && me != next) continue;
      group.members = {chain[std::min(i, next)], chain[std::max(i, next)]};
      group.index = me == std::max(i, next);
      Links& links = links_[a];
      group.name = str(name, "/forward/", i);
      (me == i ? links.to_next : links.from_before) = all_links_.emplace_back(transport.connect(group)).get();
      group.name = str(name, "/back/", i);
      (me == i ? links.from_next : links.to_before) = all_links_.emplace_back(transport.connect(group)).get();
    }
  }
}

// The end of a communicator may wait for its other ranks: in a ring they end in the order in which all ranks have created them.
DeviceMesh::~DeviceMesh() {
  for (auto& link : all_links_) link.reset();
}

Communicator& DeviceMesh::link(int axis, int from, Toward to) {
  const Links& links = links_[axis];
  const bool on = to == Toward::next;
  const int me = coordinates_[axis], size = spec_->size(axis), there = (from + (on ? 1 : size - 1)) % size;
  Communicator* link = from == me ? (on ? links.to_next : links.to_before) : (on ? links.from_before : links.from_next);
  if (!link || (from != me && there != me))
    fail<PlacementError>("[mesh] rank ", me, " along axis ", axis, " has no link from rank ", from, " to rank ", there);
  return *link;
}

}  // namespace sheaf
