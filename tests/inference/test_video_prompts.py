"""Videos among the images of a prompt: pruning, streams, refusals, and few programs."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import status
from small_world import random_params
from tiny_qwen import qwen_tokenizer, tiny_qwen3, tiny_qwen3_config
from video_clips import make_clip
from visual import noise

from stepprune_jax import PolicyConfig
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.cli.generate import main
from stepprune_jax.data.llava import Question, read_questions
from stepprune_jax.data.videos import Video
from stepprune_jax.inference import (
    Batching,
    Generator,
    RunOptions,
    Sampling,
    encode_questions,
    generate,
    pipeline,
    programs,
    read_request,
    stream,
    trace_arrays,
)
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models import vlm
from stepprune_jax.models.qwen2_5_vl.images import QwenImageSettings, VideoSettings
from stepprune_jax.models.qwen3_vl import Qwen3_VL
from stepprune_jax.pruning import AllTokens
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.selectors import StepPrune

OPTIONS = RunOptions(4)
SIZE = {"shortest_edge": 512, "longest_edge": 8192}
E = 48


def frames(count=6, height=32, width=40, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": SIZE}))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_vlm(folder, dtype=jnp.float32, progress=False)


def answer(model, media, pruner=AllTokens(), **options):
    """Answers one prompt, and returns the answer with the arrays of its trace."""
    traces = []
    (result,) = generate(
        model,
        ["What?"],
        [media],
        pruner,
        sampling=Sampling(stop_ids=()),
        options=OPTIONS,
        trace=traces.append,
        **options,
    )
    return result, trace_arrays(traces[0])


def stepprune():
    config = {"feature_width": E, "text_width": E, "width": 16, "num_heads": 2, "mlp_ratio": 2}
    untrained = StepPrune(config=PolicyConfig(**config, encoder_layers=1, decoder_layers=1))
    return untrained.replace(params=random_params(untrained.specs(), 1))


def test_a_budget_counts_the_tokens_of_each_video_and_image(model):
    media = [Video(frames(6), fps=2), noise(0, (30, 40)), Video(frames(2, seed=1), fps=2)]
    for name in ("random", "divprune"):
        result, arrays = answer(model, media, build_pruner(name, 5))
        assert [len(indices) for indices in result.kept_indices] == [5, 5, 5]
        assert np.bincount(arrays["image_0"]).tolist() == [5, 5, 5]
    result, _ = answer(model, media, build_pruner("evs", "1/2"))
    (patches, rows, columns), image, _ = result.grids
    first, still, _ = result.kept_indices
    assert patches == 3 and len(first) == patches * rows * columns // 2
    assert {*range(rows * columns)} <= {*first} and len(still) == np.prod(image)


def test_kept_tokens_have_the_positions_of_the_unpruned_prompt(model):
    """All times remain, also of temporal patches that keep no token."""
    video = Video(frames(8), fps=1)
    full, all_arrays = answer(model, [video])
    pruned, arrays = answer(model, [video], build_pruner("random", 2))
    kept = np.sort(pruned.kept_indices[0])
    size = np.prod(full.grids[0][1:])
    assert len({*(kept // size).tolist()}) < full.grids[0][0]
    text = np.setdiff1d(np.arange(all_arrays["position_0"].shape[1]), all_arrays["slot_0"])
    remaining = np.sort(np.concatenate([text, all_arrays["slot_0"][kept]]))
    np.testing.assert_array_equal(arrays["position_0"], all_arrays["position_0"][:, remaining])


def test_one_policy_serves_images_and_videos(model):
    policy = stepprune()
    media = [Video(frames(4), fps=2), noise(1, (40, 40))]
    together, _ = answer(model, media, policy)
    alone = [answer(model, [medium], policy)[0] for medium in media]
    assert together.kept_indices == tuple(single.kept_indices[0] for single in alone)


def test_a_batch_mixes_videos_images_and_text(model):
    prompts = ["What?", "Is it red?", "two", "yes or no"]
    media = [[Video(frames(5), fps=2)], [noise(0, (30, 40))], None, [noise(1, (20, 20))] * 2]
    options = {"sampling": Sampling(stop_ids=()), "options": OPTIONS}
    together = generate(model, prompts, media, **options)
    for prompt, medium, result in zip(prompts, media, together, strict=True):
        (alone,) = generate(model, [prompt], [medium], **options)
        assert alone == result


def test_frames_have_no_more_pixels_than_images(folder, model):
    small = load_vlm(folder, dtype=jnp.float32, max_pixels=512, progress=False)
    tokens = []
    for loaded in (model, small):
        request = read_request(loaded, ["What?"], [[Video(frames(4, 64, 64), fps=2)]])
        tokens.append(int(request.images.sizes[0]) // 2)
    assert tokens == [25, 4]  # of each temporal patch: 8192 / 4 and 512 pixels a frame


def test_a_stream_has_the_text_of_the_answer(model):
    video = Video(frames(4), fps=2)
    (expected,) = generate(model, ["What?"], [[video]], options=OPTIONS)
    assert "".join(stream(model, "What?", [video], options=OPTIONS)) == expected.text


def test_a_question_file_with_videos_is_answered_in_batches(model):
    paths = [Path(f"{number}.mp4") for number in range(3)]
    questions = [
        Question(str(number), path, "What?", "default", Video(frames(4 + number // 2), fps=2))
        for number, path in enumerate(paths)
    ]
    encoded = encode_questions(model, questions, batch_size=2)
    generator = Generator(model, build_pruner("vidcom2", "1/2"), options=OPTIONS)
    (answers,) = generator.answer_set(encoded, Batching(2))
    for row, question in enumerate(questions):
        (single,) = generator.answer(generator.read(["What?"], [[question.video]]))
        assert answers.kept[row] == single.kept and answers.texts[row] == single.text
        assert sorted(answers.order[row].tolist()) == sorted(single.kept_indices[0])


def test_question_files_name_videos(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"clip")
    line = {"question_id": "1", "video": "a.mp4", "text": "<video>\nWhat?"}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    (question,) = read_questions(tmp_path / "in.jsonl", tmp_path, num_frames=8)
    assert question.text == "What?" and question.video.source == tmp_path / "a.mp4"
    assert question.video.num_frames == 8


def test_families_of_images_refuse_videos_by_name(llava_model):
    message = "^video 0 of prompt 0 .*: llava reads images only, .* Qwen2.5-VL and Qwen3-VL read"
    with pytest.raises(ValueError, match=message) as error:
        generate(llava_model, ["What?"], [[Video(frames())]])
    assert "\n" not in str(error.value)


def test_methods_without_a_meaning_on_videos_refuse_them_by_name(model):
    before = programs.num_compiled()
    refusing = [name for name, kind in PRUNERS.items() if not kind.reads_videos]
    assert len(refusing) == 12
    for name in refusing:
        pruner = PRUNERS[name](budget=4)
        request = read_request(model, ["What?"], [[Video(frames(2))]])
        with pytest.raises(ValueError, match=f"^{name} prunes images only") as error:
            plan_batch(model, pruner, request.prompts(), request.images, OPTIONS)
        assert "\n" not in str(error.value)
    assert programs.num_compiled() == before


def test_other_methods_keep_their_budget_of_a_video(model):
    video = Video(frames(4), fps=2)
    for name, options in (("grid", None), ("vcast", None), ("fastv", {"layer": 1})):
        result, _ = answer(model, [video], build_pruner(name, 9, options=options))
        assert result.kept == 9, name


def test_a_prompt_longer_than_the_context_is_refused_before_compiling(model):
    before = programs.num_compiled()
    with pytest.raises(ValueError, match=r"tokens, more than the context of 60: .*--num_frames"):
        generate(model, ["What?"], [[Video(frames(8))]], options=RunOptions(2, context_limit=60))
    with pytest.raises(ValueError, match="too narrow"):
        generate(model, ["What?"], [[Video(frames(2, 1, 300))]])
    assert programs.num_compiled() == before


def test_videos_of_all_lengths_and_sizes_share_few_programs():
    """Shapes are planned without running a program, as in test_buckets.py."""
    backbone = Qwen3_VL.read(tiny_qwen3_config(qwen_tokenizer()), None)
    settings = QwenImageSettings(video=VideoSettings(512, 40_000))
    model = VLM(vlm.abstract_params(backbone), backbone, qwen_tokenizer(), settings)
    pruner, shapes, num_clips = build_pruner("vidcom2", "1/4"), set(), 0
    for count in range(1, 65, 3):
        for height, width in ((40, 40), (48, 80), (72, 64), (24, 160)):
            request = read_request(model, ["What?"], [[Video(frames(count, height, width))]])
            batch = plan_batch(model, pruner, request.prompts(), request.images, OPTIONS)
            inputs = pipeline.prepare_prefill(model, batch)
            leaves = jax.tree.leaves((inputs.tokens, inputs.layout))
            shapes.add((inputs.plan, *(leaf.shape for leaf in leaves)))
            num_clips += 1
    assert num_clips == 88 and len(shapes) <= 40


needs_av = pytest.mark.skipif(not importlib.util.find_spec("av"), reason="PyAV is not installed")


def run(folder, *arguments):
    flags = ("--max_tokens", 4, "--dtype", "float32")
    return status("stepprune-generate", main, "--model", folder, *flags, *arguments)


@needs_av
def test_the_command_reads_videos(folder, tmp_path, capsys):
    (tmp_path / "clip.mp4").write_bytes(make_clip(20, 10))
    video = ("--video", tmp_path / "clip.mp4", "--prompt", "What?", "--json")
    assert run(folder, *video, "--num_frames", 6, "--pruner", "evs", "--budget", "1/2") == 0
    result = json.loads(capsys.readouterr().out)
    patches, rows, columns = result["grids"][0]
    assert patches == 3 and result["kept"] == 3 * rows * columns // 2
    assert run(folder, *video, "--fps", 4) == 0
    assert json.loads(capsys.readouterr().out)["grids"][0][0] == 4


def test_the_command_refuses_bad_videos_in_one_line(folder, tmp_path, capsys):
    (tmp_path / "empty.mp4").write_bytes(b"")
    for arguments, message in (
        (("--video", tmp_path / "no.mp4"), "no video file at"),
        (("--video", tmp_path / "empty.mp4"), "is empty: it has 0 bytes"),
        (("--video", "x.mp4", "--fps", 0), "fps is 0.0, expected a rate above 0"),
        (("--video", "x.mp4", "--fps", 1000), "fps is 1000.0, expected"),
        (("--video", "x.mp4", "--num_frames", 10_000), "num_frames is 10000, expected 1 to 768"),
        (("--fps", 2), "--fps requires --video"),
    ):
        assert run(folder, "--prompt", "What?", *arguments) != 0
        problem = capsys.readouterr().err.strip()
        assert message in problem and "\n" not in problem
