import dataclasses
import io
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import (
    ByQuestion,
    ask,
    load_pair,
    pruner_inputs,
    random_image,
    reference_answer,
    request,
)
from PIL import Image
from small_world import broken_at, stepprune
from torch_pruning import pruned_answer
from visual import as_a_phone_stores

from stepprune_jax import FeatureStats, PolicyConfig, init_policy, testing
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference import (
    Generator,
    NotFiniteError,
    RunOptions,
    Sampling,
    generate,
    greedy,
    pipeline,
    read_request,
    stream,
)
from stepprune_jax.inference.decoding import run_decode
from stepprune_jax.inference.programs import num_compiled, run_prefill, run_select
from stepprune_jax.models.sequence import POSITIONS
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.pruning import AllTokens, FastV, Random
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import StepPrune
from stepprune_jax.user_input import UserError

PROMPTS = ("What is in this picture?", "two", "red dog yes no the user gives helpful answers", "no")
IMAGES = ([random_image(1)], None, [random_image(2), random_image(3)], [random_image(4)])
EIGHT = RunOptions(max_tokens=8)
BY_QUESTION = ByQuestion()


@pytest.fixture(scope="module")
def model(llava_pair):
    return llava_pair.ours


@pytest.fixture(scope="module")
def policy():
    widths = {"feature_width": 32, "text_width": 48, "width": 16}
    config = PolicyConfig(**widths, num_heads=2, mlp_ratio=2, decoder_layers=2)
    # Sharp pointers: counts differ between rows.
    params = jax.tree.map(lambda leaf: 3 * leaf, init_policy(jax.random.key(2), config))
    return StepPrune(params=params, config=config, stats=FeatureStats.start(32), stop_bias=0.5)


def ids(answers):
    return [answer.token_ids for answer in answers]


def streamed(model, prompts, images, pruner=AllTokens(), **options):
    """The events of a streamed batch, and its answers."""
    generator, ended = Generator(model, pruner, **options), []

    def follow():
        ended.extend((yield from generator.stream(generator.read(prompts, images))))

    return list(follow()), ended


@pytest.mark.supports("llava", "answer")
def test_greedy_ids_equal_the_reference(llava_pair):
    prompts, images = ask(13, seed=7)
    # One batch against one prompt at a time: rows are padded, and its 14 images to 16.
    answers = generate(llava_pair.ours, prompts, images, options=RunOptions(max_tokens=10))
    expected = [
        reference_answer(llava_pair, prompt, prompt_images, 10)
        for prompt, prompt_images in zip(prompts, images, strict=True)
    ]
    assert ids(answers) == expected
    assert [a.visual_tokens for a in answers] == [9 * len(row) for row in images]
    assert all(a.kept == a.visual_tokens for a in answers)


@pytest.mark.parametrize("positions", POSITIONS)
def test_pruned_ids_equal_a_run_on_the_kept_tokens_by_hand(llava_pair, positions):
    nothing_kept = " ".join(["dog"] * 8)
    prompts, images = (*PROMPTS, nothing_kept), (*IMAGES, IMAGES[0])
    options = RunOptions(8, positions)
    answers = generate(llava_pair.ours, prompts, images, BY_QUESTION, options=options)
    for answer, prompt, prompt_images in zip(answers, prompts, images, strict=True):
        expected = pruned_answer(llava_pair, prompt, prompt_images or [], positions, 8)
        assert answer.token_ids == expected, prompt
    assert len({answer.kept for answer in answers}) > 2
    assert (answers[-1].visual_tokens, answers[-1].kept) == (9, 0)


def test_a_single_text_is_one_prompt(model):
    options = RunOptions(max_tokens=2)
    expected = generate(model, [PROMPTS[0]], [IMAGES[0]], options=options)
    (answer,) = generate(model, PROMPTS[0], IMAGES[0], options=options)
    assert answer == expected[0]
    (answer,) = generate(model, PROMPTS[0], options=options)
    assert answer.visual_tokens == 0


