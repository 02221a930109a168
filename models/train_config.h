// The options of a training run, as plain structs. tools/config.h reads them from TOML and the command line; a program
// of its own sets the fields.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf::models {

/// [model.rope_scaling] Rotary frequencies for longer contexts than that of the first training, by the names of Hugging
/// Face's config.json; RotaryScaling has the formulas. The defaults are Llama 3.1's, except the type.
struct RopeScalingConfig {
  std::string rope_type = "default";  ///< "default" (as they are), "linear", "llama3" or "yarn"
  double factor = 8.0;                ///< what slow frequencies (linear: all) are divided by
  double low_freq_factor = 1.0;       ///< turns in the original context up to which one is slow (llama3)
  double high_freq_factor = 4.0;      ///< turns from which on one stays as it is (llama3)
  int64_t original_max_position_embeddings = 8192;  ///< the original context (llama3, yarn)
  double beta_slow = 1.0;             ///< as low_freq_factor (yarn)
  double beta_fast = 32.0;            ///< as high_freq_factor (yarn)
  bool truncate = true;               ///< the blend is between whole indices of frequencies (yarn)
  double attention_factor = 0.0;      ///< of queries and keys; 0: follows from the factor and the two below (yarn)
  double mscale = 0.0;                ///< of the factor's logarithm, if both are not 0 (yarn)
  double mscale_all_dim = 0.0;        ///< of the logarithm that it is divided by, and by whose square latent attention's scores go up (yarn)
  bool operator==(const RopeScalingConfig&) const = default;
};

/// What the options mean to the model; throws ConfigError for another type.
inline RotaryScaling rotary_scaling(const RopeScalingConfig& c) {
  if (c.rope_type == "default") return {};
  if (c.rope_type == "linear") return RotaryScaling::linear(c.factor);
  if (c.rope_type == "llama3")
    return RotaryScaling::llama3(c.factor, c.low_freq_factor, c.high_freq_factor, c.original_max_position_embeddings);
  if (c.rope_type == "yarn") {
    RotaryScaling s = RotaryScaling::yarn(c.factor, c.original_max_position_embeddings, c.beta_slow, c.beta_fast, c.truncate);
    if (c.attention_factor != 0) s.amplitude = c.attention_factor;
    else if (c.mscale != 0 && c.mscale_all_dim != 0)
      s.amplitude = RotaryScaling::yarn_amplitude(c.factor, c.mscale) /
                    RotaryScaling::yarn_amplitude(c.factor, c.mscale_all_dim);
    return s;
  }
  fail<ConfigError>("[model] unknown rope_type '", c.rope_type, "'; known: default, linear, llama3, yarn");
}

