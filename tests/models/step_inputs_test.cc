// The inputs of a step are adjacent, at the same address in every step, and are those that the recording and the sampler would have given.
#include "sheaf/models/step_inputs.h"

#include <gtest/gtest.h>

#include "sheaf/autograd/recording.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

void check_inputs(World& world, Device device) {
  models::TrainConfig config = tiny_config();
  config.train.micro_batches = 3;
  const int64_t batch = config.train.batch, context = config.model.context;
  models::StepInputs inputs(config, world.mesh({{"data", world.size()}}), device, 2);
  std::vector<const void*> places;
  for (const int64_t step : {0, 4, 5}) {
    inputs.set_step(step, step * batch, fill_tiny, {0.5, static_cast<double>(step)}, 7.0 + static_cast<double>(step));
    EXPECT_EQ(inputs.num_targets().to_vector<double>(), (std::vector<double>{7.0 + static_cast<double>(step)}));
    EXPECT_EQ(inputs.scalars().to_vector<double>(), (std::vector<double>{0.5, static_cast<double>(step)}));
    Recording recording({.step = step, .seed = static_cast<uint64_t>(config.train.seed)});
    std::vector<const void*> here;
    int64_t first = step * batch;
    for (int64_t i = 0; i < config.train.micro_batches; ++i) {
      const models::StepInputs::MicroBatch& part = inputs.micro_batch(i);
      const int64_t rows = part.tokens.size(0), mine = part.tokens.local_shape()[0];
      recording.next_micro_batch(first);
      EXPECT_EQ(part.random_state.to_vector<int64_t>(), recording.random_state(device).to_vector<int64_t>());
      std::vector<int32_t> tokens(static_cast<size_t>(mine * context)), targets(tokens.size());
      const int64_t start = part.tokens.layout().local_start(part.tokens.shape())[0];
      fill_tiny(first + start, mine, tokens.data(), targets.data());
      EXPECT_EQ(part.tokens.to_vector<int32_t>(), tokens);
      EXPECT_EQ(part.targets.to_vector<int32_t>(), targets);
      for (const Tensor& t : {part.tokens, part.targets, part.random_state}) here.push_back(t.view().data);
      first += rows;
    }
    EXPECT_EQ(first, (step + 1) * batch);
    if (places.empty()) places = here;
    EXPECT_EQ(here, places);
  }
}

TEST(StepInputs, AreThoseOfRecordingAndSampler) {
  for (int ranks : {1, 3}) run_local(ranks, [](World& w) { check_inputs(w, Device::cpu()); }, {.threads_per_rank = 1});
}

TEST(StepInputs, OnAGpu) {
  SHEAF_NEEDS_GPU();
  for (int ranks : {1, 2})
    run_local(ranks, [](World& w) { check_inputs(w, w.device()); }, {.threads_per_rank = 1, .device = Device::cuda()});
}

}  // namespace
}  // namespace sheaf::testing
