"""The held-out questions of a run, read before anything is loaded."""

from pathlib import Path

from stepprune_jax.data.llava import Question
from stepprune_jax.data.llava import read_questions as list_questions
from stepprune_jax.evaluation.split import Split, read_split, spread_over, thin
from stepprune_jax.extras import need
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step import StepConfig
from stepprune_jax.user_input import UserError, local_path


def read_questions(run: Run, setup: StepConfig) -> Split | None:
    """Reads the questions of a run's validation; None if there is none."""
    if not run.validation.every:
        return None
    if run.validation.overlays:
        need("matplotlib", "config.validation.overlays, which draws, is not 0")
    most = setup.method.longest(setup.backbone.config.max_image_tokens)
    budget = run.validation.budget
    if budget > most:
        raise UserError(f"config.validation.budget is {budget}, expected at most {most}")
    positions = setup.backbone.config.text.max_positions
    is_short = run.validation.max_new_tokens <= positions
    expected = f"at most {positions}, the positions that the model was trained with"
    run.validation.expect("max_new_tokens", is_short, expected)
    folder = _folder(run)
    if folder is None:
        raise UserError("config.validation.folder is empty, expected one with validation.jsonl")
    split = read_split(folder, "validation")
    return thin(split, run.validation.questions)


def read_calibration_questions(run: Run) -> list[Question]:
    """Reads the questions on which a trained policy's stop is calibrated."""
    folder, most = _folder(run), run.validation.calibrate
    if not most or folder is None or not (file := folder / "validation.jsonl").is_file():
        return []
    try:
        questions = list_questions(file, folder / "images")
    except (OSError, UserError) as error:
        hint = "config.validation.calibrate=0 skips the file"
        raise UserError(f"{error}; {hint}") from error
    return [questions[at] for at in spread_over(len(questions), most)]


def _folder(run: Run) -> Path | None:
    """Returns the folder of a run's validation split; None if neither it nor the data's is set."""
    given = run.validation.folder or run.data.folder
    folder = local_path(given)
    if run.validation.folder and not folder.is_dir():
        raise FileNotFoundError(f"config.validation.folder: no folder {folder}")
    return folder if given else None
