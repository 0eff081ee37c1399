import dataclasses
import json
import re
from pathlib import Path

import jax
import mmtok_authors
import numpy as np
import pytest
import torch
import torch_pruning
from generation_reference import ask, pruner_inputs, random_image, request, traced
from mmtok_authors import CASES, TOWER_WIDTH, WIDTH, make_table, make_tokens
from tiny_qwen import qwen_tokenizer, tiny_qwen_config
from views import llava, view

from stepprune_jax.data.prompts import word_ids
from stepprune_jax.inference import pipeline
from stepprune_jax.models.qwen2_5_vl import QwenConfig
from stepprune_jax.pruning import Budget, MMTok, Random
from stepprune_jax.pruning.mmtok import _STOP_WORDS

RECORD = json.loads((Path(mmtok_authors.__file__).parent / "recorded/mmtok.json").read_text())
QWEN = QwenConfig.from_hf(tiny_qwen_config(qwen_tokenizer()))


rank = jax.jit(
    lambda pruner, inputs, steps: pruner.rank(inputs, steps).order, static_argnames="steps"
)


def cases_of(family):
    return [
        (case, choices)
        for case, choices in zip(CASES, RECORD["choices"], strict=True)
        if case.family == family
    ]


def embed_questions(config, cases):
    """Returns padded embeddings [r, m, e] of the words that the method reads, and their mask."""
    tokenizer, junk = mmtok_authors.make_tokenizer(), np.nan
    table = make_table(len(tokenizer))
    rows = [table[list(word_ids(tokenizer, MMTok().words(config, x.question)))] for x, _ in cases]
    text = np.full((len(rows), max(map(len, rows)), WIDTH), junk, np.float32)
    for row, embeddings in zip(text, rows, strict=True):
        row[: len(embeddings)] = embeddings
    return {"text": text, "text_valid": ~np.isnan(text[..., 0])}


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_choices_in_padded_batches_equal_the_authors_program(family):
    cases = cases_of(family)
    n = max(case.num_tokens for case, _ in cases)
    tokens = np.full((len(cases), n, WIDTH), np.nan, np.float32)
    features = np.full((len(cases), n, TOWER_WIDTH), np.nan, np.float32)
    for row, (case, _) in enumerate(cases):
        size = case.num_tokens
        (tokens[row, :size],), (features[row, :size],) = make_tokens(case)
    if family == "llava":
        features = np.pad(features, ((0, 0), (1, 0), (0, 0)), constant_values=3)  # class tokens
    valid = ~np.isnan(tokens[..., 0])
    text = embed_questions(llava() if family == "llava" else QWEN, cases)
    order = rank(MMTok(), view(tokens, features, count=1, valid=valid, **text), n // 2)
    for row, (case, choices) in enumerate(cases):
        for budget, (expected,) in zip(case.budgets, choices, strict=True):
            assert sorted(order[row, :budget].tolist()) == expected, case


def test_tiles_keep_the_tokens_that_the_authors_program_keeps_of_each():
    """Row ends stand between the tiles here; they are kept after all patches."""
    cases = cases_of("tiles")
    size = cases[0][0].num_tokens
    part = np.concatenate([np.append(np.full(size, tile), -1) for tile in range(3)])
    patches = np.flatnonzero(part >= 0)
    tokens = np.zeros((len(cases), len(part), WIDTH), np.float32)
    features = np.zeros((len(cases), 1 + len(part), TOWER_WIDTH), np.float32)
    for row, (case, _) in enumerate(cases):
        case_tokens, case_features = make_tokens(case)
        tokens[row, patches] = case_tokens.reshape(-1, WIDTH)
        features[row, 1 + patches] = case_features.reshape(-1, TOWER_WIDTH)
    text, tile = embed_questions(llava(), cases), np.tile(part, (len(cases), 1))
    order = rank(MMTok(), view(tokens, features, tile, count=1, **text), len(part))
    for row, (case, choices) in enumerate(cases):
        for budget, choices_of_tiles in zip(case.budgets, choices, strict=True):
            expected = [patches[t * size + i] for t in range(3) for i in choices_of_tiles[t]]
            assert sorted(order[row, : 3 * budget].tolist()) == expected, case
        assert sorted(order[row, : len(patches)].tolist()) == patches.tolist()


def test_llava_reads_keywords_and_qwen_reads_all_words():
    assert sorted(_STOP_WORDS) == RECORD["stop_words"]
    instruction = mmtok_authors.INSTRUCTION
    text = f"The dog's COLOR: is it red?{instruction}"
    assert MMTok().words(llava(), text) == ["dog", "s", "COLOR", "red"]
    assert MMTok().words(llava(), f"What is it?{instruction}") == ["What", "is", "it?"]
    assert MMTok().words(QWEN, "Is it red?") == ["Question:", "Is", "it", "red?"]


def test_equal_tokens_without_a_question_go_to_the_earlier_one():
    """A copy of a chosen token adds nothing, so all distinct tokens come before all copies."""
    distinct = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    tokens = np.concatenate([distinct, distinct])[None]
    inputs = view(tokens, tokens, count=12, text=np.zeros((1, 1, 8)))
    order = rank(MMTok(), inputs, 12)[0].tolist()
    assert sorted(order[:6]) == list(range(6)) and order[6:] == list(range(6, 12))


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def cover(tokens, features, words, count):
    """Chooses tokens of one image, by the total coverage of all larger sets, in float64."""
    tokens, features, words = (
        x / np.linalg.norm(x, axis=1, keepdims=True)
        for x in (np.asarray(x, np.float64) for x in (tokens, features, words))
    )
    coverage = np.concatenate(
        [
            softmax(words @ tokens.T / 0.02) / len(words),
            0.5 * softmax(features @ features.T / 0.2) / len(tokens),
        ]
    )
    chosen = []
    for _ in range(count):
        totals = [
            -1 if i in chosen else coverage[:, [*chosen, i]].max(1).sum()
            for i in range(len(tokens))
        ]
        chosen.append(int(np.argmax(totals)))
    return sorted(chosen)


def test_generation_equals_the_torch_reference(llava_pair):
    """The words are read from the prompt, tokenized one by one, and embedded by the model."""
    pruner, tokenizer = MMTok(Budget("count", 4)), llava_pair.ours.tokenizer
    table = llava_pair.theirs.model.get_input_embeddings()
    is_filtered = False
    for example in traced(llava_pair, ask(3, seed=4), pruner, 1):
        all_words = re.findall(r"\w+", example.prompt)
        keywords = [x for x in all_words if x.lower() not in RECORD["stop_words"]] or all_words
        is_filtered |= len(keywords) < len(all_words)
        ids = [i for word in keywords for i in tokenizer(word, add_special_tokens=False).input_ids]
        words = table(torch.tensor(ids)).detach().numpy()

        def choose(tokens, tower, pixels, words=words):
            features = torch_pruning.all_patches(tower, pixels)
            kept = cover(tokens.numpy(), features.numpy(), words, 4)
            return kept, tokens[kept]

        torch_pruning.check(llava_pair, example, choose, projected=True)
    assert is_filtered


@dataclasses.dataclass(frozen=True)
class ReadsTwice(Random):
    """Reads every word of the question twice."""

    name = "reads twice"
    reads_text = reads_words = True

    def words(self, config, text):
        return text.split() * 2


def test_words_with_more_tokens_than_the_text_are_not_cut_off(llava_pair):
    model, (question, image) = llava_pair.ours, ("red dog? " * 5, random_image(0))
    read = request(model, question, [image])
    prompts, images = read.prompts(), pipeline.encode(model, read.images)
    inputs = pruner_inputs(model, ReadsTwice(4), prompts, images)
    ids = word_ids(model.tokenizer, question.split() * 2)
    assert prompts.words.shape[1] < len(ids) == inputs.text_valid.sum()
    table = model.params["language"]["embed"]["embedding"]
    np.testing.assert_array_equal(inputs.text[0, : len(ids)], table[np.array(ids)])
