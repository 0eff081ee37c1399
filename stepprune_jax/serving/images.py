"""Reads the images of a request: data URLs and, if allowed, files inside one folder."""

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
from stepprune_jax.serving.fields import messages_error, quote
from stepprune_jax.user_input import UserError

# Requests are not trusted, so only the common formats with well-tested decoders are read.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64")


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of a request's size, which bound its cost before it is answered.

    Attributes:
        bytes: largest size of a body, and of an image file.
        pixels: largest number of pixels of an image.
        images: largest number of images in all messages.
        folder: requests may name files inside this folder; None allows data URLs only.
    """

    bytes: int = 16 << 20
    pixels: int = 50_000_000
    images: int = 8
    folder: Path | None = None


def read_image(url: object, field_path: str, limits: RequestLimits) -> Image.Image:
    """Reads an image from its URL. The server never fetches web addresses.

    Args:
        url: "data:image/png;base64,...", or "file://NAME" for a file inside the folder. Both may be
            percent-encoded.
        field_path: where the request has the URL, such as "messages[0].content[1]", for errors.
        limits: limits of the image's size.

    Returns:
        The image in RGB, rotated as a viewer shows it.

    Raises:
        RequestError: the URL has another form, or the image is damaged or too large.
    """
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if limits.folder is not None and head.startswith("file://"):
        content = _read_file(
            limits.folder, str(url).removeprefix("file://"), field_path, limits.bytes
        )
    else:
        if not _DATA_URL.fullmatch(head):
            expected = "data:image/png;base64,..." + " or file://NAME" * (limits.folder is not None)
            message = (
                f"{field_path} is {quote(url)}, expected {expected}; web addresses are not fetched"
            )
            raise messages_error(message)
        try:
            content = base64.b64decode(unquote(data), validate=True)
        except ValueError as error:  # Also raised for a character that is not ASCII.
            raise messages_error(f"{field_path} is not valid base64: {error}") from error
    try:
        with warnings.catch_warnings():  # The limit of this server replaces Pillow's own limit.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        is_too_large = image.width * image.height > limits.pixels
    except Image.DecompressionBombError:
        is_too_large = True
    except Exception as error:  # Pillow's decoders may raise any exception.
        message = f"{field_path} is damaged or in another format, expected {', '.join(FORMATS)}"
        raise messages_error(message) from error
    if is_too_large:
        raise messages_error(f"{field_path} has more than {limits.pixels} pixels", 413)
    try:
        return open_image(image, as_shown=True)
    except UserError as error:
        problem = str(error).removeprefix(repr(image))
        raise messages_error(f"{field_path}{problem}") from error


def _read_file(folder: Path, name: str, field_path: str, max_bytes: int) -> bytes:
    """Reads a file inside the folder. A link to a file outside the folder is refused.

    Args:
        folder: the folder.
        name: percent-encoded name of the file. A percent sign without two hexadecimal digits is
            part of the name.
        field_path: where the request has the name, for error messages.
        max_bytes: largest size of the file.

    Raises:
        RequestError: there is no such file inside the folder, or the file is too large.
    """
    try:
        file = (folder / os.fsdecode(unquote_to_bytes(name))).resolve()
        is_inside = file.is_relative_to(folder.resolve()) and file.is_file()
        is_too_large = is_inside and file.stat().st_size > max_bytes
        content = file.read_bytes() if is_inside and not is_too_large else b""
    except (OSError, ValueError):
        is_inside, is_too_large, content = False, False, b""
    if not is_inside:
        raise messages_error(
            f"{field_path} is {quote(name)}, expected a file inside the image folder"
        )
    if is_too_large:
        raise messages_error(f"{field_path} is a file of more than {max_bytes} bytes", 413)
    return content