def test_answers_say_what_was_kept_in_the_order_of_choice(model, policy):
    def kept(*method, **options):
        method = build_pruner(*method, **options)
        answers = generate(model, PROMPTS, IMAGES, method, options=RunOptions(max_tokens=1))
        return [answer.kept_indices for answer in answers]

    everything = tuple(range(9))
    assert kept() == [(everything,), (), (everything,) * 2, (everything,)]
    assert any(list(row) != sorted(row) for image in kept("cls", 7) for row in image)
    fastv_indices = [row for image in kept("fastv", 4, options={"layer": 1}) for row in image]
    assert all(list(row) == sorted(row) and len(row) == 4 for row in fastv_indices)
    merged = kept("visionzip", 4, options={"contextual": 1})
    assert all(row[0] == row[-1] == -1 and min(row[1:3]) >= 0 for image in merged for row in image)
    policy_indices = [row for image in kept(policy=policy) for row in image]
    assert all(len({*row}) == len(row) for row in policy_indices)
    assert len({*map(len, policy_indices)}) > 1


def test_a_row_that_is_cut_says_what_is_left(model):
    limit = request(model, "two", IMAGES[0]).ids[0].index(IMAGE_TOKEN) + 4
    method = build_pruner("cls", 7)
    (untruncated,) = generate(model, ["two"], [IMAGES[0]], method, options=RunOptions(max_tokens=1))
    with pytest.warns(UserWarning, match="was truncated"):
        options = RunOptions(1, context_limit=limit)
        (answer,) = generate(model, ["two"], [IMAGES[0]], method, options=options)
    expected = {*sorted(untruncated.kept_indices[0])[:4]}
    assert (answer.visual_tokens, answer.kept) == (9, 4)
    assert [*answer.kept_indices[0]] == [i for i in untruncated.kept_indices[0] if i in expected]


def test_a_row_of_a_batch_draws_words_of_its_own(model, policy):
    settings = {"pruner": policy, "sampling": Sampling(5, 0.9, 0.9)}
    together = generate(model, PROMPTS, IMAGES, options=EIGHT, **settings)
    prompts, images = ["a", "a", PROMPTS[2]], [None, None, IMAGES[2]]
    *_, alone = generate(model, prompts, images, options=EIGHT, **settings)
    assert alone[:4] == together[2][:4]
    # One question four times is four answers, from the same tokens.
    four = generate(model, PROMPTS[:1] * 4, IMAGES[:1] * 4, options=EIGHT, **settings)
    assert len({answer.token_ids for answer in four}) == 4
    assert len({answer.kept_indices for answer in four}) == 1


def begin(model, asked, method, max_tokens=1, **options):
    """The pipeline's first half by hand, and from images behind the tower."""
    images = pipeline.encode(model, asked.images, method.taps(model.config))
    options = RunOptions(max_tokens, "original", **options)
    sampling = greedy([2])._replace(repetition_penalty=np.float32(2))
    return pipeline.first_tokens(model, method, asked.prompts(), images, options, sampling)


def test_a_pruner_sees_the_users_words_and_the_images_of_its_prompt(model):
    request_of_batch, by_class = read_request(model, PROMPTS, IMAGES), build_pruner("cls", 2)
    taps = by_class.taps(model.config)
    images = pipeline.encode(model, request_of_batch.images, taps)
    with_text, without_text = (
        pruner_inputs(model, pruner, request_of_batch.prompts(), images)
        for pruner in (ByQuestion(), by_class)
    )
    questions = [PROMPTS[i] for i in (0, 2, 2, 3)]
    table = model.params["language"]["embed"]["embedding"]
    encode_image = jax.jit(model.backbone.encode_image, static_argnums=2)
    np.testing.assert_array_equal(with_text.number[:4], [0, 2, 2, 3])
    np.testing.assert_array_equal(with_text.grid, [[3, 3]] * len(with_text.grid))
    for row, words in enumerate(questions):
        tokens = model.tokenizer(words, add_special_tokens=False).input_ids
        assert with_text.text_valid[row].sum() == len(tokens)
        np.testing.assert_array_equal(with_text.text[row, : len(tokens)], table[np.array(tokens)])
    for row, image in enumerate([*IMAGES[0], *IMAGES[2], *IMAGES[3]]):
        pixels = request(model, "?", [image]).images.pixels
        features, taps_by_name = encode_image(model.params, jnp.asarray(pixels), taps)
        np.testing.assert_allclose(with_text.tokens[row], features[0], rtol=1e-4, atol=1e-5)
        (attention,) = taps_by_name.values()
        np.testing.assert_allclose(without_text.taps[0][row], attention[0], rtol=1e-4, atol=1e-5)
    assert not without_text.text_valid.any() and without_text.count[:4].tolist() == [2] * 4


