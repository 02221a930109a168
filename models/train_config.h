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
  std::string rope_type = "default";                ///< "default" (as they are), "linear", "llama3", "yarn" or "longrope"
  double factor = 8.0;                              ///< divisor of low frequencies (linear: of all; longrope: see attention_factor)
  double low_freq_factor = 1.0;                     ///< frequencies with fewer turns in the original context are low (llama3)
  double high_freq_factor = 4.0;                    ///< frequencies with more turns in the original context are not scaled (llama3)
  int64_t original_max_position_embeddings = 8192;  ///< context before the scaling (llama3, yarn, longrope)
  double beta_slow = 1.0;             ///< frequencies with fewer turns in the original context are low (yarn)
  double beta_fast = 32.0;            ///< frequencies with more turns in the original context are not scaled (yarn)
  bool truncate = true;               ///< the range between them is rounded to whole indices (yarn)
  double attention_factor = 0.0;      ///< factor of rotated queries and keys; 0: 0.1 ln(factor) + 1 (yarn), or
                                      ///< sqrt(1 + ln(factor) / ln(original_max_position_embeddings)) (longrope)
  double mscale = 0.0;                ///< if not 0, that factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) (yarn)
  double mscale_all_dim = 0.0;        ///< see mscale; latent attention multiplies scores by the square of that divisor (yarn)
  std::string short_factor = {};           ///< divisors of the frequencies, one for each pair of a head, "1 1.05 1.1" (longrope)
  std::string long_factor = {};            ///< the same if the context is longer than the original one (longrope)
  bool operator==(const RopeScalingConfig&) const = default;
};

/// What the options mean to the model; throws ConfigError for another type, and for lists that hold other words than numbers.
RotaryScaling rotary_scaling(const RopeScalingConfig& c);

