"""A method defined in a test is trained, saved and run, without a change of the library."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from PIL import Image
from tiny_run import make_run, metrics, validation_rows

from stepprune_jax import RunOptions, generate, load_policy
from stepprune_jax.policy.params import ParamSpec
from stepprune_jax.pruning import Ranking
from stepprune_jax.pruning.ordering import by_score
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import Aux, Policy
from stepprune_jax.training import train


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    feature_width: int
    text_width: int = 0
    sharpness: float = 1.0


@dataclasses.dataclass(frozen=True)
class Linear(Policy):
    """Scores tokens by a linear function of their features."""

    config: LinearConfig = dataclasses.field(default=LinearConfig(1), kw_only=True)

    name = "linear"
    label = "linear"
    config_type: ClassVar[type | None] = LinearConfig

    def specs(self):
        return {"kernel": ParamSpec((self.config.feature_width,), (None,), "token")}

    def init_state(self):
        return {"batches": jnp.zeros(())}

    def loss(self, key, inputs, lm_loss_fn, progress):
        assert inputs.stats is not None
        gate = jax.nn.sigmoid(self.config.sharpness * inputs.image @ self.params["kernel"])
        loss = lm_loss_fn(gate[..., None] * inputs.image)
        state = {"batches": progress.state["batches"] + 1}
        return loss, Aux({"lm_loss": loss, "gate": gate.mean(), **state}, state)

    def order(self, inputs, steps, key=None):
        scores = inputs.image @ self.params["kernel"]
        return Ranking(by_score(scores, inputs.image_mask)[:, :steps])


def test_a_users_method_is_trained_saved_and_run(world, llava_model, tmp_path, monkeypatch):
    monkeypatch.setitem(PRUNERS, "linear", Linear)
    changes = {"validation.every": 3, "validation.overlays": 0, "log_every": 3}
    run = make_run(*world, **changes)
    run = dataclasses.replace(run, method="linear", policy=LinearConfig(1, sharpness=2.0))
    train(run, tmp_path / "run")
    first, last = metrics(tmp_path / "run")
    assert first["gate"] != last["gate"] and last["grad_norm"] > 0 == last["grad_norm_stop"]
    assert (first["batches"], last["batches"]) == (3, 6)
    # Without a stop and a budget, a quarter of the nine tokens is kept.
    assert [row["k_mean"] for row in validation_rows(tmp_path / "run")] == [2, 2]
    policy = load_policy(tmp_path / "run" / "policy.safetensors")
    assert policy.config == LinearConfig(32, 0, 2.0) and not policy.has_stop
    image = Image.open(world[1] / "images" / "0.png")
    reversed_policy = policy.replace(params=jax.tree.map(jnp.negative, policy.params))
    kept = []
    for scorer, budget in ((policy, 4), (reversed_policy, 5)):
        pruner, options = scorer.with_budget(budget), RunOptions(2)
        (answer,) = generate(llava_model, ["dog ?"], [image], pruner, options=options)
        kept += answer.kept_indices[0]
    # The best four tokens, and the best five of the reversed order.
    assert sorted(kept) == list(range(9))
