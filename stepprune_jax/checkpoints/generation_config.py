"""What a folder says of how to generate, by the rules of `transformers`."""

import logging
from pathlib import Path

from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import Json, number_rule, read_fields, token_ids_rule

_LOG = logging.getLogger(__name__)

# Fields that change greedy answers of `transformers` and are not followed here, by the value that
# changes nothing, as null and an empty list do. Fields of sampling and of length are left out:
# callers give those.
_NOT_FOLLOWED = {
    0: "min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size token_healing",
    1: "num_beams num_return_sequences guidance_scale encoder_repetition_penalty",
    None: "bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias forced_eos_token_id "
    "stop_strings exponential_decay_length_penalty max_time penalty_alpha dola_layers "
    "watermarking_config",
}


def read_generation_config(folder: Path, config: Json) -> tuple[Json, float]:
    """Reads how a folder's model generates, and warns of fields that are not followed.

    Args:
        folder: the folder. Without a ``generation_config.json``, such fields count where older
            versions of `transformers` wrote them, in ``config.json``.
        config: its parsed ``config.json``.

    Returns:
        The stop ids, as a field that replaces that of `config`, or nothing if the file has none;
        and the repetition penalty, 1 for none.

    Raises:
        ValueError: a field that is followed has an unsupported value; the message names it.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        raw = read_json_object(file)
    else:
        file, text = folder / "config.json", config.get("text_config")
        given = {name: value for name, value in config.items() if value is not None}
        raw = {**(text if isinstance(text, dict) else {}), **given}
    rules = {
        "eos_token_id": token_ids_rule("eos_token_id"),
        "penalty": number_rule("repetition_penalty", 1.0),
    }
    fields = read_fields(raw, str(file), rules)
    penalty = fields.pop("penalty")
    ignored = [
        name
        for neutral, names in _NOT_FOLLOWED.items()
        for name in names.split()
        if raw.get(name) not in (None, [], neutral)
    ]
    if ignored:
        _LOG.warning(
            "%s: %s: not followed, so answers may differ from those of transformers",
            file,
            ", ".join(ignored),
        )
    return {} if raw.get("eos_token_id") is None else fields, penalty
