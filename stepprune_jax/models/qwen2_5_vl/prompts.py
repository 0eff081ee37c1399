"""The chat template of Qwen2.5-VL's instruction-tuned models."""

from collections.abc import Sequence

from stepprune_jax.data.prompts import IMAGE_MARK, marks_in_front

# The longest row that Qwen2.5-VL was trained with, visual tokens counted.
CONTEXT_LIMIT = 32768

_SYSTEM = "You are a helpful assistant."
_ROLES = ("user", "assistant")
_START, _END = "<|im_start|>", "<|im_end|>"
_IMAGE = f"<|vision_start|>{IMAGE_MARK}<|vision_end|>"
# Tokens that stand for visual tokens: written out, they would be so many that are not there.
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def place_images(message: str, num_images: int) -> str:
    """Puts image marks in front, with nothing between: `marks_in_front`."""
    return marks_in_front(message, num_images)


def conversation(turns: Sequence[str | None]) -> str:
    """Writes out a conversation in the form of the model's chat template.

    Args:
        turns: what was said, user first and then alternating. None, an empty string, or a missing
            last assistant turn is an open turn: the role only.

    Returns:
        The prompt. A closed last turn ends with its end token, without a newline behind it.

    Raises:
        ValueError: there is no turn, or one has a placeholder of the template in it.
    """
    if not turns:
        raise ValueError("expected at least one turn, got none")
    turns = list(turns) + [None] * (len(turns) % 2)
    text = f"{_START}system\n{_SYSTEM}{_END}"
    for number, message in enumerate(turns):
        for placeholder in _PLACEHOLDERS:
            if placeholder in (message or ""):
                raise ValueError(_misplaced(placeholder))
        end = _END if message or number % 2 == 0 else ""
        message = (message or "").replace(IMAGE_MARK, _IMAGE)
        text += f"\n{_START}{_ROLES[number % 2]}\n{message}{end}"
    return text


def _misplaced(placeholder: str) -> str:
    """The message about a placeholder of the template among the user's words."""
    if placeholder == "<|video_pad|>":
        return "the prompt has <|video_pad|>, but videos are not supported"
    return f"the prompt has {placeholder}, which the template adds: write {IMAGE_MARK} for an image"