/// [model] What to train.
struct ModelConfig {
  std::string type = "gpt2";    ///< "gpt2" or "llama"
  std::string preset;           ///< a published size, such as "gpt2-124m" or "llama3-8b"; fields given along with it win
  std::string weights;          ///< published weights to start from, a folder or a file; "": random ones
  int64_t layers = 4;           ///< transformer blocks
  int64_t heads = 4;            ///< query heads
  int64_t kv_heads = 0;         ///< key and value heads (grouped-query attention); 0: as many as heads
  int64_t width = 128;          ///< size of the residual stream
  int64_t head_dim = 0;         ///< width of a head; 0: width / heads, as always in gpt2; with latents as these say
  int64_t kv_lora_rank = 0;     ///< keys and values are made from a latent of this width (multi-head latent attention; llama); 0: not
  int64_t q_lora_rank = 0;      ///< then: of the latent that queries are made from; 0: they have none
  int64_t qk_nope_head_dim = 0;  ///< of queries and keys, what is not rotated; 0: width / heads
  int64_t qk_rope_head_dim = 0;  ///< what is, which all heads' keys share; 0: half of that
  int64_t v_head_dim = 0;       ///< of values; 0: qk_nope_head_dim
  int64_t linear_key_heads = 0;  ///< blocks have linear attention with this many key heads, not attention (Gated DeltaNet; llama); 0: not
  int64_t linear_value_heads = 0;  ///< then: value heads, a multiple; 0: as many
  int64_t linear_key_head_dim = 0;  ///< width of its queries and keys; 0: of attention's heads
  int64_t linear_value_head_dim = 0;  ///< of its values; 0: of its keys
  int64_t linear_conv_kernel = 4;      ///< width of the convolution of each channel before it, in tokens
  int64_t rotary_dim = 0;     ///< how many of a head's last elements are rotated in attention; 0: all (llama)
  int64_t mlp_width = 0;        ///< hidden size of the MLP; 0: 4·width for gpt2, 8/3·width up to a multiple of 64 for llama
  int64_t context = 64;         ///< tokens per sequence
  int64_t vocab = 0;            ///< vocabulary size; 0: that of the tokenizer
  int64_t window = 0;           ///< keys that a token sees, itself and those before it (sliding-window attention); 0: all
  double window_rope_theta = 0.0;  ///< base of rotary frequencies in blocks with a window, unscaled; 0: those of others (llama)
  int64_t full_attention_every = 0;  ///< with a window or linear attention: blocks N, 2·N, .., counted from 1, see all (window_of_block); 0: none
  int64_t nope_every = 0;       ///< blocks N, 2·N, .., counted from 1, have no rotary positions (NoPE); 0: all have them (llama)
  int64_t experts = 0;          ///< MLPs of which each token goes through some (mixture of experts); 0: one MLP (llama)
  int64_t experts_per_token = 2;  ///< how many
  int64_t expert_hidden = 0;    ///< hidden size of each; 0: mlp_width
  double capacity_factor = 0.0;  ///< places of an expert, as a multiple of an even share of choices; 0: nothing is dropped
  int64_t expert_groups = 1;    ///< parts of a sequence for which these places are counted apart
  std::string expert_affinity = "softmax";  ///< of a router's logits: "softmax" among all experts, or each expert's "sigmoid"
  double expert_balance_rate = 1e-3;  ///< how far a step moves experts' biases, against the sign of the load; 0: they stay
  double expert_scale = 1.0;    ///< of the weights of a token's experts
  double expert_gate_limit = 0.0;  ///< experts' gates are gpt-oss's, held to this (clamped_swiglu); 0: SwiGLU's
  double expert_gate_alpha = 1.702;  ///< there, of the sigmoid's argument
  int64_t expert_parts = 1;     ///< equal parts of the experts, of which
  int64_t expert_parts_per_token = 1;  ///< a token's choices are in this many
  int64_t shared_experts = 0;   ///< besides those that are chosen; every token goes through them
  int64_t dense_layers = 0;     ///< this many first blocks have an MLP of mlp_width instead of a mixture
  double aux_loss = 0.0;        ///< factor of the load-balancing loss of each mixture, added to the training loss
  double router_z_loss = 0.0;   ///< factor of the mean square of its router's log-sum-exps there, which keeps logits small
  int64_t mtp_layers = 0;       ///< layers that each predict one token further, in training and for drafts (MTP; llama)
  double mtp_loss = 0.3;        ///< factor of the mean of their losses in the training loss
  int64_t query_pre_attn_scalar = 0;  ///< scores are divided by its root, not that of the head's width, as in Gemma 3 27B (llama)
  double attn_logit_softcapping = 0.0;  ///< attention's scores are held within it, as Gemma 2's; 0: they are not
  double final_logit_softcapping = 0.0;  ///< logits are
  bool bias = false;            ///< biases in linear layers and layer norms (gpt2)
  bool qkv_bias = false;        ///< queries, keys and values have biases, as Qwen2's (llama)
  bool out_bias = false;        ///< what attention adds has a bias, as gpt-oss's (llama)
  bool attention_gate = false;  ///< the output of attention's heads is gated, as Qwen3-Next's (llama)
  bool attention_sinks = false;  ///< each head's softmax has a score without a value, as gpt-oss's (llama)
  bool qk_norm = false;         ///< each query and key is normalised, as Qwen3's (llama)
  bool qk_norm_all_heads = false;  ///< those of all of a token's heads together, as OLMo 2's (llama)
  bool gelu_gate = false;       ///< MLPs are GeGLU, as Gemma's, not SwiGLU (llama)
  bool pre_norms = true;        ///< what attention and MLPs read is normalised; false: only what they give, as OLMo 2's (llama)
  bool post_norms = false;      ///< what attention and MLPs give is normalised, too, as Gemma 3's (llama)
  bool scale_embedding = false;  ///< tokens' embeddings are multiplied by sqrt(width), as Gemma's (llama)
  bool expert_bias = false;     ///< each expert has a bias that is added where experts are chosen, and only there
  bool shared_expert_gate = false;  ///< the output of shared experts is multiplied by one number a token, as Qwen2-MoE's
  bool expert_linear_bias = false;  ///< routers and the linear layers of experts have biases, as gpt-oss's
  bool normalize_experts = true;  ///< the weights of a token's experts add up to 1 (Mixtral), or those of all do (Switch)
  bool tie_embeddings = true;   ///< the output head is the token embedding
  double dropout = 0.0;         ///< probability, in [0, 1)
  int64_t lora_rank = 0;        ///< of adapters that are trained instead of the weights (LoRA); 0: there are none
  double lora_alpha = 16.0;     ///< what they add is scaled by lora_alpha / lora_rank
  std::string lora_layers = "all";  ///< which linear layers of the blocks have one: "all", "attention" or "mlp"
  std::string quantize = "none";  ///< how untrained matrices of blocks rest: "int8" or "nf4" (BlockFormat), or as they are
  double rope_theta = 10000.0;  ///< base of the rotary frequencies (llama)
  RopeScalingConfig rope_scaling;  ///< of these frequencies (llama)
  double norm_eps = 1e-5;       ///< added to the variance in norms
  int64_t end_of_text = -1;     ///< no option of its own: follows from [data] (model_of), -1 where documents are not separated
};

