// The public operations that layers of models are made of: products, normalisation, attention, experts, losses. Part of ops.h.
#pragma once

#include <cstdint>

#include "sheaf/autograd/op.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf {

/// Which products round their operands to FP8 first, rows of the first and columns of the second, each with a scale of its own
/// (kernels/fp8.h): E4M3, which GPUs multiply at twice the rate of bf16; on CPUs, and on GPUs without it, the values that it
/// stands for. Of f32, bf16 and f16. Derivatives pass through the rounding as if it were not there; the products that compute them
/// round in turn. With an operand that is Partial nothing is rounded: what is rounded does not add up.
enum class Fp8 : uint8_t {
  none,
  activations,  ///< of a linear layer y and the gradient of x: a row's bits follow from that row alone, as without
  all,          ///< the gradient of its weight, too, rounded over the rows that a rank has; never that of a bias
};
struct MatmulOptions {
  /// Of dense [B, M, K] and [B, K, N], or their transposes, each product is made as if it were the only one: then its bits do
  /// not depend on B on GPUs either, nor on where it lies in the batch.
  bool each_alone = false;
  bool fp8 = false;  ///< rounds (Fp8); of gradients that of `a` alone, as linear() with Fp8::activations
};
/// [.., M, K] times [.., K, N], of one floating dtype (DTypeError); ShapeError if K differs or leading dimensions do not broadcast. A K
/// that is cut over ranks gives a Partial result. Any strides: transposed operands cost nothing.
Tensor matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options = {});
/// x[.., I] weight[O, I]ᵀ + bias[O]: [.., O]; ShapeError if I or O differ. Where the result is Partial, so is the bias; a Replicate one
/// counts on one rank. `output_layout` redistributes the result: see apply_and_redistribute().
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Fp8 fp8 = Fp8::none, const OutputLayout& output_layout = {});
/// A gelu (tanh form) and what it was applied to.
struct GeluOfLinear {
  Tensor value, before;
};
/// gelu(linear(x, weight, bias)): on a GPU one product computes both.
GeluOfLinear linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Fp8 fp8 = Fp8::none);
/// linear(x.value, weight, bias) for what linear_gelu gave. All of its gradient goes to x.before, none to x.value: on a GPU
/// the product that makes it applies gelu's derivative.
Tensor gelu_linear(const GeluOfLinear& x, const Tensor& weight, const Tensor& bias = {}, Fp8 fp8 = Fp8::none, const OutputLayout& output_layout = {});
/// Rows of table[V, C] by integer tokens[..]: [.., C]. A token outside [0, V) throws DataError. Of a table whose rows are cut
/// over ranks each looks up its own, for all tokens: Partial.
Tensor embedding(const Tensor& tokens, const Tensor& table);

/// Normalisation of x[.., C] over its last dimension, which is whole on every rank, with optional weight[C] and bias[C]; in x's dtype,
/// with statistics in f32 (f64 for f64).
/// Layer normalisation (Ba et al., https://arxiv.org/abs/1607.06450): (x - mean) / sqrt(var + eps), biased variance.
Tensor layer_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);
/// x / sqrt(mean(x²) + eps) (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
Tensor rms_norm(const Tensor& x, const Tensor& weight = {}, double eps = 1e-5);

/// x + r and its norm, in one pass over memory: what a residual stream needs between two layers. x and r have one
/// shape; the values are those of add and of the norm above. In backward the gradients of both outputs become the
/// gradient of x and of r, one tensor, in one pass; in bf16 and f16 it is rounded once, where add would round a second
/// time.
struct NormedSum {
  Tensor sum, normed;
};
NormedSum add_layer_norm(const Tensor& x, const Tensor& r, const Tensor& weight = {}, const Tensor& bias = {},
                         double eps = 1e-5);
NormedSum add_rms_norm(const Tensor& x, const Tensor& r, const Tensor& weight = {}, double eps = 1e-5);
/// exp(x - max) over its sum along `dim`, which is whole on every rank; its logarithm. Of x's shape and floating dtype; statistics in f32
/// (f64 for f64).
Tensor softmax(const Tensor& x, int dim = -1);
Tensor log_softmax(const Tensor& x, int dim = -1);

