"""Times prefill, decode and loading of the language model, and of `transformers` with SDPA.

    python -m tools.bench.backbone

Both programs have the same weights, batches, lengths and threads, and alternate in one process. A
ratio above 1 means that our program is faster. The outputs of the timed programs are compared.
"""

import argparse
import copy
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.efficiency.timing import table
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.flops import llm_flops
from stepprune_jax.models import decoder, vlm
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.models.sequence import Sequence, from_embeddings
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.testing import tiny_hf_config
from stepprune_jax.user_input import UserError
from tools.bench import loading, torch_reference
from tools.bench.timing import machine, time_side_by_side

# Shapes of the language model. The tower is not timed here.
PRESETS = {
    "tiny": {},
    "mid": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "7b": MODELS["llava-7b"]["text_config"]
    | {"hidden_size": 4096, "intermediate_size": 11008}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
}


class Case(NamedTuple):
    """One setting of the comparison: both models and their inputs."""

    params: dict[str, Any]
    config: LlavaConfig
    reference: Any
    sequence: Sequence
    tokens: np.ndarray


def compiled(function: Callable, *arguments: Any, donate: tuple = ()) -> tuple[Callable, float]:
    """Compiles a function with the options of answers; returns it and the compile seconds."""
    start = time.perf_counter()
    program = jit_for_weights(function, (), donate, answers=True)
    program.trace(*arguments).lower().compile()
    return program, time.perf_counter() - start


