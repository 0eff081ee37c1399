"""Where the packages of the extra [serve] are not installed, nothing of the server is tested."""

import importlib.util

PACKAGES = ("httpx2", "prometheus_client", "starlette", "uvicorn")
MISSING = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
collect_ignore_glob = ["test_*.py", "engine/*"] if MISSING else []
