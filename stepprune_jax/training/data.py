"""A run's data, opened from its configuration; no weights are needed for it."""

from collections.abc import Callable
from typing import Any

from stepprune_jax.checkpoints.folder import Source as ModelSource
from stepprune_jax.checkpoints.folder import load_tokenizer
from stepprune_jax.data.corpus import Limits
from stepprune_jax.data.survey import Source, open_corpus
from stepprune_jax.training.batches import Batches, Loading
from stepprune_jax.training.pixels import PixelCache


def open_batches(
    config: Any, source: Source, identity: str, model: ModelSource,
    local: slice = slice(None), say: Callable[[str], Any] = print,
) -> Batches:  # fmt: skip
    """Reads a run's training file and plans its batches.

    Args:
        config: the run's checked `ConfigDict`.
        source: from `training_source`.
        identity: hash of the training file's contents.
        model: the frozen model's folder.
        local: rows of each batch that this process makes.
        say: takes the lines of the report.

    Returns:
        The batches.

    Raises:
        FileNotFoundError: the tokenizer, the file or a picture is missing.
        ValueError: bad data, or a tokenizer that cannot be used.
    """
    data, shape = config.data, model.config
    limits = Limits(shape.num_image_tokens, data.context_limit, data.policy_text_limit)
    if limits.ids < 2:
        raise ValueError(
            f"config.data.context_limit is {data.context_limit}, expected more than the "
            f"{shape.num_image_tokens} visual tokens of a picture"
        )
    corpus = open_corpus(source, load_tokenizer(model.folder), limits, identity, say)
    cache = int(data.cache_gb * 2**30) // max(1, data.workers)  # every process has its own
    settings = shape.family.image_settings(model.vision_folder or model.folder)
    loading = Loading(data.threads, data.workers, local, data.missing == "skip")
    return Batches(
        corpus, PixelCache(settings, shape.vision.image_size, cache), config.batch_size,
        config.seed, data.length_multiple, data.length_group, loading,
    )  # fmt: skip
