"""Serves a browser page that compares answers from all visual tokens and from kept tokens.

    stepprune-demo

This command serves the small LLaVA of the shapes world with its shipped policies, on
http://127.0.0.1:7860. `--model` takes any LLaVA, LLaVA-NeXT, Qwen2.5-VL or Qwen3-VL, and `--policy`
adds policies.
"""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.cli import model_flags
from stepprune_jax.cli.command_line import check_address, exit_with
from stepprune_jax.cli.flags.demo import NAME, parse
from stepprune_jax.demo.compare import list_choices
from stepprune_jax.demo.examples import shapes_examples
from stepprune_jax.extras import install_command
from stepprune_jax.registry import resolve_pruner
from stepprune_jax.user_input import UserError, expect, naming

# Shipped models and their names on the page.
_SMALL_MODELS = {
    "shapes": "The small LLaVA of the shapes world",
    "shapes_qwen": "The small Qwen2.5-VL of the shapes world",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Loads a model and its policies, and serves the page until the process is interrupted.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    flags = parse(argv)
    try:
        from stepprune_jax.demo.app import build, serve
    except ImportError as error:
        message = f"the page needs Gradio ({error}): {install_command('demo')}"
        raise UserError(message) from error
    check_address(flags.host, flags.port)
    for pruner_text in flags.pruner:
        name = resolve_pruner(pruner_text)
        expected = "FILE.py:CLASS or package.module:CLASS"
        expect("--pruner", pruner_text, name != pruner_text, expected)
    is_small = flags.model in _SMALL_MODELS
    source = inspect_folder(flags.model, **model_flags.image_options(flags))
    # A small model is shipped with a policy of the same name. `fromkeys` removes duplicates.
    shipped_policies = [flags.model] if is_small else []
    policies = {}
    for policy_name in dict.fromkeys([*flags.policy, *shipped_policies]):
        policy = load_policy_for(source, policy_name)
        with naming(f"--policy {policy_name}"):
            policy.check_fits(source.config)
        policies[f"{policy.name} ({policy_name})"] = policy
    dtype = jnp.dtype(flags.dtype or ("float32" if is_small else "bfloat16"))
    model = load_vlm(flags.model, dtype=dtype, **model_flags.image_options(flags))
    choices = list_choices(model, policies)
    model_name = _SMALL_MODELS[flags.model] if is_small else Path(flags.model).name
    page = build(model, model_name, choices, shapes_examples() if is_small else [])
    serve(page, flags.host, flags.port)


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
