"""Figures of a running server, in Prometheus' text format."""

import collections
import threading
from collections.abc import Mapping

# Of each figure: its type, and what it is. A summary has a sum and a count.
_KINDS = {
    "requests_total": ("counter", "answers by HTTP status; 499: the client went away"),
    "in_flight": ("gauge", "requests that are being read or answered"),
    "queue": ("gauge", "requests that wait for the worker"),
    "batch_rows": ("summary", "requests that the worker ran together"),
    "batch_seconds": ("summary", "seconds the worker took for them"),
    "visual_tokens_total": ("counter", "visual tokens of the images"),
    "visual_tokens_kept_total": ("counter", "visual tokens that remained after pruning"),
    "first_token_seconds": ("summary", "seconds from a request to the first token of its answer"),
    "request_seconds": ("summary", "seconds from a request to the end of its answer"),
}


class Metrics:
    """Sums that only grow; may be used by several threads."""

    def __init__(self):
        self._sums: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, name: str, value: float | int = 1, label: str = "") -> None:
        """Adds to a counter; `label` is text in braces, such as `{status="200"}`."""
        with self._lock:
            self._sums[name + label] += value

    def observe(self, name: str, value: float | int) -> None:
        """Adds a value to a summary."""
        with self._lock:
            self._sums[f"{name}_sum"] += value
            self._sums[f"{name}_count"] += 1

    def text(self, gauges: Mapping[str, int]) -> str:
        """Returns all figures, with the current values of the gauges by name."""
        with self._lock:
            known = {**self._sums, **gauges}
        lines = []
        for name, (kind, about) in _KINDS.items():
            lines += [f"# HELP stepprune_{name} {about}", f"# TYPE stepprune_{name} {kind}"]
            names = {name, f"{name}_sum", f"{name}_count"}
            for full, value in sorted(known.items()):
                if full.partition("{")[0] in names:
                    lines.append(f"stepprune_{full} {value:.10g}")
        return "\n".join(lines) + "\n"
