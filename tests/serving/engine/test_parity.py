"""Greedy ids through the front and an unmodified vLLM are those of the library's own `generate`."""

import concurrent.futures

import jax.numpy as jnp
import numpy as np
from servers import ask, openai_client, serve_with_engine, user_message
from small_world import TEXTS, stepprune
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.registry import build_pruner

MOST = 12
COMPACT = RunOptions(MOST, "compact")
CLIENTS = 16
FOUR = {"batch_size": 4}


def loaded(folder, use="answers"):
    return load_vlm(folder, dtype=jnp.float32, use=use, progress=False)


def requests(number, pruners, sides=(8, 90)):
    """Random questions about images of mixed sizes, with mixed methods and budgets."""
    random = np.random.default_rng(7)
    for seed in range(number):
        sizes = random.integers(*sides, (random.integers(1, 3), 2))
        images = [noise(100 * seed + n, tuple(map(int, x))) for n, x in enumerate(sizes)]
        text = " ".join(random.choice(TEXTS, random.integers(1, 4)))
        pruner, most = pruners[random.integers(len(pruners))]
        budget = None if most is None else int(random.integers(1, most + 1))
        yield text, images, pruner, budget


def compare(model, address, policy, asked):
    def through(one):
        text, images, pruner, budget = one
        fields = {"pruner": pruner} | ({} if budget is None else {"budget": budget})
        return ask(client, text, images, MOST, **fields)

    with (
        openai_client(address) as client,
        concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads,
    ):
        found = list(threads.map(through, asked))
    counts, differ = set(), []
    for one, answer in zip(asked, found, strict=True):
        text, images, pruner, budget = one
        method = build_pruner(pruner, budget, policy=policy if pruner == "stepprune" else None)
        (expected,) = generate(model, [text], [images], method, options=COMPACT)
        usage, (choice,) = answer.usage, answer.choices
        numbers = (usage.visual_tokens, usage.visual_tokens_kept, tuple(choice.token_ids))
        same = numbers == (expected.visual_tokens, expected.kept, expected.token_ids)
        same &= choice.message.content == expected.text
        counts.add(expected.kept)
        if not same:
            differ.append((one, numbers, expected))
    assert not differ, f"{len(differ)} of {len(asked)} differ; the first: {differ[0]}"
    assert len(counts) > 5, counts


def test_requests_to_a_llava(wide_llava, start):
    model, policy = loaded(wide_llava), stepprune(text_width=64)
    engine = start(wide_llava)
    pruners = [("stepprune", None), ("stepprune", 4), ("grid", 9), ("random", 9), ("all", None)]
    pruners += [("visionzip", 6), ("divprune", 9)]
    # The front has no layers of the language model.
    front_model = loaded(wide_llava, "embeddings")
    with serve_with_engine(engine.address, front_model, batching=FOUR, policy=policy) as address:
        compare(model, address, policy, list(requests(64, pruners)))


def test_requests_to_a_qwen_with_compact_positions(wide_qwen, start):
    """Three ids per token: vLLM gives embeddings those of text, which are the compact ones."""
    model = loaded(wide_qwen)
    policy = stepprune(feature_width=64, text_width=64).replace(stats=None)
    engine = start(wide_qwen)
    pruners = [("stepprune", None), ("grid", 4), ("all", None)]
    with serve_with_engine(engine.address, model, batching=FOUR, policy=policy) as address:
        compare(model, address, policy, list(requests(24, pruners, (16, 60))))


def test_with_all_tokens_the_answers_are_vllms_own(wide_llava, start):
    """Images of the tower's own size: the two programs resize others in other ways."""
    model = loaded(wide_llava)
    engine = start(wide_llava)
    with (
        serve_with_engine(engine.address, model) as address,
        openai_client(address) as front,
        openai_client(engine.address) as vllm,
    ):
        for number, text in enumerate(TEXTS * 3):
            found = ask(front, text, [noise(number)], MOST)
            own = vllm.chat.completions.create(
                model=engine.name,
                messages=[user_message(text, noise(number))],
                max_tokens=MOST,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            assert own.usage.prompt_tokens == found.usage.prompt_tokens
            assert own.choices[0].token_ids == found.choices[0].token_ids
