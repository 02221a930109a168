#include "sheaf/core/file_lock.h"

#include <gtest/gtest.h>

#include <csignal>

#include <sys/wait.h>
#include <unistd.h>

#include "sheaf/core/error.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using State = FileLock::State;

TEST(FileLock, OneAtATime) {
  ScratchFolder folder;
  {
    const FileLock first(folder / "lock");
    EXPECT_EQ(first.state(), State::taken);
    EXPECT_EQ(FileLock(folder / "lock").state(), State::elsewhere);
    EXPECT_EQ(FileLock(folder / "other").state(), State::taken);
  }
  EXPECT_EQ(FileLock(folder / "lock").state(), State::taken);
  EXPECT_THROW(FileLock(folder / "no/such/folder"), IoError);
}

TEST(FileLock, AProcessThatIsKilledLetsGo) {
  ScratchFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    const FileLock lock(folder / "lock");
    raise(lock.state() == State::taken ? SIGKILL : SIGTERM);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_EQ(FileLock(folder / "lock").state(), State::taken);
}

}  // namespace
}  // namespace sheaf
