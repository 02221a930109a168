// The suites of `sheaf bench`, a file each. A suite adds its lines to the session, those that are
// asked for.
#pragma once

#include <string_view>

#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

void step_suite(Session& session);
void gemm_suite(Session& session);
void kernels_suite(Session& session);
void attention_suite(Session& session);
void tape_suite(Session& session);
void allocator_suite(Session& session);
void comm_suite(Session& session);
void fsdp_suite(Session& session);
void memory_suite(Session& session);
void init_suite(Session& session);
void checkpoint_suite(Session& session);

struct Suite {
  std::string_view name;
  void (*run)(Session&);
};
inline constexpr Suite kSuites[] = {
    {"step", step_suite},
    {"gemm", gemm_suite},
    {"kernels", kernels_suite},
    {"attention", attention_suite},
    {"tape", tape_suite},
    {"allocator", allocator_suite},
    {"comm", comm_suite},
    {"fsdp", fsdp_suite},
    {"memory", memory_suite},
    {"init", init_suite},
    {"checkpoint", checkpoint_suite},
};

}  // namespace sheaf::bench
