"""What the policy reads on batches of a training file, shown by the gradient of its scores."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import make_run, open_tiny, write_data

from stepprune_jax import load_vlm, policy, testing
from stepprune_jax.training import settings, step

SAID = ["What is in this picture?", "dog", "is this a red dog ?", "no", "two ?", "yes"]
ASKED, ANSWERED = SAID[::2], SAID[1::2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, and a file of conversations of three rounds with text-only ones among them."""
    folder = tmp_path_factory.mktemp("world")
    testing.tiny_llava(folder / "model")
    write_data(folder / "data", count=2)
    roles = ("human", "gpt")
    talk = [{"from": roles[n % 2], "value": value} for n, value in enumerate(SAID)]
    # Every row is cut behind one of its answers, drawn by its place: these behind the third.
    last = [n for n in range(1, 40) if random.Random(n).randrange(3) == 2][:4]
    text = [{"conversations": talk}] * (last[-1] + 1)
    rows = [{"image": f"{n % 2}.png", "conversations": talk} for n in range(4)]
    for place, row in zip(last, rows, strict=True):
        text[place] = row
    file = folder / "mix.json"
    file.write_text(json.dumps(text))
    return folder, file


def open_mix(world, workdir, **changes):
    folder, file = world
    places = {
        "data.split_turns": False,
        "data.train_file": str(file),
        "data.image_folder": str(folder / "data" / "images"),
    }
    run = make_run(folder / "model", "", **places | changes)
    return run, open_tiny(run, workdir)


def test_scores_do_not_depend_on_answers(world, tmp_path):
    run, batches = open_mix(world, tmp_path)
    model = load_vlm(world[0] / "model", None, jnp.float32, progress=False)
    setup = settings.make_setup(run, model.config)
    batch = jax.tree.map(jnp.asarray, batches[0])
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


def test_the_policy_sees_all_that_the_user_said_up_to_the_limit(world, tmp_path):
    tokenizer = testing.tiny_tokenizer()
    words = tokenizer("\n".join(ASKED), add_special_tokens=False).input_ids
    for limit in (len(words), 7):
        _, batches = open_mix(world, tmp_path, **{"data.policy_text_limit": limit})
        batch = batches[0]
        assert set(batch.text_length.tolist()) == {limit}
        assert (batch.text[:, :limit] == words[:limit]).all()
        # The language model reads the whole conversation all the same, and learns its last answer.
        learned = batch.targets.target[0][batch.targets.supervised[0]]
        assert tokenizer.decode(learned) == f"{ANSWERED[-1]}</s>"
