"""Vision-language models with frozen weights, as pure functions of trees of weights."""
