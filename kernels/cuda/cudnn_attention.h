// Causal attention by cuDNN, for operands that it accepts: bf16 and f16 on tensor cores, the statistics in f32. Operands and results
// as in kernels/attention.h, so that forward and backward may each be cuDNN's or our own kernel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cuda::cudnn {

/// One call of attention (without dout) or of attention_backward. If only shapes matter, data may be null.
struct Attention {
  View q, k, v, out, lse;
  View dout = {}, dq = {}, dk = {}, dv = {};  ///< backward only
  bool causal = true;
  View begins = {};    ///< i32[B, T], where documents begin (AttentionMask), if there are documents
  int64_t window = 0;  ///< keys that a query sees; 0: no window
  double softcap = 0;  ///< of scores; always refused; 0: none
  double scale = 1;
  /// Backward: dq has the same bits at every run. cuDNN then needs workspace for the gradients of all scores, in the operands' type:
  /// 2 B H T S bytes, whatever the heads' width, S rounded up to 128; in addition 2 B H S (D + E) bytes for dk and dv of every query
  /// head if heads share keys, and little else. Otherwise it adds to one dq in f32 in the order in which blocks finish; ops never
  /// request that.
  bool deterministic = true;
  /// For the gradients of scores, in bytes. Calls that need more are computed in parts, one after another. GPT-2 with 12 heads needs
  /// 24 MiB per sequence at T = 1024; Llama's 32 heads need 4 GiB at T = 8192.
  int64_t most_workspace = int64_t{1} << 30;
};

/// One call of cuDNN for each part, all equal in shape. In the backward as few as stay within most_workspace, divided by batch and,
/// for single sequences, by key heads. Results do not depend on each other.
std::vector<Attention> parts_of(const Attention& a);

/// Why cuDNN does not accept this on the thread's current device: cuDNN's message, or a known limitation without trying; empty if it
/// does. The first query of a shape compiles a plan for it, which takes about half a second on the host; the answer is cached. Throws
/// CudaError for a first query while the rank's GPU captures a graph, and, without caching, if planning failed for another reason
/// than a refusal, such as a lack of memory.
std::string refusal(const Attention& a);
inline bool accepts(const Attention& a) { return refusal(a).empty(); }
/// The same for a device that need not exist, described in cuDNN's JSON. Compiles every time and, if cuDNN accepts,
/// writes the plan's workspace to `workspace`.
std::string refusal_on(std::string_view device_properties, const Attention& a, int64_t* workspace);

/// Only for accepted calls.
size_t attention_workspace(const Attention& a);
void attention(const Stream& stream, const Attention& a, Workspace workspace);
/// How many times attention() ran in this process, for tests and logs.
int64_t attention_calls();

/// The part of refusal() that needs no cuDNN.
std::string layout_refusal(const Attention& a);
/// The part that depends only on cuDNN's version (91900 for 9.19.0), which the text names.
std::string version_refusal(int64_t version, const Attention& a);
/// The value of hidden scores for this version of cuDNN.
float masked_score(int64_t version, const Attention& a);
/// For the backward: with a packed lse, whose memory is allocated by the caller if it was not packed: kernels of cuDNN before 9.26
/// treat it as packed whatever its strides (https://github.com/NVIDIA/cudnn-frontend/pull/304).
Attention with_packed_lse(const Attention& a);
/// Strides of lse [B, H, T]: those of dense memory, whatever the stride of a dimension of size 1, or its own.
Shape lse_strides(const Attention& a);
/// The properties that a plan depends on.
std::vector<int64_t> plan_key(const Attention& a);
/// Throws CudaError while this rank's GPU captures a graph: before a plan is made.
void check_can_be_planned(const Attention& a);
/// Throws CudaError that names the call and `why`.
[[noreturn]] void fail_for(const Attention& a, std::string_view why);

}  // namespace sheaf::kernels::cuda::cudnn
