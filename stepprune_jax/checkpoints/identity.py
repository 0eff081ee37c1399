"""Hashes that identify models and policy files, and the check that a policy fits its model."""

import hashlib
import logging
from pathlib import Path

import jax
import numpy as np

from stepprune_jax.checkpoints.folder import ModelFolder, fetch_weights
from stepprune_jax.checkpoints.policy import load_policy, read_about
from stepprune_jax.checkpoints.weight_files import find_weights, read_folder
from stepprune_jax.selectors import TrainedPruner

_LOG = logging.getLogger(__name__)

# Bytes hashed in the middle of each tensor. They differ between models, and reading them takes
# milliseconds for a 7B model instead of minutes.
_SAMPLE_BYTES = 1024


def model_identity(source: ModelFolder) -> str:
    """Returns a SHA-256 digest that identifies a model without reading all its weights.

    The digest covers `config.json`, the name, dtype, shape and offset of every tensor, and some
    bytes in the middle of each tensor. These bytes distinguish models of one architecture.

    Args:
        source: the model. The weights of a hub id are downloaded first.

    Returns:
        The digest in hexadecimal.
    """
    fetch_weights(source)
    digest = hashlib.sha256()
    for folder in filter(None, (source.folder, source.vision_folder)):
        digest.update((folder / "config.json").read_bytes())
        entries = read_folder(folder) if find_weights(folder) else {}
        for entry in sorted(entries.values(), key=lambda entry: (entry.path, entry.name)):
            record = (entry.path.name, entry.name, str(entry.dtype), entry.shape, entry.offset)
            digest.update(repr(record).encode())
            with entry.path.open("rb") as file:
                file.seek(entry.offset + max(0, entry.nbytes - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, entry.nbytes)))
    return digest.hexdigest()


def file_identity(path: Path) -> str:
    """Returns the SHA-256 digest of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def policy_digest(policy: TrainedPruner) -> str:
    """Returns a short digest of the configuration, weights and statistics of a policy.

    The digest does not cover the stop bias, which answer files store separately.
    """
    digest = hashlib.sha256(repr(policy.config).encode())
    arrays = jax.tree_util.tree_leaves_with_path((policy.params, policy.stats))
    for path, leaf in arrays:
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def load_policy_for(source: ModelFolder, path: str | Path) -> TrainedPruner:
    """Loads a policy, and logs a warning if it was trained with another model.

    A policy runs with any model of the same feature width. For a model other than the one in
    training, the kept tokens may be no better than random tokens.

    Args:
        source: the model that the policy will prune for.
        path: the policy, as in `load_policy`.

    Returns:
        The policy.

    Raises:
        FileNotFoundError: as in `load_policy`.
        ValueError: as in `load_policy`.
    """
    policy = load_policy(path)
    training_identity = read_about(path).get("model")  # the `model_identity` of its training
    if training_identity is not None and training_identity != model_identity(source):
        _LOG.warning(
            "the policy %s was trained with a model whose files are not those of %s: unless the "
            "weights are the same, what it keeps may be no better than random tokens",
            path,
            source.folder,
        )
    return policy
