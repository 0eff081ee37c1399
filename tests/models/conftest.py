import pytest


@pytest.fixture(scope="session")
def llava(tmp_path_factory):
    """Returns a tiny LLaVA of `transformers`, and our model with the same weights."""
    from hf_reference import (
        make_llava,
    )  # jaxtyping's import hook must be installed before this import

    return make_llava(tmp_path_factory.mktemp("llava"))
