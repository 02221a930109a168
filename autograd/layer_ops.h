// The public operations that model layers consist of: products, normalisation, attention, experts, losses. Part of ops.h.
#pragma once

#include <cstdint>

#include "sheaf/autograd/op.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf {

/// Which products round their operands to FP8 first, rows of the first and columns of the second, each with its own scale
/// (kernels/fp8.h): E4M3, which GPUs multiply at twice the rate of bf16; CPUs, and GPUs without it, compute with the values it stands
/// for. For f32, bf16 and f16. Derivatives ignore the rounding (straight-through); the products that compute them round in turn. With
/// a Partial operand nothing is rounded: rounded addends do not sum to the rounded value.
enum class Fp8 : uint8_t {
  none,
  activations,  ///< of a linear layer y and the gradient of x: a row's bits still depend on that row alone
  all,          ///< the weight's gradient, too, rounded over the rows that a rank has; never that of a bias
};
struct MatmulOptions {
  /// For dense [B, M, K] and [B, K, N], or their transposes: each product is computed as if it were the only one, so on GPUs, too,
  /// its bits depend neither on B nor on its index in the batch.
  bool each_alone = false;
  bool fp8 = false;  ///< rounds to FP8 (Fp8); of the gradients only that of `a`, as linear() with Fp8::activations
};
/// [.., M, K] times [.., K, N], of one floating dtype (DTypeError); ShapeError if K differs or leading dimensions do not broadcast. A
/// sharded K gives a Partial result. Any strides: transposed operands cost nothing.
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

/// Normalisation of x[.., C] over its last dimension, which must be whole on every rank, with optional weight[C] and bias[C]; in x's
/// dtype, with statistics in f32 (f64 for f64).
/// Layer normalisation (Ba et al., https://arxiv.org/abs/1607.06450): (x - mean) / sqrt(var + eps), biased variance.
Tensor layer_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);
/// x / sqrt(mean(x²) + eps) (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
Tensor rms_norm(const Tensor& x, const Tensor& weight = {}, double eps = 1e-5);

/// x + r and its norm, in one pass over memory: what a residual stream needs between two layers. x and r have one shape; the values
/// are those of add and of the norm above. In the backward the gradients of both outputs become one tensor, the gradient of both x
/// and r, in one pass; in bf16 and f16 it is rounded once, where a separate add would round twice.
struct NormedSum {
  Tensor sum, normed;
};
NormedSum add_layer_norm(const Tensor& x, const Tensor& r, const Tensor& weight = {}, const Tensor& bias = {},
                         double eps = 1e-5);
NormedSum add_rms_norm(const Tensor& x, const Tensor& r, const Tensor& weight = {}, double eps = 1e-5);
/// exp(x - max) over its sum along `dim`, which must be whole on every rank; and its logarithm. Of x's shape and floating dtype;
/// statistics in f32 (f64 for f64).
Tensor softmax(const Tensor& x, int dim = -1);
Tensor log_softmax(const Tensor& x, int dim = -1);

