"""A server on loopback for the part of the Hugging Face hub's HTTP API that we use."""

import base64
import hashlib
import json
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".bin", ".gguf")  # behind a redirect to the CDN, as LFS files are


class HubServer:
    """Serves {root}/{organisation}/{name}/ as branch main of that repository, until it is closed.

    `push` moves a branch to the files of another directory; earlier commits stay reachable.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: dict[str, str] = {}  # repository -> the token it asks for
        self.gated: dict[str, str] = {}
        self.heads: Counter[str] = Counter()  # "organisation/name/file" -> requests
        self.gets: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()  # bytes of its content
        self.cuts: Counter[str] = Counter()  # so many answers with it break off half-way
        self.knows_ranges = True
        self.writers: set[str] = set()  # tokens that may upload
        self.readers: set[str] = set()  # and those that may not
        self.created: dict[str, dict[str, Any]] = {}  # repository -> what was asked for
        self.messages: dict[str, str] = {}  # commit -> its summary
        self.large: dict[str, bytes] = {}  # SHA-256 -> content
        self.puts: Counter[str] = Counter()  # SHA-256 -> uploads
        self._commits: dict[str, Path] = {}
        self._refs: dict[tuple[str, str], str] = {}
        self.connections: set[socket.socket] = set()
        self._servers: list[ThreadingHTTPServer] = []
        self.endpoint = f"http://127.0.0.1:{self._serve()}"
        self.cdn = f"http://localhost:{self._serve()}"  # another host: no token may be sent there

    def _serve(self) -> int:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.hub = self  # type: ignore[attr-defined]
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server.server_port

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()
        for connection in list(self.connections):  # those kept alive would be served on
            with suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)

    def push(self, repository: str, directory: Path, revision: str = "main") -> str:
        """Makes the directory's files a new commit, which the branch or tag then names."""
        commit = hashlib.sha1(f"{repository} {len(self._commits)}".encode()).hexdigest()
        self._commits[commit] = directory
        self._refs[repository, revision] = commit
        return commit

    def commit(self, repository: str, revision: str = "main") -> str | None:
        if revision in self._commits:
            return revision
        directory = self.root / repository
        if revision == "main" and (repository, revision) not in self._refs and directory.is_dir():
            self.push(repository, directory)
        return self._refs.get((repository, revision))

    def files(self, commit: str) -> Path:
        return self._commits[commit]

    def exists(self, repository: str) -> bool:
        return self.commit(repository) is not None or any(r == repository for r, _ in self._refs)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def setup(self) -> None:
        super().setup()
        self.server.hub.connections.add(self.connection)

    def finish(self) -> None:
        self.server.hub.connections.discard(self.connection)
        super().finish()

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        hub: HubServer = self.server.hub
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "cdn":
            repository, commit, file = "/".join(parts[1:3]), parts[3], "/".join(parts[4:])
            if "Authorization" in self.headers:
                return self._error(400, "InvalidRequest", "a token has left the hub", body)
            (hub.gets if body else hub.heads)[f"{repository}/{file}"] += 1
            return self._file(f"{repository}/{file}", hub.files(commit) / file, body, {})
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        verb, revision, file = "revision", "main", ""
        if api and len(parts) > 4:
            verb, revision = parts[4], unquote(parts[5])
        elif not api and len(parts) > 4:
            verb, revision, file = parts[2], unquote(parts[3]), unquote("/".join(parts[4:]))
            (hub.gets if body else hub.heads)[f"{repository}/{file}"] += 1

        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if sent != hub.private.get(repository, sent):
            return self._error(401, "RepoNotFound", "Invalid username or password.", body)
        if not hub.exists(repository):
            return self._error(404, "RepoNotFound", "Repository not found", body)
        if sent != hub.gated.get(repository, sent):
            return self._error(403, "GatedRepo", "Access to this model is restricted.", body)
        found = hub.commit(repository, revision)
        if found is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}", body)
        root = hub.files(found)
        if api and verb == "revision":
            names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
            info = {"id": repository, "sha": found, "siblings": [{"rfilename": n} for n in names]}
            return self._send(200, json.dumps(info).encode(), body)
        path = root / file
        if api or verb != "resolve" or not path.is_file():
            return self._error(404, "EntryNotFound", "Entry not found", body, found)
        content = path.read_bytes()
        headers = {"X-Repo-Commit": found, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if not file.endswith(LARGE):
            return self._file(f"{repository}/{file}", path, body, headers)
        headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        headers["X-Linked-Size"] = str(len(content))
        headers["Location"] = f"{hub.cdn}/cdn/{repository}/{found}/{file}"
        self._send(302, b"", body, headers)

    def _file(self, name: str, path: Path, body: bool, headers: dict[str, str]) -> None:
        """All of it, or the range that is asked for."""
        hub: HubServer = self.server.hub
        content, status = path.read_bytes(), 200
        asked = self.headers.get("Range", "").removeprefix("bytes=").split("-")
        if hub.knows_ranges and len(asked) == 2:
            first, size = int(asked[0]), len(content)
            content = content[first : int(asked[1] or size) + 1]
            last = first + len(content) - 1
            status, headers = 206, {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
        cut = body and hub.cuts[name] > 0
        hub.cuts[name] -= cut
        try:
            sent = self._send(status, content, body, headers, cut=cut)
        except OSError:  # the client has seen enough
            return
        hub.sent[name] += sent

    def _error(self, status: int, code: str, text: str, body: bool, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": text}
        if commit:
            headers["X-Repo-Commit"] = commit
        self._send(status, json.dumps({"error": text}).encode(), body, headers)

    def _send(
        self,
        status: int,
        content: bytes,
        body: bool,
        headers: dict[str, str] | None = None,
        *,
        cut: bool = False,
    ) -> int:
        """Returns how many bytes of the content were sent."""
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not body:
            return 0
        sent = len(content) // 2 if cut else len(content)
        self.wfile.write(content[:sent])
        self.close_connection = self.close_connection or cut
        return sent

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), True)

    def do_POST(self) -> None:
        hub = self.server.hub
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:2] == ["api", "validate-yaml"]:
            return self._json(200, {"errors": [], "warnings": []})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in hub.writers:
            known = token in hub.readers
            return self._json(403 if known else 401, {"error": "Forbidden" if known else "Unknown"})
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(raw))
        if parts[-3:] == ["lfs", "objects", "batch"]:
            objects = json.loads(raw)["objects"]
            return self._json(
                200, {"transfer": "basic", "objects": list(map(self._object, objects))}
            )
        repository, verb, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        if verb == "branch":
            if hub.commit(repository, revision):
                return self._json(409, {"error": "exists"})
            hub.push(repository, hub.files(hub.commit(repository)), revision)
            return self._json(200, {})
        if verb == "preupload":
            return self._json(200, {"files": list(map(self._mode, json.loads(raw)["files"]))})
        self._commit(repository, revision, raw, "create_pr" in parse_qs(url.query))

    def do_PUT(self) -> None:
        """Takes the content of a large file."""
        hub, oid = self.server.hub, self.path.rpartition("/")[2]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        hub.puts[oid] += 1
        if hub.cuts["puts"] > 0:
            hub.cuts["puts"] -= 1
            self.close_connection = True
            return
        if hashlib.sha256(content).hexdigest() != oid:
            return self._json(400, {"error": "another content"})
        hub.large[oid] = content
        self._json(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        hub = self.server.hub
        repository = f"{asked['organization'] or 'me'}/{asked['name']}"
        answer = {"url": f"{hub.endpoint}/{repository}"}
        if hub.exists(repository):
            return self._json(409, answer)
        hub.created[repository] = asked
        hub.push(repository, self._directory())
        self._json(200, answer)

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.server.hub.large:
            return asked
        where = f"{self.server.hub.endpoint}/large/{asked['oid']}"
        return asked | {"actions": {"upload": {"href": where}}}

    def _mode(self, asked: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if asked["path"].endswith(".safetensors") else "regular"
        return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False}

    def _commit(self, repository: str, revision: str, raw: bytes, pull_request: bool) -> None:
        hub = self.server.hub
        before = hub.commit(repository, revision)
        header, *lines = [json.loads(line) for line in raw.splitlines()]
        if header["value"].get("parentCommit") not in (None, before):
            return self._json(412, {"error": "the branch has moved"})
        directory = self._directory()
        shutil.copytree(hub.files(before), directory, dirs_exist_ok=True)
        for line in lines:
            value = line["value"]
            path = directory / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                path.write_bytes(hub.large[value["oid"]])
            else:
                path.unlink()
        commit = hub.push(repository, directory, "refs/pr/1" if pull_request else revision)
        hub.messages[commit] = header["value"]["summary"]
        url = f"{hub.endpoint}/{repository}"
        found = {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}
        self._json(200, found | {"pullRequestUrl": f"{url}/discussions/1"})

    def _directory(self) -> Path:
        directory = self.server.hub.root / f".commit-{len(list(self.server.hub.root.glob('.*')))}"
        directory.mkdir(parents=True)
        return directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub whose repositories are tmp_path/hub/{organisation}/{name}/, and an empty cache.

    huggingface_hub read HF_ENDPOINT and HF_HOME when it was imported, so its constants are set.
    """
    server = HubServer(tmp_path / "hub")
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, for bytes
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    yield server
    server.close()
