"""The `eval` group of a configuration, read and checked before anything is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, shapes
from stepprune_jax.benchmarks.score import DATA
from stepprune_jax.checkpoints.policy import Policy, check_fits, load_policy
from stepprune_jax.evaluation.names import ALL, DEFAULT
from stepprune_jax.models.vlm import check_positions
from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import PRUNERS
from stepprune_jax.user_input import nearest

SHAPES = shapes.BENCHMARK.name
POLICY_FILE = "policy.safetensors"
_PACKAGE = Path(__file__).parents[1]


class Settings(NamedTuple):
    """How to evaluate; each field is `config.eval` of that name.

    Attributes:
        benchmarks: names of `benchmarks.BENCHMARKS`, separated by commas.
        data: root of LLaVA's folder layout, for all but the shapes world.
        questions: further question files by benchmark, relative to `data`: of another split, in
            the form of the benchmark's own; empty for its own.
        textvqa_ocr: whether TextVQA's prompts keep their OCR tokens, as LLaVA's figures have it.
        methods: rows to answer, by the names of `PRUNERS` or by their labels, separated by commas;
            empty for all.
        samples: questions of each public benchmark whose selections are kept for pictures.
        budgets: exact numbers of tokens, and mean ones for a learned stop.
        batch_size: questions that go through a program together.
        max_new_tokens: longest answer; None for what the benchmark's own program allows.
        positions: position ids of kept tokens, "original" or "compact".
        rows: further trained rows: name of the row to policy file. A name that is a path of the
            package ("assets/policies/...") is found wherever the package lies.
        ablations: as `rows`, but a file that does not exist is left out.
        adaptive: rows whose own stop is used as well, at a bias that meets each budget on average.
        validation_questions: most questions that biases are calibrated on; 0 for all.
    """

    benchmarks: str = SHAPES
    data: str = DATA
    questions: Mapping[str, str] = {}
    textvqa_ocr: bool = True
    methods: str = ""
    samples: int = 12
    budgets: tuple[int, ...] = (48, 32, 16)
    batch_size: int = 32
    max_new_tokens: int | None = None
    positions: str = "original"
    rows: Mapping[str, str] = {}
    ablations: Mapping[str, str] = {}
    adaptive: tuple[str, ...] = (DEFAULT, "StepPrune literal")
    validation_questions: int = 1000

    @property
    def benchmark_names(self) -> list[str]:
        """`benchmarks`, each once."""
        return list(dict.fromkeys(_listed(self.benchmarks)))

    @property
    def public(self) -> list[str]:
        """Those but the shapes world."""
        return [name for name in self.benchmark_names if name != SHAPES]

    def longest_answer(self, benchmark: Benchmark) -> int:
        """The longest answer to a benchmark, in tokens."""
        return self.max_new_tokens or benchmark.max_new_tokens

    def wants(self, label: str) -> bool:
        """Whether a row is to be answered, by its label or by the name of its pruner."""
        wanted = _listed(self.methods.lower())
        if not wanted or label.lower() in wanted:
            return True
        if label == ALL and SHAPES in self.benchmark_names:
            return True  # what retention is measured against
        return any(kind.label == label and kind.name in wanted for kind in PRUNERS.values())

    @property
    def labels(self) -> list[str]:
        """What tables call the rows, in their order."""
        untrained = [kind.label for kind in PRUNERS.values() if kind.config_type is None]
        return [*untrained, *self.rows, DEFAULT, *self.ablations]


def _listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_settings(config: Any) -> Settings:
    """The settings of a run.

    Args:
        config: its `ConfigDict`; fields that `config.eval` lacks take their defaults.

    Returns:
        The settings.

    Raises:
        ValueError: a field that is unknown or has a bad value; the message names it.
    """
    given = config.eval.to_dict() if "eval" in config else {}
    unknown = sorted(set(given) - set(Settings._fields))
    if unknown:
        raise ValueError(
            f"config.eval has unknown field(s) {', '.join(unknown)}; it has "
            f"{', '.join(Settings._fields)}.{nearest(unknown[0], Settings._fields)}"
        )
    given |= {name: tuple(given[name]) for name in ("budgets", "adaptive") if name in given}
    settings = Settings(**given)
    _require(_is_count(settings.batch_size), "batch_size", settings, "an integer from 1")
    longest = settings.max_new_tokens
    good = longest is None or _is_count(longest)
    _require(good, "max_new_tokens", settings, "an integer from 1, or nothing")
    for name in ("validation_questions", "samples"):
        many = getattr(settings, name)
        _require(many == 0 or _is_count(many), name, settings, "an integer from 0")
    budgets = settings.budgets
    good = bool(budgets) and all(map(_is_count, budgets)) and len(set(budgets)) == len(budgets)
    _require(good, "budgets", settings, "distinct integers from 1")
    check_positions(settings.positions)
    known = settings.benchmark_names
    good = bool(known) and BENCHMARKS.keys() >= {*known}
    _require(good, "benchmarks", settings, f"some of {', '.join(BENCHMARKS)}")
    files = settings.questions
    good = isinstance(files, Mapping) and BENCHMARKS.keys() >= {*files}
    _require(good, "questions", settings, f"files by name of {', '.join(BENCHMARKS)}")
    _check_rows(settings)
    return settings


def _check_rows(settings: Settings) -> None:
    """Refuses rows that have no file or no name of their own, and methods that are no rows."""
    for name in ("rows", "ablations"):
        paths = getattr(settings, name)
        good = isinstance(paths, Mapping) and all(isinstance(p, str) for p in paths.values())
        _require(good, name, settings, "a mapping from row names to policy files")
    names = [DEFAULT, *settings.rows, *settings.ablations]
    labels = settings.labels
    known = [name for name, kind in PRUNERS.items() if kind.label in labels]
    known = list(dict.fromkeys([*known, *labels]))
    lower = {name.lower() for name in known}
    strange = [name for name in _listed(settings.methods) if name.lower() not in lower]
    _require(not strange, "methods", settings, f"some of {', '.join(known)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"config.eval.rows and ablations name {', '.join(twice)} twice")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(holds: bool, name: str, settings: Settings, expected: str):
    if not holds:
        found = getattr(settings, name)
        raise ValueError(f"config.eval.{name} is {found!r}, expected {expected}")


def find_policy(name: str, path: str) -> Path:
    """The file of a row.

    Args:
        name: of the row, for the message.
        path: absolute, relative to the current folder, or relative to the package.

    Returns:
        The file.

    Raises:
        FileNotFoundError: it is nowhere.
    """
    places = [Path(path).expanduser(), _PACKAGE / path]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"no policy file for the row {name!r}: looked for {' and '.join(map(str, places))}"
    )


def own_policy(workdir: str | Path, policy: str | Path | None = None) -> Path:
    """The file of the default row.

    Args:
        workdir: the run's folder, with the policy that it trained.
        policy: another one: a policy file, or the folder of a run that trained one.

    Returns:
        The file.

    Raises:
        FileNotFoundError: it does not exist.
    """
    place = Path(workdir if policy is None else policy).expanduser()
    own = place / POLICY_FILE if policy is None or place.is_dir() else place
    if not own.is_file():
        hint = "run train.py with this --workdir first, or name a policy by --policy"
        raise FileNotFoundError(f"{own} does not exist; {hint}")
    return own


def load_policies(settings: Settings, own: Path | None) -> dict[str, Policy]:
    """Reads the policy of every trained row: further rows first, then the default, ablations.

    Args:
        settings: the settings.
        own: the default row's file, or None to go without that row.

    Returns:
        Name of the row to its policy, in the order of the table.

    Raises:
        FileNotFoundError: a file is missing; the message names row and file.
        ValueError: a file that is no policy.
    """
    paths = {name: find_policy(name, path) for name, path in settings.rows.items()}
    if own is not None:
        paths[DEFAULT] = own
    for name, path in settings.ablations.items():
        try:
            paths[name] = find_policy(name, path)
        except FileNotFoundError:
            distributed.say(f"no row {name!r}: there is no policy file {path}")
    return {name: load_policy(path) for name, path in paths.items()}


def check_policies(policies: Mapping[str, Policy], config: Any, settings: Settings) -> None:
    """Refuses policies that do not fit the model or cannot keep to the budgets.

    Args:
        policies: by row.
        config: the model's.
        settings: with the budgets.

    Raises:
        ValueError: which row, and what is wrong.
    """
    n = config.max_image_tokens
    most = max(settings.budgets)
    if most > n:
        raise ValueError(f"config.eval.budgets holds {most}, the model has {n} visual tokens")
    for name, policy in policies.items():
        try:
            check_fits(policy, config)
        except ValueError as error:
            raise ValueError(f"row {name!r}: {error}") from error
        steps = policy.config.steps(n)
        if most > steps:
            raise ValueError(
                f"row {name!r}: config.eval.budgets holds {most}, its policy takes at most {steps} "
                f"steps for {n} visual tokens"
            )
    for name in settings.adaptive:
        if name in policies and policies[name].method != "stepprune":
            raise ValueError(
                f"config.eval.adaptive names {name!r}, whose policy has no stop of its own"
            )
