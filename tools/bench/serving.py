"""Load on a service: vLLM alone, and behind a front that prunes, on this machine's CPU.

    python -m tools.bench.serving --clients 1 4 16 32

A LLaVA of about 190 million random weights, 576 visual tokens an image, and an untrained policy
whose stop bias is set so that it keeps 64 of them on average. Clients ask in a closed loop, each
about an image of its own, for short answers. `make test-serving` builds vLLM's environment.
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


class Way(NamedTuple):
    """A way of serving: its name, whether the front is in between, and fields of its requests."""

    name: str
    front: bool
    fields: Mapping[str, Any]


WAYS = (
    Way("vLLM alone", False, {"temperature": 0, "add_special_tokens": False}),
    Way("front, all tokens", True, {"pruner": "all"}),
    Way(f"front, {KEPT} tokens", True, {"budget": KEPT}),
    Way("front, by its stop", True, {}),
)


class Load(NamedTuple):
    """What a load has shown.

    Attributes:
        rate: requests per second, from the first question to the last answer.
        median: seconds to the first token.
        late: their 99th percentile.
        kept: mean number of visual tokens kept; nan where it is not told.
    """

    rate: float
    median: float
    late: float
    kept: float


def write_model(folder: Path) -> float:
    """Writes the model and the policy, and returns the millions of weights."""
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
    low, high = -50.0, 50.0
    for _ in range(40):
        bias = (low + high) / 2
        mean = float(np.mean(count_at_bias(ranking.margin, bias, config.min_tokens)))
        low, high = (bias, high) if mean > KEPT else (low, bias)
    save_policy(policy.replace(stop_bias=bias), folder / "policy.safetensors")
    return sum(leaf.size for leaf in jax.tree.leaves(model.params)) / 1e6


def picture(random: np.random.Generator) -> Image.Image:
    """Draws an image that no other request has, so that no cache answers."""
    small = random.integers(0, 256, (24, 24, 3), np.uint8)
    return Image.fromarray(small).resize((336, 336), Image.Resampling.BICUBIC)


def message(random: np.random.Generator) -> dict[str, Any]:
    """Returns a user's message with a picture."""
    file = io.BytesIO()
    picture(random).save(file, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}


async def load(
    address: str, name: str, way: Way, clients: int, requests: int, tokens: int, seed: int
) -> Load:
    """Asks a number of requests in a closed loop."""
    fields = {"model": name, "max_tokens": tokens, "stream": True, **way.fields}
    fields["stream_options"] = {"include_usage": True}
    random, first, kept, left = np.random.default_rng(seed), [], [], iter(range(requests))

    async def ask(client: httpx2.AsyncClient) -> None:
        for _ in left:
            body = {**fields, "messages": [message(random)]}
            begin, taken, usage = time.perf_counter(), None, {}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError((await response.aread()).decode())
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        usage = event.get("usage") or usage
                        if taken is None and event["choices"] and _has_token(event, way):
                            taken = time.perf_counter() - begin
            if taken is None or not usage:
                raise RuntimeError("an answer was cut off")
            first.append(taken)
            kept.append(usage.get("visual_tokens_kept", np.nan))

    begin = time.perf_counter()
    async with httpx2.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    rate = requests / (time.perf_counter() - begin)
    return Load(rate, *np.percentile(first, [50, 99]).tolist(), float(np.mean(kept)))


def _has_token(event: dict[str, Any], way: Way) -> bool:
    """Returns whether an event is of a token: vLLM sends the role before it has one."""
    return way.front or "role" not in event["choices"][0]["delta"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each way and number of clients."""
    parser = Parser(prog="tools.bench.serving", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--clients", type=integer_from(1), nargs="+", default=[1, 4, 16, 32])
    add("--requests", type=integer_from(1), default=16, help="of a load, or 1.5 for each client")
    add("--tokens", type=integer_from(1), default=16, help="of an answer")
    given = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    try:
        millions = write_model(folder)
        print(f"{machine()}; {millions:.0f} million weights, float32\n", flush=True)
        with Vllm(folder / "model", folder / "vllm.log", *ENGINE_FLAGS) as engine:
            port = free_port()
            command = [sys.executable, "-m", "stepprune_jax.serving", "--dtype", "float32"]
            command += ["--model", folder / "model", "--policy", folder / "policy.safetensors"]
            command += ["--engine", engine.address, "--engine_timeout", 600, "--port", port]
            front = subprocess.Popen([*map(str, command)])
            try:
                _measure(engine, f"http://127.0.0.1:{port}", given)
            finally:
                front.terminate()
                front.wait()
    finally:
        shutil.rmtree(folder)


def _measure(engine: Vllm, front: str, given: argparse.Namespace) -> None:
    """Prints the table, once the programs of each size of a batch are there."""
    while True:
        try:
            httpx2.get(f"{front}/health")
            break
        except httpx2.TransportError:
            time.sleep(0.5)

    def run(way: Way, clients: int, requests: int, seed: int) -> Load:
        place = (front, "model") if way.front else (engine.address, engine.name)
        return asyncio.run(load(*place, way, clients, requests, given.tokens, seed))

    for way in WAYS:
        for size in (1, 2, 4, 8) if way.front else (1,):
            run(way, size, size, size)
    print("| | clients | requests | requests/s | first token p50 s | p99 s | tokens kept |")
    print(f"|{' --- |' * 7}", flush=True)
    for number in given.clients:
        total = max(given.requests, 3 * number // 2)
        for way in WAYS:
            rate, median, late, kept = run(way, number, total, 1000 + number)
            cells = f"{rate:.2f} | {median:.2f} | {late:.2f} | {kept:.1f}"
            print(f"| {way.name} | {number} | {total} | {cells} |", flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.serving", main)