def difference(ours: Float[Array | np.ndarray, "*s"], reference: Float[np.ndarray, "*s"]) -> float:
    """Returns the largest difference relative to the reference's largest magnitude."""
    ours = np.asarray(ours, np.float32)
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def make_case(params, config, reference, batch: int, length: int, new_tokens: int) -> Case:
    """Builds rows of random text without padding, embedded for both programs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.text.vocab_size, (batch, length), np.int32)
    embeddings = decoder.embed(params["language"], jnp.asarray(ids))
    sequence = from_embeddings(config, embeddings, jnp.full((batch,), length, jnp.int32))
    tokens = rng.integers(3, config.text.vocab_size, (new_tokens, batch), np.int32)
    return Case(params, config, reference, sequence, tokens)


def prefill_rows(
    case: Case, attentions: list[str], repeats: int, peak: float | None
) -> list[list[Any]]:
    """Times the prefill of our program with each attention, and of the reference."""
    params, config, reference, sequence, tokens = case
    batch, length = sequence.hidden.shape[:2]
    calls, compile_seconds = {}, {}
    for attention in attentions:
        execution = Execution(attention=attention)
        run = functools.partial(
            vlm.prefill, config=config, max_new_tokens=len(tokens), execution=execution
        )
        program, compile_seconds[attention] = compiled(
            lambda params, sequence, run=run: run(params, sequence=sequence), params, sequence
        )
        calls[attention] = functools.partial(program, params, sequence)
    if reference is not None:
        device = reference.device.type
        embeddings = torch_reference.to_torch(sequence.hidden, device)
        for kind in torch_reference.CACHES:
            calls[f"torch, {kind} cache"] = functools.partial(
                torch_reference.prefill, reference, embeddings, kind, length + len(tokens)
            )
    seconds = time_side_by_side(calls, repeats)
    best = min(
        (duration for name, duration in seconds.items() if name.startswith("torch")), default=None
    )
    outputs = {name: np.asarray(calls[name]().logits) for name in attentions}
    base = outputs[attentions[0]]
    if reference is not None:
        base = torch_reference.as_numpy(calls["torch, dynamic cache"]()[0])
    work = batch * llm_flops(config.text, length).causal_flops
    return [
        [
            str(sequence.hidden.dtype),
            batch,
            length,
            name,
            1e3 * duration,
            best / duration if best else "-",
            compile_seconds.get(name, "-"),
            difference(outputs[name], base) if name in outputs else "-",
            work / duration / 1e12,
            f"{work / duration / 1e12 / peak:.1%}" if peak else "N/A",
        ]
        for name, duration in seconds.items()
    ]


PREFILL_HEADER = [
    "prefill, dtype",
    "batch",
    "tokens",
    "program",
    "ms",
    "fastest torch / this",
    "compile s",
    "relative difference",
    "TFLOP/s",
    "MFU",
]


def decode_rows(case: Case, repeats: int) -> list[list[Any]]:
    """Times decode steps with given tokens after a prefill, of our program and the reference."""
    params, config, reference, sequence, tokens = case
    batch, length = sequence.hidden.shape[:2]
    prefilled, _ = compiled(
        lambda params, sequence: vlm.prefill(params, config, sequence, len(tokens)).cache,
        params,
        sequence,
    )
    cache = prefilled(params, sequence)
    our_tokens = [jnp.asarray(row) for row in tokens]
    step, compile_seconds = compiled(
        lambda params, token, cache: vlm.decode_step(params, config, token, cache),
        params,
        our_tokens[0],
        cache,
        donate=("cache",),
    )

    def run(cache):
        for token in our_tokens:
            logits, cache = step(params, token, cache)
        return logits

    calls, setups = {"ours": run}, {"ours": lambda: jax.tree.map(jnp.copy, cache)}
    if reference is not None:
        device = reference.device.type
        embeddings = torch_reference.to_torch(sequence.hidden, device)
        torch_tokens = torch_reference.tokens_on(tokens, device)
        for kind in torch_reference.CACHES:
            name, capacity = f"torch, {kind} cache", length + len(tokens)
            _, filled = torch_reference.prefill(reference, embeddings, kind, capacity)
            setups[name] = functools.partial(copy.deepcopy, filled)
            calls[name] = lambda cache, torch_tokens=torch_tokens: torch_reference.decode(
                reference, cache, torch_tokens
            )
    seconds = time_side_by_side(calls, repeats, setups)
    best = min((duration for name, duration in seconds.items() if name != "ours"), default=None)
    error = "-"
    if reference is not None:
        name = "torch, dynamic cache"
        expected = torch_reference.as_numpy(calls[name](setups[name]()))
        error = difference(run(setups["ours"]()), expected)
    count = len(tokens)
    return [
        [
            str(sequence.hidden.dtype),
            batch,
            f"{length} + {count}",
            name,
            1e3 * duration / count,
            batch * count / duration,
            best / duration if best else "-",
            *((compile_seconds, error) if name == "ours" else ("-", "-")),
        ]
        for name, duration in seconds.items()
    ]


DECODE_HEADER = [
    "decode, dtype",
    "batch",
    "tokens",
    "program",
    "ms per token",
    "tokens/s",
    "fastest torch / this",
    "compile s",
    "relative difference",
]


def peak_tflops() -> float | None:
    """Returns the device's peak TFLOP/s in bfloat16 from its data sheet, or None if unknown."""
    name = known_as(jax.devices()[0].device_kind)
    return ACCELERATORS[name].flops / 1e12 if name else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the flags."""
    parser = Parser(prog="tools.bench.backbone", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="mid")
    parser.add_argument(
        "--num_layers",
        type=integer_from(1),
        help="number of layers, instead of the preset's number",
    )
    parser.add_argument(
        "--length", type=integer_from(1), nargs="+", default=[320, 640], help="prompt tokens"
    )
    parser.add_argument("--batch", type=integer_from(1), nargs="+", default=[1, 4])
    parser.add_argument("--new_tokens", type=integer_from(1), default=32, help="tokens to decode")
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--attention", nargs="+", choices=ATTENTIONS, default=["matmul"], help="prefill attention"
    )
    parser.add_argument("--repeats", type=integer_from(1), default=5)
    parser.add_argument("--no_torch", action="store_true", help="do not time transformers")
    parser.add_argument("--load_gb", type=float, default=1.0, help="synthetic folder; 0: none")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the comparison and prints Markdown tables."""
    # Both programs share the GPU, so jax must not preallocate its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = parse(arguments)
    layers = {"num_hidden_layers": flags.num_layers} if flags.num_layers else {}
    config = LlavaConfig.from_hf(tiny_hf_config(text=PRESETS[flags.preset] | layers))
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(machine())
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if not flags.no_torch:
        import torch
        import transformers

        torch.set_num_threads(threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("torch sees no GPU: install its CUDA build, or pass --no_torch")
        print(
            f"torch {torch.__version__} on {device}, transformers {transformers.__version__}, "
            f"SDPA; {threads} threads each"
        )
    text = config.text
    print(
        f"preset {flags.preset}: {text.num_layers} layers of width {text.hidden_size}, MLP "
        f"{text.intermediate_size}, {text.num_heads} heads ({text.num_kv_heads} for keys), "
        f"vocabulary {text.vocab_size}; medians of {flags.repeats}\n",
        flush=True,
    )
    peak = peak_tflops()
    for dtype in flags.dtype:
        language = vlm.abstract_params(Llava(config), jnp.dtype(dtype))["language"]
        params = random_weights({"language": language})
        reference = None
        if not flags.no_torch:
            reference = torch_reference.build(params["language"], config, device)
        prefills, decodes = [], []
        for batch in flags.batch:
            for length in flags.length:
                case = make_case(params, config, reference, batch, length, flags.new_tokens)
                peak_or_none = peak if dtype == "bfloat16" else None
                prefills += prefill_rows(case, flags.attention, flags.repeats, peak_or_none)
                decodes += decode_rows(case, flags.repeats)
        print(table(PREFILL_HEADER, prefills), "\n", flush=True)
        print(table(DECODE_HEADER, decodes), "\n", flush=True)
        del params, reference, case
    if flags.load_gb:
        print(loading.report(flags.load_gb, flags.repeats), flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.backbone", main)
