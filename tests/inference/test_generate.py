import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import (
    ByQuestion,
    ask,
    pair,
    pruned_answer,
    random_image,
    reference_answer,
    request,
)
from quick import quick_or_slow

from stepprune_jax import FeatureStats, PolicyConfig, init_policy, testing
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference import generate, greedy, pipeline, read_request, stream
from stepprune_jax.inference.answer import make_prompts
from stepprune_jax.inference.decoding import RunOptions, check_finite, run_decode
from stepprune_jax.inference.pipeline import read_images
from stepprune_jax.inference.programs import num_compiled, run_begin, run_choose
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.pruning import PRUNERS, Method, make_method
from stepprune_jax.pruning.method import NO_PRUNING
from stepprune_jax.user_input import is_user_error

SHAPES = {
    "grouped": {},
    "one_head_each": {"text": {"num_key_value_heads": 4, "num_hidden_layers": 3}},
    "wide_heads": {"text": {"num_key_value_heads": 1, "head_dim": 16}, "vision": {"patch_size": 6}},
    "stretched": {
        "text": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        }
    },
}
PROMPTS = ("What is in this picture?", "two", "red dog yes no the user gives helpful answers", "no")
IMAGES = ([random_image(1)], None, [random_image(2), random_image(3)], [random_image(4)])


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return pair(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def model(llava):
    return llava.ours


@pytest.fixture(scope="module")
def policy():
    widths = {"feature_width": 32, "text_width": 48, "width": 16}
    config = PolicyConfig(**widths, num_heads=2, mlp_ratio=2, decoder_layers=2)
    # Sharp pointers: counts differ between rows.
    params = jax.tree.map(lambda leaf: 3 * leaf, init_policy(jax.random.key(1), config))
    return Policy(params, config, FeatureStats.start(32), 0.5)


def ids(answers):
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("shape", quick_or_slow(SHAPES, ["grouped", "stretched"]))
def test_greedy_ids_equal_the_reference(tmp_path, shape):
    both = pair(tmp_path, seed=3, **SHAPES[shape])
    prompts, images = ask(13, seed=len(shape))
    # One batch against one prompt at a time: rows are padded, and its 14 images to 16.
    answers = generate(both.ours, prompts, images, max_tokens=10)
    expected = [
        reference_answer(both, prompt, shown, 10)
        for prompt, shown in zip(prompts, images, strict=True)
    ]
    assert ids(answers) == expected
    n = both.ours.config.max_image_tokens
    assert [a.visual_tokens for a in answers] == [n * len(row) for row in images]
    assert all(a.kept == a.visual_tokens for a in answers)


@pytest.mark.parametrize("positions", vlm.POSITIONS)
def test_pruned_ids_equal_a_run_on_the_kept_tokens_by_hand(llava, positions):
    answers = generate(
        llava.ours, PROMPTS, IMAGES, pruner=ByQuestion(), positions=positions, max_tokens=8
    )
    for answer, prompt, shown in zip(answers, PROMPTS, IMAGES, strict=True):
        expected = pruned_answer(llava, prompt, shown or [], positions, 8)
        assert answer.token_ids == expected, prompt
    assert len({answer.kept for answer in answers}) > 2


def test_answers_say_what_was_kept_in_the_order_of_choice(model, policy):
    def kept(pruner=None, **options):
        return [
            answer.kept_indices
            for answer in generate(model, PROMPTS, IMAGES, pruner=pruner, max_tokens=2, **options)
        ]

    everything = tuple(range(9))
    assert kept() == [(everything,), (), (everything,) * 2, (everything,)]
    # A ranker's choices are prefixes of each other; those of a set stand in raster order.
    for few, many in zip(kept("cls", budget=3), kept("cls", budget=7), strict=True):
        assert [longer[:3] for longer in many] == list(few)
    assert any(list(row) != sorted(row) for image in kept("cls", budget=7) for row in image)
    for options in ({"pruner": "grid"}, {"pruner": "fastv", "pruner_options": {"layer": 1}}):
        found = [row for image in kept(budget=4, **options) for row in image]
        assert all(list(row) == sorted(row) and len(row) == 4 for row in found)
    merged = kept("visionzip", budget=4, pruner_options={"contextual": 1})
    assert all(row[0] == row[-1] == -1 and min(row[1:3]) >= 0 for image in merged for row in image)
    exact, own = kept(policy=policy, budget=4), kept(policy=policy)
    for rows, free in zip(exact, own, strict=True):
        for row, other in zip(rows, free, strict=True):
            assert row[: len(other)] == other[:4] and len({*row}) == 4
    assert len({len(row) for image in own for row in image}) > 1


def test_a_row_that_is_cut_says_what_is_left(model, policy):
    limit = request(model, "two", IMAGES[0]).ids[0].index(IMAGE_TOKEN) + 4
    options = {"pruner": "cls", "budget": 7, "max_tokens": 2}
    (whole,) = generate(model, ["two"], [IMAGES[0]], **options)
    with pytest.warns(UserWarning, match="was truncated"):
        (answer,) = generate(model, ["two"], [IMAGES[0]], context_limit=limit, **options)
    left = {*sorted(whole.kept_indices[0])[:4]}
    assert answer.kept == 4
    assert [*answer.kept_indices[0]] == [i for i in whole.kept_indices[0] if i in left]


def test_an_image_of_which_nothing_is_kept_is_not_there(llava):
    prompt = " ".join(["dog"] * 8)
    (answer,) = generate(llava.ours, [prompt], [IMAGES[0]], pruner=ByQuestion(), max_tokens=8)
    assert (answer.visual_tokens, answer.kept) == (9, 0)
    assert answer.token_ids == pruned_answer(llava, prompt, IMAGES[0], "original", 8)


WAYS = ("policy", "cut", "sampled")


@pytest.mark.parametrize("way", quick_or_slow(WAYS, ["sampled"]))
def test_a_batch_equals_its_rows_one_by_one(model, policy, way):
    options = {
        "policy": {"policy": policy},
        "cut": {"pruner": "fastv", "budget": "1/3", "pruner_options": {"layer": 1}},
        "sampled": {"policy": policy, "temperature": 0.9, "top_p": 0.9, "seed": 5},
    }[way]
    together = generate(model, PROMPTS, IMAGES, max_tokens=8, **options)
    for row, (prompt, shown) in enumerate(zip(PROMPTS, IMAGES, strict=True)):
        if way == "sampled":  # draws belong to the row's number: fill up the rows before it
            before = ["a"] * row
            alone = generate(
                model, [*before, prompt], [*[None] * row, shown], max_tokens=8, **options
            )[-1]
        else:
            (alone,) = generate(model, [prompt], [shown], max_tokens=8, **options)
        assert alone[:4] == together[row][:4]
    kept = [answer.kept for answer in together]
    if way == "cut":
        assert kept == [3, 0, 6, 3]
    if way == "policy":
        assert kept[1] == 0 and 0 < kept[0] <= 4 and kept != [1, 0, 2, 1]


def begin(model, requests, method, max_tokens=1, **options):
    """The pipeline's first half by hand, greedily, and from images behind the tower."""
    images = read_images(model.config, requests.pixels)
    vision = pipeline.encode(model, images, method.pruner.taps(model.config))
    options = RunOptions(max_tokens=max_tokens, **options)
    return pipeline.begin(model, method, make_prompts(requests), vision, greedy([2]), options)


def test_a_pruner_sees_the_users_words_and_the_images_of_its_prompt(model):
    asked = read_request(model.tokenizer, model.image_settings, model.config, PROMPTS, IMAGES)
    images, blind = read_images(model.config, asked.pixels), make_method("cls", 2).pruner
    vision = pipeline.encode(model, images, blind.taps(model.config))
    seen, blind = (
        pipeline.see(model, pruner, make_prompts(asked), vision) for pruner in (ByQuestion(), blind)
    )
    said = [PROMPTS[i] for i in (0, 2, 2, 3)]
    table = model.params["language"]["embed"]["embedding"]
    encode_image = jax.jit(model.config.family.encode_image, static_argnums=(1, 3))
    taps = PRUNERS["cls"]().taps(model.config)
    # The images of a prompt have draws of their own.
    np.testing.assert_array_equal(seen.number[:4], [0, 2, 2 + (1 << 24), 3])
    np.testing.assert_array_equal(seen.grid, [[3, 3]] * len(seen.grid))
    for row, words in enumerate(said):
        tokens = model.tokenizer(words, add_special_tokens=False).input_ids
        assert seen.text_valid[row].sum() == len(tokens)
        np.testing.assert_array_equal(seen.text[row, : len(tokens)], table[np.array(tokens)])
    for row, image in enumerate([*IMAGES[0], *IMAGES[2], *IMAGES[3]]):
        pixels = request(model, "?", [image]).pixels
        features, tapped = encode_image(model.params, model.config, jnp.asarray(pixels), taps)
        np.testing.assert_allclose(seen.tokens[row], features[0], rtol=1e-4, atol=1e-5)
        (attention,) = tapped.values()
        np.testing.assert_allclose(blind.taps[0][row], attention[0], rtol=1e-4, atol=1e-5)
    assert not blind.text_valid.any() and blind.count[:4].tolist() == [2] * 4


def test_an_image_that_is_shown_twice_is_encoded_once(model):
    same = random_image(1)
    asked = read_request(
        model.tokenizer, model.image_settings, model.config, ["a", "b", "c"], [same, [same], None]
    )
    assert asked.pixels.shape[0] == 1 and asked.image_of == ((0,), (0,), ())
    twice = generate(model, ["red", "dog"], [same, same], max_tokens=4)
    copies = generate(model, ["red", "dog"], [same.copy(), same.copy()], max_tokens=4)
    assert ids(twice) == ids(copies)


def test_cached_decode_equals_recomputation(model):
    """The answer's tokens appended to the prompt predict each other without a cache."""
    pruner = ByQuestion()
    (answer,) = generate(model, PROMPTS[:1], IMAGES[:1], pruner=pruner, max_tokens=8)
    asked = request(model, PROMPTS[0], IMAGES[0])
    longer = [(*asked.ids[0], *answer.token_ids[:length]) for length in range(8)]
    asked = asked._replace(
        ids=tuple(longer), question_ids=asked.question_ids * 8, image_of=asked.image_of * 8
    )
    logits = begin(model, asked, Method(pruner)).trace.logits
    np.testing.assert_array_equal(logits.argmax(-1), answer.token_ids)


def test_logits_that_are_not_finite_are_an_error(model):
    broken = model._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, model.params))
    for on_token in (None, lambda *_: None):
        with pytest.raises(
            ValueError, match="prompt 0: the model's logits are not finite"
        ) as error:
            generate(broken, PROMPTS[:2], IMAGES[:2], max_tokens=4, on_token=on_token)
        assert is_user_error(error.value)
    # Of one row alone, and only after its first token.
    finite = np.array([True, False])
    with pytest.raises(ValueError, match="prompt 7: "):
        check_finite(finite, np.array([3, 7]))
    check_finite(finite[:1], np.array([3]))


