// tools/bundle_run_all, on a folder like those of tools/bundle, with programs that print what tests and `sheaf bench` would.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kPasses = R"(
echo '[ RUN      ] A.B'
echo '[       OK ] A.B (1 ms)'
echo '[ RUN      ] A.C'
echo '[       OK ] A.C (2 ms)')";
constexpr const char* kSkips = R"(
echo '[ RUN      ] A.B'
echo 'not run: no GPU here (as | the driver says)'
echo '[  SKIPPED ] A.B (0 ms)')";
constexpr const char* kFails = R"(
echo '[ RUN      ] A.B'
echo '[       OK ] A.B (1 ms)'
echo '[  FAILED  ] A.C (2 ms)'
exit 1)";
constexpr const char* kHangs = "[[ $* == *-A.Hangs* ]] || { echo '[ RUN      ] A.Hangs'; sleep 100; }";
// A suite "gemm" that measures, one that is slow, and one that breaks.
constexpr const char* kBench = R"(
suite=$2; shift 2
while [[ $1 != --markdown ]]; do shift; done
echo "$suite/first: 1 GB/s" >&2
case $suite in
  slow) sleep 100 ;;
  breaks) echo 'sheaf: [cudaX] misaligned address' >&2; exit 70 ;;
esac
if [[ $suite == words || $suite == step ]]; then printf '%s\n' "${*:5}" >"$2"; exit; fi
printf '%s\n' 'NVIDIA Test' '' "| $suite/first | 1 | UNSOUND: | " "| $suite/second | not available: no | " >"$2")";
constexpr const char* kNoGpu =
    "echo 'sheaf: [device] SHEAF_DEVICE=cuda, but there is no GPU: nothing' >&2; exit 64";

constexpr const char* kShort = "4";  // seconds, the time limit where something hangs: a busy machine may need some for the rest

class Bundle {
 public:
  Bundle() {
    for (const char* sub : {"bin", "data", "path", "lib/spare/rdma"})
      fs::create_directories(folder_ / sub);
    fs::copy_file("tools/bundle_run_all", folder_ / "run_all");
    std::ofstream(folder_ / "commit") << "abc123\n";
    add("path/nvidia-smi", "echo 'No devices were found'; exit 6");
  }
  void add(const std::string& program, const std::string& script) const {
    const std::string path = folder_ / program;
    std::ofstream(path) << "#!/bin/bash\n" << script << "\n";
    fs::permissions(path, fs::perms::owner_all);
  }
  /// Runs it and returns its exit status; report() is its report.
  int run(const std::string& words, const std::string& time_limit = "60") {
    const std::string command = "cd '" + folder_.path() +
                                "' && PATH=\"$PWD/path:$PATH\" CUDA_PATH=/nowhere " +
                                "SHEAF_TIME_LIMIT=" + time_limit + " bash run_all " + words + " report.md >out 2>&1";
    const int status = std::system(command.c_str());
    std::stringstream text;
    text << std::ifstream(folder_ / "report.md").rdbuf();
    report_ = text.str();
    return WEXITSTATUS(status);
  }
  const std::string& report() const { return report_; }
  std::string operator/(const std::string& name) const { return folder_ / name; }

 private:
  ScratchFolder folder_;
  std::string report_;
};