/// With MTP layers, which are blocks, too.
inline int64_t num_blocks(const ModelConfig& m) { return m.layers + m.mtp_layers; }

/// `m` with the fields that 0 leaves to its type filled in: key and value heads, their widths, the hidden size of the MLP and of experts.
inline ModelConfig resolved(ModelConfig m) {
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.kv_lora_rank && m.heads > 0) {
    if (m.qk_nope_head_dim == 0) m.qk_nope_head_dim = m.width / m.heads;
    if (m.qk_rope_head_dim == 0) m.qk_rope_head_dim = m.qk_nope_head_dim / 2;
    if (m.v_head_dim == 0) m.v_head_dim = m.qk_nope_head_dim;
    m.head_dim = m.qk_nope_head_dim + m.qk_rope_head_dim;
  }
  if (m.head_dim == 0 && m.heads > 0) m.head_dim = m.width / m.heads;
  if (m.linear_key_heads) {
    if (m.linear_value_heads == 0) m.linear_value_heads = m.linear_key_heads;
    if (m.linear_key_head_dim == 0) m.linear_key_head_dim = m.head_dim;
    if (m.linear_value_head_dim == 0) m.linear_value_head_dim = m.linear_key_head_dim;
  }
  if (m.mlp_width == 0) m.mlp_width = m.type == "llama" ? (8 * m.width / 3 + 63) / 64 * 64 : 4 * m.width;
  if (m.experts && m.expert_hidden == 0) m.expert_hidden = m.mlp_width;
  return m;
}

/// Whether the linear layer of a block at `path`, or what is below it, has an adapter: "blocks.0.attention.qkv" for `layers` "all" and
/// "attention". ConfigError for other `layers` than these and "mlp".
inline bool takes_lora(const std::string& path, const std::string& layers) {
  check<ConfigError>(layers == "all" || layers == "attention" || layers == "mlp", "[model] unknown lora_layers '", layers,
                     "'; known: all, attention, mlp");
  const auto part = [&](const char* name) { return path.starts_with("blocks.") && path.find(name) != std::string::npos; };
  return (layers != "mlp" && (part(".attention.") || part(".latent_attention.") || (part(".linear_attention.") && !part(".rates")))) || (layers != "attention" && (part(".mlp.") || part(".moe.shared.")));
}

