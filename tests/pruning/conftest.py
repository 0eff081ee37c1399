import pytest


@pytest.fixture(scope="session")
def deep_pair(tmp_path_factory):
    """A LLaVA of 4 layers and 36 visual tokens as ours and as the torch model."""
    from generation_reference import pair  # `make test-core` has no torch

    sizes = {"text": {"num_hidden_layers": 4}, "vision": {"image_size": 48}}
    return pair(tmp_path_factory.mktemp("deep_pair"), **sizes)
