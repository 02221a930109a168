// The error types of Sheaf. Every failure that a user can cause or meet is an `Error` that names the op, the module
// path, shapes, dtypes, placements and rank as far as they are known, and carries the exit code the tools end with.
// Nothing in the library calls exit().
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace sheaf {

/// Exit codes of the command-line tools (sysexits.h where one fits).
enum class ExitCode : int {
  kConfig = 64,          ///< bad configuration or command line
  kData = 65,            ///< bad or hostile input: corpus, token, checkpoint
  kDesync = 70,          ///< ranks disagree on a collective, a GPU failed, a value is gone, an internal invariant broke
  kTimeout = 71,         ///< a collective or a rendezvous ran out of time
  kPeerLost = 72,        ///< another rank died
  kOutOfMemory = 73,     ///< on a GPU, or more than the host may use
  kIo = 74,              ///< a file, a folder or standard output
  kNonFinite = 75,       ///< a loss, a gradient or a logit is NaN or infinite
  kResumeMismatch = 76,  ///< --resume with other options than the checkpoint's
};

/// Base of all errors. `what()` is one line: "[op] message", followed by the module and the rank if an op failed in one.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  /// Not inline: so the class's type is one object of the program, which handlers compare, also in the kernels of -fno-weak (tools/sheaf.bzl).
  ~Error() override;
  const char* what() const noexcept override { return located_.empty() ? std::runtime_error::what() : located_.c_str(); }
  int exit_code() const { return static_cast<int>(code_); }

  /// Adds where, unless the message already says it: the module of this path ("": none), and the rank if there are
  /// several.
  void locate(std::string_view path, int rank, int ranks);

 private:
  ExitCode code_;
  std::string located_;
};

#define SHEAF_DEFINE_ERROR(Name, code)                                                     \
  class Name : public Error {                                                              \
   public:                                                                                 \
    explicit Name(const std::string& message, ExitCode c = code) : Error(c, message) {}    \
  }
SHEAF_DEFINE_ERROR(ShapeError, ExitCode::kConfig);
SHEAF_DEFINE_ERROR(DTypeError, ExitCode::kConfig);
SHEAF_DEFINE_ERROR(PlacementError, ExitCode::kConfig);
SHEAF_DEFINE_ERROR(ConfigError, ExitCode::kConfig);
SHEAF_DEFINE_ERROR(CommError, ExitCode::kDesync);
SHEAF_DEFINE_ERROR(DataError, ExitCode::kData);
SHEAF_DEFINE_ERROR(CheckpointError, ExitCode::kData);
SHEAF_DEFINE_ERROR(OutOfMemory, ExitCode::kOutOfMemory);
SHEAF_DEFINE_ERROR(LifetimeError, ExitCode::kDesync);  ///< the value is meta, discarded, or of a finished recording
SHEAF_DEFINE_ERROR(CudaError, ExitCode::kDesync);
SHEAF_DEFINE_ERROR(IoError, ExitCode::kIo);
SHEAF_DEFINE_ERROR(NonFiniteError, ExitCode::kNonFinite);
#undef SHEAF_DEFINE_ERROR

namespace detail {
inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, const char* part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, bool part) { out += part ? "true" : "false"; }
void append(std::string& out, double part);
template <class T>
  requires(std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>)
void append(std::string& out, T part) { out += std::to_string(part); }
template <class T>
  requires requires(const T& t) { { t.to_string() } -> std::convertible_to<std::string>; }
void append(std::string& out, const T& part) { out += part.to_string(); }
template <class T>
  requires(std::is_enum_v<T> && requires(T t) { { name(t) } -> std::convertible_to<std::string_view>; })
void append(std::string& out, T part) { out += name(part); }
}  // namespace detail

/// Concatenates strings, numbers, and anything with `to_string()` or a free `name()`.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

/// A module's path as messages and listings show it: the root's empty path reads "root".
inline std::string_view path_label(std::string_view path) { return path.empty() ? "root" : path; }

/// Throws E with the concatenated parts as its message.
template <class E, class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) { throw E(str(parts...)); }

/// Throws E unless `condition`. The parts are always evaluated: keep them cheap on hot paths.
template <class E, class... Parts>
inline void check(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] fail<E>(parts...);
}

}  // namespace sheaf
