"""Images of a request: data URLs, and where it is allowed files below one folder."""

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
from stepprune_jax.serving.errors import RequestError, refuse_unless, shown
from stepprune_jax.user_input import UserError

# What is read of an untrusted sender.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA = re.compile(r"data:image/[\w.+-]+;base64")


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What a request may cost before it is answered.

    Attributes:
        bytes: of its body, and of an image file.
        pixels: of an image.
        images: in all its messages.
        folder: images may also be files below it; None for data URLs alone.
    """

    bytes: int = 16 << 20
    pixels: int = 50_000_000
    images: int = 8
    folder: Path | None = None


def read_image(url: object, where: str, limits: RequestLimits) -> Image.Image:
    """Reads an image from its URL; addresses are not fetched.

    Args:
        url: "data:image/png;base64,...", or "file://NAME" of a file below the folder. Both may be
            percent-encoded.
        where: where the request has it, for messages.
        limits: what it may cost.

    Returns:
        The image in RGB, as a viewer shows it.

    Raises:
        RequestError: another URL, or an image that is damaged or too large.
    """
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    url_forms = "data:image/png;base64,..." + " or file://NAME" * (limits.folder is not None)
    if limits.folder is not None and head.startswith("file://"):
        content = _read_file(limits.folder, str(url).removeprefix("file://"), where, limits.bytes)
    else:
        message = f"{where} is {shown(url)}, expected {url_forms}; addresses are not fetched"
        refuse_unless(_DATA.fullmatch(head) is not None, "messages", message)
        try:
            content = base64.b64decode(unquote(data), validate=True)
        except ValueError as error:  # also of a character that is not ASCII
            raise RequestError(400, f"{where} is not base64: {error}", "messages") from error
    try:
        with warnings.catch_warnings():  # Pillow's own limit is another one
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        is_small = image.width * image.height <= limits.pixels
    except Image.DecompressionBombError:
        is_small = False
    except Exception as error:  # Pillow's decoders may raise any kind
        message = f"{where} is not an intact image of {', '.join(FORMATS)}"
        raise RequestError(400, message, "messages") from error
    refuse_unless(is_small, "messages", f"{where} has more than {limits.pixels} pixels", 413)
    try:
        return open_image(image, as_shown=True)
    except UserError as error:
        problem = str(error).removeprefix(repr(image))
        raise RequestError(400, f"{where}{problem}", "messages") from error


def _read_file(folder: Path, name: str, where: str, size_limit: int) -> bytes:
    """Reads a file below the folder, whose name is percent-encoded; a link may not lead outside.

    A percent sign without two hexadecimal digits behind it is part of the name.
    """
    try:
        path = (folder / os.fsdecode(unquote_to_bytes(name))).resolve()
        is_inside = path.is_relative_to(folder.resolve()) and path.is_file()
        is_small = is_inside and path.stat().st_size <= size_limit
        content = path.read_bytes() if is_small else b""
    except (OSError, ValueError):
        is_inside, is_small, content = False, False, b""
    outside = f"{where} is {shown(name)}, no file below the images' folder"
    refuse_unless(is_inside, "messages", outside)
    large = f"{where} is a file of more than {size_limit} bytes"
    refuse_unless(is_small, "messages", large, 413)
    return content
