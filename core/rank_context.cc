#include "sheaf/core/rank_context.h"

#include <immintrin.h>

#include <algorithm>

#include "sheaf/core/cores.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/mesh.h"

namespace sheaf {
namespace {

thread_local RankContext* current_context = nullptr;

RankContext& process_context() {
  static RankContext* context = [] {  // never destroyed: tensors in static objects may outlive it
    auto* c = new RankContext;
    c->threads = default_threads(1);
    return c;
  }();
  return *context;
}

}  // namespace

RankContext::RankContext() : cpu(make_cpu_allocator()), meta(make_meta_allocator()), meta_host(make_meta_allocator()) {}
RankContext::~RankContext() = default;

Gpu& RankContext::gpu_of(const Device& device) const {
  if (!gpu) fail<ConfigError>("[device] rank ", rank, " has no GPU, so nothing can live on ", device.to_string());
  if (!(gpu->device() == device))
    fail<ConfigError>("[device] rank ", rank, " has ", gpu->device().to_string(), ", not ", device.to_string());
  return *gpu;
}

const std::shared_ptr<Allocator>& RankContext::memory(const Device& device, MemoryKind where) const {
  const bool host = where == MemoryKind::host;
  if (device.is_meta()) return host && meta_is.is_cuda() ? meta_host : meta;
  if (device.is_cuda()) return host ? gpu_of(device).host_memory() : gpu_of(device).memory();
  return cpu;
}

std::vector<std::shared_ptr<Allocator>> RankContext::memories() const {
  std::vector<std::shared_ptr<Allocator>> all{cpu, meta, meta_host};
  if (gpu) all.insert(all.end(), {gpu->memory(), gpu->host_memory()});
  return all;
}

Stream RankContext::stream(const Device& device) const {
  return device.is_cuda() ? gpu_of(device).compute() : Stream{device};
}

void RankContext::bind(const MeshSpec* mesh, std::shared_ptr<MeshRuntime> runtime) {
  unbind(mesh);
  meshes_.emplace_back(mesh, std::move(runtime));
}

void RankContext::unbind(const MeshSpec* mesh) {
  std::erase_if(meshes_, [&](const auto& entry) { return entry.first == mesh; });
}

MeshRuntime* RankContext::runtime(const MeshSpec* mesh) const {
  for (const auto& [spec, runtime] : meshes_)
    if (spec == mesh) return runtime.get();
  return nullptr;
}

int RankContext::coordinate(const MeshSpec* mesh, int axis) const {
  if (mesh->size(axis) == 1) return 0;
  const MeshRuntime* r = runtime(mesh);
  if (!r) fail<PlacementError>("[mesh] rank ", rank, " has not joined mesh ", mesh->to_string());
  return r->coordinate(axis);
}

RankContext& RankContext::current() {
  if (current_context) return *current_context;
  flush_denormals();  // no RankScope has done it; callers that share out work ask here for the number of threads
  return process_context();
}

RankScope::RankScope(RankContext& context) : previous_(current_context) {
  current_context = &context;
  flush_denormals();
}

RankScope::~RankScope() { current_context = previous_; }

void flush_denormals() {
  thread_local bool done = false;
  if (done) return;
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _mm_setcsr(_mm_getcsr() | 0x0040);  // DAZ
  done = true;
}

}  // namespace sheaf
