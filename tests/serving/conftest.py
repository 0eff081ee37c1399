"""Where the packages of the extra [serve] are not installed, nothing of the server is tested."""

import importlib.util

MISSING = [x for x in ("httpx2", "starlette", "uvicorn") if importlib.util.find_spec(x) is None]
collect_ignore_glob = ["test_*.py", "engine/*"] if MISSING else []
