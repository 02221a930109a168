"""The locations of all external dependencies: folders of Debian 12, nothing is downloaded."""

load("//tools/bazel/cuda:configure.bzl", "cuda_configure")

# Headers directly in /usr/include are found by the compiler itself, as system headers; naming that folder with -isystem again would
# break the `#include_next` of the C++ library. So most repositories below have no headers: depending on them links the library, and
# their path names what must be installed.
_THIRD_PARTY = {
    "benchmark": "/usr/include/benchmark",
    "cli11": "/usr/include/CLI",
    "eigen": "/usr/include/eigen3",
    "fmt": "/usr/include/fmt",
    "gloo": "/usr/include/gloo",
    "gtest": "/usr/include/gtest",
    "nlohmann_json": "/usr/include/nlohmann",
    "onednn": "/usr/include/oneapi/dnnl",
    "pcre2": "/usr/share/doc/libpcre2-dev",
    "rapidcheck": "/usr/include/rapidcheck",
    "tomlplusplus": "/usr/include/toml++",
    "utf8proc": "/usr/share/doc/libutf8proc-dev",
    "xxhash": "/usr/share/doc/libxxhash-dev",
}

def sheaf_repositories(root = "."):
    """Declares every repository that Sheaf and Bazel itself ask for.

    Args:
      root: path from the calling workspace to Sheaf's tree; a workspace that uses Sheaf through
        local_repository gives it the same path as there.
    """
    for name in ["rules_cc", "remote_coverage_tools"]:
        native.local_repository(name = name, path = root + "/tools/bazel/" + name)
    for name in ["java", "proto"]:
        native.local_repository(name = "rules_" + name, path = "/usr/share/bazel/rules/" + name)
    native.local_repository(name = "platforms", path = "/usr/share/bazel/tools/platforms")
    native.local_repository(name = "bazel_skylib", path = "/usr/share/bazel/tools/skylib")
    for name, path in _THIRD_PARTY.items():
        native.new_local_repository(
            name = name,
            path = path,
            build_file = "@sheaf//tools/bazel/third_party:%s.BUILD" % name,
        )
    cuda_configure(name = "cuda")
