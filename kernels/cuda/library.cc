#include "sheaf/kernels/cuda/library.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string_view>

#include <dlfcn.h>
#include <glob.h>
#include <link.h>

#include "sheaf/core/error.h"

namespace sheaf::kernels::cuda {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

/// The folders in an environment variable, separated by colons.
std::vector<std::string> folders_of(const char* name) {
  const std::string text = variable(name);
  std::vector<std::string> out;
  for (std::string_view list = text; !list.empty();) {
    const size_t length = std::min(list.find(':'), list.size());
    if (length > 0) out.emplace_back(list.substr(0, length));
    list.remove_prefix(std::min(length + 1, list.size()));
  }
  return out;
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> out;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
    out.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return out;
}

struct Loaded {
  void* handle = nullptr;
  std::string looked;  ///< the places searched, and the loader's messages
};

// RTLD_GLOBAL: some of NVIDIA's libraries look up each other's functions among all loaded ones.
void* open(const std::string& path) { return dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL); }

Loaded find(const std::string& soname) {
  const LibraryFolders folders = library_folders();
  Loaded out;
  const auto try_folders = [&](const std::vector<std::string>& paths) {
    for (const std::string& folder : paths) {
      if (out.handle) return;
      const std::string path = folder + '/' + soname;
      out.looked += (out.looked.empty() ? "" : "; ") + folder;
      if (!std::filesystem::exists(path)) continue;
      out.handle = open(path);
      if (!out.handle) out.looked += std::string(" (") + dlerror() + ')';
    }
  };
  if (folders.before_loader.empty()) out.looked += "SHEAF_CUDA_LIBRARIES (not set)";
  try_folders(folders.before_loader);
  if (!out.handle) {
    out.handle = open(soname);
    if (!out.handle) out.looked += std::string("; the loader's folders (") + dlerror() + ')';
  }
  try_folders(folders.after_loader);
  return out;
}

/// Fills in all functions and returns null, or none and returns the name of the first missing one.
const char* fill_in(void* handle, std::span<const ForwardedFunction> functions) {
  std::vector<void*> found;
  for (const ForwardedFunction& function : functions) {
    found.push_back(dlsym(handle, function.name));
    if (!found.back()) return function.name;
  }
  for (size_t i = 0; i < functions.size(); ++i) *functions[i].address = found[i];
  return nullptr;
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

void load_nvrtc(const std::string& soname) {
  const Loaded nvrtc = find(soname);
  if (!nvrtc.handle) return;
  // NVRTC does not find its second half itself; the name of that contains the full version.
  const std::filesystem::path folder = std::filesystem::path(path_of(nvrtc.handle)).parent_path();
  for (const std::string& part : matches((folder / "libnvrtc-builtins.so.*").string())) open(part);
}

}  // namespace

LibraryFolders library_folders() {
  LibraryFolders out;
  out.before_loader = folders_of("SHEAF_CUDA_LIBRARIES");

  std::vector<std::string>& after = out.after_loader;
  const auto add = [&](const std::string& folder) {
    if (std::find(after.begin(), after.end(), folder) == after.end()) after.push_back(folder);
  };
  for (const std::string& root :
       {variable("CUDA_PATH"), std::string(SHEAF_CUDA_ROOT), std::string("/usr/local/cuda")})
    if (!root.empty()) add(root + "/lib64"), add(root + "/targets/x86_64-linux/lib");

  std::vector<std::string> environments;
  if (const std::string venv = variable("VIRTUAL_ENV"); !venv.empty()) environments.push_back(venv);
  for (const std::string& bin : folders_of("PATH")) {
    // The link's environment, too, if python3 is a link into another one.
    std::filesystem::path python = bin + "/python3";
    std::error_code absent;
    for (int links = 0; links < 8 && std::filesystem::exists(python, absent); ++links) {
      const std::filesystem::path folder = python.parent_path();
      environments.push_back(std::filesystem::weakly_canonical(folder, absent).parent_path());
      if (!std::filesystem::is_symlink(python, absent)) break;
      python = folder / std::filesystem::read_symlink(python, absent);
    }
  }
  environments.insert(environments.end(), {"/usr/local", "/usr"});
  if (const std::string home = variable("HOME"); !home.empty())
    environments.push_back(home + "/.local");
  for (const std::string& environment : environments)
    for (const char* packages : {"site-packages", "dist-packages"})
      for (const char* python : {"python3", "python3.*"})
        for (const std::string& folder :
             matches(environment + "/lib/" + python + '/' + packages + "/nvidia/*/lib"))
          add(folder);
  return out;
}

void load_library(const std::string& soname, std::span<const ForwardedFunction> functions,
                  const std::string& nvrtc) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (*functions.back().address) return;
  if (!nvrtc.empty()) load_nvrtc(nvrtc);
  const Loaded library = find(soname);
  check<ConfigError>(
      library.handle, "[", soname, "] this library of NVIDIA's is needed and was ",
      "not found; SHEAF_CUDA_LIBRARIES may name its folder. Looked in: ", library.looked);
  const char* const missing = fill_in(library.handle, functions);
  check<ConfigError>(!missing, "[", soname, "] ", path_of(library.handle), " has no ", missing,
                     ": another version than this program was built with?");
}

}  // namespace sheaf::kernels::cuda
