import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import testing
from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.pruning import cls_order, cls_tap, grid_indices, grid_order, random_order


def test_random_orders_are_permutations_of_their_own():
    order = np.asarray(random_order(jax.random.key(0), 50, 9))
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(9), (50, 1)))
    assert len({tuple(row) for row in order}) == 50
    np.testing.assert_array_equal(order, random_order(jax.random.key(0), 50, 9))
    first = np.bincount(np.asarray(random_order(jax.random.key(1), 9000, 9))[:, 0], minlength=9)
    assert abs(first - 1000).max() < 150


def test_a_small_grid_worked_by_hand():
    # 4 of 4 x 4: two rows of two, the columns halfway between two taken right, then left.
    assert grid_indices(4, 4, 4).tolist() == [5, 7, 12, 14]
    assert grid_indices(3, 3, 1).tolist() == [4]
    assert grid_indices(2, 3, 6).tolist() == list(range(6))
    assert grid_order(3, 3, 1, 2).tolist() == [[4], [4]]


@pytest.mark.parametrize(("height", "width"), [(12, 12), (3, 3), (2, 7), (24, 24), (9, 1)])
def test_a_grid_holds_exactly_the_budget_evenly(height, width):
    for budget in range(1, height * width + 1):
        index = grid_indices(height, width, budget)
        assert len(index) == budget and (np.diff(index) > 0).all()
        assert index[0] >= 0 and index[-1] < height * width
    for budget in (16, 32, 48):
        if (height, width) == (12, 12):  # every quarter of the image has its share
            row, column = np.divmod(grid_indices(12, 12, budget), 12)
            quarters = np.bincount(2 * (row >= 6) + (column >= 6), minlength=4)
            assert abs(quarters - budget / 4).max() <= 3, (budget, quarters)


@pytest.mark.parametrize("budget", [0, 10])
def test_a_grid_that_cannot_be_is_refused(budget):
    with pytest.raises(ValueError, match=f"budget is {budget}, expected 1 to 9"):
        grid_indices(3, 3, budget)


def test_class_attention_worked_by_hand():
    attention = jnp.array([[[0.9, 0.02, 0.05, 0.03], [0.1, 0.2, 0.5, 0.2]]])
    # Means 0.11, 0.275, 0.115 over the heads: the class token itself does not count.
    assert cls_order(attention).tolist() == [[1, 2, 0]]


@pytest.fixture(scope="module")
def params():
    config = LlavaConfig.from_hf(testing.tiny_hf_config())
    return jax.jit(vlm.init_params, static_argnums=1)(jax.random.key(0), config)


@pytest.mark.parametrize("layer", [-2, 1, 3])
def test_the_tap_is_the_block_before_the_projected_state(params, layer):
    config = LlavaConfig.from_hf(testing.tiny_hf_config() | {"vision_feature_layer": layer})
    tap = cls_tap(config)
    assert tap.layer == layer % 4 - 1
    pixels = jax.random.normal(jax.random.key(1), (2, 3, 24, 24))

    @jax.jit
    def attention(factor):
        """With the queries of every block times a factor."""
        query = params["vision"]["layers"]["attention"]["query"]
        kernel = query["kernel"] * factor[:, None, None]
        layers = params["vision"]["layers"]
        layers = layers | {"attention": layers["attention"] | {"query": query | {"kernel": kernel}}}
        changed = params | {"vision": params["vision"] | {"layers": layers}}
        return next(iter(vlm.encode_image(changed, config, pixels, [tap])[1].values()))

    before = attention(jnp.ones(3))
    assert before.shape == (2, 4, 10)
    for block in range(3):  # this block's queries and earlier ones matter, later ones do not
        after = attention(jnp.ones(3).at[block].set(3.0))
        assert bool(jnp.abs(after - before).max() > 1e-6) == (block <= tap.layer), block


def test_no_attention_before_the_embedding():
    config = LlavaConfig.from_hf(testing.tiny_hf_config() | {"vision_feature_layer": 0})
    with pytest.raises(ValueError, match="vision_feature_layer 0 is the embedding"):
        cls_tap(config)
