"""Videos in the plugin inside vLLM: greedy ids equal the ids of `generate`.

vLLM gets frames in memory of sizes that need no resizing, so both programs read equal pixels. It
answers eight prompts at once, computes prompts in chunks that split videos, and caches prefixes.
"""

import base64
import contextlib
import dataclasses
import io
import json

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from plugin_runs import MAX_TOKENS, QWEN_CHAT, ask_vllm, expected_answers, wide_qwen3
from servers import openai_client, user_message
from small_world import TEXTS, stepprune
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.data.videos import Video
from stepprune_jax.inference.request import read_request
from stepprune_jax.integrations.vllm_plugin import VARIABLE
from tools.bench.vllm_server import Vllm

NUM_PROMPTS = 24
ALL = {"pruner": "all", "budget": "all"}
RANDOM = {"pruner": "random", "budget": 5}
# Frames, height and width of clips. An odd number of frames repeats the last one.
SHAPES = ((5, 32, 16), (8, 24, 24), (9, 16, 24), (6, 16, 32), (3, 32, 32))
# The largest area of a frame of Qwen2.5-VL, and of all frames of Qwen3-VL.
MAX_AREA = {"qwen2_5_vl": 2304, "qwen3_vl": 16384}


@dataclasses.dataclass(frozen=True)
class Clip:
    """A file of frames, and their rate."""

    path: str
    fps: float


@dataclasses.dataclass(frozen=True)
class Question:
    """A text, with paths of images and videos in the order of their places."""

    text: str
    media: tuple[str | Clip, ...]


def as_medium(medium):
    """Returns an image or a video as `generate` takes it."""
    if isinstance(medium, Clip):
        return Video(np.load(medium.path), fps=medium.fps)
    return medium


def as_prompt(model, question, stand_in):
    """Returns a question as `plugin_process.py` reads it.

    A video is one id of the prompt. `generate` has no marks around the times of Qwen3-VL.
    """
    request = read_request(model, [question.text], [[stand_in] * len(question.media)])
    video_id = model.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    drops_marks, ids, media = model.backbone.MARKS_PATCHES, [], iter(question.media)
    is_end_mark = False
    for token in request.ids[0]:
        if is_end_mark:
            is_end_mark = False
        elif token >= 0:
            ids.append(token)
        elif isinstance(next(media), str):
            ids.append(model.config.image_token_id)
        else:
            if drops_marks:
                ids.pop()
            ids.append(video_id)
            is_end_mark = drops_marks
    return {
        "ids": ids,
        "images": [medium for medium in question.media if isinstance(medium, str)],
        "videos": [
            {"path": medium.path, "fps": medium.fps}
            for medium in question.media
            if isinstance(medium, Clip)
        ],
    }


def make_run(model, setting, questions):
    stand_in = noise(0, (16, 16))
    prompts = [as_prompt(model, question, stand_in) for question in questions]
    return {"setting": setting, "max_tokens": MAX_TOKENS, "prompts": prompts}


