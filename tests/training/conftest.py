"""One tiny model, its data and a finished run for all; no test changes them."""

import pytest


@pytest.fixture(scope="session")
def world(llava_folder, tmp_path_factory):
    from tiny_run import write_data, write_questions  # jaxtyping's hook comes first

    return llava_folder, write_questions(write_data(tmp_path_factory.mktemp("world") / "data"))


@pytest.fixture(scope="session")
def whole(world, tmp_path_factory):
    """An uninterrupted run, with all that can be watched; the runs it is compared with have not."""
    from tiny_run import make_run

    from stepprune_jax.training import train

    workdir = tmp_path_factory.mktemp("whole")
    watched = {"validation.every": 4, "validation.overlays": 2}
    train(make_run(*world, **watched), workdir, window=(2, 3))
    return workdir
