import jax.numpy as jnp
import numpy as np
import pytest
from small_world import one_shot, stepprune, tiny_model, write_split
from stepprune_jax.evaluation.answers import Answering, Selection, answer, check_lengths
from stepprune_jax.evaluation.orders import trained_order
from stepprune_jax.inference.prefix import place

from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation import measure
from stepprune_jax.evaluation.rows import adaptive_rows, exact_row
from stepprune_jax.evaluation.settings import Settings
from stepprune_jax.evaluation.split import encode_split, read_split, thin
from stepprune_jax.inference import generate, policy_selector
from stepprune_jax.inference.decoding import run_decode, run_start
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.prompts import CONTEXT_LIMIT
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.policy import Picks, gather

N, STEPS = 9, 4
SETTINGS = Settings(budgets=(4, 2), batch_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_split(folder, "test", 5, 0)
    write_split(folder, "validation", 3, 1)
    return folder


@pytest.fixture(scope="module")
def test_split(folder):
    return read_split(folder, "test")


@pytest.fixture(scope="module")
def files(folder):
    return measure.Files(folder / "answers", folder)


@pytest.fixture(scope="module")
def bench(model, folder, test_split, files):
    validation = read_split(folder, "validation")
    return measure.make_bench(model, test_split, validation, SETTINGS, files)


def ask(model, split, **options):
    texts = [question.text for question in split.questions]
    images = [question.image for question in split.questions]
    return generate(model, texts, images, max_tokens=3, warm_up=False, **options)


def answers(bench, selection):
    found = answer(bench.model, bench.test, selection, Answering((2, 4, 9), 4, 3))
    assert (found.seconds > 0).all()
    return found.texts


def test_all_tokens_are_answered_as_by_generate(bench, test_split):
    everything = np.tile(np.arange(N, dtype=np.int32), (15, 1))
    found = answers(bench, Selection(everything, np.full(15, N, np.int32)))
    said = [a.text for a in ask(bench.model, test_split)]
    assert found == said and len(set(said)) > 3


def test_a_policy_keeps_and_answers_as_by_generate(bench, test_split):
    policy = stepprune()
    found = trained_order(bench.model, policy, bench.test, steps=STEPS, batch_size=4)
    exact = exact_row("x", found.order, 3, N).selection
    by_hand = ask(bench.model, test_split, policy=policy, budget=3)
    assert answers(bench, exact) == [a.text for a in by_hand]
    known = trained_order(bench.model, policy, bench.validation, steps=STEPS, batch_size=4)
    (row,) = adaptive_rows("x", policy, found, known, [2], N)
    alone = ask(bench.model, test_split, policy=policy, stop_bias=row.stop_bias)
    assert row.selection.count.tolist() == [a.kept for a in alone]
    assert answers(bench, row.selection) == [a.text for a in alone]
    assert 1 < row.selection.count.mean() < 3 and row.selection.count.std() > 0


@pytest.mark.parametrize("kind", ["no text", "one-shot"])
def test_other_policies_keep_what_their_selector_keeps(bench, kind):
    policy = one_shot() if kind == "one-shot" else stepprune(text_width=0)
    found = trained_order(bench.model, policy, bench.test, steps=3, batch_size=4)
    assert (found.margin is None) == (kind == "one-shot")
    select = policy_selector(bench.model, policy, 3)
    text = vlm.embed_text(bench.model.params, bench.model.config, jnp.asarray(bench.test.words))
    mask = jnp.arange(text.shape[1]) < bench.test.num_words[:, None]
    kept = select(jnp.asarray(bench.test.features)[bench.test.image_of], text, mask)
    np.testing.assert_array_equal(kept.index[:, :3], np.sort(found.order, axis=1))


def test_any_selection_is_answered_as_by_generate(bench, test_split):
    random = np.random.default_rng(0)
    order = random.permuted(np.tile(np.arange(N, dtype=np.int32), (15, 1)), axis=1)[:, :4]
    count = random.integers(0, 5, 15).astype(np.int32)
    count[:2] = 0, 4

    def select(features, text, mask):
        rows = np.arange(len(features)) % 15  # rows are the questions, filled up
        action = np.where(np.arange(4) < count[rows, None], order[rows], N)
        kept = (action[:, :, None] == np.arange(N)).any(1)
        picks = Picks(*map(jnp.asarray, (action, count[rows], kept)))
        return gather(picks, features, 4)

    said = ask(bench.model, test_split, select_fn=select)
    assert [a.kept for a in said] == count.tolist()
    assert answers(bench, Selection(order, count)) == [a.text for a in said]


def test_orders_do_not_depend_on_the_batch_or_the_number_of_steps(bench):
    policy = stepprune()
    found = trained_order(bench.model, policy, bench.test, steps=STEPS, batch_size=4)
    other = trained_order(bench.model, policy, bench.test, steps=2, batch_size=15)
    np.testing.assert_array_equal(found.order[:, :2], other.order)
    np.testing.assert_allclose(found.margin[:, :2], other.margin, rtol=1e-4, atol=1e-5)
    assert found.order.shape == (15, STEPS)
    assert all(len(set(row)) == STEPS for row in found.order.tolist())
    assert len({tuple(row) for row in found.order.tolist()}) > 3


def test_rows_come_in_the_order_of_the_table(bench):
    rows = measure.baseline_rows(bench, seed=0)
    names = [(row.method, row.mode, row.pruning_rate) for row in rows]
    assert names[0] == ("all tokens", "exact", 0.0)
    assert [name[0] for name in names[1:]] == [m for m in ("random", "grid", "[CLS] top-K")
                                              for _ in range(2)]  # fmt: skip
    assert [name[2] for name in names[1:3]] == [55.6, 77.8]
    policies = {"StepPrune": stepprune(), "AutoSelect-like": one_shot()}
    trained = measure.trained_rows(bench, policies)
    assert [(r.method, r.mode, r.pruning_rate) for r in trained["StepPrune"]][:4] == [
        ("StepPrune", "exact", 55.6), ("StepPrune", "exact", 77.8),
        ("StepPrune", "adaptive", 55.6), ("StepPrune", "adaptive", 77.8),
    ]  # fmt: skip
    own = trained["StepPrune"][4]
    assert own.method == "StepPrune, own stop" and own.stop_bias == 0.0
    assert [r.mode for r in trained["AutoSelect-like"]] == ["exact", "exact"]
    # Other questions about a picture get the same patches from its attention alone.
    attended = rows[-1].selection.order
    assert (attended[bench.test.image_of == 0] == attended[0]).all()


def test_few_programs_serve_all_rows(bench):
    policies = {"StepPrune": stepprune(), "StepPrune literal": stepprune(5, min_tokens=0)}
    programs = (place, run_start, run_decode)
    trained = measure.trained_rows(bench, policies)
    rows = measure.baseline_rows(bench, 0) + [row for name in policies for row in trained[name]]
    assert measure.ladder(bench, rows) == (2, 4, 9)
    before = [program.num_compiled() for program in programs]
    records = measure.answer_rows(bench, rows)
    first = [b - a for a, b in zip(before, [p.num_compiled() for p in programs], strict=True)]
    assert max(first) <= 3
    again = measure.answer_rows(bench, rows[::-1])
    assert [program.num_compiled() for program in programs] == [
        a + b for a, b in zip(before, first, strict=True)
    ]
    for one, other in zip(records, again[::-1], strict=True):
        assert one.answer == other.answer and one.method == other.method
    for record in records:
        np.testing.assert_array_equal((record.order >= 0).sum(1), record.count)


def test_each_picture_goes_through_the_tower_once(bench, test_split):
    assert bench.test.features.shape == (5, N, 32)
    np.testing.assert_array_equal(bench.test.image_of, np.repeat(np.arange(5), 3))
    mixed = [test_split.questions[i] for i in (14, 0, 7, 1)]
    found = encode_split(bench.model, mixed, batch_size=2)
    assert found.by_attention is None and found.image_of.tolist() == [0, 1, 2, 1]
    for row, other in enumerate((14, 0, 7, 1)):
        length = bench.test.length[other]
        assert found.length[row] == length
        np.testing.assert_array_equal(found.ids[row, :length], bench.test.ids[other, :length])
        np.testing.assert_allclose(
            found.features[found.image_of[row]],
            bench.test.features[bench.test.image_of[other]],
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_thinning_spreads_over_the_split(test_split):
    thinned = thin(test_split, 5)
    assert [q.question_id for q in thinned.questions] == [f"test-{n}" for n in (0, 3, 6, 9, 12)]
    assert len(thinned.answers) == len(thinned.scenes) == 5
    assert thin(test_split, 0) is test_split and thin(test_split, 15) is test_split


def test_prompts_beyond_the_context_are_refused(bench):
    length = bench.test.length.copy()
    length[2] = CONTEXT_LIMIT
    with pytest.raises(ValueError, match=f"question 2 takes {CONTEXT_LIMIT - 1 + N} embeddings"):
        check_lengths(bench.test._replace(length=length), N)


def test_a_broken_picture_is_named(bench, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"bad\.png"):
        encode_split(bench.model, [Question("a", bad, "dog", "x")], batch_size=2)


def test_a_mesh_gives_the_same_orders_and_answers(bench, test_split, files):
    mesh = build_mesh("data_tensor")
    model = load_vlm(bench.model.folder, mesh, jnp.float32, progress=False)
    there = measure.make_bench(model, test_split, None, SETTINGS, files)
    np.testing.assert_allclose(there.test.features, bench.test.features, rtol=1e-4, atol=1e-5)
    orders = [
        trained_order(b.model, stepprune(), b.test, steps=2, batch_size=4) for b in (bench, there)
    ]
    np.testing.assert_array_equal(orders[0].order, orders[1].order)
    selection = exact_row("x", orders[0].order, 2, N).selection
    assert answers(there, selection) == answers(bench, selection)