/// Which rows of which experts the tokens of sequences are routed to:
///   E  experts, in Q parts: part q has those from E q / Q on
///   K  choices of each of T tokens
///   N  groups of a sequence's tokens, counted separately: group n has those from T n / N on
///   R  rows of a part per group, those of its experts one after another
struct ExpertRoutes {
  Tensor slots;    ///< i32 [.., T, K]: the part of a choice's expert times R, plus its row there; -1: it was dropped
  Tensor sources;  ///< i32 [Q, .., N, R]: the choice in a row, counted from the first of its group; -1: the row is empty
  Tensor counts;   ///< i32 [E, .., N]: the rows of each expert
};
/// Rows for choices[.., T, K], i64 in [0, experts) (DataError). An expert takes at most `places` choices of a group; further ones are
/// dropped, in the order of tokens and then of a token's choices, so that a choice never depends on later tokens. With `parts` 0 each
/// expert is its own part, with `places` rows. If there are fewer parts than experts, a part has as many rows as a group's tokens can
/// fill if no token chooses an expert twice (further choices are dropped): T K / N if one part has all experts and none runs out of
/// places. Sequences may be sharded in any way, tokens only if each rank has whole groups, all of one size or one per rank.
ExpertRoutes expert_routes(const Tensor& choices, int64_t experts, int64_t places, int64_t groups = 1, int64_t parts = 0);
/// R of expert_routes(), for groups of at most `tokens` tokens.
int64_t rows_of_part(int64_t tokens, int64_t choices, int64_t experts, int64_t places, int64_t parts);
/// Rows of x[.., T, C] for each expert, zeros in empty ones: [Q, .., N, R, C]; multiplied by the choices' weights[.., T, K], f32 (f64
/// for f64), if given.
Tensor to_experts(const Tensor& x, const ExpertRoutes& routes, const Tensor& weights = {});
/// The sum over each token's choices of their rows[Q, .., N, R, C], multiplied by weights[.., T, K] if given: [.., T, C].
Tensor from_experts(const Tensor& rows, const ExpertRoutes& routes, const Tensor& weights = {});
struct ExpertLinearOptions {
  Tensor bias = {};                 ///< [E, O]
  bool fp8 = false;                 ///< as linear() with Fp8::activations
  double fill = 1.0;                ///< about the share of rows that will be in use: GPUs skip the others where these are most
  OutputLayout output_layout = {};  ///< where the result goes: see apply_and_redistribute()
};
/// x[Q, .., R, I] weight[E, O, I]ᵀ + bias[E, O], for each expert's rows, counts[E, ..] of them, with its own matrix and bias:
/// [Q, .., R, O]. Unused rows must be zero in the result's gradient, and finite in x, as they are if they come from to_experts and go
/// to from_experts; their values in the result are unspecified. CPUs skip them, and so do GPUs unless each expert is its own part and
/// well filled. Experts may be sharded if there is a part for each rank, or for each expert.
Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& counts, const ExpertLinearOptions& options = {});
/// How many experts share the used rows of a part: `products` of redistribute_in_pieces().
double expert_products(const Tensor& x, const Tensor& counts, double fill);

