import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import shapes_oracle
from commands import status
from PIL import Image

from experiments.datasets.scenes import read_scenes
from experiments.pretrain.conversations import read_conversations
from experiments.shapes import FAMILIES, patch_labels, render, scene_at, world, write_world
from experiments.shapes.__main__ import main
from experiments.shapes.scene import BACKGROUNDS, COLORS
from stepprune_jax.data.llava import read_answers, read_questions

SMALL = {"seed": 4, "train": 3, "validation": 2, "test": 2}


@pytest.fixture(scope="module")
def scenes():
    return [scene_at(11, "train", number) for number in range(320)]


@pytest.fixture(scope="module")
def queries(scenes):
    return [(scene, query) for scene, asked in scenes for query in asked]


def files(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_answers_are_those_of_brute_force_for_every_family(queries):
    seen = Counter()
    for scene, query in queries:
        family, answer, _ = shapes_oracle.answer(scene, query.text)
        assert (query.family, query.answer) == (family, answer), (query, scene)
        seen[family] += 1
    assert set(seen) == set(FAMILIES) and min(seen.values()) > 40


@pytest.mark.parametrize("grid", [12, 24])
def test_relevant_patches_hold_the_middle_of_what_is_asked_about(grid):
    def middles(things):
        return {int(t.y * grid / 96) * grid + int(t.x * grid / 96) for t in things}

    for number in range(80):
        scene, asked = scene_at(11, "train", number, grid)
        for query in asked:
            relevant = set(query.relevant)
            assert list(query.relevant) == sorted(relevant)
            _, _, things = shapes_oracle.answer(scene, query.text)
            # That there is none shows where it might have been.
            needed = middles(scene.shapes if query.answer == "zero" else things)
            if query.family == "background":
                (patch,) = relevant
                assert patch_labels(scene, grid)["class_kind"][patch] == 0
            elif query.family == "existence" and query.answer == "yes":
                assert len(relevant) == 1 and relevant <= needed
            elif query.family in ("size", "existence"):
                assert needed <= relevant <= {*range(grid**2)}
            else:
                assert needed == relevant


def painted(picture, side, grid):
    """For each patch the pixels that are too colourful for a background, as palette indices."""
    step = side // grid
    patches = np.asarray(picture, np.int32).reshape(grid, step, grid, step, 3).swapaxes(1, 2)
    patches = patches.reshape(grid * grid, -1, 3)
    palette = np.array(list(COLORS.values()))
    nearest = np.abs(patches[:, :, None] - palette).sum(-1).argmin(-1)
    colourful = np.ptp(patches, axis=-1) > 70
    return [row[found] for row, found in zip(nearest, colourful, strict=True)]


@pytest.mark.parametrize(("side", "grid"), [(96, 12), (192, 24)])
def test_labels_of_patches_are_what_the_pixels_show(scenes, side, grid):
    right, stray = [], []
    for scene, _ in scenes[: 720 // grid]:
        labels, seen = patch_labels(scene, grid), painted(render(scene, side), side, grid)
        assert {*labels["class_background"]} == {BACKGROUNDS.index(scene.background)}
        colors, kinds = labels["class_color"], labels["class_kind"]
        for color, kind, pixels in zip(colors, kinds, seen, strict=True):
            assert (color == 0) == (kind == 0)
            if color:
                right.append(len(pixels) > 0 and np.bincount(pixels).argmax() == color - 1)
            else:
                stray.append(len(pixels) / (side // grid) ** 2)
    # Nothing is seldom more than the rim of a shape or, on the fine grid, of a dot.
    assert np.mean(right) > 0.985 and np.mean(stray) < (0.01 if grid == 12 else 0.06)


def test_a_world_is_ordinary_data(tmp_path):
    one = write_world(tmp_path, patches=True, **SMALL)
    samples = read_conversations(one / "train.json", one / "images")
    said = [[(q.text, q.answer) for q in scene_at(4, "train", number)[1]] for number in range(3)]
    assert [sample.turns for sample in samples] == [sum(pairs, ()) for pairs in said]
    questions = read_questions(one / "test.jsonl", one / "images")
    answers = read_answers(one / "test_answers.jsonl", questions)
    facts = read_scenes(one / "test_scenes.jsonl", questions)
    found = [
        (q.text, q.category, answer, *fact)
        for q, answer, fact in zip(questions, answers, facts, strict=True)
    ]
    assert found == [
        (query.text, query.family, query.answer, scene.complexity, query.relevant)
        for scene, asked in (scene_at(4, "test", number) for number in range(2))
        for query in asked
    ]
    with np.load(one / "train_patches.npz") as labels:
        assert labels["class_kind"].shape == (3, 144) and labels["image_presence"].shape == (3, 30)


def test_what_is_written_is_left_alone_and_other_settings_are_refused(tmp_path):
    folder = write_world(tmp_path / "w", **SMALL)
    (folder / "test.jsonl").write_text("mine")
    write_world(folder, **SMALL)
    assert (folder / "test.jsonl").read_text() == "mine"
    with pytest.raises(ValueError, match=r"train is 3, not 4; side is 96, not 48.*level is None, "):
        write_world(folder, **{**SMALL, "train": 4}, side=48, grid=6, level=2)
    written = json.loads((folder / "world.json").read_text())
    (folder / "world.json").write_text(json.dumps(written | {"level": 2}))
    with pytest.raises(ValueError, match="level is 2, not None"):
        write_world(folder, **SMALL)


@pytest.mark.parametrize("level", [1, 2])
def test_an_interrupted_world_is_completed_as_if_it_had_not_been(tmp_path, monkeypatch, level):
    settings = SMALL | {"level": level, "patches": True}

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(world, "_write_questions", die)
        with pytest.raises(KeyboardInterrupt):
            write_world(tmp_path / "a", **settings)
    with pytest.raises(ValueError, match="seed is 4, not 5"):
        write_world(tmp_path / "a", **settings | {"seed": 5})
    one, two = (write_world(tmp_path / place, **settings) for place in ("a", "b/c"))
    assert files(one) == files(two)


def test_a_folder_of_someone_elses_data_is_not_touched(tmp_path):
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(FileExistsError, match=r"holds train\.json, and no world\.json"):
        write_world(tmp_path, **SMALL)
    assert (tmp_path / "train.json").read_text() == "[]"


def test_the_command_writes_and_reports_mistakes_in_one_line(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "w"), "--train", "2", "--validation", "0", "--test", "1"]
    main([*arguments, "--preview", "2", "--side", "24"])
    with Image.open(tmp_path / "w" / "preview.png") as sheet:
        assert sheet.size == (400, 200)
    for wrong in ("--side=50", "--train=-2", "--preview=-1", "--level=4", "--emphasis=inf"):
        assert status("experiments.shapes", main, *arguments, wrong) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "error:" in error, wrong


@pytest.mark.parametrize(("level", "digest"), [(1, "fdc7f882011fd1e8"), (2, "8e01bcfe4e32fc82")])
def test_the_questions_stay_what_trained_policies_were_tested_on(level, digest):
    asked = [scene_at(0, "test", number, level=level)[1] for number in range(40)]
    text = json.dumps([query[:4] for row in asked for query in row])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_images_take_turns_in_size_and_show_the_same_scenes(tmp_path):
    settings = SMALL | {"train": 4, "patches": True}
    plain = write_world(tmp_path / "plain", **settings)
    mixed = write_world(tmp_path / "mixed", sizes=(48, 64, 96), **settings)
    same = ["train.json", "test.jsonl", "test_answers.jsonl", "train_mentions.npz"]
    for name in [*same, "images/train_000002.png"]:  # whose size is that of the plain world
        assert (plain / name).read_bytes() == (mixed / name).read_bytes()
    for number, side in enumerate([48, 64, 96, 48]):
        with Image.open(mixed / "images" / f"train_{number:06d}.png") as picture:
            assert picture.size == (side, side)
    questions = read_questions(mixed / "test.jsonl", mixed / "images")
    facts = read_scenes(mixed / "test_scenes.jsonl", questions)
    _, asked = scene_at(4, "test", 0, 6)
    assert [fact.relevant for fact in facts[: len(asked)]] == [q.relevant for q in asked]
    with np.load(plain / "train_patches.npz") as one, np.load(mixed / "train_patches.npz") as two:
        assert {*one} ^ {*two} == {"value_place", "value_offset"}
        assert two["class_kind"].shape == (4, 144)
        assert not two["class_kind"][0, 36:].any() and two["class_kind"][0, :36].any()
        np.testing.assert_array_equal(one["class_kind"][2], two["class_kind"][2])
        np.testing.assert_array_equal(one["image_presence"], two["image_presence"])
        assert np.isnan(two["share_across"][0, 36:]).all()


def test_relative_places_lead_from_the_patch_to_the_shape(scenes):
    for scene, _ in scenes[:20]:
        label = patch_labels(scene, 8, relative=True)["value_offset"].astype(float)
        told = np.isfinite(label[:, 0])
        assert (told == np.isin(patch_labels(scene, 8)["class_kind"], range(1, 6))).all()
        for patch in np.flatnonzero(told):
            # 12 pixels a patch of 8 along 96.
            row, column = divmod(int(patch), 8)
            x, y = column + 0.5 + label[patch, 0], row + 0.5 + label[patch, 1]
            near = [s for s in scene.shapes if np.hypot(s.x - 12 * x, s.y - 12 * y) < 0.2]
            assert len(near) == 1, patch
            np.testing.assert_allclose(12 * label[patch, 2], near[0].radius, atol=0.05)
