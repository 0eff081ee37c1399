"""Rows of the efficiency table: pruners with their budgets, and random weights for trained ones."""

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
from stepprune_jax.registry import PRUNERS, build_pruner, read_options, selector_of
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.user_input import UserError, expect

_LOG = logging.getLogger(__name__)

UNPRUNED = "all"
# Budgets of the paper, 192, 128 and 64 of 576 tokens, as one token in this many.
_ONE_IN = (3, 4.5, 9)
# Power of the count with which the price of a token grows, so that random weights stop near a mean.
_PRICE_GROWTH = 30.0


def with_square_images(backbone: Backbone, tokens: int) -> Backbone:
    """Bounds images so that the largest one is a square of so many visual tokens."""
    area = backbone.config.vision.factor**2
    backbone = backbone.bound_images(None, area, tokens * area)
    square = backbone.config.max_image_tokens == tokens == math.isqrt(tokens) ** 2
    expect("--tokens", tokens, square, "a square number from 225")
    return backbone


def default_rows(config: ModelConfig) -> list[str]:
    """Returns all tokens, every pruner at the paper's budgets, and learned stops at these means.

    Budgets that a pruner cannot keep on this model are left out, with a warning in the log.
    """
    budgets = [round(config.max_image_tokens / share) for share in _ONE_IN]
    pruners = [(name, kind.budgets) for name, kind in PRUNERS.items()]
    rows = [f"{name}@{k}" for name, kinds in pruners if "count" in kinds for k in budgets]
    rows += [f"{name}@mean:{k}" for name, kinds in pruners if "mean" in kinds for k in budgets]
    kept = [UNPRUNED]
    for name in rows:
        try:
            read_rows([name], config, decoder_layers=1, dtype="float32")
        except UserError as error:
            _LOG.warning("%s is left out: %s", name, error)
        else:
            kept.append(name)
    return kept


def read_rows(
    names: Sequence[str], config: ModelConfig, decoder_layers: int, dtype: str
) -> list[BenchRow]:
    """Builds the methods of rows, that of all tokens first, without trained parameters.

    A name is "PRUNER@BUDGET", or "PRUNER@BUDGET KEY=VALUE" with options of the pruner.
    """
    rows = []
    for name in sorted(dict.fromkeys(names), key=lambda name: name != UNPRUNED):
        which, _, texts = name.partition(" ")
        options = read_options("--rows", texts.split())
        pruner, _, budget = which.partition("@")
        kind = getattr(PRUNERS.get(pruner), "config_type", None)
        learned = None
        if kind is not None:
            widths = {
                "feature_width": config.feature_width,
                "text_width": config.text.hidden_size if kind.text_width else 0,
                "dtype": dtype,
                "decoder_layers": decoder_layers,
                "price_growth": _PRICE_GROWTH,
            }
            known = {field.name for field in dataclasses.fields(kind)}
            shape = kind(**{name: value for name, value in widths.items() if name in known})
            method = selector_of(shape)
            # The shapes of the weights, which `draw_learned` draws.
            params = jax.eval_shape(method.draw_params, jax.random.key(0))
            learned = method.replace(params=params)
        # A mean is calibrated once weights and images are there.
        bias = 0.0 if learned and budget.startswith("mean") else None
        built = build_pruner(
            pruner, budget or None, policy=learned, stop_bias=bias, options=options
        )
        built.check(config, config.max_image_tokens)
        rows.append(BenchRow(name, built, Budget.parse(budget) if budget else built.budget))
    return rows


def draw_learned(row: BenchRow) -> BenchRow:
    """Draws random parameters of a row's method."""
    if not isinstance(row.pruner, TrainedPruner):
        return row
    params, stats = _drawn(row.pruner.config)
    return row._replace(pruner=row.pruner.replace(params=params, stats=stats))


@functools.cache  # the budgets of a method share one policy
def _drawn(shape: Any) -> tuple[Any, FeatureStats]:
    """Draws random weights of a policy, and statistics that leave features unchanged."""
    weights = jax.jit(selector_of(shape).draw_params)(jax.random.key(1))
    return weights, FeatureStats.start(shape.feature_width)
