"""Videos of Qwen2.5-VL and Qwen3-VL equal `transformers`: frames, pixels, positions, answers."""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
import video_reference
from hf_reference import assert_close, make_pair
from tiny_qwen import tiny_qwen, tiny_qwen3
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata
from visual import noise

from stepprune_jax.data.videos import Video
from stepprune_jax.inference import RunOptions, Sampling, generate, trace_arrays
from stepprune_jax.models.qwen2_5_vl.images import VideoSettings
from stepprune_jax.models.qwen2_5_vl.videos import sample_by_linspace, sample_by_steps
from stepprune_jax.models.resampling import resize_like_torch

STEPS = 5
FAMILIES = {
    "qwen2_5_vl": (tiny_qwen, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (tiny_qwen3, transformers.Qwen3VLForConditionalGeneration),
}


class Family(NamedTuple):
    pair: Any
    is_qwen3: bool


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("qwen2_5_vl", marks=pytest.mark.supports("qwen2_5_vl", "video")),
        pytest.param("qwen3_vl", marks=pytest.mark.supports("qwen3_vl", "video")),
    ],
)
def family(request, tmp_path_factory):
    """A tiny model in both implementations; videos and images have different limits of the area."""
    write, kind = FAMILIES[request.param]
    folder = write(tmp_path_factory.mktemp(request.param))
    is_qwen3 = request.param == "qwen3_vl"
    # Qwen3-VL limits the area of all frames together, Qwen2.5-VL the area of each frame.
    size = {"shortest_edge": 512, "longest_edge": 8192 if is_qwen3 else 1536}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return Family(make_pair(kind, folder), is_qwen3)


def frames(seed, count, height, width):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


# Cases of a prompt: media as (frames, height, width, rate) or the size of an image.
CASES = {
    "one frame": [(1, 40, 40, 2)],
    "two frames": [(2, 40, 56, 2)],
    "three frames": [(3, 48, 32, 2)],
    "four frames, unknown rate": [(4, 32, 48, None)],
    "five frames": [(5, 33, 47, 1)],
    "six frames, half a second": [(6, 24, 64, 0.5)],
    "seven frames": [(7, 40, 24, 10)],
    "thirty-two frames": [(32, 17, 23, 4)],
    "narrow frames": [(4, 12, 90, 2)],
    "tiny frames": [(2, 5, 9, 2)],
    "two videos": [(3, 24, 32, 2), (4, 40, 40, 1)],
    "video and image": [(4, 32, 32, 2), (30, 40)],
    "image and video": [(40, 24), (5, 24, 40, 8)],
    "slow video": [(4, 24, 32, 0.1)],
}


class Case(NamedTuple):
    """A prompt for both implementations.

    Attributes:
        media: our images and videos.
        inputs: the reference's inputs.
    """

    media: list[Any]
    inputs: dict[str, torch.Tensor]


