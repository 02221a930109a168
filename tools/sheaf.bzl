"""The rules that build all C++ of this tree, and the only place that sets its flags."""

load("//tools/bazel:precompiled.bzl", "precompiled_header")

_DEBUG = str(Label("//tools/bazel:debug"))

# g++ 12 takes members of std::variant and std::optional for uninitialised when it inlines their moves, and sees
# overlaps inside std::string's operator+ (its bug 105651).
_WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-Wno-restrict"]

# No contraction: the same bits on every instruction set. The other two flags assert properties that our code never relies on.
_FLOATING_POINT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

# g++ frees memory only beyond 2 GB, which few sources need: to look for garbage in a precompiled header takes a tenth of the time.
_MEMORY = "--param=ggc-min-heapsize=2000000"

def _optimise(level):
    return select({_DEBUG: ["-O0"], "//conditions:default": [level]})

def _copts(copts, march = "x86-64-v3"):
    # Tests are compiled more often than they run: -Og saves a third of the compile time; the code under test is still compiled as
    # usual.
    level = "-Og" if _is_of_tests() else "-O2"

    # Ours first, so that a target's own copts override them.
    return ["-std=c++20", "-march=" + march, _MEMORY] + _FLOATING_POINT + _WARNINGS + _optimise(level) + copts

def _is_of_tests():
    return native.package_name().split("/")[0] == "tests"

def sheaf_precompiled_header(name, hdr, deps = []):
    """The precompiled header of tests, or of other sources: saves the third, or quarter, of their compile time spent on common headers."""
    precompiled_header(name = name, hdr = hdr, deps = deps, copts = _copts([]), testonly = _is_of_tests())

# Packages that use tapes precompile more headers.
_OF_TENSORS = ["models", "nn", "tests/autograd", "tests/distributed", "tests/models", "tests/nn", "tools", "tools/bench"]

def _begin(deps, copts):
    """deps and copts with the precompiled header; unchanged for kernels, whose flags differ, and for projects that depend on this tree."""
    tree = Label("//tools:sheaf.bzl")
    ours = native.repository_name() == "@" + tree.workspace_name
    if not ours or native.package_name().split("/")[0] == "kernels":
        return deps, _copts(copts)
    headers = "tests/headers" if _is_of_tests() else "tools/headers"
    name = "tensors" if native.package_name() in _OF_TENSORS else "precompiled"
    root = tree.workspace_root + "/" if tree.workspace_root else ""
    begin = ["-include", "$(BINDIR)/" + root + headers + "/" + name + ".h"]

    # Without it g++ does not list precompiled headers among a source's dependencies, and Bazel does not recompile it when they
    # change.
    begin.append("-fpch-deps")

    # g++ 12 warns about precompiled headers as about our own code, and reports false out-of-bounds accesses in std::string copy and
    # search.
    ghosts = ["-Wno-array-bounds", "-Wno-stringop-overflow", "-Wno-stringop-overread"]
    return deps + [str(Label("//" + headers + ":" + name))], _copts(begin + ghosts + copts)

def sheaf_library(name, srcs = [], hdrs = [], deps = [], copts = [], **kwargs):
    """A library whose header core/tensor.h is included as "sheaf/core/tensor.h" everywhere.

    Args:
      name: name of the target.
      srcs: sources; headers that only this target includes belong to hdrs too.
      hdrs: headers, included under "sheaf/" and their path in this tree.
      deps: libraries.
      copts: further flags, such as ["-O3"] for kernels.
      **kwargs: passed on to cc_library (visibility, testonly, linkopts, tags, ...).
    """
    package = native.package_name()
    deps, copts = _begin(deps, copts)
    native.cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        # Without a strip prefix, Bazel takes headers relative to their package, so it is given again. Without headers, none is given:
        # it would add an include folder to the command line of all dependents.
        include_prefix = ("sheaf/" + package if package else "sheaf") if hdrs else None,
        deps = deps,
        copts = copts,
        linkstatic = True,
        **kwargs
    )

def sheaf_binary(name, srcs, deps = [], copts = [], **kwargs):
    """A program; our own libraries are linked in statically."""
    deps, copts = _begin(deps, copts)
    native.cc_binary(
        name = name,
        srcs = srcs,
        deps = deps,
        copts = copts,
        linkstatic = True,
        **kwargs
    )

