// init: from the start of a process to the end of its first step, against the unavoidable cost: first-touching as much memory, and a
// step. Every sample is a new process.

#include <sys/mman.h>

#include "sheaf/core/parallel.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/init.h"
#include "sheaf/tools/bench/rank_job.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

// Seconds to touch every page of `bytes` freshly allocated bytes on all threads.
double first_touch(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  const double begin = now();
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check<OutOfMemory>(p != MAP_FAILED, "[bench] cannot map ", bytes, " bytes");
  parallel_for(bytes / 4096, 256, [&](int64_t first, int64_t last) {
    for (int64_t page = first; page < last; ++page) static_cast<volatile char*>(p)[page * 4096] = 1;
  });
  const double seconds = now() - begin;
  munmap(p, size);
  return seconds;
}

struct Start {
  std::vector<double> materialize, first_step, touch_parameters, touch_peak, later_step;
};

Start run_starts(const Session& session, const std::string& name) {
  Start all;
  for (int i = 0; i < session.samples(5); ++i) {
    char begin[40];
    std::snprintf(begin, sizeof begin, "%.9f", now());
    const Json answer = run_ranks(session, {.words = {"init", name, begin},
                                            .ranks = 1,
                                            .threads = session.machine().threads,
                                            .communicator = ""});
    const auto take = [&](const char* what) { return answer.at(what).as_double(); };
    all.materialize.push_back(take("materialize"));
    all.first_step.push_back(take("first_step"));
    all.touch_parameters.push_back(take("touch_parameters"));
    all.touch_peak.push_back(take("touch_peak"));
    all.later_step.push_back(take("later_step"));
  }
  return all;
}

}  // namespace

// words: case, time at which the launcher was called. The first step is timed from there; building the model, from the start of this
// function.
Json init_rank(const std::vector<std::string>& words) {
  const double begin = now();
  const models::TrainConfig config = training_config(words.at(0));
  World world = distributed::init_from_env();
  Allocator& memory = *RankContext::current().cpu;
  Json answer;
  world.guard([&] {
    models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
    const models::FillBatch fill = random_tokens(config);
    answer.set("materialize", now() - begin);
    const int64_t parameters = memory.stats().live;
    step.run(0, fill).loss.item();
    answer.set("first_step", now() - std::stod(words.at(1)));
    std::vector<double> later;
    for (int i = 1; i <= 3; ++i) {
      const double since = now();
      step.run(i, fill).loss.item();
      later.push_back(now() - since);
    }
    answer.set("later_step", quantile(later, 0.5));
    answer.set("touch_parameters", first_touch(parameters));
    answer.set("touch_peak", first_touch(memory.stats().peak));
  });
  return answer;
}

void init_suite(Session& session) {
  const std::string name = session.options().quick ? "nanogpt-f32-12x64" : "gpt2-124m-f32-4x64";
  const std::string materialize = name + "-materialize", first = name + "-first-step";
  if (!session.wants("init", materialize) && !session.wants("init", first)) return;
  Start all;
  // One run of processes serves both lines; the first line that is selected makes it.
  const auto starts = [&]() -> const Start& {
    if (all.first_step.empty()) all = run_starts(session, name);
    return all;
  };
  session.line("init", materialize, Unit::seconds, [&](Line& line) {
    line.samples_s = starts().materialize;
    line.peer = "first touch";
    line.peer_value = quantile(starts().touch_parameters, 0.5);
  });
  session.line("init", first, Unit::seconds, [&](Line& line) {
    line.samples_s = starts().first_step;
    line.peer = "first touch + later step";
    const double touch = quantile(starts().touch_peak, 0.5),
                 later = quantile(starts().later_step, 0.5);
    line.peer_value = touch + later;
    line.more = {{"first touch s", touch},
                 {"later step s", later},
                 {"beyond s", quantile(line.samples_s, 0.5) - line.peer_value}};
  });
}

}  // namespace sheaf::bench
