"""The benchmark of the policy times every variant of the loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from tools.bench import policy

SMALL = "--num_tokens 8 --width 16 --steps 4 --kept 3 --batch 2 --repeats 1"


def rows(output, start):
    """Returns the cells of the table whose header begins with `start`, by the row's name."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in output.splitlines()]
    header_index = next(index for index, line in enumerate(lines) if line[0].startswith(start))
    return {
        line[0]: line[1:]
        for line in lines[header_index + 2 :]
        if len(line) == len(lines[header_index])
    }


@pytest.mark.slow
def test_each_variant_of_the_loop_is_timed_once(capsys):
    policy.main(f"{SMALL} --parts loop operations --layers 1 --group 1 2".split())
    output = capsys.readouterr().out
    table_rows = rows(output, "batch 2, 3 tokens")
    names = ("step by step", "tables, and the stop", "tables", "tables, 2 tokens a step")
    assert [*table_rows] == ["encoder", *(f"{name}; 1 decoder layer" for name in names)]
    assert table_rows["step by step; 1 decoder layer"][-1] == "1"
    assert float(rows(output, "10^9 operations")["tables"][0]) > 0


def test_the_difference_of_gradients_is_a_number_if_some_are_zero():
    zero, vector = jnp.zeros((2, 2)), jnp.array([3.0, 4.0])
    assert policy.relative_difference([zero, vector], [zero, vector]) == 0
    assert policy.relative_difference({"a": zero, "b": vector + 1}, {"a": zero, "b": vector}) == (
        pytest.approx(2**0.5 / 5)
    )
    assert policy.relative_difference([vector], [0 * vector]) == np.inf
    assert np.isnan(policy.relative_difference([np.nan * vector], [vector]))
