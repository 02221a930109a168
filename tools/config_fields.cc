// The table of all options, and which of them fit together.
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
      {"model.preset", &m.preset, "a published size; fields given beside it win, but a file's not over one that is a flag", sizes},
      {"model.weights", &m.weights, "to start from: a folder or file of Hugging Face's; its config.json is the model's shape"},
      {"model.layers", &m.layers, "transformer blocks", any, 1, 10000},
      {"model.heads", &m.heads, "query heads", any, 1, 10000},
      {"model.kv_heads", &m.kv_heads, "key and value heads; 0: as many as heads", any, 0, 10000},
      {"model.width", &m.width, "size of the residual stream", any, 1, 1e6},
      {"model.head_dim", &m.head_dim, "width of a head; 0: model.width / model.heads (llama)", any, 0, 1e6},
      {"model.kv_lora_rank", &m.kv_lora_rank, "width of the latent that keys and values are made of (multi-head latent attention; llama); 0: none",
       any, 0, 1e6},
      {"model.q_lora_rank", &m.q_lora_rank, "of the latent that queries are made of; 0: none", any, 0, 1e6},
      {"model.qk_nope_head_dim", &m.qk_nope_head_dim, "of queries and keys, what is not rotated; 0: model.width / model.heads", any, 0, 1e6},
      {"model.qk_rope_head_dim", &m.qk_rope_head_dim, "what is; 0: half of that", any, 0, 1e6},
      {"model.v_head_dim", &m.v_head_dim, "of values; 0: model.qk_nope_head_dim", any, 0, 1e6},
      {"model.linear_key_heads", &m.linear_key_heads,
       "key heads of linear attention in place of attention, but in each model.full_attention_every-th block (Gated DeltaNet; llama); 0: none", any, 0, 10000},
      {"model.linear_value_heads", &m.linear_value_heads, "its value heads, a multiple; 0: as many", any, 0, 10000},
      {"model.linear_key_head_dim", &m.linear_key_head_dim, "width of its queries and keys; 0: of attention's heads", any, 0, 1e6},
      {"model.linear_value_head_dim", &m.linear_value_head_dim, "of its values; 0: of its keys", any, 0, 1e6},
      {"model.linear_conv_kernel", &m.linear_conv_kernel, "tokens of which each channel is convolved before", any, 1, 1000},
      {"model.rotary_dim", &m.rotary_dim, "of each head of attention the last so many elements are rotated; 0: all (llama)", any, 0, 1e6},
      {"model.mlp_width", &m.mlp_width, "hidden size of the MLP; 0: chosen by the type", any, 0, 1e7},
      {"model.context", &m.context, "tokens per sequence", any, 1, 1e8},
      {"model.window", &m.window, "keys that a token sees, itself and those before it (sliding-window attention); 0: all", any, 0, 1e9},
      {"model.full_attention_every", &m.full_attention_every, "of each so many blocks with a window or linear attention the last has full attention; 0: none", any, 0,
       10000},
      {"model.vocab", &m.vocab, "vocabulary size; 0: that of the tokenizer", any, 0, 1e8},
      {"model.bias", &m.bias, "biases in linear layers and layer norms (gpt2)"},
      {"model.qkv_bias", &m.qkv_bias, "queries, keys and values have biases, as Qwen2's (llama)"},
      {"model.out_bias", &m.out_bias, "what attention adds has a bias, as gpt-oss's (llama)"},
      {"model.attention_gate", &m.attention_gate, "what attention's heads give is multiplied by sigmoids of the layer's input, as Qwen3-Next's (llama)"},
      {"model.attention_sinks", &m.attention_sinks, "a score of each head that no value answers is in its softmax, as gpt-oss's (llama)"},
      {"model.qk_norm", &m.qk_norm, "each query and key is normalised before it is rotated, as Qwen3's (llama)"},
      {"model.qk_norm_all_heads", &m.qk_norm_all_heads, "those of all of a token's heads together, as OLMo 2's (llama)"},
      {"model.gelu_gate", &m.gelu_gate, "the gate of MLPs is a gelu (GeGLU), as Gemma's, not a silu (SwiGLU; llama)"},
      {"model.pre_norms", &m.pre_norms, "what attention and MLPs read is normalised; false: only what they give, as OLMo 2's (llama)"},
      {"model.post_norms", &m.post_norms, "what attention and MLPs give is normalised, too, before it is added, as Gemma 3's (llama)"},
      {"model.scale_embedding", &m.scale_embedding, "the embedding of a token is multiplied by the root of model.width, as Gemma's (llama)"},
      {"model.query_pre_attn_scalar", &m.query_pre_attn_scalar,
       "scores of attention are divided by its root, as in Gemma 3 27B (llama); 0: by that of the width of a head", any, 0, 1000000},
      {"model.attn_logit_softcapping", &m.attn_logit_softcapping,
       "scores s of attention become so much times tanh(s / so much), as Gemma 2's; 0: they are not capped", any, 0, 1e6},
      {"model.final_logit_softcapping", &m.final_logit_softcapping, "the same of logits", any, 0, 1e6},
      {"model.experts", &m.experts, "MLPs of which each token goes through some (mixture of experts; llama); 0: one MLP", any, 0, 10000},
      {"model.experts_per_token", &m.experts_per_token, "how many", any, 1, 10000},
      {"model.expert_hidden", &m.expert_hidden, "hidden size of each; 0: model.mlp_width", any, 0, 1e7},
      {"model.capacity_factor", &m.capacity_factor, "places of an expert, as a multiple of an even share; 0: nothing is dropped", any,
       0, 1e6},
      {"model.expert_groups", &m.expert_groups, "parts of a sequence for which these places are counted apart", any, 1, 1e6},
      {"model.normalize_experts", &m.normalize_experts, "the weights of a token's experts add up to 1"},
      {"model.expert_affinity", &m.expert_affinity, "of a router's logits: among all experts, or each expert's own", {"softmax", "sigmoid"}},
      {"model.expert_bias", &m.expert_bias, "a bias of each expert, where experts are chosen, evens out their load (DeepSeek-V3)"},
      {"model.expert_balance_rate", &m.expert_balance_rate, "what a step moves this bias by; 0: it stays", any, 0, 1e3},
      {"model.expert_scale", &m.expert_scale, "of the weights of a token's experts", any, 1e-6, 1e6},
      {"model.expert_linear_bias", &m.expert_linear_bias, "routers and the linear layers of experts have biases, as gpt-oss's"},
      {"model.expert_gate_limit", &m.expert_gate_limit, "experts' gates are gpt-oss's, held to this; 0: SwiGLU's", any, 0, 1e6},
      {"model.expert_gate_alpha", &m.expert_gate_alpha, "there, of the sigmoid's argument", any, 1e-6, 1e6},
      {"model.expert_parts", &m.expert_parts, "equal parts of the experts, of which", any, 1, 10000},
      {"model.expert_parts_per_token", &m.expert_parts_per_token, "a token's choices are in so many", any, 1, 10000},
      {"model.shared_experts", &m.shared_experts, "experts beside those, through which every token goes", any, 0, 10000},
      {"model.shared_expert_gate", &m.shared_expert_gate, "what they give is multiplied by a sigmoid of each token, as Qwen2-MoE's"},
      {"model.dense_layers", &m.dense_layers, "the first so many blocks have an MLP of model.mlp_width instead of a mixture", any, 0, 1e5},
      {"model.aux_loss", &m.aux_loss, "factor of each mixture's load-balancing loss in the training loss", any, 0, 1e6},
      {"model.router_z_loss", &m.router_z_loss, "and of the mean square of its router's log-sum-exps, which keeps these small", any, 0, 1e6},
      {"model.mtp_layers", &m.mtp_layers, "layers that each predict one token further, in training and for drafts (multi-token prediction)", any, 0, 100},
      {"model.mtp_loss", &m.mtp_loss, "factor of the mean of their losses in the training loss", any, 0, 1e6},
      {"model.tie_embeddings", &m.tie_embeddings, "the output head is the token embedding"},
      {"model.dropout", &m.dropout, "probability", any, 0, 0.999},
      {"model.lora_rank", &m.lora_rank, "of adapters that are trained in place of the weights (LoRA); 0: there are none", any, 0, 100000},
      {"model.lora_alpha", &m.lora_alpha, "what they add is scaled by this / model.lora_rank", any, 1e-9, 1e9},
      {"model.lora_layers", &m.lora_layers, "which linear layers of the blocks have one", {"all", "attention", "mlp"}},
      {"model.quantize", &m.quantize,
       "how matrices of blocks that nothing trains rest (QLoRA; evaluation): in 8 or 4 bits, in blocks of 64 with a scale",
       {"none", "int8", "nf4"}},
      {"model.rope_theta", &m.rope_theta, "base of the rotary frequencies (llama)", any, 1},
      {"model.window_rope_theta", &m.window_rope_theta, "that in blocks with a window, whose frequencies are not scaled, as Gemma 3's; 0: "
       "as in others (llama)", any, 0},
      {"model.nope_every", &m.nope_every, "of each so many blocks the last has no rotary positions (NoPE), as SmolLM3's; 0: none (llama)", any, 0, 10000},
      {"model.rope_scaling.rope_type", &rope.rope_type, "how rotary frequencies are scaled (llama); default: not at all",
       {"default", "linear", "llama3", "yarn"}, {}, {}, {"dynamic", "longrope"}},
      {"model.rope_scaling.factor", &rope.factor, "what slow frequencies (linear: all) are divided by", any, 1, 1e6},
      {"model.rope_scaling.low_freq_factor", &rope.low_freq_factor,
       "turns in the original context up to which one is slow (llama3)", any, 0, 1e6},
      {"model.rope_scaling.high_freq_factor", &rope.high_freq_factor, "turns from which on one stays as it is (llama3)", any, 0, 1e6},
      {"model.rope_scaling.original_max_position_embeddings", &rope.original_max_position_embeddings,
       "the original context, that of the first training (llama3, yarn)", any, 1, 1e9},
      {"model.rope_scaling.beta_slow", &rope.beta_slow, "turns in the original context up to which one is slow (yarn)", any, 0, 1e6},
      {"model.rope_scaling.beta_fast", &rope.beta_fast, "turns from which on one stays as it is (yarn)", any, 0, 1e6},
      {"model.rope_scaling.truncate", &rope.truncate, "those in between lie between whole indices (yarn)"},
      {"model.rope_scaling.attention_factor", &rope.attention_factor, "of queries and keys; 0: 0.1 ln(factor) + 1 (yarn)", any, 0, 1e6},
      {"model.rope_scaling.mscale", &rope.mscale, "of that logarithm, if not 0, as the next one (yarn)", any, 0, 1e6},
      {"model.rope_scaling.mscale_all_dim", &rope.mscale_all_dim, "of the logarithm in what that is divided by, by whose square latent attention multiplies scores (yarn)", any, 0, 1e6},
      {"model.norm_eps", &m.norm_eps, "added to the variance in norms", any, 0, 1},

      {"data.corpus", &d.corpus, "UTF-8 text file"},
      {"data.tokenizer", &d.tokenizer, "how a text becomes tokens, and tokens text", {"char", "byte", "gpt2", "llama3", "huggingface"}},
      {"data.tokenizer_folder", &d.tokenizer_folder,
       "of gpt2: encoder.json, vocab.bpe (or vocab.json, merges.txt); of llama3: tokenizer.model; of huggingface: tokenizer.json"},
      {"data.val_fraction", &d.val_fraction, "tail of the text held out for validation", any, 0, 0.999},
      {"data.train_file", &d.train_file, "token file to train on, instead of a text; 'name_*.bin' takes several, '0.7 a_*.bin 0.3 b_*.bin' mixes them"},
      {"data.val_file", &d.val_file, "token file to validate on, or several; or named sets of them, \"web=web.bin chat=chat.bin\""},
      {"data.choices", &d.choices, "JSON lines of questions with choices (as HellaSwag's) to answer in evaluations; or named sets of them"},
      {"data.order", &d.order, "of windows to train on: each once an epoch, or at random places", {"shuffled", "random"}},
      {"data.separate_documents", &d.separate_documents, "tokens attend to those of their own document alone"},
      {"data.end_of_text", &d.end_of_text, "the token that ends a document; -1: the tokenizer's", any, -1, 1e8},

      {"train.steps", &t.steps, "optimizer steps", any, 0, 1e12},
      {"train.epochs", &t.epochs, "how often the data are read, in place of train.steps; 0: train.steps says it", any, 0, 1e6},
      {"train.batch", &t.batch, "sequences per step, over all ranks and micro-batches", any, 1, 1e9},
      {"train.micro_batches", &t.micro_batches, "parts of the batch, accumulated one after the other", any, 1, 1e6},
      {"train.seed", &t.seed, "of weights, dropout and the order of data", any, 0},
      {"train.lr", &t.lr, "peak learning rate", any, 0, 1e6},
      {"train.lr_factors", &t.lr_factors, "what that of parameters is multiplied by, by their names: '0.1 wte.* 2 *.norm*'"},
      {"train.min_lr", &t.min_lr, "learning rate where the decay ends, and after it; -1: a tenth of train.lr", any, -1, 1e6},
      {"train.warmup", &t.warmup, "steps of linear warm-up", any, 0, 1e12},
      {"train.schedule", &t.schedule, "of the learning rate after the warm-up", {"cosine", "linear", "constant"}},
      {"train.decay_start", &t.decay_start, "step at which the learning rate starts to fall; 0: after the warm-up", any, 0,
       1e12},
      {"train.decay_end", &t.decay_end, "step at which it is min_lr; 0: train.steps", any, 0, 1e12},
      {"train.optimizer", &t.optimizer, "muon: AdamW, but matrices in blocks are orthogonalised", {"adamw", "muon"}},
      {"train.momentum", &t.momentum, "Muon", any, 0, 0.999999999},
      {"train.weight_decay", &t.weight_decay, "of parameters with two dimensions and more", any, 0, 1e6},
      {"train.weight_decay_factors", &t.weight_decay_factors, "what that of parameters is multiplied by, by their names: '0 wte.* 1 *.norm*'"},
      {"train.beta1", &t.beta1, "AdamW", any, 0, 0.999999999},
      {"train.beta2", &t.beta2, "AdamW", any, 0, 0.999999999},
      {"train.eps", &t.eps, "AdamW", any, 0, 1},
      {"train.clip", &t.clip, "largest norm of the gradient; 0: no clipping", any, 0},
      {"train.z_loss", &t.z_loss, "factor of the mean square of log-sum-exps of logits in the training loss, which keeps these from drifting", any, 0, 1e6},
      {"train.islands", &t.islands, "groups of ranks that train a model each, on equal parts of train.batch, and agree on one now and then "
       "(DiLoCo)", any, 1, 1e6},
      {"train.inner_steps", &t.inner_steps, "islands: steps from one agreement (outer step) to the next", any, 1, 1e12},
      {"train.outer_lr", &t.outer_lr, "islands: learning rate of the outer step; 1 without momentum takes the mean", any, 1e-9, 1e6},
      {"train.outer_momentum", &t.outer_momentum, "islands: of the outer step, Nesterov's", any, 0, 0.999999999},
      {"train.outer_dtype", &t.outer_dtype, "islands: of what they send each other; bf16 and int8: what parameters have moved by, in half or a "
       "quarter of the bytes", {"f32", "bf16", "int8"}},
      {"train.eval_every", &t.eval_every, "steps between evaluations; 0: only at the end", any, 0},
      {"train.eval_tokens", &t.eval_tokens, "targets per evaluation; 0: the whole validation split", any, 0},
      {"train.eval_questions", &t.eval_questions, "of each set of data.choices; 0: all", any, 0},
      {"train.log_every", &t.log_every, "steps between lines of metrics.jsonl", any, 1},
      {"train.log_norms", &t.log_norms, "there, norms of gradients and weights, of each unit or parameter", {"none", "units", "parameters"}},
      {"train.save_every", &t.save_every, "steps between checkpoints; 0: only at the end", any, 0},
      {"train.offload_activations", &t.offload_activations,
       "on a GPU: what train.recompute computes blocks again from waits in the host's memory"},
      {"train.offload_optimizer", &t.offload_optimizer, "on a GPU: the optimizer's state lies in the host's memory"},
      {"train.offload_parameters", &t.offload_parameters,
       "on a GPU: masters and gradients lie in the host's memory; a unit's weights come from there when it is gathered"},
      {"train.save_async", &t.save_async, "write checkpoints while training goes on, from a copy in memory"},
      {"train.dtype", &t.dtype, "of the computation; masters, gradients and statistics are f32", {"f32", "bf16", "f16"}},
      {"train.state_dtype", &t.state_dtype, "of the optimizer's state at rest; bf16 is rounded by chance", {"f32", "bf16"}},
      {"train.fp8", &t.fp8, "products of layers in FP8, by rows: activations and their gradients, or all: gradients of weights, too, but for experts'",
       {"none", "activations", "all"}},
      {"train.loss_scale", &t.loss_scale, "f16: factor of the loss in the first step", any, 1, 0x1p64},
      {"train.loss_scale_interval", &t.loss_scale_interval, "f16: steps without overflow after which it doubles", any, 1},
      {"train.recompute", &t.recompute,
       "what the backward computes again instead of keeping it: what is cheap; block by block; as little as sharding.memory_budget "
       "asks for",
       {"none", "selective", "block", "fit"}},
      {"train.recompute_blocks", &t.recompute_blocks,
       "with train.recompute block or selective: the first so many of each stage whole; -1: all with block, none with selective", any, -1},
      {"train.compile", &t.compile, "run a recorded step again as a program: nothing is placed or allocated anew"},
      {"train.fuse", &t.fuse, "with train.compile: elementwise ops in a row run as one, with the same bits"},
      {"train.cuda_graph", &t.cuda_graph, "on a GPU: replay a captured step, which is one launch"},
      {"train.tune_products", &t.tune_products, "on a GPU: choose algorithms of products by timing, in the first step"},

      {"sharding.strategy", &s.strategy, "who holds what", {"full_shard", "shard_grad_op", "zero1", "replicate"}},
      {"sharding.replicas", &s.replicas, "groups of ranks, neighbours, that each hold the model (hybrid sharding, HSDP)", any, 1,
       1e6},
      {"sharding.secondary", &s.secondary, "masters and optimizer states are cut over the replicas, or ranks that share "
       "sequences or experts, too (secondary shards, hpZ)"},
      {"sharding.experts", &s.experts, "ranks that share the experts of mixtures (expert parallelism)", any, 1, 1e6},
      {"sharding.context", &s.context, "ranks that share each sequence (context parallelism)", any, 1, 1e6},
      {"sharding.context_comm", &s.context_comm, "what they send in attention: all_to_all gives each whole sequences of some heads, "
       "all_gather all keys and values, for queries of its own", {"all_to_all", "all_gather"}},
      {"sharding.pipeline", &s.pipeline, "stages of consecutive blocks through which micro-batches go (pipeline parallelism)", any, 1,
       1e6},
      {"sharding.pipeline_runs", &s.pipeline_runs, "runs of blocks in each stage, which micro-batches go round (interleaved pipeline)",
       any, 1, 1e6},
      {"sharding.pipeline_schedule", &s.pipeline_schedule, "the order of a stage's turns: zero_bubble puts the gradients of weights "
       "off, where stages would wait", {"1f1b", "zero_bubble"}},
      {"sharding.pipeline_head", &s.pipeline_head, "as how many blocks the head and its loss count when blocks are cut into stages; -1: as "
       "many as take as many operations", any, -1, 1e6},
      {"sharding.tensor", &s.tensor, "ranks, neighbours, that share heads, hidden units and vocabulary, and each sequence "
       "(tensor parallelism)", any, 1, 1e6},
      {"sharding.piece_rows", &s.piece_rows, "what layers of a tensor axis gather, and their sums, travel in pieces of at least so many rows, "
       "beside products of others; 0: whole", any, 0},
      {"sharding.gather_int8", &s.gather_int8, "matrices are gathered in int8, in blocks of 64 with a scale"},
      {"sharding.reduce_dtype", &s.reduce_dtype, "of what ranks send each other of gradients; int8: in blocks of 64 with a scale, rounded by "
       "chance; between hosts of several ranks beside sharding.replicas", {"f32", "bf16", "int8"}},
      {"sharding.units", &s.units, "what is gathered at once", {"block", "count", "none"}},
      {"sharding.min_parameters", &s.min_parameters, "parameters of a unit, for units = \"count\"", any, 1},
      {"sharding.memory_budget", &s.memory_budget,
       "bytes of a rank, for train.recompute fit; with train.compile, within which units are not gathered again; 0: none", any, 0},
      {"sharding.prefetch_bytes", &s.prefetch_bytes, "gathered ahead of use; -1: one unit; 0: none", any, -1},

      {"output.folder", &c.output.folder, "metrics.jsonl, checkpoints and the configuration"},
      {"output.keep_checkpoints", &c.output.keep_checkpoints, "newest ones kept, at least 2; 0: all", any, 0},
      {"output.keep_best", &c.output.keep_best, "the weights of the lowest validation loss stay in <output.folder>/best"},
      {"output.tensorboard", &c.output.tensorboard, "metrics for TensorBoard, too, in <output.folder>/tensorboard"},
      {"output.trace_step", &c.output.trace_step, "the step whose time line is measured, for trace.json; 0: none", any, 0,
       1e12},

      {"generate.prompt", &g.prompt, "text to continue"},
      {"generate.tokens", &g.tokens, "tokens to add", any, 0, 1e9},
      {"generate.temperature", &g.temperature, "divides the logits; 0: always the likeliest token", any, 0, 1e6},
      {"generate.top_k", &g.top_k, "choose among the k likeliest; 0: among all", any, 0},
      {"generate.top_p", &g.top_p, "of these among as few of the likeliest as make up this share of their probability (nucleus sampling)", any,
       0, 1},
      {"generate.ignore_end_of_text", &g.ignore_end_of_text, "go on behind the token that ends a text, if the tokenizer has one, or a turn"},
      {"generate.chat", &g.chat, "chatml, llama3 or gemma: the prompt is what a user says, and an assistant answers; empty: it is a text to continue"},
      {"generate.system", &g.system, "in a chat: what the assistant is told before"},
      {"generate.end_token", &g.end_token, "a special token that ends what is generated, beside the tokenizer's end of text, or with generate.ignore_end_of_text in place of it"},
      {"generate.special_tokens", &g.special_tokens, "the prompt may have special tokens in it, by their names"},
      {"generate.dtype", &g.dtype, "of weights and computing: bf16 and f16 take half of the memory", {"f32", "bf16", "f16"}},
      {"generate.quantize", &g.quantize, "how matrices of blocks rest: in 8 or 4 bits, in blocks of 64 with a scale", {"none", "int8", "nf4"}},
      {"generate.seed", &g.seed, "of the choices", any, 0},
      {"generate.drafts", &g.drafts, "tokens that layers for further tokens (model.mtp_layers) draft for each pass, at most one by each layer", any, 0, 64},
  };
}