/// Which rows of which experts the tokens of sequences go to:
///   E  experts, in Q parts: part q has those from E q / Q on
///   K  choices of each of T tokens
///   N  groups of a sequence's tokens, counted apart: group n has those from T n / N on
///   R  rows that a part has for a group, those of its experts one after another
struct ExpertRoutes {
  Tensor slots;    ///< i32 [.., T, K]: the part of a choice's expert times R, plus its row there; -1: it was dropped
  Tensor sources;  ///< i32 [Q, .., N, R]: the choice in a row, counted from the first of its group; -1: the row is empty
  Tensor counts;   ///< i32 [E, .., N]: the rows of each expert
};
/// Rows for choices[.., T, K], i64 in [0, experts) (DataError). An expert takes at most `places` choices of a group; further ones are
/// dropped, in the order of tokens and then of a token's choices, so that a choice never depends on later tokens. With `parts` 0 each expert
/// is a part of its own, with `places` rows. Fewer parts have as many rows as a group's tokens can fill if no token chooses an expert twice
/// (further choices are dropped): T K / N where one part has all experts and none lacks places. Sequences may be cut in any way, tokens if
/// each rank has whole groups, all of one size or one for each rank.
ExpertRoutes expert_routes(const Tensor& choices, int64_t experts, int64_t places, int64_t groups = 1, int64_t parts = 0);
/// R of expert_routes(), for groups of at most `tokens` tokens.
int64_t rows_of_part(int64_t tokens, int64_t choices, int64_t experts, int64_t places, int64_t parts);
/// Rows of x[.., T, C] for each expert, zeros in empty ones: [Q, .., N, R, C]. Times the choices' weights[.., T, K], if
/// given: f32 (f64 for f64).
Tensor to_experts(const Tensor& x, const ExpertRoutes& routes, const Tensor& weights = {});
/// The sum over each token's choices of their rows[Q, .., N, R, C], times weights[.., T, K] if given: [.., T, C].
Tensor from_experts(const Tensor& rows, const ExpertRoutes& routes, const Tensor& weights = {});
struct ExpertLinearOptions {
  Tensor bias = {};   ///< [E, O]
  bool fp8 = false;   ///< as linear() with Fp8::activations
  double fill = 1.0;  ///< about the share of rows that will be in use: GPUs skip the others where these are most
  OutputLayout output_layout = {}; ///< where the result goes: see apply_and_redistribute()
};
/// x[Q, .., R, I] weight[E, O, I]ᵀ + bias[E, O], each expert's rows, counts[E, ..] of them, with its own matrix and bias: [Q, .., R, O].
/// Rows that are not in use must be zero in the result's gradient, and finite in x, as they are if they come from to_experts and go to
/// from_experts; their values in the result are unspecified. CPUs skip them, and so do GPUs unless experts are parts of their own and
/// well filled. Experts may be cut over ranks where there is a part for each rank, or for each expert.
Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& counts, const ExpertLinearOptions& options = {});
/// How many experts share the rows of a part in use: `products` of redistribute_in_pieces().
double expert_products(const Tensor& x, const Tensor& counts, double fill);

