"""Warns where a folder's chat template differs from the published template of its model family.

Prompts are always written by the family's template, never by the folder's.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.data.json_files import read_json_object, read_text
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Tokenizer

# Files where `transformers` looks for a template, in its order.
_TEMPLATE_FILES = (
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "tokenizer_config.json",
)
# Turns of the conversation that both templates render. The roles alternate.
_TURNS = ("What is it?", "A dog.", "Which colour?")
_ROLES = ("user", "assistant")

_LOG = logging.getLogger(__name__)


def warn_of_template(folder: Path, backbone: Backbone, tokenizer: Tokenizer) -> None:
    """Logs a warning if a folder's chat template writes other prompts than its family's template.

    Args:
        folder: the checkpoint folder. If it has no template, nothing is logged.
        backbone: the model family. Its `published_prompts` are the expected prompts.
        tokenizer: the folder's tokenizer, which renders templates.
    """
    for file in map(folder.joinpath, _TEMPLATE_FILES):
        problem = _check_template(file, backbone, tokenizer) if file.is_file() else None
        if problem is None:
            continue  # the file does not exist or has no template
        if problem:
            _LOG.warning(
                "%s: the chat template %s; prompts are written as by the published %s models",
                file,
                problem,
                backbone.name,
            )
        return  # `transformers` uses the first template, so later files do not matter


def _check_template(file: Path, backbone: Backbone, tokenizer: Tokenizer) -> str | None:
    """Compares the prompts of a file's template with the published prompts of a family.

    Args:
        file: an existing file that may contain a template.
        backbone: the model family.
        tokenizer: the tokenizer that renders the template.

    Returns:
        "" if the prompts are equal; the end of a message about the difference, such as "writes
        other prompts"; or None if the file has no template.
    """
    conversations = [_TURNS[:1], _TURNS]
    problem = ""
    # Some templates expect a message's content as text, some as a list of parts.
    for is_plain_text in (False, True):
        try:
            template = _read_template(file)
            if template is None:
                return None
            prompts = [
                _render(tokenizer, template, turns, is_plain_text) for turns in conversations
            ]
        except Exception as error:  # a template is a program, which may raise any type of error
            problem = problem or f"cannot be used ({' '.join(str(error).split())})"
            continue
        # A family may have several published variants of each prompt. Any of them is accepted.
        variants = map(backbone.published_prompts, conversations)
        if all(prompt in accepted for prompt, accepted in zip(prompts, variants, strict=True)):
            return ""
        problem = "writes other prompts and is not followed"
    return problem


def _read_template(file: Path) -> object:
    """Reads the chat template of a file.

    Returns:
        The template. For a file with several templates, the template named "default". None if the
        file has no such template.
    """
    if file.suffix == ".jinja":
        return read_text(file)
    template = read_json_object(file).get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _render(
    tokenizer: Tokenizer, template: object, turns: Sequence[str], is_plain_text: bool
) -> str:
    """Renders a conversation without images by a template.

    Args:
        tokenizer: the tokenizer that renders the template.
        template: result of `_read_template`.
        turns: texts of the user and the assistant in turn, from the user's first text.
        is_plain_text: True passes a message's content as text, False as a list with one text part.

    Returns:
        The prompt for the next answer, without the begin-of-sequence token.
    """
    messages = [
        {
            "role": _ROLES[turn_index % 2],
            "content": turn if is_plain_text else [{"type": "text", "text": turn}],
        }
        for turn_index, turn in enumerate(turns)
    ]
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return text.removeprefix(tokenizer.bos_token or "")
