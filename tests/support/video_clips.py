"""Encodes small video clips with PyAV."""

import io
from fractions import Fraction

import numpy as np


def make_clip(
    count=10, rate=10, width=64, height=48, *, codec="mpeg4", container="mp4", times=None, audio=0
):
    """Encodes a clip whose frame i is grey of brightness 20 i + 10, with a white upper left."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = None
        if count:
            stream = output.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.codec_context.time_base = Fraction(1, 1000)
            stream.codec_context.gop_size = 4
        sound = output.add_stream("aac", rate=8000, layout="mono") if audio else None
        for index in range(count):
            picture = np.full((height, width, 3), 20 * (index % 12) + 10, np.uint8)
            picture[: height // 2, : width // 2] = 255
            frame = av.VideoFrame.from_ndarray(picture)
            seconds = index / rate if times is None else times[index]
            frame.pts, frame.time_base = round(1000 * seconds), Fraction(1, 1000)
            output.mux(stream.encode(frame))
        if stream is not None:
            output.mux(stream.encode())
        if sound is not None:
            for index in range(audio):
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
                frame.rate, frame.pts = 8000, 1024 * index
                output.mux(sound.encode(frame))
            output.mux(sound.encode())
    return file.getvalue()
