"""Measures the load of vLLM by itself, with our plugin, and behind our server, on the CPU.

    python -m tools.bench.serving --clients 1 4 16 32

The model is a LLaVA of about 190 million random weights with 576 visual tokens per image. The
policy is untrained, with a stop bias that keeps 64 tokens on average; the plugin and one of the
modes of the server keep exactly 64. Each client sends its next
request after the last answer, always with a new image, and asks for short answers. `make
test-serving` builds vLLM's environment.
"""

import argparse
import asyncio
import base64
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from stepprune_jax import PolicyConfig, StepPrune, testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.inference import pipeline, read_request
from stepprune_jax.integrations.vllm_plugin import VARIABLE
from stepprune_jax.policy.trajectory import count_at_bias
from tools.bench.timing import machine
from tools.bench.vllm_server import Vllm, free_port

KEPT = 64  # of 576
VISION = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "image_size": 336,
    "patch_size": 14,
}
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1024,
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
}
# The prompt of LLaVA-1.5 with its start token, which vLLM leaves out.
TEMPLATE = (
    "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions. USER: <image>\n"
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %} ASSISTANT:"
)
CHAT = ("--chat-template", TEMPLATE, "--chat-template-content-format", "openai")
ENGINE_FLAGS = ("--dtype", "float32", "--max-model-len", "1024", *CHAT)
QUESTION = "What is in this picture?"


class Mode(NamedTuple):
    """A mode of serving.

    Attributes:
        name: name in the table.
        has_server: whether our server receives the requests, instead of vLLM.
        fields: fields of the requests.
        has_plugin: whether vLLM prunes images with our plugin.
    """

    name: str
    has_server: bool
    fields: Mapping[str, Any]
    has_plugin: bool = False


_VLLM_FIELDS = {"temperature": 0, "add_special_tokens": False}


MODES = (
    Mode("vLLM by itself", False, _VLLM_FIELDS),
    Mode("server, all tokens", True, {"pruner": "all"}),
    Mode(f"server, {KEPT} tokens", True, {"budget": KEPT}),
    Mode("server, learned stop", True, {}),
    Mode(f"plugin, {KEPT} tokens", False, _VLLM_FIELDS, has_plugin=True),
)


class Load(NamedTuple):
    """Measurements of a load.

    Attributes:
        rate: requests per second, from the first request to the last answer.
        median: median seconds to the first token.
        late: 99th percentile of the seconds to the first token.
        kept: mean number of kept visual tokens; NaN for vLLM, which reports no number.
    """

    rate: float
    median: float
    late: float
    kept: float


def write_model(folder: Path) -> float:
    """Writes the model and the policy, and returns the number of weights in millions."""
    testing.tiny_llava(folder / "model", vision=VISION, text=TEXT)
    (folder / "model" / "processor_config.json").write_text(json.dumps(PROCESSOR))
    model = load_vlm(folder / "model", dtype=jnp.float32, progress=False)
    config = PolicyConfig(VISION["hidden_size"], TEXT["hidden_size"])
    policy = StepPrune.init(jax.random.key(0), config, None)
    images = [picture(np.random.default_rng(seed)) for seed in range(8)]
    request = read_request(model, [QUESTION] * 8, images)
    encoded = pipeline.encode(model, request.images)
    steps = config.steps(576)
    ranking = pipeline.rank(model, policy, request.prompts(), encoded, steps)
    low_bias, high_bias = -50.0, 50.0
    for _ in range(40):
        bias = (low_bias + high_bias) / 2
        mean = float(np.mean(count_at_bias(ranking.margin, bias, config.min_tokens)))
        low_bias, high_bias = (bias, high_bias) if mean > KEPT else (low_bias, bias)
    save_policy(policy.replace(stop_bias=bias), folder / "policy.safetensors")
    return sum(leaf.size for leaf in jax.tree.leaves(model.params)) / 1e6


def picture(rng: np.random.Generator) -> Image.Image:
    """Returns a random image, different for each request, so that no cache has its answer."""
    small = rng.integers(0, 256, (24, 24, 3), np.uint8)
    return Image.fromarray(small).resize((336, 336), Image.Resampling.BICUBIC)


def message(rng: np.random.Generator) -> dict[str, Any]:
    """Returns a user's message with a random image."""
    file = io.BytesIO()
    picture(rng).save(file, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}


