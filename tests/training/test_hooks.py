"""Hooks of a run: validation, boards and a profile. None of them changes a number."""

import dataclasses
import inspect
import os
import signal
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interfaces import parse_signature, read_record
from PIL import Image
from tiny_run import VALIDATION_QUESTIONS, make_run, metrics, validation_rows, write_data
from visual import visual_of

from stepprune_jax import RunOptions, generate, load_policy
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.llava import Llava
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig
from stepprune_jax.training import train
from stepprune_jax.training.step_config import make_step_config
from stepprune_jax.training.validation import (
    Validation,
    describe_model,
    read_model_questions,
    read_questions,
)
from stepprune_jax.workdir.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def validation(world, llava_model, tmp_path_factory):
    run = make_run(*world, **{"validation.every": 1, "validation.overlays": 0})
    questions = read_questions(run, make_step_config(run, llava_model.backbone))
    return Validation(run, llava_model, questions, tmp_path_factory.mktemp("validation"))


def test_a_run_validates_at_its_interval_and_at_its_end(finished_run):
    rows = validation_rows(finished_run)
    assert [row["step"] for row in rows] == [4, 6]
    for row in rows:
        assert row["questions"] == 5 and 0 < row["loss"] < 20
        assert 1 <= row["k_min"] <= row["k_mean"] <= row["k_max"] <= 9
        overlay = finished_run / "overlays" / f"step_{row['step']:08d}.png"
        with Image.open(overlay) as image:
            assert image.width > 2 * 384 and image.height > 384


def test_the_frozen_model_is_tested_as_validation_tests_it(validation, finished_run):
    row = validation_rows(finished_run)[-1]
    line = validation.test_model()[0]
    assert line == (
        f"the frozen model answers {row['accuracy_all']:.1f} % of 5 validation questions with all "
        f"tokens, {row['accuracy_none']:.1f} % without an image"
    )


@pytest.mark.parametrize(
    ("correct", "blind_correct", "warning"),
    [
        ("0000000000", "0000000000", "can hardly answer"),
        ("1100000000", "1100000000", "the image gains 0.0 +- 0.0 points"),
        # A gain of 1 of 10: deviation sqrt(.09 * 10 / 9) / sqrt(10) = .1, as large as the gain.
        ("1100000000", "1000000000", "the image gains 10.0 +- 10.0 points"),
        ("1111111110", "1000000000", None),
    ],
)
def test_training_warns_of_questions_that_teach_nothing(correct, blind_correct, warning):
    masks = (np.array([*text]) == "1" for text in (correct, blind_correct))
    lines = describe_model(*masks)
    assert len(lines) == (1 if warning is None else 2)
    assert warning is None or warning in lines[1]


def test_a_run_without_validation_tests_the_model_on_its_validation_split(world, tmp_path):
    model, data = world
    run = make_run(model, data, **{"validation.calibrate": 4, "validation.questions": 2})
    assert [question.text for question in read_model_questions(run).questions] == [
        VALIDATION_QUESTIONS[0],
        VALIDATION_QUESTIONS[2],
    ]
    assert read_model_questions(make_run(model, data)) is None  # without any use of the split
    plain_run = make_run(model, write_data(tmp_path / "plain"), **{"validation.calibrate": 4})
    assert read_model_questions(plain_run) is None


def test_a_profile_contains_the_updates_of_its_window(finished_run):
    (trace,) = (finished_run / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    # The call in Python and the call of the program have the same name. The inner one is dropped.
    calls = sorted((e.start_ns, e.end_ns) for e in events if e.name == "PjitFunction(_update)")
    outer_calls = [
        (start, end)
        for start, end in calls
        if not any(other_start <= start < end < other_end for other_start, other_end in calls)
    ]
    assert len(outer_calls) == 2  # updates 2 and 3


def test_validation_continues_after_an_interruption(world, finished_run, tmp_path):
    """The run fails while it saves step 6, so its last checkpoint is of step 4."""
    run = make_run(*world, **{"validation.every": 4, "validation.overlays": 0})
    save = Checkpoints.save

    def fail_at_the_end(self, step, *arguments):
        if step == 6:
            raise MemoryError
        save(self, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", fail_at_the_end)
        with pytest.raises(MemoryError):
            train(run, tmp_path / "run")
    assert [row["step"] for row in validation_rows(tmp_path / "run")] == [4, 6]
    train(run, tmp_path / "run")
    assert validation_rows(tmp_path / "run") == validation_rows(finished_run)
    assert not (tmp_path / "run" / "overlays").exists()


def test_an_interrupted_validation_is_repeated(world, finished_run, tmp_path):
    run = make_run(*world, **{"validation.every": 4, "validation.overlays": 0})

    def interrupt_twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validation, "answer", interrupt_twice)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path)
    train(run, tmp_path)
    assert validation_rows(tmp_path) == validation_rows(finished_run)


