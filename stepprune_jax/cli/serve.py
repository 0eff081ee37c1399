"""Serves OpenAI's chat interface with pruned visual tokens, with or without an engine like vLLM.

    stepprune-serve --model DIR --policy policy.safetensors --engine http://127.0.0.1:8000

Without `--engine`, this process runs the language model itself.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import jax.numpy as jnp
import uvicorn
from starlette.applications import Starlette

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.cli import model_flags
from stepprune_jax.cli.command_line import Parser, check_address, exit_with, integer_from
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.pruning import POSITIONS, Budget
from stepprune_jax.registry import resolve_pruner
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.batching import Metrics
from stepprune_jax.serving.engine import EngineBackend
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import Defaults, RequestParser, check_defaults
from stepprune_jax.serving.warm_up import Extent, warm_up
from stepprune_jax.user_input import UserError, expect, local_path

_NAME = "stepprune-serve"
# Seconds that a connection may be idle. A shorter time would close connections that a busy client
# is about to use again.
KEEP_ALIVE = 75
_logger = logging.getLogger("stepprune_jax.serving")  # __name__ may be "__main__".


def _build_parser() -> Parser:
    """Builds the parser of the command line, with the flags in groups."""
    parser = Parser(prog=_NAME, module_docstring=__doc__, compiles=True)
    add = parser.add_argument_group("model").add_argument
    model_flags.add_model_flags(add)
    add("--name", help="the model's name in requests; default: the last part of --model")
    model_flags.add_execution_flags(add)
    add = parser.add_argument_group("defaults of a request").add_argument
    model_flags.add_pruner_flags(add)
    help_text = "position ids of kept tokens; default: compact with an engine, otherwise own"
    add("--positions", choices=POSITIONS, help=help_text)
    add("--max_tokens", type=integer_from(1), default=128, help="length limit of answers")
    add = parser.add_argument_group("engine").add_argument
    help_text = "address of a server such as vLLM that runs the language model"
    add("--engine", metavar="http://HOST:PORT", help=help_text)
    help_text = "seconds to wait for the engine's next token"
    add("--engine_timeout", type=float, default=60.0, help=help_text)
    add = parser.add_argument_group("service").add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8080, help="port to listen on")
    help_text = "origins of web pages that may send requests: http://HOST:PORT, or * for all pages"
    add("--cors", nargs="+", default=[], metavar="ORIGIN", help=help_text)
    help_text = "largest number of requests in a batch"
    add("--batch_size", type=integer_from(1), default=8, help=help_text)
    help_text = "longest time that a request waits for its batch to fill"
    add("--batch_wait_ms", type=float, default=5.0, help=help_text)
    add = parser.add_argument_group("warm-up").add_argument
    help_text = "compile all programs for images up to this size before the server listens; "
    help_text += "LLaVA and LLaVA-NeXT need no size"
    add("--warm_up", nargs="?", const="", metavar="WIDTHxHEIGHT", help=help_text)
    help_text = "with --warm_up: number of tokens of the longest text of a prompt"
    add("--warm_up_text", type=integer_from(1), default=128, help=help_text)
    add = parser.add_argument_group("limits").add_argument
    help_text = "largest number of requests at a time; further requests get status 429"
    add("--queue", type=integer_from(1), default=128, help=help_text)
    help_text = "largest size of a request, and of an image file"
    add("--max_megabytes", type=integer_from(1), default=16, help=help_text)
    add("--max_megapixels", type=integer_from(1), default=50, help="largest size of an image")
    help_text = "largest number of images in a request"
    add("--max_images", type=integer_from(1), default=8, help=help_text)
    add("--image_folder", help="requests may name files inside this folder as file://NAME")
    help_text = "let special tokens in a request's text, such as <|im_end|>, act as in the "
    help_text += "template; by default they are plain text"
    add("--allow_special_tokens", action="store_true", help=help_text)
    return parser


def prepare(argv: Sequence[str] | None = None) -> tuple[Starlette, str, int]:
    """Builds the server: checks the flags, loads the model, and compiles for `--warm_up`.

    Args:
        argv: command-line arguments; None reads the arguments of the process.

    Returns:
        The ASGI application, and the host and the port to listen on.

    Raises:
        UserError: a flag is invalid, contradicts another flag, or does not suit the model.
    """
    flags = _build_parser().parse_args(argv)
    _check_flags(flags)
    has_engine = flags.engine is not None
    source = inspect_folder(flags.model, **model_flags.image_options(flags))
    if has_engine and source.config.num_deepstack_layers:
        raise UserError(
            f"--engine: the {source.backbone.name} model adds deep features inside its language "
            "model, which an engine's prompt embeddings do not carry; expected no --engine"
        )
    extent = _warm_up_extent(flags, source.config)
    budget = flags.budget if flags.mean_budget is None else Budget("mean", flags.mean_budget)
    defaults = Defaults(
        pruner=resolve_pruner(flags.pruner),
        policy=None if flags.policy is None else load_policy_for(source, flags.policy),
        budget=budget,
        positions=flags.positions or ("compact" if has_engine else "own"),
        max_tokens=flags.max_tokens,
        execution=Execution(attention=flags.attention),
    )
    check_defaults(source.config, defaults, engine=has_engine)
    model = load_vlm(
        flags.model,
        dtype=jnp.dtype(flags.dtype),
        use="embeddings" if has_engine else "answers",
        weights=flags.weights,
        **model_flags.image_options(flags),
    )
    parser = RequestParser(
        model,
        flags.name or Path(flags.model).name,
        defaults,
        _request_limits(flags),
        engine=has_engine,
        allow_special_tokens=flags.allow_special_tokens,
    )
    metrics = Metrics()
    batch_options = {"batch_size": flags.batch_size, "batch_seconds": flags.batch_wait_ms / 1000}
    if has_engine:
        timeout = flags.engine_timeout
        backend = EngineBackend(model, flags.engine, metrics, seconds=timeout, **batch_options)
    else:
        backend = LocalBackend(model, metrics, max_tokens=flags.max_tokens, **batch_options)
    if extent is not None:
        warm_up(parser, backend, extent)
    _logger.info("serving %s on http://%s:%s/v1", parser.name, flags.host, flags.port)
    app = ChatApp(parser, backend, metrics, flags.queue).app(flags.cors)
    return app, flags.host, flags.port


def _check_flags(flags: argparse.Namespace) -> None:
    """Raises a UserError for flags that are out of range or contradict each other."""
    if flags.mean_budget is not None and flags.budget is not None:
        raise UserError("--budget and --mean_budget are both given, expected only one of them")
    if flags.engine is not None and flags.weights != "full":
        problem = f"--weights {flags.weights} applies to a language model in this process"
        raise UserError(f"{problem}, expected no --engine")
    folder = _request_limits(flags).folder
    if folder is not None and not folder.is_dir():
        raise UserError(f"--image_folder {folder} is not a folder, expected an existing folder")
    for name, is_valid, expected in (
        ("engine", flags.engine is None or _is_address(flags.engine), "http://HOST:PORT"),
        ("engine_timeout", flags.engine_timeout > 0, "seconds above 0"),
        ("batch_wait_ms", 0 <= flags.batch_wait_ms <= 60_000, "0 to 60000"),
    ):
        expect(f"--{name}", getattr(flags, name), is_valid, expected)
    for origin in flags.cors:
        has_path = origin.count("/") > 2  # "http://" has two slashes.
        is_valid = origin == "*" or (_is_address(origin) and not has_path)
        expect("--cors", origin, is_valid, "http://HOST:PORT without a path, or *")
    check_address(flags.host, flags.port)


def _warm_up_extent(flags: argparse.Namespace, config: ModelConfig) -> Extent | None:
    """Parses `--warm_up` and `--warm_up_text`.

    Args:
        flags: the parsed flags.
        config: configuration of the model. Only models whose image sizes vary freely need a size.

    Returns:
        The limits of the requests whose programs are compiled; None without --warm_up.

    Raises:
        UserError: the size is invalid, or missing for a model that needs a size.
    """
    if flags.warm_up is None:
        return None
    width, _, height = flags.warm_up.partition("x")
    is_size = bool(width.isdecimal() and height.isdecimal() and int(width) and int(height))
    needs_size = config.sizes_vary and not config.is_tiled
    is_valid = is_size or (flags.warm_up == "" and not needs_size)
    expected = "the size of the largest image as WIDTHxHEIGHT, such as 1344x1344"
    expect("--warm_up", flags.warm_up, is_valid, expected)
    image_size = (int(width), int(height)) if is_size else (1, 1)  # (1, 1) is not used.
    return Extent(image_size, flags.warm_up_text)


def _request_limits(flags: argparse.Namespace) -> RequestLimits:
    """Converts the flags for limits of a request, which are in megabytes and megapixels."""
    return RequestLimits(
        bytes=flags.max_megabytes << 20,
        pixels=flags.max_megapixels * 10**6,
        images=flags.max_images,
        folder=None if flags.image_folder is None else local_path(flags.image_folder),
    )


def _is_address(text: str) -> bool:
    """Returns whether a text is the HTTP address of a server, such as http://127.0.0.1:8000."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # The port is not a number.
        return False


def main(argv: Sequence[str] | None = None) -> None:
    """Loads the model, and serves chats until the process is interrupted.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
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


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