/// [data] What to train on: a text, or token files.
struct DataConfig {
  std::string corpus;              ///< UTF-8 text file
  std::string tokenizer = "char";  ///< or "byte", "gpt2", "llama3", "huggingface": these three say what token files mean, too
  std::string tokenizer_folder;    ///< with the published files of the last three
  double val_fraction = 0.1;       ///< tail of the text held out for validation, in (0, 1)
  std::string train_file;          ///< token file to train on, instead of a text; or a pattern (*, ?, [...]) of several; or
                                   ///< weights and patterns in turn, "0.7 web_*.bin 0.3 code_*.bin"
  std::string val_file;            ///< token file to validate on, or several; or named sets of them (ValidationSets::open)
  std::string choices;             ///< questions with choices that evaluations answer, JSON lines; or named sets of them (open_questions)
  std::string order = "shuffled";  ///< of windows to train on: "shuffled" in epochs, each once, or at "random" places
  bool separate_documents = false;  ///< tokens attend to those of their own document alone
  bool examples = false;           ///< no option of its own: files to train on hold examples, of which not all targets count
  int64_t end_of_text = -1;        ///< the token that ends a document; -1: the tokenizer's
};

/// Whether a tokenizer comes from files that somebody published.
inline bool is_published(std::string_view tokenizer) {
  return tokenizer == "gpt2" || tokenizer == "llama3" || tokenizer == "huggingface";
}

/// [train] How to train.
struct OptimizationConfig {
  int64_t steps = 2000;             ///< optimizer steps
  double epochs = 0;                ///< how often the data are read, which decides the number of steps; 0: `steps` does
  int64_t batch = 12;               ///< sequences per step, over all ranks and micro-batches
  int64_t micro_batches = 1;        ///< parts of the batch whose gradients are accumulated one after the other
  int64_t seed = 1337;              ///< of initial weights, dropout and the order of data
  double lr = 1e-3;                 ///< peak learning rate
  std::string lr_factors;           ///< "0.1 wte.* 2 *.norm*": what learning rates are multiplied by (factors_by_name); others: 1
  double min_lr = -1;               ///< learning rate where the decay ends, and after it; -1: a tenth of `lr`
  int64_t warmup = 100;             ///< steps of linear warm-up
  std::string schedule = "cosine";  ///< "cosine", "linear" or "constant" after the warm-up
  int64_t decay_start = 0;          ///< step at which the learning rate starts to fall; 0: after the warm-up
  int64_t decay_end = 0;            ///< step at which it is min_lr (nanoGPT's lr_decay_iters); 0: the number of steps
  std::string optimizer = "adamw";  ///< "adamw", or "muon" for the matrices in blocks, with AdamW for the rest
  double momentum = 0.95;           ///< Muon
  double weight_decay = 0.1;        ///< of parameters with two dimensions or more, or as the next option says
  std::string weight_decay_factors;  ///< as lr_factors: 0 for parameters that do not decay
  double beta1 = 0.9;               ///< AdamW
  double beta2 = 0.99;              ///< AdamW
  double eps = 1e-8;                ///< AdamW
  double clip = 1.0;                ///< largest norm of the gradient; 0: no clipping
  double z_loss = 0.0;              ///< factor of the mean square of log-sum-exps of logits in the training loss, which keeps them from drifting
  int64_t eval_every = 250;         ///< steps between evaluations; 0: only at the end
  int64_t eval_tokens = 0;          ///< targets per evaluation; 0: the whole validation split
  int64_t eval_questions = 0;       ///< of each set of data.choices; 0: all
  int64_t log_every = 1;            ///< steps between lines of metrics.jsonl
  std::string log_norms = "none";   ///< in these lines, norms of gradients and weights: of each of the "units" or "parameters", or "none"
  int64_t save_every = 0;           ///< steps between checkpoints; 0: only at the end
  int64_t islands = 1;              ///< groups of ranks that train a model each, on equal parts of the batch, and agree on one now and
                                    ///< then (DiLoCo, optim::DiLoCo); 1: none
  int64_t inner_steps = 50;         ///< islands: steps from one agreement to the next
  double outer_lr = 0.7;            ///< islands: learning rate of the outer step
  double outer_momentum = 0.9;      ///< islands: of the outer step, Nesterov's
  std::string outer_dtype = "f32";  ///< islands: of what they send each other: "f32", parameters, or "bf16" or "int8": what these have
                                    ///< moved by, in half or a quarter of the bytes (optim::Moves)
  std::string dtype = "f32";        ///< of the computation: "f32", or "bf16" or "f16" with f32 masters, gradients, statistics
  std::string state_dtype = "f32";  ///< of the optimizer's state at rest: "f32", or "bf16", rounded stochastically
  std::string fp8 = "none";         ///< products of layers in FP8 (sheaf::Fp8): "activations" and their gradients, or "all": gradients
                                    ///< of weights, too, except those of experts
  double loss_scale = 65536;        ///< f16: factor of the loss in the first step
  int64_t loss_scale_interval = 2000;  ///< f16: steps without overflow after which it doubles
  std::string recompute = "none";   ///< what the backward computes again instead of keeping: "none", "selective" (of blocks, what
                                    ///< is cheap), "block" by block, or "fit": as little as sharding.memory_budget asks for
  int64_t recompute_blocks = -1;    ///< "block", "selective": how many of each stage, from the first, are recomputed whole; -1: all, none
  bool offload_activations = false; ///< on a GPU: what blocks are computed again from waits in the host's memory
  bool offload_optimizer = false;   ///< on a GPU: the optimizer's state is kept in the host's memory
  bool offload_parameters = false;  ///< on a GPU: so are masters and gradients
  bool save_async = false;          ///< checkpoints are written while training goes on, from a copy in memory
  bool compile = false;             ///< from the fourth step on, run the third one's tape again as a program
  bool fuse = true;                 ///< in a program elementwise ops in a row run as one, with the same bits
  bool cuda_graph = false;          ///< on a GPU: capture the third step and replay it from then on
  bool tune_products = true;        ///< on a GPU: choose the algorithms of products by timing, in the first step
};

