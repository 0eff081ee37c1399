"""A fake Hugging Face hub in the process of a test: models, revisions and uploads."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

from huggingface_hub import constants


class Hub:
    """Contents of the fake hub, and the requests that it received.

    Attributes:
        commits: hashes of the commits, by (repository, branch).
        files: contents by name, by (repository, hash).
        asked: paths of the requests.
    """

    def __init__(self):
        self.commits, self.files, self.asked = {}, {}, []

    def commit(self, repository, files, branch="main"):
        """Adds files to a branch; returns the hash of the commit."""
        hashes = self.commits.setdefault((repository, branch), [])
        old_files = self.files[repository, hashes[-1]] if hashes else {}
        identity = repr((repository, branch, len(hashes), [*files]))
        new_hash = hashlib.sha1(identity.encode()).hexdigest()
        hashes.append(new_hash)
        self.files[repository, new_hash] = old_files | files
        return new_hash

    def find_commit(self, repository, revision):
        """Returns the hash of a branch or hash, or None if there is no such revision."""
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

    def _reply_missing(self, code):
        self._reply(404, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.hub.asked.append(path)
        owner, name, kind, revision, *file_parts = (
            path.removeprefix("/api/models").split("/")[1:] + [""] * 4
        )
        repository = f"{owner}/{name}"
        if repository not in {name for name, _ in self.hub.commits}:
            return self._reply_missing("RepoNotFound")
        commit = self.hub.find_commit(repository, revision)
        if commit is None:
            return self._reply_missing("RevisionNotFound")
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
        data = files.get("/".join(file_parts).rstrip("/"))
        if data is None:
            return self._reply_missing("EntryNotFound")
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
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
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
    """Runs a fake hub, redirects huggingface_hub to it with a separate cache, and yields it."""
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
