import pytest
from servers import serving
from small_world import stepprune

from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.serving import __main__ as serve


@pytest.fixture
def prepared(llava_folder):
    def run(*arguments):
        how = ("--model", llava_folder, "--dtype", "float32", "--no_compile_cache")
        return serve.prepare([*map(str, (*how, *arguments))])

    return run


def test_the_flags_are_the_defaults_of_a_request(prepared, tmp_path):
    import httpx2

    save_policy(stepprune(), tmp_path / "policy")
    own = ("--policy", tmp_path / "policy", "--engine", "http://127.0.0.1:9", "--name", "tiny")
    app, host, port = prepared(*own, "--queue", 3, "--port", 81, "--image_folder", tmp_path)
    assert (host, port) == ("127.0.0.1", 81)
    with serving(app) as address:
        assert httpx2.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"
        assert httpx2.get(f"{address}/health").status_code == 503


ADDRESSES = ("127.0.0.1:8000", "http://", "http://localhost:abc", "http://localhost:65536")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pruner", "fastv", "--budget", "3", "--engine", "http://x"), "inside the language"),
        (("--positions", "original", "--engine", "http://x"), "expected 'compact' with an engine"),
        *((("--engine", x), "expected http://HOST:PORT") for x in ADDRESSES),
        (("--engine_timeout", "nan"), "--engine_timeout is nan, expected seconds above 0"),
        (("--port", "65536"), "--port is 65536, expected 1 to 65535"),
        (("--batch_wait_ms", "inf"), "--batch_wait_ms is inf, expected 0 to 60000"),
        (("--budget", "3", "--mean_budget", "3"), "expected one of them"),
        (("--pruner", "grid", "--budget", "400"), "expected at most 9 of 9"),
        (("--image_folder", "/nowhere"), "is not a folder"),
        (("--policy", "/nowhere"), "/nowhere"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_flag_is_one_line(prepared, arguments, words):
    with pytest.raises((ValueError, OSError)) as caught:
        prepared(*arguments)
    assert words in str(caught.value) and serve.user_input is not None
    assert getattr(caught.value, "_stepprune_jax_user_input", False)
