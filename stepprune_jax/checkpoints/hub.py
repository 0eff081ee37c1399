"""Files of the Hugging Face hub, named "hub:owner/name" or "hub:owner/name@revision".

Environment variables of `huggingface_hub` apply: HF_HUB_OFFLINE=1 restricts it to downloaded files,
HF_TOKEN gives access to private repositories, HF_ENDPOINT selects another hub.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.user_input import UserError, require

_LOG = logging.getLogger(__name__)

PREFIX = "hub:"
# Owners of published checkpoints. A relative path rarely starts with one of these names, so their
# ids need no prefix.
KNOWN_OWNERS = ("llava-hf", "liuhaotian", "openai", "Qwen")


class Repository(NamedTuple):
    """A repository of the hub.

    Attributes:
        name: "owner/name".
        revision: a branch, tag or commit; None for the newest commit.
    """

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def has_prefix(text: str | Path) -> bool:
    """Returns whether a text starts with "hub:" and therefore cannot be a local path."""
    return str(text).startswith(PREFIX)


def repository(text: str | Path) -> Repository | None:
    """Parses the name of a repository.

    Args:
        text: "hub:owner/name", or "owner/name" if the owner is one of `KNOWN_OWNERS`; "@revision"
            may follow.

    Returns:
        The repository, or None if the text is a path or another name.
    """
    name, separator, revision = str(text).removeprefix(PREFIX).partition("@")
    if not _is_name(name) or (separator and not revision):
        return None
    if not has_prefix(text) and name.partition("/")[0] not in KNOWN_OWNERS:
        return None
    return Repository(name, revision or None)


def find_repository(text: str | Path, missing: str, *, allow_any_owner: bool = False) -> Repository:
    """Parses the name of a repository. Called if no local file or folder has this name.

    By default only `KNOWN_OWNERS` may omit the prefix "hub:", so a mistyped path does not download
    files from a stranger.

    Args:
        text: the name that the user gave.
        missing: start of the error message, such as "no folder NAME".
        allow_any_owner: whether the names of all owners may omit the prefix. Names that
            end in ".safetensors", and names whose owner is a local folder, still need the prefix.

    Returns:
        The repository.

    Raises:
        FileNotFoundError: the text names no repository.
    """
    source = repository(text)
    path = Path(text)
    is_like_path = path.parent.exists() or path.suffix == ".safetensors"
    if source is None and allow_any_owner and not is_like_path:
        source = repository(f"{PREFIX}{text}")
        if source is not None:
            _LOG.info("%s is not a local file; looking it up on the Hugging Face hub", source)
    if source is not None:
        return source
    reason = f"and it is not a hub id ({PREFIX}owner/name)"
    if _is_name(str(text).partition("@")[0]) and not has_prefix(text):
        reason = (
            f"for a repository of the Hugging Face hub, use {PREFIX}{text}; only those of "
            f"{', '.join(KNOWN_OWNERS)} need no prefix"
        )
    raise FileNotFoundError(f"{missing}; {reason}")


def download(source: Repository, patterns: Sequence[str]) -> Path:
    """Downloads the files of a repository that are not in the local cache.

    Args:
        source: the repository.
        patterns: glob patterns of the files' names.

    Returns:
        The local folder with these files, in the cache of `huggingface_hub`.

    Raises:
        FileNotFoundError: the hub could not be reached, or has no such repository.
    """
    import huggingface_hub  # only needed for names of the hub
    from huggingface_hub import constants

    no_home = f"{source}: there is no home folder for downloads, set HF_HOME to a folder"
    require(not constants.HF_HUB_CACHE.startswith("~"), no_home)
    try:
        folder = huggingface_hub.snapshot_download(
            source.name, revision=source.revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # the HTTP client raises errors outside OSError
        raise FileNotFoundError(
            f"fetching {str(source)!r} from the Hugging Face hub failed: {_one_line(error)}. "
            "Without a network, download the repository elsewhere and give its local path"
        ) from error
    return Path(folder)


def upload(folder: Path, names: Sequence[str], target: Repository, *, private: bool) -> str:
    """Uploads files of a folder in one commit.

    Args:
        folder: the local folder.
        names: names of the files to upload.
        target: the repository, which is created if it does not exist.
        private: whether a new repository is private.

    Returns:
        The web address of the commit.

    Raises:
        ValueError: the upload failed; the message says how to retry.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(target.name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=target.name,
            folder_path=folder,
            allow_patterns=list(names),
            revision=target.revision,
            commit_message="Upload a policy of stepprune_jax",
        )
    except Exception as error:  # the HTTP client raises errors outside OSError
        raise UserError(
            f"uploading to {target} failed: {_one_line(error)}. The files are in {folder}; "
            f"`hf upload {target.name} {folder}` also uploads them"
        ) from error
    return commit.commit_url


def _is_name(text: str) -> bool:
    """Returns whether a text has the form owner/name."""
    owner, _, name = text.partition("/")
    return bool(owner and name) and "/" not in name and not text.startswith((".", "~"))


def _one_line(error: Exception) -> str:
    """Returns an error's message on one line, without its final period."""
    return " ".join(str(error).split()).rstrip(".")