def test_an_answer_ends_with_a_stop_id_or_at_max_tokens(llava):
    model = llava.ours
    free = generate(model, PROMPTS, IMAGES, max_tokens=8)
    assert all(len(answer.token_ids) == 8 for answer in free)
    stop = free[0].token_ids[3], free[2].token_ids[1]
    ended = generate(model, PROMPTS, IMAGES, max_tokens=8, stop_ids=stop)
    for before, after in zip(free, ended, strict=True):
        hits = [i for i, token in enumerate(before.token_ids) if token in stop]
        assert after.token_ids == before.token_ids[: hits[0] + 1 if hits else 8]
    assert len(ended[2].token_ids) <= 2 and len(ended[0].token_ids) <= 4
    expected = reference_answer(llava, PROMPTS[0], IMAGES[0], 8, eos_token_id=list(stop))
    assert ended[0].token_ids == expected
    one = generate(model, PROMPTS, IMAGES, max_tokens=1)
    assert ids(one) == [answer.token_ids[:1] for answer in free]
    assert [answer.tokens_per_s for answer in one] == [0.0] * 4


def test_the_loop_exits_when_every_row_is_finished(model):
    free = generate(model, PROMPTS[:2], IMAGES[:2], max_tokens=8)
    stop = tuple(answer.token_ids[0] for answer in free)
    calls, options = [], {"max_tokens": 8, "stop_ids": stop}
    generate(model, PROMPTS[:2], IMAGES[:2], on_token=lambda *e: calls.append(e), **options)
    assert [call[:2] for call in calls] == [(0, stop[0]), (1, stop[1])]


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(model):
    def answer(seed, **options):
        return ids(
            generate(
                model, PROMPTS[:2], IMAGES[:2], max_tokens=8, temperature=1.5, seed=seed, **options
            )
        )

    first = answer(0)
    assert answer(0) == first and answer(jax.random.key(0)) == first
    assert answer(1) != first
    assert answer(0, on_token=lambda *_: None) == first
    # A nucleus of one token is greedy.
    greedy = ids(generate(model, PROMPTS[:2], IMAGES[:2], max_tokens=8))
    assert answer(3, top_p=1e-6) == greedy


