"""One tiny model and its data for all runs; they write to neither."""

import pytest


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    from tiny_run import write_data, write_questions  # jaxtyping's hook comes first

    from stepprune_jax import testing

    folder = tmp_path_factory.mktemp("world")
    return testing.tiny_llava(folder / "model"), write_questions(write_data(folder / "data"))