struct AttentionOptions {
  bool causal = true;  ///< query t of T sees keys s <= t + S - T
  double scale = 0;    ///< of the scores; 0: 1 / sqrt(D)
  double softcap = 0;  ///< scores s, scaled, become softcap tanh(s / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: none. Not in latent_attention()
  /// Where the document of each token begins, i32[B, T] (document_begins): a token then sees those of its own document alone,
  /// up to itself, and gets, bit for bit on CPUs and from our own kernels on GPUs, what it would get if there were no others.
  /// Causal only, with no fewer keys than queries: places are among the keys, and the first query's document may have begun before
  /// it. Cut with the batch.
  Tensor begins = {};
  /// Keys that a query sees, itself and those before it: query t those with t + S - T - window < s, of the ones above
  /// (sliding-window attention; Beltagy et al., https://arxiv.org/abs/2004.05150). Causal only, and the work is that of the
  /// window. 0: all.
  int64_t window = 0;
  /// A score of each head, [H], that every query sees beside its keys, and that no value answers: what a query takes of its keys
  /// adds up to less than 1 (gpt-oss, https://arxiv.org/abs/2508.10925; kernels/attention_sinks.h). Computed in the dtype of
  /// statistics, f32 or f64. Undefined: none. Not in latent_attention().
  Tensor sinks = {};
};
/// softmax(scale q kᵀ) v per head for q[B, T, H, D], k[B, S, G, D] and v[B, S, G, E]: [B, T, H, E]. H is a multiple of G, and head
/// h reads key head h / (H / G). q, k and v have one floating dtype (DTypeError), the result's; ShapeError for other shapes, or a window
/// or `begins` without `causal`. Never builds the T x S matrix. A query that sees no key gives zeros. Queries may be
/// Shard(1) beside keys and values that are Replicate, whose gradients are then Partial: each rank computes its own, at their positions.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});
/// The same for a packed projection [B, T, (H + 2 G) D] of queries, keys and values, to [B, T, H D]. Its gradient is one
/// tensor, written where it belongs: three slices would each be padded and added. Heads are cut by
/// OwnershipMap::parts(2, {H D, G D, G D}, units) where every unit has whole key heads: the result is Shard(2) in as many units.
Tensor packed_attention(const Tensor& qkv, int64_t heads, int64_t kv_heads, const AttentionOptions& options = {});
/// Attention of multi-head latent attention (DeepSeek-AI, https://arxiv.org/abs/2405.04434): of q[B, T, H D] and up[B, T, H (N + E)],
/// which has N elements of each key and the E of its value, with the D - N last elements of keys, which all heads share, in
/// shared[B, T, D - N]: [B, T, H E]. Keys are put together where they are needed, and never kept. Heads are cut by
/// OwnershipMap::even of q and up in as many units; queries as attention's.
Tensor latent_attention(const Tensor& q, const Tensor& up, const Tensor& shared, int64_t heads, const AttentionOptions& options = {});
struct GatedDeltaRuleOptions {
  int64_t heads = 0;      ///< H, of values; a multiple of key_heads
  int64_t key_heads = 0;  ///< G, of queries and keys
  int64_t key_width = 0;  ///< D
  double scale = 0;       ///< of queries; 0: 1 / sqrt(D)
  /// Queries and keys are divided by sqrt(sum of their squares + norm_eps) first; 0: they are taken as they are.
  double norm_eps = 1e-6;
  Tensor begins = {};   ///< as in AttentionOptions: the state is zero before each document
  Tensor initial = {};  ///< the state before the first token [B, H, D, E], f32 (f64 for f64); undefined: zero
  bool keeps_state = false;  ///< the state behind the last token is a result
};
struct DeltaRuleResult {
  Tensor out;    ///< [B, T, H E]
  Tensor state;  ///< [B, H, D, E], f32 (f64 for f64), if it is kept
};
/// The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464) of a packed projection [B, T, 2 G D + H E] of queries, keys and
/// values: a head has a state S[D, E] in place of keys and values of all tokens. With decay[B, T, H] <= 0 and beta[B, T, H], computed in
/// f32 (f64 for f64), each token makes it S = exp(decay) S, then S + k (beta (v - Sᵀ k))ᵀ, and gets scale Sᵀ q. Value head h reads key
/// head h / (H / G). In chunks of 64 tokens (kernels/delta_rule.h). Heads are cut by OwnershipMap::parts(2, {G D, G D, H E}, units) where
/// every unit has whole key heads: the result is Shard(2) in as many units. Second derivatives have matrices [B, H, T, T] in memory, and want decays
/// that are finite.
DeltaRuleResult gated_delta_rule(const Tensor& qkv, const Tensor& decay, const Tensor& beta, const GatedDeltaRuleOptions& options);
struct CausalConvOptions {
  bool silu = false;   ///< behind it
  Tensor begins = {};  ///< as in AttentionOptions: what lies before a token's document is zero
};
/// Each channel's convolution along the tokens, of a token and the W - 1 before it: Σ_j weight[c, j] x[b, t - W + 1 + j, c], for
/// x[B, T, C] and weight[C, W]. Channels may be cut anyhow, tokens not.
Tensor causal_conv(const Tensor& x, const Tensor& weight, const CausalConvOptions& options = {});
/// A packed projection [B, T, (H + 2 G) D] with each key and value head `times` times, side by side: [B, T, (H + 2 G times) D].
/// Where `times` divides H / G its attention is that of qkv, and more ranks can share its heads. A cut by OwnershipMap::parts in
/// units of whole key heads stays one in as many units. The gradient of a head is the sum of its copies'.
Tensor repeat_key_heads(const Tensor& qkv, int64_t heads, int64_t kv_heads, int64_t times);
/// The tensor of repeat_key_heads from queries [B, T, H D] that ranks have cut evenly, in units of whole groups that read one copy,
/// and keys and values [B, T, 2 G D] that all of them have: each takes the copies that its queries read, and nothing travels. So more
/// ranks can share a layer than it has key heads. `times` divides H / G.
Tensor pack_heads(const Tensor& queries, const Tensor& keys_values, int64_t heads, int64_t kv_heads, int64_t times);
/// Of documents one behind another in tokens[.., T], integers, each but the last ended by the token `end_of_text`: where that of
/// each token begins, i32[.., T]. The token that ends a document belongs to it. Sequences must be whole on every rank.
Tensor document_begins(const Tensor& tokens, int64_t end_of_text);
/// rms_norm over D of each query and key of a packed x[B, T, H + 2 G, D], by weights [D] that all queries, and all keys,
/// share; values stay (Qwen3, https://arxiv.org/abs/2505.09388). Heads are cut by OwnershipMap::parts(2, {H, G, G}, units).
Tensor packed_rms_norm(const Tensor& x, int64_t heads, const Tensor& query_weight, const Tensor& key_weight,
                       double eps = 1e-5);