async def measure_load(
    address: str,
    name: str,
    mode: Mode,
    *,
    clients: int,
    requests: int,
    tokens: int,
    seed: int,
) -> Load:
    """Sends requests from several clients, each after its last answer, and measures them.

    Args:
        address: address of the service.
        name: name of the model.
        mode: the mode of serving.
        clients: number of clients.
        requests: number of requests of all clients.
        tokens: length limit of answers.
        seed: seed of the images.
    """
    fields = {"model": name, "max_tokens": tokens, "stream": True, **mode.fields}
    fields["stream_options"] = {"include_usage": True}
    rng, first_tokens, kept, remaining = np.random.default_rng(seed), [], [], iter(range(requests))

    async def ask(client: httpx2.AsyncClient) -> None:
        for _ in remaining:
            body = {**fields, "messages": [message(rng)]}
            start_time, first_token, usage = time.perf_counter(), None, {}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError((await response.aread()).decode())
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        usage = event.get("usage") or usage
                        if first_token is None and event["choices"] and _has_token(event, mode):
                            first_token = time.perf_counter() - start_time
            if first_token is None or not usage:
                raise RuntimeError("an answer was cut off")
            first_tokens.append(first_token)
            kept.append(usage.get("visual_tokens_kept", np.nan))

    start_time = time.perf_counter()
    async with httpx2.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    rate = requests / (time.perf_counter() - start_time)
    return Load(rate, *np.percentile(first_tokens, [50, 99]).tolist(), float(np.mean(kept)))


def _has_token(event: dict[str, Any], mode: Mode) -> bool:
    """Returns whether an event has a token. The first event of vLLM has only the role."""
    return mode.has_server or "role" not in event["choices"][0]["delta"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command: prints a row for each mode and number of clients."""
    parser = Parser(prog="tools.bench.serving", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--clients", type=integer_from(1), nargs="+", default=[1, 4, 16, 32])
    add(
        "--requests",
        type=integer_from(1),
        default=16,
        help="number of requests, at least 1.5 per client",
    )
    add("--tokens", type=integer_from(1), default=16, help="length limit of answers")
    names = [mode.name for mode in MODES]
    add("--modes", nargs="+", choices=names, default=names, help="modes to measure")
    flags = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    try:
        millions = write_model(folder)
        print(f"{machine()}; {millions:.0f} million weights, float32\n", flush=True)
        policy = str(folder / "policy.safetensors")
        setting = {VARIABLE: json.dumps({"policy": policy, "budget": KEPT})}
        with (
            Vllm(folder / "model", folder / "vllm.log", *ENGINE_FLAGS) as engine,
            Vllm(
                folder / "model", folder / "plugin.log", *ENGINE_FLAGS, settings=setting
            ) as plugin,
        ):
            port = free_port()
            command = [sys.executable, "-m", "stepprune_jax.cli.serve", "--dtype", "float32"]
            command += ["--model", folder / "model", "--policy", policy]
            command += ["--engine", engine.address, "--engine_timeout", 600, "--port", port]
            server = subprocess.Popen([*map(str, command)])
            try:
                _measure(engine, plugin, f"http://127.0.0.1:{port}", flags)
            finally:
                server.terminate()
                server.wait()
    finally:
        shutil.rmtree(folder)


def _measure(engine: Vllm, plugin: Vllm, server_address: str, flags: argparse.Namespace) -> None:
    """Waits for the server, compiles its programs for all batch sizes, and prints the table."""
    while True:
        try:
            httpx2.get(f"{server_address}/health")
            break
        except httpx2.TransportError:
            time.sleep(0.5)

    def run(mode: Mode, clients: int, requests: int, seed: int) -> Load:
        vllm = plugin if mode.has_plugin else engine
        target = (server_address, "model") if mode.has_server else (vllm.address, vllm.name)
        sizes = {"clients": clients, "requests": requests, "tokens": flags.tokens}
        return asyncio.run(measure_load(*target, mode, **sizes, seed=seed))

    modes = [mode for mode in MODES if mode.name in flags.modes]
    for mode in modes:
        for size in (1, 2, 4, 8) if mode.has_server or mode.has_plugin else (1,):
            run(mode, size, size, size)
    print("| | clients | requests | requests/s | first token p50 s | p99 s | tokens kept |")
    print(f"|{' --- |' * 7}", flush=True)
    for number in flags.clients:
        total = max(flags.requests, 3 * number // 2)
        for mode in modes:
            rate, median, late, kept = run(mode, number, total, 1000 + number)
            cells = f"{rate:.2f} | {median:.2f} | {late:.2f} | {kept:.1f}"
            print(f"| {mode.name} | {number} | {total} | {cells} |", flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.serving", main)
