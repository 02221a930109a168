#include "sheaf/tools/same_options.h"

#include <algorithm>

#include "sheaf/tools/config.h"

namespace sheaf::tools {

void require_same_options(World& world, const models::TrainConfig& config, std::vector<Fact> further) {
  constexpr std::string_view kPlaces[] = {"data.corpus",  "data.train_file",       "data.val_file",
                                          "data.choices", "data.tokenizer_folder", "model.weights"};
  models::TrainConfig copy = config;
  for (const ConfigField& field : config_fields(copy))
    if (std::ranges::find(kPlaces, field.key) == std::end(kPlaces))
      further.push_back({field.key, std::visit([](const auto* value) { return str(*value); }, field.target)});
  require_agreement(world, "config", further);
}

}  // namespace sheaf::tools
