"""Training hooks: validation, boards, a profile; none of them changes a number."""

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
from tiny_run import ASKED, looks, make_run, metrics, write_data
from visual import visual_of

from stepprune_jax import RunOptions, generate, load_policy
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.llava import Llava
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import AutoSelect, AutoSelectConfig
from stepprune_jax.training import train
from stepprune_jax.training.questions import read_questions
from stepprune_jax.training.settings import make_step_config
from stepprune_jax.training.validation import Validation
from stepprune_jax.workdir.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def look(world, llava_model, tmp_path_factory):
    config = make_run(*world, **{"validation.every": 1, "validation.overlays": 0})
    questions = read_questions(config, make_step_config(config, llava_model.backbone))
    return Validation(config, llava_model, questions, tmp_path_factory.mktemp("validation"))


def test_questions_are_asked_every_so_often_and_at_the_end(whole):
    found = looks(whole)
    assert [row["step"] for row in found] == [4, 6]
    for row in found:
        assert row["questions"] == 5 and 0 < row["loss"] < 20
        assert 1 <= row["k_min"] <= row["k_mean"] <= row["k_max"] <= 9
        with Image.open(whole / "overlays" / f"step_{row['step']:08d}.png") as drawn:
            assert drawn.width > 2 * 384 and drawn.height > 384


