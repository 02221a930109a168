"""Stands in for rules_cc: Debian's 0.0.4 does not load in Debian's Bazel 4.2.3.

Bazel's own repositories load these names; all of them are native rules in this version.
"""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_proto_library = native.cc_proto_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_import = native.objc_import
objc_library = native.objc_library

# These two have no native counterpart in Bazel 4; they are loaded but never called here.
cc_flags_supplier = None
compiler_flag = None
