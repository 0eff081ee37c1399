"""Serves a browser page that answers from all visual tokens and from kept ones.

    stepprune-demo

serves http://127.0.0.1:7860 with the small LLaVA of the shapes world and its shipped policies.
`--model` takes any LLaVA, LLaVA-NeXT, Qwen2.5-VL or Qwen3-VL; `--policy` adds other policies.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.model_settings import DTYPES
from stepprune_jax.cli.command_line import Parser, check_address, exit_with
from stepprune_jax.demo.compare import list_choices
from stepprune_jax.demo.examples import shapes_examples
from stepprune_jax.user_input import naming

_NAME = "stepprune-demo"
_SMALL = {
    "shapes": "The small LLaVA of the shapes world",
    "shapes_qwen": "The small Qwen2.5-VL of the shapes world",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the page; reports errors in one line and exits with status 2."""
    about = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog=_NAME, description=about, compiles=True)
    add = parser.add_argument
    small_models = " or ".join(_SMALL)
    add("--model", default="shapes", help=f"checkpoint folder, hub id, {small_models}")
    add("--vision_folder", help="CLIP folder of an original LLaVA-v1.5 checkpoint")
    add("--min_pixels", type=int, help="smallest area of a resized image, if sizes vary")
    add("--max_pixels", type=int, help="largest area of a resized image")
    add(
        "--policy",
        action="append",
        default=[],
        help="policy file, shipped name, or hub:owner/name; may be repeated",
    )
    add("--dtype", choices=DTYPES, help="default: float32 for the small model, otherwise bfloat16")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=7860, help="port to listen on")
    given = parser.parse_args(argv)
    try:
        from stepprune_jax.demo.app import build, serve
    except ImportError as error:
        parser.error(f'the page needs Gradio ({error}): pip install "stepprune-jax[demo]"')
    check_address(given.host, given.port)
    is_small = given.model in _SMALL
    pixels = {name: getattr(given, name) for name in ("min_pixels", "max_pixels")}
    source = inspect_folder(given.model, given.vision_folder, **pixels)
    policies = {}
    for name in dict.fromkeys([*given.policy, *([given.model] if is_small else [])]):
        policy = load_policy_for(source, name)
        with naming(f"--policy {name}"):
            policy.check_fits(source.config)
        policies[f"{policy.name} ({name})"] = policy
    dtype = jnp.dtype(given.dtype or ("float32" if is_small else "bfloat16"))
    model = load_vlm(given.model, dtype=dtype, vision_folder=given.vision_folder, **pixels)
    choices = list_choices(model, policies)
    name = _SMALL[given.model] if is_small else Path(given.model).name
    serve(
        build(model, name, choices, shapes_examples() if is_small else []),
        given.host,
        given.port,
    )


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
