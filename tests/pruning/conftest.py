"""Models of several layers; what `make test-core` lacks is imported where it is used."""

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A LLaVA of 3 layers and 16 visual tokens."""
    from small_world import tiny_model

    sizes = {"text": {"num_hidden_layers": 3}, "vision": {"image_size": 32}}
    return tiny_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="session")
def deep_pair(tmp_path_factory):
    """A LLaVA of 4 layers and 36 visual tokens as ours and as the torch model."""
    from generation_reference import pair

    sizes = {"text": {"num_hidden_layers": 4}, "vision": {"image_size": 48}}
    return pair(tmp_path_factory.mktemp("deep_pair"), **sizes)