TEST(RunAll, WithoutAGpuNothingFails) {
  Bundle bundle;
  bundle.add("bin/a_test", kSkips);
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run(""), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("commit abc123"));
  EXPECT_THAT(bundle.report(), HasSubstr("| a_test | skipped | 0 | 0 | 1 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("not run: no GPU here (as \\| the driver says) |"));
  EXPECT_THAT(bundle.report(), HasSubstr("0 passed, 0 failed, 1 skipped."));
  for (const char* suite : {"gemm", "kernels", "attention", "step/gpt2-124m", "step/gpt2-774m",
                            "step/gpt2-1558m", "step/llama3-8b", "memory", "comm", "allocator"})
    EXPECT_THAT(bundle.report(), HasSubstr("| " + std::string(suite) + " | not run: no GPU | 0 |"));
  EXPECT_THAT(bundle.report(), Not(HasSubstr("###")));
}

TEST(RunAll, AGpuThatIsListedMustBeFound) {
  Bundle bundle;
  bundle.add("path/nvidia-smi", "echo 'GPU 0: NVIDIA Test (UUID: GPU-1)'");
  bundle.add("bin/a_test", kSkips);
  bundle.add("bin/b_test", kPasses);
  bundle.add("bin/sheaf", kNoGpu);
  const std::string sentence = "**nvidia-smi lists a GPU, but some ";
  EXPECT_EQ(bundle.run("--tests"), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| a_test | failed | 0 | 1 | 1 | "));
  EXPECT_THAT(bundle.report(),
              HasSubstr("| found no GPU, though nvidia-smi lists one: not run: no GPU here (as"));
  EXPECT_THAT(bundle.report(), HasSubstr("| b_test | passed | 2 | 0 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("2 passed, 1 failed, 1 skipped."));
  EXPECT_THAT(bundle.report(), HasSubstr(sentence + "tests found none"));
  EXPECT_EQ(bundle.run("--benchmarks --suites gemm"), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| gemm | FAILED | 0 | 0 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr(sentence + "suites found none"));
  EXPECT_EQ(bundle.run("--tests --only b_"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), Not(HasSubstr(sentence)));
  bundle.add("path/compute-sanitizer", "while [[ $1 != *_test ]]; do shift; done; \"$@\"");
  EXPECT_EQ(bundle.run("--sanitize --only a_"), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| a_test | memcheck | test failed | "));
}

// A machine's own libraries for InfiniBand come first: from the bundle it gets only those that it lacks.
TEST(RunAll, LibrariesThatTheMachineLacksAreFound) {
  Bundle bundle;
  for (const char* name : {"libibverbs.so.1", "libnl-3.so.200", "librdmacm.so.1"})
    bundle.add(std::string("lib/spare/rdma/") + name, "");
  bundle.add("path/ldd", R"(
echo 'libother.so.1 => not found'
echo 'librdmacm.so.1 => /usr/lib/librdmacm.so.1 (0x1)'
if [[ $LD_LIBRARY_PATH != *lib/lacking* ]]; then echo 'libibverbs.so.1 => not found'
elif [[ ! -e ${LD_LIBRARY_PATH%%:*}/libnl-3.so.200 ]]; then echo 'libnl-3.so.200 => not found'; fi)");
  bundle.add("bin/a_test", "echo not run: $(ls \"${LD_LIBRARY_PATH%%:*}\")");
  bundle.add("bin/sheaf", kNoGpu);
  for (int i = 0; i < 2; ++i) {  // again, with the leftovers of the first run
    EXPECT_EQ(bundle.run("--tests"), 0) << bundle.report();
    EXPECT_THAT(bundle.report(), HasSubstr("| not run: libibverbs.so.1 libnl-3.so.200 |"));
  }
  bundle.add("path/ldd", "echo 'libstdc++.so.6 => not found'; yes '=> /a/library' | head -n 99999");
  EXPECT_EQ(bundle.run("--tests"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("| not run: rdma |"));  // in lib/spare
}

TEST(RunAll, TheRealCommandFindsNoGpu) {
  if constexpr (kernels::kHasCuda)
    if (kernels::cuda::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  Bundle bundle;
  fs::create_symlink(fs::absolute("tools/sheaf"), bundle / "bin/sheaf");
  EXPECT_EQ(bundle.run("--benchmarks --quick"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("| attention | not run: no GPU | 0 | 0 | 0 |"));
  EXPECT_THAT(bundle.report(), Not(HasSubstr("## Tests")));
}

TEST(RunAll, TestsThatPassFailAndHang) {
  Bundle bundle;
  bundle.add("bin/passes_test", kPasses);
  bundle.add("bin/fails_test", kFails);
  bundle.add("bin/hangs_test", kHangs);
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run("--tests", kShort), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| passes_test | passed | 2 | 0 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("| fails_test | failed | 1 | 1 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("| A.C (2 ms) |"));
  EXPECT_THAT(bundle.report(), HasSubstr("stopped after 4 s: A.Hangs |"));
  EXPECT_THAT(bundle.report(), HasSubstr("3 passed, 2 failed, 0 skipped."));
  EXPECT_THAT(bundle.report(), Not(HasSubstr("## Benchmarks")));
}

// A program of tests A.1 to A.4, of which it runs those that its filter does not leave out: A.2 hangs, and the GPU faults in A.3.
constexpr const char* kFourTests = R"sh(
echo "$@" >>words
filter=$*
filter=${filter##*=}
for i in 1 2 3 4; do
  if [[ $filter == A.? && $filter != A.$i || $filter == *-* && :${filter#*-}: == *:A.$i:* ]]; then continue; fi
  echo "[ RUN      ] A.$i"
  if ((i == 2)); then sleep 100; fi
  if ((i == 3)) || [[ -n $faulted ]]; then
    faulted=1
    echo 'what(): an illegal memory access was encountered'
    echo "[  FAILED  ] A.$i (1 ms)"
  else
    echo "[       OK ] A.$i (1 ms)"
  fi
done
if [[ -n $faulted ]]; then exit 1; fi)sh";

TEST(RunAll, TestsBehindOneThatEndedTheirProgramRunAfterwards) {
  Bundle bundle;
  bundle.add("bin/four_test", kFourTests);
  bundle.add("bin/passes_test", kPasses);
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run("--tests", kShort), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| four_test | failed | 1 | 1 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("| stopped after 4 s: A.2 |"));
  EXPECT_THAT(bundle.report(), HasSubstr("\n\nBehind tests that ended their program:\n\n| program |"));
  EXPECT_THAT(bundle.report(), HasSubstr("| four_test.2 | failed | 0 | 1 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("| four_test.3 | passed | 1 | 0 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("4 passed, 2 failed, 0 skipped."));
  EXPECT_LT(bundle.report().find("| passes_test |"), bundle.report().find("| four_test.2 |"));
  std::stringstream words;
  words << std::ifstream(bundle / "data/words").rdbuf();
  const std::string color = "--gtest_color=no", filter = color + " --gtest_filter=";
  EXPECT_EQ(words.str(), color + "\n" + filter + "-A.1:A.2\n" + filter + "A.3\n" + filter + "-A.1:A.2:A.3\n");
  fs::remove(bundle / "data/words");
  EXPECT_EQ(bundle.run("--tests --only four --gtest 'A.*-A.1'", kShort), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("1 passed, 2 failed, 0 skipped."));
  words.str("");
  words << std::ifstream(bundle / "data/words").rdbuf();
  EXPECT_THAT(words.str(), HasSubstr(filter + "A.*-A.1\n" + filter + "A.*-A.1:A.2\n"));
}

TEST(RunAll, FailuresAreInTheReportInTheirOwnWords) {
  Bundle bundle;
  bundle.add("bin/fails_test", R"(
echo '[ RUN      ] A.C'
echo 'a_test.cc:7: Failure'
echo 'Expected: 1'
echo '[  FAILED  ] A.C (2 ms)'
exit 1)");
  bundle.add("bin/dies_test", "[[ $* == *-A.D* ]] || { echo '[ RUN      ] A.D'; echo 'what(): a fault'; kill -ABRT $$; }");
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run("--tests --jobs 2"), 1);
  EXPECT_THAT(bundle.report(),
              HasSubstr("### fails_test\n\n```\na_test.cc:7: Failure\nExpected: 1\n"));
  EXPECT_THAT(bundle.report(), HasSubstr("| status 134: A.D what(): a fault |"));
  EXPECT_THAT(bundle.report(), HasSubstr("### dies_test\n\n```\n[ RUN      ] A.D\n"));
  EXPECT_THAT(bundle.report(), HasSubstr("0 passed, 2 failed, 0 skipped."));
  EXPECT_TRUE(fs::exists(bundle / "report_logs.tar.gz"));
  EXPECT_TRUE(fs::exists(bundle / "logs/machine.log"));
}

TEST(RunAll, WhereTheGpuFaultedTheLaunchIsNamed) {
  Bundle bundle;
  // The second test has a GPU fault, whose launch is known only if the host waits for each launch.
  bundle.add("bin/faults_test", R"(
echo "$@" >>words
if [[ $* == *-A.Wrong* ]]; then exit; fi
echo '[ RUN      ] A.Wrong'
echo '[  FAILED  ] A.Wrong (1 ms)'
echo '[ RUN      ] A.Faults'
where=cudaStreamSynchronize
if [[ -n $CUDA_LAUNCH_BLOCKING ]]; then where=softmax; fi
echo "what(): [$where] an illegal memory access was encountered"
kill -ABRT $$)");
  bundle.add("bin/fails_test", kFails);
  bundle.add("bin/sheaf", R"(
if [[ $* == *'--filter gemm/b'* ]]; then echo "[$CUDA_LAUNCH_BLOCKING] misaligned address"; exit 1; fi
echo 'gemm/a: 1 GB/s'
echo 'gemm/b: not available: [cudaEventSynchronize] misaligned address'
exit 1)");
  EXPECT_EQ(bundle.run("--tests --benchmarks --suites gemm"), 1);
  const std::string traced = "Launch by launch:\n\n```\n";
  EXPECT_THAT(bundle.report(), HasSubstr(traced + "what(): [softmax] an illegal memory access"));
  EXPECT_THAT(bundle.report(), HasSubstr(traced + "[1] misaligned address\n```"));
  const size_t first = bundle.report().find(traced),
               second = bundle.report().find(traced, first + 1);
  EXPECT_EQ(bundle.report().find(traced, second + 1), std::string::npos);
  std::stringstream words;
  words << std::ifstream(bundle / "data/words").rdbuf();
  EXPECT_EQ(words.str(), "--gtest_color=no\n--gtest_color=no --gtest_filter=A.Faults\n--gtest_color=no --gtest_filter=-A.Wrong:A.Faults\n");
  // A sanitizer knows the place.
  bundle.add("path/compute-sanitizer", R"(
echo '========= Invalid __global__ read of size 16 bytes'
echo '=========     at forward(Walk<2>)+0x40 in softmax.cu:150')");
  EXPECT_EQ(bundle.run("--tests --only faults"), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("in softmax.cu:150\n```"));
}

TEST(RunAll, TestsAreChosenAndWhatTellsMostComesFirst) {
  Bundle bundle;
  for (const char* name : {"a", "kernels_cuda_copy", "kernels_cuda_gpu", "models_gpu"})
    bundle.add(std::string("bin/") + name + "_test", "echo \"$@\" >words; " + std::string(kPasses));
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run("--tests --only 'kernels_ models_' --gtest 'A.*'"), 0);
  const size_t gpu = bundle.report().find("| kernels_cuda_gpu_test |"),
               models = bundle.report().find("| models_gpu_test |"),
               copy = bundle.report().find("| kernels_cuda_copy_test |");
  EXPECT_LT(gpu, models);
  EXPECT_LT(models, copy);
  EXPECT_NE(copy, std::string::npos);
  EXPECT_THAT(bundle.report(), Not(HasSubstr("| a_test |")));
  std::string words;
  std::getline(std::ifstream(bundle / "data/words"), words);
  EXPECT_EQ(words, "--gtest_color=no --gtest_filter=A.*");
}

TEST(RunAll, KeepsToItsTime) {
  Bundle bundle;
  bundle.add("bin/a_test", kPasses);
  bundle.add("bin/b_test", "sleep 8; " + std::string(kPasses));
  bundle.add("bin/c_test", kPasses);
  bundle.add("bin/sheaf", kBench);
  EXPECT_EQ(bundle.run("--within 12 --suites gemm"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("| b_test | passed | 2 |"));
  EXPECT_THAT(bundle.report(), HasSubstr("| c_test | not run | 0 | 0 | 0 | 0 | no time left |"));
  EXPECT_THAT(bundle.report(), HasSubstr("No time was left for 1 programs."));
  EXPECT_THAT(bundle.report(), HasSubstr("| gemm | not run: no time left |"));
}

TEST(RunAll, OneOfFewMayTakeMoreThanAQuarterOfTheTime) {
  Bundle bundle;
  bundle.add("bin/sheaf", "sleep 5; " + std::string(kBench));
  bundle.add("path/python3", "case \"$*\" in *compare.py*) sleep 5; echo 'a table' ;; esac");
  EXPECT_EQ(bundle.run("--benchmarks --suites gemm --within 16", ""), 0);
  EXPECT_THAT(bundle.report(), HasSubstr("| gemm | measured | 2 |"));
  EXPECT_EQ(bundle.run("--peers --cases small --within 16", ""), 0);
  EXPECT_THAT(bundle.report(), HasSubstr("### small\n\na table"));
}

TEST(RunAll, SuitesBringTheirTables) {
  Bundle bundle;
  bundle.add("bin/sheaf", kBench);
  EXPECT_EQ(bundle.run("--benchmarks --suites 'gemm'"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("| gemm | measured | 2 | 1 | 1 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("### gemm\n\nNVIDIA Test\n\n| gemm/first | 1 |"));
  EXPECT_EQ(bundle.run("--benchmarks --suites 'slow breaks'", kShort), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| slow | FAILED | 0 | 0 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("stopped after 4 s, behind slow/first: 1 GB/s |"));
  EXPECT_THAT(bundle.report(),
              HasSubstr("### slow, as far as it came\n\n```\nslow/first: 1 GB/s\n```"));
  EXPECT_THAT(bundle.report(), HasSubstr("[cudaX] misaligned address |"));
  EXPECT_EQ(bundle.run("--benchmarks --suites words --samples 9 --filter f32"), 0);
  EXPECT_THAT(bundle.report(), HasSubstr("| words | measured | 0 | 0 | 0 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("### words\n\n--samples 9 --filter f32"));
  EXPECT_EQ(bundle.run("--benchmarks --suites 'gemm/first words/a' --samples 9"), 0);
  EXPECT_THAT(bundle.report(), HasSubstr("| gemm/first | measured | 2 | 1 | 1 | "));
  EXPECT_THAT(bundle.report(), HasSubstr("### words/a\n\n--samples 9 --filter words/a\n"));
  EXPECT_EQ(bundle.run("--benchmarks --suites step/a"), 0);
  EXPECT_THAT(bundle.report(), AllOf(HasSubstr("### step/a\n\n--filter step/a --traces /"), HasSubstr("/logs\n")));
}

TEST(RunAll, TheSanitizerIsUsedWhereItIs) {
  Bundle bundle;
  bundle.add("bin/passes_test", kPasses);
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run("--sanitize"), 0);
  EXPECT_THAT(bundle.report(),
              HasSubstr("Not run: there is no compute-sanitizer in PATH nor in /nowhere/bin."));
  // One that finds a race.
  bundle.add("path/compute-sanitizer", R"(
tool=$2 words="$*"
while [[ $1 != *_test ]]; do shift; done
"$@"
if [[ $tool == memcheck && $words != *'--report-api-errors no'* ]]; then exit 86; fi
if [[ $tool == racecheck ]]; then
  echo '========= Error: Race reported between Write and Read'
  echo '========= ERROR SUMMARY: 1 error'
  exit 86
fi)");
  EXPECT_EQ(bundle.run("--sanitize"), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("| passes_test | memcheck | clean | "));
  EXPECT_THAT(bundle.report(), HasSubstr("| passes_test | racecheck | ERRORS | "));
  EXPECT_THAT(bundle.report(), HasSubstr("Race reported between Write and Read |"));
}

TEST(RunAll, PyTorchIsAskedWhereItFindsAGpu) {
  Bundle bundle;
  bundle.add("bin/sheaf", kNoGpu);
  bundle.add("path/python3", "exit 1");
  EXPECT_EQ(bundle.run("--peers"), 0);
  EXPECT_THAT(bundle.report(), HasSubstr("Not run: python3 has no PyTorch that finds a GPU."));
  // A test with two cases, of which the second breaks.
  bundle.add("path/python3", R"(
case "$*" in
  *compare.py*--cases\ breaks*) echo 'out of memory' >&2; exit 1 ;;
  *compare.py*) echo "| $* |" ;;
  *cases.on*) echo 'small breaks' ;;
esac)");
  EXPECT_EQ(bundle.run("--peers --samples 2"), 1);
  EXPECT_THAT(bundle.report(), HasSubstr("### small\n\n| -B -W ignore::UserWarning /"));
  EXPECT_THAT(bundle.report(), HasSubstr("--device cuda --cases small --rounds 2 --sheaf /"));
  EXPECT_THAT(bundle.report(), HasSubstr("--sheaf-version abc123 "));
  EXPECT_THAT(bundle.report(), HasSubstr("--samples 2 |"));
  EXPECT_THAT(bundle.report(), HasSubstr("### breaks\n\nFAILED, status 1: out of memory"));
  EXPECT_THAT(bundle.report(), Not(HasSubstr("## Tests")));
}

TEST(RunAll, ProgramsHearOfThePythonEnvironment) {
  unsetenv("VIRTUAL_ENV");
  Bundle bundle;
  bundle.add("path/python3", "echo /opt/environment");
  bundle.add("bin/a_test", "echo \"not run: in $VIRTUAL_ENV\"");
  EXPECT_EQ(bundle.run("--tests"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("not run: in /opt/environment |"));
  setenv("VIRTUAL_ENV", "/its/own", 1);
  EXPECT_EQ(bundle.run("--tests"), 0) << bundle.report();
  EXPECT_THAT(bundle.report(), HasSubstr("not run: in /its/own |"));
  unsetenv("VIRTUAL_ENV");
}

TEST(RunAll, UnknownOptionsAreRefused) {
  Bundle bundle;
  bundle.add("bin/sheaf", kNoGpu);
  EXPECT_EQ(bundle.run("--fast"), 64);
}

}  // namespace
}  // namespace sheaf
