// Profile: what a rank did when: ops, waits, collectives on their lanes. By the host's clock on CPUs, by the GPU's on a GPU, which
// runs its work later than the host enqueues it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sheaf {

class DeviceTime;
class ProfileLog;
class RankContext;
struct Stream;

/// While it lives, it records what the rank of the calling thread executes; at most one per rank. Its destructor waits until the
/// streams of a GPU's ops and copies are idle; captured graphs are not recorded. For any of the rank's threads.
class Profile {
 public:
  Profile();
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Seconds by a clock that all processes of a host share; between hosts it agrees about as well as their time of
  /// day.
  static double now();
  /// now(), once a GPU has finished the ops and copies that it was given.
  double settle() const;

  static constexpr std::string_view kCompute = "compute";  ///< the row of the thread that made the profile, and of no other
  struct Span {
    std::string row;     ///< kCompute, a communicator, or a stream of copies ("copies", "leaving")
    std::string name;    ///< an op, "waits", or a collective
    std::string module;  ///< path
    double begin, end;   ///< now()
    int64_t live;        ///< bytes alive in the rank's memory when the host reached this point; a GPU's ops use memory in that order
  };
  /// The spans that have ended, in the order of their ends within each row; a GPU's once it has finished them.
  std::vector<Span> spans() const;

 private:
  RankContext& context_;
  std::shared_ptr<ProfileLog> log_;
};

/// One span, while it lives; nothing if the rank has no Profile, or the row is another thread's. The arguments must outlive it. With
/// a stream: from when the stream has finished everything enqueued before the span until it has finished what the span enqueues. On a
/// rank with a GPU the compute row is the stream Gpu::compute(); spans there that name another are not recorded.
class ProfileSpan {
 public:
  ProfileSpan(std::string_view row, std::string_view name, std::string_view module, const Stream* stream = nullptr);
  ~ProfileSpan() {
    if (log_) [[unlikely]] end();
  }
  ProfileSpan(const ProfileSpan&) = delete;
  ProfileSpan& operator=(const ProfileSpan&) = delete;

 private:
  void begin();
  void end() noexcept;
  ProfileLog* log_;
  std::string_view row_, name_, module_;
  const Stream* stream_;
  int64_t live_ = 0;
  double begin_ = 0;
  std::shared_ptr<const DeviceTime> begin_on_device_;  ///< of a stream
};

}  // namespace sheaf