def test_streamed_pieces_concatenate_to_the_answer(model, policy):
    together = generate(model, PROMPTS, IMAGES, max_tokens=8, policy=policy)
    pieces = [[] for _ in PROMPTS]
    tokens = [[] for _ in PROMPTS]

    def note(row, token, piece):
        tokens[row].append(token)
        pieces[row].append(piece)

    streamed = generate(model, PROMPTS, IMAGES, max_tokens=8, policy=policy, on_token=note)
    assert [a[:4] for a in streamed] == [a[:4] for a in together]
    for row, answer in enumerate(together):
        assert "".join(pieces[row]) == answer.text
        assert tuple(tokens[row]) == answer.token_ids
    generator = stream(model, PROMPTS[0], IMAGES[0], max_tokens=8, policy=policy)
    text = ""
    while True:
        try:
            text += next(generator)
        except StopIteration as end:
            assert end.value[:4] == together[0][:4]
            break
    assert text == together[0].text


def test_a_conversation_goes_on_after_an_answer(llava):
    model = llava.ours
    turns = [PROMPTS[0], "yes <image>", PROMPTS[2]]
    asked = request(model, turns, IMAGES[0])
    assert asked.ids[0].count(IMAGE_TOKEN) == 1 and asked.ids[0].count(2) == 1
    both = f"{PROMPTS[0]}\n{PROMPTS[2]}"
    said = model.tokenizer(both, add_special_tokens=False).input_ids
    assert list(asked.question_ids[0]) == said
    (answer,) = generate(model, [turns], [IMAGES[0]], max_tokens=8)
    assert answer.token_ids == reference_answer(llava, turns, IMAGES[0], 8)
    # An image may come later.
    later = request(model, ["red", "no", "dog <image>"], IMAGES[0]).ids[0]
    assert later.index(IMAGE_TOKEN) > asked.ids[0].index(IMAGE_TOKEN)


