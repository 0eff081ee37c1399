"""Whether a folder's chat template is that of its family, by which all prompts are written."""

import logging
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.data.json_files import read_json_object, read_text
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Tokenizer

# Where `transformers` looks for a template, in this order.
_FILES = ("processor_config.json", "chat_template.json", "chat_template.jinja")
_FILES += ("tokenizer_config.json",)
_TURNS = ("What is it?", "A dog.", "Which colour?")
_ROLES = ("user", "assistant")

_LOG = logging.getLogger(__name__)


def warn_of_template(folder: Path, backbone: Backbone, tokenizer: Tokenizer) -> None:
    """Logs a warning if a folder has a template that writes other prompts, or none at all."""
    for file in map(folder.joinpath, _FILES):
        if file.is_file():
            problem = _problem(file, backbone, tokenizer)
            if problem:
                text = "%s: the chat template %s; prompts are written as by the published %s models"
                _LOG.warning(text, file, problem, backbone.name)
            if problem is not None:
                return


def _problem(file: Path, backbone: Backbone, tokenizer: Tokenizer) -> str | None:
    """Returns what is wrong with the template of a file, "" if nothing is, None without one."""
    problem = ""
    for plain in (False, True):  # some templates take a message's parts, some its text
        try:
            template = _read(file)
            if template is None:
                return None
            conversations = [_TURNS[:1], _TURNS]
            texts = [_render(tokenizer, template, turns, plain) for turns in conversations]
        except Exception as error:  # a template is a program
            problem = problem or f"cannot be used ({' '.join(str(error).split())})"
            continue
        known = map(backbone.published_prompts, conversations)
        if all(text in among for text, among in zip(texts, known, strict=True)):
            return ""
        problem = "writes other prompts and is not followed"
    return problem


def _read(file: Path) -> object:
    """Reads the template of a file, or the default one of several."""
    if file.suffix == ".jinja":
        return read_text(file)
    found = read_json_object(file).get("chat_template")
    if isinstance(found, list):
        return {one["name"]: one["template"] for one in found}.get("default")
    return found


def _render(tokenizer: Tokenizer, template: object, turns: Sequence[str], plain: bool) -> str:
    """Writes a conversation without images by a template, without the begin-of-sequence token."""
    messages = [
        {
            "role": _ROLES[number % 2],
            "content": turn if plain else [{"type": "text", "text": turn}],
        }
        for number, turn in enumerate(turns)
    ]
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return text.removeprefix(tokenizer.bos_token or "")
