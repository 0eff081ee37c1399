"""The policy's benchmark runs, and its figures are of what they say."""

import jax.numpy as jnp
import numpy as np
import pytest

from tools.bench import policy

SMALL = "--num_tokens 8 --width 16 --steps 4 --kept 3 --batch 2 --repeats 1"


def rows(output, start):
    """Cells of the table whose header begins with `start`, by the row's name."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in output.splitlines()]
    first = next(i for i, line in enumerate(lines) if line[0].startswith(start))
    return {line[0]: line[1:] for line in lines[first + 2 :] if len(line) == len(lines[first])}


@pytest.mark.slow
def test_each_way_through_the_loop_is_timed_once(capsys):
    policy.main(f"{SMALL} --parts loop operations --layers 1 --group 1 2".split())
    output = capsys.readouterr().out
    found = rows(output, "batch 2, 3 tokens")
    names = ("step by step", "tables, and the stop", "tables", "tables, 2 tokens a step")
    assert [*found] == ["encoder", *(f"{name}; 1 decoder layer" for name in names)]
    assert found["step by step; 1 decoder layer"][-1] == "1"
    assert float(rows(output, "10^9 operations")["tables"][0]) > 0


def test_the_difference_of_gradients_is_a_number_where_some_are_zero():
    zero, one = jnp.zeros((2, 2)), jnp.array([3.0, 4.0])
    assert policy.relative_difference([zero, one], [zero, one]) == 0
    assert policy.relative_difference({"a": zero, "b": one + 1}, {"a": zero, "b": one}) == (
        pytest.approx(2**0.5 / 5)
    )
    assert policy.relative_difference([one], [0 * one]) == np.inf
    assert np.isnan(policy.relative_difference([np.nan * one], [one]))
