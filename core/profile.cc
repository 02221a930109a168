#include "sheaf/core/profile.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "sheaf/core/allocator.h"
#include "sheaf/core/error.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

/// Where spans are written. The rank keeps it after the Profile is gone: a lane of a failing rank may end its span later.
class ProfileLog {
 public:
  using Time = std::shared_ptr<const DeviceTime>;
  struct Noted {
    Profile::Span span;
    Time begin, end;  ///< null: the span says when
  };

  explicit ProfileLog(RankContext& context)
      : gpu(context.gpu), memory(context.memory(gpu ? gpu->device() : context.device)) {
    settle();
    if (gpu) zero_ = gpu->note_time(gpu->compute());
    zero_on_host_ = settle();
  }

  double settle() const {
    if (gpu)
      for (const Stream* stream : {&gpu->compute(), &gpu->copies(), &gpu->d2h()}) gpu->sync(*stream);
    return Profile::now();
  }
  void add(Noted noted) {
    const std::lock_guard lock(mutex_);
    noted_.push_back(std::move(noted));
  }
  std::vector<Profile::Span> spans() const {
    std::vector<Noted> noted;
    {  // lanes do not wait while this thread waits for the GPU
      const std::lock_guard lock(mutex_);
      noted = noted_;
    }
    std::vector<Profile::Span> out;
    for (Noted& n : noted) {
      if (n.begin) {
        n.span.begin = zero_on_host_ + n.begin->since(*zero_);
        n.span.end = zero_on_host_ + n.end->since(*zero_);
      }
      out.push_back(std::move(n.span));
    }
    return out;
  }

  void drop() {
    const std::lock_guard lock(mutex_);
    noted_.clear();
  }

  const std::thread::id thread = std::this_thread::get_id();
  const std::shared_ptr<Gpu> gpu;
  const std::shared_ptr<Allocator> memory;

 private:
  Time zero_;  // of the GPU's clock, and now() at that moment
  double zero_on_host_ = 0;
  mutable std::mutex mutex_;
  std::vector<Noted> noted_;
};

Profile::Profile() : context_(RankContext::current()) {
  if (context_.profile) fail<ConfigError>("[profile] rank ", context_.rank, " has one already");
  log_ = std::make_shared<ProfileLog>(context_);
  context_.profile_log = log_;
  context_.profile = log_.get();
}
Profile::~Profile() {
  context_.profile = nullptr;
  log_->drop();
}

double Profile::now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }
double Profile::settle() const { return log_->settle(); }
std::vector<Profile::Span> Profile::spans() const { return log_->spans(); }

ProfileSpan::ProfileSpan(std::string_view row, std::string_view name, std::string_view module, const Stream* stream)
    : log_(RankContext::current().profile), row_(row), name_(name), module_(module), stream_(stream) {
  if (log_) [[unlikely]] begin();
}

void ProfileSpan::begin() {
  ProfileLog& log = *std::exchange(log_, nullptr);
  if (log.gpu && log.gpu->capturing()) return;
  if (row_ == Profile::kCompute) {
    if (log.thread != std::this_thread::get_id()) return;
    if (log.gpu && !stream_) stream_ = &log.gpu->compute();
    if (log.gpu && stream_->handle != log.gpu->compute().handle) return;
  }
  live_ = log.memory->stats().live;
  try {
    if (log.gpu && stream_) begin_on_device_ = log.gpu->note_time(*stream_);
    else begin_ = Profile::now();
  } catch (const CudaError&) {
    return;  // reported by the call that failed: after a fault every call fails
  }
  log_ = &log;
}

void ProfileSpan::end() noexcept {
  // A communicator of a rank with a GPU may have both kinds of calls; their clocks differ slightly.
  const bool beside_gpu = log_->gpu && !begin_on_device_;
  ProfileLog::Noted noted{{std::string(row_) + (beside_gpu ? " (host)" : ""), std::string(name_), std::string(module_), begin_, 0, live_},
                          begin_on_device_, nullptr};
  try {
    if (begin_on_device_) noted.end = log_->gpu->note_time(*stream_);
    else noted.span.end = Profile::now();
  } catch (const CudaError&) {
    return;
  }
  log_->add(std::move(noted));
}

}  // namespace sheaf
