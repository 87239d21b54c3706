"""The part of the Hugging Face hub's HTTP API that uploads use, for `tests.hub_server`."""

import base64
import hashlib
import json
import shutil
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Uploads(BaseHTTPRequestHandler):
    server: Any

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
        """The content of a large file."""
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

    def _json(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
