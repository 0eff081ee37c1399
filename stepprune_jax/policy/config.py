"""Every choice the paper leaves open, as one frozen, hashable configuration."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Normal numbers of float32, apart from 0; an integer of Python's may be too large for any float.
_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
Number = float | int


def is_integer(value: Any) -> bool:
    """Returns whether `value` is a Python or numpy integer; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a Python or numpy number that float32 holds; booleans are not."""
    real = isinstance(value, int | float | np.integer | np.floating)
    if not real or isinstance(value, bool):
        return False
    value = value.item() if isinstance(value, np.generic) else value
    return value == 0 or _LEAST <= abs(value) <= _LARGEST


# Allowed values of each field that names a reading; the field's documentation explains them.
_CHOICES = {
    "encoder_attention": ("bidirectional", "causal"),
    "text_gate": ("attention", "printed"),
    "first_query": ("question", "learned"),
    "stop": ("aligned", "softmax", "hazard"),
    "estimator": ("straight_through", "parallel"),
    "aggregation": ("discounted", "alive", "uniform", "last"),
    "score_space": ("log", "linear"),
    "soft_budget": ("straight_through", "batch_mean"),
    "batch_budget": ("own", "probe"),
    "dtype": (None, "bfloat16", "float32", "float64"),
}

# Fields, what their values have to be, and how a message says so.
_SIZES = ("feature_width", "num_heads", "mlp_ratio", "group")
_LAYERS = ("encoder_layers", "decoder_layers")  # held in a list
_TEMPERATURES = ("temperature", "stop_temperature", "polarisation_temperature")
_AMOUNTS = ("draw", "length_weight", "price_range", "price_growth")
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SIZES, lambda x: is_integer(x) and x >= 1, "an integer from 1"),
    (_LAYERS, lambda x: is_integer(x) and 1 <= x <= 1024, "an integer from 1 to 1024"),
    (("text_width", "min_tokens"), lambda x: is_integer(x) and x >= 0, "an integer from 0"),
    (
        ("width", "max_steps"),
        lambda x: x is None or (is_integer(x) and x >= 1),
        "None or an integer from 1",
    ),
    (_TEMPERATURES, lambda x: is_number(x) and x > 0, "a positive number"),
    (_AMOUNTS, lambda x: is_number(x) and x >= 0, "a number >= 0"),
    (
        ("polarisation_share", "budget_anneal"),
        lambda x: is_number(x) and 0 <= x <= 1,
        "a share from 0 to 1",
    ),
    (("decay",), lambda x: is_number(x) and 0 < x <= 1, "a number in (0, 1]"),
    (("stop_bias",), is_number, "a finite number"),
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Shapes and readings of a StepPrune policy; static under `jax.jit`, also inside arguments.

    The defaults are the readings that learn to order *and* to stop, at the shapes of
    LLaVA-v1.5-7B. `PolicyConfig.literal` gives the paper to the letter. `docs/paper.md` explains
    for each field what the paper prints, what it leaves open, and the reason for the default.

    Attributes:
        feature_width: width of the image tokens (1024 for CLIP-L, the LLM's for Qwen2.5-VL).
        text_width: width of the text embeddings; 0 builds a policy that sees no text.
        width: width of the policy; `None` means `feature_width`. An input projection is added
            where the two differ.
        num_heads: attention heads of encoder and decoder; the pointer itself has one head.
        mlp_ratio: hidden width of each MLP over `width`.
        encoder_layers: pre-norm blocks of the encoder (paper: 2).
        decoder_layers: decoder layers. The last one ends at its pointer logits, so it owns neither
            cross-attention values nor an MLP: they would receive no gradient.
        encoder_attention: `"bidirectional"`, or `"causal"` for the ablation of Table 4 (a).
        text_gate: where g_txt acts. `"attention"` adds log g to the attention logits of text keys,
            `"printed"` scales the embeddings as in Eq. (3), where the next pre-norm divides the
            gate out again.
        first_query: what the first step asks: `"learned"` is the start token alone, as printed;
            `"question"` adds a projection of the question's pooled words to it, so that a token is
            compared with the question by one product.
        max_steps: T_max; `None` means `max(1, N // 2)` (paper: floor(N/2)), N without padding. An
            image of fewer tokens has as many steps as tokens.
        min_tokens: tokens chosen before the stop becomes available; 1 rules out an empty prefix.
        temperature: tau of the pointer softmax, Eq. (6).
        draw: temperature, as a factor on tau, at which a token is drawn from the pointer's
            distribution when tokens are selected; 0 takes the most probable one. Training opens the
            tokens with the largest marginals, of which the most probable sequence is a poor sample.
            The gate of training follows the most probable tokens whatever the temperature.
        group: tokens taken from one pointer distribution, best first; see `Limits`. 1 attends to
            the history before every token.
        stop: stop probability. `"softmax"` is the stop slot's share of Eq. (6); `"aligned"` is
            sigmoid((l_stop - max_i l_i) / stop_temperature), which agrees with the hard decision.
            `"hazard"` is sigmoid(l_stop / stop_temperature) with l_stop from a decoder layer of its
            own that reads the pointer's inputs without a gradient to them, so that order and stop
            do not interfere.
        stop_temperature: temperature of the aligned stop and of the hazard.
        stop_bias: constant added to every stop logit. At 0, and a price that grows, episodes end at
            a tenth of the tokens at first; below 0, later.
        estimator: how the selection is differentiated. `"straight_through"` carries gradients
            through the loop as printed; `"parallel"` rolls out without gradient and re-scores all
            steps in one causal pass.
        decay: beta of Eq. (11).
        aggregation: how pointer rows become one score per token; the four rows of Table 4 (b).
        score_space: `"log"` polarises log s, `"linear"` polarises s as printed.
        polarisation_temperature: tau of Eq. (12), at the end of its annealing.
        polarisation_share: share of training over which tau is annealed from 2, by a cosine; 0 for
            none. A gate that is sharp from the start shows the language model only the first
            guesses, so that no other token is ever tried.
        soft_budget: k of Eq. (12): `"batch_mean"` as printed, or `"straight_through"` the hard
            count K_b with the gradient of its expectation.
        batch_budget: `"own"` trains rows at their own count. With `"probe"` every row has a random
            budget, and the stop learns from its last decisions whether continuing was worth the
            price (`differentiable_count`).
        budget_anneal: share of training over which the smallest random budget, of a `"probe"`,
            falls from 30 to 2 % of the tokens; 0 for none. With few tokens at first, nothing is
            learned where several are needed together.
        length_weight: lambda of Eq. (15).
        price_range: rows that stop by themselves are trained at a price of their own, lambda e^u
            with u uniform in +-price_range, and with u added to their stop logits. The stop logit
            then learns the logarithm of what the next token is worth, and one policy stops well at
            every stop bias; 0 trains at lambda alone.
        price_growth: power of the count with which a token's price grows; the price is lambda at a
            tenth of the tokens, and 1 makes the length penalty quadratic in K. Where further tokens
            are worth little, a constant price is met anywhere or nowhere, and counts are arbitrary.
        dtype: compute dtype of encoder, decoder and denoiser; `None` takes that of the features,
            but at least float32. Scores, probabilities and losses are at least float32 in any case.
    """

    feature_width: int = 1024
    text_width: int = 4096
    width: int | None = None
    num_heads: int = 16
    mlp_ratio: int = 4
    encoder_layers: int = 2
    decoder_layers: int = 1
    encoder_attention: str = "bidirectional"
    text_gate: str = "attention"
    first_query: str = "question"
    max_steps: int | None = None
    min_tokens: int = 1
    temperature: Number = 1.0
    draw: Number = 0.3
    group: int = 1
    stop: str = "hazard"
    stop_temperature: Number = 0.5
    stop_bias: Number = 0.0
    estimator: str = "parallel"
    decay: Number = 0.9
    aggregation: str = "discounted"
    score_space: str = "log"
    polarisation_temperature: Number = 0.4
    polarisation_share: Number = 0.9
    soft_budget: str = "straight_through"
    batch_budget: str = "probe"
    budget_anneal: Number = 0.7
    length_weight: Number = 0.15
    price_range: Number = 2.0
    price_growth: Number = 1.0
    dtype: str | None = None

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            self._require(name, getattr(self, name) in choices, f"one of {choices}")
        for names, holds, expected in _RULES:
            for name in names:
                self._require(name, holds(getattr(self, name)), expected)
        divides = self.policy_width % self.num_heads == 0
        self._require("num_heads", divides, f"a divisor of the policy width {self.policy_width}")
        # A probe trains the margin of the stop, which a softmax has not.
        probed = self.batch_budget != "probe" or self.stop != "softmax"
        self._require("stop", probed, "'aligned' or 'hazard' where batch_budget is 'probe'")

    def _require(self, name: str, holds: bool, expected: str):
        if not holds:
            raise ValueError(f"PolicyConfig.{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def policy_width(self) -> int:
        """Width d of encoder and decoder."""
        return self.feature_width if self.width is None else self.width

    def steps(self, num_tokens: int) -> int:
        """Returns T_max for N = `num_tokens`, at most N (Sec. 4.1 of the paper: floor(N/2))."""
        wanted = num_tokens // 2 if self.max_steps is None else min(self.max_steps, num_tokens)
        return max(1, wanted)

    @classmethod
    def literal(cls, **overrides: Any) -> "PolicyConfig":
        """Returns the paper's explicit choices to the letter; `overrides` replace single fields."""
        printed: dict[str, Any] = dict(
            decoder_layers=2,
            text_gate="printed",
            first_query="learned",
            min_tokens=0,
            draw=0.0,
            stop="softmax",
            stop_bias=0.0,
            estimator="straight_through",
            score_space="linear",
            polarisation_temperature=0.05,
            polarisation_share=0.0,
            soft_budget="batch_mean",
            batch_budget="own",
            budget_anneal=0.0,
            length_weight=0.01,
            price_range=0.0,
            price_growth=0.0,
        )
        return cls(**(printed | overrides))
