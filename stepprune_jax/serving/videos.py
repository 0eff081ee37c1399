"""Reads the videos of a request: files, or frames that the client has sampled.

A video is opened here, so that a damaged file is refused before other work. Its frames are decoded
one after another when the prompt is read.
"""

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

from stepprune_jax.data.videos import MAX_FRAMES, Video, open_video, sample_with_limit
from stepprune_jax.extras import MissingPackageError
from stepprune_jax.serving.fields import MEDIA, VIDEO_SAMPLING, messages_error, read_fields
from stepprune_jax.serving.images import (
    RequestLimits,
    decode_base64,
    open_header,
    read_allowed_file,
    url_error,
)
from stepprune_jax.user_input import UserError

_DATA_URL = re.compile(r"data:video/[\w.+-]+;base64")
_FRAMES_URL = "data:video/jpeg;base64"  # Frames as in vLLM, separated by commas.
_EXPECTED_URL = "data:video/mp4;base64,..., or frames as data:video/jpeg;base64,FRAME,FRAME,...,"
# Rate of frames whose rate the client does not tell, in frames per second; as in vLLM.
_FRAMES_RATE = 1.0


class VideoSampling(NamedTuple):
    """Sampling of the frames of all videos of a request. Made by `read_sampling`.

    Attributes:
        num_frames: number of frames; None for no limit but the library's.
        fps: frames per second. For frames that the client has sampled, their rate. None for the
            rate of the model's video processor, or for frames, 1 per second.
        reads_all: whether all frames of a file are read, instead of frames at a rate.
    """

    num_frames: int | None = None
    fps: float | int | None = None
    reads_all: bool = False


def read_sampling(fields: dict[str, Any]) -> VideoSampling:
    """Reads how videos are sampled from the field `media_io_kwargs` of a request, as vLLM names it.

    Args:
        fields: fields of the body.

    Raises:
        RequestError: a value is invalid. The error names the field.
    """
    field_path = "media_io_kwargs"
    media = read_fields(fields.get(field_path, {}), field_path, MEDIA)
    sampling = read_fields(media.get("video", {}), f"{field_path}.video", VIDEO_SAMPLING)
    num_frames, fps = (sampling.get(name) for name in ("num_frames", "fps"))
    reads_all = num_frames == -1 and fps in (None, -1)
    return VideoSampling(
        None if num_frames == -1 else num_frames, None if fps == -1 else fps, reads_all
    )


def read_video(
    url: object, field_path: str, sampling: VideoSampling, limits: RequestLimits
) -> Video:
    """Reads a video from its URL. The server never fetches web addresses.

    Args:
        url: value of the request's field. Valid are the bytes of a file as
            "data:video/mp4;base64,...", frames as "data:video/jpeg;base64,FRAME,FRAME,...", and, if
            `limits.folder` is set, "file://NAME" for a file in that folder.
        field_path: path of the field, such as "messages[0].content[1].video_url.url", for error
            messages.
        sampling: how frames are sampled.
        limits: the folder, and limits of the file's size and the pixels of a frame.

    Returns:
        The video. Its frames are not decoded.

    Raises:
        RequestError: the URL has another form, or the video is damaged, has too many frames, or too
            large frames.
    """
    content = read_allowed_file(url, field_path, limits)
    if content is not None:
        return _open_file(content, field_path, sampling, limits)
    scheme, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if scheme == _FRAMES_URL:
        return _read_frames(unquote(data), field_path, sampling, limits)
    if not _DATA_URL.fullmatch(scheme):
        raise url_error(url, field_path, _EXPECTED_URL, limits)
    content = decode_base64(unquote(data), field_path)
    return _open_file(content, field_path, sampling, limits)


def _open_file(
    content: bytes, field_path: str, sampling: VideoSampling, limits: RequestLimits
) -> Video:
    """Opens the bytes of a video file, and chooses the sampling of its frames; see `read_video`."""
    num_frames, fps = sampling.num_frames, sampling.fps
    try:
        video = Video(content, fps=fps) if num_frames is None else Video(content, None, num_frames)
        num_file_frames = len(open_video(video, limits.pixels).times)
        if num_frames is not None and fps is not None:
            video = sample_with_limit(content, fps, num_frames)
    except UserError as error:
        raise messages_error(f"{field_path}: {error}") from error
    except MissingPackageError as error:
        raise messages_error(
            f"{field_path} is a file, which this server cannot read because PyAV is not installed: "
            "send frames as data:video/jpeg;base64,FRAME,FRAME,..."
        ) from error
    if sampling.reads_all:
        if num_file_frames > MAX_FRAMES:
            raise messages_error(
                f"{field_path} has {num_file_frames} frames, expected at most {MAX_FRAMES} to read "
                "all of them: set num_frames or fps in media_io_kwargs"
            )
        video = Video(content, num_frames=num_file_frames)
    return video


def _read_frames(
    data: str, field_path: str, sampling: VideoSampling, limits: RequestLimits
) -> Video:
    """Reads frames that the client has sampled. Checks their number and sizes before decoding.

    Args:
        data: base64 of image files, separated by commas.
        field_path: path of the field.
        sampling: rate of the frames, and the number to sample of them.
        limits: limit of the pixels of a frame.

    Raises:
        RequestError: there are too many frames, or a frame is invalid or has another size than the
            first frame.
    """
    num_frames = data.count(",") + 1
    if num_frames > MAX_FRAMES:
        raise messages_error(f"{field_path} has {num_frames} frames, expected at most {MAX_FRAMES}")
    frames, first_size = [], None
    for index, text in enumerate(data.split(",")):
        frame_path = f"{field_path}: frame {index}"
        frame = decode_base64(text, frame_path)
        size = open_header(frame, frame_path, limits.pixels).size
        first_size = first_size or size
        if size != first_size:
            sizes = [f"{width} x {height}" for width, height in (size, first_size)]
            raise messages_error(f"{frame_path} is {sizes[0]}, expected {sizes[1]} as frame 0")
        frames.append(frame)
    # A number that exceeds the frames would drop the last one of an odd number of frames.
    is_sampled = sampling.num_frames is not None and sampling.num_frames < len(frames)
    return Video(frames, sampling.fps or _FRAMES_RATE, sampling.num_frames if is_sampled else None)
