"""An evaluation of a model whose images differ in their number of tokens."""

import json

import jax
import numpy as np
import pytest
from benchmark_folders import write_benchmarks
from PIL import Image
from small_world import changed, one_width, small_run
from tiny_qwen import tiny_qwen3

from stepprune_jax import PolicyConfig
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli.evaluate import evaluate
from stepprune_jax.evaluation.generate_stage import generate_answers
from stepprune_jax.policy import FeatureStats, init_policy
from stepprune_jax.selectors import StepPrune

SHARE = "1/3"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns a run on POPE with a random policy, its folder, and visual tokens by question."""
    base = tmp_path_factory.mktemp("base")
    root, tokens = write_benchmarks(base / "eval"), {}
    for number, path in enumerate(sorted((root / "pope").rglob("*.jpg"))):
        height, width = 24 + 8 * (number % 2), 24 + 8 * number
        with Image.open(path) as image:
            image.resize((width, height)).save(path)
        tokens[path.name] = height * width // 64
    widths = {"feature_width": 48, "text_width": 48, "width": 8, "num_heads": 2, "mlp_ratio": 1}
    config = PolicyConfig(**widths, encoder_layers=1, decoder_layers=1)
    policy = StepPrune(
        params=init_policy(jax.random.key(0), config), config=config, stats=FeatureStats.start(48)
    )
    save_policy(policy, base / "run" / "policy.safetensors")
    run = small_run(
        tiny_qwen3(base / "model"),
        base / "data",
        benchmarks="pope",
        data=str(root),
        methods="all,random,StepPrune",
        max_new_tokens=1,
        validation_questions=6,
        budgets=(SHARE,),
    )
    with pytest.MonkeyPatch.context() as patch:
        one_width(patch)
        evaluate(run, base / "run")
    lines = (root / "pope" / "llava_pope_test.jsonl").read_text().splitlines()
    num_tokens = {row["question_id"]: tokens[row["image"]] for row in map(json.loads, lines)}
    return run, base / "run", num_tokens


def test_budgets_are_fractions_of_each_images_tokens(world):
    _, workdir, num_tokens = world
    assert len({*num_tokens.values()}) > 1
    kept = {}
    for path in (workdir / "answers" / "pope").glob("*.jsonl"):
        lines = list(map(json.loads, path.read_text().splitlines()))
        kept[path.stem] = {line["question_id"]: line["kept"] for line in lines}
        assert kept[path.stem].keys() == num_tokens.keys()
    third = {number: (2 * size + 3) // 6 for number, size in num_tokens.items()}
    assert kept.pop("all-tokens") == num_tokens
    adaptive = next(name for name in kept if "adaptive" in name)
    learned_stop = next(name for name in kept if "own-stop" in name)
    exact = [name for name in kept if name not in (adaptive, learned_stop)]
    assert len(exact) == 2 and all(kept[name] == third for name in exact)
    # Calibrated on these questions to a third of the mean number of tokens.
    mean = np.mean(list(third.values()))
    assert np.mean(list(kept[adaptive].values())) == pytest.approx(mean, abs=1)
    for name in (adaptive, learned_stop):
        assert all(count <= max(1, num_tokens[n] // 2) for n, count in kept[name].items())
    provenance = workdir / "answers" / "pope" / f"{exact[0]}.json"
    settings = json.loads(provenance.read_text())["made"]
    assert settings["share"] == SHARE and settings["min_pixels"] == 256


def test_the_report_uses_the_number_of_tokens_of_each_image(world):
    _, workdir, num_tokens = world
    tokens = np.array([*num_tokens.values()])
    rows = json.loads((workdir / "report" / "table.json").read_text())
    all_tokens, learned_stop, random, exact, _ = rows
    assert all_tokens["mean_k"] == round(tokens.mean(), 2)
    for row in (random, exact):
        assert row["mean_k"] == round(((2 * tokens + 3) // 6).mean(), 2)
        assert row["pruning_rate"] == 66.7
    rate = 100 * (1 - learned_stop["mean_k"] / round(tokens.mean()))
    assert learned_stop["pruning_rate"] == pytest.approx(rate, abs=0.1)
    # Fewer tokens take fewer operations.
    assert all_tokens["gflops"] > random["gflops"] > 0
    page = (workdir / "report" / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3


@pytest.mark.parametrize("name", ["cls", "prumerge"])
def test_the_error_names_a_pruner_that_needs_a_class_token(world, tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}: the model's tower has no \[CLS\] attention"):
        generate_answers(changed(world[0], methods=name), tmp_path)
