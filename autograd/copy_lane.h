// The copy lane (Lane::copy): copies between a GPU's memory and its host's, concurrently with the GPU's compute.
#pragma once

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/profile.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/few_blocks.h"

namespace sheaf {

/// Enqueues work(gpu, stream) of an op's execute() on one of the lane's streams, after the producers of the inputs and after earlier
/// uses of the outputs' memory. Readers of an output wait for it (Storage::settle); until one does, the inputs must stay alive.
template <class Work>
void on_copy_stream(Execute& c, const Stream& (Gpu::*of)() const, Work&& work) {
  Gpu& gpu = RankContext::current().gpu_of(c.device());
  const Stream& stream = (gpu.*of)();
  c.stream();
  for (int i = 0; i < c.num_inputs(); ++i) c.input(i);  // another lane may still be filling it: compute() is ordered after that
  gpu.record(gpu.compute()).order(stream);
  // There an outgoing copy may be assigned memory whose last reader is copies(). Elsewhere the two directions overlap.
  if (c.in_program && of == &Gpu::d2h) gpu.record(gpu.copies()).order(stream);
  {
    const kernels::cuda::FewBlocks few;  // these kernels are limited by the bus
    const ProfileSpan span(of == &Gpu::d2h ? "leaving" : "copies", c.op_name(), PathScope::current(), &stream);
    work(gpu, stream);
  }
  c.completes_with(gpu.record(stream));
}

/// Copies input 0 to output 0, byte for byte.
inline void copy_on_copy_stream(Execute& c, const Stream& (Gpu::*of)() const = &Gpu::copies) {
  on_copy_stream(c, of, [&](Gpu& gpu, const Stream& stream) {
    const View from = c.input(0), to = c.output(0);
    gpu.copy(stream, to.data, from.data, static_cast<size_t>(c.input_tensor(0).local_bytes()), Gpu::Copy::on_device);
  });
}

}  // namespace sheaf
