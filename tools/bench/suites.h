// The suites of `sheaf bench`, one file each. A suite adds those of its lines that are selected to the session.
#pragma once

#include <string_view>

#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

void step_suite(Session& session);
void experts_suite(Session& session);
void hessian_suite(Session& session);
void generate_suite(Session& session);
void fuse_suite(Session& session);
void gemm_suite(Session& session);
void kernels_suite(Session& session);
void attention_suite(Session& session);
void linear_attention_suite(Session& session);
void tape_suite(Session& session);
void allocator_suite(Session& session);
void comm_suite(Session& session);
void fsdp_suite(Session& session);
void hosts_suite(Session& session);
void overlap_suite(Session& session);
void pipeline_suite(Session& session);
void memory_suite(Session& session);
void init_suite(Session& session);
void checkpoint_suite(Session& session);

struct Suite {
  std::string_view name;
  void (*run)(Session&);
  bool on_gpu;  ///< has lines for a GPU
};
inline constexpr Suite kSuites[] = {
    {"step", step_suite, true},
    {"experts", experts_suite, true},
    {"hessian", hessian_suite, true},
    {"generate", generate_suite, true},
    {"fuse", fuse_suite, true},
    {"gemm", gemm_suite, true},
    {"kernels", kernels_suite, true},
    {"attention", attention_suite, true},
    {"linear-attention", linear_attention_suite, true},
    {"tape", tape_suite, false},
    {"allocator", allocator_suite, true},
    {"comm", comm_suite, true},
    {"fsdp", fsdp_suite, true},
    {"hosts", hosts_suite, false},
    {"overlap", overlap_suite, false},
    {"pipeline", pipeline_suite, false},
    {"memory", memory_suite, true},
    {"init", init_suite, false},
    {"checkpoint", checkpoint_suite, false},
};

}  // namespace sheaf::bench
