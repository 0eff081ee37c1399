"""Starts an unmodified vLLM on the CPU, in the environment that `make test-serving` builds."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import httpx2

PYTHON = Path(__file__).parents[2] / ".venv-serving" / "bin" / "python"
# Environment variables for vLLM on a CPU.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Vllm:
    """A vLLM server of one model.

    Attributes:
        address: address of the server.
        name: name of the model in requests.
        port: port of the server.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
    ):
        """Starts the server.

        Args:
            model: folder of the model.
            log: file for the output.
            *flags: further flags of vLLM.
            port: the port; None takes a free port.
            settings: further environment variables.
        """
        self.port = port = port or free_port()
        self.address, self.name, self._log = f"http://127.0.0.1:{port}", str(model), Path(log)
        command = [PYTHON, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        arguments = ["--model", model, "--host", "127.0.0.1", "--port", port, *flags]
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [*map(str, (*command, *arguments, "--enable-prompt-embeds"))],
                env=os.environ | SETTINGS | dict(settings or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = 900) -> "Vllm":
        """Waits until the server is healthy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.is_alive:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{self.address}/health").status_code == 200:
                    return self
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"vLLM did not start:\n{self._log.read_text()[-3000:]}")

    @property
    def is_alive(self) -> bool:
        """Whether the process of the server is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> "Vllm":
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.kill()
