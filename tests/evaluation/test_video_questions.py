"""An evaluation of questions about videos and images of a data folder."""

import json
import shutil

import numpy as np
import pytest
from small_world import one_width, small_run
from tiny_qwen import tiny_qwen3
from video_clips import make_clip
from visual import noise

from stepprune_jax.cli.evaluate import evaluate
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.evaluation.rows import Conditions
from stepprune_jax.user_input import UserError

FRAMES = (4, 9)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns a run on two clips and an image, and its folder with the answers and the report."""
    base = tmp_path_factory.mktemp("base")
    images, questions = base / "data" / "images", []
    images.mkdir(parents=True)
    for number, count in enumerate(FRAMES):
        (images / f"{number}.mp4").write_bytes(make_clip(count))
        questions.append({"question_id": f"v{number}", "video": f"{number}.mp4", "text": "What?"})
    noise(0, (24, 32)).save(images / "0.png")
    questions.append({"question_id": "i0", "image": "0.png", "text": "What?"})
    answers = [{"question_id": q["question_id"], "answer": "dog"} for q in questions]
    write_json_lines(base / "data" / "test.jsonl", questions)
    write_json_lines(base / "data" / "test_answers.jsonl", answers)
    (model := tiny_qwen3(base / "model")).joinpath("video_preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 512, "longest_edge": 8192}})
    )
    fields = {"methods": "all,random", "max_new_tokens": 1, "budgets": ("1/3",)}
    run = small_run(model, base / "data", **fields).replace({"data.num_frames": 6})
    with pytest.MonkeyPatch.context() as patch:
        one_width(patch)
        evaluate(run, base / "run")
    return run, base / "run"


def test_answers_record_what_each_temporal_patch_kept(world):
    _, workdir = world
    lines = {}
    for path in (workdir / "answers" / "folder").glob("*.jsonl"):
        records = map(json.loads, path.read_text().splitlines())
        lines[path.stem] = {record["question_id"]: record for record in records}
    everything = lines.pop("all-tokens")
    (pruned,) = lines.values()
    # Of at most six frames, each two are one temporal patch.
    for question, num_patches in (("v0", 2), ("v1", 3)):
        kept = everything[question]["kept_per_patch"]
        assert len(kept) == num_patches and len({*kept}) == 1
        assert sum(kept) == everything[question]["kept"]
        kept_of_third = pruned[question]["kept_per_patch"]
        assert (
            len(kept_of_third) == num_patches
            and sum(kept_of_third) == pruned[question]["kept"] < sum(kept) / 2
        )
    assert "kept_per_patch" not in everything["i0"]
    tower = {name: record["gflops"] for name, record in everything.items()}
    assert tower["v1"] > tower["v0"] and np.isfinite(list(tower.values())).all()


def test_answers_of_another_sampling_are_not_taken_over(world):
    run, workdir = world
    with pytest.raises(UserError, match="questions"):
        evaluate(run.replace({"data.num_frames": 4}), workdir)


def test_budgets_count_the_tokens_of_the_largest_video(world, tmp_path):
    """If there are images, too, the largest image that the model reads counts as well."""
    run, workdir = world
    source = run.model.inspect()
    largest_image = source.config.max_image_tokens
    answers = workdir / "answers" / "folder" / "all-tokens.jsonl"
    records = map(json.loads, answers.read_text().splitlines())
    kept = {record["question_id"]: record["kept"] for record in records}
    assert largest_image > kept["v1"] > kept["v0"]
    assert Conditions(run, source, {}, tmp_path).num_tokens == largest_image
    data = tmp_path / "data"
    shutil.copytree(run.data.folder, data)
    questions = map(json.loads, (data / "test.jsonl").read_text().splitlines())
    write_json_lines(data / "test.jsonl", [q for q in questions if "video" in q])
    run_of_videos = run.replace({"data.folder": str(data)})
    conditions = Conditions(run_of_videos, source, {}, tmp_path)
    assert conditions.num_tokens == kept["v1"]
    _, random_row = conditions.rows({})
    assert random_row.count(conditions.num_tokens) == kept["v1"] // 3
