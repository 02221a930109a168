#include "sheaf/models/language_model.h"

#include "sheaf/models/model_options.h"
#include "sheaf/nn/lora.h"
#include "sheaf/nn/quantize.h"

namespace sheaf::models {
namespace {

std::unique_ptr<Decoder> without_adapters(ModelConfig m, int64_t vocab) {
  if (m.vocab == 0) m.vocab = vocab;
  if (m.vocab <= 0) fail<ConfigError>("[model] the size of the vocabulary is not known: give model.vocab");
  if (m.type == "gpt2") return std::make_unique<Gpt>(gpt_config(m));
  if (m.type == "llama") return std::make_unique<Llama>(llama_config(m));
  fail<ConfigError>("[model] unknown type '", m.type, "'; known: gpt2, llama");
}

void add_adapters(Decoder& model, const ModelConfig& m) {
  check<ConfigError>(m.mtp_layers == 0, "[model] model.mtp_layers ", m.mtp_layers, ": with adapters (model.lora_rank) only these are trained");
  const nn::LoraOptions options{.rank = m.lora_rank, .alpha = m.lora_alpha};
  const int64_t adapters = nn::add_lora(model, options, [&](const std::string& path) { return takes_lora(path, m.lora_layers); });
  check<ConfigError>(adapters > 0, "[model] lora_layers '", m.lora_layers, "': this ", m.type, " has no such linear layers; its MLPs are ",
                     "mixtures of ", m.experts, " experts, of which only shared ones have adapters");
}

// As `peft` and `bitsandbytes` do: not embeddings, nor the head.
void rest_in_blocks(Decoder& model, const ModelConfig& m) {
  const BlockFormat format = block_format_from("model", m.quantize);
  const auto is_matrix_of_block = [](const std::string& name) {
    return (name.starts_with("blocks.") || name.starts_with("mtp_layers.")) && !nn::is_lora(name);
  };
  check<ConfigError>(nn::quantize(model, format, is_matrix_of_block) > 0, "[model] quantize ", m.quantize,
                     ": all weights are trained; only those with adapters (model.lora_rank) rest in blocks");
}

}  // namespace

std::unique_ptr<Decoder> make_language_model(const ModelConfig& config, int64_t vocab, bool frozen) {
  const ModelConfig m = resolved(config);
  std::unique_ptr<Decoder> model = without_adapters(m, vocab);
  if (m.lora_rank > 0) add_adapters(*model, m);
  if (frozen)
    for (nn::Parameter& p : model->parameters()) p.freeze_for_good();
  if (m.quantize != "none") rest_in_blocks(*model, m);
  return model;
}

std::optional<DType> compute_dtype_from(std::string_view section, std::string_view name) {
  if (name == "bf16") return kBF16;
  if (name == "f16") return kF16;
  check<ConfigError>(name == "f32", "[", section, "] ", section, ".dtype is ", name, ", not f32, bf16 or f16");
  return {};
}

}  // namespace sheaf::models
