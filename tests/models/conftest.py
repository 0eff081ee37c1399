import pytest


@pytest.fixture(scope="session")
def llava(tmp_path_factory):
    """A tiny LLaVA beside that of `transformers`."""
    from hf_reference import make_llava  # jaxtyping's hook comes first

    return make_llava(tmp_path_factory.mktemp("llava"))