struct RotaryOptions {
  double theta = 10000.0;      ///< base of the frequencies
  int64_t first_position = 0;
  int64_t heads = -1;          ///< the first so many are rotated, such as queries and keys of a packed projection; -1: all
  int64_t width = -1;          ///< of each the last so many elements; -1: all
  bool neighbours = false;     ///< pairs are elements 2i and 2i + 1 of these, as in DeepSeek's checkpoints
  RotaryScaling scaling = {};  ///< lowers the frequencies (it says how, and from where)
  /// Rows begin at these places, i32[B, T], and tokens stand at first_position + t - begins[b, t]; undefined: all at 0.
  Tensor begins = {};
};
/// Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864) of x[B, T, H, D]: of R rotated elements, those of pair
/// i, which are i and i + R/2 as in Llama's Hugging Face checkpoints, turn by position theta^(-2i/R). Tokens may be cut, which turn
/// by where they stand, and heads, packed ones in parts if the rotated ones end with one.
Tensor rotary(const Tensor& x, const RotaryOptions& options = {});

struct CrossEntropyOptions {
  int64_t ignore_index = -1;  ///< rows with this target count nothing
  double divide_by = 0;       ///< what the sum over rows is divided by; 0: the global number of targets, ignored or not,
                              ///< of this call: with gradient accumulation give that of all micro-batches
  Tensor divisor = {};        ///< the same as a scalar tensor; takes precedence. What a model adds to its loss, a mean over
                              ///< tokens whether they are targets or not, goes by divide_by if both are given
  bool recompute = false;     ///< linear_cross_entropy: compute the logits again in backward, which saves the memory of
                              ///< the weight's gradient between the two and costs a third more
  double softcap = 0;         ///< logits l become softcap tanh(l / softcap) first (Gemma 2, https://arxiv.org/abs/2408.00118); 0: they stay
  double z_loss = 0;          ///< times log(sum(exp(logits)))², which is added to the loss of each row that counts and keeps logits from
                              ///< drifting (PaLM, https://arxiv.org/abs/2204.02311, section 5)
  bool per_target = false;    ///< the loss of each target [..] instead of their mean, 0 where it is ignored, divided by nothing:
                              ///< without z_loss the negative of its log-likelihood
};
/// Scalar loss in nats, f32 (f64 for f64): the sum over rows of log(sum(exp(logits))) - logits[target], divided. Integer
/// targets[..] for logits[.., V]; one outside [0, V) throws DataError. Rows cut over ranks give a Partial loss.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});
/// cross_entropy(linear(x, weight), targets) in chunks of rows, so that the logits never exist whole. Where ranks have rows
/// of the weight each, it is put together from linear_lse: x and targets are whole on that axis, the loss is Partial. So it is
/// for the losses of each target, whose backward computes the logits again.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options = {});
/// What each part of a vocabulary knows of the loss (Shoeybi et al., https://arxiv.org/abs/1909.08053, section 3).
struct LinearLse {
  Tensor lse;            ///< [M, ..]: log(sum(exp(logits))) over each of the M parts in which ranks cut the weight's rows
  Tensor target_logits;  ///< [..]: the logit of the target; Partial where ranks cut them
};
/// Of logits = linear(x[.., C], weight[V, C]), which never exist whole, and integer targets[..]; M is 1 where no rank cuts V.
/// For a target of ignore_index logsumexp(lse, {0}) and the target's logit are both 0.
LinearLse linear_lse(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t ignore_index = -1, double softcap = 0);
/// cap tanh(x / cap): x, held softly within a cap > 0, as Gemma 2 holds logits.
Tensor softcap(const Tensor& x, double cap);

}  // namespace sheaf
