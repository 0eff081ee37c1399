"""Fingerprints of frozen models and files, and policies that name the model they are for."""

import hashlib
import logging
from pathlib import Path

from stepprune_jax.checkpoints.folder import ModelFolder, fetch_weights
from stepprune_jax.checkpoints.policy import load_policy, read_about
from stepprune_jax.checkpoints.weight_files import find_weights, read_folder
from stepprune_jax.selectors import TrainedPruner

_LOG = logging.getLogger(__name__)

# Bytes of each tensor that are hashed.
_SAMPLE = 1024


def model_identity(source: ModelFolder) -> str:
    """Returns a hash that identifies a frozen model without reading all of it.

    It covers the configuration, the index of the weights (every tensor's name, type, shape and
    offset) and the bytes in the middle of each tensor, which differ between models of one
    architecture. A model on the hub is downloaded first.
    """
    fetch_weights(source)
    digest = hashlib.sha256()
    for folder in filter(None, (source.folder, source.vision_folder)):
        digest.update((folder / "config.json").read_bytes())
        entries = read_folder(folder) if find_weights(folder) else {}
        for entry in sorted(entries.values(), key=lambda entry: (entry.path, entry.name)):
            about = (entry.path.name, entry.name, str(entry.dtype), entry.shape, entry.offset)
            digest.update(repr(about).encode())
            with entry.path.open("rb") as file:
                file.seek(entry.offset + max(0, entry.nbytes - _SAMPLE) // 2)
                digest.update(file.read(min(_SAMPLE, entry.nbytes)))
    return digest.hexdigest()


def file_identity(path: Path) -> str:
    """Returns a hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_policy_for(source: ModelFolder, path: str | Path) -> TrainedPruner:
    """Reads a policy as `load_policy` does; warns if its file says that it is for another model.

    Another model of the same widths would be accepted, with tokens that may be no better than
    random ones.
    """
    policy, trained_with = load_policy(path), read_about(path).get("model")
    if trained_with is not None and trained_with != model_identity(source):
        _LOG.warning(
            "the policy %s was trained with a model whose files are not those of %s: unless the "
            "weights are the same, what it keeps may be no better than random tokens",
            path,
            source.folder,
        )
    return policy
