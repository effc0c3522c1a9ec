"""A Hub of this machine's own: kernel repositories served over HTTP in the form that huggingface_hub asks for.

HF_ENDPOINT points a process at it. It serves what `kernels` calls and no more: an organisation's overview, a
repository's branches, tree and revision, and the files. A branch is a directory; its commit is the hash of what is in
it, so that a change of the directory is a new commit and the old one stays.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY_PATH = re.compile(r"(?:/api)?/kernels/([^/]+/[^/]+)/(refs|tree|revision|resolve)(?:/([^/]+))?(?:/(.+))?")


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def inside(root: Path, below: str) -> bool:
    """Whether root/below lies in root, wherever `..`, an absolute path or a link leads."""
    return (root / below).resolve().is_relative_to(root.resolve())


@dataclass
class Repository:
    """Branches to commits, and commits to directories that nothing changes any more."""

    store: Path
    branches: dict[str, str] = field(default_factory=dict)

    def push(self, branch: str, directory: Path) -> str:
        """Make `directory` the branch's content; the commit."""
        files = sorted(f for f in directory.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
        listing = [f"{f.relative_to(directory)} {blob_id(f.read_bytes())}" for f in files]
        commit = hashlib.sha1("\n".join(listing).encode()).hexdigest()
        if not (self.store / commit).exists():
            for file in files:
                target = self.store / commit / file.relative_to(directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        self.branches[branch] = commit
        return commit

    def commit_of(self, revision: str) -> str | None:
        commit = self.branches.get(revision.removeprefix("refs/heads/"), revision)
        return commit if re.fullmatch(r"[0-9a-f]{40}", commit) and (self.store / commit).is_dir() else None


class HubServer:
    """`with HubServer(directory) as hub:` serves on a free port of 127.0.0.1; `hub.requests` is what was asked."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.repositories: dict[str, Repository] = {}
        self.trusted: set[str] = set()
        self.requests: list[str] = []
        self.unknown: list[str] = []

    def repository(self, repo_id: str) -> Repository:
        return self.repositories.setdefault(repo_id, Repository(self.store / repo_id))

    def __enter__(self) -> HubServer:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files_sent(self) -> list[str]:
        """Paths of the files that were downloaded, without HEAD requests."""
        sent = [re.fullmatch(r"GET /kernels/[^/]+/[^/]+/resolve/[^/]+/(.*)", line) for line in self.requests]
        return [match[1] for match in sent if match]


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/organizations/([^/]+)/overview", path):
            self.overview(match[1])
        elif match := REPOSITORY_PATH.fullmatch(path):
            repo_id, what, revision, below = (urllib.parse.unquote(part or "") for part in match.groups())
            self.of_repository(repo_id, what, revision, below)
        else:
            self.hub.unknown.append(path)
            self.missing("NotFound", f"This server has no {path}")

    do_HEAD = do_GET

    def of_repository(self, repo_id: str, what: str, revision: str, below: str) -> None:
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            self.missing("RepoNotFound", "Repository not found")
        elif what == "refs":
            refs = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c} for b, c in repository.branches.items()]
            self.answer({"branches": refs, "converts": [], "tags": []})
        elif (commit := repository.commit_of(revision)) is None:
            self.missing("RevisionNotFound", f"Invalid rev id: {revision}")
        elif what == "revision":
            self.answer({"id": repo_id, "author": repo_id.split("/")[0], "sha": commit, "private": False})
        elif what == "tree":
            self.tree(repository.store / commit, below)
        elif inside(repository.store / commit, below):
            self.file(repository.store / commit / below, commit)
        else:
            self.missing("EntryNotFound", "Entry not found", commit)

    def overview(self, name: str) -> None:
        self.answer(
            {"avatarUrl": "", "name": name, "fullname": name, "trustedKernelPublisher": name in self.hub.trusted}
        )

    def tree(self, root: Path, below: str) -> None:
        recursive = "recursive=true" in self.path.lower()
        top = root / below
        if not inside(root, below) or not top.is_dir():
            self.missing("EntryNotFound", f"{below} does not exist")
            return
        entries = []
        for path in sorted(top.rglob("*") if recursive else top.iterdir()):
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                entries.append(
                    {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
                )
            else:
                data = path.read_bytes()
                entries.append({"type": "file", "path": name, "oid": blob_id(data), "size": len(data)})
        self.answer(entries)

    def file(self, path: Path, commit: str) -> None:
        if not path.is_file():
            self.missing("EntryNotFound", "Entry not found", commit)
            return
        data = path.read_bytes()
        self.send(200, data, {"ETag": f'"{blob_id(data)}"', "X-Repo-Commit": commit})

    def answer(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def missing(self, code: str, message: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        body = json.dumps({"error": message}).encode()
        self.send(404, body, headers | ({"X-Repo-Commit": commit} if commit else {}))

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
