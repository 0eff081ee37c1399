"""The suite checks the package's annotations, including axes across the arguments of one call."""

import dataclasses

import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import Array, Float, TypeCheckError
from shape_checks import check_annotations

from stepprune_jax.policy import PolicyConfig
from stepprune_jax.policy.rollout import straight_through

refused = pytest.raises(TypeCheckError)  # a TypeError
check = check_annotations(typechecker=beartype)


def test_functions_of_the_package_are_checked():
    memory, prob = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3))
    straight_through(memory, prob, jnp.zeros(2, jnp.int32))
    with refused:
        straight_through(memory, prob[:1], jnp.zeros(2, jnp.int32))


def test_fields_of_dataclasses_of_the_package_are_checked():
    with refused:
        PolicyConfig(feature_width="8")


def test_axes_agree_within_one_call():
    @check
    def double(x: Float[Array, " a"], y: Float[Array, " b"]) -> Float[Array, " a"]:
        return jnp.concatenate([x, y])[: len(x)] if len(y) else y

    double(jnp.ones(2), jnp.ones(3))
    double(jnp.ones(3), jnp.ones(2))  # each call binds its axes anew
    with refused:
        double(jnp.ones(2), jnp.ones(0))
    with refused:
        double(jnp.ones(2), jnp.ones(2, int))


@check
@dataclasses.dataclass
class Box:
    size: int

    @check
    @classmethod
    def make(cls, size: "int") -> "Box":
        return cls(size)

    @check
    @property
    def text(self) -> str:
        return self.size


def test_methods_properties_and_quoted_names_are_checked():
    assert Box.make(1).size == 1
    with refused:
        Box("1")
    with refused:
        Box.make("1")
    with refused:
        _ = Box(1).text


def test_a_check_leaves_the_annotations_that_help_shows():
    Box.make(1)
    assert Box.make.__func__.__annotations__ == {"size": "int", "return": "Box"}
