"""Figures of an evaluation, and the page that shows them."""

from stepprune_jax.visualize.excerpts import Study, check_study
from stepprune_jax.visualize.figures import redraw, write_report

__all__ = ["Study", "check_study", "redraw", "write_report"]
