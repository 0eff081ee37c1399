"""Serves OpenAI's chat interface with pruned visual tokens, with or without an engine like vLLM.

    stepprune-serve --model DIR --policy policy.safetensors --engine http://127.0.0.1:8000

Without `--engine`, this process runs the language model itself.
"""

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import uvicorn
from starlette.applications import Starlette

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.cli import model_flags
from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.cli.flags.serve import NAME, parse
from stepprune_jax.extras import end_interrupted
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.pruning import Budget
from stepprune_jax.registry import resolve_pruner
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.batching import Metrics, has_worker
from stepprune_jax.serving.engine import EngineBackend
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import Defaults, RequestParser, budget_ladder, check_defaults
from stepprune_jax.serving.warm_up import Extent, warm_up
from stepprune_jax.user_input import UserError, expect, naming

# Seconds that a connection may be idle. A shorter time would close connections that a busy client
# is about to use again.
KEEP_ALIVE = 75
# Seconds after an interrupt until the requests that are still answered are canceled.
_GRACE_SECONDS = 10
_logger = logging.getLogger("stepprune_jax.serving")  # __name__ may be "__main__".


def prepare(argv: Sequence[str] | None = None) -> tuple[Starlette, str, int]:
    """Builds the server: checks the flags, loads the model, and compiles for `--warm_up`.

    Args:
        argv: command-line arguments; None reads the arguments of the process.

    Returns:
        The ASGI application, and the host and the port to listen on.

    Raises:
        UserError: a flag is invalid, contradicts another flag, or does not suit the model.
    """
    flags = parse(argv)
    has_engine = flags.engine is not None
    source = inspect_folder(flags.model, **model_flags.image_options(flags))
    if has_engine and source.config.num_deepstack_layers:
        raise UserError(
            f"--engine: the {source.backbone.name} model adds deep features inside its language "
            "model, which an engine's prompt embeddings do not carry; expected no --engine"
        )
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
    extent = _warm_up_extent(flags, source.config, defaults)
    for warm_up_budget in () if extent is None else extent.budgets:
        with naming("--warm_up_budgets"):
            settings = dataclasses.replace(defaults, budget=warm_up_budget)
            check_defaults(source.config, settings, engine=has_engine)
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
    options = {"api_key": flags.api_key, "logs_requests": flags.log_requests}
    app = ChatApp(parser, backend, metrics, flags.queue, **options)
    return app.app(flags.cors), flags.host, flags.port


def _warm_up_extent(
    flags: argparse.Namespace, config: ModelConfig, defaults: Defaults
) -> Extent | None:
    """Parses the flags of the warm-up.

    Args:
        flags: the parsed flags.
        config: configuration of the model. Only models whose image sizes vary freely need a size.
        defaults: the default settings of a request.

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
    budgets = flags.warm_up_budgets
    if budgets == []:  # Without a value, the flag selects all padded sizes.
        with naming("--warm_up_budgets"):
            budgets = budget_ladder(config, defaults)
    return Extent(image_size, flags.warm_up_text, tuple(budgets or ()))


def _request_limits(flags: argparse.Namespace) -> RequestLimits:
    """Converts the flags for limits of a request, which are in megabytes and megapixels."""
    return RequestLimits(
        bytes=flags.max_megabytes << 20,
        pixels=flags.max_megapixels * 10**6,
        images=flags.max_images,
        folder=flags.image_folder,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Loads the model, and serves chats until the process is interrupted.

    Ends the process with status 130 if a program is still compiled then.

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
        timeout_graceful_shutdown=_GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE,
    )
    if has_worker():  # The interpreter would wait until a program is compiled.
        end_interrupted(NAME)


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
