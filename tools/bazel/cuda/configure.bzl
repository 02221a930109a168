"""Finds a CUDA toolkit: $CUDA_PATH, else /usr/local/cuda. Having none is fine.

To build without the CUDA of a machine that has one: --repo_env=CUDA_PATH=/none.
"""

# Every target exists with and without CUDA, so that dependents need no select(): without it all are empty.
_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "config",
    defines = ["SHEAF_HAS_CUDA={found}"],
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],  # -isystem
)

cc_library(
    name = "runtime",
    linkopts = {runtime},
    deps = [":headers"],
)
"""

_SHARED_LIBRARY = """
cc_library(
    name = "{name}",
    linkopts = {linkopts},
    deps = [":headers"],
)
"""

# Target: library. Linked where they are; the binary remembers the folder.
_SHARED = {
    "cublaslt": "cublasLt",
    "cudnn": "cudnn",
    "nccl": "nccl",
}

def _release(ctx, nvcc):
    """(13, 0) for nvcc of CUDA 13.0, None if it does not run."""
    if not ctx.path(nvcc).exists:
        return None
    words = ctx.execute([nvcc, "--version"]).stdout.replace(",", " ").split(" ")
    for i in range(len(words) - 1):
        if words[i] == "release":
            major, minor = words[i + 1].split(".")
            return (int(major), int(minor))
    return None

def _cuda_configure_impl(ctx):
    root = ctx.os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    release = _release(ctx, root + "/bin/nvcc")

    # 12.0 is the first that knows both C++20 and sm_90a.
    found = release != None and release >= (12, 0)
    library_path = root + "/lib64"
    runtime = []
    if found:
        ctx.symlink(root + "/include", "include")
        runtime = [library_path + "/libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
    build = _BUILD.format(found = int(found), runtime = runtime)
    for name, library in _SHARED.items():
        linkopts = []
        if found and ctx.path("%s/lib%s.so" % (library_path, library)).exists:
            linkopts = ["-L" + library_path, "-Wl,-rpath," + library_path, "-l" + library]
        build += _SHARED_LIBRARY.format(name = name, linkopts = linkopts)
    ctx.file("BUILD", build)
    ctx.file("defs.bzl", "HAS_CUDA = %s\nCUDA_ROOT = %r\nCUDA_RELEASE = %r\n" % (found, root, release))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    configure = True,
    environ = ["CUDA_PATH"],
    local = True,
)
