"""Draws one clip with the kept tokens of two questions."""

from collections.abc import Sequence
from pathlib import Path

from experiments.moving_shapes.model import TIMES
from experiments.moving_shapes.scene import FRAME_RATE
from experiments.moving_shapes.world import clip_at
from stepprune_jax.cli.command_line import Parser, exit_with

_NAME = "experiments.moving_shapes.picture"


def draw_picture(
    model_folder: str,
    policy_file: str,
    out: Path,
    *,
    seed: int,
    number: int,
    families: Sequence[str],
) -> None:
    """Answers questions about a test clip by the learned stop, and draws the kept tokens.

    Args:
        model_folder: folder of the model.
        policy_file: file of the policy, or folder of its run.
        out: the PNG file.
        seed: seed of the world.
        number: number of the test clip.
        families: families of the questions to draw, from top to bottom.
    """
    import stepprune_jax as sp
    from stepprune_jax.visualize.strip import Strip, draw_strips

    clip = clip_at(seed, "test", number)
    queries = {query.family: query for query in clip.queries}
    chosen = [queries[family] for family in families if family in queries]
    model, policy = sp.load_vlm(model_folder), sp.load_policy(policy_file)
    videos = [[sp.Video(clip.frames, fps=FRAME_RATE)] for _ in chosen]
    options = sp.RunOptions(max_tokens=3)
    answers = sp.generate(model, [query.text for query in chosen], videos, policy, options=options)
    strips = []
    for query, answer in zip(chosen, answers, strict=True):
        num_kept = len(answer.kept_indices[0])
        title = f"{query.text}  {answer.text}   ({num_kept} of {answer.visual_tokens} tokens)"
        strips.append(Strip(title, list(answer.kept_indices[0])))
        print(f"{title}; correct: {query.answer}; frames {list(query.frames)}")
    temporal_patches, rows, columns = answers[0].grids[0]
    grid = temporal_patches, rows, columns
    draw_strips(out, clip.frames, grid, strips, times=TIMES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog=_NAME, description=__doc__)
    parser.add_argument("--model", default="experiments/models/moving_shapes_qwen3", help="folder")
    parser.add_argument("--policy", default="experiments/policies/moving_shapes.safetensors")
    parser.add_argument("--out", type=Path, default=Path("docs/images/moving_shapes.png"))
    parser.add_argument("--seed", type=int, default=0, help="seed of the world")
    parser.add_argument("--clip", type=int, default=0, help="number of the test clip")
    families = ["count", "before"]
    parser.add_argument("--families", nargs="+", default=families, help="questions to draw")
    flags = parser.parse_args(arguments)
    draw_picture(
        flags.model,
        flags.policy,
        flags.out,
        seed=flags.seed,
        number=flags.clip,
        families=flags.families,
    )


if __name__ == "__main__":
    exit_with(_NAME, main)
