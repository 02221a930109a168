# Sourced by tools/test and tools/sanitize: runs Bazel's tests and counts test cases, not programs.
. tools/header_links.sh

cases_passed=0 cases_failed=0 cases_skipped=0

# run_tests FOLDER ARGUMENT...: `bazel test ARGUMENT...` in the workspace at FOLDER, added to the counts.
run_tests() {
  local folder=$1 events status=0 passed failed skipped
  shift
  events=$(mktemp)
  drop_header_links "$folder"
  (cd "$folder" && bazel test --keep_going --noshow_progress --color=no --curses=no \
    --build_event_json_file="$events" "$@") || status=$?
  if ((status == 4)); then  # Bazel's word for: built, but there was no test to run
    echo "no tests among: $*"
    status=0
  fi
  read -r passed failed skipped < <(count_cases "$events")
  rm -f "$events"
  # A failure that belongs to no test (a library, a BUILD file, Bazel itself) is one failure.
  if ((status != 0 && failed == 0)); then failed=1; fi
  cases_passed=$((cases_passed + passed))
  cases_failed=$((cases_failed + failed))
  cases_skipped=$((cases_skipped + skipped))
}

# count_cases EVENTS: prints "passed failed skipped" for a file of Bazel's build events, a line each.
# A test program that was not built counts as one failure.
count_cases() {
  awk '
    function count(xml, ok,   line, name, seen, bad, before) {
      before = failed
      while ((getline line < xml) > 0) {
        if (line ~ /^ *<testcase name="[^"]*" .*status="run"/) {
          passed++
          bad = 0
          if (line ~ / result="skipped"/) { passed--; skipped++ }
        }
        if (line ~ /<(failure|error) message="/ && !bad) { bad = 1; passed--; failed++ }
      }
      close(xml)
      if (!ok && failed == before) failed++
    }
    /^{"id":{"targetConfigured":/ && /"targetKind":"[a-z_]*test rule"/ {
      split($0, part, "\"label\":\"")
      sub(/".*/, "", part[2])
      is_test[part[2]] = 1
    }
    /^{"id":{"targetCompleted":/ && !/"success":true/ {
      split($0, part, "\"label\":\"")
      sub(/".*/, "", part[2])
      if (is_test[part[2]]) failed++
    }
    /^{"id":{"testResult":/ {
      ok = /"status":"PASSED"/
      if (match($0, /file:[^"]*\/test\.xml"/)) {
        xml = substr($0, RSTART + 7, RLENGTH - 8)
        count(xml, ok)
      } else if (!ok) failed++
    }
    END { printf "%d %d %d\n", passed, failed, skipped }
  ' "$1"
}

# closing_line: the last line of a run; fails if a test case did.
closing_line() {
  local skipped=""
  ((cases_skipped > 0)) && skipped=", $cases_skipped skipped"
  echo "$cases_passed passed, $cases_failed failed$skipped"
  ((cases_failed == 0))
}