def write_questions(folder, rates):
    """Writes random clips and asks two random questions about each; some prompts have an image.

    The lower half of a clip does not change, so methods that compare frames drop something.
    """
    random, questions, clips = np.random.default_rng(3), [], []
    image = str(folder / "image.png")
    noise(1000, (32, 24)).save(image)
    for number in range(NUM_PROMPTS // 2):
        num_frames, height, width = SHAPES[number % len(SHAPES)]
        frames = np.tile(random.integers(0, 256, (1, height, width, 3)), (num_frames, 1, 1, 1))
        changed = random.integers(0, 256, frames.shape)
        frames[:, : height // 2] = changed[:, : height // 2]
        path = folder / f"{number}.npy"
        np.save(path, frames.astype(np.uint8))
        clips.append(Clip(str(path), rates[number % len(rates)]))
        clip, first = clips[-1], clips[0]
        media = ((clip,), (image, clip), (clip, image), (clip, first))[number % 4]
        for text in random.choice(TEXTS, 2, replace=False):
            questions.append(Question(str(text), media))
    return questions


def with_video_processor(folder, largest_area):
    """Writes the file of the video processor with limits that the clips of the tests observe."""
    model = load_vlm(folder, use="embeddings", progress=False)
    settings = model.image_settings
    video = settings.video._replace(min_pixels=256, max_pixels=largest_area)
    for name, content in model.backbone.hf_processor(settings._replace(video=video)).items():
        if name.startswith("video"):
            # As in published files of Qwen2.5-VL: otherwise vLLM samples the frames again.
            (folder / name).write_text(json.dumps(content | {"do_sample_frames": False}))
    return folder


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def family(request, tmp_path_factory, wide_qwen):
    """The folder of a model, a policy, and rates of frames.

    In `transformers` and `generate`, the text after a video of Qwen2.5-VL continues by its rows and
    columns; in vLLM, also by its time. At these rates both are equal.
    """
    folder = tmp_path_factory.mktemp(request.param)
    policy = folder / "policy.safetensors"
    save_policy(stepprune(feature_width=64, text_width=64, draw=0.0).replace(stats=None), policy)
    if request.param == "qwen2_5_vl":
        model, rates = wide_qwen, (24.0, 30.0)
    else:
        model, rates = wide_qwen3(folder / "model"), (2.0, 24.0, 1.3)
    return with_video_processor(model, MAX_AREA[request.param]), str(policy), rates


@pytest.mark.filterwarnings("ignore:(evs|frames) keeps")
def test_answers_about_videos_equal_those_of_generate(family, tmp_path):
    folder, policy, rates = family
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    questions = write_questions(tmp_path, rates)
    settings = [
        {"pruner": "evs", "budget": "1/2"},
        {"pruner": "vidcom2", "budget": "1/3"},
        {"pruner": "vcast", "budget": 9},
        {"pruner": "frames", "budget": "1/2"},
        {"pruner": "grid", "budget": 5},
        {"pruner": "divprune", "budget": "1/4"},
        {"pruner": "cdpruner", "budget": 7},
        {"policy": policy, "budget": 6},
    ]
    # vLLM's rule for the text after a video differs from ours at slow rates, see `family`.
    (tmp_path / "slow").mkdir()
    slow_questions = write_questions(tmp_path / "slow", [0.05])
    # The last setting is asked twice, so that vLLM caches prompts.
    runs = [
        make_run(model, ALL, questions + slow_questions),
        *(make_run(model, setting, questions) for setting in (*settings, settings[-1], RANDOM)),
    ]
    unpruned, *pruned, repeated, random = ask_vllm(tmp_path, folder, runs)
    (alone,) = ask_vllm(tmp_path, folder, [make_run(model, None, questions + slow_questions)])
    assert unpruned["token_ids"] == alone["token_ids"]
    assert unpruned["num_prompt_tokens"] == alone["num_prompt_tokens"]
    # `random` has the same counts as `grid`; `generate` draws other tokens.
    assert random["num_prompt_tokens"] == pruned[4]["num_prompt_tokens"]
    assert random["token_ids"] != pruned[4]["token_ids"]
    assert repeated["token_ids"] == pruned[-1]["token_ids"]
    assert sum(repeated["num_cached_tokens"]) > sum(pruned[-1]["num_cached_tokens"])
    for setting, answers in zip([ALL, *settings], [unpruned, *pruned], strict=True):
        expected = expected_answers(
            model,
            setting,
            [question.text for question in questions],
            [[*map(as_medium, question.media)] for question in questions],
            "original",
        )
        different = [
            (setting, question, token_ids, answer)
            for question, token_ids, answer in zip(
                questions, answers["token_ids"][:NUM_PROMPTS], expected, strict=True
            )
            if tuple(token_ids) != answer.token_ids
        ]
        assert not different, f"{len(different)} of {NUM_PROMPTS}: {different[0]}"
        num_dropped = [answer.visual_tokens - answer.kept for answer in expected]
        all_lengths, lengths = (
            np.array(run["num_prompt_tokens"][:NUM_PROMPTS]) for run in (alone, answers)
        )
        np.testing.assert_array_equal(lengths, all_lengths - num_dropped)
        if setting == settings[-1]:
            # Two questions about one video keep two sets.
            pairs = zip(expected[::2], expected[1::2], strict=True)
            assert any(first.kept_indices != second.kept_indices for first, second in pairs)


@contextlib.contextmanager
def serve(folder, log, setting):
    """Runs a server with the plugin, and yields a function that asks it about media."""
    flags = ("--dtype", "float32", "--enforce-eager", *QWEN_CHAT)
    settings = {VARIABLE: json.dumps(setting)}
    with (
        Vllm(folder, log, *flags, settings=settings) as engine,
        openai_client(engine.address) as client,
    ):

        def ask(images=(), videos=()):
            message = user_message("red", *images)
            for frames in videos:
                url = f"data:video/jpeg;base64,{','.join(frames)}"
                message["content"].append({"type": "video_url", "video_url": {"url": url}})
            answer = client.chat.completions.create(
                model=engine.name, messages=[message], max_tokens=2
            )
            return answer.usage.prompt_tokens

        yield ask


def jpeg_frames(num_frames):
    frames = []
    for seed in range(num_frames):
        file = io.BytesIO()
        noise(seed, (32, 32)).save(file, "JPEG")
        frames.append(base64.b64encode(file.getvalue()).decode())
    return frames


def test_a_server_prunes_the_videos_of_requests(tmp_path, wide_qwen):
    folder = with_video_processor(wide_qwen, MAX_AREA["qwen2_5_vl"])
    with serve(folder, tmp_path / "log", {"pruner": "grid", "budget": 5}) as ask:
        num_text_tokens = ask()
        # Five kept tokens and two marks.
        assert ask(videos=[jpeg_frames(4)]) == num_text_tokens + 7
        assert ask([noise(1, (48, 48))], [jpeg_frames(9)]) == num_text_tokens + 14


def test_a_server_refuses_videos_under_a_method_of_images(tmp_path, wide_qwen):
    with serve(wide_qwen, tmp_path / "log", {"pruner": "visionzip", "budget": 6}) as ask:
        assert ask([noise(1, (48, 48))]) == ask() + 8
        with pytest.raises(openai.BadRequestError, match="visionzip prunes images only"):
            ask(videos=[jpeg_frames(4)])