struct AttentionOptions {
  bool causal = true;  ///< query t of T sees keys s <= t + S - T
  double scale = 0;    ///< of the scores; 0: 1 / sqrt(D)
  double softcap = 0;  ///< scores s, scaled, become softcap tanh(s / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: none. Not in
                       ///< latent_attention()
  /// Where the document of each token begins, i32[B, T] (document_begins): a token then attends only to those of its own document, up
  /// to itself if `causal`, and its result has, bit for bit on CPUs and in our own kernels on GPUs, the value that it would have
  /// without other documents. If causal, there are at least as many keys as queries: positions count keys, and the first query's
  /// document may have begun before it. If not, there are as many. Sharded like the batch. Padding is a document, too: with `begins` 0
  /// for the first n tokens of a row and n for the others, the former are as in a row of n tokens.
  Tensor begins = {};
  /// Where the document of each key begins, i32[B, S], if keys are not those of the queries' tokens, as in cross-attention; not `causal`,
  /// and only in attention(). Then begins[b, t] is the key at which the document that query t attends to begins; it does not decrease
  /// along t, is S for a query that sees no key, and 0 if `begins` is undefined. So the first n of S keys are seen, and padding behind
  /// them is not, with key_begins 0 for the former and n for the latter (if n is 0, `begins` is S). Sharded like the batch, `begins`
  /// also like the queries.
  Tensor key_begins = {};
  /// How many keys a query sees, itself and those before it: query t sees those of the above with t + S - T - window < s
  /// (sliding-window attention; Beltagy et al., https://arxiv.org/abs/2004.05150). Causal only, and the work is proportional to the
  /// window. 0: all.
  int64_t window = 0;
  /// A score of each head, [H], that every query's softmax includes in addition to its keys' scores, without a value: a query's
  /// weights on its keys then sum to less than 1 (gpt-oss, https://arxiv.org/abs/2508.10925; kernels/attention_sinks.h). Computed in
  /// the dtype of statistics, f32 or f64. Undefined: none. Not in latent_attention().
  Tensor sinks = {};
};
/// softmax(scale q kᵀ) v per head for q[B, T, H, D], k[B, S, G, D] and v[B, S, G, E]: [B, T, H, E]. H is a multiple of G, and head h
/// reads key head h / (H / G). q, k and v have one floating dtype (DTypeError), the result's; ShapeError for other shapes, or for a
/// window without `causal`. Never builds the T x S matrix. A query that sees no key gives zeros. Queries may be Shard(1)
/// with keys and values Replicate, whose gradients are then Partial: each rank computes its own queries, at their positions.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});
/// The same for a packed projection [B, T, (H + 2 G) D] of queries, keys and values, to [B, T, H D]. Its gradient is one tensor,
/// written in place, where three slices would each be padded and added. Heads are sharded by OwnershipMap::parts(2, {H D, G D, G D},
/// units) where every unit has whole key heads: the result is Shard(2) in as many units.
Tensor packed_attention(const Tensor& qkv, int64_t heads, int64_t kv_heads, const AttentionOptions& options = {});
/// Attention of multi-head latent attention (DeepSeek-AI, https://arxiv.org/abs/2405.04434): of q[B, T, H D] and up[B, T, H (N + E)],
/// which holds per head N elements of each key and the E elements of its value, with the last D - N elements of keys, shared by all
/// heads, in shared[B, T, D - N]: [B, T, H E]. Keys are assembled where needed and never kept. Heads are sharded by
/// OwnershipMap::even of q and up in equally many units; queries as in attention().
Tensor latent_attention(const Tensor& q, const Tensor& up, const Tensor& shared, int64_t heads, const AttentionOptions& options = {});
struct GatedDeltaRuleOptions {
  int64_t heads = 0;      ///< H, of values; a multiple of key_heads
  int64_t key_heads = 0;  ///< G, of queries and keys
  int64_t key_width = 0;  ///< D
  double scale = 0;       ///< of queries; 0: 1 / sqrt(D)
  /// Queries and keys are divided by sqrt(sum of their squares + norm_eps) first; 0: they are not normalised.
  double norm_eps = 1e-6;
  Tensor begins = {};        ///< as in AttentionOptions: the state is zero before each document
  Tensor initial = {};       ///< the state before the first token [B, H, D, E], f32 (f64 for f64); undefined: zero
  bool keeps_state = false;  ///< the state after the last token is a result, too
};
struct DeltaRuleResult {
  Tensor out;    ///< [B, T, H E]
  Tensor state;  ///< [B, H, D, E], f32 (f64 for f64), if it is kept
};
/// The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464) of a packed projection [B, T, 2 G D + H E] of queries, keys
/// and values: a head has a state S[D, E] in place of all tokens' keys and values. With decay[B, T, H] <= 0 and beta[B, T, H],
/// computed in f32 (f64 for f64), each token replaces it by S = exp(decay) S, then by S + k (beta (v - Sᵀ k))ᵀ, and outputs scale Sᵀ
/// q. Value head h reads key head h / (H / G). Computed in chunks of 64 tokens (kernels/delta_rule.h). Heads are sharded by
/// OwnershipMap::parts(2, {G D, G D, H E}, units) where every unit has whole key heads: the result is Shard(2) in as many units.
/// Second derivatives hold matrices [B, H, T, T] in memory, and require finite decays.
DeltaRuleResult gated_delta_rule(const Tensor& qkv, const Tensor& decay, const Tensor& beta, const GatedDeltaRuleOptions& options);
struct CausalConvOptions {
  bool silu = false;   ///< applied to the result
  Tensor begins = {};  ///< as in AttentionOptions: tokens before a token's document count as zero
};
/// A depthwise causal convolution along the tokens, over a token and the W - 1 before it: Σ_j weight[c, j] x[b, t - W + 1 + j, c],
/// for x[B, T, C] and weight[C, W]. Channels may be sharded in any way, tokens not.
Tensor causal_conv(const Tensor& x, const Tensor& weight, const CausalConvOptions& options = {});
/// A packed projection [B, T, (H + 2 G) D] with each key and value head repeated `times` times, adjacently:
/// [B, T, (H + 2 G times) D]. If `times` divides H / G its attention equals that of qkv, and more ranks can share its heads. A cut by
/// OwnershipMap::parts in units of whole key heads remains one in as many units. The gradient of a head is the sum of its copies'.
Tensor repeat_key_heads(const Tensor& qkv, int64_t heads, int64_t kv_heads, int64_t times);
/// The tensor of repeat_key_heads from queries [B, T, H D], sharded evenly in units of whole groups that read one copy, and from
/// replicated keys and values [B, T, 2 G D]: each rank takes the copies that its queries read, without communication. So a layer can
/// be shared by more ranks than it has key heads. `times` divides H / G.
Tensor pack_heads(const Tensor& queries, const Tensor& keys_values, int64_t heads, int64_t kv_heads, int64_t times);
/// For concatenated documents in tokens[.., T], integers, each but the last ended by the token `end_of_text`: where each token's
/// document begins, i32[.., T]. The token that ends a document belongs to it. Sequences must be whole on every rank.
Tensor document_begins(const Tensor& tokens, int64_t end_of_text);
/// rms_norm over D of each query and key of a packed x[B, T, H + 2 G, D], with one weight [D] for all queries and one for all keys;
/// values are unchanged (Qwen3, https://arxiv.org/abs/2505.09388). Heads are sharded by OwnershipMap::parts(2, {H, G, G}, units).
Tensor packed_rms_norm(const Tensor& x, int64_t heads, const Tensor& query_weight, const Tensor& key_weight,
                       double eps = 1e-5);