def test_validation_answers_as_generate_does(
    world, finished_run, llava_model, validation, monkeypatch
):
    policy = load_policy(finished_run / "policy.safetensors")
    images = [[world[1] / "images" / f"{i % 3}.png"] for i in range(5)]
    pruner = build_pruner(policy=policy)
    expected = generate(llava_model, VALIDATION_QUESTIONS, images, pruner, options=RunOptions(3))
    row = validation(6, policy, 1.0)
    row_without_time = {name: row[name] for name in row if name != "seconds"}
    assert row_without_time == validation_rows(finished_run)[-1]
    answers = validation.answer(policy)
    assert answers.texts == [answer.text for answer in expected]
    assert answers.kept.tolist() == [answer.kept for answer in expected]
    assert row["k_mean"] == np.mean(answers.kept)
    # Three of five answers are right. Letter case does not matter.
    right_texts = [text.upper() if i < 3 else "?" for i, text in enumerate(answers.texts)]
    split = validation._split._replace(answers=right_texts)
    monkeypatch.setattr(validation, "_split", split)
    assert validation(6, policy, 1.0)["accuracy"] == 60


def test_scores_depend_only_on_the_kept_tokens_and_their_places(llava_model, validation):
    order = np.array([[4, 0, 8], [1, 2, 3], [7, 0, 0], [5, 6, 0], [8, 7, 6]], np.int32)
    count = np.array([3, 1, 1, 1, 3], np.int32)
    losses, is_correct = validation.scores(order, count)
    encoded, targets = validation._encoded, validation._targets
    config, backbone = llava_model.config, llava_model.backbone

    @jax.jit
    def compute_logits(params, tokens, kept, ids, length):
        tokens = backbone.project(params, tokens)[:, None]
        visual, capacity = visual_of(config, tokens, kept), ids.shape[1] + 2
        sequence = assemble(params, backbone, ids, length, *visual, capacity=capacity)
        return vlm.prefill(params, config, sequence, 0, all_logits=True).logits

    for row in range(5):
        kept = np.sort(order[row, : count[row]])
        image = encoded.prompts.image_of[row, 0]
        tokens = jnp.asarray(encoded.images.features[image][kept])[None]
        ids = targets.ids[row : row + 1, : targets.length[row]]
        padded_ids = np.pad(ids, ((0, 0), (0, targets.ids.shape[1] - ids.shape[1])))
        length = np.array([ids.shape[1]])
        log_prob = jax.nn.log_softmax(
            compute_logits(llava_model.params, tokens, kept, padded_ids, length)[0]
        )
        answer = targets.target[row][targets.supervised[row]]
        end = ids.shape[1] - 1 + len(kept)  # conversations end with their answer
        places = range(end - len(answer) - 1, end - 1)
        expected = -sum(float(log_prob[p, t]) for p, t in zip(places, answer, strict=True))
        np.testing.assert_allclose(losses[row], expected, rtol=1e-5)
        most_probable = np.argmax(log_prob[np.array(places)], axis=1)
        assert is_correct[row] == (most_probable == answer).all()


def test_answers_are_not_cut_at_the_length_of_training_rows(
    world, llava_model, validation, tmp_path
):
    run = make_run(*world, **{"validation.every": 1, "data.context_limit": 56})
    questions = read_questions(run, make_step_config(run, llava_model.backbone))
    targets = Validation(run, llava_model, questions, tmp_path)._targets
    jax.tree.map(np.testing.assert_array_equal, targets, validation._targets)
    long_answer = "red " * Llava.CONTEXT_LIMIT
    too_long = questions._replace(answers=[*questions.answers[1:], long_answer])
    with pytest.raises(ValueError, match=r"question 4 takes .* embeddings .*, more than 2048"):
        Validation(run, llava_model, too_long, tmp_path)


