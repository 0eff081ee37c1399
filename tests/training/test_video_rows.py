"""Training rows with videos: alone, and mixed with rows with images."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow
from tiny_qwen import tiny_qwen, tiny_qwen3
from tiny_run import make_run, metrics, open_tiny_batches, validation_rows
from video_clips import make_clip
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.check import check_folder
from stepprune_jax.data.json_files import write_json_lines
from stepprune_jax.data.videos import Video
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.testing import tiny_llava
from stepprune_jax.training import step, train
from stepprune_jax.training.batches import Batches, Loading, cache_clips, pad_patches
from stepprune_jax.training.language_loss import lm_loss
from stepprune_jax.training.step_config import make_step_config

# Frames, frames per second, width and height of the clips.
CLIPS = ((4, 2, 40, 32), (7, 3, 32, 24), (1, 1, 24, 40), (12, 4, 32, 32))
ANSWERS = ("red", "dog", "two")
SIZE = {"shortest_edge": 512, "longest_edge": 8192}


def write_samples(folder, names):
    """Writes train.json with a row for each image or clip, and a validation split."""
    samples, questions = [], []
    for row, name in enumerate(names):
        kind = "image" if name.endswith("png") else "video"
        mark = "<video>" if row % 2 and kind == "video" else "<image>"
        turns = [
            {"from": "human", "value": f"{mark}\nWhat is {row}?"},
            {"from": "gpt", "value": ANSWERS[row % 3]},
        ]
        samples.append({"id": f"s{row}", kind: name, "conversations": turns, "data_source": "a"})
        questions.append({"question_id": f"q{row}", kind: name, "text": f"What is {row}?"})
    (folder / "train.json").write_text(json.dumps(samples))
    write_json_lines(folder / "validation.jsonl", questions)
    answers = [{"question_id": f"q{row}", "answer": ANSWERS[row % 3]} for row in range(len(names))]
    write_json_lines(folder / "validation_answers.jsonl", answers)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder whose rows have two images and four clips."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    for number, (count, rate, width, height) in enumerate(CLIPS):
        clip = make_clip(count, rate, width, height)
        (folder / "images" / f"{number}.mp4").write_bytes(clip)
    for number, size in enumerate(((40, 48), (20, 30))):
        noise(number, size).save(folder / "images" / f"{number}.png")
    write_samples(folder, ["0.png", *(f"{number}.mp4" for number in range(4)), "1.png"])
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Folders of a Qwen2.5-VL and of a Qwen3-VL, by name."""
    folders = {}
    for write in (tiny_qwen, tiny_qwen3):
        folder = folders[write.__name__] = write(tmp_path_factory.mktemp(write.__name__))
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": SIZE}))
    return folders


def make_video_run(model, data, **changes):
    small = {"steps": 4, "batch_size": 6, "data.stats_images": 6, "optimizer.warmup": 1}
    return make_run(model, data, **small | {"model.rows_at_once": 0} | changes)


@pytest.mark.parametrize("family", quick_or_slow(["tiny_qwen", "tiny_qwen3"], ["tiny_qwen3"]))
def test_a_mixed_batch_has_the_losses_of_generation(qwen, data, tmp_path, family):
    """The first token of each answer has the probability that `generate` computes for it."""
    run = make_video_run(qwen[family], data, **{"data.num_frames": 6})
    model = load_vlm(qwen[family], dtype=jnp.float32, progress=False)
    config = make_step_config(run, model.backbone)
    batches = open_tiny_batches(run, tmp_path)
    batch = batches[0]
    assert batch.targets.clips.is_video.sum() == 4 and batch.targets.ids.shape[0] == 6
    first_only = np.arange(batch.targets.target.shape[1]) < 1
    targets = batch.targets._replace(supervised=batch.targets.supervised & first_only)

    @jax.jit
    def compute_loss(params, batch, targets):
        inputs = step.selector_inputs(params, config, batch)
        tokens = inputs.with_deepstack
        return lm_loss(params, config.backbone, config.forward, tokens, targets)

    loss = compute_loss(model.params, jax.tree.map(jnp.asarray, batch), targets)
    rows = batches.indices(0).tolist()
    questions = [batches.corpus.question(row) for row in rows]
    traces = []
    generate(
        model,
        [question.text for question in questions],
        [question.video or str(question.image) for question in questions],
        sampling=Sampling(stop_ids=()),
        options=RunOptions(1),
        trace=traces.append,
    )
    log_prob = jax.nn.log_softmax(traces[0].trace.logits)
    expected = -np.asarray(log_prob)[np.arange(6), batch.targets.target[:, 0]].mean()
    np.testing.assert_allclose(loss, expected, rtol=2e-5)


@pytest.mark.parametrize("family", ["tiny_qwen", "tiny_qwen3"])
def test_batches_have_few_shapes_and_rows_of_images_keep_theirs(qwen, data, tmp_path, family):
    run = make_video_run(qwen[family], data, batch_size=2)
    batches = open_tiny_batches(run, tmp_path)
    shapes = set()
    for number in range(30):
        batch = batches[number]
        shapes.add(str(jax.tree.map(np.shape, batch)))
        rows = batches.indices(number)
        has_video = (batches.corpus.lengths.patches[rows] > 0).any()
        assert (batch.token_of is not None) == (batch.targets.clips is not None) == has_video
        widest = batches.widest
        assert len(jax.tree.leaves(batch.pixels)[0]) <= max(2, widest.media.patches)
    # Two rows of six: 21 pairs of rows, from one image to 12 frames.
    assert len(shapes) <= 10
    assert len({pad_patches(count) for count in range(1, 1000)}) <= 20
    assert [pad_patches(count) for count in (1, 5, 8, 9, 16, 17, 100)] == [1, 6, 8, 16, 16, 24, 128]
    assert pad_patches(17, num_devices=2) == 32


