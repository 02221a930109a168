"""A precompiled header, used by sources that are compiled with the same flags.

Where flags differ, g++ reads the header itself: only compile time depends on this.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    header = ctx.actions.declare_file(ctx.attr.name + ".h")
    ctx.actions.symlink(output = header, target_file = ctx.file.hdr)
    known = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    read = ctx.actions.declare_file(header.basename + ".gch")
    flags = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = "c++-compile",
        variables = cc_common.create_compile_variables(
            feature_configuration = features,
            cc_toolchain = toolchain,
            source_file = header.path,
            output_file = read.path,
            use_pic = ctx.var["COMPILATION_MODE"] != "opt",  # as Bazel's C++ rules choose
            include_directories = known.includes,
            quote_include_directories = known.quote_includes,
            system_include_directories = known.system_includes,
            preprocessor_defines = known.defines,
            user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts,
        ),
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(feature_configuration = features, action_name = "c++-compile"),
        # -fpch-deps records the header's dependencies in it, so that sources that use it can list them.
        arguments = ["-x", "c++-header"] + flags + ["-MD", "-MF", "/dev/null"],
        inputs = depset([header], transitive = [toolchain.all_files, known.headers]),
        outputs = [read],
        mnemonic = "CppPrecompile",
        progress_message = "Precompiling " + header.short_path,
    )
    headers = depset([header, read])

    # Headers are propagated together with their includes and macros: otherwise g++ would reject the precompiled header, and not find
    # the headers themselves either.
    own = CcInfo(compilation_context = cc_common.create_compilation_context(headers = headers))
    read_with = CcInfo(compilation_context = known)
    return [DefaultInfo(files = headers), cc_common.merge_cc_infos(cc_infos = [own, read_with])]

# Used with -include: hdr is in bazel-bin under the target's name.
precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "hdr": attr.label(allow_single_file = [".h"], mandatory = True),
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
