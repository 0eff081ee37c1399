"""Videos in chat requests: files and frames, their sampling, faults, and batches that mix them."""

import base64
import concurrent.futures
import io
import json

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from PIL import Image
from servers import data_url, openai_client, run_server, user_message
from tiny_qwen import tiny_qwen3
from video_clips import make_clip
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.videos import Video
from stepprune_jax.inference import RunOptions, generate, pipeline, read_request
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models.qwen2_5_vl.images import VideoSettings
from stepprune_jax.registry import build_pruner
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.batching import Metrics
from stepprune_jax.serving.engine import embed_prompts
from stepprune_jax.serving.fields import RequestError
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import Defaults, RequestParser

pytest.importorskip("av")
CLIP = make_clip(20, 10, 40, 32)  # two seconds
SHORT_CLIP = make_clip(7, 4, 24, 48)
# Small videos, so that a tiny model compiles and runs quickly.
SMALL = VideoSettings(512, 8192)
LIMITS = RequestLimits(bytes=60_000, pixels=10_000, images=3)


def with_small_videos(model):
    return model._replace(image_settings=model.image_settings._replace(video=SMALL))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
    return with_small_videos(load_vlm(folder, dtype=jnp.float32, progress=False))


@pytest.fixture(scope="module")
def small_qwen(qwen_model):
    return with_small_videos(qwen_model)


@pytest.fixture(scope="module")
def parser(model):
    return make_parser(model)


def make_parser(model, limits=LIMITS, engine=False):
    positions = "compact" if engine else "own"
    return RequestParser(model, "tiny", Defaults(positions=positions), limits, engine=engine)


def file_url(content):
    return "data:video/mp4;base64," + base64.b64encode(content).decode()


