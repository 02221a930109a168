// A mixture of experts: of several MLPs, a router chooses a few for each token (Shazeer et al., https://arxiv.org/abs/1701.06538;
// Fedus et al., https://arxiv.org/abs/2101.03961).
//
//   B batch   T tokens   C width   E experts   K choices of a token   H hidden width of an expert
//   N groups of a sequence's tokens   Q parts of the experts   R rows of a part for a group   S routing groups
#pragma once

#include "sheaf/autograd/ops/pending_redistribute.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/mlp.h"

namespace sheaf::nn {

/// How an expert's affinity is computed from the router's logits: probabilities over all, or each separately (DeepSeek-V3).
enum class Affinity : uint8_t { softmax, sigmoid };

struct MixtureConfig {
  int64_t width = 0;
  int64_t hidden = 0;  ///< of an expert
  int64_t experts = 8;
  int64_t choices = 2;  ///< experts of a token
  Affinity affinity = Affinity::softmax;
  bool normalize = true;       ///< a token's weights sum to `scale` (Mixtral, Qwen3), or are affinities times it (Switch)
  double scale = 1.0;          ///< of a token's weights
  bool choice_bias = false;    ///< each expert has a bias, which is added to affinities when experts are chosen, and only then
  double balance_rate = 1e-3;  ///< how far a step moves the bias, against the sign of an expert's load above the mean (Wang et al.,
                              ///< https://arxiv.org/abs/2408.15664); 0: it stays
  /// Experts form this many equal groups, and a token chooses only within `routing_groups_per_token` of them, the ones whose two
  /// largest affinities, bias included, have the largest sum (DeepSeek-V3; https://arxiv.org/abs/2412.19437).
  int64_t routing_groups = 1, routing_groups_per_token = 1;
  int64_t shared_hidden = 0;  ///< hidden width of a shared MLP that every token passes through, in addition to the experts; 0: none
  bool shared_gate = false;   ///< its output is multiplied by the sigmoid of a linear layer of x, one number per token (Qwen2-MoE)
  /// An expert has ceil(capacity_factor · choices · G / experts) places, at most G, for a group of G tokens; choices beyond that are
  /// dropped, with their contribution. 0: G places, so that nothing is dropped.
  double capacity_factor = 0.0;
  int64_t capacity_groups = 1;  ///< parts of a sequence whose places are counted separately; irrelevant if nothing is dropped
  bool balances = false;   ///< training measures the load imbalance
  bool measures_logits = false;  ///< and the size of the router's logits
  bool linear_bias = false;    ///< the router and the linear layers of experts have biases (gpt-oss)
  double gate_limit = 0.0;     ///< experts are down(clamped_swiglu(gate(x), up(x))) with this limit (gpt-oss); 0: with swiglu
  double gate_alpha = 1.702;   ///< and this alpha
  double dropout = 0.0;    ///< of the output
  Init init = Init::normal(0.02);             ///< of router, gate and up
  Init projection_init = Init::normal(0.02);  ///< of down
};

/// down(silu(gate(x)) * up(x)), or with gpt-oss's gate, with matrices and optional biases for each expert, on rows that
/// expert_routes() sends. An axis that shards the experts (ShardOptions::expert_axis, or a tensor axis if that is not named) has each
/// on one of its ranks, to which its rows are sent: one all_to_all there and one back, and two in the backward. The matrices are
/// never sent along it. The output is placed as the rows are.
struct Experts : Module {
  Parameter gate, up;            ///< [E, H, C]
  Parameter down;                ///< [E, C, H]
  Parameter gate_bias, up_bias;  ///< [E, H]
  Parameter down_bias;           ///< [E, C]
  double gate_limit, gate_alpha;
  Fp8 fp8 = Fp8::none;  ///< their products round their operands, except for the matrices' gradients; use_fp8() sets it

  explicit Experts(const MixtureConfig& config);
  void take_settings(const Module& source) override { fp8 = static_cast<const Experts&>(source).fp8; }
  /// Takes rows [Q, B, N, R, C], the number of rows of each expert, [E, B, N], and roughly the fraction of rows in use.
  Tensor forward(const Tensor& rows_QBNRC, const Tensor& counts_EBN, double fill = 1.0);
  /// The same for rows that are still pending to their layout inside().
  Tensor forward(const PendingRedistribute& rows_QBNRC, const Tensor& counts_EBN, double fill = 1.0);

