# Sourced by what builds with Bazel.

# drop_header_links FOLDER: of the workspace at FOLDER. Bazel leaves links behind to headers that have moved to another
# target, compilers find them there, and the build ends with "undeclared inclusion(s)". Links cost nothing to make again.
# Bazel is asked where they are: a fresh checkout has no bazel-out yet, but may inherit the outputs of an older one that
# stood in the same place.
drop_header_links() {
  local outputs
  outputs=$(cd "$1" && bazel info output_path)
  if [[ -e $outputs ]]; then
    find "$outputs/" -name _virtual_includes -prune -exec rm -rf {} +
  fi
}