/// `t` with what it leaves to other fields filled in: where the decay, which a constant schedule lacks, starts and ends, and at what.
inline OptimizationConfig resolved(OptimizationConfig t) {
  if (t.min_lr < 0) t.min_lr = t.lr / 10;
  if (t.schedule == "constant") return t;
  if (t.decay_start == 0) t.decay_start = t.warmup;
  if (t.decay_end == 0) t.decay_end = t.steps;
  return t;
}

/// [sharding] Who holds what.
struct ShardingConfig {
  std::string strategy = "full_shard";  ///< "full_shard", "shard_grad_op", "zero1" or "replicate"
  int64_t replicas = 1;                 ///< groups of ranks that each hold the model, cut within (hybrid sharding, HSDP)
  bool secondary = false;               ///< groups gather their copy once a step; masters and states are cut over them, too
  bool gather_int8 = false;             ///< matrices are gathered in blocks of int8 codes (ShardOptions::gather_int8)
  int64_t experts = 1;                  ///< ranks, neighbours, that share the experts of mixtures (expert parallelism)
  int64_t context = 1;                  ///< ranks that share each sequence (context parallelism)
  std::string context_comm = "all_to_all";  ///< what they send in attention: "all_to_all", each has whole sequences of some heads, or
                                        ///< "all_gather": each has its own queries, and all keys and values. The ops are those of
                                        ///< any number of ranks, one included
  int64_t pipeline = 1;                 ///< stages, of consecutive blocks, through which micro-batches go (pipeline parallelism)
  int64_t pipeline_runs = 1;            ///< runs of blocks in each stage, which micro-batches go round (interleaved 1F1B)
  std::string pipeline_schedule = "1f1b";  ///< "1f1b", or "zero_bubble": gradients of weights fill what stages wait
  double pipeline_head = -1;            ///< how many blocks the head and its loss count as among stages; -1: by its operations
  int64_t tensor = 1;                   ///< ranks, neighbours, that share each layer and each sequence (tensor parallelism)
  int64_t piece_rows = 128;             ///< what these ranks' layers gather, and sums of theirs, travel in pieces of at least n rows,
                                        ///< while other pieces are multiplied; 0: whole
  std::string reduce_dtype = "f32";     ///< of what ranks send each other of gradients: "f32", "bf16" for half of the bytes, or "int8":
                                        ///< in blocks of int8 codes, for a quarter (ShardOptions::reduce_int8)
  std::string units = "block";          ///< "block": a unit per block, and for each table that is not tied;
                                        ///< "count": by parameters; "none": one unit
  int64_t min_parameters = 1'000'000;   ///< parameters of a unit, for units = "count"
  int64_t memory_budget = 0;            ///< bytes of a rank: for train.recompute fit, and within which a program
                                        ///< (train.compile) keeps units instead of gathering them again
  int64_t prefetch_bytes = -1;          ///< gathered ahead of use, at most; -1: one unit; 0: no prefetch
};

