#include "sheaf/tools/export_adapters.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "sheaf/autograd/ops.h"

namespace sheaf::tools {
namespace {

Tensor as_tensor(const Spans& pieces, DType dtype, const Shape& shape) {
  const Tensor t = Tensor::empty({dtype, shape, {}});
  char* at = t.view().as<char>();
  for (const auto& piece : pieces) std::memcpy(std::exchange(at, at + piece.size()), piece.data(), piece.size());
  return t;
}

// "transformer.h.0.attn.c_attn.weight" or "model.layers.0.self_attn.q_proj.weight", without ".weight".
std::string layer_of(const models::PublishedTensor& t) { return t.name.substr(0, t.name.rfind('.')); }

// "attn.c_attn", "self_attn.q_proj": the same in all blocks.
std::string kind_of(const models::PublishedTensor& t) {
  const std::string layer = layer_of(t);
  return layer.substr(layer.rfind('.', layer.rfind('.') - 1) + 1);
}

// For models with adapters: whether `t` is the weight of a layer that has one.
bool has_adapter(const models::ModelConfig& model, const models::PublishedTensor& t) {
  return t.shape.rank() == 2 && models::takes_lora(t.own, model.lora_layers);
}

}  // namespace

Spans part_of(const Spans& whole, int64_t begin, int64_t end) {
  Spans out;
  int64_t at = 0;
  for (const auto& span : whole) {
    const auto size = static_cast<int64_t>(span.size());
    const int64_t from = std::clamp(begin - at, int64_t{0}, size), to = std::clamp(end - at, int64_t{0}, size);
    if (from < to) out.push_back(span.subspan(static_cast<size_t>(from), static_cast<size_t>(to - from)));
    at += size;
  }
  return out;
}

std::optional<Adapter> adapter_of(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedTensor& t) {
  if (model.lora_rank == 0 || !has_adapter(model, t)) return {};
  const std::string layer = t.own.substr(0, t.own.rfind('.'));
  const int64_t row = model.lora_rank * static_cast<int64_t>(size_of(kF32));
  return Adapter{checkpoint.data(layer + ".lora.a"),
                 part_of(checkpoint.data(layer + ".lora.b"), t.first_row * row, (t.first_row + t.rows()) * row), model.lora_rank,
                 model.lora_alpha / static_cast<double>(model.lora_rank)};
}

RestingWeight weight_of(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedTensor& t) {
  RestingWeight w{.bytes = {}, .dtype = checkpoint.at(t.own).dtype, .blocks = {}, .rows = t.rows(), .columns = t.row_size()};
  check<CheckpointError>(w.dtype != kU8 || model.quantize != "none", "[export] ", checkpoint.path(), ": ", t.own,
                         " is of bytes, and the run does not say of which blocks");
  if (w.dtype == kU8) w.blocks = block_format_from("export", model.quantize);
  const int64_t row = w.blocks ? blocks_shape({w.columns}, *w.blocks)[0] : w.columns * static_cast<int64_t>(size_of(w.dtype));
  w.bytes = part_of(checkpoint.data(t.own), t.first_row * row, (t.first_row + w.rows) * row);
  return w;
}

std::vector<std::byte> merged(const RestingWeight& weight, const std::optional<Adapter>& adapter, DType dtype) {
  const auto& [bytes, resting, blocks, rows, columns] = weight;
  const Shape shape{rows, columns};
  Tensor sum = blocks ? dequantize(as_tensor(bytes, kU8, blocks_shape(shape, *blocks)), *blocks, kF32)
                      : cast(as_tensor(bytes, resting, shape), kF32);
  if (adapter) {
    const Tensor b = as_tensor(adapter->b, kF32, {rows, adapter->rank}), a = as_tensor(adapter->a, kF32, {adapter->rank, columns});
    sum = sum + matmul(b, a) * adapter->scale;
  }
  sum = cast(sum, dtype);
  const auto* data = sum.view().as<std::byte>();
  return {data, data + sum.view().bytes()};
}

std::vector<SafetensorsInput> adapter_tensors(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedForm& form) {
  std::vector<SafetensorsInput> tensors;
  for (const models::PublishedTensor& t : models::published_tensors(model, form)) {
    const auto adapter = adapter_of(checkpoint, model, t);
    if (!adapter) continue;
    // It goes by the model_type: a model with latent attention is deepseek_v3, also without experts.
    check<ConfigError>((model.experts == 0 && model.kv_lora_rank == 0) || t.name.find(".mlp.") == std::string::npos,
                       "[export] --format peft: `peft` takes ", t.name, " of a mixture's model_type for one of experts'; --format huggingface ",
                       "adds its adapter to it");
    check<ConfigError>(t.part.rank() == 0, "[export] --format peft: ", t.name, " is several of the model's tensors, such as ", t.own,
                       ", with adapters of their own; --format huggingface adds them to it");
    const std::string name = "base_model.model." + layer_of(t);
    tensors.push_back({name + ".lora_A.weight", kF32, {adapter->rank, t.row_size()}, adapter->a});
    tensors.push_back({name + ".lora_B.weight", kF32, {t.rows(), adapter->rank}, adapter->b});
  }
  return tensors;
}

Json adapter_config(const models::ModelConfig& model, const models::PublishedForm& form, const std::string& weights) {
  std::set<std::string> kinds;
  bool transposed = false;  // [in, out], as GPT-2's are
  for (const models::PublishedTensor& t : models::published_tensors(model, form))
    if (has_adapter(model, t)) kinds.insert(kind_of(t)), transposed = t.transposed;
  return Json::Object{{"peft_type", "LORA"},
                      {"task_type", "CAUSAL_LM"},
                      {"base_model_name_or_path", weights},
                      {"r", model.lora_rank},
                      {"lora_alpha", model.lora_alpha},
                      {"lora_dropout", 0.0},
                      {"bias", "none"},
                      {"fan_in_fan_out", transposed},
                      {"target_modules", Json::Array(kinds.begin(), kinds.end())},
                      {"inference_mode", true}};
}

}  // namespace sheaf::tools
