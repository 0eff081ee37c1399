"""What the policy reads on batches of a training file, shown by the gradient of its scores."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
from tiny_run import make_run, open_tiny

from stepprune_jax import policy
from stepprune_jax.training import settings, step

SAID = ["What is in this picture?", "dog", "is this a red dog ?", "no", "two ?", "yes"]
ASKED, ANSWERED = SAID[::2], SAID[1::2]


def write_mix(file):
    """Writes conversations of three rounds with text-only ones among them."""
    roles = ("human", "gpt")
    talk = [{"from": roles[n % 2], "value": value} for n, value in enumerate(SAID)]
    # Every row is cut behind one of its answers, drawn by its place: these behind the third.
    last = [n for n in range(1, 40) if random.Random(n).randrange(3) == 2][:4]
    text = [{"conversations": talk}] * (last[-1] + 1)
    for number, place in enumerate(last):
        text[place] = {"image": f"{number % 2}.png", "conversations": talk}
    file.write_text(json.dumps(text))
    return {"data.split_turns": False, "data.train_file": str(file)}


def test_scores_do_not_depend_on_answers(world, llava_model, tmp_path):
    run, model = make_run(*world, **write_mix(tmp_path / "mix.json")), llava_model
    setup = settings.make_step_config(run, model.backbone)
    batch = jax.tree.map(jnp.asarray, open_tiny(run, tmp_path)[0])
    params = policy.init_policy(jax.random.key(0), setup.method.config)
    stats = policy.FeatureStats.start(setup.method.config.feature_width)

    def scores(table):
        language = model.params["language"] | {"embed": {"embedding": table}}
        seen = step.selector_inputs(model.params | {"language": language}, setup, batch)
        seen = seen._replace(stats=stats)
        gated = policy.gate(params, setup.method.config, jax.random.key(1), seen)
        chosen = gated.alpha, gated.trajectory.prob, gated.trajectory.stop_prob
        # In random directions: sums of shares are constant.
        keys = jax.random.split(jax.random.key(2), 3)
        return sum(
            jnp.sum(jax.random.normal(k, x.shape) * x) for k, x in zip(keys, chosen, strict=True)
        )

    table = model.params["language"]["embed"]["embedding"]
    slope = np.abs(np.asarray(jax.jit(jax.grad(scores))(table))).sum(1)
    words = model.tokenizer("\n".join(ASKED), add_special_tokens=False).input_ids
    said = set(model.tokenizer(" ".join(ANSWERED) + "</s>", add_special_tokens=False).input_ids)
    answers = said - set(words)
    shared = model.tokenizer("dog", add_special_tokens=False).input_ids[0]
    assert len(answers) >= 3 and shared in said & set(words)  # a word of both has a slope
    assert all(slope[token] == 0 for token in answers)
    assert set(np.flatnonzero(slope).tolist()) == set(words)  # nor template, padding or image mark
