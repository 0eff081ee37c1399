"""What a model family provides: the protocol that pipelines, trainers and pruners rely on.

A family is a package of pure functions over a tree of frozen weights and a frozen configuration;
`config.family` is that package. Nothing outside `models/` asks which family a model is of. The
number of visual tokens, their grid and the number of position ids of a token are the family's to
say, image by image.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.decoder import Cache, Stage
from stepprune_jax.models.layers import Tap


class Family(Protocol):
    """Functions of a model family; `models.vlm` documents what callers see.

    Attributes:
        POSITION_AXES: p, position ids of a token: 1, or 3 for (time, row, column).
    """

    POSITION_AXES: int

    def init_params(self, key: Array, config: Any) -> dict[str, Any]:
        """Draws float32 weights."""

    def encode_image(
        self,
        params: dict[str, Any],
        config: Any,
        pixels: Any,
        taps: Sequence[Tap],
        attention: str,
    ) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
        """Returns what a pruner chooses from, and intermediates of the tower by name."""

    def project(
        self, params: dict[str, Any], config: Any, features: Float[Array, "*b d"]
    ) -> Float[Array, "*b e"]:
        """Maps visual tokens to the language model's width, token by token."""

    def embed_text(
        self, params: dict[str, Any], config: Any, ids: Int[Array, "b l"]
    ) -> Float[Array, "b l e"]:
        """Looks token embeddings up."""

    def image_positions(
        self, config: Any, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        """Returns position ids relative to an image's first, and how many the whole image takes."""

    def run_layers(
        self,
        params: dict[str, Any],
        config: Any,
        hidden: Float[Array, "b s e"],
        position: Int[Array, "b p s"],
        valid: Bool[Array, "b s"],
        first: int,
        last: int,
        cache: Cache | None,
        **options: Any,
    ) -> Stage:
        """Runs some blocks of the language model as a stage with a cache of its own."""

    def logits(
        self, params: dict[str, Any], config: Any, hidden: Float[Array, "*b e"]
    ) -> Float[Array, "*b v"]:
        """Applies the output head; float32."""
