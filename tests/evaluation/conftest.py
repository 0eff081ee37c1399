import pytest


@pytest.fixture(scope="session")
def model(llava_model):
    return llava_model
