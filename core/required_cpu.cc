// All of Sheaf but this file is compiled for x86-64-v3, including the constructors of its static objects. On a CPU without it the
// first of them would end the program with SIGILL and no message: this runs before them.
#include <unistd.h>

#include <cstddef>

namespace {

constexpr char kMessage[] =
    "sheaf: this CPU lacks AVX2, FMA, BMI2 or F16C, which Sheaf needs (x86-64-v3: Intel's since Haswell, AMD's since Excavator)\n";

[[gnu::constructor(101)]] void require_cpu() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) return;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  _exit(64);
}

}  // namespace
