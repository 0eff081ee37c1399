"""Figures of an evaluation, and the page that shows them."""

from stepprune_jax.visualize.report import redraw, write_report
from stepprune_jax.visualize.study import Study, check_study

__all__ = ["Study", "check_study", "redraw", "write_report"]
