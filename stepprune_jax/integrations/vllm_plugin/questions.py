"""Finds the user's text in the ids of a prompt, for methods that read the question."""

import re
from typing import Any

from stepprune_jax.data.prompts import IMAGE_MARK, question_ids

# Start and end of the user's turns in the chat templates of Qwen, Llama 3, Mistral and Vicuna. They
# are compared as ids, because small tokenizers lose spaces and line breaks.
_TURNS = (
    ("<|im_start|>user", "<|im_end|>"),
    ("<|start_header_id|>user<|end_header_id|>", "<|eot_id|>"),
    ("[INST]", "[/INST]"),
    ("USER:", "ASSISTANT:"),
)
# Placeholders of images and videos, and the tokens that templates put around placeholders.
_MARKS = re.compile(
    r"<\|vision_start\|>|<\|vision_end\|>|<\|image_pad\|>|<\|video_pad\|>|" + re.escape(IMAGE_MARK)
)


def find_question(tokenizer: Any, prompt_ids: list[int]) -> tuple[int, ...]:
    """Returns the ids of the user's text in a prompt, as `stepprune-generate` computes them.

    Args:
        tokenizer: the model's tokenizer.
        prompt_ids: ids of the prompt, before placeholders are expanded.

    Returns:
        The ids of all turns of the user. A prompt without a known template is one turn.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    turns: list[list[int]] = []
    for start, end in _TURNS:
        start_ids = encode(start)
        # Unknown words have the same id, so a start that begins with one would be found anywhere.
        if not turns and start_ids[0] != tokenizer.unk_token_id:
            turns = _find_spans(prompt_ids, start_ids, encode(end))
    texts = [
        _MARKS.sub("", tokenizer.decode(turn, skip_special_tokens=False))
        for turn in turns or [prompt_ids]
    ]
    # `question_ids` expects an answer after each turn of the user, and does not read answers.
    return question_ids(tokenizer, [part for text in texts for part in (text, "")])


def _find_spans(ids: list[int], start: list[int], end: list[int]) -> list[list[int]]:
    """Returns the ids between each start and the end after it, or the end of the prompt."""
    spans, index = [], 0
    while (begin := _find(ids, start, index)) is not None:
        begin += len(start)
        stop = _find(ids, end, begin)
        index = len(ids) if stop is None else stop
        spans.append(ids[begin:index])
    return spans


def _find(ids: list[int], part: list[int], first: int) -> int | None:
    """Returns the first index from `first` on where `ids` continue with `part`, or None."""
    indices = range(first, len(ids) - len(part) + 1)
    return next((index for index in indices if ids[index : index + len(part)] == part), None)
