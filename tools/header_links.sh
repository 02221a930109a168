# Sourced by scripts that build with Bazel.

# drop_header_links FOLDER: removes the header links of the workspace at FOLDER. Bazel keeps stale links to headers that have
# moved to another target, compilers find them, and the build fails with "undeclared inclusion(s)". Links are cheap to recreate.
# Bazel is asked for their folder: a fresh checkout has no bazel-out yet, but may inherit the outputs of an older one at the
# same path.
drop_header_links() {
  local outputs
  outputs=$(cd "$1" && bazel info output_path)
  if [[ -e $outputs ]]; then
    find "$outputs/" -name _virtual_includes -prune -exec rm -rf {} +
  fi
}
