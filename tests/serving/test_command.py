import pytest
from servers import serving
from small_world import stepprune

from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.serving import __main__ as serve
from stepprune_jax.user_input import is_user_error


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pruner", "fastv", "--budget", "3", "--engine", "http://x"), "inside the language"),
        (("--engine", "127.0.0.1:8000"), "expected http://HOST:PORT"),
        (("--engine", "http://localhost:65536"), "expected http://HOST:PORT"),
        (("--engine_timeout", "nan"), "--engine_timeout is nan"),
        (("--budget", "3", "--mean_budget", "3"), "expected one of them"),
        (("--image_folder", "/nowhere"), "is not a folder"),
    ],
    ids=str,
)
def test_a_bad_flag_is_one_line(prepared, arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        prepared(*arguments)
    assert is_user_error(caught.value)
