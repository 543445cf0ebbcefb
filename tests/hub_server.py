"""A Hugging Face Hub on 127.0.0.1, in memory, for tests without internet.

It speaks the endpoints that the real client (huggingface_hub 1.x and 2.x) and Transformers need to create a model
repository, push to it and load from it: commits, LFS uploads, branches, pull requests. No Xet. Others answer 501.

huggingface_hub reads its environment when it is imported, so what talks to this server runs in a process of its own:

    def test_push(hub_server, folder):
        hub_server.run('''
            from huggingface_hub import HfApi
            HfApi().create_repo("me/tiny", private=True)
            HfApi().upload_folder(repo_id="me/tiny", folder_path=sys.argv[1])
        ''', folder)
        repo = hub_server.repos["me/tiny"]
        assert repo.private and "README.md" in repo.pushes()[0].files
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

USER = "me"
TOKEN = "hf_local"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
REGULAR_LIMIT_BYTES = 10_000_000


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit; `sha256` is set if it came through LFS."""

    content: bytes
    sha256: str | None = None

    @property
    def git_oid(self) -> str:
        """What git calls the blob: the hash of the content, or of its LFS pointer."""
        blob = self.content
        if self.sha256:
            blob = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(blob)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 or self.git_oid


@dataclass(frozen=True)
class Commit:
    """`files` is the whole tree after the commit, by path; `changed` the paths that it added, replaced or deleted."""

    oid: str
    message: str
    files: dict[str, StoredFile]
    changed: tuple[str, ...]


@dataclass
class Repo:
    """A model repository. `uploads` has the sha256 of each accepted LFS upload, in order, committed or not."""

    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": []})
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)

    def pushes(self, branch: str = "main") -> list[Commit]:
        """The commits of a branch, oldest first, without the initial one that the Hub itself makes."""
        return self.branches[branch][1:]

    def read(self, path: str, revision: str = "main") -> bytes:
        return self.history(revision)[-1].files[path].content

    def history(self, revision: str) -> list[Commit]:
        """The commits up to a revision, which is a branch or a commit's oid."""
        for branch, commits in self.branches.items():
            oids = [commit.oid for commit in commits]
            if revision == branch or revision in oids:
                return commits[: oids.index(revision) + 1] if revision in oids else commits[:]
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, branch: str, message: str, files: dict[str, StoredFile], changed: tuple[str, ...]) -> Commit:
        history = self.branches[branch]
        identity = [history[-1].oid if history else "", message, {path: file.git_oid for path, file in files.items()}]
        commit = Commit(hashlib.sha1(json.dumps(identity).encode()).hexdigest(), message, files, changed)
        history.append(commit)
        return commit