def test_an_image_that_is_shown_twice_is_encoded_once(model):
    image = random_image(1)
    read = read_request(model, ["a", "b", "c"], [image, [image], None])
    assert read.images.pixels.shape[0] == 1 and read.image_of == ((0,), (0,), ())
    twice = generate(model, ["red", "dog"], [image, image], options=EIGHT)
    copies = generate(model, ["red", "dog"], [image.copy(), image.copy()], options=EIGHT)
    assert ids(twice) == ids(copies)
    out = io.BytesIO()
    image.save(out, "PNG")
    file_bytes, copied_bytes = out.getvalue(), bytes(bytearray(out.getvalue()))
    read = read_request(model, ["a", "b"], [file_bytes, copied_bytes])
    assert read.images.pixels.shape[0] == 1 and read.image_of == ((0,), (0,))


def test_an_image_is_read_as_it_is_shown_or_as_it_is_stored(model, tmp_path):
    upright, path = random_image(1), tmp_path / "1.png"
    stored = as_a_phone_stores(upright)
    stored.save(path, exif=stored.getexif())
    for image in (stored, path, path.read_bytes()):
        for as_shown, expected in ((True, upright), (False, np.asarray(stored))):
            pixels = read_request(model, ["a"], [image], as_shown=as_shown).images.pixels
            expected_request = read_request(model, ["a"], [Image.fromarray(np.asarray(expected))])
            np.testing.assert_array_equal(pixels, expected_request.images.pixels)
    assert read_request(model, ["a"], [path]).images.pixels.any()


@pytest.mark.parametrize("answer", [generate, lambda *how, **also: streamed(*how, **also)[1]])
def test_logits_that_are_not_finite_cost_no_other_prompt_its_answer(model, answer):
    """Prompts 1 and 3 read the broken token; no other prompt does."""
    prompts = ["two", "red dog", "no", "a dog"]
    expected = answer(model, prompts, IMAGES, options=EIGHT)
    with pytest.raises(NotFiniteError, match=r"^prompts 1, 3: the model's logits") as caught:
        answer(broken_at(model, "▁dog"), prompts, IMAGES, options=EIGHT)
    assert caught.value.numbers == (1, 3) and isinstance(caught.value, UserError)
    assert caught.value.answers == [expected[0], None, expected[2], None]


def test_a_row_is_streamed_up_to_the_token_that_breaks_it(model):
    _, answers = streamed(model, PROMPTS[:2], IMAGES[:2], options=EIGHT)
    first, second = (answer.token_ids for answer in answers)
    broken_token = next(token for token in second if token not in first)
    generator, events = Generator(broken_at(model, broken_token), options=EIGHT), []
    with pytest.raises(NotFiniteError, match=r"^prompt 1: ") as caught:
        for event in generator.stream(generator.read(PROMPTS[:2], IMAGES[:2])):
            events.append(event)
    assert caught.value.answers == [answers[0], None]
    ids_of = [[token for row, token in events if row == number] for number in (0, 1)]
    assert ids_of == [list(first), [*second[: second.index(broken_token) + 1], -1]]


def test_no_more_than_ten_prompts_are_named():
    assert str(NotFiniteError([7])).startswith("prompt 7: ")
    assert str(NotFiniteError(range(12))).startswith("prompts 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 m")


def test_an_answer_ends_with_a_stop_id_or_at_max_tokens(llava_pair):
    model = llava_pair.ours
    unstopped = generate(model, PROMPTS, IMAGES, options=EIGHT)
    assert all(len(answer.token_ids) == 8 for answer in unstopped)
    stop = unstopped[0].token_ids[3], unstopped[2].token_ids[1]
    stopped = generate(model, PROMPTS, IMAGES, sampling=Sampling(stop_ids=stop), options=EIGHT)
    for before, after in zip(unstopped, stopped, strict=True):
        hits = [i for i, token in enumerate(before.token_ids) if token in stop]
        assert after.token_ids == before.token_ids[: hits[0] + 1 if hits else 8]
    assert len(stopped[2].token_ids) <= 2 and len(stopped[0].token_ids) <= 4
    expected = reference_answer(llava_pair, PROMPTS[0], IMAGES[0], 8, eos_token_id=list(stop))
    assert stopped[0].token_ids == expected
    one = generate(model, PROMPTS, IMAGES, options=RunOptions(max_tokens=1))
    assert ids(one) == [answer.token_ids[:1] for answer in unstopped]
    # The loop exits when every row is finished.
    at_once = Sampling(stop_ids=[answer.token_ids[0] for answer in unstopped])
    events, _ = streamed(model, PROMPTS, IMAGES, sampling=at_once, options=EIGHT)
    assert events == [(row, a.token_ids[0]) for row, a in enumerate(unstopped)]


