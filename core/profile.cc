#include "sheaf/core/profile.h"

#include <chrono>
#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

Profile::Profile() : context_(RankContext::current()) {
  if (context_.profile) fail<ConfigError>("[profile] rank ", context_.rank, " has one already");
  context_.profile = this;
}
Profile::~Profile() { context_.profile = nullptr; }

double Profile::now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

void Profile::add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::vector<Profile::Span> Profile::spans() const {
  const std::lock_guard lock(mutex_);
  return spans_;
}

ProfileSpan::ProfileSpan(std::string_view row, std::string_view name, std::string_view module)
    : profile_(RankContext::current().profile), row_(row), name_(name), module_(module) {
  if (!profile_) [[likely]] return;
  if (row == Profile::kCompute && profile_->thread_ != std::this_thread::get_id()) profile_ = nullptr;
  else begin_ = Profile::now();
}

void ProfileSpan::end() { profile_->add({std::string(row_), std::string(name_), std::string(module_), begin_, Profile::now()}); }

}  // namespace sheaf
