// DeviceMesh: one rank's communication for a MeshSpec. Mesh is the handle that users hold.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/core/mesh.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

/// A cheap value: the mesh's axes and this rank's coordinates.
struct Mesh {
  const MeshSpec* spec = nullptr;
  std::shared_ptr<MeshRuntime> runtime;

  /// Both throw ConfigError for the name of no axis, and LifetimeError for an empty mesh.
  int size(const std::string& axis) const {
    const int number = number_of(axis);
    return spec->size(number);
  }
  int coordinate(const std::string& axis) const {
    const int number = number_of(axis);
    return runtime->coordinate(number);
  }

 private:
  int number_of(const std::string& axis) const {
    if (!spec) fail<LifetimeError>("[mesh] axis '", axis, "' of an empty Mesh: World::mesh() makes others");
    return spec->axis(axis);
  }
};

/// Ranks are in row-major order over the axes: on (data=2, model=3), rank 4 has coordinates data=1, model=1. Per axis there are two
/// communicators over the ranks that share all other coordinates, and along a chain two between neighbours; in a ring, the last rank
/// and the first are neighbours, too. Collective over the whole mesh.
class DeviceMesh final : public MeshRuntime {
 public:
  DeviceMesh(const MeshSpec* spec, int rank, Transport& transport);
  ~DeviceMesh() override;

  int coordinate(int axis) const override { return coordinates_[axis]; }
  Communicator& gather_lane(int axis) override { return *gather_[axis]; }
  Communicator& reduce_lane(int axis) override { return *reduce_[axis]; }
  Communicator& link(int axis, int from, Toward to) override;

 private:
  /// This rank's links to its neighbours along a chain: from the previous rank, and so on.
  struct Links {
    Communicator *from_before = nullptr, *to_before = nullptr, *to_next = nullptr, *from_next = nullptr;
  };
  const MeshSpec* spec_;
  std::vector<int> coordinates_;
  std::vector<std::unique_ptr<Communicator>> gather_, reduce_;
  std::vector<Links> links_;  // by axis
  std::vector<std::unique_ptr<Communicator>> all_links_;  // in the order of all ranks
};

/// The rest of a mesh for the ranks that share this one's coordinate on one axis: the other axes, with their
/// communicators.
class MeshSlice final : public MeshRuntime {
 public:
  MeshSlice(std::shared_ptr<MeshRuntime> mesh, int axis) : mesh_(std::move(mesh)), axis_(axis) {}

  int coordinate(int axis) const override { return mesh_->coordinate(in_mesh(axis)); }
  Communicator& gather_lane(int axis) override { return mesh_->gather_lane(in_mesh(axis)); }
  Communicator& reduce_lane(int axis) override { return mesh_->reduce_lane(in_mesh(axis)); }
  Communicator& link(int axis, int from, Toward to) override { return mesh_->link(in_mesh(axis), from, to); }

 private:
  int in_mesh(int axis) const { return axis < axis_ ? axis : axis + 1; }
  std::shared_ptr<MeshRuntime> mesh_;
  int axis_;
};

}  // namespace sheaf