def test_an_answer_ends_with_the_ids_of_the_generation_config(llava_pair, tmp_path):
    folder = shutil.copytree(llava_pair.ours.folder, tmp_path / "copy")
    (unstopped,) = generate(llava_pair.ours, PROMPTS[:1], IMAGES[:1], options=EIGHT)
    stop = unstopped.token_ids[3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop]}))
    pair = load_pair(folder)
    (stopped,) = generate(pair.ours, PROMPTS[:1], IMAGES[:1], options=EIGHT)
    assert stopped.token_ids[-1] == stop
    assert stopped.token_ids == reference_answer(pair, PROMPTS[0], IMAGES[0], 8)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(model):
    def answer(key, top_p=1.0, **options):
        sampling = Sampling(key, 1.5, top_p)
        how = {"sampling": sampling, "options": EIGHT} | options
        return ids(generate(model, PROMPTS[:2], IMAGES[:2], **how))

    how = {"sampling": Sampling(0, 1.5), "options": EIGHT}

    first = answer(0)
    assert answer(0) == first and answer(jax.random.key(0)) == first
    assert answer(1) != first
    assert ids(streamed(model, PROMPTS[:2], IMAGES[:2], **how)[1]) == first
    # Each row and each step draws anew, here almost uniformly.
    rows = answer(0, sampling=Sampling(0, 1e6))
    assert rows[0] != rows[1] and all(len({*row}) > 1 for row in rows)
    # A nucleus of one token is greedy.
    assert answer(3, 1e-6) == answer(0, sampling=Sampling())


def test_streamed_pieces_concatenate_to_the_answer(model, policy):
    settings = {"pruner": build_pruner(policy=policy), "options": EIGHT}
    answers_at_once, returned = generate(model, PROMPTS, IMAGES, **settings), []
    events, answers = streamed(model, PROMPTS, IMAGES, **settings)
    assert answers == answers_at_once
    for row, answer in enumerate(answers_at_once):
        assert answer.token_ids == tuple(token for event_row, token in events if event_row == row)

    def follow():
        returned.append((yield from stream(model, PROMPTS[0], IMAGES[0], **settings)))

    assert "".join(follow()) == answers_at_once[0].text
    assert returned == answers_at_once[:1]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_steps_that_the_host_starts_give_the_answers_of_the_loop(model, monkeypatch, penalty):
    """As a GPU decodes large layers: one step ahead of what the host has read."""
    settings = {"options": RunOptions(12), "sampling": Sampling(repetition_penalty=penalty)}
    (first, *_) = generate(model, PROMPTS, IMAGES, **settings)
    # One row stops early; the stop of the other is never drawn.
    settings["sampling"] = settings["sampling"]._replace(stop_ids=(first.token_ids[3],))
    looped = generate(model, PROMPTS, IMAGES, **settings)
    events = streamed(model, PROMPTS, IMAGES, **settings)
    before = run_decode.num_compiled()
    monkeypatch.setattr(pipeline, "decodes_by_step", lambda params: True)
    assert generate(model, PROMPTS, IMAGES, **settings) == looped
    assert streamed(model, PROMPTS, IMAGES, **settings) == events and events[1] == looped
    assert run_decode.num_compiled() == before + 1
    one = {**settings, "options": RunOptions(1)}
    assert [len(x.token_ids) for x in generate(model, PROMPTS, IMAGES, **one)] == [1] * len(PROMPTS)


def test_a_conversation_goes_on_after_an_answer(llava_pair):
    model = llava_pair.ours
    turns = [PROMPTS[0], "yes <image>", PROMPTS[2]]
    read = request(model, turns, IMAGES[0])
    assert read.ids[0].count(IMAGE_TOKEN) == 1 and read.ids[0].count(2) == 1
    both = f"{PROMPTS[0]}\n{PROMPTS[2]}"
    word_ids = model.tokenizer(both, add_special_tokens=False).input_ids
    assert list(read.question_ids[0]) == word_ids
    (answer,) = generate(model, [turns], [IMAGES[0]], options=EIGHT)
    assert answer.token_ids == reference_answer(llava_pair, turns, IMAGES[0], 8)
    # An image may come later.
    ids_of_later_image = request(model, ["red", "no", "dog <image>"], IMAGES[0]).ids[0]
    assert ids_of_later_image.index(IMAGE_TOKEN) > read.ids[0].index(IMAGE_TOKEN)


