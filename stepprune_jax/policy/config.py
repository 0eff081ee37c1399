"""Configuration of a policy: all choices that the paper leaves open."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Range of the normal numbers of float32. A Python integer may exceed every float.
_MIN_FLOAT32, _MAX_FLOAT32 = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
Number = float | int


def is_integer(value: Any) -> bool:
    """Returns whether `value` is a Python or numpy integer; booleans are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether `value` is a number in the range of float32; booleans are not.

    Accepts Python and numpy numbers.
    """
    is_real = isinstance(value, int | float | np.integer | np.floating)
    if not is_real or isinstance(value, bool):
        return False
    value = value.item() if isinstance(value, np.generic) else value
    return value == 0 or _MIN_FLOAT32 <= abs(value) <= _MAX_FLOAT32


# Allowed values of each categorical field; `PolicyConfig` documents them.
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

_SIZES = ("feature_width", "num_heads", "mlp_ratio", "group")
# Bounded, because each layer is compiled separately.
_LAYERS = ("encoder_layers", "decoder_layers")
_TEMPERATURES = ("temperature", "stop_temperature", "polarisation_temperature")
_AMOUNTS = ("draw", "length_weight", "price_range", "price_growth")
# Names of fields, the predicate that their values satisfy, and its description for messages.
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
        "a fraction from 0 to 1",
    ),
    (("decay",), lambda x: is_number(x) and 0 < x <= 1, "a number in (0, 1]"),
    (("stop_bias",), is_number, "a finite number"),
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Configuration of a StepPrune policy; a static pytree node under `jax.jit`.

    Where the paper is ambiguous, a field selects one reading. The defaults are readings that learn
    both the order and the stop, at the shapes of LLaVA-v1.5-7B. `PolicyConfig.literal` returns the
    settings printed in the paper. `docs/paper.md` explains for each field what the paper prints,
    what it leaves open, and the reason for the default.

    Attributes:
        feature_width: width of the image tokens (1024 for CLIP-L; the language model's width for
            Qwen2.5-VL).
        text_width: width of the text embeddings; 0 builds a policy that reads no text.
        width: width of the policy; `None` means `feature_width`. An input projection is added if
            the two differ.
        num_heads: number of attention heads of encoder and decoder; the pointer has one head.
        mlp_ratio: hidden width of each MLP, as a multiple of `width`.
        encoder_layers: number of pre-norm blocks of the encoder (paper: 2).
        decoder_layers: number of decoder layers. The last layer ends at its pointer logits. It has
            no cross-attention values and no MLP, because they would receive no gradient.
        encoder_attention: `"bidirectional"`, or `"causal"` for the ablation of Table 4 (a).
        text_gate: effect of g_txt. `"attention"` adds log g to the attention logits of text keys.
            `"printed"` scales the embeddings as in Eq. (3); the next pre-norm divides the scale out
            again.
        first_query: query of the first step. `"learned"` is the start token, as printed.
            `"question"` adds a projection of the question's pooled words to the start token, which
            compares tokens with the question in a single product.
        max_steps: T_max; `None` means `max(1, N // 2)` (paper: floor(N/2)), N without padding. An
            image of fewer tokens has one step per token.
        min_tokens: number of tokens that are chosen before the stop is available; 1 rules out an
            empty prefix.
        temperature: tau of the pointer softmax, Eq. (6).
        draw: sampling temperature of the selection, as a factor on tau; 0 takes the most probable
            token. Training opens the tokens with the largest marginal probabilities. Greedy
            selection represents this distribution poorly. The training gate follows the most
            probable tokens at any sampling temperature.
        group: number of tokens that are taken from one pointer distribution, best first; see
            `Limits`. With 1, the decoder attends to the history before every token.
        stop: stop probability. `"softmax"` is the stop slot's probability in Eq. (6). `"aligned"`
            is sigmoid((l_stop - max_i l_i) / stop_temperature), which agrees with the hard
            decision. `"hazard"` is sigmoid(l_stop / stop_temperature), with l_stop from a separate
            decoder layer. The hazard layer reads the pointer's inputs but sends no gradient to
            them, so order and stop do not interfere.
        stop_temperature: temperature of the aligned stop and of the hazard.
        stop_bias: constant added to every stop logit. With bias 0 and a growing price, episodes of
            an untrained policy end at a tenth of the tokens; a negative bias ends them later.
        estimator: gradient of the selection. `"straight_through"` differentiates the loop, as
            printed. `"parallel"` runs the loop without gradient and scores all steps again in one
            causal pass.
        decay: beta of Eq. (11).
        aggregation: reduction of the pointer rows to one score per token: the four rows of Table 4
            (b).
        score_space: `"log"` polarizes log s; `"linear"` polarizes s, as printed.
        polarisation_temperature: tau of Eq. (12), at the end of its annealing.
        polarisation_share: fraction of training over which tau is annealed from 2, by a cosine; 0
            disables annealing. A gate that is sharp from the start opens only the first guesses, so
            the policy never tries other tokens.
        soft_budget: k of Eq. (12). `"batch_mean"` is the running mean of the counts, as printed.
            `"straight_through"` is the hard count K_b with the gradient of its expectation.
        batch_budget: counts of the training rows. `"own"` ends each row by its learned stop. With
            `"probe"` every row has a random budget, and its last decisions teach the stop whether
            continuing was worth the price (`differentiable_count`).
        budget_anneal: fraction of training over which the smallest random budget of a `"probe"`
            falls from 30 to 2 % of the tokens; 0 disables annealing. Tasks that need several tokens
            together are not learned from budgets that start small.
        length_weight: lambda of Eq. (15).
        price_range: rows that end by the learned stop are trained at random prices lambda e^u, with
            u uniform in +-price_range and added to the stop logits. The stop logit then learns the
            logarithm of the next token's gain, and one policy stops well at every stop bias. 0
            trains at the single price lambda.
        price_growth: exponent with which a token's price grows with the count. The price is lambda
            at a tenth of the tokens; an exponent of 1 makes the length penalty quadratic in K. With
            a constant price and a flat gain per token, the count at which the two meet is
            arbitrary.
        dtype: compute dtype of encoder, decoder and denoiser. `None` takes the dtype of the
            features, but at least float32. Scores, probabilities and losses are always at least
            float32.
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
        for names, is_valid, expected in _RULES:
            for name in names:
                self._require(name, is_valid(getattr(self, name)), expected)
        is_divisor = self.policy_width % self.num_heads == 0
        self._require("num_heads", is_divisor, f"a divisor of the policy width {self.policy_width}")
        # A probe trains the margin of the stop. A softmax stop has no margin.
        has_margin = self.batch_budget != "probe" or self.stop != "softmax"
        self._require("stop", has_margin, "'aligned' or 'hazard' where batch_budget is 'probe'")

    def _require(self, name: str, is_valid: bool, expected: str):
        """Raises a ValueError that names a field, unless `is_valid`."""
        if not is_valid:
            raise ValueError(f"PolicyConfig.{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def policy_width(self) -> int:
        """The width d of encoder and decoder."""
        return self.feature_width if self.width is None else self.width

    def steps(self, num_tokens: int) -> int:
        """Returns T_max for N = `num_tokens`, at most N (Sec. 4.1 of the paper: floor(N/2))."""
        steps = num_tokens // 2 if self.max_steps is None else min(self.max_steps, num_tokens)
        return max(1, steps)

    @classmethod
    def literal(cls, **overrides: Any) -> "PolicyConfig":
        """Returns the configuration printed in the paper; `overrides` replace single fields."""
        paper_settings: dict[str, Any] = dict(
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
        return cls(**(paper_settings | overrides))
