// CUDA loads a kernel's code when it is first launched, and loading may wait for everything that runs on the device: forever, if that
// is a collective that in turn waits for this rank. So code that may need a kernel later loads it while no collective runs.
#pragma once

namespace sheaf::kernels::cuda {

/// While one lives, launch() on this thread launches nothing, but loads the kernel's code. For functions that only launch kernels:
/// copies and the libraries' work are enqueued as usual.
class CodeLoading {
 public:
  CodeLoading() { ++depth_; }
  ~CodeLoading() { --depth_; }
  CodeLoading(const CodeLoading&) = delete;
  CodeLoading& operator=(const CodeLoading&) = delete;
  static bool active() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace sheaf::kernels::cuda
