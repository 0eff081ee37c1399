"""Serves OpenAI's chat interface with pruned visual tokens, before an engine such as vLLM or alone.

    stepprune-serve --model DIR --policy policy.safetensors --engine http://127.0.0.1:8000

Without `--engine` the answers are those of this process.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import jax.numpy as jnp
import uvicorn
from starlette.applications import Starlette

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.cli.command_line import Parser, check_address, exit_with, integer_from
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.int8 import WEIGHTS
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.pruning import POSITIONS, Budget
from stepprune_jax.registry import PRUNERS
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.engine import Engine
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import Local
from stepprune_jax.serving.messages import Defaults, RequestParser, check_defaults
from stepprune_jax.serving.metrics import Metrics
from stepprune_jax.serving.warm_up import Extent, warm_up
from stepprune_jax.user_input import expect, local_path, require

_NAME = "stepprune-serve"
# Seconds that a connection may be idle: longer than a busy client takes to use it again, which
# would otherwise find it closed as it sends.
KEEP_ALIVE = 75
_DTYPES = ("bfloat16", "float32", "float16")
_logger = logging.getLogger("stepprune_jax.serving")  # also if run as __main__


def _parser() -> Parser:
    about = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog=_NAME, description=about, compiles=True)
    add = parser.add_argument_group("model").add_argument
    add("--model", required=True, help="checkpoint folder, hub id, shapes or shapes_qwen")
    add("--name", help="what requests call it; default: the last part of --model")
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--min_pixels", type=int, help="smallest area of a resized image, if sizes vary")
    add("--max_pixels", type=int, help="largest area of a resized image")
    add("--dtype", choices=_DTYPES, default="bfloat16", help="dtype of weights and compute")
    add("--weights", choices=WEIGHTS, default="full", help="int8: half the language model's memory")
    add("--attention", choices=ATTENTIONS, default="matmul", help="attention implementation")
    add = parser.add_argument_group("defaults of a request").add_argument
    add("--pruner", help=f"pruning method: {', '.join(PRUNERS)}")
    add("--policy", help="trained pruner: a file, a shipped name such as shapes, or hub:owner/name")
    add("--budget", help="tokens to keep per image: 64, 1/3, 22.2%%; default: the policy's stop")
    add("--mean_budget", type=float, help="tokens to keep on average, for a calibrated policy")
    add("--positions", choices=POSITIONS, help="default: compact with an engine, otherwise own")
    add("--max_tokens", type=integer_from(1), default=128, help="longest answer, in tokens")
    add = parser.add_argument_group("engine").add_argument
    add("--engine", metavar="http://HOST:PORT", help="a server such as vLLM that answers")
    add("--engine_timeout", type=float, default=60.0, help="seconds to wait for its next token")
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8080, help="port to listen on")
    text = "pages of these may ask, http://HOST:PORT or *; default: of none"
    add("--cors", nargs="+", default=[], metavar="ORIGIN", help=text)
    add("--batch_size", type=integer_from(1), default=8, help="requests that are run together")
    add("--batch_wait_ms", type=float, default=5.0, help="longest wait for others to join")
    add = parser.add_argument_group("warm-up").add_argument
    text = "compile all programs of images up to this size before the server listens; LLaVA and "
    text += "LLaVA-NeXT need no size"
    add("--warm_up", nargs="?", const="", metavar="WIDTHxHEIGHT", help=text)
    text = "with --warm_up: longest text of a prompt, in tokens"
    add("--warm_up_text", type=integer_from(1), default=128, help=text)
    add = parser.add_argument_group("limits").add_argument
    add("--queue", type=integer_from(1), default=128, help="requests at a time; others get 429")
    add("--max_megabytes", type=integer_from(1), default=16, help="of a request, and of a file")
    add("--max_megapixels", type=integer_from(1), default=50, help="of an image")
    add("--max_images", type=integer_from(1), default=8, help="of a request")
    add("--image_folder", help="images may also be files below it, as file://NAME")
    text = "special tokens in a request's text, such as <|im_end|>, act as in the template; "
    text += "default: they are plain text"
    add("--allow_special_tokens", action="store_true", help=text)
    return parser


def prepare(argv: Sequence[str] | None = None) -> tuple[Starlette, str, int]:
    """Reads and checks the flags, and then loads the model.

    Args:
        argv: command-line arguments; by default the arguments of the process.

    Returns:
        The application, and the host and the port to serve it on.
    """
    flags = _parser().parse_args(argv)
    _check_flags(flags)
    has_engine = flags.engine is not None
    how = {
        "vision_folder": flags.vision_folder,
        "min_pixels": flags.min_pixels,
        "max_pixels": flags.max_pixels,
    }
    source = inspect_folder(flags.model, **how)
    require(
        not has_engine or not source.config.num_deepstack_layers,
        f"--engine: the {source.backbone.name} model adds deep features inside its language model, "
        "which an engine's prompt embeddings do not carry; expected no --engine",
    )
    extent = _extent(flags, source.config)
    mean = flags.mean_budget
    defaults = Defaults(
        flags.pruner,
        None if flags.policy is None else load_policy_for(source, flags.policy),
        flags.budget if mean is None else Budget("mean", mean),
        flags.positions or ("compact" if has_engine else "own"),
        flags.max_tokens,
        Execution(attention=flags.attention),
    )
    check_defaults(source.config, defaults, engine=has_engine)
    use = "embeddings" if has_engine else "answers"
    dtype = jnp.dtype(flags.dtype)
    model = load_vlm(flags.model, dtype=dtype, use=use, weights=flags.weights, **how)
    reader = RequestParser(
        model,
        flags.name or Path(flags.model).name,
        defaults,
        _limits(flags),
        engine=has_engine,
        allow_special_tokens=flags.allow_special_tokens,
    )
    metrics = Metrics()
    batching = {"batch_size": flags.batch_size, "batch_seconds": flags.batch_wait_ms / 1000}
    if has_engine:
        seconds = flags.engine_timeout
        backend = Engine(model, flags.engine, metrics, seconds=seconds, **batching)
    else:
        backend = Local(model, metrics, max_tokens=flags.max_tokens, **batching)
    if extent is not None:
        warm_up(reader, backend, extent)
    _logger.info("serving %s on http://%s:%s/v1", reader.name, flags.host, flags.port)
    app = ChatApp(reader, backend, metrics, flags.queue).app(flags.cors)
    return app, flags.host, flags.port


def _check_flags(flags: argparse.Namespace) -> None:
    """Raises a UserError for flags that are out of range or contradict each other."""
    both = flags.mean_budget is not None and flags.budget is not None
    require(not both, "--budget and --mean_budget are given, expected one of them")
    full = flags.engine is None or flags.weights == "full"
    require(full, "--weights int8 belongs to a model that answers here, expected no --engine")
    folder = _limits(flags).folder
    require(folder is None or folder.is_dir(), f"--image_folder {folder} is not a folder")
    for name, is_allowed, expected in (
        ("engine", flags.engine is None or _is_address(flags.engine), "http://HOST:PORT"),
        ("engine_timeout", flags.engine_timeout > 0, "seconds above 0"),
        ("batch_wait_ms", 0 <= flags.batch_wait_ms <= 60_000, "0 to 60000"),
    ):
        expect(f"--{name}", getattr(flags, name), is_allowed, expected)
    for origin in flags.cors:
        is_allowed = origin == "*" or (_is_address(origin) and origin.count("/") == 2)
        expect("--cors", origin, is_allowed, "http://HOST:PORT without a path, or *")
    check_address(flags.host, flags.port)


def _extent(flags: argparse.Namespace, config: ModelConfig) -> Extent | None:
    """Returns the requests that --warm_up compiles programs for; None without it."""
    text = flags.warm_up
    if text is None:
        return None
    width, _, height = text.partition("x")
    is_size = width.isdecimal() and height.isdecimal() and int(width) and int(height)
    expected = "the largest image as WIDTHxHEIGHT, such as 1344x1344"
    needs_size = config.sizes_vary and not config.is_tiled
    expect("--warm_up", text, bool(is_size) or not (text or needs_size), expected)
    return Extent((int(width), int(height)) if is_size else (1, 1), flags.warm_up_text)


def _limits(flags: argparse.Namespace) -> RequestLimits:
    """Returns the limits of a request."""
    folder = None if flags.image_folder is None else local_path(flags.image_folder)
    pixels, size = flags.max_megapixels * 10**6, flags.max_megabytes << 20
    return RequestLimits(size, pixels, flags.max_images, folder)


def _is_address(text: str) -> bool:
    """Returns whether a text is the address of a server."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is interrupted; reports errors in one line and exits with status 2."""
    app, host, port = prepare(argv)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=KEEP_ALIVE,
    )


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
