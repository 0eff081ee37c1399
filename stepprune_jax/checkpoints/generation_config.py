"""Reads a folder's generation settings by the rules of `transformers`."""

import logging
from pathlib import Path

from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import Json, number_rule, read_fields, token_ids_rule

_LOG = logging.getLogger(__name__)

# Fields that change the greedy answers of `transformers` but are not supported here, by the value
# that has no effect. Null and an empty list have no effect for any field. Fields for sampling and
# length are not listed, because callers of this package set them.
_UNSUPPORTED = {
    0: "min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size token_healing",
    1: "num_beams num_return_sequences guidance_scale encoder_repetition_penalty",
    None: "bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias forced_eos_token_id "
    "stop_strings exponential_decay_length_penalty max_time penalty_alpha dola_layers "
    "watermarking_config",
}


def read_generation_config(folder: Path, config: Json) -> tuple[Json, float]:
    """Reads stop ids and repetition penalty, and logs a warning about unsupported fields.

    Args:
        folder: the checkpoint folder. Without a ``generation_config.json`` the fields are read from
            ``config.json``, where older versions of `transformers` wrote them.
        config: the parsed ``config.json``.

    Returns:
        A dict to be merged into `config`: the field "eos_token_id" with a list of stop ids, or no
        field if none are configured. And the repetition penalty, by default 1.

    Raises:
        ValueError: a supported field has a bad value; the message names the field.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        settings = read_json_object(file)
    else:
        file, text_config = folder / "config.json", config.get("text_config")
        settings = dict(text_config) if isinstance(text_config, dict) else {}
        settings |= {name: value for name, value in config.items() if value is not None}
    rules = {
        "eos_token_id": token_ids_rule("eos_token_id"),
        "penalty": number_rule("repetition_penalty", 1.0),
    }
    fields = read_fields(settings, str(file), rules)
    penalty = fields.pop("penalty")
    ignored_names = [
        name
        for neutral_value, names in _UNSUPPORTED.items()
        for name in names.split()
        if settings.get(name) not in (None, [], neutral_value)
    ]
    if ignored_names:
        _LOG.warning(
            "%s: %s: not followed, so answers may differ from those of transformers",
            file,
            ", ".join(ignored_names),
        )
    return {} if settings.get("eos_token_id") is None else fields, penalty