def test_few_programs_serve_many_prompts(model):
    programs = (run_select, run_prefill, run_decode)

    def compiled():
        return np.array([program.num_compiled() for program in programs])

    before, images = compiled(), [IMAGES[0], IMAGES[3]]
    for length in (1, 7, 20, 22, 30, 39):
        prompts = [" ".join(["dog"] * length), "red"]
        generate(model, prompts, images, BY_QUESTION, options=EIGHT)
    num_select, num_prefill, num_decode = compiled() - before
    assert num_select <= 3  # 1 to 39 words: 16, 32, 64
    assert num_prefill <= 3 and num_decode <= 3  # rows of 40 to 90 embeddings: 64, 80, 96
    before = compiled()
    for sampling in (Sampling(4, 0.7, 0.8, stop_ids=(9,)), Sampling(5, 1.2, 1.0, stop_ids=(8,))):
        generate(model, ["dog " * 7, "yes"], images, BY_QUESTION, sampling=sampling, options=EIGHT)
    assert (compiled() - before <= [0, 1, 1]).all()  # drawing is another program, once


def test_budgets_in_one_bucket_share_programs(model):
    generate(model, PROMPTS[:1], IMAGES[:1], build_pruner("grid", 3), options=EIGHT)
    before, method = num_compiled(), build_pruner("grid", "44.4%")
    (answer,) = generate(model, PROMPTS[:1], IMAGES[:1], method, options=EIGHT)
    assert answer.kept == 4
    assert num_compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "rows"), [("data_tensor", 4), ("fsdp_tensor", 3)])
def test_a_mesh_gives_the_same_tokens(model, policy, preset, rows):
    sharded = load_vlm(model.folder, build_mesh(preset), jnp.float32, progress=False)
    question = (PROMPTS[:rows], IMAGES[:rows], build_pruner(policy=policy))
    options = {"options": EIGHT}
    unsharded = generate(model, *question, **options)
    sharded_answers = generate(sharded, *question, **options)
    assert sharded_answers == unsharded
    if preset == "data_tensor":
        fastv, one_token = build_pruner("fastv", 3, options={"layer": 1}), RunOptions(1)
        both = [generate(m, PROMPTS, IMAGES, fastv, options=one_token) for m in (model, sharded)]
        assert ids(both[0]) == ids(both[1])
    assert streamed(sharded, *question, **options)[1] == unsharded


def test_bfloat16_answers_with_a_policy_that_reads_no_text(llava_folder):
    model = load_vlm(llava_folder, progress=False)
    method = build_pruner(policy=stepprune(text_width=0))
    with_image, without_image = generate(model, PROMPTS[:2], IMAGES[:2], method, options=EIGHT)
    assert len(with_image.token_ids) <= 8 and 0 < with_image.kept <= 9 and without_image.kept == 0


