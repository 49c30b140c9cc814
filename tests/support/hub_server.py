"""Serve folders as repositories of a Hugging Face hub, for the real clients: HF_ENDPOINT is the address of `HubServer`.

A repository is a list of commits, each a mapping of file names to contents; a commit's name is a hash of its files.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from support.paths import ROOT

TOKEN = "hf_let_me_in"
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_WRITE = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class HubServer(ThreadingHTTPServer):
    """A hub on a free port of this machine; `requests` are the methods and paths that were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[tuple[str, str], list[tuple[str, Mapping[str, bytes]]]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, bool] = {}  # of repositories that were made by a client
        self.requests: list[str] = []
        self.cut: dict[str, int] = {}  # of files: bytes after which every connection ends
        self.ranges: list[tuple[str, str]] = []  # of the files that were asked for, with the header Range
        self.on_request: dict[str, Callable[[], None]] = {}  # called when a path of no repository is asked for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, kind: str, repo: str, files: Mapping[str, bytes]) -> str:
        """Add a commit to a repository of "models" or "datasets"; return its name."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault((kind, repo), []).append((name, files))
        return name

    def files_at(self, kind: str, repo: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        commits = self.commits[kind, repo]
        if revision == "main":
            return commits[-1]
        return next((commit for commit in commits if commit[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if path in self.server.on_request:
            self.server.on_request[path]()
            self._json({})
        elif self.command == "POST" and (path == "/api/repos/create" or _WRITE.fullmatch(path)):
            self._write(path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
        elif match := _API.fullmatch(path):
            kind, repo, verb, revision, below = match.groups()
            if (found := self._find(kind, repo, revision or "main")) is not None:
                self._api(kind, repo, verb or "revision", found, below or "")
        elif match := _FILE.fullmatch(path):
            found = self._find("datasets" if match[1] else "models", match[2], match[3])
            if found is not None:
                self._file(*found, match[4])
        else:
            self._fail(404, "RepoNotFound")

    do_HEAD = do_POST = do_GET

    def _write(self, path: str, body: bytes) -> None:
        """Make a repository of models, or take files for it, from one who has the token."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(401, "")
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            self.server.private[repo] = wanted.get("visibility") == "private" or wanted.get("private", False)
            self.server.commit("models", repo, {})
            self._json({"url": f"{self.server.url}/{repo}", "name": repo})
        elif (match := _WRITE.fullmatch(path)) is not None and match[2] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif match is not None:
            lines = [json.loads(line) for line in body.splitlines()]
            sent = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            name = self.server.commit("models", match[1], {path: b64decode(data) for path, data in sent.items()})
            page = f"{self.server.url}/{match[1]}/commit/{name}"
            self._json({"success": True, "commitOid": name, "commitUrl": page, "hookOutput": ""})

    def _find(self, kind: str, repo: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        if (kind, repo) not in self.server.commits:
            self._fail(401, "RepoNotFound")
            return None
        if repo in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(403, "GatedRepo")
            return None
        found = self.server.files_at(kind, repo, revision)
        if found is None:
            self._fail(404, "RevisionNotFound")
        return found

    def _api(self, kind: str, repo: str, verb: str, found: tuple[str, Mapping[str, bytes]], below: str) -> None:
        commit, files = found
        entries = [_entry(name, data) for name, data in files.items() if name.startswith(below)]
        folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
        if verb == "revision":
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._json({"_id": commit, "id": repo, "sha": commit, "private": False, "siblings": siblings, "tags": []})
        elif verb == "tree":
            if below and below not in files and below not in folders:
                self._fail(404, "EntryNotFound")
            else:
                self._json(
                    entries + [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
                )
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            wanted = json.loads(body)["paths"] if body.startswith("{") else re.findall(r"paths=([^&]*)", unquote(body))
            paths = [wanted] if isinstance(wanted, str) else wanted
            listed = [entry for entry in entries if entry["path"] in paths]
            listed += [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders & set(paths)]
            self._json(listed)

    def _file(self, commit: str, files: Mapping[str, bytes], name: str) -> None:
        if name not in files:
            self._fail(404, "EntryNotFound", commit=commit)
            return
        data = files[name]
        start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(start[1]), int(start[2] or len(data) - 1)) if start else (0, len(data) - 1)
        part = data[first : last + 1]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if self.command == "GET":
            self.server.ranges.append((name, self.headers.get("Range", "")))
        self._send(part, cut=self.server.cut.get(name))

    def _json(self, value: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._send(json.dumps(value).encode())

    def _fail(self, status: int, code: str, *, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self._send(json.dumps({"error": code}).encode())

    def _send(self, body: bytes, *, cut: int | None = None) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
            self.close_connection |= cut is not None and cut < len(body)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a hub without repositories."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder as the contents of a commit."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run_with_hub(
    endpoint: str, home: Path, *command: str, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python command with the hub at `endpoint` and its cache in `home`; the clients read both when imported."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = plain | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "*",
        **variables,
    }
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False
    )
