"""The setting of the vLLM plugin: which method prunes, and to how many tokens."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.policy import load_policy, policy_file, read_config
from stepprune_jax.integrations.vllm_plugin import VARIABLE
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning import Pruner
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.temporal import MAX_PATCHES
from stepprune_jax.registry import build_pruner, selector_of
from stepprune_jax.selectors.base import TrainedPruner
from stepprune_jax.user_input import UserError, expect

_EXAMPLE = '{"pruner": "divprune", "budget": "1/9"}'

_ADAPTIVE = (
    "budget is {budget}, expected a count or a share of the visual tokens: vLLM needs the number "
    "before the tower runs. stepprune-serve keeps adaptive numbers"
)


@dataclasses.dataclass(frozen=True)
class PluginSettings:
    """Setting of the plugin: a pruning method and a budget.

    Attributes:
        budget: exact number or share of tokens to keep per image or video; see `Budget.parse`.
        pruner: name of the method; None selects the policy's method.
        policy: file or name of a trained policy; None for a method without weights.
        options: further options of the method by name.
    """

    budget: str | int
    pruner: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> Pruner:
        """Builds the pruner with its weights; initializes jax."""
        policy = None if self.policy is None else load_policy(self.policy)
        return build_pruner(self.pruner, self.budget, policy=policy, options=self.options)

    @functools.cached_property
    def outline(self) -> Pruner:
        """The pruner without weights, which can count tokens without initializing jax.

        vLLM may fork the process that counts, and jax's threads do not survive a fork.
        """
        policy = None if self.policy is None else _read_outline(self.policy)
        return build_pruner(self.pruner, self.budget, policy=policy, options=self.options)

    def describe(self) -> str:
        """Returns text that differs between settings, for the keys of vLLM's caches."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def check(self, backbone: Backbone) -> None:
        """Checks that the method can prune for a model before its language model.

        Raises:
            UserError: the method cuts inside the language model, keeps an adaptive number of
                tokens, or does not fit the model.
        """
        pruner, config = self.outline, backbone.config
        num_tokens = config.max_image_tokens
        if not isinstance(pruner, TrainedPruner):  # an outline has no weights to check
            pruner.check(config, num_tokens)
        if pruner.schedule(config, num_tokens).enter is None:
            raise UserError(_ADAPTIVE.format(budget=pruner.budget))
        if pruner.schedule(config, num_tokens).enter == 0:
            raise UserError(f"{pruner.name} keeps no tokens, and vLLM needs one for each image")
        if pruner.cuts(config, num_tokens):
            raise UserError(
                f"{pruner.name} drops tokens between layers of the language model, which vLLM does "
                "not allow: use stepprune-serve without --engine"
            )
        if pruner.reads_words:
            raise UserError(f"{pruner.name} reads the words of a question, and the plugin its ids")
        taps = pruner.taps(config)  # raises if the model's tower lacks what the method reads
        if taps and backbone.name == "llava_next":
            raise UserError(
                f"{pruner.name} reads the tower of each tile, and its answers on LLaVA-NeXT differ "
                "from those of stepprune-serve: use divprune, or stepprune-serve"
            )

    def check_videos(self, backbone: Backbone) -> None:
        """Raises a UserError if the method has no meaning for videos, or reads their tower."""
        pruner = self.outline
        if not pruner.reads_videos or pruner.taps(backbone.config):
            raise UserError(f"{pruner.name} prunes images only, and no videos; see docs/video.md")

    def count_kept(self, config: ModelConfig, num_tokens: int, num_frames: int = 1) -> int:
        """Returns how many tokens of an image or a video enter the language model.

        Args:
            config: the model's configuration.
            num_tokens: number of tokens before pruning.
            num_frames: number of temporal patches of a video; 1 for an image.

        Raises:
            UserError: a video has more temporal patches than pruners read.
        """
        if num_frames > MAX_PATCHES:
            raise UserError(
                f"a video has {num_frames} temporal patches of two frames, expected at most "
                f"{MAX_PATCHES}: sample fewer frames (media_io_kwargs)"
            )
        pruner = self.outline
        count = pruner.schedule(config, num_tokens).enter
        assert count is not None  # `check`
        if pruner.budget.kind != "all":
            counts, sizes, frames = np.array([[count], [num_tokens], [num_frames]], np.int32)
            count = int(pruner.media_counts(counts, sizes, frames)[0])
        return count


@functools.cache
def read_settings() -> PluginSettings:
    """Reads the environment variable.

    Raises:
        UserError: the variable has another form than a JSON object with the fields of
            `PluginSettings`, or the method, the policy or the budget is unknown.
    """
    text = os.environ[VARIABLE]
    try:
        fields: Any = json.loads(text)
    except ValueError:
        fields = None
    names = [field.name for field in dataclasses.fields(PluginSettings)]
    is_valid = isinstance(fields, dict) and {"budget"} <= fields.keys() <= {*names}
    expected = f"a JSON object with budget and any of {', '.join(names[1:])}, such as {_EXAMPLE}"
    expect("the setting", text, is_valid, expected)
    assert isinstance(fields, dict)  # `expect`
    settings = PluginSettings(**fields)
    budget = Budget.parse(settings.budget)
    if not budget.is_exact:
        raise UserError(_ADAPTIVE.format(budget=budget))
    _ = settings.outline  # raises for an unknown method, policy or option
    return settings


def _read_outline(policy: str) -> TrainedPruner:
    """Returns the method of a policy's file with its configuration and without its weights."""
    path = policy_file(policy)
    _, metadata = safetensors.read_contents(path)
    return selector_of(read_config(path, metadata))
