"""Video files: times, rotation and damage; needs PyAV, which the extra ``[video]`` installs."""

import io
import re
import struct
import time
import tracemalloc
from importlib import import_module

import numpy as np
import pytest
from PIL import Image
from video_clips import make_clip

from stepprune_jax.data import videos
from stepprune_jax.data.videos import Video, open_video

needs_av = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("av"), reason="PyAV is not installed"
)


def brightness(frame):
    """Returns the index of a frame of `make_clip` from its lower right quarter."""
    corner = frame[frame.shape[0] * 3 // 4 :, frame.shape[1] * 3 // 4 :]
    return round((float(corner.mean()) - 10) / 20)


@needs_av
def test_frames_and_times_of_a_file_are_read(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_clip(10, 5))
    for source in (path, str(path), path.read_bytes()):
        frames = open_video(Video(source))
        assert frames.is_steady and frames.rate == pytest.approx(5)
        np.testing.assert_allclose(frames.times, np.arange(10) / 5)
        indices = np.array([0, 3, 3, 4, 9])
        read = list(frames.read(indices))
        assert [brightness(frame) for frame in read] == indices.tolist()
        assert {frame.shape for frame in read} == {(48, 64, 3)}


@needs_av
def test_variable_rates_are_sampled_by_time():
    seconds = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 2.0, 3.0, 4.0, 5.0]
    frames = open_video(Video(make_clip(10, 10, times=seconds, container="matroska")))
    assert not frames.is_steady
    np.testing.assert_allclose(frames.times, seconds, atol=2e-3)
    # Index i is mapped to the time 5 i / 9.
    index = frames.nearest(np.array([0, 2, 4, 5, 7, 9]))
    np.testing.assert_allclose(frames.times[index], [0, 0.5, 2, 3, 4, 5], atol=2e-3)
    assert [brightness(frame) for frame in frames.read(index)] == [0, 5, 6, 7, 8, 9]


@needs_av
@pytest.mark.parametrize("container", ["matroska", "mpegts", "avi"])
def test_headers_without_a_number_of_frames_are_no_problem(container):
    frames = open_video(Video(make_clip(9, 10, container=container)))
    assert len(frames.times) == 9
    assert brightness(next(frames.read(np.array([8])))) == 8


@needs_av
def test_rotated_clips_are_read_as_shown():
    clip = bytearray(make_clip(2))
    matrix = clip.index(b"tkhd") + 44
    fixed = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]  # a quarter turn clockwise
    clip[matrix : matrix + 36] = struct.pack(">9i", *fixed)
    frame = next(open_video(Video(bytes(clip))).read(np.array([0])))
    assert frame.shape == (64, 48, 3)
    quarters = [frame[:32, :24], frame[:32, 24:], frame[32:, :24], frame[32:, 24:]]
    # The white quarter moves from the upper left to the upper right.
    assert [quarter.mean() > 200 for quarter in quarters] == [False, True, False, False]


@needs_av
def test_damaged_files_are_refused_in_one_line(tmp_path):
    clip, sound = make_clip(20, container="matroska"), make_clip(0, audio=4)
    page = b"<!doctype html><html>no video</html>" * 10
    for content, message in (
        (b"", "is empty: it has 0 bytes"),
        (page, "is damaged, or is not a video that FFmpeg reads"),
        (make_clip(20)[:600], "is damaged, or is not a video that FFmpeg reads"),
        (sound, "has no video stream, only audio"),
    ):
        path = tmp_path / "clip.mp4"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            open_video(Video(path))
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    assert len(open_video(Video(clip)).times) == 20
    with pytest.raises(FileNotFoundError, match="no video file at nowhere"):
        open_video(Video("nowhere.mp4"))


@needs_av
def test_a_truncated_clip_is_refused(tmp_path):
    """The header at the start of the file declares more frames."""
    av = import_module("av")
    path = tmp_path / "clip.mp4"
    with (
        av.open(io.BytesIO(make_clip(40, 10))) as source,
        av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    content = path.read_bytes()
    frames = open_video(Video(content))
    assert len(frames.times) == 40
    with pytest.raises(ValueError, match=r"the video is (truncated|damaged)") as error:
        frames = open_video(Video(content[: len(content) * 2 // 3]))
        list(frames.read(np.arange(len(frames.times))))
    assert "\n" not in str(error.value)


@needs_av
def test_seeking_reads_few_frames_of_a_long_clip():
    clip = make_clip(600, 30)
    tracemalloc.start()
    start = time.perf_counter()
    frames = open_video(Video(clip))
    read = [brightness(frame) for frame in frames.read(np.array([0, 300, 599]))]
    assert read == [0, 0, 11] and time.perf_counter() - start < 20
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 0}, "fps is 0, expected a rate above 0, up to 240"),
        ({"fps": 1000}, "fps is 1000, expected a rate above 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"num_frames": 0}, "num_frames is 0, expected 1 to 768"),
        ({"num_frames": 100_000}, "num_frames is 100000, expected 1 to 768"),
        ({"fps": 1, "num_frames": 4}, "fps and num_frames are both set"),
    ],
)
def test_rates_and_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Video("clip.mp4", **options)


def test_frames_in_memory_are_arrays_or_pillow_images():
    array = np.arange(4 * 6 * 8 * 3, dtype=np.uint8).reshape(4, 6, 8, 3)
    for source in (array, list(array), [Image.fromarray(frame) for frame in array]):
        frames = open_video(Video(source, fps=2))
        np.testing.assert_allclose(frames.times, [0, 0.5, 1, 1.5])
        np.testing.assert_array_equal(list(frames.read(np.array([1, 3]))), array[[1, 3]])
    assert open_video(Video(array)).rate == 24


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 6, 8)), r"float64 array of shape \[4, 6, 8\], expected uint8"),
        (np.zeros((4, 3, 6, 8), np.uint8), "expected uint8"),
        (np.zeros((0, 6, 8, 3), np.uint8), "has 0 frames, expected 1 to 768"),
        (np.zeros((769, 1, 1, 3), np.uint8), "has 769 frames, expected 1 to 768"),
        ([np.zeros((6, 8), np.uint8)], "frame 0 of the video: the array is uint8"),
        ([], "has 0 frames"),
    ],
)
def test_frames_of_another_type_are_refused(source, message):
    with pytest.raises(ValueError, match=message) as error:
        list(open_video(Video(source)).read(np.array([0])))
    assert "\n" not in str(error.value)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"expected a video as a path|source"):
        Video(3)
    with pytest.raises(TypeError, match=r"expected frames as Pillow images|source"):
        list(open_video(Video(["x.png"])).read(np.array([0])))


def test_huge_frames_are_refused(monkeypatch):
    monkeypatch.setattr(videos, "MAX_FRAME_PIXELS", 100)
    with pytest.raises(ValueError, match="20 x 10 pixels, expected 1 to 100 pixels"):
        list(open_video(Video(np.zeros((1, 10, 20, 3), np.uint8))).read(np.array([0])))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("stepprune_jax.extras.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install .*\[video\]"):
        open_video(Video(b"clip"))
