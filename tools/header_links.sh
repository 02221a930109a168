# Sourced by what builds with Bazel.

# drop_header_links FOLDER: of the workspace at FOLDER. Bazel leaves links behind to headers that have moved to another
# target, compilers find them there, and the build ends with "undeclared inclusion(s)". Links cost nothing to make again.
drop_header_links() {
  if [[ -e $1/bazel-out ]]; then
    find "$1/bazel-out/" -name _virtual_includes -prune -exec rm -rf {} +
  fi
}
