"""Every method on every question: one rollout per policy, all budgets as prefixes of one order."""

from stepprune_jax.evaluation.evaluate import evaluate
from stepprune_jax.evaluation.folder import Report, read_report
from stepprune_jax.evaluation.records import Records, load_records, save_records

__all__ = ["Records", "Report", "evaluate", "load_records", "read_report", "save_records"]
