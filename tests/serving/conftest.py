"""Skips the tests of the server if the packages of the extra [serve] are not installed."""

import importlib.util

import pytest

PACKAGES = ("httpx2", "prometheus_client", "starlette", "uvicorn")
MISSING = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
collect_ignore_glob = ["test_*.py", "engine/*"] if MISSING else []


@pytest.fixture(scope="session", autouse=True)
def patient_server():
    """Waits longer for connections to an engine, because a test machine may be busy."""
    from servers import PATIENCE

    from stepprune_jax.serving import engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_CONNECT_SECONDS", PATIENCE)
        yield
