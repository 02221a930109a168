// NVIDIA's libraries, each loaded when its first function is needed: a program that runs no product on a GPU
// neither needs cuBLASLt nor waits for its hundreds of megabytes.
//
// A library's functions keep NVIDIA's names and headers. One source file lists those we call:
//
//   #define SHEAF_NCCL(F) F(ncclGetVersion) F(ncclCommInitRank)
//   SHEAF_FORWARD_FUNCTIONS(kNccl, SHEAF_NCCL)
//   ...
//   load_library(SHEAF_SONAME("libnccl.so.", NCCL_MAJOR), kNccl);
//
// Each becomes a jump to the function that load_library() found. A call before that crashes, so code that may be first calls
// load_library().
#pragma once

#include <span>
#include <string>
#include <vector>

namespace sheaf::kernels::cuda {

/// A function of a library, and where its address is stored.
struct ForwardedFunction {
  const char* name;
  void** address;
};

/// Loads `soname` ("libcudnn.so.9") for the rest of the process and fills in its functions; does nothing if that was done before.
/// Throws a ConfigError that lists the places searched; the next call searches again. `nvrtc` ("libnvrtc.so.13") is loaded first, for
/// a library that loads this compiler by name only. It may be missing: the library will then report that.
void load_library(const std::string& soname, std::span<const ForwardedFunction> functions,
                  const std::string& nvrtc = "");

/// Where libraries are searched, in addition to the loader's own places:
///   SHEAF_CUDA_LIBRARIES  folders, separated by colons; these come even before the loader's
///   $CUDA_PATH, the CUDA that this was built with, /usr/local/cuda
///   NVIDIA's packages in Python environments: $VIRTUAL_ENV, those whose python3 is in $PATH, the
///   system's, ~/.local
struct LibraryFolders {
  std::vector<std::string> before_loader, after_loader;
};
LibraryFolders library_folders();

}  // namespace sheaf::kernels::cuda

// Hidden: in the program's symbol table they would also intercept calls between NVIDIA's libraries.
#define SHEAF_FORWARD_FUNCTION(name)                                                             \
  extern "C" {                                                                                   \
  [[gnu::visibility("hidden")]] void* sheaf_address_of_##name;                                   \
  }                                                                                              \
  asm(".pushsection .text; .globl " #name "; .hidden " #name "; .type " #name                    \
      ", @function; " #name ": jmp *sheaf_address_of_" #name "(%rip); .size " #name ", .-" #name \
      "; .popsection");
#define SHEAF_FORWARDED_ENTRY(name) {#name, &sheaf_address_of_##name},

/// Defines the functions that LIST(F) names, and `table`, the argument of load_library(). At global
/// scope.
#define SHEAF_FORWARD_FUNCTIONS(table, LIST) \
  LIST(SHEAF_FORWARD_FUNCTION)               \
  static const sheaf::kernels::cuda::ForwardedFunction table[] = {LIST(SHEAF_FORWARDED_ENTRY)};
#define SHEAF_TEXT_OF(x) #x
/// SHEAF_SONAME("libcudnn.so.", CUDNN_MAJOR): the version of the headers.
#define SHEAF_SONAME(stem, major) stem SHEAF_TEXT_OF(major)