def test_validation_keeps_the_budget_or_a_quarter_without_a_stop(
    validation, finished_run, monkeypatch
):
    policy, settings = load_policy(finished_run / "policy.safetensors"), validation._settings
    monkeypatch.setattr(validation, "_settings", dataclasses.replace(settings, budget=2))
    answers = validation.answer(policy)
    assert list(map(len, answers.order)) == [2] * 5 == answers.kept.tolist()
    config = AutoSelectConfig(
        feature_width=32, text_width=48, width=8, num_heads=2, mlp_ratio=1, encoder_layers=1
    )
    monkeypatch.setattr(validation, "_settings", dataclasses.replace(settings, budget=0))
    answers = validation.answer(AutoSelect.init(jax.random.key(0), config, None))
    assert answers.kept.tolist() == [2] * 5  # a quarter of nine


def test_missing_questions_are_named_before_anything_is_loaded(world, tmp_path):
    data = write_data(tmp_path / "data")
    run = make_run(world[0], data, **{"validation.every": 2})
    with pytest.raises(FileNotFoundError, match=r"validation.jsonl"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def check_call(function, *arguments, **options):
    """Raises a TypeError unless a recorded function of tensorboardX or wandb takes arguments."""
    parameters = parse_signature(read_record("boards")[function])
    inspect.Signature(parameters).bind(*arguments, **options)


class Recorder(types.ModuleType):
    """Records the calls of tensorboardX and its writer, or of wandb and its run."""

    def SummaryWriter(self, *arguments, **options):  # noqa: N802
        check_call("SummaryWriter", *arguments, **options)
        return self.begin(options)

    def init(self, *arguments, **options):
        check_call("init", *arguments, **options)
        return self.begin(options)

    def begin(self, options):
        self.starts.append(options)
        self.calls = {}
        return self

    def add_scalar(self, *arguments, **options):
        check_call("add_scalar", self, *arguments, **options)
        name, value, step = arguments
        self.calls[name, step] = value

    def log(self, *arguments, **options):
        check_call("log", self, *arguments, **options)
        (scalars,) = arguments
        self.calls |= {(name, options["step"]): value for name, value in scalars.items()}

    def close(self):
        check_call("close", self)
        self.calls["closed"] = True

    def finish(self):
        check_call("finish", self)
        self.calls["closed"] = True


def test_boards_get_the_rows_of_the_files(world, tmp_path, monkeypatch):
    boards = [Recorder(name) for name in ("tensorboardX", "wandb")]
    for board in boards:
        board.starts = []
        monkeypatch.setitem(sys.modules, board.__name__, board)
    changes = {"tensorboard": True, "wandb": "pruning", "validation.every": 6}
    run = make_run(*world, **changes, **{"validation.overlays": 0})
    train(run, tmp_path)
    rows, (validation_row,) = metrics(tmp_path), validation_rows(tmp_path)
    for board in boards:
        assert all(board.calls["loss", row["step"]] == row["loss"] for row in rows)
        assert board.calls["validation/accuracy", 6] == validation_row["accuracy"]
        assert board.calls["closed"] and ("step", 1) not in board.calls
    # A resumed run continues the run of the boards, and drops later events.
    for file in ("policy.safetensors", "checkpoints/6/beside/metadata"):
        (tmp_path / file).unlink()
    train(run, tmp_path)
    (board_start, wandb_start), (board_resume, wandb_resume) = zip(
        *(board.starts for board in boards), strict=True
    )
    assert [options.get("purge_step") for options in (board_start, board_resume)] == [1, 5]
    assert wandb_start["id"] == wandb_resume["id"]
    assert wandb_start["config"]["policy.width"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wandb": "pruning"}, "config.wandb is set, but wandb is not installed"),
        (
            {"validation.every": 1, "validation.budget": 6},
            "config.validation.budget is 6, expected at most 4",
        ),
    ],
)
def test_a_hook_that_cannot_run_is_named_before_the_run(world, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(make_run(*world, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
