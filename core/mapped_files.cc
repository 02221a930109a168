#include "sheaf/core/mapped_files.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>

#include <unistd.h>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

// Read by a signal handler, which may neither lock nor allocate.
struct Entry {
  std::atomic<uintptr_t> begin = 0;  // 0: the entry is free
  size_t bytes = 0;
  char path[512] = "";
};
Entry entries[256];  // files beyond these have no name, and end the process by the signal
std::mutex mutex;    // of those who write entries

// In one call, because other ranks may write at the same time.
void say(const char* path) {
  char line[640] = "sheaf: [file] '";
  std::strcat(std::strcat(line, path), "' became shorter while it was read, or its disk fails\n");
  if (write(STDERR_FILENO, line, std::strlen(line)) < 0) { /* nobody hears */ }
}

void on_lost_page(int, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Entry& e : entries) {
    const uintptr_t begin = e.begin.load(std::memory_order_acquire);
    if (begin == 0 || at < begin || at - begin >= e.bytes) continue;
    say(e.path);
    _exit(static_cast<int>(ExitCode::kIo));
  }
  std::signal(SIGBUS, SIG_DFL);  // of other memory: the same access follows, and ends the process
}

}  // namespace

void name_files_that_lose_pages() {
  struct sigaction action = {};
  action.sa_sigaction = on_lost_page;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

void detail::note_mapping(const void* begin, size_t bytes, const std::string& path) {
  const std::lock_guard lock(mutex);
  for (Entry& e : entries) {
    if (e.begin.load(std::memory_order_relaxed) != 0) continue;
    e.bytes = bytes;
    std::strncpy(e.path, path.c_str(), sizeof e.path - 1);
    e.begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
    return;
  }
}

void detail::forget_mapping(const void* begin) {
  const std::lock_guard lock(mutex);
  for (Entry& e : entries)
    if (e.begin.load(std::memory_order_relaxed) == reinterpret_cast<uintptr_t>(begin)) e.begin.store(0, std::memory_order_relaxed);
}

}  // namespace sheaf