struct RotaryOptions {
  double theta = 10000.0;  ///< base of the frequencies
  int64_t first_position = 0;
  int64_t heads = -1;          ///< only the first `heads` are rotated, such as queries and keys of a packed projection; -1: all
  int64_t width = -1;          ///< only the last `width` elements of each; -1: all
  bool neighbours = false;     ///< pairs are elements 2i and 2i + 1 of these, as in DeepSeek's checkpoints
  RotaryScaling scaling = {};  ///< lowers the frequencies (it says how, and from where)
  /// Rows begin at these positions, i32[B, T]: the position of a token is first_position + t - begins[b, t]; undefined: all begin at
  /// 0.
  Tensor begins = {};
};
/// Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864) of x[B, T, H, D]: of R rotated elements, those of pair i,
/// which are i and i + R/2 as in Llama's Hugging Face checkpoints, are rotated by position theta^(-2i/R). Tokens may be sharded, and
/// keep their global positions; so may heads, packed ones in parts if the rotated heads end at a part's end.
Tensor rotary(const Tensor& x, const RotaryOptions& options = {});

struct CrossEntropyOptions {
  int64_t ignore_index = -1;  ///< rows with this target do not count
  double divide_by = 0;       ///< what the sum over rows is divided by; 0: the global number of targets of this call, ignored or not: with
                              ///< gradient accumulation pass that of all micro-batches
  Tensor divisor = {};        ///< the same as a scalar tensor; takes precedence. A model's auxiliary losses, which are means over all tokens
                              ///< whether targets or not, use divide_by if both are given; if only one is, they are scaled as the loss is
  bool mean_of_counted = false;  ///< divide by the number of this call's targets that are not ignored, of all ranks: a collective in the
                                 ///< step. At least 1; not with the other two, nor per_target
  bool recompute = false;     ///< linear_cross_entropy: recompute the logits in the backward, which saves the memory of the weight's
                              ///< gradient in between and costs a third more
  double softcap = 0;         ///< logits l become softcap tanh(l / softcap) first (Gemma 2, https://arxiv.org/abs/2408.00118); 0: unchanged
  double z_loss = 0;          ///< factor of log(sum(exp(logits)))², which is added to the loss of each row that counts and keeps logits
                              ///< from drifting (PaLM, https://arxiv.org/abs/2204.02311, section 5)
  double label_smoothing = 0;  ///< e in [0, 1]: the loss is 1 - e times that of the target plus e times the mean of those of all classes
                               ///< (Szegedy et al., https://arxiv.org/abs/1512.00567, section 7). linear_cross_entropy: not with a softcap
  bool per_target = false;    ///< return each target's loss [..] instead of their mean, not divided, 0 where ignored: without z_loss the
                              ///< negative log-likelihood
};
/// Scalar loss in nats, f32 (f64 for f64): the sum over rows of log(sum(exp(logits))) - logits[target], divided. Integer
/// targets[..] for logits[.., V]; one outside [0, V) throws DataError. Rows cut over ranks give a Partial loss.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});
/// cross_entropy(linear(x, weight), targets) in chunks of rows, so that the logits never exist whole. If the weight's rows are
/// sharded, it is assembled from linear_lse: x and targets must be whole on that axis, the loss is Partial. Per-target losses use
/// linear_lse, too, and so do smoothed labels; their backward recomputes the logits.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options = {});
/// A vocabulary shard's contribution to the loss (Shoeybi et al., https://arxiv.org/abs/1909.08053, section 3).
struct LinearLse {
  Tensor lse;            ///< [M, ..]: log(sum(exp(logits))) over each of the M shards of the weight's rows
  Tensor target_logits;  ///< [..]: the logit of the target; Partial where the rows are sharded
};
/// For logits = linear(x[.., C], weight[V, C]), which never exist whole, and integer targets[..]; M is 1 if V is not sharded. For a
/// target of ignore_index logsumexp(lse, {0}) and the target's logit are both 0.
LinearLse linear_lse(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t ignore_index = -1, double softcap = 0);
/// cap tanh(x / cap): x softly limited to a cap > 0, as Gemma 2 limits logits.
Tensor softcap(const Tensor& x, double cap);

}  // namespace sheaf