def test_the_limit_holds_after_expansion_with_the_counts_kept(model):
    read = request(model, PROMPTS[0], IMAGES[2])
    full_length, num_kept = len(read.ids[0]) - 2 + 18, int(begin(model, read, BY_QUESTION).kept[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruned = begin(model, read, BY_QUESTION, context_limit=full_length - 18 + num_kept)
    assert pruned.kept.tolist() == [num_kept]
    assert pruned.trace.stages[0].length.tolist() == [full_length - 18 + num_kept]
    with pytest.warns(
        UserWarning, match=f"of {full_length} embeddings was truncated to its first 60"
    ):
        truncated = begin(model, read, AllTokens(), context_limit=60)
    assert truncated.kept.tolist() == [18]
    (stage,) = truncated.trace.stages
    assert stage.index.shape == (1, 60) and stage.length.tolist() == [60]
    by_hand = read._replace(ids=(read.ids[0][: 60 - 18 + 2],))
    expected = begin(model, by_hand, AllTokens())
    for field in ("image", "index", "position"):
        untruncated = getattr(expected.trace.stages[0], field)
        np.testing.assert_array_equal(getattr(stage, field), untruncated[..., :60])
    np.testing.assert_allclose(truncated.trace.logits, expected.trace.logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(truncated.state.seen, expected.state.seen)


def test_the_limit_holds_behind_a_cut_of_an_image_that_was_cut(model):
    read = request(model, PROMPTS[0], IMAGES[2])
    image_place = read.ids[0].index(IMAGE_TOKEN)
    method = build_pruner("fastv", 3, options={"layer": 1})
    # Nine tokens, two of text, and two more, of which the cut would leave three.
    limit = image_place + 13
    with pytest.warns(UserWarning, match=f"truncated to its first {limit}:"):
        result = begin(model, read, method, max_tokens=2, context_limit=limit)
    before, after = result.trace.stages
    assert [int((before.image == image).sum()) for image in (0, 1)] == [9, 2]
    assert [int((after.image == image).sum()) for image in (0, 1)] == [3, 2]
    assert before.length.tolist() == [limit] and after.length.tolist() == [limit - 6]
    assert result.kept.tolist() == [5]


@pytest.mark.parametrize(
    ("name", "options"),
    [("fastv", {"layer": 1}), ("clse", {"layer_list": (1,), "average": False})],
)
def test_a_cut_that_drops_nothing_does_not_change_the_answers(model, name, options):
    """CLSE also prunes the KV caches of earlier layers."""
    cut = build_pruner(name, 9, options=options)
    run_options = RunOptions(24)  # longer than the padding of a row
    uncut, answers = (
        generate(model, PROMPTS[:1], IMAGES[:1], method, options=run_options)
        for method in (AllTokens(), cut)
    )
    assert ids(answers) == ids(uncut)


BAD = {
    "empty": ({"prompts": ["a", " "]}, ValueError, "prompt 1: the question is empty"),
    "an answer": ({"prompts": [["a", "b"]]}, ValueError, "ends with an answer"),
    "max_tokens": ({"options": RunOptions(0)}, ValueError, "max_tokens is 0"),
    "context": ({"options": RunOptions(context_limit=0)}, ValueError, "context_limit is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(model, case):
    arguments, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        generate(model, **{"prompts": ["a"], **arguments})


def test_a_generator_checks_and_reads_before_weights_are_there(model):
    without_weights = model._replace(params={})
    for pruner, message in (
        (FastV(budget=10, layer=1), "fastv: budget is 10, expected at most 9 of 9 visual tokens"),
        (FastV(budget=4, layer=2), "fastv: layer is 2, expected 1 to 1"),
        (StepPrune(), "the pruner 'stepprune' is trained: it needs a policy"),
        (Random(budget="own"), "random does not support the budget adaptive"),
        (FastV(layer=1), r"the pruner 'fastv' needs a budget \(budget=64 in Python"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Generator(without_weights, pruner)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        Generator(without_weights, options=RunOptions(0))
    with pytest.raises(ValueError, match="temperature is -1"):
        Generator(without_weights, sampling=Sampling(temperature=-1.0))
    pruner_of_answer = FastV(budget=4, layer=1)
    generator = Generator(without_weights, pruner_of_answer, options=EIGHT)
    read = generator.read(PROMPTS, IMAGES)
    loaded = dataclasses.replace(generator, model=model)
    assert loaded.answer(read) == generate(model, PROMPTS, IMAGES, pruner_of_answer, options=EIGHT)
    assert loaded.placed is loaded.placed  # once for many requests


def test_what_does_not_fit_the_model_is_refused(model, monkeypatch):
    other_policy = stepprune(feature_width=16).replace(stats=None)
    with pytest.raises(ValueError, match="feature_width is 16, the model's vision hidden_size 32"):
        generate(model, ["a"], pruner=build_pruner(policy=other_policy))
    small_model = model._replace(backbone=model.backbone.read(testing.tiny_hf_config(9), None))
    with pytest.raises(ValueError, match=r"^the tokenizer gives id \d+, expected ids below 9, the"):
        read_request(small_model, ["red dog"])
    for part in ("tokenizer", "image_settings"):
        with pytest.raises(ValueError, match=f"the model has no {part.replace('_', ' ')}"):
            read_request(model._replace(**{part: None}), ["a"], IMAGES[:1])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match="attention 'cudnn' needs a GPU, jax uses 'cpu'"):
        generate(model, ["a"], options=RunOptions(execution=Execution(attention="cudnn")))