/// [model] What to train.
struct ModelConfig {
  std::string type = "gpt2";                ///< "gpt2" or "llama"
  std::string preset;                       ///< a published model's size, "gpt2-124m" or "llama3-8b"; options given explicitly override it
  std::string weights;                      ///< published weights to start from, a folder or a file; "": random initialization
  int64_t layers = 4;                       ///< transformer blocks
  int64_t heads = 4;                        ///< query heads
  int64_t kv_heads = 0;                     ///< key and value heads (grouped-query attention); 0: as many as heads
  int64_t width = 128;                      ///< size of the residual stream
  int64_t head_dim = 0;                     ///< width of an attention head; 0: width / heads, as always in gpt2; with latents it follows from theirs
  int64_t kv_lora_rank = 0;                 ///< width of the latent of keys and values (multi-head latent attention; llama); 0: none
  int64_t q_lora_rank = 0;                  ///< width of the latent from which queries are computed; 0: none
  int64_t qk_nope_head_dim = 0;             ///< width of the part of queries and keys without rotary positions; 0: width / heads
  int64_t qk_rope_head_dim = 0;             ///< width of the part with rotary positions; 0: half of the other part
  int64_t v_head_dim = 0;                   ///< width of values; 0: qk_nope_head_dim
  int64_t linear_key_heads = 0;             ///< key heads of linear attention, which replaces attention except in every full_attention_every-th
                                 ///< block (Gated DeltaNet; llama); 0: none
  int64_t linear_value_heads = 0;           ///< value heads of linear attention, a multiple of its key heads; 0: as many
  int64_t linear_key_head_dim = 0;          ///< width of its queries and keys; 0: that of attention heads
  int64_t linear_value_head_dim = 0;        ///< width of its values; 0: that of its keys
  int64_t linear_conv_kernel = 4;           ///< tokens covered by the convolution of each of its channels
  int64_t rotary_dim = 0;                   ///< number of elements at the end of each head that are rotated; 0: all (llama)
  int64_t mlp_width = 0;                    ///< hidden size of the MLP; 0: 4·width for gpt2, 8/3·width up to a multiple of 64 for llama
  int64_t context = 64;                     ///< tokens per sequence
  int64_t vocab = 0;                        ///< vocabulary size; 0: that of the tokenizer
  int64_t window = 0;                       ///< keys a token attends to, itself included (sliding-window attention); 0: all
  double window_rope_theta = 0.0;           ///< rope_theta of blocks with a window, which is not scaled, as in Gemma 3; 0: rope_theta (llama)
  int64_t full_attention_every = 0;         ///< with a window or linear attention, blocks N, 2·N, .., from 1 on, have full attention; 0: none has
  int64_t nope_every = 0;                   ///< blocks N, 2·N, .., from 1 on, have no rotary positions (NoPE); 0: all have them (llama)
  int64_t experts = 0;                      ///< experts of each mixture of experts (llama); 0: an ordinary MLP
  int64_t experts_per_token = 2;            ///< experts each token is routed to
  int64_t expert_hidden = 0;                ///< hidden size of an expert; 0: mlp_width
  double capacity_factor = 0.0;             ///< tokens an expert takes, as a multiple of an even share; the rest are dropped; 0: nothing is dropped
  int64_t capacity_groups = 1;              ///< parts of a sequence in which this capacity is counted separately
  std::string expert_affinity = "softmax";  ///< how routers score experts: "softmax" over all of them, or a "sigmoid" of each
  double expert_balance_rate = 1e-3;        ///< how far a step moves experts' biases (expert_bias); 0: they are constant
  double expert_scale = 1.0;                ///< factor of the weights of a token's experts
  double expert_gate_limit = 0.0;           ///< experts have gpt-oss's gates, clamped to this (clamped_swiglu); 0: SwiGLU
  double expert_gate_alpha = 1.702;         ///< factor inside the sigmoid of these gates
  int64_t routing_groups = 1;               ///< equal groups of experts (DeepSeek's n_group)
  int64_t routing_groups_per_token = 1;     ///< groups among whose experts a token chooses (DeepSeek's topk_group)
  int64_t shared_experts = 0;               ///< additional experts that every token goes through
  int64_t dense_layers = 0;                 ///< the first N blocks have an MLP of mlp_width instead of a mixture
  double aux_loss = 0.0;                    ///< factor of the mixtures' load-balancing loss in the training loss
  double router_z_loss = 0.0;               ///< factor of the routers' z-loss (the mean squared log-sum-exp of their logits) in the training loss
  int64_t mtp_layers = 0;                   ///< additional layers, each of which predicts one token further ahead, for training and for drafts
                                ///< (multi-token prediction)
  double mtp_loss = 0.3;                    ///< factor of their mean loss in the training loss
  int64_t query_pre_attn_scalar = 0;        ///< attention scores are divided by the square root of this, as in Gemma 3 27B (llama); 0: by that
                                      ///< of the head's width
  double attn_logit_softcapping = 0.0;      ///< cap c of attention scores: a score s becomes c tanh(s / c), as in Gemma 2; 0: no cap
  double final_logit_softcapping = 0.0;     ///< the same cap for the logits
  bool bias = false;                        ///< biases in linear layers and layer norms (gpt2)
  bool qkv_bias = false;                    ///< biases of queries, keys and values, as in Qwen2 (llama)
  bool out_bias = false;                    ///< a bias of attention's output projection, as in gpt-oss (llama)
  bool attention_gate = false;              ///< the heads' outputs are multiplied by sigmoids of the layer's input, as in Qwen3-Next (llama)
  bool attention_sinks = false;             ///< each head's softmax has one more learned score, which belongs to no value, as in gpt-oss (llama)
  bool qk_norm = false;                     ///< queries and keys are normalized before they are rotated, as in Qwen3 (llama)
  bool qk_norm_all_heads = false;           ///< this norm is over all of a token's heads together, as in OLMo 2 (llama)
  bool gelu_gate = false;                   ///< MLPs are gated by gelu (GeGLU), as in Gemma, rather than by silu (SwiGLU; llama)
  bool pre_norms = true;                    ///< norms before attention and MLPs; false: only after them, as in OLMo 2 (llama)
  bool post_norms = false;                  ///< norms after attention and MLPs, before the residual is added, as in Gemma 3 (llama)
  bool scale_embedding = false;             ///< token embeddings are multiplied by sqrt(width), as in Gemma (llama)
  bool expert_bias = false;                 ///< routing has a bias for each expert, which evens out the load (DeepSeek-V3)
  bool shared_expert_gate = false;          ///< the shared experts' output is multiplied by a sigmoid for each token, as in Qwen2-MoE
  bool expert_linear_bias = false;          ///< biases of routers and of the experts' linear layers, as in gpt-oss
  bool normalize_experts = true;            ///< the weights of a token's experts add up to 1 (Mixtral); false: those of all experts do (Switch)
  bool tie_embeddings = true;               ///< the output head shares its weight with the token embedding
  double dropout = 0.0;                     ///< dropout probability
  int64_t lora_rank = 0;                    ///< rank of low-rank adapters, which are trained in place of the weights (LoRA); 0: none
  double lora_alpha = 16.0;                 ///< the adapters' output is scaled by this / lora_rank
  std::string lora_layers = "all";          ///< linear layers of the blocks that have adapters: "all", "attention" or "mlp"
  std::string quantize = "none";            ///< format of the blocks' frozen matrices: "int8" or "nf4" (BlockFormat); "none": their dtype
  double rope_theta = 10000.0;              ///< base of the rotary frequencies (llama)
  RopeScalingConfig rope_scaling;           ///< of these frequencies (llama)
  double norm_eps = 1e-5;                   ///< added to the variance in norms
  int64_t end_of_text = -1;                 ///< no option of its own: follows from [data] (model_of), -1 where documents are not separated
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

/// How many pairs of a head's elements are rotated; `m` is resolved.
inline int64_t rotated_pairs(const ModelConfig& m) {
  return (m.kv_lora_rank ? m.qk_rope_head_dim : m.rotary_dim ? m.rotary_dim : m.head_dim) / 2;
}

/// Whether the linear layer of a block at `path`, or what is below it, has an adapter: "blocks.0.attention.qkv" for `layers` "all" and
/// "attention". ConfigError for other `layers` than these and "mlp".
inline bool takes_lora(const std::string& path, const std::string& layers) {
  check<ConfigError>(layers == "all" || layers == "attention" || layers == "mlp", "[model] unknown lora_layers '", layers,
                     "'; known: all, attention, mlp");
  const auto part = [&](const char* name) { return path.starts_with("blocks.") && path.find(name) != std::string::npos; };
  const bool of_attention = part(".attention.") || part(".latent_attention.") || (part(".linear_attention.") && !part(".rates"));
  const bool of_mlp = part(".mlp.") || part(".moe.shared.");
  return (layers != "mlp" && of_attention) || (layers != "attention" && of_mlp);
}

/// [data] What to train on: a text, or token files.
struct DataConfig {
  std::string corpus;               ///< UTF-8 text file
  std::string tokenizer = "char";   ///< or "byte", "gpt2", "llama3", "huggingface": these three say what token files mean, too
  std::string tokenizer_folder;     ///< folder of its files: for gpt2 encoder.json and vocab.bpe, or vocab.json and merges.txt; for
                                   ///< llama3 tokenizer.model; for huggingface tokenizer.json
  double val_fraction = 0.1;        ///< fraction at the end of the text that is held out for validation, in (0, 1)
  std::string train_file;           ///< token file to train on, instead of a text; or a pattern (*, ?, [...]) of several; or
                                   ///< weights and patterns in turn, "0.7 web_*.bin 0.3 code_*.bin"
  std::string val_file;             ///< token file to validate on, or several; or named sets of them (ValidationSets::open)
  std::string choices;              ///< JSON lines of multiple-choice questions for evaluations; or named sets of them (open_questions)
  std::string order = "shuffled";   ///< of training windows: "shuffled", each once an epoch, or at "random" places
  bool separate_documents = false;  ///< tokens attend only to tokens of their own document
  bool examples = false;            ///< no option of its own: files to train on hold examples, of which not all targets count
  int64_t end_of_text = -1;         ///< the token that ends a document; -1: the tokenizer's
};

/// Whether a tokenizer comes from files that somebody published.
inline bool is_published(std::string_view tokenizer) {
  return tokenizer == "gpt2" || tokenizer == "llama3" || tokenizer == "huggingface";
}

/// [train] How to train.
struct OptimizationConfig {
  int64_t steps = 2000;                ///< optimizer steps
  double epochs = 0;                   ///< passes over the training data, in place of `steps`; 0: `steps` applies
  int64_t batch = 12;                  ///< sequences per step, over all ranks and micro-batches
  int64_t micro_batches = 1;           ///< parts of the batch whose gradients are accumulated one after another
  int64_t seed = 1337;                 ///< seed of initial weights, dropout and the order of data
  double lr = 1e-3;                    ///< peak learning rate
  std::string lr_factors;              ///< factors of learning rates by parameters' names, "0.1 wte.* 2 *.ln*" (factors_by_name); others: 1
  double min_lr = -1;                  ///< learning rate at the end of the decay and after it; -1: a tenth of `lr`
  int64_t warmup = 100;                ///< steps of linear warm-up
  std::string schedule = "cosine";     ///< "cosine", "linear" or "constant" after the warm-up
  int64_t decay_start = 0;             ///< step at which the decay starts; 0: after the warm-up
  int64_t decay_end = 0;               ///< step at which it ends (nanoGPT's lr_decay_iters); 0: the number of steps
  std::string optimizer = "adamw";     ///< "adamw", or "muon" for the matrices in blocks, with AdamW for the rest
  double momentum = 0.95;              ///< Muon's momentum
  double weight_decay = 0.1;           ///< of parameters with two dimensions or more, unless the next option says otherwise
  std::string weight_decay_factors;    ///< as lr_factors: 0 for parameters that do not decay
  double beta1 = 0.9;                  ///< AdamW's beta1
  double beta2 = 0.99;                 ///< AdamW's beta2
  double eps = 1e-8;                   ///< AdamW's epsilon
  double clip = 1.0;                   ///< largest norm of the gradient; 0: no clipping
  bool update_in_backward = false;     ///< with clip 0: update each unit as soon as its gradient is reduced, and free the gradient
  double z_loss = 0.0;                 ///< factor of the z-loss (the mean squared log-sum-exp of the logits) in the training loss
  int64_t eval_every = 250;            ///< steps between evaluations; 0: only at the end
  int64_t eval_tokens = 0;             ///< targets per evaluation; 0: the whole validation split
  int64_t eval_questions = 0;          ///< questions of each set of data.choices per evaluation; 0: all
  int64_t log_every = 1;               ///< steps between lines of metrics.jsonl
  std::string log_norms = "none";      ///< norms of gradients and weights in these lines: of each of the "units" or "parameters", or "none"
  int64_t save_every = 0;              ///< steps between checkpoints; 0: only at the end
  int64_t islands = 1;                 ///< groups of ranks that each train a model on their share of the batch and average them at intervals
                                    ///< (DiLoCo, optim::DiLoCo); 1: none
  int64_t inner_steps = 50;            ///< islands: steps between two outer steps
  double outer_lr = 0.7;               ///< islands: learning rate of the outer step; 1 without momentum takes the mean
  double outer_momentum = 0.9;         ///< islands: Nesterov momentum of the outer step
  std::string outer_dtype = "f32";     ///< islands: what they send each other: weights in "f32", or how far these have moved, in "bf16" or
                                    ///< "int8", half or a quarter of the bytes (optim::Moves)
  std::string dtype = "f32";           ///< dtype of compute: "f32", or "bf16" or "f16" with master weights, gradients and statistics in f32
  std::string state_dtype = "f32";     ///< dtype of the optimizer's state: "f32", or "bf16", rounded stochastically
  std::string fp8 = "none";            ///< matrix products in FP8 (sheaf::Fp8): those for "activations" and their gradients; or "all", with
                                    ///< those for weight gradients (except experts')
  double loss_scale = 65536;           ///< f16: initial factor of the loss
  int64_t loss_scale_interval = 2000;  ///< f16: steps without overflow after which this factor is doubled
  std::string recompute = "none";      ///< activation checkpointing: "none", "selective" (cheap ops of blocks), whole blocks ("block"), or
                                    ///< "fit": as little as fits into sharding.memory_budget
  int64_t recompute_blocks = -1;       ///< "block", "selective": the first blocks of each stage that are recomputed whole; -1: all, none
  bool offload_activations = false;    ///< on a GPU: the inputs of recomputed blocks are kept in host memory
  bool offload_optimizer = false;      ///< on a GPU: the optimizer's state is kept in host memory
  bool offload_parameters = false;     ///< on a GPU: master weights and gradients are kept in host memory, and a unit's weights copied from
                                    ///< there before its gather
  bool save_async = false;             ///< write checkpoints from a copy in memory while training continues
  bool compile = false;                ///< from the fourth step on, run the third one's tape again as a program
  bool fuse = true;                    ///< with compile: fuse consecutive elementwise ops, bit for bit
  bool cuda_graph = false;             ///< on a GPU: capture the third step and replay it from then on
  bool tune_products = true;           ///< on a GPU: choose algorithms of matrix products by timing them in the first step
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
  std::string strategy = "full_shard";      ///< "full_shard", "shard_grad_op", "zero1" or "replicate"
  int64_t replicas = 1;                     ///< groups of ranks that each hold the whole model, sharded within (hybrid sharding, HSDP)
  bool secondary = false;                   ///< masters and optimizer state are sharded over these groups as well, which gather once a step
  bool gather_int8 = false;                 ///< gather matrices as blocks of int8 codes (ShardOptions::gather_int8)
  int64_t experts = 1;                      ///< neighboring ranks that share the experts of mixtures (expert parallelism)
  int64_t context = 1;                      ///< ranks that share each sequence (context parallelism)
  std::string context_comm = "all_to_all";  ///< its collective: "all_to_all" gives a rank whole sequences of some heads, "all_gather" all
                                        ///< keys and values for its own queries. The ops are the same for any number of ranks
  int64_t pipeline = 1;                     ///< stages of consecutive blocks (pipeline parallelism)
  int64_t pipeline_runs = 1;                ///< runs of consecutive blocks per stage (interleaved pipeline)
  std::string pipeline_schedule = "1f1b";   ///< "1f1b", or "zero_bubble", which defers weight gradients to where a stage would wait
  double pipeline_head = -1;                ///< blocks that the head and its loss count for when blocks are distributed over stages; -1: by
                                        ///< their FLOPs
  int64_t tensor = 1;                       ///< neighboring ranks that share heads, hidden units, vocabulary and each sequence (tensor and
                                        ///< sequence parallelism)
  int64_t piece_rows = 128;                 ///< ranks that share layers, sequences or experts: activations are sent in pieces of at least
                                        ///< this many rows, overlapped with products; 0: in one piece
  std::string reduce_dtype = "f32";         ///< dtype in which gradients are sent: "f32", "bf16" for half of the bytes, or "int8", in blocks
                                        ///< of codes, for a quarter (ShardOptions::reduce_int8)
  std::string units = "block";              ///< "block": a unit per block, and for each table that is not tied;
                                        ///< "count": by parameters; "none": one unit
  int64_t min_parameters = 1'000'000;       ///< parameters of a unit, for units count
  int64_t memory_budget = 0;                ///< bytes per rank, for train.recompute fit, and for train.compile, which keeps units gathered
                                        ///< within it; 0: none
  int64_t prefetch_bytes = -1;              ///< bytes gathered ahead of their use; -1: one unit; 0: none
};

/// Where the checkpoints of a run's output folder are.
inline std::string checkpoints_in(const std::string& run) { return run + "/checkpoints"; }

/// [output] Where results go.
struct OutputConfig {
  std::string folder = "out";    ///< folder for metrics.jsonl, checkpoints and the configuration
  int64_t keep_checkpoints = 2;  ///< newest checkpoints kept, at least 2; 0: all
  bool keep_best = false;        ///< keep the weights with the lowest validation loss in best/, a folder like that of a run
  bool tensorboard = false;      ///< write metrics for TensorBoard, too, to tensorboard/
  int64_t trace_step = 0;        ///< step whose time line is measured and written to trace.json; 0: none
};

/// [generate] A sample from a trained model.
struct GenerateConfig {
  std::string prompt = "\n";        ///< text to continue
  int64_t tokens = 400;             ///< tokens to generate
  double temperature = 0.8;         ///< divisor of the logits; 0: always the likeliest token
  int64_t top_k = 0;                ///< choose among the k likeliest tokens; 0: among all
  double top_p = 1;                 ///< and among the fewest of the likeliest tokens that have this share of the probability (nucleus sampling)
  double min_p = 0;                 ///< without those less likely than this times the likeliest; 0: with them
  bool ignore_end_of_text = false;  ///< continue after a token that ends a text or a turn
  bool special_tokens = false;      ///< read names of special tokens in the prompt as these tokens
  std::string chat = {};            ///< "chatml", "llama3", "gemma": the prompt is a user's message to an assistant (ChatFormat); "": a text
  std::string system = {};          ///< in a chat: the system message
  std::string end_token = {};       ///< a special token that ends the generation, in addition to the end of text, or instead of it with
                               ///< ignore_end_of_text
  std::string dtype = "f32";        ///< generate_from_folder's dtype of weights and compute: "f32", or "bf16" or "f16" in half the memory
  std::string quantize = "none";    ///< generate_from_folder's format of the blocks' matrices (ModelConfig::quantize)
  int64_t seed = 1337;              ///< seed of the choices
  int64_t drafts = 1;               ///< tokens drafted for each pass by MTP layers (Drafter), at most one per layer; 0: none
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
