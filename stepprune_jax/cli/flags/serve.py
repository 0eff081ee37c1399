"""Flags of `stepprune-serve`."""

import argparse
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from stepprune_jax.cli import model_flags
from stepprune_jax.cli.choices import POSITIONS
from stepprune_jax.cli.command_line import Parser, check_address, integer_from
from stepprune_jax.user_input import UserError, expect, local_path

NAME = "stepprune-serve"
# Environment variable of the API key.
_KEY_VARIABLE = "STEPPRUNE_API_KEY"
_DESCRIPTION = (
    "Serves OpenAI's chat interface with pruned visual tokens, with or without an engine like vLLM."
)


def _build_parser() -> Parser:
    """Builds the parser of the command line, with the flags in groups."""
    parser = Parser(prog=NAME, description=_DESCRIPTION, compiles=True)
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
    help_text = "key that clients send as Authorization: Bearer KEY; default: the environment "
    help_text += f"variable {_KEY_VARIABLE}, which other users of the machine cannot read"
    add("--api_key", help=help_text)
    help_text = "log a line for each chat request: status, times and token counts"
    add("--log_requests", action="store_true", help=help_text)
    add = parser.add_argument_group("warm-up").add_argument
    help_text = "compile all programs for images up to this size before the server listens; "
    help_text += "LLaVA and LLaVA-NeXT need no size"
    add("--warm_up", nargs="?", const="", metavar="WIDTHxHEIGHT", help=help_text)
    help_text = "with --warm_up: number of tokens of the longest text of a prompt"
    add("--warm_up_text", type=integer_from(1), default=128, help=help_text)
    help_text = "with --warm_up: compile for these budgets of requests, too, such as 16 64 1/9; "
    help_text += "without a value, for all sizes that budgets are rounded up to"
    add("--warm_up_budgets", nargs="*", metavar="BUDGET", help=help_text)
    add = parser.add_argument_group("limits").add_argument
    help_text = "largest number of requests at a time; further requests get status 429"
    add("--queue", type=integer_from(1), default=128, help=help_text)
    help_text = "largest size of a request, and of the file of an image or a video"
    add("--max_megabytes", type=integer_from(1), default=16, help=help_text)
    help_text = "largest size of an image, and of a frame of a video"
    add("--max_megapixels", type=integer_from(1), default=50, help=help_text)
    help_text = "largest number of images and videos in a request"
    add("--max_images", type=integer_from(1), default=8, help=help_text)
    help_text = "requests may name files inside this folder as file://NAME"
    add("--image_folder", type=local_path, help=help_text)
    help_text = "let special tokens in a request's text, such as <|im_end|>, act as in the "
    help_text += "template; by default they are plain text"
    add("--allow_special_tokens", action="store_true", help=help_text)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags, and checks all values that need no model.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.

    Returns:
        The flags. `image_folder` is a path or None. `api_key` is the key or None.

    Raises:
        UserError: a flag is out of range, or contradicts another flag.
    """
    flags = _build_parser().parse_args(arguments)
    if flags.api_key is None:
        flags.api_key = key = os.environ.get(_KEY_VARIABLE)
        # A script whose secret is missing sets an empty variable, and must not serve everybody.
        has_key = key is None or key.strip() != ""
        expect(_KEY_VARIABLE, key, has_key, "a key, or no such variable")
    _check_flags(flags)
    return flags


def _check_flags(flags: argparse.Namespace) -> None:
    """Raises a UserError for flags that are out of range or contradict each other."""
    if flags.mean_budget is not None and flags.budget is not None:
        raise UserError("--budget and --mean_budget are both given, expected only one of them")
    if flags.engine is not None and flags.weights != "full":
        problem = f"--weights {flags.weights} applies to a language model in this process"
        raise UserError(f"{problem}, expected no --engine")
    if flags.warm_up_budgets is not None and flags.warm_up is None:
        raise UserError("--warm_up_budgets requires --warm_up")
    folder = flags.image_folder
    if folder is not None and not folder.is_dir():
        raise UserError(f"--image_folder {folder} is not a folder, expected an existing folder")
    for name, is_valid, expected in (
        ("engine", flags.engine is None or _is_address(flags.engine), "http://HOST:PORT"),
        ("engine_timeout", flags.engine_timeout > 0, "seconds above 0"),
        ("api_key", flags.api_key is None or flags.api_key.strip() != "", "a key"),
        ("batch_wait_ms", 0 <= flags.batch_wait_ms <= 60_000, "0 to 60000"),
    ):
        expect(f"--{name}", getattr(flags, name), is_valid, expected)
    for origin in flags.cors:
        has_path = origin.count("/") > 2  # "http://" has two slashes.
        is_valid = origin == "*" or (_is_address(origin) and not has_path)
        expect("--cors", origin, is_valid, "http://HOST:PORT without a path, or *")
    check_address(flags.host, flags.port)


def _is_address(text: str) -> bool:
    """Returns whether a text is the HTTP address of a server, such as http://127.0.0.1:8000."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # The port is not a number.
        return False
