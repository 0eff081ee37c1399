"""Figures of a running server, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, disable_created_metrics

disable_created_metrics()  # the time at which each figure was first seen, a figure of its own


class Metrics:
    """Counters and gauges, whose names begin with stepprune_; may be used by several threads."""

    def __init__(self):
        self.registry = CollectorRegistry()
        how = {"namespace": "stepprune", "registry": self.registry}
        about = "answers by HTTP status; 499: the client went away"
        self.requests = Counter("requests_total", about, ["status"], **how)
        self.in_flight = Gauge("in_flight", "requests that are being read or answered", **how)
        self.queue = Gauge("queue", "requests that wait for the worker", **how)
        self.batch_rows = Summary("batch_rows", "requests that the worker ran together", **how)
        self.batch_seconds = Summary("batch_seconds", "seconds the worker took for them", **how)
        self.visual_tokens = Counter("visual_tokens_total", "visual tokens of the images", **how)
        about = "visual tokens that remained after pruning"
        self.visual_tokens_kept = Counter("visual_tokens_kept_total", about, **how)
        about = "seconds from a request to the first token of its answer"
        self.first_token_seconds = Summary("first_token_seconds", about, **how)
        about = "seconds from a request to the end of its answer"
        self.request_seconds = Summary("request_seconds", about, **how)
