// The table of all options, and the checks across them.
#include "sheaf/core/error.h"
#include "sheaf/models/presets.h"
#include "sheaf/tools/config.h"

namespace sheaf::tools {

using models::TrainConfig;

std::vector<ConfigField> config_fields(TrainConfig& c) {
  std::vector<std::string> sizes = {""};
  for (const auto& [name, model] : models::presets()) sizes.push_back(name);
  auto &m = c.model;
  auto &rope = m.rope_scaling;
  auto &d = c.data;
  auto &t = c.train;
  auto &s = c.sharding;
  auto &g = c.generate;
  const std::vector<std::string> any;
  return {
      {"model.type", &m.type, "architecture", {"gpt2", "llama"}},
      {"model.preset", &m.preset,
       "a published model's size; options given explicitly override it (a flag's preset overrides a file's options)", sizes},
      {"model.weights", &m.weights, "weights to start from: a folder or file from Hugging Face, whose config.json gives the model's shape"},
      {"model.layers", &m.layers, "transformer blocks", any, 1, 10000},
      {"model.heads", &m.heads, "query heads", any, 1, 10000},
      {"model.kv_heads", &m.kv_heads, "key and value heads; 0: as many as heads", any, 0, 10000},
      {"model.width", &m.width, "size of the residual stream", any, 1, 1e6},
      {"model.head_dim", &m.head_dim, "width of an attention head; 0: model.width / model.heads (llama)", any, 0, 1e6},
      {"model.kv_lora_rank", &m.kv_lora_rank,
       "width of the latent from which keys and values are computed (multi-head latent attention; llama); 0: none", any, 0, 1e6},
      {"model.q_lora_rank", &m.q_lora_rank, "width of the latent from which queries are computed; 0: none", any, 0, 1e6},
      {"model.qk_nope_head_dim", &m.qk_nope_head_dim,
       "width of the part of queries and keys without rotary positions; 0: model.width / model.heads", any, 0, 1e6},
      {"model.qk_rope_head_dim", &m.qk_rope_head_dim, "width of the part with rotary positions; 0: half of the other part", any, 0, 1e6},
      {"model.v_head_dim", &m.v_head_dim, "width of values; 0: model.qk_nope_head_dim", any, 0, 1e6},
      {"model.linear_key_heads", &m.linear_key_heads,
       "key heads of linear attention, which replaces attention except in every model.full_attention_every-th block (Gated DeltaNet; "
       "llama); 0: none", any, 0, 10000},
      {"model.linear_value_heads", &m.linear_value_heads,
       "value heads of linear attention, a multiple of its key heads; 0: as many", any, 0, 10000},
      {"model.linear_key_head_dim", &m.linear_key_head_dim, "width of its queries and keys; 0: that of attention heads", any, 0, 1e6},
      {"model.linear_value_head_dim", &m.linear_value_head_dim, "width of its values; 0: that of its keys", any, 0, 1e6},
      {"model.linear_conv_kernel", &m.linear_conv_kernel, "tokens covered by the convolution of each of its channels", any, 1, 1000},
      {"model.rotary_dim", &m.rotary_dim, "number of elements at the end of each head that are rotated; 0: all (llama)", any, 0, 1e6},
      {"model.mlp_width", &m.mlp_width, "hidden size of the MLP; 0: the default of model.type", any, 0, 1e7},
      {"model.context", &m.context, "tokens per sequence", any, 1, 1e8},
      {"model.window", &m.window, "keys a token attends to, itself included (sliding-window attention); 0: all", any, 0, 1e9},
      {"model.full_attention_every", &m.full_attention_every,
       "with a window or linear attention, every N-th block has full attention; 0: none has", any, 0, 10000},
      {"model.vocab", &m.vocab, "vocabulary size; 0: that of the tokenizer", any, 0, 1e8},
      {"model.bias", &m.bias, "biases in linear layers and layer norms (gpt2)"},
      {"model.qkv_bias", &m.qkv_bias, "biases of queries, keys and values, as in Qwen2 (llama)"},
      {"model.out_bias", &m.out_bias, "a bias of attention's output projection, as in gpt-oss (llama)"},
      {"model.attention_gate", &m.attention_gate,
       "the heads' outputs are multiplied by sigmoids of the layer's input, as in Qwen3-Next (llama)"},
      {"model.attention_sinks", &m.attention_sinks,
       "each head's softmax has one more learned score, which belongs to no value, as in gpt-oss (llama)"},
      {"model.qk_norm", &m.qk_norm, "queries and keys are normalized before they are rotated, as in Qwen3 (llama)"},
      {"model.qk_norm_all_heads", &m.qk_norm_all_heads, "this norm is over all of a token's heads together, as in OLMo 2 (llama)"},
      {"model.gelu_gate", &m.gelu_gate, "MLPs are gated by gelu (GeGLU), as in Gemma, rather than by silu (SwiGLU; llama)"},
      {"model.pre_norms", &m.pre_norms, "norms before attention and MLPs; false: only after them, as in OLMo 2 (llama)"},
      {"model.post_norms", &m.post_norms, "norms after attention and MLPs, before the residual is added, as in Gemma 3 (llama)"},
      {"model.scale_embedding", &m.scale_embedding, "token embeddings are multiplied by sqrt(model.width), as in Gemma (llama)"},
      {"model.query_pre_attn_scalar", &m.query_pre_attn_scalar,
       "attention scores are divided by the square root of this, as in Gemma 3 27B (llama); 0: by that of the head's width", any, 0, 1000000},
      {"model.attn_logit_softcapping", &m.attn_logit_softcapping,
       "cap c of attention scores: a score s becomes c tanh(s / c), as in Gemma 2; 0: no cap", any, 0, 1e6},
      {"model.final_logit_softcapping", &m.final_logit_softcapping, "the same cap for the logits", any, 0, 1e6},
      {"model.experts", &m.experts, "experts of each mixture of experts (llama); 0: an ordinary MLP", any, 0, 10000},
      {"model.experts_per_token", &m.experts_per_token, "experts each token is routed to", any, 1, 10000},
      {"model.expert_hidden", &m.expert_hidden, "hidden size of an expert; 0: model.mlp_width", any, 0, 1e7},
      {"model.capacity_factor", &m.capacity_factor,
       "tokens an expert takes, as a multiple of an even share; the rest are dropped; 0: nothing is dropped", any, 0, 1e6},
      {"model.capacity_groups", &m.capacity_groups, "parts of a sequence in which this capacity is counted separately", any, 1, 1e6},
      {"model.normalize_experts", &m.normalize_experts, "the weights of a token's experts are normalized to add up to 1"},
      {"model.expert_affinity", &m.expert_affinity,
       "how routers score experts: softmax over all of them, or a sigmoid of each", {"softmax", "sigmoid"}},
      {"model.expert_bias", &m.expert_bias, "routing has a bias for each expert, which evens out the load (DeepSeek-V3)"},
      {"model.expert_balance_rate", &m.expert_balance_rate, "how far a step moves this bias; 0: it is constant", any, 0, 1e3},
      {"model.expert_scale", &m.expert_scale, "factor of the weights of a token's experts", any, 1e-6, 1e6},
      {"model.expert_linear_bias", &m.expert_linear_bias, "biases of routers and of the experts' linear layers, as in gpt-oss"},
      {"model.expert_gate_limit", &m.expert_gate_limit, "experts have gpt-oss's gates, clamped to this; 0: SwiGLU", any, 0, 1e6},
      {"model.expert_gate_alpha", &m.expert_gate_alpha, "factor inside the sigmoid of these gates", any, 1e-6, 1e6},
      {"model.routing_groups", &m.routing_groups, "equal groups of experts (DeepSeek's n_group)", any, 1, 10000},
      {"model.routing_groups_per_token", &m.routing_groups_per_token,
       "groups among whose experts a token chooses (DeepSeek's topk_group)", any, 1, 10000},
      {"model.shared_experts", &m.shared_experts, "additional experts that every token goes through", any, 0, 10000},
      {"model.shared_expert_gate", &m.shared_expert_gate, "their output is multiplied by a sigmoid for each token, as in Qwen2-MoE"},
      {"model.dense_layers", &m.dense_layers, "the first N blocks have an MLP of model.mlp_width instead of a mixture", any, 0, 1e5},
      {"model.aux_loss", &m.aux_loss, "factor of the mixtures' load-balancing loss in the training loss", any, 0, 1e6},
      {"model.router_z_loss", &m.router_z_loss,
       "factor of the routers' z-loss (the mean squared log-sum-exp of their logits) in the training loss", any, 0, 1e6},
      {"model.mtp_layers", &m.mtp_layers,
       "additional layers, each of which predicts one token further ahead, for training and for drafts (multi-token prediction)", any, 0, 100},
      {"model.mtp_loss", &m.mtp_loss, "factor of their mean loss in the training loss", any, 0, 1e6},
      {"model.tie_embeddings", &m.tie_embeddings, "the output head shares its weight with the token embedding"},
      {"model.dropout", &m.dropout, "dropout probability", any, 0, 0.999},
      {"model.lora_rank", &m.lora_rank,
       "rank of low-rank adapters, which are trained in place of the weights (LoRA); 0: none", any, 0, 100000},
      {"model.lora_alpha", &m.lora_alpha, "the adapters' output is scaled by this / model.lora_rank", any, 1e-9, 1e9},
      {"model.lora_layers", &m.lora_layers, "linear layers of the blocks that have adapters", {"all", "attention", "mlp"}},
      {"model.quantize", &m.quantize,
       "format of the blocks' frozen matrices (QLoRA; evaluation): 8 or 4 bits, in blocks of 64 with one scale",
       {"none", "int8", "nf4"}},
      {"model.rope_theta", &m.rope_theta, "base of the rotary frequencies (llama)", any, 1},
      {"model.window_rope_theta", &m.window_rope_theta,
       "this base in blocks with a window, whose frequencies are not scaled, as in Gemma 3; 0: model.rope_theta (llama)", any, 0},
      {"model.nope_every", &m.nope_every,
       "every N-th block has no rotary positions (NoPE), as in SmolLM3; 0: all have them (llama)", any, 0, 10000},
      {"model.rope_scaling.rope_type", &rope.rope_type,
       "how rotary frequencies are scaled for longer contexts (llama); default: they are not",
       {"default", "linear", "llama3", "yarn", "longrope"}, {}, {}, {"dynamic"}},
      {"model.rope_scaling.factor", &rope.factor, "divisor of low frequencies (linear: of all; longrope: see attention_factor)", any, 1, 1e6},
      {"model.rope_scaling.low_freq_factor", &rope.low_freq_factor,
       "frequencies with fewer turns in the original context are low (llama3)", any, 0, 1e6},
      {"model.rope_scaling.high_freq_factor", &rope.high_freq_factor,
       "frequencies with more turns in the original context are not scaled (llama3)", any, 0, 1e6},
      {"model.rope_scaling.original_max_position_embeddings", &rope.original_max_position_embeddings,
       "context before the scaling (llama3, yarn, longrope)", any, 1, 1e9},
      {"model.rope_scaling.beta_slow", &rope.beta_slow, "frequencies with fewer turns in the original context are low (yarn)", any, 0, 1e6},
      {"model.rope_scaling.beta_fast", &rope.beta_fast,
       "frequencies with more turns in the original context are not scaled (yarn)", any, 0, 1e6},
      {"model.rope_scaling.truncate", &rope.truncate, "the range between them is rounded to whole indices (yarn)"},
      {"model.rope_scaling.attention_factor", &rope.attention_factor,
       "factor of rotated queries and keys; 0: 0.1 ln(factor) + 1 (yarn), or sqrt(1 + ln(factor) / ln(original_max_position_embeddings)) (longrope)",
       any, 0, 1e6},
      {"model.rope_scaling.mscale", &rope.mscale,
       "if not 0, this factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) (yarn)", any, 0, 1e6},
      {"model.rope_scaling.mscale_all_dim", &rope.mscale_all_dim,
       "see mscale; latent attention multiplies scores by the square of that divisor (yarn)", any, 0, 1e6},
      {"model.rope_scaling.short_factor", &rope.short_factor,
       "divisors of the frequencies, one for each rotated pair of a head, separated by spaces (longrope)"},
      {"model.rope_scaling.long_factor", &rope.long_factor,
       "the same if model.context is longer than original_max_position_embeddings (longrope)"},
      {"model.norm_eps", &m.norm_eps, "added to the variance in norms", any, 0, 1},

      {"data.corpus", &d.corpus, "UTF-8 text file"},
      {"data.tokenizer", &d.tokenizer, "the tokenizer of texts", {"char", "byte", "gpt2", "llama3", "huggingface"}},
      {"data.tokenizer_folder", &d.tokenizer_folder,
       "folder of its files: for gpt2 encoder.json and vocab.bpe, or vocab.json and merges.txt; for llama3 tokenizer.model; for "
       "huggingface tokenizer.json"},
      {"data.val_fraction", &d.val_fraction, "fraction at the end of the text that is held out for validation", any, 0, 0.999},
      {"data.train_file", &d.train_file,
       "token files to train on, instead of a text: 'name_*.bin' takes several, '0.7 a_*.bin 0.3 b_*.bin' mixes them"},
      {"data.val_file", &d.val_file, "token files to validate on; or named sets, 'web=web.bin chat=chat.bin'"},
      {"data.choices", &d.choices, "JSON lines of multiple-choice questions (as HellaSwag's) for evaluations; or named sets"},
      {"data.order", &d.order, "order of training windows: each once an epoch, shuffled, or at random places", {"shuffled", "random"}},
      {"data.separate_documents", &d.separate_documents, "tokens attend only to tokens of their own document"},
      {"data.end_of_text", &d.end_of_text, "the token that ends a document; -1: the tokenizer's", any, -1, 1e8},

      {"train.steps", &t.steps, "optimizer steps", any, 0, 1e12},
      {"train.epochs", &t.epochs, "passes over the training data, in place of train.steps; 0: train.steps applies", any, 0, 1e6},
      {"train.batch", &t.batch, "sequences per step, over all ranks and micro-batches", any, 1, 1e9},
      {"train.micro_batches", &t.micro_batches, "parts of the batch whose gradients are accumulated one after another", any, 1, 1e6},
      {"train.seed", &t.seed, "seed of initial weights, dropout and the order of data", any, 0},
      {"train.lr", &t.lr, "peak learning rate", any, 0, 1e6},
      {"train.lr_factors", &t.lr_factors, "factors of the learning rate for parameters, by name: '0.1 wte.* 2 *.ln*'"},
      {"train.min_lr", &t.min_lr, "learning rate at the end of the decay and after it; -1: a tenth of train.lr", any, -1, 1e6},
      {"train.warmup", &t.warmup, "steps of linear warm-up", any, 0, 1e12},
      {"train.schedule", &t.schedule, "decay of the learning rate after the warm-up", {"cosine", "linear", "constant"}},
      {"train.decay_start", &t.decay_start, "step at which the decay starts; 0: after the warm-up", any, 0, 1e12},
      {"train.decay_end", &t.decay_end, "step at which it ends; 0: train.steps", any, 0, 1e12},
      {"train.optimizer", &t.optimizer, "muon orthogonalizes the updates of the blocks' matrices, and is AdamW for the rest", {"adamw", "muon"}},
      {"train.momentum", &t.momentum, "Muon's momentum", any, 0, 0.999999999},
      {"train.weight_decay", &t.weight_decay, "of parameters with two dimensions or more", any, 0, 1e6},
      {"train.weight_decay_factors", &t.weight_decay_factors, "factors of the weight decay for parameters, by name: '0 wte.* 1 *.ln*'"},
      {"train.beta1", &t.beta1, "AdamW's beta1", any, 0, 0.999999999},
      {"train.beta2", &t.beta2, "AdamW's beta2", any, 0, 0.999999999},
      {"train.eps", &t.eps, "AdamW's epsilon", any, 0, 1},
      {"train.clip", &t.clip, "largest norm of the gradient; 0: no clipping", any, 0},
      {"train.update_in_backward", &t.update_in_backward,
       "with train.clip 0: update parameters during the backward, once a unit's gradient is reduced, and free it"},
      {"train.z_loss", &t.z_loss, "factor of the z-loss (the mean squared log-sum-exp of the logits) in the training loss", any, 0, 1e6},
      {"train.islands", &t.islands,
       "groups of ranks that each train a model on their share of train.batch and average them at intervals (DiLoCo)", any, 1, 1e6},
      {"train.inner_steps", &t.inner_steps, "islands: steps between two outer steps", any, 1, 1e12},
      {"train.outer_lr", &t.outer_lr, "islands: learning rate of the outer step; 1 without momentum takes the mean", any, 1e-9, 1e6},
      {"train.outer_momentum", &t.outer_momentum, "islands: Nesterov momentum of the outer step", any, 0, 0.999999999},
      {"train.outer_dtype", &t.outer_dtype,
       "islands: what they send each other: weights in f32, or how far these have moved, in bf16 or int8", {"f32", "bf16", "int8"}},
      {"train.eval_every", &t.eval_every, "steps between evaluations; 0: only at the end", any, 0},
      {"train.eval_tokens", &t.eval_tokens, "targets per evaluation; 0: the whole validation split", any, 0},
      {"train.eval_questions", &t.eval_questions, "questions of each set of data.choices per evaluation; 0: all", any, 0},
      {"train.log_every", &t.log_every, "steps between lines of metrics.jsonl", any, 1},
      {"train.log_norms", &t.log_norms, "log norms of gradients and weights as well, for each unit or parameter", {"none", "units", "parameters"}},
      {"train.save_every", &t.save_every, "steps between checkpoints; 0: only at the end", any, 0},
      {"train.offload_activations", &t.offload_activations, "on a GPU: the inputs of recomputed blocks are kept in host memory"},
      {"train.offload_optimizer", &t.offload_optimizer, "on a GPU: the optimizer's state is kept in host memory"},
      {"train.offload_parameters", &t.offload_parameters,
       "on a GPU: master weights and gradients are kept in host memory, and a unit's weights copied from there before its gather"},
      {"train.save_async", &t.save_async, "write checkpoints from a copy in memory while training continues"},
      {"train.dtype", &t.dtype, "dtype of compute; master weights, gradients and statistics are f32", {"f32", "bf16", "f16"}},
      {"train.state_dtype", &t.state_dtype, "dtype of the optimizer's state; bf16 is rounded stochastically", {"f32", "bf16"}},
      {"train.fp8", &t.fp8,
       "matrix products in FP8 with row-wise scales: those for activations and their gradients; or all, with those for weight gradients "
       "(except experts')", {"none", "activations", "all"}},
      {"train.loss_scale", &t.loss_scale, "f16: initial factor of the loss", any, 1, 0x1p64},
      {"train.loss_scale_interval", &t.loss_scale_interval, "f16: steps without overflow after which this factor is doubled", any, 1},
      {"train.recompute", &t.recompute,
       "activation checkpointing: recompute cheap ops, whole blocks, or as little as fits into sharding.memory_budget",
       {"none", "selective", "block", "fit"}},
      {"train.recompute_blocks", &t.recompute_blocks,
       "blocks of each stage that are recomputed whole, with train.recompute block or selective; -1: all with block, none with selective", any, -1},
      {"train.compile", &t.compile, "run recorded steps again as a program, without dispatch or allocation"},
      {"train.fuse", &t.fuse, "with train.compile: fuse consecutive elementwise ops, bit for bit"},
      {"train.cuda_graph", &t.cuda_graph, "on a GPU: capture a step as a CUDA graph and replay it"},
      {"train.tune_products", &t.tune_products, "on a GPU: choose algorithms of matrix products by timing them in the first step"},

      {"sharding.strategy", &s.strategy,
       "how parameters, gradients and optimizer state are sharded", {"full_shard", "shard_grad_op", "zero1", "replicate"}},
      {"sharding.replicas", &s.replicas, "groups of neighboring ranks that each hold the whole model (hybrid sharding, HSDP)", any, 1, 1e6},
      {"sharding.secondary", &s.secondary,
       "master weights and optimizer state are sharded over replicas, or over ranks that share sequences or experts, as well (hpZ)"},
      {"sharding.experts", &s.experts, "ranks that share the experts of mixtures (expert parallelism)", any, 1, 1e6},
      {"sharding.context", &s.context, "ranks that share each sequence (context parallelism)", any, 1, 1e6},
      {"sharding.context_comm", &s.context_comm,
       "collective of context parallelism: all_to_all gives a rank whole sequences of some heads, all_gather all keys and values for "
       "its own queries", {"all_to_all", "all_gather"}},
      {"sharding.pipeline", &s.pipeline, "stages of consecutive blocks (pipeline parallelism)", any, 1, 1e6},
      {"sharding.pipeline_runs", &s.pipeline_runs, "runs of consecutive blocks per stage (interleaved pipeline)", any, 1, 1e6},
      {"sharding.pipeline_schedule", &s.pipeline_schedule,
       "schedule of a stage: zero_bubble defers weight gradients to where it would wait", {"1f1b", "zero_bubble"}},
      {"sharding.pipeline_head", &s.pipeline_head,
       "blocks that the head and its loss count for when blocks are distributed over stages; -1: by their FLOPs", any, -1, 1e6},
      {"sharding.tensor", &s.tensor,
       "neighboring ranks that share heads, hidden units, vocabulary and each sequence (tensor and sequence parallelism)", any, 1, 1e6},
      {"sharding.piece_rows", &s.piece_rows,
       "ranks that share layers, sequences or experts: activations are sent in pieces of at least this many rows, overlapped with "
       "products; 0: in one piece", any, 0},
      {"sharding.gather_int8", &s.gather_int8, "gather matrices in int8, in blocks of 64 with one scale"},
      {"sharding.reduce_dtype", &s.reduce_dtype,
       "dtype in which gradients are sent; int8: in blocks of 64 with one scale, rounded stochastically; across hosts of several ranks, "
       "use sharding.replicas with it", {"f32", "bf16", "int8"}},
      {"sharding.units", &s.units,
       "what is gathered together: a block, sharding.min_parameters or more, or the whole model", {"block", "count", "none"}},
      {"sharding.min_parameters", &s.min_parameters, "parameters of a unit, for sharding.units count", any, 1},
      {"sharding.memory_budget", &s.memory_budget,
       "bytes per rank, for train.recompute fit, and for train.compile, which keeps units gathered within it; 0: none", any, 0},
      {"sharding.prefetch_bytes", &s.prefetch_bytes, "bytes gathered ahead of their use; -1: one unit; 0: none", any, -1},

      {"output.folder", &c.output.folder, "folder for metrics.jsonl, checkpoints and the configuration"},
      {"output.keep_checkpoints", &c.output.keep_checkpoints, "newest checkpoints kept, at least 2; 0: all", any, 0},
      {"output.keep_best", &c.output.keep_best, "keep the weights with the lowest validation loss in <output.folder>/best"},
      {"output.tensorboard", &c.output.tensorboard, "write metrics for TensorBoard, too, to <output.folder>/tensorboard"},
      {"output.trace_step", &c.output.trace_step, "step whose time line is measured and written to trace.json; 0: none", any, 0, 1e12},

      {"generate.prompt", &g.prompt, "text to continue"},
      {"generate.tokens", &g.tokens, "tokens to generate", any, 0, 1e9},
      {"generate.temperature", &g.temperature, "divisor of the logits; 0: always the likeliest token", any, 0, 1e6},
      {"generate.top_k", &g.top_k, "choose among the k likeliest tokens; 0: among all", any, 0},
      {"generate.top_p", &g.top_p,
       "and among the fewest of the likeliest tokens that have this share of the probability (nucleus sampling)", any, 0, 1},
      {"generate.min_p", &g.min_p, "without those less likely than this times the likeliest; 0: with them", any, 0, 1},
      {"generate.ignore_end_of_text", &g.ignore_end_of_text, "continue after a token that ends a text or a turn"},
      {"generate.chat", &g.chat,
       "chatml, llama3 or gemma: the prompt is a user's message, which an assistant answers; empty: a text to continue"},
      {"generate.system", &g.system, "in a chat: the system message"},
      {"generate.end_token", &g.end_token,
       "a special token that ends the generation, in addition to the end of text, or instead of it with generate.ignore_end_of_text"},
      {"generate.special_tokens", &g.special_tokens, "read names of special tokens in the prompt as these tokens"},
      {"generate.dtype", &g.dtype, "dtype of weights and compute; bf16 and f16 take half the memory", {"f32", "bf16", "f16"}},
      {"generate.quantize", &g.quantize, "format of the blocks' matrices: 8 or 4 bits, in blocks of 64 with one scale", {"none", "int8", "nf4"}},
      {"generate.seed", &g.seed, "seed of the choices", any, 0},
      {"generate.drafts", &g.drafts, "tokens drafted for each pass by the layers of model.mtp_layers, at most one per layer", any, 0, 64},
  };
}

const char* unused(const std::string& key, const TrainConfig& config) {
  if (key == "model.bias" && config.model.type != "gpt2") return "only model.type gpt2 has biases";
  if (key == "model.qkv_bias" && config.model.type != "llama") return "only model.type llama has such biases alone";
  if (key == "model.qk_norm" && config.model.type != "llama") return "only model.type llama has such norms";
  if (key == "model.qk_norm_all_heads" && !config.model.qk_norm) return "without model.qk_norm there is no norm";
  for (const char* name : {"gelu_gate", "pre_norms", "post_norms", "qk_norm_all_heads", "scale_embedding", "query_pre_attn_scalar", "out_bias",
                           "attention_sinks", "attention_gate", "rotary_dim", "nope_every"})
    if (key == str("model.", name) && config.model.type != "llama") return "only model.type llama has it";
  if (key == "model.window_rope_theta" && (config.model.type != "llama" || config.model.window == 0))
    return "only model.type llama has it, with model.window";
  if (key == "model.head_dim" && config.model.type != "llama" && config.model.head_dim * config.model.heads != config.model.width)
    return "only model.type llama has heads of another width than model.width / model.heads";
  const bool of_latents = key == "model.q_lora_rank" || key == "model.qk_nope_head_dim" || key == "model.qk_rope_head_dim" ||
                          key == "model.v_head_dim";
  if (of_latents && config.model.kv_lora_rank == 0) return "only latent attention (model.kv_lora_rank) has it";
  if (key == "model.full_attention_every" && config.model.window == 0 && config.model.linear_key_heads == 0)
    return "without model.window and model.linear_key_heads all blocks see all keys";
  const auto& m = config.model;
  if (m.linear_key_heads && m.full_attention_every == 0 && m.mtp_layers == 0)
    for (const char* name : {"attention_gate", "attention_sinks", "qk_norm", "qk_norm_all_heads", "qkv_bias", "out_bias", "rotary_dim",
                             "query_pre_attn_scalar", "attn_logit_softcapping", "kv_heads", "kv_lora_rank", "rope_theta", "nope_every"})
      if (key == str("model.", name)) return "all blocks have linear attention; see model.full_attention_every";
  if (key.starts_with("model.linear_") && config.model.type != "llama") return "only model.type llama has linear attention";
  if (key.starts_with("model.linear_") && key != "model.linear_key_heads" && config.model.linear_key_heads == 0)
    return "only linear attention (model.linear_key_heads) has it";
  const bool of_experts = key.starts_with("model.expert") || key.starts_with("model.capacity_") || key.starts_with("model.rout") ||
                          key.starts_with("model.shared_expert") || key == "model.normalize_experts" || key == "model.aux_loss" ||
                          key == "model.dense_layers";
  if (of_experts && config.model.type != "llama") return "only model.type llama has mixtures of experts";
  if (of_experts && key != "model.experts" && config.model.experts == 0) return "only mixtures of experts (model.experts) have it";
  if (key == "model.shared_expert_gate" && config.model.shared_experts == 0) return "without model.shared_experts there is nothing to gate";
  if (key.starts_with("model.mtp_") && config.model.type != "llama") return "only model.type llama has layers that predict further tokens";
  if (key == "model.mtp_loss" && config.model.mtp_layers == 0) return "without model.mtp_layers only the next token is predicted";
  if (key == "model.capacity_groups" && config.model.capacity_factor == 0) return "without model.capacity_factor nothing is counted";
  if (key == "model.expert_balance_rate" && !config.model.expert_bias) return "without model.expert_bias there is nothing to move";
  if (key == "model.expert_gate_alpha" && config.model.expert_gate_limit == 0) return "without model.expert_gate_limit gates are SwiGLU's";
  if (key == "model.routing_groups_per_token" && config.model.routing_groups == 1) return "without model.routing_groups there is one";
  if (key.starts_with("model.lora_") && key != "model.lora_rank" && config.model.lora_rank == 0)
    return "without model.lora_rank there are no adapters";
  if (key.starts_with("model.rope_") && config.model.type != "llama") return "only model.type llama has rotary embeddings";
  const std::string& scaling = config.model.rope_scaling.rope_type;
  if (key == "model.rope_scaling.factor" && scaling == "default")
    return "only model.rope_scaling.rope_type linear, llama3, yarn and longrope have it";
  if (key == "model.rope_scaling.original_max_position_embeddings" && scaling != "llama3" && scaling != "yarn" && scaling != "longrope")
    return "only model.rope_scaling.rope_type llama3, yarn and longrope have it";
  if (key.starts_with("model.rope_scaling.") && key.ends_with("_freq_factor") && scaling != "llama3")
    return "only model.rope_scaling.rope_type llama3 has it";
  if (key == "model.rope_scaling.attention_factor" && scaling != "yarn" && scaling != "longrope")
    return "only model.rope_scaling.rope_type yarn and longrope have it";
  if ((key == "model.rope_scaling.short_factor" || key == "model.rope_scaling.long_factor") && scaling != "longrope")
    return "only model.rope_scaling.rope_type longrope has it";
  for (const char* name : {"beta_slow", "beta_fast", "truncate", "mscale", "mscale_all_dim"})
    if (key == str("model.rope_scaling.", name) && scaling != "yarn") return "only model.rope_scaling.rope_type yarn has it";
  if (key == "train.steps" && config.train.epochs > 0) return "train.epochs says how many steps there are";
  if ((key.starts_with("train.decay_") || key == "train.min_lr") && config.train.schedule == "constant")
    return "train.schedule constant has no decay";
  if (key == "train.fuse" && !config.train.compile) return "only train.compile fuses";
  if (key.starts_with("train.loss_scale") && config.train.dtype != "f16") return "only train.dtype f16 scales the loss";
  if (key == "train.recompute_blocks" && config.train.recompute != "block" && config.train.recompute != "selective")
    return "only train.recompute block and selective have it";
  if (key == "sharding.gather_int8" && config.sharding.strategy == "replicate") return "sharding.strategy replicate gathers nothing";
  if ((key == "train.inner_steps" || key.starts_with("train.outer_")) && config.train.islands == 1)
    return "without train.islands there is one model, and nothing to agree on";
  if (key == "train.momentum" && config.train.optimizer != "muon") return "only train.optimizer muon has momentum";
  if (key == "data.tokenizer_folder" && !models::is_published(config.data.tokenizer))
    return "only data.tokenizer gpt2, llama3 and huggingface come from files";
  if (key == "data.end_of_text" && !config.data.separate_documents)
    return "only data.separate_documents asks where documents end";
  if (key == "train.eval_questions" && config.data.choices.empty()) return "without data.choices there are no questions";
  if (key == "data.val_fraction" && !config.data.train_file.empty()) return "token files to validate on are files of their own";
  if (key == "sharding.pipeline_head" && config.sharding.pipeline == 1) return "without sharding.pipeline no blocks are cut into stages";
  if (key == "sharding.min_parameters" && config.sharding.units != "count")
    return "only sharding.units count goes by parameters";
  return nullptr;
}

void validate(const TrainConfig& config, const std::function<std::string(const char*)>& origin) {
  const auto require = [](bool condition, const auto&... parts) {
    if (!condition) fail<ConfigError>("[config] ", parts...);
  };
  const auto& m = config.model;
  const std::string width = str("model.width ", m.width, origin("model.width")),
                    heads = str("model.heads ", m.heads, origin("model.heads")),
                    kv_heads = str("model.kv_heads ", m.kv_heads, origin("model.kv_heads"));
  require(m.head_dim > 0 || m.width % m.heads == 0 || (m.kv_lora_rank > 0 && m.qk_nope_head_dim > 0), width, " is not a multiple of ", heads);
  require(m.kv_heads == 0 || m.heads % m.kv_heads == 0, heads, " is not a multiple of ", kv_heads);
  require(m.type != "gpt2" || m.kv_heads == 0 || m.kv_heads == m.heads, kv_heads,
          ": gpt2 has as many key as query heads");
  const int64_t head_dim = models::resolved(m).head_dim;
  require(m.rotary_dim % 2 == 0 && (m.rotary_dim <= head_dim || m.kv_lora_rank > 0), "model.rotary_dim ", m.rotary_dim,
          origin("model.rotary_dim"), ": an even number of elements of a head, which has ", head_dim);
  require(m.type != "llama" || m.kv_lora_rank > 0 || m.head_dim > 0 || m.rotary_dim > 0 || m.width / m.heads % 2 == 0, width, " / ", heads, " is ",
          m.width / m.heads, "; rotary embedding needs an even size");
  require(m.head_dim % 2 == 0 || m.type != "llama" || m.kv_lora_rank > 0 || m.rotary_dim > 0, "model.head_dim ", m.head_dim, origin("model.head_dim"),
          ": rotary embedding needs an even size");
  if (m.kv_lora_rank) {
    const std::string latent = str("model.kv_lora_rank ", m.kv_lora_rank, origin("model.kv_lora_rank"));
    const auto r = models::resolved(m);
    require(m.type == "llama", latent, ": only model.type llama has latent attention");
    require(m.kv_heads == 0 || m.kv_heads == m.heads, latent, " with ", kv_heads, ": each head has keys of its own");
    require(!m.qk_norm && !m.qkv_bias, latent, ": latent attention has neither model.qk_norm nor model.qkv_bias");
    require(!m.out_bias && !m.attention_sinks && !m.attention_gate, latent,
            ": latent attention has neither model.out_bias, model.attention_sinks nor model.attention_gate");
    require(m.query_pre_attn_scalar == 0, latent, ": latent attention divides by the root of its own width, not model.query_pre_attn_scalar's");
    require(m.attn_logit_softcapping == 0, latent, ": latent attention has no model.attn_logit_softcapping");
    require(m.rotary_dim == 0, latent, ": model.qk_rope_head_dim says how much is rotated, not model.rotary_dim");
    require(m.head_dim == 0 || m.head_dim == r.head_dim, latent, " with model.head_dim ", m.head_dim, origin("model.head_dim"),
            ": that follows from model.qk_nope_head_dim ", r.qk_nope_head_dim, " and model.qk_rope_head_dim ", r.qk_rope_head_dim);
    require(r.qk_nope_head_dim > 0, width, " is less than ", heads, ": give model.qk_nope_head_dim");
    require(r.qk_rope_head_dim > 0 && r.qk_rope_head_dim % 2 == 0, "model.qk_rope_head_dim ", r.qk_rope_head_dim,
            origin("model.qk_rope_head_dim"), ": rotary embedding needs an even size");
  }
  if (m.linear_key_heads) {
    const std::string linear = str("model.linear_key_heads ", m.linear_key_heads, origin("model.linear_key_heads"));
    require(m.type == "llama", linear, ": only model.type llama has linear attention");
    require(m.linear_value_heads % m.linear_key_heads == 0, "model.linear_value_heads ", m.linear_value_heads, origin("model.linear_value_heads"),
            " is not a multiple of ", linear);
    require(m.window == 0, linear, " with model.window ", m.window, origin("model.window"), ": blocks without linear attention see all keys");
    require(m.full_attention_every != 1, linear, " would change nothing: with model.full_attention_every 1 all blocks have full attention");
  }
  require(m.nope_every == 0 || m.kv_lora_rank == 0, "model.nope_every ", m.nope_every, origin("model.nope_every"), " with model.kv_lora_rank ",
          m.kv_lora_rank, origin("model.kv_lora_rank"), ": latent attention always has rotary positions");
  const std::string scaling = models::rotary_scaling(m.rope_scaling).problem(models::rotated_pairs(models::resolved(m)));
  require(m.pre_norms || m.post_norms, "model.pre_norms", origin("model.pre_norms"),
          ": without model.post_norms, too, nothing in the blocks is normalised");
  require(m.experts == 0 || !m.gelu_gate, "model.gelu_gate", origin("model.gelu_gate"), ": mixtures of experts (model.experts ", m.experts,
          ") are SwiGLU");
  require(m.window == 0 || m.full_attention_every != 1, "model.window ", m.window, origin("model.window"),
          " would change nothing: with model.full_attention_every 1 all blocks see all keys");
  require(scaling.empty(), "model.rope_scaling.", scaling);
  const auto& d = config.data;
  require(d.corpus.empty() || (d.train_file.empty() && d.val_file.empty()),
          "data.corpus and data.train_file or data.val_file exclude each other");
  require(d.corpus.empty() || d.val_fraction > 0, "data.val_fraction is 0: nothing is left to validate on");
  require(!models::is_published(d.tokenizer) || !d.tokenizer_folder.empty(), "data.tokenizer ", d.tokenizer,
          " needs data.tokenizer_folder, the folder with its published files");
  require(d.train_file.empty() == d.val_file.empty(), "data.train_file and data.val_file go together");
  const auto& t = config.train;
  require(t.batch >= t.micro_batches, "train.batch ", t.batch, " is less than train.micro_batches ", t.micro_batches);
  require(t.min_lr <= t.lr || t.schedule == "constant", "train.min_lr ", t.min_lr, " is above train.lr ", t.lr);
  require(t.min_lr >= 0 || t.min_lr == -1, "train.min_lr ", t.min_lr, " is no learning rate; -1: a tenth of train.lr");
  require(t.decay_start == 0 || t.decay_start >= t.warmup, "train.decay_start ", t.decay_start,
          " lies in the warm-up: train.warmup is ", t.warmup);
  if (t.islands > 1) {
    const std::string islands = str("train.islands ", t.islands, origin("train.islands"));
    require(t.batch % t.islands == 0, islands, ": train.batch ", t.batch, origin("train.batch"), " has no equal part for each");
    require(t.batch / t.islands >= t.micro_batches, islands, " have ", t.batch / t.islands, " sequences each of train.batch ", t.batch,
            ", less than train.micro_batches ", t.micro_batches);
    require(t.eval_every % t.inner_steps == 0, islands, " have one model to evaluate every train.inner_steps ", t.inner_steps,
            " steps: train.eval_every ", t.eval_every, origin("train.eval_every"), " is no multiple");
    require(t.dtype != "f16", islands, ": with train.dtype f16 each would skip steps of its own; bf16 needs no loss scale");
  }
  const auto r = models::resolved(t);
  require((t.decay_start == 0 && t.decay_end == 0) || r.decay_start < r.decay_end || t.epochs > 0, "the decay would start at step ",
          r.decay_start, t.decay_start ? " (train.decay_start)" : " (train.warmup)", " and end at step ", r.decay_end,
          t.decay_end ? " (train.decay_end)" : " (train.steps)");
  require(config.output.trace_step <= t.steps || t.epochs > 0, "output.trace_step ", config.output.trace_step, ": the run has ", t.steps, " steps");
  require(config.output.keep_checkpoints != 1, "output.keep_checkpoints must be 0 or at least 2: if the newest ",
          "checkpoint is damaged, the one before it is needed");
  require(!config.output.folder.empty(), "output.folder is empty");
  const double head = config.sharding.pipeline_head;
  require(head == -1 || head >= 0, "sharding.pipeline_head ", head, " is no number of blocks; -1: as many as the head's operations are");
}

}  // namespace sheaf::tools
