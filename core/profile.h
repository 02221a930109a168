// Profile: what a rank did when, measured on its host: ops, what they waited for, collectives on their lanes.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace sheaf {

class RankContext;

/// While it lives, what the rank of the calling thread executes is noted; at most one per rank. Of a GPU's rank it would show
/// when work is enqueued, not when it runs. For any of the rank's threads.
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
    std::string row;     ///< kCompute, or a communicator
    std::string name;    ///< an op, "waits", or a collective
    std::string module;  ///< path
    double begin, end;   ///< now()
  };
  void add(Span span);
  /// In the order in which they ended.
  std::vector<Span> spans() const;

 private:
  friend class ProfileSpan;
  RankContext& context_;
  const std::thread::id thread_ = std::this_thread::get_id();
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

/// One span, while it lives; nothing where the rank has no Profile, or the row is another thread's. What is passed must outlive it.
class ProfileSpan {
 public:
  ProfileSpan(std::string_view row, std::string_view name, std::string_view module);
  ~ProfileSpan() {
    if (profile_) [[unlikely]] end();
  }
  ProfileSpan(const ProfileSpan&) = delete;
  ProfileSpan& operator=(const ProfileSpan&) = delete;

 private:
  void end();
  Profile* profile_;
  std::string_view row_, name_, module_;
  double begin_ = 0;
};

}  // namespace sheaf
