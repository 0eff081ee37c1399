"""Settings of an evaluation, and loading of the policies that they name.

An evaluation fills a results table. A row of the table is a pruning method at one token budget.
Rows that differ only in their budget share a label, such as "FastV": the name that the table shows.
Methods without weights are labeled by `Pruner.label`. Each trained policy is a method as well; its
label is a key of `EvalSettings.rows`, or the name of the method for the policy of the run itself.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, BenchmarkQuestion, folder
from stepprune_jax.benchmarks.answer_files import Provenance
from stepprune_jax.benchmarks.layout import DATA
from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.identity import load_policy_for
from stepprune_jax.checkpoints.model_settings import ModelSettings
from stepprune_jax.checkpoints.policy import (
    POLICY_FILE,
    load_policy,
    policy_file,
    read_about,
)
from stepprune_jax.checkpoints.shipped import policy_names
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.data.source import DataSettings, data_folder
from stepprune_jax.evaluation.names import DEFAULT, without_learned_stop
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import POSITIONS, Budget
from stepprune_jax.registry import PRUNERS, read_options, resolve_pruner, weighted
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.settings import Settings, choice, count, is_count, setting
from stepprune_jax.user_input import UserError, local_path, naming, nearest
from stepprune_jax.workdir.checkpoints import RUN_FILE

# Flag that selects methods without a policy, for messages.
UNTRAINED_EXAMPLE = "--config.eval.methods=all,grid,divprune"


def _are_budgets(values: tuple[int | str, ...]) -> bool:
    """Returns whether the values are distinct budgets: positive integers, or texts like "1/3"."""
    try:
        kinds = [Budget.parse(value).kind for value in values]
    except ValueError:
        return False
    expected_kinds = ["count" if isinstance(value, int) else "rate" for value in values]
    return kinds == expected_kinds != [] and len({*values}) == len(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings, path="config.eval"):
    """The group `eval` of a configuration; see docs/evaluation.md.

    Attributes:
        benchmarks: names of `benchmarks.BENCHMARKS`, separated by commas.
        data: root of LLaVA's folder layout, for the public benchmarks.
        questions: question files by benchmark, relative to `data`, in the format of the benchmark's
            published file. A benchmark without an entry uses its published file.
        textvqa_ocr: whether TextVQA's prompts keep their OCR tokens, as in LLaVA's evaluation.
        methods: methods to evaluate, separated by commas: keys of `PRUNERS` such as "fastv",
            labels such as "FastV", or classes of the user such as "norm.py:Norm" (see
            `resolve_pruner`). An empty text selects all methods.
        options: options by key of `PRUNERS`, such as "fastv layer=3 average=False; autoselect
            diversity=0.1". They apply to all policies of the method. Methods with a learned stop
            take no options.
        samples: number of questions per public benchmark whose answers store the kept tokens, so
            that the report can draw them.
        budgets: numbers of tokens to keep, or fractions of each image's tokens such as "1/3" or
            "33.3%". Each budget gives an exact row and, for a learned stop, a row that meets the
            budget on average.
        batch_size: questions per batch.
        max_new_tokens: longest answer in tokens; None selects the limit of the benchmark's program.
        positions: position ids of kept tokens: "original" ids, "compact" ids without gaps, or "own"
            for the choice of each method's authors.
        rows: policy files of further trained methods, by the label that their rows get. A label
            whose file is missing is skipped, unless `methods` names it.
        learned_stops: labels that get a further row without a budget: the number of tokens follows
            from the learned stop as trained, or from the score threshold of the method.
        validation_questions: maximum number of questions that stop biases are calibrated on; 0
            selects all questions. A stop bias makes a learned stop meet a budget on average.
        remarks: notes for readers of the report, one line each.
    """

    benchmarks: str = setting(
        folder.BENCHMARK.name,
        f"some of {', '.join(BENCHMARKS)}",
        lambda value: {*_split(value)} <= BENCHMARKS.keys(),
    )
    data: str = DATA
    questions: Mapping[str, str] = setting(
        {}, f"files by name of {', '.join(BENCHMARKS)}", lambda value: BENCHMARKS.keys() >= {*value}
    )
    textvqa_ocr: bool = True
    methods: str = ""
    options: str = ""
    samples: int = count(12, minimum=0)
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
    validation_questions: int = count(1000, minimum=0)
    remarks: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        method_names = self.method_names  # adds classes of the user to `PRUNERS`
        self.expect("benchmarks", bool(self.benchmark_names), f"some of {', '.join(BENCHMARKS)}")
        self.expect("rows", DEFAULT not in self.rows, f"names of rows other than {DEFAULT}")
        _check_methods(method_names, self.labels, [*self.rows])
        # Biases of a learned stop are calibrated without options.
        keys_with_options = [key for key, method in PRUNERS.items() if not method.has_stop]
        expected = f"options after names of {', '.join(keys_with_options)}"
        self.expect("options", {*keys_with_options} >= self.pruner_options.keys(), expected)

    @property
    def benchmark_names(self) -> list[str]:
        """Names in `benchmarks`, without repetitions."""
        return list(dict.fromkeys(_split(self.benchmarks)))

    @property
    def method_names(self) -> list[str]:
        """Names in `methods`, in lower case. A class of the user has the name of its method.

        Raises:
            UserError: a class of the user is not a usable pruner, see `resolve_pruner`.
        """
        row_labels = {label.lower() for label in self.rows}  # these may contain colons
        with naming("config.eval.methods"):
            return [
                text.lower() if text.lower() in row_labels else str(resolve_pruner(text)).lower()
                for text in _split(self.methods)
            ]

    @property
    def pruner_options(self) -> dict[str, dict[str, str]]:
        """The setting `options`, parsed: values of options by key of `PRUNERS` and option name."""
        words_of_methods = [text.split() for text in self.options.split(";") if text.strip()]
        with naming("config.eval.options"):
            return {
                str(resolve_pruner(key)): read_options("config.eval.options", option_texts)
                for key, *option_texts in words_of_methods
            }

    def longest_answer(self, benchmark: Benchmark) -> int:
        """Returns the length limit of answers to a benchmark, in tokens."""
        return self.max_new_tokens or benchmark.max_new_tokens

    def is_named(self, label: str) -> bool:
        """Returns whether `methods` names a method by its label or by its key in `PRUNERS`."""
        keys = [method.name for method in PRUNERS.values() if method.label == label]
        return not {label.lower(), *keys}.isdisjoint(self.method_names)

    def is_selected(self, label: str) -> bool:
        """Returns whether a method is evaluated: `methods` names it or is empty."""
        return not _split(self.methods) or self.is_named(label)

    @property
    def labels(self) -> list[str]:
        """Labels of all methods that can be evaluated, in display order."""
        untrained = [method.label for method in PRUNERS.values() if method.config_type is None]
        trained = [method.label for method in weighted().values()]
        return [*untrained, *self.rows, *(label for label in trained if label not in self.rows)]


def _check_methods(names: Sequence[str], labels: Sequence[str], rows: Sequence[str]) -> None:
    """Raises a UserError for the first name in `config.eval.methods` that is no method.

    Args:
        names: the names, in lower case.
        labels: labels of all methods.
        rows: labels of the rows that `config.eval.rows` adds.
    """
    keys = [key for key, method in PRUNERS.items() if method.label in labels]
    valid_names = {name.lower() for name in (*keys, *labels)}
    for name in names:
        if name not in valid_names:
            raise UserError(
                f"config.eval.methods is {name!r}, expected some of {', '.join([*keys, *rows])}, "
                f"or a class of yours as FILE.py:CLASS.{nearest(name, valid_names)}"
            )


def _split(text: str) -> list[str]:
    """Splits a text at commas, strips white space, and drops empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRun(Settings):
    """The settings of a run of `eval.py`.

    Fields with `free=True` do not affect answers, so a resumed run may change them.

    Attributes:
        seed: seed of methods that select tokens at random.
        mesh: preset of `parallel.sharding.build_mesh`, or sizes by axis: "data=2,tensor=4".
        cpu_devices: number of virtual CPU devices; 0 leaves the number to jax.
        model: the frozen model.
        data: the data folder.
        eval: benchmarks, methods and budgets.
    """

    seed: int = count(0, minimum=0)
    mesh: str = setting("data", free=True)
    cpu_devices: int = count(0, minimum=0, free=True)
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    eval: EvalSettings = setting(EvalSettings(), free=True)

    def root(self, benchmark: str) -> Path:
        """Returns the folder of a benchmark's questions and annotations."""
        if benchmark == folder.BENCHMARK.name:
            return data_folder(self.data)
        return local_path(self.eval.data)

    def questions(self, benchmark: str) -> list[BenchmarkQuestion]:
        """Reads the questions of a benchmark, as `Benchmark.read_questions` with its errors."""
        file, ocr = self.eval.questions.get(benchmark, ""), self.eval.textvqa_ocr
        questions = BENCHMARKS[benchmark].read_questions(self.root(benchmark), file, ocr=ocr)
        return self.sample_videos(questions)

    def sample_videos(self, questions: Sequence[BenchmarkQuestion]) -> list[BenchmarkQuestion]:
        """Returns questions whose videos are sampled by `data.fps` or `data.num_frames`."""
        return [
            question
            if question.video is None
            else question._replace(
                video=dataclasses.replace(question.video, **self.data.sampling._asdict())
            )
            for question in questions
        ]