/// [output] Where results go.
struct OutputConfig {
  std::string folder = "out";    ///< metrics.jsonl, checkpoints and the configuration
  int64_t keep_checkpoints = 2;  ///< newest ones kept, at least 2; 0: all
  bool keep_best = false;        ///< the weights of the lowest validation loss stay in best/, a folder like that of a run
  bool tensorboard = false;      ///< metrics for TensorBoard, too, in tensorboard/
  int64_t trace_step = 0;        ///< the step whose time line is measured, for trace.json; 0: none
};

/// [generate] A sample from a trained model.
struct GenerateConfig {
  std::string prompt = "\n";  ///< text to continue
  int64_t tokens = 400;       ///< tokens to add
  double temperature = 0.8;   ///< divides the logits; 0: always the likeliest token
  int64_t top_k = 0;          ///< choose among the k likeliest; 0: among all
  double top_p = 1;           ///< of these among the likeliest that make up this much of their probability (nucleus sampling)
  bool ignore_end_of_text = false;  ///< go on after the token that ends a text, or a turn
  bool special_tokens = false;  ///< the prompt may have special tokens in it, by their names
  std::string chat = {};      ///< "chatml", "llama3", "gemma": the prompt is what a user says, and an assistant answers (ChatFormat); "": a text
  std::string system = {};    ///< in a chat: what the assistant is told first
  std::string end_token = {};  ///< a special token that ends what is generated, besides the tokenizer's end of text
  std::string dtype = "f32";  ///< generate_from_folder's, of weights and computing: "f32", or "bf16" or "f16" in half of the memory
  std::string quantize = "none";  ///< generate_from_folder's: matrices of blocks rest in "int8" or "nf4" blocks (ModelConfig::quantize)
  int64_t seed = 1337;        ///< of the choices
  int64_t drafts = 1;         ///< tokens that MTP layers draft for each pass (Drafter), at most one by each layer; 0: none
};

struct TrainConfig {
  ModelConfig model;
  DataConfig data;
  OptimizationConfig train;
  ShardingConfig sharding;
  OutputConfig output;
  GenerateConfig generate;
};

/// The model, told which token ends a document if these are kept apart. Which one it is changes neither a tape nor its memory:
/// it may not be known yet.
inline ModelConfig model_of(const TrainConfig& config) {
  ModelConfig m = config.model;
  if (config.data.separate_documents) m.end_of_text = config.data.end_of_text < 0 ? 0 : config.data.end_of_text;
  return m;
}

/// What one of the islands (train.islands) trains: its part of each batch. ConfigError where parts would not be equal.
inline TrainConfig island_of(TrainConfig config) {
  const int64_t islands = std::exchange(config.train.islands, 1);
  if (islands < 1 || config.train.batch % islands != 0)
    fail<ConfigError>("[train] train.batch ", config.train.batch, " has no equal part for each of train.islands ", islands);
  config.train.batch /= islands;
  return config;
}
/// The reverse: this many islands, each of which trains `config`.
inline TrainConfig islands_of(TrainConfig config, int64_t islands) {
  config.train.islands = islands;
  config.train.batch *= islands;
  return config;
}

}  // namespace sheaf::models