def sheaf_test(name, srcs, deps = [], copts = [], size = "small", main = True, **kwargs):
    """A GoogleTest program; gtest and its main are added automatically.

    Tag it "threaded" if it runs several threads or ranks: those tests also run under TSan.

    Args:
      name: name of the target.
      srcs: sources.
      deps: libraries.
      copts: further flags.
      size: time limit: small 60 s, medium 300 s, large 900 s.
      main: False if a source brings its own main().
      **kwargs: passed on to cc_test (tags, data, args, env, ...).
    """
    deps, copts = _begin(deps, copts)
    native.cc_test(
        name = name,
        srcs = srcs,
        deps = deps + (["@gtest//:gtest_main"] if main else ["@gtest//:gtest"]),
        copts = copts,
        linkstatic = True,
        size = size,
        **kwargs
    )

# -fno-weak keeps inline functions of headers local to the object: if they were weak symbols, the linker could give the v4 copy of,
# say, std::vector's growth to code that runs on a v3 machine.
# -w: the v3 build of the same source reports its warnings; for v4, g++ 12 also warns about its own
# AVX-512 headers and about -fno-weak giving each object its own copy of an inline constant.
# The parameter matters only under AddressSanitizer: g++ 12 puts 64-byte vectors at misaligned addresses of its fake stacks (its bug
# 110027).
_SIMD = {
    "v3": [],
    "v4": ["-mprefer-vector-width=512", "-fno-weak", "-w", "--param", "asan-use-after-return=0"],
}

def sheaf_bf16_library(name, srcs, tiles = False, **kwargs):
    """A library whose code may run only where dot::available() (with tiles: amx::available()) is true.

    Both are declared in kernels/cpu/bf16_instructions.h. SHEAF_BF16_NAMESPACE is amx or dot.
    """
    sheaf_library(
        name = name,
        srcs = srcs,
        copts = ["-O3", "-march=x86-64-v4", "-mavx512bf16"] + (["-mamx-tile", "-mamx-bf16"] if tiles else []) + _SIMD["v4"],
        local_defines = ["SHEAF_BF16_NAMESPACE=" + ("amx" if tiles else "dot")],
        **kwargs
    )

def sheaf_simd_library(name, kernel_srcs, srcs, hdrs = [], deps = [], dispatcher_deps = [], copts = [], **kwargs):
    """A library whose kernels are compiled once for x86-64-v3 and once for x86-64-v4.

    A kernel source opens `namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE`, which is v3 or v4; a source
    in `srcs` declares both and chooses once at run time by __builtin_cpu_supports("x86-64-v4").
    Inline functions and variables of headers are separate copies in v4 objects: keep no state in them.

    Args:
      name: name of the library to depend on.
      kernel_srcs: sources compiled twice.
      srcs: sources compiled once: the dispatcher.
      hdrs: headers of both.
      dispatcher_deps: further libraries of the dispatcher.
      deps: libraries of both. Kernels must not include Eigen, whose inline code depends on -march.
      copts: further flags of both; kernels are built with -O3.
      **kwargs: passed on to all cc_library rules (testonly, tags, linkopts, ...).
    """
    package = native.package_name()
    visibility = kwargs.pop("visibility", None)
    headers = name + "_headers"
    sheaf_library(
        name = headers,
        hdrs = hdrs,
        deps = deps,
        visibility = ["//visibility:private"],
        **kwargs
    )
    for level, flags in _SIMD.items():
        native.cc_library(
            name = name + "_" + level,
            srcs = kernel_srcs,
            deps = [headers],
            copts = _copts([], march = "x86-64-" + level) + _optimise("-O3") + flags + copts,
            local_defines = ["SHEAF_SIMD_NAMESPACE=" + level],
            linkstatic = True,
            visibility = ["//visibility:private"],
            **kwargs
        )
    native.cc_library(
        name = name,
        srcs = srcs,
        deps = [headers] + [name + "_" + level for level in _SIMD] + dispatcher_deps,
        copts = _copts(copts),
        linkstatic = True,
        visibility = visibility,
        **kwargs
    )
