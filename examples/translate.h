// An encoder and a decoder (Vaswani et al., https://arxiv.org/abs/1706.03762): texts of different lengths, padded into a batch, are read
// without a causal mask, and answered by a decoder that attends to what was read.
#pragma once

#include <vector>

#include "sheaf/sheaf.h"

namespace examples {

namespace nn = sheaf::nn;
using sheaf::Tensor;

struct EncoderBlock : nn::Module {
  nn::RMSNorm attention_norm, mlp_norm;
  nn::SelfAttention attention;
  nn::MLP mlp;

  EncoderBlock(int64_t width, int64_t heads)
      : attention_norm(width), mlp_norm(width), attention({.width = width, .heads = heads, .causal = false}), mlp({.width = width}) {}
  Tensor forward(const Tensor& x_BSC, const Tensor& begins_BS) {
    const Tensor y_BSC = x_BSC + attention(attention_norm(x_BSC), nullptr, begins_BS);
    return y_BSC + mlp(mlp_norm(y_BSC));
  }
  SHEAF_FIELDS(attention_norm, mlp_norm, attention, mlp);
};

struct DecoderBlock : nn::Module {
  nn::RMSNorm attention_norm, cross_norm, mlp_norm;
  nn::SelfAttention attention;
  nn::CrossAttention cross;
  nn::MLP mlp;

  DecoderBlock(int64_t width, int64_t heads)
      : attention_norm(width),
        cross_norm(width),
        mlp_norm(width),
        attention({.width = width, .heads = heads}),
        cross({.width = width, .heads = heads}),
        mlp({.width = width}) {}
  Tensor forward(const Tensor& x_BTC, const Tensor& states_BSC, const Tensor& begins_BS) {
    Tensor y_BTC = x_BTC + attention(attention_norm(x_BTC));
    y_BTC = y_BTC + cross(cross_norm(y_BTC), states_BSC, begins_BS);
    return y_BTC + mlp(mlp_norm(y_BTC));
  }
  SHEAF_FIELDS(attention_norm, cross_norm, mlp_norm, attention, cross, mlp);
};

struct Translator : nn::Module {
  nn::Embedding tokens, places;
  std::vector<EncoderBlock> encoder;
  std::vector<DecoderBlock> decoder;
  nn::RMSNorm encoder_norm, decoder_norm;

  Translator(int64_t layers, int64_t width, int64_t heads, int64_t vocab, int64_t longest)
      : tokens(vocab, width, nn::Init::normal(0.1)),
        places(longest, width, nn::Init::normal(0.1)),
        encoder_norm(width),
        decoder_norm(width) {
    for (int64_t i = 0; i < layers; ++i) encoder.emplace_back(width, heads), decoder.emplace_back(width, heads);
  }
  /// Where the document of each of S tokens begins: the first lengths[b] of a row are one, and the padding behind them is another.
  static Tensor documents(const Tensor& lengths_B, int64_t S) {
    const Tensor lengths_B1 = unsqueeze(lengths_B, 1);
    return cast(where(lt(sheaf::arange(S), lengths_B1), 0.0, lengths_B1), sheaf::kI32);
  }
  Tensor encode(const Tensor& source_BS, const Tensor& begins_BS) {
    const auto scope = enter();
    Tensor x_BSC = embedded(source_BS);
    for (EncoderBlock& block : encoder) x_BSC = block(x_BSC, begins_BS);
    return encoder_norm(x_BSC);
  }
  /// The decoder's features: those of token t depend on the tokens up to it and on all states.
  Tensor decode(const Tensor& answer_BT, const Tensor& states_BSC, const Tensor& begins_BS) {
    const auto scope = enter();
    Tensor x_BTC = embedded(answer_BT);
    for (DecoderBlock& block : decoder) x_BTC = block(x_BTC, states_BSC, begins_BS);
    return decoder_norm(x_BTC);
  }
  /// The mean over all targets but -1, with smoothed labels.
  Tensor loss(const Tensor& source_BS, const Tensor& lengths_B, const Tensor& answer_BT, const Tensor& target_BT) {
    const auto scope = enter();
    const Tensor begins_BS = documents(lengths_B, source_BS.size(1));
    const Tensor y_BTC = decode(answer_BT, encode(source_BS, begins_BS), begins_BS);
    return linear_cross_entropy(y_BTC, tokens.weight, target_BT, {.mean_of_counted = true, .label_smoothing = 0.1});
  }
  /// The likeliest next token of each row.
  Tensor next(const Tensor& answer_BT, const Tensor& states_BSC, const Tensor& begins_BS) {
    const auto scope = enter();
    const int64_t T = answer_BT.size(1);
    return argmax(linear(slice(decode(answer_BT, states_BSC, begins_BS), 1, T - 1, T), tokens.weight));
  }
  SHEAF_FIELDS(tokens, places, encoder, decoder, encoder_norm, decoder_norm);

 private:
  Tensor embedded(const Tensor& x_BT) { return tokens(x_BT) + places(sheaf::arange(x_BT.size(1))); }
};

}  // namespace examples
