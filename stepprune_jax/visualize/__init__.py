"""Figures of an evaluation, and the page that shows them."""

from stepprune_jax.evaluation.report import Report
from stepprune_jax.visualize.excerpts import check_report
from stepprune_jax.visualize.figures import redraw, write_report

__all__ = ["Report", "check_report", "redraw", "write_report"]
