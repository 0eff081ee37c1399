import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from stepprune_jax import testing  # jaxtyping's hook comes first

    return testing.tiny_tokenizer()
