"""The ``vicuna_v1`` prompt template, exactly as in the LLaVA-1.5 reference programs."""

from collections.abc import Sequence

from stepprune_jax.data.prompts import IMAGE_MARK, marks_in_front

# The longest row that LLaVA-1.5 was trained with, including visual tokens.
CONTEXT_LIMIT = 2048

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ROLES = ("USER", "ASSISTANT")
# A finished user turn ends with a blank, a finished assistant turn with </s> and no blank.
_ENDS = (" ", "</s>")


def place_images(message: str, num_images: int) -> str:
    """Puts image marks in front, each followed by a newline; see `marks_in_front`."""
    return marks_in_front(message, num_images, f"{IMAGE_MARK}\n")


def conversation(turns: Sequence[str | None], system: str = _SYSTEM) -> str:
    """Formats a conversation by the ``vicuna_v1`` template.

    Args:
        turns: the turns, user first and then alternating. None, an empty string, or a missing last
            assistant turn is an open turn: the role and a colon only.
        system: the system prompt.

    Returns:
        The prompt, ``"{system} USER: {message} ASSISTANT:"`` for one open exchange.

    Raises:
        ValueError: there are no turns.
    """
    if not turns:
        raise ValueError("expected at least one turn, got none")
    turns = list(turns) + [None] * (len(turns) % 2)
    text = system + " "
    for number, message in enumerate(turns):
        role, end = _ROLES[number % 2], _ENDS[number % 2]
        text += f"{role}: {message}{end}" if message else f"{role}:"
    return text
