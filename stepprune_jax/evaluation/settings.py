"""Settings of an evaluation, checked before anything is loaded."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, shapes
from stepprune_jax.benchmarks.score import DATA
from stepprune_jax.checkpoints import hub
from stepprune_jax.checkpoints.frozen import ModelSettings
from stepprune_jax.checkpoints.policy import (
    POLICY_FILE,
    check_fits,
    load_policy,
    policy_file,
)
from stepprune_jax.checkpoints.shipped import find_shipped_policy
from stepprune_jax.data.source import DataSettings
from stepprune_jax.evaluation.names import ALL, DEFAULT, FIRST_STEP, ORACLE
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import POSITIONS, PRUNERS, Budget, Policy, read_options
from stepprune_jax.settings import (
    Settings,
    choice,
    count,
    group,
    is_count,
    read,
    setting,
    switch,
    text,
)
from stepprune_jax.user_input import local_path

SHAPES = shapes.BENCHMARK.name
_PACKAGE = Path(__file__).parents[1]


def _distinct_budgets(value: Any) -> bool:
    """Returns whether a value is a list of distinct positive integers or shares."""
    good = isinstance(value, tuple) and bool(value)
    return good and all(map(_is_budget, value)) and len(set(value)) == len(value)


def _is_budget(value: Any) -> bool:
    """Returns whether a value is a positive integer, or the text of a share."""
    if not isinstance(value, str):
        return is_count(value)
    try:
        return Budget.parse(value).kind == "rate"
    except ValueError:
        return False


def _policy_files() -> Any:
    """Defines a field that maps row names to policy files."""
    return setting(
        "a mapping from row names to policy files",
        lambda value: (
            isinstance(value, Mapping) and all(isinstance(p, str) for p in value.values())
        ),
        default={},
    )


def _row_names(*names: str) -> Any:
    """Defines a field that holds names of rows, by default `names`."""
    return setting(
        "names of rows",
        lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
        default=names,
    )


def _question_files() -> Any:
    """Defines a field that maps benchmarks to question files."""
    return setting(
        f"files by name of {', '.join(BENCHMARKS)}",
        lambda value: isinstance(value, Mapping) and BENCHMARKS.keys() >= {*value},
        default={},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings, group="eval"):
    """The group `eval` of a configuration; see docs/evaluation.md.

    Attributes:
        benchmarks: names of `benchmarks.BENCHMARKS`, separated by commas.
        data: root of LLaVA's folder layout, for all but the shapes world.
        questions: question files by benchmark, relative to `data`, for another split in the format
            of the benchmark's own file; empty for its own.
        textvqa_ocr: whether TextVQA's prompts keep their OCR tokens, as for LLaVA's figures.
        methods: rows to answer, by the names of `PRUNERS` or by their labels, separated by commas;
            empty for all but "first step" and "oracle", which have to be named.
        options: options of untrained pruners, instead of their defaults, such as "fastv layer=3
            average=False; holov crops=8".
        samples: questions of each public benchmark whose selections are stored for drawing.
        budgets: exact numbers of tokens, which are means for a learned stop; or shares of each
            image's tokens, such as "1/3" or "33.3%".
        batch_size: questions per batch.
        max_new_tokens: longest answer, in tokens; None for the limit of the benchmark's program.
        positions: position ids of kept tokens, "original", "compact", or "own" for those of each
            method's authors.
        rows: further trained rows: policy files by name of the row. A path inside the package
            ("assets/policies/...") is found wherever the package is installed.
        ablations: as `rows`, but a missing file is skipped.
        adaptive: rows whose learned stop is also evaluated, at a bias that meets each budget on
            average.
        own_stops: rows of `adaptive` that are also evaluated without a bias.
        validation_questions: maximum number of questions that biases are calibrated on; 0 for all.
    """

    benchmarks: str = setting(
        f"some of {', '.join(BENCHMARKS)}",
        lambda value: isinstance(value, str) and {*_listed(value)} <= BENCHMARKS.keys(),
        default=SHAPES,
    )
    data: str = text(default=DATA)
    questions: Mapping[str, str] = _question_files()
    textvqa_ocr: bool = switch(default=True)
    methods: str = text(default="")
    options: str = text(default="")
    samples: int = count(0, default=12)
    budgets: tuple[int | str, ...] = setting(
        "distinct integers from 1, or shares such as 1/3",
        _distinct_budgets,
        default=(48, 32, 16),
    )
    batch_size: int = count(default=32)
    max_new_tokens: int | None = count(optional=True)
    positions: str = choice(POSITIONS, default="original")
    rows: Mapping[str, str] = _policy_files()
    ablations: Mapping[str, str] = _policy_files()
    adaptive: tuple[str, ...] = _row_names(DEFAULT, "StepPrune literal")
    own_stops: tuple[str, ...] = _row_names(DEFAULT)
    validation_questions: int = count(0, default=1000)

    def __post_init__(self):
        super().__post_init__()
        self.require("benchmarks", bool(self.benchmark_names), f"some of {', '.join(BENCHMARKS)}")
        names = [DEFAULT, FIRST_STEP, ORACLE, *self.rows, *self.ablations]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"config.eval.rows and ablations name {', '.join(twice)} twice")
        labels = self.labels
        known = [name for name, kind in PRUNERS.items() if kind.label in labels]
        known = list(dict.fromkeys([*known, *labels]))
        lower = {name.lower() for name in known}
        strange = [name for name in _listed(self.methods) if name.lower() not in lower]
        self.require("methods", not strange, f"some of {', '.join(known)}")
        untrained = [name for name, kind in PRUNERS.items() if kind.config_type is None]
        expected = f"options after names of {', '.join(untrained)}"
        self.require("options", {*untrained} >= self.pruner_options.keys(), expected)

    @property
    def benchmark_names(self) -> list[str]:
        """Names in `benchmarks`, each once."""
        return list(dict.fromkeys(_listed(self.benchmarks)))

    @property
    def pruner_options(self) -> dict[str, dict[str, str]]:
        """Options by pruner."""
        parts = [part.split() for part in self.options.split(";") if part.strip()]
        return {name: read_options("config.eval.options", texts) for name, *texts in parts}

    @property
    def public(self) -> list[str]:
        """Benchmarks other than the shapes world."""
        return [name for name in self.benchmark_names if name != SHAPES]

    def longest_answer(self, benchmark: Benchmark) -> int:
        """Returns the longest answer to a benchmark, in tokens."""
        return self.max_new_tokens or benchmark.max_new_tokens

    def wants(self, label: str) -> bool:
        """Returns whether a row is requested, by its label or by the name of its pruner."""
        wanted = _listed(self.methods.lower())
        if label.lower() in wanted:
            return True
        if not wanted:
            return label not in (FIRST_STEP, ORACLE)
        if label == ALL and SHAPES in self.benchmark_names:
            return True  # the reference of retention
        return any(kind.label == label and kind.name in wanted for kind in PRUNERS.values())

    @property
    def labels(self) -> list[str]:
        """Labels of the rows, in the order of tables."""
        untrained = [kind.label for kind in PRUNERS.values() if kind.config_type is None]
        return [*untrained, ORACLE, *self.rows, FIRST_STEP, DEFAULT, *self.ablations]


def _listed(text: str) -> list[str]:
    """Splits a text at commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRun(Settings):
    """The settings of a run of `eval.py`.

    Attributes:
        seed: seed of random rows.
        mesh: preset of `build_mesh`, or sizes by axis.
        model: the frozen model.
        data: the data.
        eval: settings of the evaluation.
    """

    seed: int = count(0)
    mesh: str = text()
    model: ModelSettings = group(ModelSettings)
    data: DataSettings = group(DataSettings)
    eval: EvalSettings = group(EvalSettings)


