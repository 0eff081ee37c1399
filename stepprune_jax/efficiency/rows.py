"""Rows of the efficiency table: pruners with budgets, and random weights of trained pruners."""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax

from stepprune_jax.efficiency.measure import BenchRow
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.policy import FeatureStats
from stepprune_jax.pruning import Budget
from stepprune_jax.registry import PRUNERS, build_pruner, read_options, resolve_pruner, selector_of
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError, expect

_LOG = logging.getLogger(__name__)

UNPRUNED = "all"  # Name of the row of all tokens.
# The paper's budgets, 192, 128 and 64 of 576 tokens, as divisors of the number of tokens.
_DIVISORS = (3, 4.5, 9)
# Exponent of the price of a token as a function of the number of kept tokens. With a large
# exponent, random weights stop near the calibrated mean.
_PRICE_GROWTH = 30.0


def with_square_images(backbone: Backbone, tokens: int) -> Backbone:
    """Limits the size of images, so that the largest image is a square of `tokens` visual tokens.

    Args:
        backbone: a model whose image sizes vary.
        tokens: number of visual tokens of the largest image.

    Returns:
        The model with the limit.

    Raises:
        UserError: the model cannot have square images of this number of tokens.
    """
    pixels_per_token = backbone.config.vision.factor**2
    backbone = backbone.bound_images(None, pixels_per_token, tokens * pixels_per_token)
    is_square = backbone.config.max_image_tokens == tokens == math.isqrt(tokens) ** 2
    expect("--tokens", tokens, is_square, "a square number from 225")
    return backbone


def default_rows(config: ModelConfig, num_patches: int = 0) -> list[str]:
    """Returns names of rows: all tokens, and every pruner at the paper's budgets.

    A pruner with a learned stop also has rows that keep the budgets on average. Budgets that a
    pruner does not support on this model are omitted with a warning in the log.

    Args:
        config: the model's configuration.
        num_patches: number of temporal patches of each video, 0 for images. Pruners without a
            meaning for videos are omitted for videos.
    """
    num_tokens = config.max_image_tokens * max(1, num_patches)
    counts = [round(num_tokens / divisor) for divisor in _DIVISORS]
    names = []
    for budget_kind, prefix in (("count", ""), ("mean", "mean:")):
        for name, pruner_type in PRUNERS.items():
            is_usable = pruner_type.reads_videos or not num_patches
            if budget_kind in pruner_type.budgets and is_usable:
                names += [f"{name}@{prefix}{count}" for count in counts]
    valid_names = [UNPRUNED]
    for name in names:
        try:
            read_rows([name], config, decoder_layers=1, dtype="float32", num_patches=num_patches)
        except UserError as error:
            _LOG.warning("%s is left out: %s", name, error)
        else:
            valid_names.append(name)
    return valid_names


def read_rows(
    names: Sequence[str],
    config: ModelConfig,
    decoder_layers: int,
    dtype: str,
    *,
    num_patches: int = 0,
) -> list[BenchRow]:
    """Builds rows from their names, with the shapes of trained parameters instead of the arrays.

    Args:
        names: "PRUNER@BUDGET", or "PRUNER@BUDGET KEY=VALUE" with options of the pruner. PRUNER is
            any text for `resolve_pruner`.
        config: the model's configuration.
        decoder_layers: number of layers of a policy's decoder.
        dtype: dtype of policies, "float32" or "bfloat16".
        num_patches: number of temporal patches of each video; 0 for images.

    Returns:
        One row per distinct name. The row of all tokens, if present, is first.
    """
    names = sorted(dict.fromkeys(names), key=lambda name: name != UNPRUNED)
    return [_read_row(name, config, decoder_layers, dtype, num_patches) for name in names]


def _read_row(
    name: str, config: ModelConfig, decoder_layers: int, dtype: str, num_patches: int
) -> BenchRow:
    """Builds a row from its name, such as "stepprune@64 group=4"; Args as in `read_rows`.

    Raises:
        UserError: the name is invalid, or the model does not support the pruner or the budget.
    """
    pruner_and_budget, _, option_texts = name.partition(" ")
    options = read_options("--rows", option_texts.split())
    pruner_name, _, budget = pruner_and_budget.partition("@")
    pruner_name = resolve_pruner(pruner_name)
    config_type = getattr(PRUNERS.get(pruner_name), "config_type", None)  # None: not trained.
    policy = None
    if config_type is not None:
        settings = {
            "feature_width": config.feature_width,
            "text_width": config.text.hidden_size if config_type.text_width else 0,
            "dtype": dtype,
            "decoder_layers": decoder_layers,
            "price_growth": _PRICE_GROWTH,
        }
        # Configurations of trained pruners have different fields.
        field_names = {field.name for field in dataclasses.fields(config_type)}
        settings = {field: value for field, value in settings.items() if field in field_names}
        selector = selector_of(config_type(**settings))
        # Shapes only: `random_policy` makes the arrays.
        params = jax.eval_shape(selector.init_params, jax.random.key(0))
        policy = selector.replace(params=params)
    # A placeholder: `measure.with_stop_bias` calibrates the bias once there are images.
    stop_bias = 0.0 if policy and budget.startswith("mean") else None
    pruner = build_pruner(
        pruner_name, budget or None, policy=policy, stop_bias=stop_bias, options=options
    )
    pruner.check(config, config.max_image_tokens * max(1, num_patches))
    if num_patches and not pruner.reads_videos:
        raise UserError(f"--rows: {name} prunes images only, and no videos")
    return BenchRow(name, pruner, Budget.parse(budget) if budget else pruner.budget)


def random_policy(row: BenchRow) -> BenchRow:
    """Replaces the parameter shapes of a row's policy by random arrays.

    A row without a policy is returned unchanged.
    """
    if not isinstance(row.pruner, TrainedPruner):
        return row
    params, stats = _random_params(row.pruner.config)
    return row._replace(pruner=row.pruner.replace(params=params, stats=stats))


@functools.cache  # All budgets of a method share one policy.
def _random_params(config: Any) -> tuple[Any, FeatureStats]:
    """Makes random parameters of a policy.

    Args:
        config: configuration of the policy.

    Returns:
        The parameters, and feature statistics whose normalization leaves features unchanged.
    """
    params = jax.jit(selector_of(config).init_params)(jax.random.key(1))
    return params, FeatureStats.start(config.feature_width)
