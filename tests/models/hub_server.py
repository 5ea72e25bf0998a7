"""The Hugging Face hub, on this machine: listings, redirects to large files, ranges, and errors, as
its client expects them (https://huggingface.co/.well-known/openapi.json)."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")  # files that lie elsewhere, behind a redirect


class Hub(ThreadingHTTPServer):
    """Repositories: a folder for each org/name, or for org/name@revision."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.gated: set[str] = set()
        self.sent: list[str] = []  # the files whose content clients asked for
        self.url = f"http://127.0.0.1:{self.server_port}"

    def folder(self, repo: str, revision: str) -> Path | None:
        if revision == "main":
            return self.repositories.get(repo)
        commits = {commit(name): path for name, path in self.repositories.items()}
        return self.repositories.get(f"{repo}@{revision}") or commits.get(revision)


def commit(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def serving(repositories: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(repositories)
    Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._described(match[1], match[2], match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolved(*match.groups())
        elif match := re.fullmatch(r"/elsewhere/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            folder = self.server.folder(match[1], match[2])
            assert folder
            self._content((folder / match[3]).read_bytes(), match[3])
        else:
            self._answer(404)

    def _found(self, repo: str, revision: str) -> Path | None:
        """The folder; else the answer that there is none."""
        folder = self.server.folder(repo, revision)
        if repo in self.server.gated:
            self._answer(403, {"X-Error-Code": "GatedRepo"})
        elif folder is None:
            known = any(name.partition("@")[0] == repo for name in self.server.repositories)
            kind = "RevisionNotFound" if known else "RepoNotFound"
            self._answer(404, {"X-Error-Code": kind})
        else:
            return folder
        return None

    def _described(self, repo: str, what: str | None, revision: str) -> None:
        if not (folder := self._found(repo, revision)):
            return
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        listed = [(file.relative_to(folder).as_posix(), file.stat().st_size) for file in files]
        if what == "tree":
            self._json([self._entry(name, size, folder) for name, size in listed])
            return
        siblings = [{"rfilename": name, "size": size} for name, size in listed]
        self._json({"id": repo, "sha": self._commit(repo, revision), "siblings": siblings})

    def _commit(self, repo: str, revision: str) -> str:
        if re.fullmatch("[0-9a-f]{40}", revision):
            return revision
        return commit(repo if revision == "main" else f"{repo}@{revision}")

    def _entry(self, name: str, size: int, folder: Path) -> dict:
        content = (folder / name).read_bytes()
        entry = {
            "type": "file",
            "path": name,
            "size": size,
            "oid": hashlib.sha1(content).hexdigest(),
        }
        if name.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
        return entry

    def _resolved(self, repo: str, revision: str, name: str) -> None:
        if not (folder := self._found(repo, revision)):
            return
        if not (folder / name).is_file():
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = (folder / name).read_bytes()
        headers = {"X-Repo-Commit": self._commit(repo, revision)}
        if name.endswith(LARGE):
            headers |= {
                # Another host: the client follows a redirect within one host unasked.
                "Location": f"http://localhost:{self.server.server_port}/elsewhere/{repo}/{revision}"
                f"/{name}",
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
            }
            self._answer(302, headers)
        else:
            headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
            self._content(content, name, headers)

    def _content(self, content: bytes, name: str, headers: dict[str, str] | None = None) -> None:
        status, given = 200, dict(headers or {})
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            given["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            status, content = 206, content[start : end + 1]
        if self.command == "GET":
            self.server.sent.append(name)
        self._answer(status, given, content)

    def _json(self, value: object) -> None:
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _answer(self, status: int, headers: dict[str, str] | None = None, content=b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