def make_case(family, name):
    """Builds the inputs of both implementations for a case of `CASES`."""
    pair, is_qwen3 = family
    config, settings = pair.model.config, pair.model.image_settings.video
    media, text, videos, images = [], "", [], []
    for number, size in enumerate(CASES[name]):
        if len(size) == 2:
            images.append(noise(number, size))
            media.append(images[-1])
            grid = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)(
                images[-1:], return_tensors="pt"
            )["image_grid_thw"]
            pads = "<|image_pad|>" * (int(grid.prod()) // config.vision.unit)
            text += f"<|vision_start|>{pads}<|vision_end|>"
            continue
        count, height, width, rate = size
        array = frames(number, count, height, width)
        media.append(Video(array, fps=rate))
        # The reference refuses a single frame of Qwen3-VL; two equal frames are its meaning.
        input_frames = np.repeat(array, 2, axis=0) if count == 1 else array
        indices = [0, 0] if count == 1 else list(range(count))
        metadata = VideoMetadata(
            count, rate or video_reference.DEFAULT_RATE, frames_indices=indices
        )
        if count == 1:
            metadata.total_num_frames = 2
        processed = video_reference.process(is_qwen3, config, settings, input_frames, metadata)
        if count == 1:  # both frames are at the time 0, in one second of the rate
            processed = processed._replace(seconds=2 / metadata.fps)
        videos.append(processed)
        text += video_reference.video_text(is_qwen3, processed, config.vision.unit)
    system = "" if is_qwen3 else "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    prompt = f"{system}<|im_start|>user\n{text}What?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([pair.model.tokenizer(prompt).input_ids])
    video_id = pair.torch.config.video_token_id
    kinds = (ids == config.image_token_id).int() + 2 * (ids == video_id).int()
    inputs = {"input_ids": ids, "mm_token_type_ids": kinds}
    if images:
        processed = Qwen2VLImageProcessorPil.from_pretrained(pair.folder)(
            images, return_tensors="pt"
        )
        inputs |= {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
    if videos:
        inputs["pixel_values_videos"] = torch.cat([video.pixels for video in videos])
        inputs["video_grid_thw"] = torch.cat([video.grid for video in videos])
        if not is_qwen3:
            inputs["second_per_grid_ts"] = torch.tensor([video.seconds for video in videos])
    return Case(media, inputs)


@pytest.fixture(scope="module")
def answered(family):
    """Answers all cases as one batch, and returns the cases, the answers and the trace."""
    cases = [make_case(family, name) for name in CASES]
    traces = []
    answers = generate(
        family.pair.model,
        ["What?"] * len(cases),
        [case.media for case in cases],
        sampling=Sampling(stop_ids=()),
        options=RunOptions(STEPS),
        trace=traces.append,
    )
    return cases, answers, traces[0]


def test_pixels_equal_the_reference_bit_for_bit(family):
    backbone, settings = family.pair.model.backbone, family.pair.model.image_settings
    for name in CASES:
        case = make_case(family, name)
        clips = [
            backbone.read_video(settings, video) for video in case.media if isinstance(video, Video)
        ]
        ours = []
        for clip in clips:
            values = backbone.normalise(clip.pixels).values
            num_patches = int(clip.pixels.grid[0].prod()) * backbone.config.vision.unit
            assert not values[:, num_patches:].any()
            # The reference's values run over (channel, frame, row and column).
            values = values[:, :num_patches].reshape(-1, 2, 3, 16).transpose(0, 2, 1, 3)
            ours.append(values.reshape(-1, 96))
        theirs = case.inputs["pixel_values_videos"].numpy()
        np.testing.assert_array_equal(np.concatenate(ours), theirs, err_msg=name)


def test_positions_and_logits_equal_the_reference(family, answered):
    pair, (cases, _, trace) = family.pair, answered
    for row, (name, case) in enumerate(zip(CASES, cases, strict=True)):
        arrays = trace_arrays(trace, row)
        inputs = {key: value for key, value in case.inputs.items() if "pixel" not in key}
        pair.torch.model.rope_deltas = None
        position, _ = pair.torch.model.get_rope_index(**inputs)
        np.testing.assert_array_equal(arrays["position_0"], position[:, 0], err_msg=name)
        logits = pair.torch(**case.inputs).logits[0, -1]
        assert_close(arrays["logits"], logits, what=name)


def test_greedy_answers_equal_the_reference(family, answered):
    pair, (cases, answers, _) = family.pair, answered
    for name, case, answer in zip(CASES, cases, answers, strict=True):
        pair.torch.model.rope_deltas = None
        output = pair.torch.generate(
            **case.inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None
        )
        length = case.inputs["input_ids"].shape[1]
        assert list(answer.token_ids) == output[0, length:].tolist(), name


def test_grids_name_the_temporal_patches_of_a_video(family, answered):
    _, (cases, answers, _) = family.pair, answered
    case = list(CASES).index("video and image")
    expected = cases[case].inputs["video_grid_thw"][0].numpy() // (1, 2, 2)
    assert answers[case].grids[0] == tuple(expected.tolist())
    assert len(answers[case].grids[1]) == 2
    assert answers[case].visual_tokens == sum(map(np.prod, answers[case].grids))


def test_sampled_frames_equal_the_reference(family):
    settings, rule = VideoSettings(), sample_by_linspace if family.is_qwen3 else sample_by_steps
    for total in (4, 5, 7, 16, 30, 97, 1000, 40_000):
        for rate in (1.0, 10.0, 23.976, 30.0):
            for fps in (0.5, 1.0, 2.0, 7.3):
                ours = rule(settings, total, rate, Video("x.mp4", fps=fps)).tolist()
                theirs = video_reference.sample(family.is_qwen3, total, rate, settings, fps=fps)
                assert ours == theirs, (total, rate, fps)
        for count in (2, 3, 4, 8, 32):
            if count <= total - 1:
                ours = rule(settings, total, 30.0, Video("x.mp4", num_frames=count)).tolist()
                theirs = video_reference.sample(
                    family.is_qwen3, total, 30.0, settings, num_frames=count
                )
                assert ours == theirs, (total, count)


@pytest.mark.parametrize(
    ("old", "new"), [((50, 70), (48, 64)), ((33, 90), (64, 160)), ((9, 200), (9, 64))]
)
def test_frames_are_resized_with_the_bytes_of_torch(old, new):
    frame = frames(3, 1, *old)
    tensor = torch.from_numpy(frame).permute(0, 3, 1, 2)
    theirs = torch.nn.functional.interpolate(tensor, size=new, mode="bicubic", antialias=True)
    np.testing.assert_array_equal(resize_like_torch(frame[0], *new), theirs[0].numpy())