def encode_frame(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def frames_url(images, kind="PNG"):
    return "data:video/jpeg;base64," + ",".join(encode_frame(image, kind) for image in images)


def video_message(text, *media):
    """Returns a user's message. Media are images and URLs of videos."""
    message = user_message(text)
    for medium in media:
        kind = "video_url" if isinstance(medium, str) else "image_url"
        url = medium if isinstance(medium, str) else data_url(medium)
        message["content"].append({"type": kind, kind: {"url": url}})
    return message


def parse(parser, *media, **fields):
    body = {"model": "tiny", "messages": [video_message("What?", *media)], **fields}
    return parser.parse(json.dumps(body).encode())


def sampling(**fields):
    return {"media_io_kwargs": {"video": fields}}


def assert_equal_requests(request, expected):
    assert (request.ids, request.image_of) == (expected.ids, expected.image_of)
    np.testing.assert_array_equal(request.images.grid, expected.images.grid)
    np.testing.assert_array_equal(request.images.pixels.values, expected.images.pixels.values)


FRAMES = [noise(seed, (40, 32)) for seed in range(5)]


@pytest.mark.parametrize(
    ("url", "fields", "video"),
    [
        (file_url(CLIP), {}, Video(CLIP)),
        (file_url(CLIP), {"fps": 4}, Video(CLIP, fps=4)),
        (file_url(CLIP), {"num_frames": 6}, Video(CLIP, num_frames=6)),
        (file_url(CLIP), {"num_frames": 3, "fps": 4}, Video(CLIP, num_frames=3)),
        (file_url(CLIP), {"num_frames": 9, "fps": 4}, Video(CLIP, fps=4)),
        (file_url(CLIP), {"num_frames": -1}, Video(CLIP, num_frames=20)),
        (file_url(CLIP), {"num_frames": -1, "fps": -1}, Video(CLIP, num_frames=20)),
        (file_url(CLIP).replace("+", "%2B"), {"fps": -1}, Video(CLIP)),
        (frames_url(FRAMES), {}, Video(FRAMES, fps=1)),
        (frames_url(FRAMES), {"fps": 2.5, "num_frames": 30}, Video(FRAMES, fps=2.5)),
        (frames_url(FRAMES), {"num_frames": 2}, Video(FRAMES, 1, 2)),
        ("file://clips/a%20clip.mp4", {}, Video(SHORT_CLIP)),
    ],
)
def test_a_video_is_read_as_by_generate(model, tmp_path, url, fields, video):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a clip.mp4").write_bytes(SHORT_CLIP)
    parser = make_parser(model, RequestLimits(60_000, 10_000, 2, tmp_path))
    request = parse(parser, url, **sampling(**fields)).request
    assert_equal_requests(request, read_request(model, ["What?"], [[video]]))


def test_videos_and_images_keep_their_order_in_all_turns(model, parser):
    messages = [
        video_message("First?", noise(1), file_url(CLIP)),
        {"role": "assistant", "content": "yes"},
        video_message("Second?", file_url(SHORT_CLIP)),
    ]
    body = {"model": "tiny", "messages": messages}
    request = parser.parse(json.dumps(body).encode()).request
    turns = ["<image><image>First?", "yes", "<image>Second?"]
    media = [noise(1), Video(CLIP), Video(SHORT_CLIP)]
    assert_equal_requests(request, read_request(model, [turns], [media]))


SOUND = make_clip(0, audio=20)
LARGE_FRAME = frames_url([Image.new("RGB", (101, 100))])
# A complete header, and less than half of the pixels.
CUT_FRAME = "data:video/jpeg;base64," + encode_frame(noise(1, (90, 90)), "JPEG")[:2000]


@pytest.mark.parametrize(
    ("url", "fields", "status", "field", "words"),
    [
        (file_url(CLIP[:-400]), {}, 400, "messages", "video_url.url: the video is damaged"),
        (file_url(b""), {}, 400, "messages", "the video is empty: it has 0 bytes"),
        (file_url(b"text" * 99), {}, 400, "messages", "is not a video that FFmpeg reads"),
        (file_url(SOUND), {}, 400, "messages", "has no video stream, only audio"),
        (file_url(make_clip(2, 1, 128, 96)), {}, 400, "messages", "frames of 128 x 96 pixels"),
        ("data:video/mp4;base64,%%", {}, 400, "messages", "is not valid base64"),
        ("https://x.org/a.mp4", {}, 400, "messages", "web addresses are not fetched"),
        ("file:///etc/passwd", {}, 400, "messages", "expected data:video/mp4;base64"),
        (data_url(noise(1)), {}, 400, "messages", "expected data:video/mp4;base64"),
        (frames_url(FRAMES[:1]) + ",AAAA" * 768, {}, 400, "messages", "has 769 frames, expected"),
        (frames_url(FRAMES) + ",AAAA", {}, 400, "messages", "frame 5 is damaged or in another"),
        (frames_url(FRAMES) + ",", {}, 400, "messages", "frame 5 is damaged or in another"),
        (frames_url([noise(1), noise(1, (9, 9))]), {}, 400, "messages", "frame 1 is 9 x 9, exp"),
        (LARGE_FRAME, {}, 413, "messages", "frame 0 has more than 10000 pixels"),
        (CUT_FRAME, {}, 400, "messages", "is a damaged image"),
        (file_url(CLIP), {"num_frames": 769}, 400, "media_io_kwargs", "num_frames is 769, expec"),
        (file_url(CLIP), {"num_frames": 0}, 400, "media_io_kwargs", "num_frames is 0, expected 1"),
        (file_url(CLIP), {"fps": 0}, 400, "media_io_kwargs", "media_io_kwargs.video.fps is 0, e"),
        (file_url(CLIP), {"fps": 1000}, 400, "media_io_kwargs", "above 0, up to 240"),
        (file_url(CLIP), {"fps": True}, 400, "media_io_kwargs", "fps is True, expected a rate"),
        (file_url(CLIP), {"frames": 3}, 400, "media_io_kwargs", "Did you mean num_frames?"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_faults_are_errors_of_one_line(parser, url, fields, status, field, words):
    with pytest.raises(RequestError) as caught:
        parse(parser, url, **sampling(**fields))
    error = caught.value
    assert (error.status, error.field) == (status, field) and words in error.message, error.message
    assert "\n" not in error.message and len(error.message) < 400


def test_a_server_may_lack_what_a_video_needs(parser, llava_model, monkeypatch, tmp_path):
    def message(parser, *media, **fields):
        with pytest.raises(RequestError) as caught:
            parse(parser, *media, **fields)
        assert caught.value.status == 400
        return caught.value.message

    url = file_url(CLIP)
    assert message(parser, *[url] * 4).endswith("at most 3 images and videos in all messages")
    assert "holov prunes images only, and no videos" in message(
        parser, url, pruner="holov", budget=4
    )
    refusal = message(make_parser(llava_model), url)
    assert "reads images only, and no videos; Qwen2.5-VL and Qwen3-VL" in refusal
    (tmp_path / "long.mp4").write_bytes(make_clip(300, 30, 24, 24))
    few_bytes = make_parser(parser.model, RequestLimits(100, 10_000, 2, tmp_path))
    with pytest.raises(RequestError, match="a file of more than 100 bytes"):
        parse(few_bytes, "file://long.mp4")
    monkeypatch.setattr("stepprune_jax.serving.videos.MAX_FRAMES", 10)
    assert "has 20 frames, expected at most 10 to read" in message(
        parser, url, **sampling(num_frames=-1)
    )
    monkeypatch.setattr(type(parser.model.backbone), "CONTEXT_LIMIT", 60)
    assert message(parser, url).endswith("(media_io_kwargs) or keep fewer tokens (budget)")
    assert parse(parser, url, pruner="divprune", budget=4).request.images is not None
    monkeypatch.setattr("stepprune_jax.extras.find_spec", lambda _: None)
    assert "PyAV is not installed: send frames as" in message(parser, url)


def test_requests_that_arrive_together_have_the_answers_of_generate(model):
    """Videos, images and text arrive at once. A truncated video fails without its neighbors."""
    pruner, metrics = "vidcom2", Metrics()
    defaults = Defaults(pruner=pruner, budget="1/2")
    parser = RequestParser(model, "tiny", defaults, LIMITS, engine=False)
    backend = LocalBackend(model, metrics, batch_size=4, batch_seconds=0.3)
    app = ChatApp(parser, backend, metrics, 16).app()
    media = [[CLIP], [noise(2), SHORT_CLIP], [noise(3)], [], [CLIP[:-400]]]
    fields = {"return_token_ids": True, "return_kept_tokens": True}

    def ask(client, media):
        urls = [file_url(item) if isinstance(item, bytes) else item for item in media]
        try:
            return client.chat.completions.create(
                model="tiny",
                messages=[video_message("What?", *urls)],
                max_tokens=4,
                extra_body=fields,
            )
        except openai.BadRequestError as error:
            return error

    threads = concurrent.futures.ThreadPoolExecutor(len(media))
    with run_server(app) as address, openai_client(address) as client, threads:
        *replies, error = threads.map(lambda item: ask(client, item), media)
    assert "the video is damaged" in str(error)
    for reply, items in zip(replies, media[:-1], strict=True):
        videos = [Video(item) if isinstance(item, bytes) else item for item in items]
        (expected,) = generate(
            model,
            ["What?"],
            [videos],
            build_pruner(pruner, "1/2"),
            options=RunOptions(4),
        )
        assert tuple(reply.choices[0].token_ids) == expected.token_ids
        assert [tuple(kept["grid"]) for kept in reply.kept_tokens] == [*expected.grids]
        assert [tuple(kept["cells"]) for kept in reply.kept_tokens] == [*expected.kept_indices]
    assert [len(kept["grid"]) for kept in replies[1].kept_tokens] == [2, 3]


def test_an_engine_receives_the_kept_tokens_of_videos(small_qwen):
    """A batch has a video, and an image beside a shorter video."""
    parser = make_parser(small_qwen, engine=True)
    fields = {"pruner": "vidcom2", "budget": "1/3"}
    media = [[noise(1), SHORT_CLIP], [CLIP, noise(2)]]
    urls = [[file_url(x) if isinstance(x, bytes) else x for x in items] for items in media]
    rows = embed_prompts(small_qwen, [parse(parser, *items, **fields) for items in urls])
    pruner, options = build_pruner("vidcom2", "1/3"), RunOptions(positions="compact")
    for row, items in zip(rows, media, strict=True):
        videos = [Video(item) if isinstance(item, bytes) else item for item in items]
        request = read_request(small_qwen, ["What?"], [videos])
        encoded = pipeline.encode(small_qwen, request.images)
        batch = plan_batch(small_qwen, pruner, request.prompts(), encoded, options)
        inputs = pipeline.prepare_prefill(small_qwen, batch)
        expected = pipeline.build_rows(small_qwen, inputs)
        length = int(expected.length[0])
        assert row.start.kept == int(inputs.num_kept[0]) < row.start.visual_tokens
        np.testing.assert_allclose(row.embeddings, expected.hidden[0, :length], atol=1e-5)
