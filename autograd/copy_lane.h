// The lane of copies (Lane::copy): between a GPU's memory and its host's, beside what the GPU computes.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

/// Enqueues work(gpu, stream) of an op's execute() on the lane's stream, behind what makes the inputs and what used the outputs'
/// memory before. Whoever reads an output comes behind it (Storage::settle); until somebody does, the inputs have to stay.
template <class Work>
void by_copies(Execute& c, Work&& work) {
  Gpu& gpu = RankContext::current().gpu_of(c.device());
  c.stream();
  for (int i = 0; i < c.num_inputs(); ++i) c.input(i);  // another lane may be filling it: compute() goes behind that
  gpu.record(gpu.compute()).order(gpu.copies());
  work(gpu, gpu.copies());
  c.completes_with(gpu.record(gpu.copies()));
}

/// Input 0 becomes output 0, of the same bytes.
inline void copy_by_copies(Execute& c) {
  by_copies(c, [&](Gpu& gpu, const Stream& stream) {
    const View from = c.input(0), to = c.output(0);
    gpu.copy(stream, to.data, from.data, static_cast<size_t>(c.input_tensor(0).local_bytes()), Gpu::Copy::on_device);
  });
}

}  // namespace sheaf
