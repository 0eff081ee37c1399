"""A small task through the command of lmms-eval, which `make test-lmms-eval` installs."""

import json
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest
from interfaces import read_record, record_in

from experiments.shapes import write_world
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.registry import build_pruner

PYTHON = Path(__file__).parents[2] / ".venv-lmms-eval" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="lmms-eval: make test-lmms-eval"),
]
BUDGET, MAX_TOKENS = 16, 4
TASK = """
task: small_task
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_visual: !function functions.read_images
doc_to_text: !function functions.read_text
doc_to_target: answer
process_results: !function functions.score
generation_kwargs: {max_new_tokens: %d, temperature: 0, do_sample: false}
metric_list: [{metric: accuracy, aggregation: mean, higher_is_better: true}]
"""
FUNCTIONS = """
from PIL import Image

def read_images(document):
    return [Image.open(path).convert("RGB") for path in document["images"]]

def read_text(document, lmms_eval_specific_kwargs=None):
    return document["text"]

def score(document, answers):
    return {"accuracy": float(answers[0] == document["answer"])}
"""


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Questions about two pictures: about one, about both with and without marks, about none."""
    world = write_world(tmp_path_factory.mktemp("w") / "w", seed=8, train=0, validation=0, test=2)
    questions, answers = (read_lines(world / f"test{name}.jsonl") for name in ("", "_answers"))
    documents = []
    for question, answer in zip(questions[:10], answers, strict=False):
        images = [str(world / "images" / question["image"])]
        documents.append({"text": question["text"], "images": images, "answer": answer["answer"]})
    both = [documents[0]["images"][0], documents[-1]["images"][0]]
    for text, images in (
        ("<image>Is there a yellow triangle?<image>", both),
        ("Is there a yellow triangle?", both),
        ("Is there a yellow triangle?", []),
    ):
        documents.append({"text": text, "images": images, "answer": "no"})
    return documents


def run_command(documents, folder):
    """Runs a task of the documents, and returns the results and the answers of lmms-eval."""
    task = folder / "task"
    task.mkdir()
    (task / "questions.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (task / "functions.py").write_text(FUNCTIONS)
    (task / "small_task.yaml").write_text(TASK % (task / "questions.jsonl", MAX_TOKENS))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"HOME": str(folder), "HF_HOME": str(folder / "hub"), "JAX_PLATFORMS": "cpu"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    arguments = f"pretrained=shapes,policy=shapes,budget={BUDGET},dtype=float32"
    command = [PYTHON.with_name("lmms-eval"), "--model", "stepprune_jax", "--tasks", "small_task"]
    command += ["--model_args", arguments, "--include_path", task, "--batch_size", "4"]
    command += ["--output_path", folder / "out", "--log_samples"]
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,), (samples,) = (folder.glob(f"out/**/*{end}") for end in ("results.json", ".jsonl"))
    samples = sorted(read_lines(samples), key=lambda sample: sample["doc_id"])
    answers = [sample["filtered_resps"] for sample in samples]
    return json.loads(results.read_text())["results"]["small_task"], answers


def test_the_recorded_interface_is_that_of_the_package():
    assert record_in(PYTHON, "lmms_eval") == read_record("lmms_eval")


def test_the_command_answers_as_generate_answers(documents, tmp_path):
    results, answers = run_command(documents, tmp_path)
    policy = load_policy_for(inspect_folder("shapes"), "shapes")
    said = generate(
        load_vlm("shapes", dtype=jnp.float32, progress=False),
        [document["text"] for document in documents],
        [document["images"] for document in documents],
        build_pruner(None, BUDGET, policy=policy),
        options=RunOptions(MAX_TOKENS),
    )
    assert answers == [answer.text for answer in said] and len({*answers}) > 3
    pairs = zip(answers, documents, strict=True)
    hits = [answer == document["answer"] for answer, document in pairs]
    assert results["accuracy,none"] == pytest.approx(sum(hits) / len(hits))
    assert sum(hits) > len(hits) / 2
