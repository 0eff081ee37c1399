"""Reads the images of a request from data URLs and, if allowed, from files inside one folder.

`videos` reads the videos of a request with the functions of this module.
"""

import base64
import dataclasses
import io
import os
import re
import warnings
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from PIL import Image

from stepprune_jax.data.images import open_image
from stepprune_jax.serving.fields import RequestError, messages_error, quote
from stepprune_jax.user_input import UserError

# Requests are not trusted, so only the common formats with well-tested decoders are read.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64")


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of a request, which are checked before the model runs.

    Attributes:
        bytes: largest size of an HTTP body, and of the file of an image or a video.
        pixels: largest number of pixels of an image, and of a frame of a video.
        images: largest number of images and videos in all messages of a request.
        folder: folder with the files that requests may name; None allows data URLs only.
    """

    bytes: int = 16 << 20
    pixels: int = 50_000_000
    images: int = 8
    folder: Path | None = None


def read_image(url: object, field_path: str, limits: RequestLimits) -> Image.Image:
    """Reads an image from its URL. The server never fetches web addresses.

    Args:
        url: value of the request's field. Valid are "data:image/png;base64,..." and, if
            `limits.folder` is set, "file://NAME" for a file in that folder. Data and NAME may be
            percent-encoded.
        field_path: path of the field, such as "messages[0].content[1]", for error messages.
        limits: the folder, and limits of the file's size and the image's pixels.

    Returns:
        The image in RGB, rotated as its EXIF orientation says.

    Raises:
        RequestError: the URL has another form, or the image is damaged or too large.
    """
    content = read_allowed_file(url, field_path, limits)
    if content is None:
        scheme, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
        if not _DATA_URL.fullmatch(scheme):
            raise url_error(url, field_path, "data:image/png;base64,...", limits)
        content = decode_base64(unquote(data), field_path)
    image = open_header(content, field_path, limits.pixels)
    try:
        return open_image(image, as_shown=True)
    except UserError as error:
        # The error names the image by its `repr`, where the client needs the path of the field.
        problem = str(error).removeprefix(repr(image))
        raise messages_error(f"{field_path}{problem}") from error


def read_allowed_file(url: object, field_path: str, limits: RequestLimits) -> bytes | None:
    """Returns the bytes of a file of the allowed folder; None if a URL does not name a file.

    Args:
        url: value of the request's field.
        field_path: path of the field, for error messages.
        limits: the folder, and the limit of the file's size.

    Raises:
        RequestError: there is no such file inside the folder, or the file is too large.
    """
    if limits.folder is None or not isinstance(url, str) or not url.startswith("file://"):
        return None
    return _read_file(limits.folder, url.removeprefix("file://"), field_path, limits.bytes)


def url_error(url: object, field_path: str, expected: str, limits: RequestLimits) -> RequestError:
    """Returns the error for a URL that is neither a data URL nor, if allowed, the URL of a file."""
    expected += " or file://NAME" * (limits.folder is not None)
    return messages_error(
        f"{field_path} is {quote(url)}, expected {expected}; web addresses are not fetched"
    )


def decode_base64(text: str, field_path: str) -> bytes:
    """Decodes base64 strictly.

    Raises:
        RequestError: the text is not valid base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # Also raised for a character that is not ASCII.
        raise messages_error(f"{field_path} is not valid base64: {error}") from error


def open_header(content: bytes, field_path: str, max_pixels: int) -> Image.Image:
    """Reads the header of an image file. Checks format and number of pixels without decoding.

    Args:
        content: bytes of a file in one of `FORMATS`.
        field_path: path of the request's field, for error messages.
        max_pixels: largest number of pixels.

    Returns:
        The image, whose pixels are not decoded.

    Raises:
        RequestError: the header is damaged, the image has another format, or it is too large.
    """
    size_error = messages_error(f"{field_path} has more than {max_pixels} pixels", 413)
    try:
        # Pillow warns about large images and refuses very large ones. `max_pixels` replaces the
        # warning; Pillow's refusal becomes the same error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)  # Reads the header only.
    except Image.DecompressionBombError as error:
        raise size_error from error
    except Exception as error:  # Pillow's decoders may raise any exception.
        message = f"{field_path} is damaged or in another format, expected {', '.join(FORMATS)}"
        raise messages_error(message) from error
    if image.width * image.height > max_pixels:
        raise size_error
    return image


def _read_file(folder: Path, name: str, field_path: str, max_bytes: int) -> bytes:
    """Reads a file inside a folder. Refuses names and links that lead out of the folder.

    Args:
        folder: folder that the server's owner has opened to requests.
        name: percent-encoded path of the file relative to the folder. A percent sign without two
            hexadecimal digits is part of the name.
        field_path: path of the request's field, for error messages.
        max_bytes: largest size of the file.

    Returns:
        The bytes of the file.

    Raises:
        RequestError: there is no such file inside the folder, or the file is too large.
    """
    not_found_error = messages_error(
        f"{field_path} is {quote(name)}, expected a file inside the image folder"
    )
    try:
        file = (folder / os.fsdecode(unquote_to_bytes(name))).resolve()  # Follows links.
        if not (file.is_relative_to(folder.resolve()) and file.is_file()):
            raise not_found_error
        if file.stat().st_size > max_bytes:
            message = f"{field_path} is a file of more than {max_bytes} bytes"
            raise messages_error(message, 413)
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the name contains a null character.
        raise not_found_error from error
