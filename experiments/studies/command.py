"""What the commands of studies share: the flags of a run, and a file of all figures."""

import argparse
from pathlib import Path
from typing import Any

from stepprune_jax import configurations
from stepprune_jax.cli.command_line import Parser, file_to_write
from stepprune_jax.parallel import distributed


def study_parser(description: str) -> Parser:
    """Returns a parser with the flags of a configuration."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configuration, a name or a file")
    change = parser.add_argument("--set", nargs="+", default=[], dest="changes")
    change.metavar, change.help = "FIELD=VALUE", "fields to change, such as seed=1"
    return parser


def read_study(given: argparse.Namespace) -> tuple[Any, Path | None]:
    """Returns the run and the file of `--json` that the flags name, if any."""
    file = file_to_write("--json", given.json) if given.json else None
    run = configurations.load(given.config, given.changes)
    distributed.use_cores(run.cpu_devices)
    return run, file
