"""Videos as arguments of prompts, and the frames of video files.

Files are read by PyAV (the extra ``[video]``). Frames in memory need no further package.
"""

import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from stepprune_jax.data.images import open_image
from stepprune_jax.extras import need
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError, expect, naming

# Most frames that are sampled from a video: the limit of Qwen's video processors.
MAX_FRAMES = 768
# Highest rate in frames per second. Cameras record up to 240 frames a second.
MAX_FPS = 240.0
# Largest frame in pixels, slightly more than 8K (7680 x 4320). A frame takes three bytes a pixel.
MAX_FRAME_PIXELS = 1 << 25
# Most frames of a file. The times of all frames are read before the first frame is decoded.
MAX_FILE_FRAMES = 1_000_000
# Rate of frames in memory whose rate is unknown, as in `transformers`.
DEFAULT_RATE = 24.0

Frame = UInt8[np.ndarray, "height width 3"]
FramesLike = np.ndarray | Sequence[Image.Image | np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """A video of a prompt, for models that read videos: Qwen2.5-VL and Qwen3-VL.

    Attributes:
        source: a file (its path, or its bytes), or frames in memory: an array [n, height, width, 3]
            of uint8, or a list of Pillow images or arrays [height, width, 3].
        fps: for a file, the number of frames to sample per second; by default, the rate of the
            model's video processor, usually 2. For frames in memory, the rate at which they were
            recorded or sampled; all frames are used.
        num_frames: number of frames to sample, evenly spaced in time. Not for files with `fps`. A
            video with fewer frames is used entirely.

    Raises:
        TypeError: the source has another type.
        ValueError: `fps` or `num_frames` is out of range, or both are set for a file.
    """

    source: str | Path | bytes | FramesLike
    fps: float | int | None = None
    num_frames: int | None = None

    def __post_init__(self):
        fps, num_frames = self.fps, self.num_frames
        is_rate = isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps <= MAX_FPS
        expect("fps", fps, fps is None or is_rate, f"a rate above 0, up to {MAX_FPS:g}")
        is_number = num_frames is None or (is_count(num_frames) and num_frames <= MAX_FRAMES)
        expect("num_frames", num_frames, is_number, f"1 to {MAX_FRAMES}")
        if self.is_file and fps is not None and num_frames is not None:
            raise UserError("fps and num_frames are both set, expected one of them for a file")
        if not self.is_file and not isinstance(self.source, np.ndarray | list | tuple):
            kind = type(self.source).__name__
            raise TypeError(f"expected a video as a path, bytes or frames, got {kind}")

    @property
    def is_file(self) -> bool:
        """Whether the source is a file or the bytes of a file."""
        return isinstance(self.source, str | Path | bytes)

    @property
    def name(self) -> str:
        """The path of the file, or "the video"."""
        return str(self.source) if isinstance(self.source, str | Path) else "the video"

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that two videos share if they have the same source and the same settings."""
        source = self.source
        key = str(source) if isinstance(source, Path) else source if self.is_file else id(source)
        return "video", key, self.fps, self.num_frames


class NoVideosError(UserError):
    """Raised for a video if the model reads images only."""


class ClipShape(NamedTuple):
    """The times and the sizes of the sampled frames of a video.

    `Backbone.inspect_video` creates it and decodes one frame for it. Training plans its batches
    with it, before any video is read entirely.

    Attributes:
        times: time of each temporal patch in seconds.
        grid: rows and columns of the visual tokens of a temporal patch.
    """

    times: tuple[float, ...]
    grid: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        """Number of visual tokens of the video."""
        return len(self.times) * self.grid[0] * self.grid[1]


class VideoFrames(NamedTuple):
    """The frames of a video, which are decoded when they are read. `open_video` makes it.

    Attributes:
        rate: mean number of frames per second.
        times: [n] time of each frame in seconds, ascending from 0.
        is_steady: whether frame i is shown at the time i / rate.
        read: returns an iterator over the frames at ascending indices.
    """

    rate: float
    times: Float[np.ndarray, "n"]
    is_steady: bool
    read: Callable[[Int[np.ndarray, "k"]], Iterator[Frame]]

    def nearest(self, index: Int[np.ndarray, "k"]) -> Int[np.ndarray, "k"]:
        """Returns the frames nearest to the times index / rate, which differ for variable rates."""
        if self.is_steady:
            return index
        # The mean rate may not be exact, so the last index is mapped to the time of the last frame.
        last_index = len(self.times) - 1
        target_time = index * (self.times[-1] / max(1, last_index))
        later = np.minimum(np.searchsorted(self.times, target_time), last_index)
        earlier = np.maximum(later - 1, 0)
        is_later = self.times[later] - target_time < target_time - self.times[earlier]
        return np.where(is_later, later, earlier)


def open_video(video: Video) -> VideoFrames:
    """Opens a video and reads the times of its frames.

    Args:
        video: the video.

    Returns:
        The frames, which are decoded when they are read.

    Raises:
        FileNotFoundError: there is no such file.
        MissingPackageError: PyAV is not installed, and the source is a file.
        ValueError: the file is damaged or has no video, or frames have another type or size.
    """
    if video.is_file:
        return _open_file(video)
    return _open_frames(video)


def _open_frames(video: Video) -> VideoFrames:
    """Checks frames in memory, and returns them with times from their rate."""
    frames: Any = video.source
    if isinstance(frames, np.ndarray):
        is_video = frames.ndim == 4 and frames.shape[3] == 3 and frames.dtype == np.uint8
        if not is_video:
            shape = f"{frames.dtype} array of shape {list(frames.shape)}"
            raise UserError(f"{video.name} is a {shape}, expected uint8 [n, height, width, 3]")
    num_frames = len(frames)
    if not 1 <= num_frames <= MAX_FILE_FRAMES or (
        video.num_frames is None and num_frames > MAX_FRAMES
    ):
        expected = f"1 to {MAX_FRAMES}, or num_frames to sample them"
        raise UserError(f"{video.name} has {num_frames} frames, expected {expected}")
    rate = float(DEFAULT_RATE if video.fps is None else video.fps)

    def read(indices: Int[np.ndarray, "k"]) -> Iterator[Frame]:
        for index in indices.tolist():
            with naming(f"frame {index} of {video.name}"):
                yield _to_array(frames[index])

    return VideoFrames(rate, np.arange(num_frames) / rate, True, read)


def _to_array(frame: Image.Image | np.ndarray) -> Frame:
    """Converts a frame in memory to an array [height, width, 3] of uint8.

    Raises:
        TypeError: the frame is neither a Pillow image nor an array.
        ValueError: the frame has another shape or dtype, or is too large.
    """
    if isinstance(frame, Image.Image):
        frame = np.asarray(open_image(frame, as_shown=True))
    if not isinstance(frame, np.ndarray):
        raise TypeError(f"expected frames as Pillow images or arrays, got {type(frame).__name__}")
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
        shape = f"{frame.dtype} {list(frame.shape)}"
        raise UserError(f"the array is {shape}, expected uint8 [height, width, 3]")
    _check_size(frame.shape[1], frame.shape[0])
    return frame


def _check_size(width: int, height: int) -> None:
    """Raises a UserError if a frame is empty or has more than `MAX_FRAME_PIXELS` pixels."""
    if not 1 <= width * height <= MAX_FRAME_PIXELS:
        raise UserError(
            f"frames of {width} x {height} pixels, expected 1 to {MAX_FRAME_PIXELS:,} pixels"
        )


class _Packets(NamedTuple):
    """Times of a stream's frames, read without decoding.

    Attributes:
        pts: [n] ascending presentation times in units of the stream's time base.
        keyframes: [m] ascending presentation times of frames that need no earlier frame.
    """

    pts: Int[np.ndarray, "n"]
    keyframes: Int[np.ndarray, "m"]


def _open_file(video: Video) -> VideoFrames:
    """Opens a video file; see `open_video`."""
    name, source = video.name, video.source
    if not isinstance(source, bytes) and not Path(str(source)).is_file():
        raise FileNotFoundError(f"no video file at {name}")
    if not (len(source) if isinstance(source, bytes) else Path(str(source)).stat().st_size):
        raise UserError(f"{name} is empty: it has 0 bytes")
    need("av", f"{name} is a video file")
    with _errors_of_file(name), _open_container(source) as container:
        stream = _video_stream(container, name)
        packets = _read_packets(container, stream, name)
        time_base = float(stream.time_base)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
    times = (packets.pts - packets.pts[0]) * time_base
    if rate <= 0:
        rate = len(times) / times[-1] if times[-1] > 0 else DEFAULT_RATE
    steady_times = np.arange(len(times)) / rate
    is_steady = bool(np.abs(times - steady_times).max() <= max(0.5 / rate, 2 * time_base))

    def read(indices: Int[np.ndarray, "k"]) -> Iterator[Frame]:
        with _errors_of_file(name), _open_container(source) as container:
            yield from _decode(container, _video_stream(container, name), packets, indices, name)

    return VideoFrames(rate, steady_times if is_steady else times, is_steady, read)


def _open_container(source: Any) -> Any:
    """Opens a file, or the bytes of a file, with PyAV."""
    av = import_module("av")
    file = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    # Text in metadata may have any encoding.
    return av.open(file, metadata_errors="ignore")


class _errors_of_file:  # noqa: N801
    """Context that converts errors of PyAV to a UserError with the name of the file."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        av = import_module("av")
        if isinstance(error, av.FFmpegError | ValueError) and not isinstance(error, UserError):
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise UserError(
                f"{self._name} is damaged, or is not a video that FFmpeg reads: {reason}"
            ) from error


def _video_stream(container: Any, name: str) -> Any:
    """Returns the first video stream of a file that is not a cover picture.

    Raises:
        UserError: there is none, or its frames are too large.
    """
    av = import_module("av")
    cover = av.stream.Disposition.attached_pic
    streams = [s for s in container.streams.video if not s.disposition & cover]
    if not streams:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "no streams"
        raise UserError(f"{name} has no video stream, only {kinds}")
    with naming(name):
        if streams[0].codec_context is None:
            raise UserError("has a video codec that FFmpeg does not know")
        _check_size(streams[0].codec_context.width, streams[0].codec_context.height)
    return streams[0]


def _read_packets(container: Any, stream: Any, name: str) -> _Packets:
    """Reads the times of all frames of a stream, without decoding.

    Raises:
        UserError: the stream has no frames or too many, or ends before the length that the file
            declares.
    """
    pts, keyframes = [], []
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        # Some old formats store no times; their frames have a constant rate.
        time = packet.pts if packet.pts is not None else packet.dts
        if time is None:
            step = 1 / float(stream.average_rate or DEFAULT_RATE) / float(stream.time_base)
            time = round(len(pts) * step)
        pts.append(time)
        if packet.is_keyframe:
            keyframes.append(time)
        if len(pts) > MAX_FILE_FRAMES:
            raise UserError(f"{name} has more than {MAX_FILE_FRAMES:,} frames")
    if not pts:
        raise UserError(f"{name} has no frames")
    # The header of an MP4 file counts its frames; edit lists may hide a few of them. Headers of
    # other formats only estimate the number.
    if "mp4" in container.format.name and len(pts) < 0.9 * stream.frames - 2:
        raise UserError(f"{name} is truncated: it has {len(pts)} of {stream.frames} frames")
    return _Packets(np.unique(pts), np.unique(keyframes) if keyframes else np.unique(pts)[:1])


def _decode(
    container: Any, stream: Any, packets: _Packets, indices: Int[np.ndarray, "k"], name: str
) -> Iterator[Frame]:
    """Decodes the frames at ascending indices, upright.

    The function seeks to the last keyframe before a frame, if frames in between are not needed.

    Raises:
        UserError: a frame cannot be decoded.
    """
    stream.thread_type = "AUTO"
    target_times = packets.pts[indices].tolist()
    # Index of the group of pictures that each requested frame belongs to.
    groups = np.searchsorted(packets.keyframes, target_times, side="right") - 1
    decoder, decoder_group, latest = None, -1, None
    for time, group in zip(target_times, groups.tolist(), strict=True):
        # Decoding continues to the next group without seeking.
        if decoder is None or group > decoder_group + 1:
            if packets.keyframes[max(group, 0)] > packets.pts[0]:
                container.seek(int(packets.keyframes[group]), stream=stream, backward=True)
            decoder, latest = container.decode(stream), None
        decoder_group = group
        while latest is None or _time_of(latest) < time:
            following = next(decoder, None)
            if following is None:
                break
            latest = following
        if latest is None or (_time_of(latest) < time and time < packets.pts[-1]):
            seconds = (time - packets.pts[0]) * float(stream.time_base)
            raise UserError(f"{name} is damaged: no frame at {seconds:.1f} seconds")
        _check_size(latest.width, latest.height)
        upright = np.rot90(latest.to_ndarray(format="rgb24"), round(latest.rotation / 90) % 4)
        yield np.ascontiguousarray(upright)


def _time_of(frame: Any) -> int:
    """Returns the presentation time of a decoded frame, in units of the stream's time base."""
    time = frame.pts if frame.pts is not None else frame.dts
    return -1 if time is None else time
