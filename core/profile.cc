#include "sheaf/core/profile.h"

#include <chrono>
#include <utility>

#include "sheaf/core/allocator.h"
#include "sheaf/core/error.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

Profile::Profile() : context_(RankContext::current()), gpu_(context_.gpu) {
  if (context_.profile) fail<ConfigError>("[profile] rank ", context_.rank, " has one already");
  settle();
  if (gpu_) zero_ = gpu_->note_time(gpu_->compute());
  began_ = settle();
  context_.profile = this;
}
Profile::~Profile() { context_.profile = nullptr; }

double Profile::now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

double Profile::settle() const {
  if (gpu_) gpu_->sync(gpu_->compute());
  return now();
}

void Profile::add(Noted noted) {
  const std::lock_guard lock(mutex_);
  noted_.push_back(std::move(noted));
}

std::vector<Profile::Span> Profile::spans() const {
  settle();
  const std::lock_guard lock(mutex_);
  std::vector<Span> out;
  for (const Noted& n : noted_) {
    out.push_back(n.span);
    if (!n.begin) continue;
    out.back().begin = began_ + n.begin->since(*zero_);
    out.back().end = began_ + n.end->since(*zero_);
  }
  return out;
}

ProfileSpan::ProfileSpan(std::string_view row, std::string_view name, std::string_view module, const Stream* stream)
    : profile_(RankContext::current().profile), row_(row), name_(name), module_(module), stream_(stream) {
  if (!profile_) [[likely]] return;
  Gpu* const gpu = profile_->gpu_.get();
  bool shows = !gpu || !gpu->capturing();
  if (row == Profile::kCompute) {
    shows = shows && profile_->thread_ == std::this_thread::get_id();
    if (gpu && !stream_) stream_ = &gpu->compute();
    if (gpu) shows = shows && stream_->handle == gpu->compute().handle;
  }
  if (!shows) {
    profile_ = nullptr;
    return;
  }
  live_ = profile_->context_.memory(profile_->context_.device)->stats().live;
  if (gpu && stream_) began_ = gpu->note_time(*stream_);
  else begin_ = Profile::now();
}

void ProfileSpan::end() noexcept {
  try {
    Profile::Noted noted{{std::string(row_), std::string(name_), std::string(module_), begin_, 0, live_}, began_, nullptr};
    if (began_) noted.end = profile_->gpu_->note_time(*stream_);
    else noted.span.end = Profile::now();
    profile_->add(std::move(noted));
  } catch (const CudaError&) {}  // reported where it happened: after a fault every call fails
}

}  // namespace sheaf
