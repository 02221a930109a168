#include "sheaf/tools/bench/raw_gloo.h"

#include <gloo/allgather.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include "sheaf/core/error.h"

namespace sheaf::bench {

struct RawGloo::State {
  std::shared_ptr<gloo::rendezvous::Context> context;
  int rank, size;
  uint32_t tag = 0;
};

RawGloo::RawGloo(int rank, int size, const std::string& folder) try
    : state_(std::make_unique<State>()) {
  gloo::transport::tcp::attr where;
  where.hostname = "127.0.0.1";
  gloo::rendezvous::FileStore store(folder);
  auto device = gloo::transport::tcp::CreateDevice(where);
  state_->context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  state_->context->connectFullMesh(store, device);
  state_->rank = rank;
  state_->size = size;
} catch (const std::exception& e) {
  fail<CommError>("[bench] Gloo: ", std::string_view(e.what()));
}

RawGloo::~RawGloo() = default;

std::function<void()> RawGloo::all_gather(const float* in, float* out, size_t count) {
  return [this, in, out, count] {
    gloo::AllgatherOptions options(state_->context);
    options.setInput(const_cast<float*>(in), count);
    options.setOutput(out, count * static_cast<size_t>(state_->size));
    options.setTag(state_->tag++);
    gloo::allgather(options);
  };
}

std::function<void()> RawGloo::reduce_scatter(float* data, size_t count) {
  const auto each = static_cast<int>(count);
  auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
      state_->context, std::vector<float*>{data}, each * state_->size,
      std::vector<int>(static_cast<size_t>(state_->size), each));
  return [algorithm] { algorithm->run(); };
}

}  // namespace sheaf::bench
