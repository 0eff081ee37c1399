"""The policy reads only questions: its choices have no gradient at the words of answers."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
from tiny_run import make_run, open_tiny_batches

from stepprune_jax import policy
from stepprune_jax.training import step
from stepprune_jax.training.step_config import make_step_config

TURNS = ["What is in this picture?", "dog", "is this a red dog ?", "no", "two ?", "yes"]
QUESTIONS, ANSWERS = TURNS[::2], TURNS[1::2]


def write_conversations(file):
    """Writes conversations of three rounds, some of them without an image."""
    roles = ("human", "gpt")
    turns = [{"from": roles[n % 2], "value": value} for n, value in enumerate(TURNS)]
    # Without `split_turns`, a row ends at a random answer that depends on its place in the file.
    # These places end at the third answer.
    places = [n for n in range(1, 40) if random.Random(n).randrange(3) == 2][:4]
    entries = [{"conversations": turns}] * (places[-1] + 1)
    for number, place in enumerate(places):
        entries[place] = {"image": f"{number % 2}.png", "conversations": turns}
    file.write_text(json.dumps(entries))
    return {"data.split_turns": False, "data.train_file": str(file)}


def test_choices_do_not_depend_on_answers(world, llava_model, tmp_path):
    changes, model = write_conversations(tmp_path / "mix.json"), llava_model
    run = make_run(*world, **changes)
    config = make_step_config(run, model.backbone)
    selector_config = config.selector.config
    batch = jax.tree.map(jnp.asarray, open_tiny_batches(run, tmp_path)[0])
    params = policy.init_policy(jax.random.key(0), selector_config)
    stats = policy.FeatureStats.start(selector_config.feature_width)

    def project_choices(embedding):
        """Projects the choices on random directions, because sums of shares are constant."""
        language = model.params["language"] | {"embed": {"embedding": embedding}}
        inputs = step.selector_inputs(model.params | {"language": language}, config, batch)
        inputs = inputs._replace(stats=stats)
        gated = policy.gate(params, selector_config, jax.random.key(1), inputs)
        choices = gated.alpha, gated.trajectory.prob, gated.trajectory.stop_prob
        keys = jax.random.split(jax.random.key(2), 3)
        pairs = zip(keys, choices, strict=True)
        return sum(jnp.sum(jax.random.normal(key, x.shape) * x) for key, x in pairs)

    embedding = model.params["language"]["embed"]["embedding"]
    gradient = np.abs(np.asarray(jax.jit(jax.grad(project_choices))(embedding))).sum(1)

    def encode(text):
        return set(model.tokenizer(text, add_special_tokens=False).input_ids)

    question_ids, answer_ids = encode("\n".join(QUESTIONS)), encode(" ".join(ANSWERS) + "</s>")
    only_answer_ids = answer_ids - question_ids
    assert len(only_answer_ids) >= 3
    assert encode("dog") <= answer_ids & question_ids  # a word of both has a gradient
    assert all(gradient[token] == 0 for token in only_answer_ids)
    # Template, padding and the mark of the image have no gradient either.
    assert set(np.flatnonzero(gradient).tolist()) == question_ids