def test_few_programs_serve_many_prompts(model):
    programs = (run_choose, run_begin, run_decode)

    def compiled():
        return np.array([program.num_compiled() for program in programs])

    before = compiled()
    for length in (1, 7, 20, 22, 30, 39):
        prompts = [" ".join(["dog"] * length), "red"]
        generate(model, prompts, [IMAGES[0], IMAGES[3]], pruner=ByQuestion(), max_tokens=8)
    chosen, begun, decoded = compiled() - before
    assert chosen <= 3  # 1 to 39 words: 16, 32, 64
    assert begun <= 3 and decoded <= 3  # rows of 40 to 90 embeddings: 64, 80, 96
    before = compiled()
    generate(
        model,
        ["dog " * 7, "yes"],
        [IMAGES[0], IMAGES[3]],
        pruner=ByQuestion(),
        max_tokens=8,
        temperature=0.7,
        top_p=0.8,
        stop_ids=(9,),
        seed=4,
    )
    assert (compiled() == before).all()


@pytest.mark.parametrize("name", ["random", "grid", "cls", "stepprune"])
def test_budgets_in_one_bucket_share_programs(model, policy, name):
    options = {"max_tokens": 8, "policy": policy if name == "stepprune" else None}
    generate(model, PROMPTS[:1], IMAGES[:1], pruner=name, budget=3, **options)
    before = num_compiled()
    (answer,) = generate(model, PROMPTS[:1], IMAGES[:1], pruner=name, budget="44.4%", **options)
    assert answer.kept == 4
    assert num_compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "rows"),
    [("data_tensor", 4), ("fsdp_tensor", 3)],
)
def test_a_mesh_gives_the_same_tokens(model, policy, preset, rows):
    sharded = load_vlm(model.folder, build_mesh(preset), jnp.float32, progress=False)
    options = {"policy": policy, "max_tokens": 8}
    here = generate(model, PROMPTS[:rows], IMAGES[:rows], **options)
    there = generate(sharded, PROMPTS[:rows], IMAGES[:rows], **options)
    assert [a[:4] for a in there] == [a[:4] for a in here]
    if preset == "data_tensor":
        cut = {"pruner": "fastv", "budget": 3, "pruner_options": {"layer": 1}, "max_tokens": 1}
        both = [generate(m, PROMPTS, IMAGES, warm_up=False, **cut) for m in (model, sharded)]
        assert ids(both[0]) == ids(both[1])
    streamed = generate(sharded, PROMPTS[:rows], IMAGES[:rows], on_token=lambda *_: None, **options)
    assert ids(streamed) == ids(here)


