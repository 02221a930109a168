// A mesh names the ranks along axes. MeshSpec is pure data, interned, and lives forever, so that layouts and tapes can
// hold it after the job's communicators are gone; MeshRuntime is the abstract interface to its communication.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sheaf/core/view.h"

namespace sheaf {

class MeshSpec {
 public:
  struct Axis {
    std::string name;
    int size;
    bool chain = false;  ///< neighbours have separate communicators, one for each direction: stages of a pipeline
    bool ring = false;   ///< a chain whose last rank and first are neighbours, too: values pass through its stages several times
    bool operator==(const Axis&) const = default;
  };
  /// The one spec with these axes; the pointer is its identity. At most kMaxAxes axes.
  static const MeshSpec* intern(std::vector<Axis> axes);

  int num_axes() const { return static_cast<int>(axes_.size()); }
  int size(int axis) const { return axes_[axis].size; }
  const std::string& name(int axis) const { return axes_[axis].name; }
  bool is_chain(int axis) const { return axes_[axis].chain || axes_[axis].ring; }
  bool is_ring(int axis) const { return axes_[axis].ring; }
  int axis(const std::string& name) const;  ///< throws ConfigError
  bool has_axis(const std::string& name) const;
  int num_ranks() const;
  std::string to_string() const;  ///< "(data=4)"

 private:
  explicit MeshSpec(std::vector<Axis> axes) : axes_(std::move(axes)) {}
  std::vector<Axis> axes_;
};

class Communicator;

/// A direction along a chain.
enum class Toward : uint8_t { next, before };

/// One rank's run-time interface to a mesh. Implemented by distributed/.
class MeshRuntime {
 public:
  virtual ~MeshRuntime() = default;
  virtual int coordinate(int axis) const = 0;
  /// Communicators of one axis: gathers (and everything synchronous) use one, reductions that run concurrently use
  /// the other, so that neither waits for the other.
  virtual Communicator& gather_lane(int axis) = 0;
  virtual Communicator& reduce_lane(int axis) = 0;
  /// A chain's link from the rank of this coordinate to a neighbour; this rank is one of the two. They are ranks 0 and 1 of
  /// it, in their order along the axis. In a ring of two each precedes and follows the other, with separate links.
  virtual Communicator& link(int axis, int from, Toward to) = 0;
};

}  // namespace sheaf
