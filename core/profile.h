// Profile: what a rank did when: ops, what they waited for, collectives on their lanes. On CPUs by the host's clock, on a GPU by
// the GPU's, which gets to its work behind the host.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace sheaf {

class DeviceTime;
class Gpu;
class RankContext;
struct Stream;

/// While it lives, what the rank of the calling thread executes is noted; at most one per rank. A rank with a GPU waits here until
/// that has nothing to do; each op is then some microseconds longer, and what a captured graph runs does not show. For any of the
/// rank's threads.
class Profile {
 public:
  Profile();
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Seconds by a clock that all processes of a host share, and hosts about as well as their time of day.
  static double now();

  static constexpr std::string_view kCompute = "compute";  ///< the row of the thread that made the profile, and of no other
  struct Span {
    std::string row;     ///< kCompute, a communicator, or a stream of copies
    std::string name;    ///< an op, "waits", or a collective
    std::string module;  ///< path
    double begin, end;   ///< now()
    int64_t live = 0;    ///< bytes that were alive when it began, in the memory of the rank's device
  };
  /// now(), behind what a GPU was given.
  double settle() const;
  /// Each row's in the order in which they ended, those of a GPU once it has run them.
  std::vector<Span> spans() const;

 private:
  friend class ProfileSpan;
  using Time = std::shared_ptr<const DeviceTime>;
  struct Noted {
    Span span;
    Time begin, end;  ///< null: the span says when
  };
  void add(Noted noted);

  RankContext& context_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const std::shared_ptr<Gpu> gpu_;
  Time zero_;         ///< of the GPU's clock, and what now() said then
  double began_ = 0;
  mutable std::mutex mutex_;
  std::vector<Noted> noted_;
};

/// One span, while it lives; nothing where the rank has no Profile, or the row is another thread's. What is passed must outlive it.
/// Of `stream` it is what runs there between what was enqueued before and what will be; so it is of a GPU's rank in the row of
/// compute, whose stream is Gpu::compute(), and no other has spans there.
class ProfileSpan {
 public:
  ProfileSpan(std::string_view row, std::string_view name, std::string_view module, const Stream* stream = nullptr);
  ~ProfileSpan() {
    if (profile_) [[unlikely]] end();
  }
  ProfileSpan(const ProfileSpan&) = delete;
  ProfileSpan& operator=(const ProfileSpan&) = delete;

 private:
  void end() noexcept;
  Profile* profile_;
  std::string_view row_, name_, module_;
  const Stream* stream_;
  double begin_ = 0;
  int64_t live_ = 0;
  Profile::Time began_;  ///< where there is a stream
};

}  // namespace sheaf
