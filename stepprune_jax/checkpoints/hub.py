"""The Hugging Face hub: "hub:owner/name", or "hub:owner/name@revision".

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
# Owners of published checkpoints, whose ids cannot be mistyped paths.
KNOWN_OWNERS = ("llava-hf", "liuhaotian", "openai", "Qwen")


class Repository(NamedTuple):
    """A repository of the hub; without a revision (branch, tag or commit) its newest commit."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def is_meant(given: str | Path) -> bool:
    """Returns whether a name explicitly denotes a repository: "hub:owner/name"."""
    return str(given).startswith(PREFIX)


def repository(given: str | Path) -> Repository | None:
    """Reads the name of a repository; None if it is another name or a path.

    That is "hub:owner/name", or "owner/name" if the owner is one of `KNOWN_OWNERS`; a revision may
    follow after an @.
    """
    name, at, revision = str(given).removeprefix(PREFIX).partition("@")
    if not _is_name(name) or (at and not revision):
        return None
    if not is_meant(given) and name.partition("/")[0] not in KNOWN_OWNERS:
        return None
    return Repository(name, revision or None)


def find_repository(given: str | Path, missing: str, *, anyone: bool = False) -> Repository:
    """Reads the name of a repository, after no file or folder of that name was found.

    Unknown owners need the prefix, so that a mistyped path does not fetch files of a stranger. With
    `anyone` they do not, as long as no local folder has the owner's name and the name does not end
    as a policy file's does. The error begins with `missing`, on the local search.
    """
    found = repository(given)
    path = Path(given)
    if found is None and anyone and not (path.parent.exists() or path.suffix == ".safetensors"):
        found = repository(f"{PREFIX}{given}")
        if found is not None:
            _LOG.info("%s is not a local file; looking it up on the Hugging Face hub", found)
    if found is not None:
        return found
    said = f"and it is not a hub id ({PREFIX}owner/name)"
    if _is_name(str(given).partition("@")[0]) and not is_meant(given):
        said = (
            f"for a repository of the Hugging Face hub, use {PREFIX}{given}; only those of "
            f"{', '.join(KNOWN_OWNERS)} need no prefix"
        )
    raise FileNotFoundError(f"{missing}; {said}")


def download(source: Repository, patterns: Sequence[str]) -> Path:
    """Downloads files of a repository, unless they are already present; returns their folder."""
    import huggingface_hub  # a local file needs no hub
    from huggingface_hub import constants

    homeless = f"{source}: there is no home folder for downloads, set HF_HOME to a folder"
    require(not constants.HF_HUB_CACHE.startswith("~"), homeless)
    try:
        folder = huggingface_hub.snapshot_download(
            source.name, revision=source.revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # its HTTP client has kinds of its own
        raise FileNotFoundError(
            f"fetching {str(source)!r} from the Hugging Face hub failed: {_one_line(error)}. "
            "Without a network, download the repository elsewhere and give its local path"
        ) from error
    return Path(folder)


def upload(folder: Path, names: Sequence[str], target: Repository, *, private: bool) -> str:
    """Uploads files of a folder in one commit; returns its address."""
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
    except Exception as error:  # as in `download`
        raise UserError(
            f"uploading to {target} failed: {_one_line(error)}. The files are in {folder}; "
            f"`hf upload {target.name} {folder}` also uploads them"
        ) from error
    return commit.commit_url


def _is_name(name: str) -> bool:
    """Returns whether a text has the form owner/name."""
    owner, _, rest = name.partition("/")
    return bool(owner and rest) and "/" not in rest and not name.startswith((".", "~"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
