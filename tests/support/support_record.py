"""Records which model families can do what, as far as tests have shown it.

A test that shows it has the marker `supports`, for example:

    @pytest.mark.supports("llava", "answer")

With `--record_support`, the results of these tests are written to `RECORD`, and `tools/support.py`
prints the record as a table.
"""

import datetime
import json
from pathlib import Path

RECORD = Path(__file__).parent / "recorded" / "support.json"
STATUSES = ("tested", "compiled")  # the better one first


class SupportRecorder:
    """A plugin of pytest that collects the results of tests with the marker `supports`.

    Attributes:
        passed: status and test by (family, feature), of tests that passed.
        failed: (family, feature) of tests that failed.
    """

    def __init__(self, record=RECORD):
        self._record = record
        self.passed, self.failed = {}, set()

    def pytest_collection_modifyitems(self, items):
        """Puts the markers into the reports, which a worker of xdist sends to the main process."""
        for item in items:
            for mark in item.iter_markers("supports"):
                family, feature = mark.args
                status = mark.kwargs.get("status", STATUSES[0])
                item.user_properties.append(("supports", [family, feature, status]))

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            if name != "supports":
                continue
            family, feature, status = value
            if report.failed:
                self.failed.add((family, feature))
            elif report.when == "call" and report.passed:
                best, _ = self.passed.get((family, feature), (STATUSES[-1], ""))
                status = min(status, best, key=STATUSES.index)
                self.passed[family, feature] = status, report.nodeid.partition("[")[0]

    def pytest_sessionfinish(self, session):
        """Updates the record. The record keeps what was not tested in this session."""
        if hasattr(session.config, "workerinput") or not (self.passed or self.failed):
            return
        record = json.loads(self._record.read_text()) if self._record.exists() else {}
        today = datetime.date.today().isoformat()
        for (family, feature), (status, test) in self.passed.items():
            entry = {"status": status, "date": today, "test": test}
            record.setdefault(family, {})[feature] = entry
        for family, feature in self.failed:
            record.get(family, {}).pop(feature, None)
        self._record.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
