"""The world of moving shapes: answers agree with frames, and writing resumes."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from experiments.moving_shapes import world as world_module
from experiments.moving_shapes.draw import NUM_TOKENS, draw_background, draw_clip, random_clip
from experiments.moving_shapes.scene import (
    CELL,
    COLORS,
    COUNTED_KINDS,
    DIRECTIONS,
    NUM_FRAMES,
    RADIUS,
    RING,
    SIDE,
    list_queries,
)
from experiments.moving_shapes.stop import describe_stop
from experiments.moving_shapes.world import clip_at, write_world
from stepprune_jax.data.llava import read_questions
from stepprune_jax.data.videos import Video, open_video
from stepprune_jax.user_input import UserError
from stepprune_jax.visualize.strip import Strip, draw_strips

SCENES = [random_clip(np.random.default_rng([7, number])) for number in range(12)]


def colors_in(frame):
    """Returns the number of pixels of each color, up to the tint of a shape."""
    pixels = frame.reshape(-1, 3).astype(int)
    return {name: int((np.abs(pixels - rgb).max(1) <= 14).sum()) for name, rgb in COLORS.items()}


def center_of(frame, color):
    """Returns the mean column and row of the pixels of a color."""
    is_color = np.abs(frame.astype(int) - COLORS[color]).max(2) <= 14
    rows, columns = np.nonzero(is_color)
    return columns.mean(), rows.mean()


def kind_of(frames, color):
    """Names a shape by how much of its bounding box it fills, in its most visible frame."""
    masks = [np.abs(frame.astype(int) - COLORS[color]).max(2) <= 14 for frame in frames]
    rows, columns = np.nonzero(max(masks, key=np.sum))
    fill = len(rows) / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
    return "square" if fill > 0.92 else "circle" if fill > 0.7 else "triangle"


def test_answers_agree_with_the_pixels_of_the_frames():
    for scene, frames, _ in SCENES:
        seen = [{c for c, n in colors_in(frame).items() if n >= 25} for frame in frames]
        entries = {}
        for number, colors in enumerate(seen):
            for color in colors:
                entries.setdefault(color, number)
        for query in list_queries(scene):
            if query.family == "first":
                assert min(entries, key=entries.__getitem__) == query.answer
            elif query.family == "before":
                ring = next(shape for shape in scene.shapes if shape.kind == RING)
                assert entries[query.answer] < entries[ring.later_color]
            elif query.family == "way" and RING not in query.text:
                color = next(color for color in COLORS if f" {color} " in query.text)
                shown = [n for n in query.frames if color in seen[n]]
                start, end = (np.array(center_of(frames[n], color)) for n in (shown[0], shown[-1]))
                way = DIRECTIONS[query.answer]
                assert (end - start) @ way > np.abs(end - start) @ np.abs(way[::-1])
            elif query.family == "count":
                kind = next(kind for kind in COUNTED_KINDS if f" {kind}s " in query.text)
                # Each shape is drawn alone, because shapes may cover one another.
                counted = [one for one in scene.shapes if one.kind != RING]
                clips = [draw_clip(scene._replace(shapes=(one,)))[0] for one in counted]
                kinds = [
                    kind_of(*pair)
                    for pair in zip(clips, [one.color for one in counted], strict=True)
                ]
                assert query.answer == str(kinds.count(kind))


def test_the_frames_of_a_question_are_those_that_show_its_shapes():
    for scene, _, _ in SCENES:
        for query in list_queries(scene):
            shown = set()
            for index, is_original in query.evidence:
                shape = scene.shapes[index]
                # The frames that the shape changes, drawn alone, since shapes may cover each other.
                alone = draw_clip(scene._replace(shapes=(shape,)))[0]
                empty = draw_background(np.random.default_rng(scene.texture_seed))
                empty = np.clip(empty, 0, 255).astype(np.uint8)
                changed = [n for n in range(NUM_FRAMES) if np.any(empty[n] != alone[n])]
                shown |= {n for n in changed if not is_original or n < shape.change_frame}
            if query.family == "first":
                shown = {n for n in shown if n < scene.shapes[1].enter_frame}
            assert set(query.frames) == shown
            assert shown


def test_token_labels_name_the_shape_that_covers_the_token():
    for scene, _, labels in SCENES[:8]:
        assert len(labels.shape) == NUM_TOKENS
        for index, shape in enumerate(scene.shapes):
            tokens = np.flatnonzero((labels.shape == index) & (labels.changed == 0))
            assert len(tokens)
            patch, row, column = np.unravel_index(
                tokens, (NUM_FRAMES // 2, SIDE // CELL, SIDE // CELL)
            )
            centers = shape.centers().reshape(-1, 2, 2)
            cells = np.stack([column, row], axis=1) * CELL + CELL / 2
            distance = np.abs(centers[patch] - cells[:, None]).max(2).min(1)
            assert np.all(distance <= RADIUS + CELL / 2)
            assert np.all(labels.color[tokens] == list(COLORS).index(shape.color) + 1)


def test_the_first_shape_enters_clearly_before_the_second():
    assert all(s.shapes[1].enter_frame - s.shapes[0].enter_frame >= 3 for s, _, _ in SCENES)


def test_clips_are_lossless_and_have_the_times_of_the_world(tmp_path):
    folder = write_world(tmp_path, train=1, validation=0, test=1)
    video = open_video(Video(folder / "images" / "test_000000.mp4"))
    frames = np.stack(list(video.read(np.arange(NUM_FRAMES))))
    np.testing.assert_array_equal(frames, clip_at(0, "test", 0).frames)
    np.testing.assert_allclose(video.times, np.arange(NUM_FRAMES) / 2)
    questions = read_questions(folder / "test.jsonl", folder / "images")
    assert {question.category for question in questions} >= {"first", "way", "count"}
    (sample,) = json.loads((folder / "train.json").read_text())
    assert sample["video"] == "train_000000.mp4"
    assert sample["conversations"][0]["value"].startswith("<video>\n")


def test_writing_resumes_without_changing_clips(tmp_path, monkeypatch):
    expected = write_world(tmp_path / "once", train=3, validation=1, test=1, file_format="npz")
    write_clip, written = world_module.write_clip, []

    def write_two(path, frames):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write_clip(path, frames)

    folder = tmp_path / "twice"
    settings = {"train": 3, "validation": 1, "test": 1, "file_format": "npz"}
    monkeypatch.setattr(world_module, "write_clip", write_two)
    with pytest.raises(KeyboardInterrupt):
        write_world(folder, **settings)
    assert not (folder / "train.json").exists()
    monkeypatch.setattr(world_module, "write_clip", write_clip)
    write_world(folder, **settings)
    names = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert names == sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    for name in names:
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    with pytest.raises(UserError, match="seed is 0, not 1"):
        write_world(folder, seed=1, **settings)


def test_other_formats_hold_the_same_frames(tmp_path):
    frames = clip_at(0, "test", 0).frames
    (tmp_path / "images").mkdir()
    for suffix in ("npz", "png"):
        world_module.write_clip(tmp_path / f"clip.{suffix}", frames)
    with np.load(tmp_path / "clip.npz") as arrays:
        np.testing.assert_array_equal(arrays["frames"], frames)
    pictures = [np.asarray(Image.open(p)) for p in sorted((tmp_path / "clip.png").iterdir())]
    np.testing.assert_array_equal(pictures, frames)


def test_a_strip_brightens_the_kept_tokens_only():
    frames = np.full((4, 20, 20, 3), 200, np.uint8)
    file = io.BytesIO()
    draw_strips(file, frames, (2, 2, 2), [Strip("What happens?", [0, 7])], times=(0.2, 1.2))
    picture = np.asarray(Image.open(file).convert("L")).astype(int)
    # Centers of the eight tokens; frames have 160 pixels, a margin of 6, and 34 pixels of text.
    centers = [
        (34 + 40 + 80 * row, 6 + 166 * patch + 40 + 80 * column)
        for patch in range(2)
        for row in range(2)
        for column in range(2)
    ]
    is_bright = [picture[center] > 150 for center in centers]
    assert is_bright == [True, *[False] * 6, True]
    with pytest.raises(UserError, match="expected indices below 8"):
        draw_strips(file, frames, (2, 2, 2), [Strip("", [8])])


def test_the_stop_is_compared_with_the_frames_of_each_question(tmp_path):
    rows = [("a", "way", [1, 2], 3), ("b", "way", [4], 1), ("c", "count", [1, 2, 3], 8)]
    with (tmp_path / "test.jsonl").open("w") as questions, (tmp_path / "kept").open("w") as kept:
        for name, family, frames, count in rows:
            row = {"question_id": name, "category": family, "frames": frames}
            questions.write(json.dumps(row) + "\n")
            kept.write(json.dumps({"question_id": name, "kept": count}) + "\n")
    assert describe_stop(tmp_path / "kept", tmp_path) == {
        "mean_kept": 4.0,
        "mean_kept_by_family": {"count": 8.0, "way": 2.0},
        "spearman_frames": 1.0,
    }
