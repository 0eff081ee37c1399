"""Rows on request, and the comparison of step-by-step selection with its first step."""

import json
import zlib

import jax
import numpy as np
import pytest
from small_world import one_shot, save_all, small_run, stepprune, write_split

from experiments.datasets.scenes import Scene
from experiments.report.records import read_records
from experiments.studies.sequence import _describe, as_markdown, compare, over_runs
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.data.llava import read_questions
from stepprune_jax.inference.encode import encode_questions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_programs")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def result(base, llava_folder):
    write_split(base / "data", "test", 3, 0)
    save_all(base / "run")
    rows = {"AutoSelect-like": str(save_policy(one_shot(), base / "one.safetensors"))}
    run = small_run(llava_folder, base / "data", rows=rows, max_new_tokens=2)
    return compare(run, base / "run")


def records(base, method):
    ids = [f"test-{number}" for number in range(9)]
    rows = read_records(base / "run" / "answers" / "folder", base / "data", [], ids)
    (row,) = [row for row in rows if (row.method, row.budget) == (method, 4)]
    return row


def test_the_oracle_keeps_the_known_tokens_first_in_their_order(base, result):
    row = records(base, "oracle")
    lines = (base / "data" / "test_scenes.jsonl").read_text().splitlines()
    for order, line in zip(row.order, lines, strict=True):
        known = json.loads(line)["relevant"]
        assert order[: len(known)].tolist() == known and len({*order.tolist()}) == 4
    assert len({tuple(order) for order in row.order.tolist()}) > 4  # the others are random


def test_the_first_step_keeps_the_best_of_one_distribution(base, result, llava_model):
    model = llava_model
    questions = read_questions(base / "data" / "test.jsonl", base / "data" / "images")
    encoded = encode_questions(model, questions, batch_size=3)
    policy = stepprune()
    row, rollout = records(base, "first step"), records(base, "StepPrune")
    assert (row.order[:, 0] == rollout.order[:, 0]).all()
    assert (row.order != rollout.order).any()
    words, length = encoded.prompts.words, encoded.prompts.num_words
    embedding = np.asarray(model.params["language"]["embed"]["embedding"])
    for at, image in enumerate(encoded.prompts.image_of[:, 0]):
        text = embedding[words[at : at + 1, : length[at]]]
        seed = zlib.crc32(words[at, : length[at]], encoded.images.seed[image])
        key = jax.random.fold_in(jax.random.key(0), np.uint32(seed))
        features = encoded.images.features[image][None]
        best = policy.prune(features, text, budget=4, group=4, key=key)
        assert sorted(row.order[at].tolist()) == np.asarray(best.index)[0].tolist()


def test_differences_and_figures_are_those_of_the_rows(result):
    families = {"all", "long", "short"}
    assert {*result["questions"]} == families == {*result["entropy"]}
    assert result["questions"]["all"] == 9
    found = {(r["family"], r["method"], r["budget"]): r["accuracy"] for r in result["accuracy"]}
    methods = {"all tokens", "AutoSelect-like", "first step", "StepPrune", "oracle"}
    assert {method for _, method, _ in found} == methods
    for row in result["differences"]:
        one, two = (found[row["family"], row[n], row["budget"]] for n in ("first", "second"))
        assert row["difference"] == pytest.approx(one - two, abs=0.02)
    kept = {(r["family"], r["method"], r["budget"]): r for r in result["choices"]}
    assert kept["all", "oracle", 4]["relevant"] == 100 > kept["all", "StepPrune", 2]["relevant"]
    assert kept["all", "oracle", 4]["looks"] is None  # these data do not tell
    assert all(0 < entropy <= np.log(9) + 1e-6 for entropy in result["entropy"].values())
    shown = as_markdown(result)
    assert "at 2 tokens\n\n| family | questions | entropy | all tokens |" in shown
    assert "| StepPrune - first step | StepPrune - AutoSelect-like | oracle - StepPrune |" in shown


def test_means_over_runs_by_hand(result):
    other = json.loads(json.dumps(result))
    other["accuracy"][0]["accuracy"] += 4
    other["differences"][0]["difference"] += 2
    other["entropy"]["all"] += 1
    merged = over_runs([result, other])
    assert merged["runs"] == 2
    first = merged["accuracy"][0]
    assert first["accuracy"] == pytest.approx(result["accuracy"][0]["accuracy"] + 2)
    assert first["standard_deviation"] == 2.828  # 4 / sqrt(2)
    gap = merged["differences"][0]
    assert gap["difference"] == pytest.approx(result["differences"][0]["difference"] + 1)
    assert gap["standard_error_over_runs"] == 1  # sqrt(2) / sqrt(2)
    assert merged["entropy"]["all"] == pytest.approx(result["entropy"]["all"] + 0.5)
    assert merged["choices"] == result["choices"]
    assert " +- 0.0 |" in as_markdown(merged)  # runs that agree are runs, too
    assert f"{first['accuracy']:.1f} +- 2.8 |" in as_markdown(merged)
    other["accuracy"][0]["budget"] = 99
    with pytest.raises(ValueError, match=r"differ in their rows"):
        over_runs([result, other])
    other["questions"] = {"all": 1}
    with pytest.raises(ValueError, match=r"answered different questions"):
        over_runs([result, other])


def test_figures_of_kept_tokens_by_hand():
    image = np.array([[1, 0], [0, 1], [0.6, 0.8], [1, 0]], np.float32)
    scene = Scene(5, (2, 3), ((0, 3), (1,), (2,)))
    found = _describe(image, np.array([0, 3, 1]), scene)
    # The first and the last are the same; the second has no part in either.
    assert found["similarity"] == pytest.approx((1 + 1 + 0) / 3)
    assert found["relevant"] == 50 and found["looks"] == 2
    assert found["repeats"] == pytest.approx(100 / 3)
    alone = _describe(image, np.array([2]), scene)
    assert np.isnan(alone["similarity"]) and (alone["looks"], alone["repeats"]) == (1, 0)
    assert np.isnan(_describe(image, np.array([2]), Scene(0, ()))["looks"])