def read_evaluation(config: ConfigDict) -> EvaluationRun:
    """Reads the settings of an evaluation from a run's configuration.

    Args:
        config: configuration from a file of `configs/`, with changes of the command line.

    Returns:
        The settings, with defaults for fields that `config.eval` lacks.

    Raises:
        ValueError: a field is unknown, missing, or has a bad value; the message names it.
    """
    fields = {"eval": {}} | config.to_dict()
    names = [field.name for field in dataclasses.fields(EvaluationRun)]
    return read(EvaluationRun, {name: fields[name] for name in names if name in fields})


def find_policy(name: str, path: str) -> Path:
    """Finds the policy file of a row.

    Args:
        name: name of the row, for the message.
        path: a path that is absolute or relative to the current folder or the package; the name of
            a shipped policy; or "hub:owner/name".

    Returns:
        The file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if hub.is_meant(path):
        return policy_file(path)
    places = [local_path(path), _PACKAGE / path]
    for place in (*places, find_shipped_policy(path)):
        if place is not None and place.is_file():
            return place
    raise FileNotFoundError(
        f"no policy file for the row {name!r}: looked for {' and '.join(map(str, places))}"
    )


def own_policy(workdir: str | Path, policy: str | Path | None = None) -> Path:
    """Finds the policy file of the default row.

    Args:
        workdir: the run's folder, with the policy that it trained.
        policy: another policy: a policy file, the folder of a run that trained one, the name of a
            shipped policy, or "hub:owner/name".

    Returns:
        The file.

    Raises:
        FileNotFoundError: it does not exist.
    """
    if policy is not None:
        place = local_path(policy)
        file = place / POLICY_FILE if place.is_dir() else place
        return policy_file(policy if hub.is_meant(policy) else file)
    own = local_path(workdir) / POLICY_FILE
    if not own.is_file():
        hint = "run train.py with this --workdir first, or pass a policy as --policy"
        raise FileNotFoundError(f"{own} does not exist; {hint}")
    return own


def load_policies(settings: EvalSettings, own: Path | None) -> dict[str, Policy]:
    """Reads the policy of every trained row: further rows first, then the default, ablations.

    Args:
        settings: the settings.
        own: the default row's file, or None for no such row.

    Returns:
        Policies by name of the row, in the order of the table.

    Raises:
        FileNotFoundError: a file is missing; the message names row and file.
        ValueError: a file that is not a policy.
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


def check_policies(
    policies: Mapping[str, Policy], config: ModelConfig, settings: EvalSettings
) -> None:
    """Rejects policies that do not fit the model or cannot keep the budgets.

    Args:
        policies: policies by row.
        config: the model's configuration.
        settings: settings with the budgets.

    Raises:
        ValueError: a policy does not fit; the message names its row.
    """
    n = config.max_image_tokens
    counts = [budget for budget in settings.budgets if isinstance(budget, int)]
    if max(counts, default=0) > n:
        raise ValueError(
            f"config.eval.budgets holds {max(counts)}, the model has {n} visual tokens"
        )
    most = max(Budget.parse(budget).count(n) for budget in settings.budgets)
    for name, policy in policies.items():
        try:
            check_fits(policy, config)
        except ValueError as error:
            raise ValueError(f"row {name!r}: {error}") from error
        steps = policy.pruner.most(n)
        if most > steps:
            raise ValueError(
                f"row {name!r}: config.eval.budgets holds {most}, its policy takes at most {steps} "
                f"steps for {n} visual tokens"
            )
    for name in settings.adaptive:
        if name in policies and not policies[name].has_stop:
            raise ValueError(
                f"config.eval.adaptive names {name!r}, whose policy has no learned stop"
            )