class HubServer:
    """The server: its repositories by id, its faults, and a way to run scripts against it.

    `log` has one line per answered request: "METHOD target status".
    """

    def __init__(self, folder: Path):
        self.repos: dict[str, Repo] = {}
        self.log: list[str] = []
        self.uploads_left: int | None = None
        self.lock = threading.Lock()
        self._folder = folder
        self._num_homes = 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=[0.02], daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def run(
        self,
        script: str | Path,
        *args: object,
        check: bool = True,
        token: str | None = TOKEN,
        hf_home: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in a new process whose Hub is this server.

        Args:
            script: Code, in which `sys` and `Path` are imported already, or the `Path` of a script.
            args: `sys.argv[1:]` of the script.
            check: Fail the test, with the script's stderr, unless it exits with 0.
            token: HF_TOKEN; None is a user who is not logged in.
            hf_home: HF_HOME, for runs that share a cache; by default each run starts with an empty one.
        """
        code = f"import sys\nfrom pathlib import Path\n{textwrap.dedent(str(script))}"
        command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, "-c", code]
        command += [str(arg) for arg in args]
        env = self.environment(token=token, hf_home=hf_home)
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        if check and result.returncode != 0:
            pytest.fail(f"script exited with {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}")
        return result

    def environment(self, *, token: str | None = TOKEN, hf_home: Path | None = None) -> dict[str, str]:
        """The environment of `run`: a request to any other host goes to this server as its proxy, which refuses it."""
        ours = re.compile(r"HF_.*|HUGGINGFACE_.*|TRANSFORMERS_.*|.*_proxy", re.IGNORECASE)
        env = {name: value for name, value in os.environ.items() if not ours.fullmatch(name)}
        if hf_home is None:
            self._num_homes += 1
            hf_home = self._folder / f"hf_home_{self._num_homes}"
        env |= {"HF_ENDPOINT": self.url, "HF_HOME": str(hf_home), "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env |= {"HTTP_PROXY": self.url, "HTTPS_PROXY": self.url, "NO_PROXY": "127.0.0.1"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])])
        return env | ({"HF_TOKEN": token} if token else {})

    def fail_after_uploads(self, num_uploads: int) -> None:
        """Accept so many more LFS uploads, then refuse each, until `stop_failing`.

        The answer is 403: the client gives up at once. On 500, 503 or a closed connection it tries for 23 s.
        """
        self.uploads_left = num_uploads

    def stop_failing(self) -> None:
        self.uploads_left = None

    def outside_requests(self) -> list[str]:
        """The lines of `log` whose request was for another host, and was refused."""
        return [line for line in self.log if not line.split()[1].startswith("/")]


@pytest.fixture
def hub_server(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(tmp_path)
    yield server
    server.close()
    assert server.outside_requests() == []


@dataclass(frozen=True)
class Request:
    """`parts` are the named groups of its route's pattern, unquoted."""

    parts: dict[str, str]
    query: dict[str, list[str]]
    headers: Message
    body: bytes

    def json(self) -> dict:
        return json.loads(self.body)

    def is_authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """An error answer; from `code`, the X-Error-Code, the client chooses the exception that it raises."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        body = json.dumps({"error": message, "errors": [{"message": message}]}).encode()
        self.answer = Answer(status, body, {"X-Error-Message": message, "X-Error-Code": code})


def create_repo(hub: HubServer, request: Request) -> dict:
    asked = request.json()
    repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
    url = {"url": f"{hub.url}/{repo_id}", "name": repo_id}
    if repo_id in hub.repos:
        return Answer(409, json.dumps({"error": "You already created this model repo", **url}).encode())
    # Older 1.x clients send "private".
    hub.repos[repo_id] = Repo(private=asked.get("private") is True or asked.get("visibility") == "private")
    attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
    files = {".gitattributes": StoredFile(attributes.encode())}
    hub.repos[repo_id].commit("main", "initial commit", files, tuple(files))
    return url


def whoami(hub: HubServer, request: Request) -> dict:
    if not request.is_authorized():
        raise Refusal(401, "Invalid username or password.")
    return {"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}}


def validate_yaml(hub: HubServer, request: Request) -> dict:
    """Check the one rule that a local model breaks: a base model is named `model` or `owner/model`."""
    metadata = re.match(r"---\r?\n(.*?)\r?\n---", request.json()["content"], re.DOTALL)
    if metadata is None:
        return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]}
    base_models = re.search(r"^base_model:(.*(?:\n *- .*)*)", metadata[1], re.MULTILINE)
    for name in re.findall(r"[^\s\[\],'\"]{2,}", base_models[1] if base_models else ""):
        if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
            raise Refusal(400, f'"base_model" with value "{name}" is not valid. Use a model id from the Hub.')
    return {"errors": [], "warnings": []}


def model_info(hub: HubServer, request: Request) -> dict:
    repo_id = request.parts["repo_id"]
    repo = hub.repos[repo_id]
    commit = repo.history(request.parts.get("revision", "main"))[-1]
    siblings = [{"rfilename": path} for path in commit.files]
    info = {"id": repo_id, "modelId": repo_id, "author": USER, "sha": commit.oid, "private": repo.private}
    return info | {"gated": False, "disabled": False, "tags": [], "siblings": siblings, "cardData": card_data(commit)}


def card_data(commit: Commit) -> dict | None:
    """The metadata of a commit's model card."""
    card = commit.files.get("README.md")
    metadata = re.match(r"---\r?\n(.*?)\r?\n---", card.content.decode(), re.DOTALL) if card else None
    return yaml.safe_load(metadata[1]) if metadata else None


def tree(hub: HubServer, request: Request) -> list[dict]:
    files = hub.repos[request.parts["repo_id"]].history(request.parts["revision"])[-1].files
    root = request.parts["path"].rstrip("/") + "/" if "path" in request.parts else ""
    inside = [path for path in files if path.startswith(root)]
    if root and not inside:
        raise Refusal(404, f"{root} does not exist", "EntryNotFound")
    folders = {str(folder) for path in inside for folder in Path(path).parents if str(folder).startswith(root)} - {"."}
    entries = [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in sorted(folders)]
    for path in inside:
        entry = {"type": "file", "path": path, "size": len(files[path].content), "oid": files[path].git_oid}
        lfs = {"oid": files[path].sha256, "size": entry["size"], "pointerSize": 135}
        entries.append(entry | ({"lfs": lfs} if files[path].sha256 else {}))
    recursive = request.query.get("recursive", [""])[0].lower() in ("true", "1")
    return [entry for entry in entries if recursive or "/" not in entry["path"].removeprefix(root)]


def create_branch(hub: HubServer, request: Request) -> dict:
    repo = hub.repos[request.parts["repo_id"]]
    if request.parts["branch"] in repo.branches:
        raise Refusal(409, "Reference already exists")
    repo.branches[request.parts["branch"]] = repo.history(request.json().get("startingPoint", "main"))
    return {}


def preupload(hub: HubServer, request: Request) -> dict:
    stored = hub.repos[request.parts["repo_id"]].history(request.parts["revision"])[-1].files
    answers = []
    for file in request.json()["files"]:
        path = file["path"]
        is_lfs = path.endswith(LFS_SUFFIXES) or file["size"] > REGULAR_LIMIT_BYTES
        oid = stored[path].etag if path in stored else None
        answers.append({"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid})
    return {"files": answers}


def lfs_batch(hub: HubServer, request: Request) -> dict:
    repo_id, objects = request.parts["repo_id"], []
    for asked in request.json()["objects"]:
        href = f"{hub.url}/{repo_id}.git/lfs/{asked['oid']}"
        actions = {"upload": {"href": href, "header": {}}, "verify": {"href": f"{href}/verify", "header": {}}}
        objects.append(asked if asked["oid"] in hub.repos[repo_id].blobs else asked | {"actions": actions})
    return {"transfer": "basic", "objects": objects}


def lfs_upload(hub: HubServer, request: Request) -> dict:
    repo, sha256 = hub.repos[request.parts["repo_id"]], request.parts["sha256"]
    if hub.uploads_left == 0:
        raise Refusal(403, "fail_after_uploads: this upload was to fail")
    if hashlib.sha256(request.body).hexdigest() != sha256:
        raise Refusal(400, "the content does not have the sha256 of its address")
    if hub.uploads_left is not None:
        hub.uploads_left -= 1
    repo.blobs[sha256] = request.body
    repo.uploads.append(sha256)
    return {}


def lfs_verify(hub: HubServer, request: Request) -> dict:
    if len(hub.repos[request.parts["repo_id"]].blobs.get(request.parts["sha256"], b"")) != request.json()["size"]:
        raise Refusal(404, "the object is missing or has another size")
    return {}


def commit(hub: HubServer, request: Request) -> dict:
    repo_id, branch = request.parts["repo_id"], request.parts["revision"]
    repo = hub.repos[repo_id]
    head = repo.history(branch)[-1]
    header, *operations = [json.loads(line) for line in request.body.splitlines() if line]
    if header["value"].get("parentCommit", head.oid) != head.oid:
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    files, changed = dict(head.files), []
    for operation in operations:
        changed += apply(operation["key"], operation["value"], files, repo.blobs)
    number = sum(name.startswith("refs/pr/") for name in repo.branches) + 1
    answer = {"success": True, "hookOutput": ""}
    if "create_pr" in request.query:
        answer["pullRequestUrl"] = f"{hub.url}/{repo_id}/discussions/{number}"
        repo.branches[f"refs/pr/{number}"], branch = repo.history(branch), f"refs/pr/{number}"
    oid = repo.commit(branch, header["value"]["summary"], files, tuple(changed)).oid
    return answer | {"commitOid": oid, "commitUrl": f"{hub.url}/{repo_id}/commit/{oid}"}


def apply(key: str, value: dict, files: dict[str, StoredFile], blobs: dict[str, bytes]) -> list[str]:
    """Do one operation of a commit on `files`; returns the paths that it changed."""
    path = value["path"]
    if key == "file":
        files[path] = StoredFile(base64.b64decode(value["content"]))
        return [path]
    if key == "lfsFile":
        if value["oid"] not in blobs:
            raise Refusal(400, f"LFS object of {path} was not uploaded")
        files[path] = StoredFile(blobs[value["oid"]], sha256=value["oid"])
        return [path]
    folder = path.rstrip("/") + "/"
    deleted = [name for name in files if (name == path if key == "deletedFile" else name.startswith(folder))]
    if not deleted:
        raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
    for name in deleted:
        del files[name]
    return deleted


def resolve(hub: HubServer, request: Request) -> Answer:
    head = hub.repos[request.parts["repo_id"]].history(request.parts["revision"])[-1]
    headers = {"X-Repo-Commit": head.oid, "Accept-Ranges": "bytes"}
    file = head.files.get(request.parts["path"])
    if file is None:
        refusal = Refusal(404, "Entry not found", "EntryNotFound").answer
        return Answer(404, refusal.body, refusal.headers | headers)
    headers["ETag"] = f'"{file.etag}"'
    if file.sha256:
        headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if asked is None:
        return Answer(200, file.content, headers)
    start, end = int(asked[1]), min(int(asked[2] or len(file.content)), len(file.content) - 1)
    headers["Content-Range"] = f"bytes {start}-{end}/{len(file.content)}"
    return Answer(206, file.content[start : end + 1], headers)


REPO, REVISION = r"(?P<repo_id>[^/]+/[^/]+?)", r"(?P<revision>[^/]+)"
OBJECT = rf"/{REPO}\.git/lfs/(?P<sha256>\w{{64}})"
ROUTES = [
    ("POST", r"/api/repos/create", create_repo),
    ("GET", r"/api/whoami-v2", whoami),
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("GET", rf"/api/models/{REPO}(/revision/{REVISION})?", model_info),
    ("GET", rf"/api/models/{REPO}/tree/{REVISION}(/(?P<path>.+))?", tree),
    ("POST", rf"/api/models/{REPO}/branch/(?P<branch>[^/]+)", create_branch),
    ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", preupload),
    ("POST", rf"/api/models/{REPO}/commit/{REVISION}", commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", OBJECT, lfs_upload),
    ("POST", rf"{OBJECT}/verify", lfs_verify),
    ("GET", rf"/{REPO}/resolve/{REVISION}/(?P<path>.+)", resolve),
]
# On the Hub an upload goes to a signed URL, and a card may be checked by anyone.
WITHOUT_TOKEN = (lfs_upload, validate_yaml)


def dispatch(hub: HubServer, method: str, target: str, headers: Message, body: bytes) -> Answer:
    url = urlsplit(target)
    for route_method, pattern, endpoint in ROUTES:
        match = re.fullmatch(pattern, url.path)
        if match and route_method == ("GET" if method == "HEAD" else method) and target.startswith("/"):
            parts = {name: unquote(value) for name, value in match.groupdict().items() if value}
            request = Request(parts, parse_qs(url.query), headers, body)
            check_access(hub, method, endpoint, request)
            result = endpoint(hub, request)
            return result if isinstance(result, Answer) else Answer(200, json.dumps(result).encode())
    raise Refusal(501, f"hub_server does not speak {method} {target}")


def check_access(hub: HubServer, method: str, endpoint: Callable, request: Request) -> None:
    is_trusted = request.is_authorized() or endpoint in WITHOUT_TOKEN
    if method not in ("GET", "HEAD") and not is_trusted:
        raise Refusal(401, "Invalid username or password.")
    repo_id = request.parts.get("repo_id")
    if repo_id and (repo_id not in hub.repos or (hub.repos[repo_id].private and not is_trusted)):
        raise Refusal(404 if request.is_authorized() else 401, "Repository not found", "RepoNotFound")


class Handler(BaseHTTPRequestHandler):
    """Reads a request, has it dispatched, one at a time, and writes the answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        hub, body = self.server.hub, self.read_body()
        with hub.lock:
            try:
                answer = dispatch(hub, self.command, self.path, self.headers, body)
            except Refusal as refusal:
                answer = refusal.answer
            hub.log.append(f"{self.command} {self.path} {answer.status}")
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = handle_any

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: `HubServer.log` has it."""