def own_policy(workdir: str | Path, policy: str | Path | None = None) -> Path:
    """Returns the path of the run's policy file.

    Args:
        workdir: folder of the run.
        policy: a policy in any form that `policy_file` accepts; None selects the policy that the
            run trained.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if policy is not None:
        return policy_file(policy)
    run_policy = local_path(workdir) / POLICY_FILE
    if not run_policy.is_file():
        raise FileNotFoundError(
            f"{run_policy} does not exist; run train.py with this --workdir first, pass a policy "
            f"as --policy (a file, the folder of a run, or one of {', '.join(policy_names())}), or "
            f"name methods without training: {UNTRAINED_EXAMPLE}"
        )
    return run_policy


def read_seed(
    settings: EvalSettings,
    provenance: Provenance,
    workdir: str | Path,
    policy: str | Path | None = None,
) -> int | None:
    """Returns the seed that a row's answers depend on.

    Args:
        settings: settings of the evaluation, with the policy files of further rows.
        provenance: provenance of the row's answers.
        workdir: folder of the run.
        policy: the run's policy, as in `own_policy`.

    Returns:
        The seed of a random method, or the seed that a policy was trained with. None for other
        methods, and if the policy file is missing or does not tell its seed.
    """
    if "policy" not in provenance.made:
        options = provenance.made.get("options", provenance.made)
        seed = options.get("seed") if isinstance(options, Mapping) else None
        return seed if is_count(seed, 0) else None
    row_policy = settings.rows.get(without_learned_stop(provenance.method))
    try:
        file = own_policy(workdir, policy) if row_policy is None else policy_file(row_policy)
        run_file = file.parent / RUN_FILE
        description = read_json_object(run_file) if run_file.is_file() else read_about(file)
    except (OSError, UserError):
        return None
    config = description.get("config")
    seed = config.get("seed") if isinstance(config, Mapping) else None
    return seed if is_count(seed, 0) else None


def read_policies(
    settings: EvalSettings,
    workdir: str | Path,
    policy: str | Path | None = None,
    source: ModelFolder | None = None,
) -> dict[str, TrainedPruner]:
    """Loads the run's policy and the policies of `settings.rows`.

    The run's policy, found by `own_policy`, is labeled by its method. It replaces a policy with
    this label in `settings.rows`. If the file of another policy is missing, the policy is skipped
    with a message.

    Args:
        settings: settings of the evaluation.
        workdir: folder of the run.
        policy: the run's policy, as in `own_policy`.
        source: folder of the model that the policies will prune. A policy that was trained for
            another model is refused, see `load_policy_for`. None skips this check.

    Returns:
        The policies by label, in display order. The run's policy is last.

    Raises:
        FileNotFoundError: `methods` names a policy whose file is missing, or the run's policy is
            missing although `methods` does not exclude it.
        UserError: a policy is damaged, or `methods` names a trained method but not the method of
            the run's policy.
    """
    load = load_policy if source is None else functools.partial(load_policy_for, source)
    policies, run_policy = {}, None
    trained_labels = [
        method.label for method in weighted().values() if settings.is_selected(method.label)
    ]
    # Only the run can provide the policy of a trained method without an entry in `rows`.
    needs_run_policy = any(label not in settings.rows for label in trained_labels)
    if trained_labels:
        try:
            run_policy = load(own_policy(workdir, policy))
        except FileNotFoundError:
            if needs_run_policy:
                raise
    run_label = None if run_policy is None else run_policy.label
    for label, path in settings.rows.items():
        if label == run_label or not settings.is_selected(label):
            continue
        try:
            policies[label] = load(policy_file(path))
        except FileNotFoundError as error:
            if settings.is_named(label):
                raise FileNotFoundError(f"row {label!r}: {error}") from error
            distributed.say(f"no row {label!r}: {error}")
    if run_label in trained_labels:
        policies[run_label] = run_policy
    elif needs_run_policy:
        settings.expect("methods", False, f"{run_label} among them, the row of the run's policy")
    return policies


def check_policies(
    policies: Mapping[str, TrainedPruner],
    config: ModelConfig,
    settings: EvalSettings,
    num_tokens: int,
) -> None:
    """Checks that the budgets fit the model, and that the policies fit the model and the budgets.

    Args:
        policies: the policies by label.
        config: configuration of the model.
        settings: settings with the budgets.
        num_tokens: visual tokens of the largest image or video.

    Raises:
        UserError: a budget exceeds the visual tokens of the model or the steps of a policy, or a
            policy does not fit the model. The message names the label.
    """
    counts = [budget for budget in settings.budgets if isinstance(budget, int)]
    is_valid = max(counts, default=0) <= num_tokens
    settings.expect("budgets", is_valid, f"at most the {num_tokens} visual tokens of the model")
    max_count = max(Budget.parse(budget).exact_count(num_tokens) for budget in settings.budgets)
    for name, policy in policies.items():
        try:
            policy.check_fits(config)
        except UserError as error:
            raise UserError(f"row {name!r}: {error}") from error
        max_steps = policy.schedule(config, num_tokens).most
        expected = f"at most the {max_steps} steps of row {name!r} for {num_tokens} visual tokens"
        settings.expect("budgets", max_count <= max_steps, expected)
