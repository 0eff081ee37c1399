"""A small stand-in of the Hugging Face hub: models, revisions and uploads, in this process."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

from huggingface_hub import constants


class Hub:
    """What the hub holds, and what it was asked.

    Attributes:
        commits: (repository, branch) to hashes of its commits.
        files: (repository, hash) to contents by name.
        asked: paths that were asked for.
    """

    def __init__(self):
        self.commits, self.files, self.asked = {}, {}, []

    def commit(self, repository, files, branch="main"):
        """Adds files to a branch; returns the hash of the commit."""
        history = self.commits.setdefault((repository, branch), [])
        before = self.files[repository, history[-1]] if history else {}
        name = hashlib.sha1(repr((repository, branch, len(history), [*files])).encode()).hexdigest()
        history.append(name)
        self.files[repository, name] = before | files
        return name

    def at(self, repository, revision):
        """The hash that a revision means, or None."""
        if (repository, revision) in self.files:
            return revision
        return self.commits.get((repository, revision), [None])[-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def _reply(self, status, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _absent(self, code):
        self._reply(404, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.hub.asked.append(path)
        owner, name, kind, revision, *rest = (
            path.removeprefix("/api/models").split("/")[1:] + [""] * 4
        )
        repository = f"{owner}/{name}"
        if not any(known == repository for known, _ in self.hub.commits):
            return self._absent("RepoNotFound")
        commit = self.hub.at(repository, revision)
        if commit is None:
            return self._absent("RevisionNotFound")
        files = self.hub.files[repository, commit]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._reply(200, {"id": repository, "sha": commit, "siblings": siblings})
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            return self._reply(200, entries)
        data = files.get("/".join(rest).rstrip("/"))
        if data is None:
            return self._absent("EntryNotFound")
        return self._reply(200, data, ETag=f'"{_etag(data)}"', X_Repo_Commit=commit)

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        path = unquote(urlparse(self.path).path)
        self.hub.asked.append(path)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers.get("Authorization") != "Bearer right":
            return self._reply(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            fields = json.loads(body)
            repository = f"{fields['organization']}/{fields['name']}"
            self.hub.private = fields.get("private") or fields.get("visibility")
            if (repository, "main") not in self.hub.commits:
                self.hub.commit(repository, {})
            return self._reply(200, {"url": f"{constants.ENDPOINT}/{repository}"})
        if path == "/api/validate-yaml":
            return self._reply(200, {"errors": [], "warnings": []})
        _, _, owner, name, kind, branch = path.strip("/").split("/")
        if kind == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in asked]
            return self._reply(200, {"files": modes})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        commit = self.hub.commit(f"{owner}/{name}", files, branch)
        url = f"{constants.ENDPOINT}/{owner}/{name}/commit/{commit}"
        return self._reply(200, {"commitUrl": url, "commitOid": commit, "success": True})


def _etag(data):
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def serving(cache, patch):
    """Runs a hub that huggingface_hub asks, with a cache of its own, and yields it."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    address = f"http://127.0.0.1:{server.server_port}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    patch.setenv("NO_PROXY", "127.0.0.1")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
