// The lane of copies (Lane::copy): between a GPU's memory and its host's, beside what the GPU computes.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/profile.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/few_blocks.h"

namespace sheaf {

/// Enqueues work(gpu, stream) of an op's execute() on a stream of the lane, behind what makes the inputs and what used the outputs'
/// memory before. Whoever reads an output comes behind it (Storage::settle); until somebody does, the inputs have to stay.
template <class Work>
void by_copies(Execute& c, const Stream& (Gpu::*of)() const, Work&& work) {
  Gpu& gpu = RankContext::current().gpu_of(c.device());
  const Stream& stream = (gpu.*of)();
  c.stream();
  for (int i = 0; i < c.num_inputs(); ++i) c.input(i);  // another lane may be filling it: compute() goes behind that
  gpu.record(gpu.compute()).order(stream);
  // In a program what leaves may be given the memory that copies() are the last to read.
  if (of == &Gpu::leaving) gpu.record(gpu.copies()).order(stream);
  {
    const kernels::cuda::FewBlocks few;  // such kernels wait for the bus
    const ProfileSpan span(of == &Gpu::leaving ? "leaving" : "copies", c.op_name(), PathScope::current(), &stream);
    work(gpu, stream);
  }
  c.completes_with(gpu.record(stream));
}

/// Input 0 becomes output 0, of the same bytes.
inline void copy_by_copies(Execute& c, const Stream& (Gpu::*of)() const = &Gpu::copies) {
  by_copies(c, of, [&](Gpu& gpu, const Stream& stream) {
    const View from = c.input(0), to = c.output(0);
    gpu.copy(stream, to.data, from.data, static_cast<size_t>(c.input_tensor(0).local_bytes()), Gpu::Copy::on_device);
  });
}

}  // namespace sheaf