def test_bfloat16_and_original_folders_answer(tmp_path, policy):
    folder = testing.tiny_llava(tmp_path / "m", "original")
    model = load_vlm(folder, progress=False)
    answers = generate(model, PROMPTS[:2], IMAGES[:2], policy=policy, max_tokens=4)
    assert all(len(answer.token_ids) <= 4 and answer.kept <= 4 for answer in answers)


def test_the_limit_holds_after_expansion_with_the_counts_kept(model):
    asked, by_question = request(model, PROMPTS[0], IMAGES[2]), Method(ByQuestion())
    full, kept = len(asked.ids[0]) - 2 + 18, int(begin(model, asked, by_question).kept[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruned = begin(model, asked, by_question, context_limit=full - 18 + kept)
    assert pruned.kept.tolist() == [kept]
    assert pruned.trace.stages[0].length.tolist() == [full - 18 + kept]
    with pytest.warns(
        UserWarning, match=f"prompt of {full} embeddings was truncated to its first 60"
    ):
        cut = begin(model, asked, NO_PRUNING, context_limit=60)
    assert cut.kept.tolist() == [18]
    (stage,) = cut.trace.stages
    assert stage.index.shape == (1, 60) and stage.length.tolist() == [60]
    by_hand = asked._replace(ids=(asked.ids[0][: 60 - 18 + 2],))
    expected = begin(model, by_hand, NO_PRUNING).trace
    for ours, whole in zip(stage[:3], expected.stages[0][:3], strict=True):
        np.testing.assert_array_equal(ours, whole[..., :60])
    np.testing.assert_allclose(cut.trace.logits, expected.logits, rtol=1e-4, atol=1e-4)
    first = asked.ids[0].index(IMAGE_TOKEN)
    with pytest.warns(UserWarning, match="was truncated"):
        inside = begin(model, asked, NO_PRUNING, context_limit=first + 4)
    assert inside.kept.tolist() == [4] and inside.visual_tokens.tolist() == [18]


def test_the_limit_holds_behind_a_cut_of_an_image_that_was_cut(model):
    asked = request(model, PROMPTS[0], IMAGES[2])
    first, method = asked.ids[0].index(IMAGE_TOKEN), make_method("fastv", 3, options={"layer": 1})
    # Nine tokens, two of text, and two more, of which the cut would leave three.
    limit = first + 13
    with pytest.warns(UserWarning, match=f"truncated to its first {limit}:"):
        begun = begin(model, asked, method, max_tokens=2, context_limit=limit)
    before, after = begun.trace.stages
    assert [int((before.image == image).sum()) for image in (0, 1)] == [9, 2]
    assert [int((after.image == image).sum()) for image in (0, 1)] == [3, 2]
    assert before.length.tolist() == [limit] and after.length.tolist() == [limit - 6]
    assert begun.kept.tolist() == [5]


def test_a_tokenizer_of_another_model_is_refused():
    config = LlavaConfig.from_hf(testing.tiny_hf_config(vocab_size=9))
    with pytest.raises(ValueError, match=r"^the tokenizer gives id \d+, expected ids below 9, the"):
        read_request(testing.tiny_tokenizer(), None, config, ["red dog"])


BAD = {
    "no prompts": ({"prompts": []}, ValueError, "prompts is empty"),
    "a string": ({"prompts": "dog"}, TypeError, "expected a list of prompts"),
    "empty": ({"prompts": ["a", " "]}, ValueError, "prompt 1: the question is empty"),
    "mark without image": ({"prompts": ["<image> a"]}, ValueError, "1 <image>, but 0 image"),
    "too many marks": (
        {"prompts": ["<image> <image> a"], "images": [IMAGES[0]]},
        ValueError,
        "2 <image>, but 1",
    ),
    "lists differ": ({"images": [None, None]}, ValueError, r"2 entries for 1 prompt"),
    "no file": ({"images": ["absent.png"]}, FileNotFoundError, "absent.png"),
    "ends with an answer": ({"prompts": [["a", "b"]]}, ValueError, "ends with an answer"),
    "positions": ({"positions": "mixed"}, ValueError, "positions is 'mixed'; supported"),
    "temperature": ({"temperature": -1.0}, ValueError, "temperature is -1"),
    "top_p": ({"top_p": 0.0}, ValueError, "top_p is 0"),
    "penalty": ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0, expected a numb"),
    "max_tokens": ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
    "context": ({"context_limit": 0}, ValueError, "context_limit is 0"),
    "budget alone": ({"budget": 3}, ValueError, r"\(--budget\) needs a pruner \(--pruner\) or a"),
    "budget": ({"pruner": "grid", "budget": "some"}, ValueError, "budget is 'some', expected a"),
    "no budget": ({"pruner": "grid"}, ValueError, r"'grid' needs a budget \(--budget\)"),
    "pruner": ({"pruner": "gird"}, ValueError, "unknown pruner 'gird'.*Did you mean grid"),
    "function": ({"pruner": len}, TypeError, "pruner is .*len.*, expected a name, a Pruner or a M"),
    "option": (
        {"pruner": "cls", "budget": 3, "pruner_options": {"layer": 2}},
        ValueError,
        "cls has no option 'layer'; its options: none",
    ),
    "budget twice": ({"pruner": ByQuestion(), "budget": 3}, ValueError, "budget .* its own"),
    "unknown": ({"select_fn": len}, TypeError, "select_fn"),
    "bias alone": ({"stop_bias": 1.0}, ValueError, r"--stop_bias\) needs a policy"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(model, case):
    arguments, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        generate(model, **{"prompts": ["a"], **arguments})


def test_the_kernels_of_a_gpu_are_refused_elsewhere(model, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match="attention 'cudnn' needs a GPU, jax uses 'cpu'"):
        generate(model, ["a"], execution=Execution(attention="cudnn"))


def test_a_policy_that_does_not_fit_is_refused(model, policy):
    config = PolicyConfig(feature_width=16, text_width=48, num_heads=4)
    other = Policy(init_policy(jax.random.key(0), config), config, None)
    with pytest.raises(ValueError, match="feature_width is 16, the model's vision hidden_size 32"):
        generate(model, ["a"], policy=other)
    for budget, message in ((0, "a count"), (5, ".* from 1 to 4")):
        with pytest.raises(ValueError, match=rf"budget is '?{budget}'?, expected {message}"):
            generate(model, ["a"], policy=policy, budget=budget)
    with pytest.raises(ValueError, match="policy is given with a pruner that has its own"):
        generate(model, ["a"], policy=policy, pruner=ByQuestion())
    with pytest.raises(ValueError, match="the policy belongs to 'stepprune', not to 'grid'"):
        generate(model, ["a"], policy=policy, pruner="grid", budget=3)


def test_a_policy_without_text_prunes(model):
    config = PolicyConfig(feature_width=32, text_width=0, width=16, num_heads=2, mlp_ratio=2)
    blind = Policy(init_policy(jax.random.key(0), config), config, None)
    answers = generate(model, PROMPTS, IMAGES, policy=blind, budget=2, max_tokens=8)
    assert [answer.kept for answer in answers] == [2, 0, 4, 2]
