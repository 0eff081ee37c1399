"""The shapes world: answers, labels and files."""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import shapes_oracle
from commands import status
from PIL import Image

from experiments.pretrain.conversations import read_conversations
from experiments.shapes import FAMILIES, patch_labels, render, scene_at, world, write_world
from experiments.shapes.__main__ import main
from experiments.shapes.scene import BACKGROUNDS, COLORS
from experiments.shapes.scene_files import read_scenes
from stepprune_jax.data.llava import read_answers, read_questions

SMALL = {"seed": 4, "train": 3, "validation": 2, "test": 2}


@pytest.fixture(scope="module")
def scenes():
    return [scene_at(11, "train", number) for number in range(320)]


@pytest.fixture(scope="module")
def queries(scenes):
    return [(scene, query) for scene, scene_queries in scenes for query in scene_queries]


def files(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_answers_equal_a_brute_force_search(queries):
    counts = Counter()
    for scene, query in queries:
        family, answer, _ = shapes_oracle.answer(scene, query.text)
        assert (query.family, query.answer) == (family, answer), (query, scene)
        counts[family] += 1
    assert set(counts) == set(FAMILIES) and min(counts.values()) > 40


@pytest.mark.parametrize("grid", [12, 24])
def test_relevant_patches_have_the_centers_of_the_objects(grid):
    def center_patches(items):
        return {int(item.y * grid / 96) * grid + int(item.x * grid / 96) for item in items}

    for number in range(80):
        scene, queries = scene_at(11, "train", number, grid)
        for query in queries:
            relevant = set(query.relevant)
            assert list(query.relevant) == sorted(relevant)
            _, _, items = shapes_oracle.answer(scene, query.text)
            # The answer zero depends on all shapes.
            needed = center_patches(scene.shapes if query.answer == "zero" else items)
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
    """Returns the palette indices of the colorful pixels of each patch."""
    patch_side = side // grid
    pixels = np.asarray(picture, np.int32).reshape(grid, patch_side, grid, patch_side, 3)
    patches = pixels.swapaxes(1, 2).reshape(grid * grid, -1, 3)
    palette = np.array(list(COLORS.values()))
    nearest = np.abs(patches[:, :, None] - palette).sum(-1).argmin(-1)
    is_painted = np.ptp(patches, axis=-1) > 70
    return [row[is_colorful] for row, is_colorful in zip(nearest, is_painted, strict=True)]


@pytest.mark.parametrize(("side", "grid"), [(96, 12), (192, 24)])
def test_labels_of_patches_match_the_pixels(scenes, side, grid):
    is_correct, stray_fractions = [], []
    for scene, _ in scenes[: 720 // grid]:
        labels, painted_pixels = patch_labels(scene, grid), painted(render(scene, side), side, grid)
        assert {*labels["class_background"]} == {BACKGROUNDS.index(scene.background)}
        colors, kinds = labels["class_color"], labels["class_kind"]
        for color, kind, pixels in zip(colors, kinds, painted_pixels, strict=True):
            assert (color == 0) == (kind == 0)
            if color:
                is_correct.append(len(pixels) > 0 and np.bincount(pixels).argmax() == color - 1)
            else:
                stray_fractions.append(len(pixels) / (side // grid) ** 2)
    # Patches without a label may have the rim of a shape or, on the fine grid, of a dot.
    assert np.mean(is_correct) > 0.985 and np.mean(stray_fractions) < (0.01 if grid == 12 else 0.06)


def test_a_world_is_a_llava_data_folder(tmp_path):
    folder = write_world(tmp_path, patches=True, **SMALL)
    samples = read_conversations(folder / "train.json", folder / "images")
    conversations = [
        [(question.text, question.answer) for question in scene_at(4, "train", number)[1]]
        for number in range(3)
    ]
    assert [sample.turns for sample in samples] == [sum(pairs, ()) for pairs in conversations]
    questions = read_questions(folder / "test.jsonl", folder / "images")
    answers = read_answers(folder / "test_answers.jsonl", questions)
    scene_facts = read_scenes(folder / "test_scenes.jsonl", questions)
    rows = [
        (question.text, question.category, answer, *fact)
        for question, answer, fact in zip(questions, answers, scene_facts, strict=True)
    ]
    assert rows == [
        (query.text, query.family, query.answer, scene.complexity, query.relevant)
        for scene, queries in (scene_at(4, "test", number) for number in range(2))
        for query in queries
    ]
    with np.load(folder / "train_patches.npz") as labels:
        assert labels["class_kind"].shape == (3, 144) and labels["image_presence"].shape == (3, 30)


def test_a_complete_world_is_unchanged_and_other_settings_are_refused(tmp_path):
    folder = write_world(tmp_path / "w", **SMALL)
    (folder / "test.jsonl").write_text("mine")
    write_world(folder, **SMALL)
    assert (folder / "test.jsonl").read_text() == "mine"
    with pytest.raises(ValueError, match=r"train is 3, not 4; side is 96, not 48"):
        write_world(folder, **{**SMALL, "train": 4}, side=48, grid=6)
    written = json.loads((folder / "world.json").read_text())
    (folder / "world.json").write_text(json.dumps(written | {"level": 2}))
    with pytest.raises(ValueError, match="level is 2, not None"):
        write_world(folder, **SMALL)


def test_an_interrupted_world_is_completed(tmp_path, monkeypatch):
    settings = SMALL | {"patches": True}

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(world, "_write_questions", die)
        with pytest.raises(KeyboardInterrupt):
            write_world(tmp_path / "a", **settings)
    with pytest.raises(ValueError, match="seed is 4, not 5"):
        write_world(tmp_path / "a", **settings | {"seed": 5})
    interrupted, complete = (write_world(tmp_path / name, **settings) for name in ("a", "b/c"))
    assert files(interrupted) == files(complete)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(FileExistsError, match=r"has train\.json but no world\.json"):
        write_world(tmp_path, **SMALL)
    assert (tmp_path / "train.json").read_text() == "[]"


def test_the_command_writes_a_world_and_reports_errors_in_one_line(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "w"), "--train", "2", "--validation", "0", "--test", "1"]
    main([*arguments, "--side", "24"])
    for invalid_flag in ("--side=50", "--train=-2", "--emphasis=inf"):
        assert status("experiments.shapes", main, *arguments, invalid_flag) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "error:" in error, invalid_flag


def test_the_questions_of_the_test_split_never_change():
    queries = [scene_at(0, "test", number)[1] for number in range(40)]
    text = json.dumps([query[:4] for row in queries for query in row])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "fdc7f882011fd1e8"


def test_images_of_several_sizes_show_the_same_scenes(tmp_path):
    settings = SMALL | {"train": 4, "patches": True}
    plain = write_world(tmp_path / "plain", **settings)
    mixed = write_world(tmp_path / "mixed", sizes=(48, 64, 96), **settings)
    equal_files = ["train.json", "test.jsonl", "test_answers.jsonl", "train_mentions.npz"]
    # The image has the size of the plain world.
    for name in (*equal_files, "images/train_000002.png"):
        assert (plain / name).read_bytes() == (mixed / name).read_bytes()
    for number, side in enumerate([48, 64, 96, 48]):
        with Image.open(mixed / "images" / f"train_{number:06d}.png") as picture:
            assert picture.size == (side, side)
    questions = read_questions(mixed / "test.jsonl", mixed / "images")
    scene_facts = read_scenes(mixed / "test_scenes.jsonl", questions)
    _, queries = scene_at(4, "test", 0, 6)
    relevant = [fact.relevant for fact in scene_facts[: len(queries)]]
    assert relevant == [query.relevant for query in queries]
    with (
        np.load(plain / "train_patches.npz") as plain_labels,
        np.load(mixed / "train_patches.npz") as mixed_labels,
    ):
        assert {*plain_labels} ^ {*mixed_labels} == {"value_place", "value_offset"}
        assert mixed_labels["class_kind"].shape == (4, 144)
        kinds = mixed_labels["class_kind"]
        assert kinds[0, :36].any() and not kinds[0, 36:].any()
        np.testing.assert_array_equal(plain_labels["class_kind"][2], kinds[2])
        presence = (labels["image_presence"] for labels in (plain_labels, mixed_labels))
        np.testing.assert_array_equal(*presence)
        assert np.isnan(mixed_labels["share_across"][0, 36:]).all()


def test_relative_places_point_from_the_patch_to_the_shape(scenes):
    for scene, _ in scenes[:20]:
        label = patch_labels(scene, 8, relative=True)["value_offset"].astype(float)
        has_place = np.isfinite(label[:, 0])
        assert (has_place == np.isin(patch_labels(scene, 8)["class_kind"], range(1, 6))).all()
        for patch in np.flatnonzero(has_place):
            # 12 pixels a patch of 8 along 96.
            row, column = divmod(int(patch), 8)
            x, y = column + 0.5 + label[patch, 0], row + 0.5 + label[patch, 1]
            radii = [s.radius for s in scene.shapes if np.hypot(s.x - 12 * x, s.y - 12 * y) < 0.2]
            np.testing.assert_allclose([12 * label[patch, 2]], radii, atol=0.05)