def test_a_profile_has_the_updates_that_were_asked_for(whole):
    (trace,) = (whole / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    # Python's call and the program's own bear the same name; what lies within another is left out.
    calls = sorted((e.start_ns, e.end_ns) for e in events if e.name == "PjitFunction(_update)")
    outer = [call for call in calls if not any(a <= call[0] < call[1] < b for a, b in calls)]
    assert len(outer) == 2  # of updates 2 and 3


def test_hooks_continue_after_an_interruption(world, whole, tmp_path):
    # As if it had been killed after step 5, with a checkpoint of step 4.
    config = make_run(*world, **{"validation.every": 4, "validation.overlays": 0})
    save = Checkpoints.save

    def die(self, step, *arguments):
        if step == 6:
            raise MemoryError
        save(self, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", die)
        with pytest.raises(MemoryError):
            train(config, tmp_path / "run")
    assert [row["step"] for row in looks(tmp_path / "run")] == [4, 6]
    train(config, tmp_path / "run")
    assert looks(tmp_path / "run") == looks(whole)
    assert not (tmp_path / "run" / "overlays").exists()


def test_a_validation_that_is_broken_off_is_made_again(world, whole, tmp_path):
    config = make_run(*world, **{"validation.every": 4, "validation.overlays": 0})

    def twice(*_):  # Ctrl-C, and again
        os.kill(os.getpid(), signal.SIGINT)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validation, "answer", twice)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    train(config, tmp_path)
    assert looks(tmp_path) == looks(whole)


def test_counts_and_answers_are_those_of_generate(world, whole, llava_model, look, monkeypatch):
    policy = load_policy(whole / "policy.safetensors")
    images = [[world[1] / "images" / f"{i % 3}.png"] for i in range(5)]
    how = RunOptions(3)
    answers = generate(llava_model, ASKED, images, build_pruner(policy=policy), options=how)
    row = look(6, policy, 1.0)
    assert {k: v for k, v in row.items() if k != "seconds"} == looks(whole)[-1]
    answered = look.answer(policy)
    assert answered.texts == [answer.text for answer in answers]
    assert answered.kept.tolist() == [answer.kept for answer in answers]
    assert row["k_mean"] == np.mean(answered.kept)
    # Right are three of five, whatever their case.
    right = [text.upper() if number < 3 else "?" for number, text in enumerate(answered.texts)]
    monkeypatch.setattr(look, "_split", look._split._replace(answers=right))
    assert look(6, policy, 1.0)["accuracy"] == 60


def test_scores_see_the_kept_tokens_alone_at_their_places(llava_model, look):
    order = np.array([[4, 0, 8], [1, 2, 3], [7, 0, 0], [5, 6, 0], [8, 7, 6]], np.int32)
    count = np.array([3, 1, 1, 1, 3], np.int32)
    losses, right = look.scores(order, count)
    split, targets = look._encoded, look._targets
    config, backbone = llava_model.config, llava_model.backbone

    @jax.jit
    def logits_of(params, tokens, kept, ids, length):
        tokens = backbone.project(params, tokens)[:, None]
        visual, capacity = visual_of(config, tokens, kept), ids.shape[1] + 2
        sequence = assemble(params, backbone, ids, length, *visual, capacity=capacity)
        return vlm.prefill(params, config, sequence, 0, all_logits=True).logits

    for row in range(5):
        kept = np.sort(order[row, : count[row]])
        image = split.prompts.image_of[row, 0]
        tokens = jnp.asarray(split.images.features[image][kept])[None]
        ids = targets.ids[row : row + 1, : targets.length[row]]
        padded = np.pad(ids, ((0, 0), (0, targets.ids.shape[1] - ids.shape[1])))
        logits = logits_of(llava_model.params, tokens, kept, padded, np.array([ids.shape[1]]))
        log_prob = jax.nn.log_softmax(logits[0])
        answer = targets.target[row][targets.supervised[row]]
        end = ids.shape[1] - 1 + len(kept)  # conversations end with their answer
        places = range(end - len(answer) - 1, end - 1)
        expected = -sum(float(log_prob[p, t]) for p, t in zip(places, answer, strict=True))
        np.testing.assert_allclose(losses[row], expected, rtol=1e-5)
        assert right[row] == (np.argmax(log_prob[np.array(places)], axis=1) == answer).all()


def test_right_answers_are_scored_whole_however_short_training_rows_are(
    world, llava_model, look, tmp_path
):
    config = make_run(*world, **{"validation.every": 1, "data.context_limit": 56})
    questions = read_questions(config, make_step_config(config, llava_model.backbone))
    found = Validation(config, llava_model, questions, tmp_path)._targets
    jax.tree.map(np.testing.assert_array_equal, found, look._targets)
    longer = questions._replace(answers=[*questions.answers[1:], "red " * Llava.CONTEXT_LIMIT])
    with pytest.raises(ValueError, match=r"question 4 takes .* embeddings .*, more than 2048"):
        Validation(config, llava_model, longer, tmp_path)


def test_a_budget_or_a_policy_without_a_stop_keeps_so_many(look, whole, monkeypatch):
    policy = load_policy(whole / "policy.safetensors")
    monkeypatch.setattr(look, "_settings", dataclasses.replace(look._settings, budget=2))
    answers = look.answer(policy)
    assert list(map(len, answers.order)) == [2] * 5 == answers.kept.tolist()
    scorer = AutoSelectConfig(
        feature_width=32, text_width=48, width=8, num_heads=2, mlp_ratio=1, encoder_layers=1
    )
    monkeypatch.setattr(look, "_settings", dataclasses.replace(look._settings, budget=0))
    answers = look.answer(AutoSelect.init(jax.random.key(0), scorer, None))
    assert answers.kept.tolist() == [2] * 5  # a quarter of nine


def test_questions_that_are_not_there_are_reported_before_anything_is_loaded(world, tmp_path):
    data = write_data(tmp_path / "data")
    config = make_run(world[0], data, **{"validation.every": 2})
    with pytest.raises(FileNotFoundError, match=r"validation.jsonl"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def check_call(function, *arguments, **options):
    """Raises a TypeError unless a recorded function of tensorboardX or wandb takes arguments."""
    parameters = parse_signature(read_record("boards")[function])
    inspect.Signature(parameters).bind(*arguments, **options)


class Recorder(types.ModuleType):
    """Stands for tensorboardX and its writer, and for wandb and its run."""

    def SummaryWriter(self, *arguments, **options):  # noqa: N802
        check_call("SummaryWriter", *arguments, **options)
        return self.begin(options)

    def init(self, *arguments, **options):
        check_call("init", *arguments, **options)
        return self.begin(options)

    def begin(self, options):
        self.begun.append(options)
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


def test_boards_show_what_the_files_have(world, tmp_path, monkeypatch):
    boards = [Recorder(name) for name in ("tensorboardX", "wandb")]
    for board in boards:
        board.begun = []
        monkeypatch.setitem(sys.modules, board.__name__, board)
    changes = {"tensorboard": True, "wandb": "pruning", "validation.every": 6}
    config = make_run(*world, **changes, **{"validation.overlays": 0})
    train(config, tmp_path)
    rows, (look,) = metrics(tmp_path), looks(tmp_path)
    for board in boards:
        shown = board.calls
        assert all(shown["loss", row["step"]] == row["loss"] for row in rows)
        assert shown["validation/accuracy", 6] == look["accuracy"]
        assert shown["closed"] and ("step", 1) not in shown
    # The continuation is the same run there, and drops the events after its beginning.
    for file in ("policy.safetensors", "checkpoints/6/beside/metadata"):
        (tmp_path / file).unlink()
    train(config, tmp_path)
    first, second = zip(*(board.begun for board in boards), strict=True)
    assert [options.get("purge_step") for options in (first[0], second[0])] == [1, 5]
    assert first[1]["id"] == second[1]["id"] and first[1]["config"]["policy.width"] == 8


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
def test_what_cannot_be_watched_is_named(world, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(make_run(*world, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
