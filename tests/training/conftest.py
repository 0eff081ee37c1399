"""One tiny model, its data and a finished run for all tests. No test changes them."""

import pytest


@pytest.fixture(scope="session")
def world(llava_folder, tmp_path_factory):
    """Folders of a tiny model and of its data."""
    from tiny_run import write_data, write_questions  # after jaxtyping's hook is installed

    return llava_folder, write_questions(write_data(tmp_path_factory.mktemp("world") / "data"))


@pytest.fixture(scope="session")
def finished_run(world, tmp_path_factory):
    """Folder of an uninterrupted run with validation, overlays and a profile."""
    from tiny_run import make_run

    from stepprune_jax.training import train

    workdir = tmp_path_factory.mktemp("finished")
    changes = {"validation.every": 4, "validation.overlays": 2}
    train(make_run(*world, **changes), workdir, window=(2, 3))
    return workdir
