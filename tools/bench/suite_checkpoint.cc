// checkpoint: saving and loading a model with its optimizer's state, committed and verified as in training, against writing (and
// syncing) or reading as many bytes; and how long a step is blocked by an asynchronous save, against a synchronous one. Before each
// read the kernel is asked to drop the files' pages. The files are in the system's temporary folder: TMPDIR chooses the disk.
#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/models/async_saver.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/rank_job.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

namespace fs = std::filesystem;
constexpr size_t kPiece = size_t{8} << 20;  // of a raw write or read

class OpenFile {
 public:
  OpenFile(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    check<IoError>(fd_ >= 0, "[bench] cannot open ", path);
  }
  ~OpenFile() { close(fd_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

void raw_write(const std::string& path, const Array& piece, int64_t bytes) {
  const OpenFile file(path, O_CREAT | O_TRUNC | O_WRONLY);
  while (bytes > 0) {
    const ssize_t n = write(file.fd(), piece.as<char>(), std::min<size_t>(kPiece, bytes));
    check<IoError>(n > 0, "[bench] cannot write ", path);
    bytes -= n;
  }
  check<IoError>(fsync(file.fd()) == 0, "[bench] cannot sync ", path);
}

void raw_read(const std::string& path, const Array& into) {
  const OpenFile file(path, O_RDONLY);
  while (read(file.fd(), into.as<char>(), kPiece) > 0) {
  }
}

// Drops clean pages from the page cache.
void forget_pages(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) {
      const OpenFile file(entry.path().string(), O_RDONLY);
      posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
    }
}

int64_t bytes_in(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) bytes += static_cast<int64_t>(entry.file_size());
  return bytes;
}

double seconds_of(const std::function<void()>& call) {
  const double begin = now();
  call();
  return now() - begin;
}

}  // namespace

void checkpoint_suite(Session& session) {
  const std::string name = session.options().quick ? "nanogpt-f32-12x64" : "gpt2-124m-f32-4x64";
  const std::string save = name + "-save", load = name + "-load", async = name + "-save-async";
  if (!session.wants("checkpoint", save) && !session.wants("checkpoint", load) && !session.wants("checkpoint", async)) return;
  const models::TrainConfig config = training_config(name);
  World world = solo_world();
  models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
  step.run(0, random_tokens(config)).loss.item();  // creates the optimizer's state
  const TemporaryFolder folder;
  const std::string checkpoints = folder.path() + "/checkpoints", raw = folder.path() + "/raw";
  const Array piece(kF32, {static_cast<int64_t>(kPiece / 4)});
  const auto save_step = [&](int64_t number) {
    models::save_checkpoint(checkpoints, number,
                            models::checkpoint_pieces(step.model(), {&step.optimizer()}),
                            Json(), 0);
  };
  save_step(0);
  const std::string first = step_folder(checkpoints, 0);
  const int64_t bytes = bytes_in(first);
  raw_write(raw, piece, bytes);

  session.line(
      "checkpoint", save, Unit::gigabytes_per_second,
      [&](Line& line) {
        auto [own, peers] = session.turns(
            [&] {
              const double seconds = seconds_of([&] { save_step(1); });
              fs::remove_all(step_folder(checkpoints, 1));
              return seconds;
            },
            [&] {
              const double seconds = seconds_of([&] { raw_write(raw + "-1", piece, bytes); });
              fs::remove(raw + "-1");
              return seconds;
            },
            10);
        line.samples_s = std::move(own);
        line.peer = "write + fsync";
        line.peer_value = figure(line.unit, static_cast<double>(bytes), quantile(peers, 0.5));
        line.more = {{"MiB", static_cast<double>(bytes) / (1 << 20)}};
      },
      static_cast<double>(bytes));
  // How long a step is blocked by a save of either kind.
  session.line("checkpoint", async, Unit::seconds, [&](Line& line) {
    models::AsyncSaver saver(world);
    const auto save_async = [&] {
      const double seconds = seconds_of([&] { saver.save(checkpoints, 1, step.model(), {&step.optimizer()}, {.keep = 0}); });
      saver.finish();
      fs::remove_all(step_folder(checkpoints, 1));
      return seconds;
    };
    const auto save_now = [&] {
      const double seconds = seconds_of([&] { save_step(1); });
      fs::remove_all(step_folder(checkpoints, 1));
      return seconds;
    };
    auto [own, peers] = session.turns(save_async, save_now, 10);
    line.samples_s = std::move(own);
    line.peer = "save";
    line.peer_value = quantile(peers, 0.5);
  });
  session.line(
      "checkpoint", load, Unit::gigabytes_per_second,
      [&](Line& line) {
        auto [own, peers] = session.turns(
            [&] {
              forget_pages(folder.path());
              return seconds_of([&] {
                models::Checkpoint checkpoint = models::Checkpoint::open(first);
                models::load_state(checkpoint, step.model(), {&step.optimizer()});
              });
            },
            [&] {
              forget_pages(folder.path());
              return seconds_of([&] { raw_read(raw, piece); });
            },
            10);
        line.samples_s = std::move(own);
        line.peer = "read";
        line.peer_value = figure(line.unit, static_cast<double>(bytes), quantile(peers, 0.5));
        line.more = {{"MiB", static_cast<double>(bytes) / (1 << 20)}};
      },
      static_cast<double>(bytes));
}

}  // namespace sheaf::bench