def test_hosts_build_the_rows_of_one_mixed_batch(qwen, data, tmp_path):
    run = make_video_run(qwen["tiny_qwen"], data, batch_size=4)
    alone = open_tiny_batches(run, tmp_path)
    parts = [
        Batches(
            alone.corpus,
            alone._images,
            batch_size=4,
            seed=run.seed,
            multiple=64,
            loading=Loading(local=rows),
        )[0]
        for rows in (slice(0, 2), slice(2, 4))
    ]
    joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    width = alone[0].token_of.shape[1]
    tokens_of_patch = joined.pixels.values.shape[1] // 4
    values = joined.pixels.values.reshape(-1, 4, joined.pixels.values.shape[2])
    expected = alone[0].pixels.values.reshape(-1, 4, values.shape[2])
    assert tokens_of_patch >= alone[0].pixels.values.shape[1] // 4
    for row, (mine, theirs) in enumerate(zip(alone[0].token_of, joined.token_of, strict=True)):
        is_token = mine >= 0
        assert (theirs[:width] >= 0)[is_token].all() and (theirs >= 0).sum() == is_token.sum()
        np.testing.assert_array_equal(
            values[theirs[:width][is_token]], expected[mine[is_token]], str(row)
        )
    assert jax.tree.map(np.shape, parts[0]) == jax.tree.map(np.shape, parts[1])


@pytest.mark.slow
def test_a_policy_is_trained_on_the_models_answers_to_videos(qwen, data, tmp_path):
    """Warm start, RLOO, validation, calibration and the counts of programs."""
    num_compiled = step.update.num_compiled()
    run = make_video_run(
        qwen["tiny_qwen3"],
        data,
        recipe="warm_start",
        **{
            "data.answers": "model",
            "data.answer_tokens": 2,
            "data.num_frames": 4,
            "rloo.samples": 2,
            "validation.every": 4,
            "validation.overlays": 0,
            "validation.calibrate": 4,
        },
    )
    assert train(run, tmp_path) == 0
    rows = metrics(tmp_path)
    assert len(rows) == 4 and all(np.isfinite(row["loss"]) for row in rows)
    (row,) = validation_rows(tmp_path)
    assert row["questions"] == 6 and np.isfinite(row["loss_all"])
    # Two phases, and one shape of batches, because every clip has up to four frames.
    assert step.update.num_compiled() - num_compiled == 2
    answers = (tmp_path / "model_answers.jsonl").read_text().splitlines()
    assert len(answers) == 1 + 6


def test_faults_of_videos_are_found_before_training(qwen, data, tmp_path):
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for name, clip in (
        ("good.mp4", make_clip(4)),
        ("sound.mp4", make_clip(0, audio=4)),
        ("empty.mp4", b""),
        ("broken.mp4", make_clip(8)[:400]),
    ):
        (folder / "images" / name).write_bytes(clip)
    run = make_video_run(qwen["tiny_qwen"], folder, **{"data.num_frames": 4})
    messages = {
        "sound.mp4": 'sample 1: "video": .*sound.mp4 has no video stream, only audio; config.data',
        "broken.mp4": 'sample 1: "video": .*broken.mp4 is damaged',
        "empty.mp4": 'sample 1: "video": no file, or an empty one',
        "absent.mp4": 'sample 1: "video": no file, or an empty one',
    }
    for name, message in messages.items():
        write_samples(folder, ["good.mp4", name])
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_tiny_batches(run, tmp_path)
    write_samples(folder, ["good.mp4", *messages])
    skipping = make_video_run(qwen["tiny_qwen"], folder, **{"data.missing": "skip"})
    assert len(open_tiny_batches(skipping, tmp_path)) == 1
    (folder / "images" / "absent.mp4").write_bytes(make_clip(6))
    assert len(open_tiny_batches(skipping, tmp_path)) == 2
    results = {result.name: result for result in check_folder(folder)}
    assert results["videos"].num_valid == 2
    faults = " ".join(results["videos"].faults)
    assert "has no video stream, only audio" in faults and "broken.mp4 is damaged" in faults
    long_clip = make_video_run(qwen["tiny_qwen"], folder, **{"data.context_limit": 90})
    write_samples(folder, ["good.mp4"])
    with pytest.raises(ValueError, match=r"of its video\), which data.context_limit allows; "):
        open_tiny_batches(long_clip, tmp_path)


def test_llava_refuses_rows_with_videos_in_one_line(data, tmp_path):
    folder = tiny_llava(tmp_path / "model")
    for missing in ("stop", "skip"):
        run = make_video_run(folder, data, **{"data.missing": missing})
        with pytest.raises(ValueError, match='"video": llava reads images only') as error:
            open_tiny_batches(run, tmp_path)
        assert "\n" not in str(error.value)


def test_clips_are_kept_up_to_a_number_of_bytes(qwen):
    backbone = load_vlm(qwen["tiny_qwen"], dtype=jnp.float32, progress=False).backbone
    settings, reads = backbone.image_settings(qwen["tiny_qwen"]), []

    def read(video):
        reads.append(video)
        return backbone.read_video(settings, video)

    videos = [Video(np.zeros((2, 32, 32, 3), np.uint8)) for _ in range(3)]
    clip = backbone.read_video(settings, videos[0])
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(clip.pixels))
    cached = cache_clips(read, 2 * num_bytes)
    for index in (0, 1, 0, 1, 2, 1, 0):
        cached(videos[index])
    assert len(reads) == 4