  struct Rows {
    int64_t parts;  ///< into which experts should be grouped (expert_routes)
    double fill;
  };
  /// For x in groups of at most `tokens`: one part for each rank that has its own experts, if that leaves fewer rows empty than one
  /// part for each expert and, on a GPU, if our own kernel, which skips empty rows, is estimated to be no slower than the library
  /// (kernels::own_cost).
  Rows rows_of(const Tensor& x, int64_t tokens, int64_t choices, int64_t places) const;
  /// Whether ranks that share experts gather their tokens and sum their experts' results, because that is less data than the rows:
  /// without a capacity all of a token's choices may be on one rank, and how many are is unknown before they arrive.
  bool gathers(const Tensor& x, int64_t tokens, int64_t choices, int64_t places, int64_t parts) const;
  /// The layout of rows, or counts, in which each is with its expert.
  Layout inside(const Tensor& of_rows) const;
  SHEAF_FIELDS(gate, up, down, gate_bias, up_bias, down_bias);

 private:
  Tensor of_own(const Tensor& x, const Tensor& counts, const Layout& outside, double fill);
};

/// [B, T, C] → [B, T, C]: the weighted sum of the results of a token's chosen experts (the K largest affinities of router(x), in
/// f32), plus the shared MLP's result. Tokens choose in order: a token's result does not depend on later ones, whether choices are
/// dropped or not.
///
/// If ranks share experts, rows are sent to them and back, in pieces, while other pieces are computed; or, if that is less data
/// (Experts::gathers), each rank gathers all tokens, sends rows to its own experts, and the results are summed. The shared MLP is
/// computed while rows are in flight, and in the backward while their gradients are.
///
/// The bias is a parameter whose gradient is a measurement (nn::Parameter::steer): E times the choices of expert e, minus all choices
/// of the step. Gradients are summed over ranks and micro-batches anyway, so nothing else is sent for it.
struct MixtureOfExperts : Module {
  MixtureConfig config;
  Linear router;
  Parameter choice_bias;  ///< [E]
  Experts experts;
  std::optional<GatedMLP> shared;
  std::optional<Linear> shared_gate;  ///< to 1
  Dropout dropout;
  /// After forward, in training, if it balances: the load imbalance, E Σ_e f_e p_e for the fraction f_e of choices and the mean
  /// probability p_e (of sigmoids, their fraction of a token's sum) of expert e over all tokens of the batch on all ranks; 1 if
  /// either is uniform (Fedus et al., section 2.2). A scalar, Partial if tokens are sharded.
  Tensor imbalance;
  /// If it measures logits: the mean over these tokens of log(Σ_e exp(logit_e))² (the router's z-loss; Zoph et al.,
  /// https://arxiv.org/abs/2202.08906, equation 5). Placed as imbalance.
  Tensor router_z;

  explicit MixtureOfExperts(const MixtureConfig& config);
  /// ConfigError if ranks that share sequences cannot have whole groups. `drops` false: no choice is dropped.
  Tensor forward(const Tensor& x_BTC, bool drops = true);
  SHEAF_FIELDS(router, choice_bias, experts, shared, shared_gate, dropout);

 private:
  struct Plan {              // for expert_routes()
    int64_t groups, tokens;  ///< the most tokens of a group
    int64_t places, parts;
    double fill;
  };
  Plan plan_of(const Tensor& x_BTC, int64_t groups, bool drops) const;
  Tensor of_exchanged(const Tensor& x_BTC, const Tensor& choices_BTK, const Tensor& weights_BTK, const Plan& plan);
  Tensor of_gathered(const Tensor& x_BTC, const PendingRedistribute& all, const Tensor& choices_BTK, const Tensor& weights_BTK, const Plan& plan);
  int64_t groups_of(const Tensor& x_BTC, const Layout& layout, bool drops) const;
  Tensor router_logits(const Tensor& x_BTC);
  Tensor shared_of(const Tensor& x_BTC);
  Tensor choose(const Tensor& affinities_BTE) const;
  Tensor weigh(const Tensor& affinities_BTE, const Tensor& choices_BTK) const;
  Tensor imbalance_of(const Tensor& affinities_BTE, const Tensor& choices_BTK) const;
  static Tensor z_of(const Tensor& logits_BTE);
};

}  // namespace sheaf::nn
