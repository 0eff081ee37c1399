"""Every command refuses a bad argument in one line before its long work begins."""

import socket
import sys
import types

import pytest
from commands import status
from small_world import one_shot, stepprune
from tiny_run import write_data, write_questions

from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli import (
    calibrate,
    convert,
    demo,
    efficiency,
    evaluate,
    export,
    generate,
    score,
    serve,
    train,
)
from stepprune_jax.evaluation import generate_stage
from stepprune_jax.training import run as training_run

# By command: its module, and the module and name of the function that starts the long work.
LONG_WORK = {
    "serve": (serve, serve, "load_vlm"),
    "generate": (generate, generate, "load_params"),
    "evaluate": (evaluate, generate_stage, "load_vlm"),
    "calibrate": (calibrate, calibrate, "load_vlm"),
    "demo": (demo, demo, "load_vlm"),
    "train": (train, training_run, "load_vlm"),
    "efficiency": (efficiency, efficiency, "random_weights"),
    "export": (export, export, "latest_policy"),
    "score": (score, None, None),  # fails because answers are missing
    "convert": (convert, None, None),
}
RUN = "--config=shapes --config.mesh=single --config.cpu_devices=0 --config.model.folder={model} "
RUN += "--config.data.folder={data} --workdir={new}"
EVALUATED = f"{RUN} --config.eval.budgets=(4,)"
RANDOM = f"{EVALUATED} --config.eval.methods=random"
VALIDATED = f"{RUN} --config.validation.every=1 --config.validation.overlays=0"
MISTAKES = [
    ("serve", "--model {model} --policy {policy} --budget 400", "budget is 400, expected at most"),
    ("serve", "--model {model} --pruner gird --budget 3", "Did you mean grid?"),
    ("serve", "--model {model} --pruner {new}.py:A --budget 3", "there is no file {new}.py"),
    ("serve", "--model {model} --budget 3", "needs a pruner"),
    ("serve", "--model {model} --policy {policy} --mean_budget 3", "calibrat"),
    ("serve", "--model {model} --policy {other}", "text_width"),
    ("serve", "--model {model} --max_tokens 257", "max_tokens is 257, expected an integer from 1"),
    ("serve", "--model {model} --min_pixels 9", "min_pixels is 9, expected none"),
    ("serve", "--model {model} --port {taken}", "--port {taken}: Address already in use"),
    ("generate", "--model {model} --questions {new} --out {new}", "{new}"),
    ("generate", "--model {model} --prompt a --pruner grid --budget 400", "budget is 400"),
    ("generate", "--model {model} --prompt a --pruner {new}.py:A", "there is no file {new}.py"),
    ("evaluate", RANDOM + " --config.eval.max_new_tokens=257", "eval.max_new_tokens is 257"),
    ("evaluate", RUN + " --policy {policy} --config.eval.budgets=(400,)", "budgets is (400,)"),
    ("evaluate", EVALUATED + " --policy {other}", "text_width"),
    ("evaluate", RUN + " --config.eval.methods={new}.py:A", "there is no file {new}.py"),
    ("evaluate", RUN + " --stages all", "--stages is 'all', expected generate, convert, score"),
    ("calibrate", "--model {model} --policy {policy} --data {data} --out {data}", "--out is"),
    ("calibrate", "--model {model} --policy {one_shot} --data {data} --out {new}", "no learned st"),
    ("calibrate", "--model {model} --policy {other} --data {data} --out {new}", "text_width"),
    ("calibrate", "--model {model} --policy {policy} --data {new} --out {new}", "validation.jsonl"),
    ("demo", "--model {model} --policy {other} --port {free}", "--policy {other}: "),
    ("demo", "--model {model} --pruner {new}.py:A --port {free}", "there is no file {new}.py"),
    ("demo", "--model {model} --pruner grid --port {free}", "--pruner is 'grid', expected FILE"),
    ("demo", "--model {model} --port {taken}", "--port {taken}: Address already in use"),
    ("train", VALIDATED + " --config.validation.max_new_tokens=257", "max_new_tokens is 257"),
    ("train", VALIDATED + " --config.validation.budget=400", "config.validation.budget is 400"),
    ("train", RUN + " --profile 5:2", "--profile"),
    ("efficiency", "--model mid --rows all --json {new} --new_tokens 9999", "--new_tokens is 9999"),
    ("efficiency", "--model mid --rows {new}.py:A@4 --json {new}", "there is no file {new}.py"),
    ("efficiency", "--model mid --rows all --json {new} --text 9999", "--text is 9999, exp"),
    ("efficiency", "--model mid --rows cls@999 --json {new}", "budget is 999"),
    ("efficiency", "--model mid --rows all --json {new}/a/b", "--json is"),
    ("export", "{data} --out {new} --stop_bias nan", "--stop_bias is nan, expected a finite"),
    ("export", "{data} --out {policy}", "--out is '{policy}', expected a folder"),
    ("export", "{data} --out {new} --push name", "--push is 'name', expected owner/name"),
    ("score", "pope --answers {new} --json {new}/a/b", "--json is"),
    ("convert", "mme --answers {new} --out {policy}", "--out is '{policy}', expected a folder"),
    ("convert", "vqav2 --answers {new} --out {data}", "--out is '{data}', expected a file"),
]


@pytest.fixture(scope="module")
def places(llava_folder, tmp_path_factory):
    """Returns values for arguments by name: a model, data, policies, and ports."""
    folder = tmp_path_factory.mktemp("arguments")
    names = {"model": llava_folder, "data": write_questions(write_data(folder / "data"))}
    for name in ("", "_answers"):
        questions = (folder / "data" / f"validation{name}.jsonl").read_text()
        (folder / "data" / f"test{name}.jsonl").write_text(questions)
    policies = {"policy": stepprune(), "other": stepprune(text_width=40), "one_shot": one_shot()}
    names |= {name: save_policy(policy, folder / name) for name, policy in policies.items()}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_server(("127.0.0.1", 0)) as closed_listener:
            free_port = closed_listener.getsockname()[1]
        yield names | {"taken": listener.getsockname()[1], "free": free_port}


@pytest.mark.parametrize(("name", "arguments", "line"), MISTAKES)
def test_a_bad_argument_is_refused_before_long_work(
    name, arguments, line, places, tmp_path, monkeypatch, capsys
):
    module, owner, work = LONG_WORK[name]
    places = places | {"new": tmp_path / "new"}

    def refuse(*_, **__):
        raise AssertionError("the long work was begun")

    if owner is not None:
        monkeypatch.setattr(owner, work, refuse)
    # The browser page needs a package that may not be installed.
    page = types.SimpleNamespace(build=refuse, serve=refuse)
    monkeypatch.setitem(sys.modules, "stepprune_jax.demo.app", page)
    command, words = f"stepprune-{name}", arguments.format(**places).split()
    assert status(command, module.main, *words) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in printed and line.format(**places) in printed
    assert not places["new"].exists()


def test_every_command_with_long_work_is_tested():
    assert LONG_WORK.keys() == {name for name, *_ in MISTAKES}
