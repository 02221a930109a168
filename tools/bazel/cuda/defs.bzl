"""cuda_library: .cu files compiled by nvcc, used like any cc_library; empty where there is no CUDA.

With --config=emulated the same files are compiled for the CPU (kernels/cuda/emulation.h).
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:defs.bzl", "CUDA_RELEASE", "CUDA_ROOT", "HAS_CUDA")
load("//tools:sheaf.bzl", "sheaf_library")

_EMULATED = str(Label("//tools/bazel:emulated"))

_NVCC_FLAGS = [
    "-std=c++20",
    # Machine code for Hopper and PTX for later architectures, from one compiler pass. A kernel with features of sm_90a only (wgmma)
    # would need an additional pass, arch=compute_90a: such PTX is not forward compatible.
    "-gencode=arch=compute_90,code=[sm_90a,compute_90]",
    "--expt-relaxed-constexpr",
    "--Werror=all-warnings",
    "-Xcompiler=-fPIC,-Wall,-Wno-restrict,-ffp-contract=off",
]

# Device code, with its line numbers, was most of every program that links the kernels. Drivers from before CUDA 12.4 cannot read it
# if it is compressed so, and CUDA 13 is the first that needs a later one.
_NVCC_COMPRESS = ["-compress-mode=size"] if HAS_CUDA and CUDA_RELEASE >= (13, 0) else []

_NVCC_OPTIMISE = select({
    str(Label("//tools/bazel:debug")): ["-G"],
    "//conditions:default": [
        "-O3",
        "-lineinfo",
    ],
})

# For targets whose code differs under --config=emulated: a local define, so that all other targets are identical in both and compiled
# once.
EMULATED_DEFINES = select({
    _EMULATED: ["SHEAF_CUDA_EMULATED=1"],
    "//conditions:default": ["SHEAF_CUDA_EMULATED=0"],
})

_ALIGNMENT = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]

# Instrumentation of kernels, empty unless they run on the CPU: kernels/cuda/emulated_accesses.cc checks their memory accesses.
EMULATED_COPTS = select({
    str(Label("//tools/bazel:races")): _ALIGNMENT + ["-fsanitize=thread"],
    _EMULATED: _ALIGNMENT,
    "//conditions:default": [],
})

def _cuda_objects_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    if not HAS_CUDA:
        return [DefaultInfo(), deps]

    context = deps.compilation_context
    objects = []
    for src in ctx.files.srcs:
        output = ctx.actions.declare_file("_objs/%s/%s.o" % (ctx.label.name, src.basename))
        args = ctx.actions.args()
        args.add("-c", src)
        args.add("-o", output)
        args.add("-ccbin", toolchain.compiler_executable)
        args.add("-DSHEAF_CUDA_EMULATED=0")
        args.add_all(_NVCC_FLAGS + _NVCC_COMPRESS + ctx.attr.copts)
        args.add_all(context.defines, before_each = "-D")
        args.add_all(context.includes, before_each = "-I")
        args.add_all(context.quote_includes, before_each = "-I")
        args.add_all(context.system_includes, before_each = "-isystem")
        ctx.actions.run(
            executable = CUDA_ROOT + "/bin/nvcc",
            arguments = [args],
            inputs = depset([src], transitive = [context.headers]),
            outputs = [output],
            # The release is part of the action's key, so that a new toolkit triggers recompilation.
            env = {"PATH": "/usr/bin:/bin", "SHEAF_CUDA_RELEASE": "%d.%d" % CUDA_RELEASE},
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % src.short_path,
        )
        objects.append(output)

    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = cc_common.configure_features(ctx = ctx, cc_toolchain = toolchain),
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        linking_contexts = [deps.linking_context],
        disallow_dynamic_library = True,
    )
    return [
        DefaultInfo(files = depset(objects)),
        CcInfo(compilation_context = context, linking_context = linking_context),
    ]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_host_library(name, srcs, emulated_srcs, deps = [], **kwargs):
    """C++ that calls NVIDIA's libraries, and its replacement under --config=emulated; empty without CUDA.

    Args:
      name: name of the target.
      srcs: sources that include CUDA's headers.
      emulated_srcs: sources that do not.
      deps: libraries; "@cuda//:runtime" is always included, and ":cublaslt", ":cudnn" and ":nccl" are header-only:
        kernels/cuda/library.h loads their functions.
      **kwargs: passed on to sheaf_library.
    """
    sheaf_library(
        name = name,
        srcs = select({
            _EMULATED: emulated_srcs,
            "//conditions:default": srcs if HAS_CUDA else [],
        }),
        deps = deps + select({
            _EMULATED: ["@cuda//:headers"],
            "//conditions:default": ["@cuda//:runtime"],
        }),
        local_defines = EMULATED_DEFINES,
        **kwargs
    )

def cuda_library(name, srcs, hdrs = [], deps = [], copts = [], **kwargs):
    """A library of CUDA kernels, linked with the CUDA runtime.

    Without CUDA nothing is compiled and only the headers remain; C++ code checks kHasCuda of
    "sheaf/kernels/cuda/config.h" (or, around includes, SHEAF_HAS_CUDA) before it calls their functions.

    Args:
      name: name of the target.
      srcs: .cu files.
      hdrs: headers, plain C++, included under "sheaf/" and their path in this tree.
      deps: libraries.
      copts: further flags for nvcc.
      **kwargs: passed on to both rules (visibility, testonly, tags).
    """
    headers = name + "_headers"
    sheaf_library(name = headers, hdrs = hdrs, deps = deps, **kwargs)
    _cuda_objects(
        name = name + "_nvcc",
        srcs = srcs,
        copts = _NVCC_OPTIMISE + copts,
        deps = [":" + headers, "@cuda//:runtime"],
        **kwargs
    )
    for src in srcs:  # Bazel 4 does not take a .cu file for C++
        native.genrule(
            name = name + "_" + src.replace(".", "_"),
            srcs = [src],
            outs = [src + ".cc"],
            cmd = "cp $< $@",
            tags = ["manual"],
        )
    sheaf_library(
        name = name + "_emulated",
        srcs = [src + ".cc" for src in srcs],
        # Like nvcc, which contracts a product and a sum into one operation unless told not to.
        copts = ["-Wno-unknown-pragmas"] + EMULATED_COPTS +
                (["-ffp-contract=off"] if "-fmad=false" in copts else ["-ffp-contract=fast"]),
        deps = [":" + headers, "@cuda//:headers"],
        local_defines = EMULATED_DEFINES,
        tags = ["manual"],
        **kwargs
    )
    native.alias(
        name = name,
        actual = select({
            _EMULATED: name + "_emulated",
            "//conditions:default": name + "_nvcc",
        }),
        **kwargs
    )