const char* unused(const std::string& key, const TrainConfig& config) {
  if (key == "model.bias" && config.model.type != "gpt2") return "only model.type gpt2 has biases";
  if (key == "model.qkv_bias" && config.model.type != "llama") return "only model.type llama has such biases alone";
  if (key == "model.qk_norm" && config.model.type != "llama") return "only model.type llama has such norms";
  if (key == "model.qk_norm_all_heads" && !config.model.qk_norm) return "without model.qk_norm there is no norm";
  for (const char* name : {"gelu_gate", "pre_norms", "post_norms", "qk_norm_all_heads", "scale_embedding", "query_pre_attn_scalar", "out_bias", "attention_sinks", "attention_gate", "rotary_dim", "nope_every"})
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
    for (const char* name : {"attention_gate", "attention_sinks", "qk_norm", "qk_norm_all_heads", "qkv_bias", "out_bias", "rotary_dim", "query_pre_attn_scalar", "attn_logit_softcapping", "kv_heads", "kv_lora_rank", "rope_theta", "nope_every"})
      if (key == str("model.", name)) return "all blocks have linear attention; see model.full_attention_every";
  if (key.starts_with("model.linear_") && config.model.type != "llama") return "only model.type llama has linear attention";
  if (key.starts_with("model.linear_") && key != "model.linear_key_heads" && config.model.linear_key_heads == 0)
    return "only linear attention (model.linear_key_heads) has it";
  if (key.starts_with("model.expert") && config.model.type != "llama") return "only model.type llama has mixtures of experts";
  const bool of_experts = key.starts_with("model.expert") || key == "model.capacity_factor" || key == "model.normalize_experts" ||
                          key == "model.aux_loss" || key == "model.router_z_loss" || key.starts_with("model.shared_expert") || key == "model.dense_layers";
  if (of_experts && key != "model.experts" && config.model.experts == 0) return "only mixtures of experts (model.experts) have it";
  if (key == "model.shared_expert_gate" && config.model.shared_experts == 0) return "without model.shared_experts there is nothing to gate";
  if (key.starts_with("model.mtp_") && config.model.type != "llama") return "only model.type llama has layers that predict further tokens";
  if (key == "model.mtp_loss" && config.model.mtp_layers == 0) return "without model.mtp_layers only the next token is predicted";
  if (key == "model.expert_groups" && config.model.capacity_factor == 0) return "without model.capacity_factor nothing is counted";
  if (key == "model.expert_balance_rate" && !config.model.expert_bias) return "without model.expert_bias there is nothing to move";
  if (key == "model.expert_gate_alpha" && config.model.expert_gate_limit == 0) return "without model.expert_gate_limit gates are SwiGLU's";
  if (key == "model.expert_parts_per_token" && config.model.expert_parts == 1) return "without model.expert_parts there is one";
  if (key.starts_with("model.lora_") && key != "model.lora_rank" && config.model.lora_rank == 0)
    return "without model.lora_rank there are no adapters";
  if (key.starts_with("model.rope_") && config.model.type != "llama") return "only model.type llama has rotary embeddings";
  const std::string& scaling = config.model.rope_scaling.rope_type;
  if (key == "model.rope_scaling.factor" && scaling == "default")
    return "only model.rope_scaling.rope_type linear, llama3 and yarn have it";
  if (key == "model.rope_scaling.original_max_position_embeddings" && scaling != "llama3" && scaling != "yarn")
    return "only model.rope_scaling.rope_type llama3 and yarn have it";
  if (key.starts_with("model.rope_scaling.") && key.ends_with("_freq_factor") && scaling != "llama3")
    return "only model.rope_scaling.rope_type llama3 has it";
  for (const char* name : {"beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim"})
    if (key == str("model.rope_scaling.", name) && scaling != "yarn") return "only model.rope_scaling.rope_type yarn has it";
  if (key == "train.steps" && config.train.epochs > 0) return "train.epochs says how many steps there are";
  if (key.starts_with("train.decay_") && config.train.schedule == "constant")
    return "train.schedule constant has no decay";
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
  require(m.type != "llama" || m.kv_lora_rank > 0 || m.head_dim > 0 || m.rotary_dim > 0 || m.width / m.heads % 2 == 0, width, " / ", heads, " is ", m.width / m.heads,
          "; rotary embedding needs an even size");
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
    require(m.head_dim == 0 || m.head_dim == r.head_dim, latent, " with model.head_dim ", m.head_dim, origin("model.head_dim"), ": that follows from model.qk_nope_head_dim ",
            r.qk_nope_head_dim, " and model.qk_rope_head_dim ", r.qk_rope_head_dim);
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
  require(m.nope_every == 0 || m.kv_lora_rank == 0, "model.nope_every ", m.nope_every, origin("model.nope_every"), " with model.kv_lora_rank ", m.kv_lora_rank,
          origin("model.kv_lora_rank"), ": latent attention always has rotary positions");
  const std::string scaling = models::rotary_scaling(m.rope_scaling).problem();
  require(m.pre_norms || m.post_norms, "model.pre_norms", origin("model.pre_norms"), ": without model.post_norms, too, nothing in the blocks is normalised");
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
