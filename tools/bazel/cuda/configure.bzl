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

# For the emulated GPU, which is always available.
cc_library(
    name = "emulated_config",
    defines = ["SHEAF_HAS_CUDA=1"],
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],  # -isystem
)

# Of libraries that programs load when they first need them: kernels/cuda/library.h.
[
    alias(
        name = name,
        actual = ":headers",
    )
    for name in ["cublaslt", "cudnn", "nccl"]
]

cc_library(
    name = "runtime",
    linkopts = {runtime},
    deps = [":headers"],
)
"""

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

    # 12.0 is the first with C++20 and sm_90a, 12.5 the first whose runtime looks up the driver's functions by version.
    found = release != None and release >= (12, 5)
    runtime = []
    if found:
        ctx.symlink(root + "/include", "include")
        runtime = [root + "/lib64/libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
    ctx.file("BUILD", _BUILD.format(found = int(found), runtime = runtime))
    ctx.file("defs.bzl", "HAS_CUDA = %s\nCUDA_ROOT = %r\nCUDA_RELEASE = %r\n" % (found, root, release))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    configure = True,
    environ = ["CUDA_PATH"],
    local = True,
)
