"""Settings of an evaluation, checked before anything is loaded."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, BenchmarkQuestion, folder
from stepprune_jax.benchmarks.layout import DATA
from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.frozen import ModelSettings
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.policy import (
    POLICY_FILE,
    load_policy,
    policy_file,
)
from stepprune_jax.data.source import DataSettings, data_folder
from stepprune_jax.evaluation.names import DEFAULT
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import POSITIONS, Budget
from stepprune_jax.registry import PRUNERS, read_options, weighted
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.settings import Settings, choice, count, setting
from stepprune_jax.user_input import UserError, local_path


def _are_budgets(values: tuple[int | str, ...]) -> bool:
    """Returns whether values are distinct positive integers or shares, at least one."""
    return bool(values) and all(map(_is_budget, values)) and len({*values}) == len(values)


def _is_budget(value: int | str) -> bool:
    if isinstance(value, int):
        return value > 0
    try:
        return Budget.parse(value).kind == "rate"
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings, path="config.eval"):
    """The group `eval` of a configuration; see docs/evaluation.md.

    Attributes:
        benchmarks: names of `benchmarks.BENCHMARKS`, separated by commas.
        data: root of LLaVA's folder layout, for the public benchmarks.
        questions: question files by benchmark, relative to `data`, for another split in the format
            of the benchmark's own file; empty for its own.
        textvqa_ocr: whether TextVQA's prompts keep their OCR tokens, as for LLaVA's figures.
        methods: rows to answer, by the names of `PRUNERS` or by their labels, separated by commas;
            empty for all.
        options: options by pruner, such as "fastv layer=3 average=False; autoselect diversity=0.1".
            Options of a trained method apply to all its rows. A learned stop takes no options.
        samples: questions of each public benchmark whose selections are stored for drawing.
        budgets: exact numbers of tokens, which are means for a learned stop; or shares of each
            image's tokens, such as "1/3" or "33.3%".
        batch_size: questions per batch.
        max_new_tokens: longest answer, in tokens; None for the limit of the benchmark's program.
        positions: position ids of kept tokens, "original", "compact", or "own" for the
            choice of each method's authors.
        rows: further trained rows: policy files by name of the row. A row whose file is missing is
            left out, unless `methods` names it.
        own_stops: rows with a learned stop that are also evaluated without a bias, and rows of
            methods that count by a threshold.
        validation_questions: maximum number of questions that biases are calibrated on; 0 for all.
        remarks: what a reader of the report has to know about its rows.
    """

    benchmarks: str = setting(
        folder.BENCHMARK.name,
        f"some of {', '.join(BENCHMARKS)}",
        lambda value: {*_listed(value)} <= BENCHMARKS.keys(),
    )
    data: str = DATA
    questions: Mapping[str, str] = setting(
        {}, f"files by name of {', '.join(BENCHMARKS)}", lambda value: BENCHMARKS.keys() >= {*value}
    )
    textvqa_ocr: bool = True
    methods: str = ""
    options: str = ""
    samples: int = count(12, least=0)
    budgets: tuple[int | str, ...] = setting(
        (48, 32, 16), "distinct integers from 1, or shares such as 1/3", _are_budgets
    )
    batch_size: int = count(32)
    max_new_tokens: int | None = count(None)
    positions: str = choice("original", POSITIONS)
    rows: Mapping[str, str] = setting(
        {},
        "a mapping from row names to policy files",
        lambda value: all(isinstance(file, str) for file in value.values()),
    )
    learned_stops: tuple[str, ...] = (DEFAULT, "GlimpsePrune")
    validation_questions: int = count(1000, least=0)
    remarks: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.expect("benchmarks", bool(self.benchmark_names), f"some of {', '.join(BENCHMARKS)}")
        self.expect("rows", DEFAULT not in self.rows, f"names of rows other than {DEFAULT}")
        labels = self.labels
        accepted = [name for name, kind in PRUNERS.items() if kind.label in labels]
        accepted = list(dict.fromkeys([*accepted, *labels]))
        lower = {name.lower() for name in accepted}
        unknown = [name for name in _listed(self.methods) if name.lower() not in lower]
        self.expect("methods", not unknown, f"some of {', '.join(accepted)}")
        # A stop's biases are calibrated without options.
        accepted = [name for name, kind in PRUNERS.items() if not kind.has_stop]
        expected = f"options after names of {', '.join(accepted)}"
        self.expect("options", {*accepted} >= self.pruner_options.keys(), expected)

    @property
    def benchmark_names(self) -> list[str]:
        """Names in `benchmarks`, each once."""
        return list(dict.fromkeys(_listed(self.benchmarks)))

    @property
    def pruner_options(self) -> dict[str, dict[str, str]]:
        """Options by pruner."""
        parts = [part.split() for part in self.options.split(";") if part.strip()]
        return {name: read_options("config.eval.options", texts) for name, *texts in parts}

    def longest_answer(self, benchmark: Benchmark) -> int:
        """Returns the longest answer to a benchmark, in tokens."""
        return self.max_new_tokens or benchmark.max_new_tokens

    def names(self, label: str) -> bool:
        """Returns whether `methods` names a row, by its label or by the name of its pruner."""
        listed_names = _listed(self.methods.lower())
        pruner_names = [kind.name for kind in PRUNERS.values() if kind.label == label]
        return any(name in listed_names for name in (label.lower(), *pruner_names))

    def wants(self, label: str) -> bool:
        """Returns whether a row is to be answered."""
        return not _listed(self.methods) or self.names(label)

    @property
    def labels(self) -> list[str]:
        """Labels of the rows, in the order of tables."""
        untrained = [kind.label for kind in PRUNERS.values() if kind.config_type is None]
        trained_labels = [label for label in self.learned if label not in self.rows]
        return [*untrained, *self.rows, *trained_labels]

    @property
    def learned(self) -> list[str]:
        """Labels of methods with weights. The run trains one of these methods."""
        return [kind.label for kind in weighted().values()]


def _listed(text: str) -> list[str]:
    """Splits a text at commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRun(Settings):
    """The settings of a run of `eval.py`.

    Attributes:
        seed: seed of random rows.
        mesh: preset of `parallel.sharding.build_mesh`, or sizes by axis: "data=2,tensor=4".
        cpu_devices: CPU devices, if jax sees no others; 0 leaves their number to jax.
        model: the frozen model.
        data: the data.
        eval: settings of the evaluation.
    """

    seed: int = count(0, least=0)
    mesh: str = setting("data", free=True)
    cpu_devices: int = count(0, least=0, free=True)
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    eval: EvalSettings = setting(EvalSettings(), free=True)

    def root(self, benchmark: str) -> Path:
        """Returns the folder of a benchmark's questions and annotations."""
        if benchmark == folder.BENCHMARK.name:
            return data_folder(self.data)
        return local_path(self.eval.data)

    def questions(self, benchmark: str) -> list[BenchmarkQuestion]:
        """Reads the questions of a benchmark; raises errors as `Benchmark.read_questions`."""
        file, ocr = self.eval.questions.get(benchmark, ""), self.eval.textvqa_ocr
        return BENCHMARKS[benchmark].read_questions(self.root(benchmark), file, ocr=ocr)


