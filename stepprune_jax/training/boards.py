"""Where scalars are shown besides a file and standard output: TensorBoard and Weights & Biases."""

import uuid
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stepprune_jax.training.settings import flat

_WANDB_ID = "wandb.id"


@runtime_checkable
class Board(Protocol):
    """What a log writes to."""

    def add(self, scalars: dict[str, float | int], step: int) -> None:
        """Shows scalars by name."""

    def close(self) -> None:
        """Writes what is left."""


class _TensorBoard:
    """Events under workdir/tensorboard; those after the step to go on from are dropped."""

    def __init__(self, workdir: Path, step: int):
        self._writer = _summary_writer()(str(workdir / "tensorboard"), purge_step=step + 1)

    def add(self, scalars: dict[str, float | int], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of a Weights & Biases project; the continuation of a run is the same one there."""

    def __init__(self, config: Any, workdir: Path):
        path = workdir / _WANDB_ID
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        self._run = _wandb().init(
            project=config.wandb, name=workdir.name, id=path.read_text(), resume="allow",
            dir=str(workdir), config=flat(config),
        )  # fmt: skip

    def add(self, scalars: dict[str, float | int], step: int) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def check_boards(config: Any) -> None:
    """Refuses boards whose package is missing.

    Args:
        config: the run's `ConfigDict`; `tensorboard` is a truth value, `wandb` the name of a
            project, or empty for none.

    Raises:
        ValueError: which package, and what to do.
    """
    if config.tensorboard:
        _summary_writer()
    if config.wandb:
        _wandb()


def open_boards(config: Any, workdir: Path, step: int) -> list[Board]:
    """The boards that a configuration asks for.

    Args:
        config: as in `check_boards`.
        workdir: folder of the run.
        step: updates done.

    Raises:
        ValueError: a package is missing.
    """
    boards: list[Board] = []
    if config.tensorboard:
        boards.append(_TensorBoard(workdir, step))
    if config.wandb:
        boards.append(_Wandb(config, workdir))
    return boards


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "config.tensorboard is set, but tensorboardX is not installed: pip install "
            "tensorboardX, or set it to False; metrics.jsonl has the same numbers"
        ) from error
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "config.wandb names a project, but wandb is not installed: pip install wandb, or leave "
            "it empty; metrics.jsonl has the same numbers"
        ) from error
    return wandb
