#include "sheaf/models/number_words.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

RotaryScaling rotary_scaling(const RopeScalingConfig& c) {
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
  if (c.rope_type == "longrope") {
    RotaryScaling s = RotaryScaling::longrope(numbers_of("model.rope_scaling.short_factor", c.short_factor),
                                              numbers_of("model.rope_scaling.long_factor", c.long_factor), c.factor,
                                              c.original_max_position_embeddings);
    if (c.attention_factor != 0) s.amplitude = c.attention_factor;
    return s;
  }
  fail<ConfigError>("[model] unknown rope_type '", c.rope_type, "'; known: default, linear, llama3, yarn, longrope");
}

}  // namespace sheaf::models