def own_policy(workdir: str | Path, policy: str | Path | None = None) -> Path:
    """Returns the policy file of the default row: `policy`, or the file of the run in `workdir`."""
    if policy is not None:
        return policy_file(policy)
    run_policy = local_path(workdir) / POLICY_FILE
    if not run_policy.is_file():
        hint = "run train.py with this --workdir first, or pass a policy as --policy"
        raise FileNotFoundError(f"{run_policy} does not exist; {hint}")
    return run_policy


def read_policies(
    settings: EvalSettings,
    workdir: str | Path,
    policy: str | Path | None = None,
    source: ModelFolder | None = None,
) -> dict[str, TrainedPruner]:
    """Loads the policies of the rows to answer by name, in the order of the table.

    `source` is the model that they are for; see `load_policy_for`.

    A further row whose file is missing is left out with a message, unless `methods` names it. The
    row of the run's policy is named by its method, and takes the place of a further row of that
    name. It has to be there, unless `methods` is for other rows.
    """
    load = load_policy if source is None else functools.partial(load_policy_for, source)
    policies, run_policy = {}, None
    trained_labels = [label for label in settings.learned if settings.wants(label)]
    needs_run_policy = any(label not in settings.rows for label in trained_labels)
    if trained_labels:
        try:
            run_policy = load(own_policy(workdir, policy))
        except FileNotFoundError:
            if needs_run_policy:
                raise
    label = None if run_policy is None else run_policy.label
    for name in [name for name in settings.rows if settings.wants(name) and name != label]:
        try:
            policies[name] = load(policy_file(settings.rows[name]))
        except FileNotFoundError as error:
            if settings.names(name):
                raise FileNotFoundError(f"row {name!r}: {error}") from error
            distributed.say(f"no row {name!r}: {error}")
    if label in trained_labels:
        policies[label] = run_policy
    elif needs_run_policy:
        settings.expect("methods", False, f"{label} among them, the row of the run's policy")
    return policies


def check_policies(
    policies: Mapping[str, TrainedPruner], config: ModelConfig, settings: EvalSettings
) -> None:
    """Rejects policies that do not fit the model or cannot keep the budgets, by their rows."""
    n = config.max_image_tokens
    counts = [budget for budget in settings.budgets if isinstance(budget, int)]
    is_valid = max(counts, default=0) <= n
    settings.expect("budgets", is_valid, f"at most the {n} visual tokens of the model")
    max_count = max(Budget.parse(budget).count(n) for budget in settings.budgets)
    for name, policy in policies.items():
        try:
            policy.check_fits(config)
        except UserError as error:
            raise UserError(f"row {name!r}: {error}") from error
        steps = policy.schedule(config, n).most
        expected = f"at most the {steps} steps of row {name!r} for {n} visual tokens"
        settings.expect("budgets", max_count <= steps, expected)
