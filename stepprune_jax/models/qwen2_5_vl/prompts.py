"""The chat template of Qwen2.5-VL's instruction-tuned models."""

from collections.abc import Sequence

from stepprune_jax.data.prompts import IMAGE_MARK, marks_in_front

# The longest row that Qwen2.5-VL was trained with, including visual tokens.
CONTEXT_LIMIT = 32768

_SYSTEM = "You are a helpful assistant."
_ROLES = ("user", "assistant")
_START, _END = "<|im_start|>", "<|im_end|>"
_IMAGE = f"<|vision_start|>{IMAGE_MARK}<|vision_end|>"
# Placeholders of visual tokens: in the user's text they would count as tokens that do not exist.
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def place_images(message: str, num_images: int) -> str:
    """Puts image marks in front, with nothing between them; see `marks_in_front`."""
    return marks_in_front(message, num_images)


def conversation(turns: Sequence[str | None]) -> str:
    """Formats a conversation by the model's chat template.

    Args:
        turns: the turns, user first and then alternating. None, an empty string, or a missing last
            assistant turn is an open turn: the role only.

    Returns:
        The prompt. A closed last turn ends with its end token, without a newline after it.

    Raises:
        ValueError: there are no turns, or one contains a placeholder of the template.
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
    """Returns the message about a placeholder of the template in the user's text."""
    if placeholder == "<|video_pad|>":
        return "the prompt has <|video_pad|>, but videos are not supported"
    return f"the prompt has {placeholder}, which the template adds: use {IMAGE_MARK} for an image"
