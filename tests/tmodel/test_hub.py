"""Models of a hub that is served from here: fetched as far as needed, once, and refused where they came damaged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
import torch

from experiments.planning.models import plan_model
from experiments.schema import ModelSource
from tests.tmodel.conftest import CONFIG, WriteCheckpoint, checkpoint_tensors
from tests.tmodel.test_weights import write_sharded
from tmodel import ConfigError, find_model, load_config
from tmodel.hub import HubError, HubName, fetch_config, parse_hub_name
from tmodel.weights import Checkpoint

REPO = "someone/model"
ROOT = Path(__file__).parents[2]


@dataclass
class Hub:
    """A hub of one repository, and what it was asked.

    Attributes:
        revisions: Branch, tag or commit -> the commit.
        files: Of each commit, by path.
        broken: How the file of a name is sent otherwise: the bytes of each answer in turn, the last again and again.
        gets: What was fetched, in order: the file, and the byte from which on.
        endpoint: Where it is.
    """

    revisions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    broken: dict[str, list[bytes]] = field(default_factory=dict)
    gets: list[tuple[str, int]] = field(default_factory=list)
    endpoint: str = ""

    def commit(self, directory: Path, *names: str, more: Mapping[str, bytes] = MappingProxyType({})) -> str:
        """A new commit of the main branch, which `names` mean too: the files of a directory and `more`."""
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        files |= more
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[commit] = files
        self.revisions |= {commit: commit, "main": commit, **dict.fromkeys(names, commit)}
        return commit


def hub_hash(name: str, content: bytes) -> str:
    """Of large files the SHA-256, of the others git's."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        if found := re.fullmatch(rf"/api/models/{REPO}/(revision|tree)/(.+)", path):
            commit = self.hub.revisions.get(found[2])
            if commit is None:
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif found[1] == "tree":
                self.send(200, json.dumps(self.tree(commit)).encode(), {})
            else:
                siblings = [{"rfilename": name} for name in self.hub.files[commit]]
                self.send(200, json.dumps({"id": REPO, "sha": commit, "siblings": siblings}).encode(), {})
        elif found := re.fullmatch(rf"/{REPO}/resolve/([0-9a-f]+)/(.+)", path):
            self.send_file(found[1], found[2], with_body)
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def tree(self, commit: str) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.hub.files[commit].items()
        ]

    def send_file(self, commit: str, name: str, with_body: bool) -> None:
        content = self.hub.files[commit][name]
        about = {"ETag": f'"{hub_hash(name, content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not with_body:
            self.send(200, content, about, with_body=False)
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.hub.gets.append((name, start))
        sent = content
        if answers := self.hub.broken.get(name):
            sent = answers.pop(0) if len(answers) > 1 else answers[0]
        if start:
            about["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send(206 if start else 200, sent[start:], about, length=len(content) - start)

    def send(
        self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True, length: int | None = None
    ) -> None:
        """A body that is shorter than its length: the connection ends there."""
        length = len(body) if length is None else length
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, text)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
        self.close_connection = len(body) < length


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub at HF_ENDPOINT, with an empty cache; nobody waits between two attempts."""
    import huggingface_hub
    from huggingface_hub import constants, file_download

    served = Hub()
    handler = type("OneHub", (Handler,), {"hub": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    served.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    # As HF_ENDPOINT, HF_HUB_CACHE and the like set them where a process begins.
    monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
    template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, "127.0.0.1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    huggingface_hub.close_session()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        huggingface_hub.close_session()


@pytest.fixture
def directory(write_checkpoint: WriteCheckpoint) -> Path:
    return write_checkpoint()


def fetched_names(hub: Hub) -> list[str]:
    return [name for name, _ in hub.gets]


def check_whole(folder: Path, directory: Path) -> None:
    expected = checkpoint_tensors(CONFIG)
    with Checkpoint(folder, device="cpu", dtype=torch.float32) as checkpoint:
        assert set(checkpoint.names) == set(expected)
        assert all(torch.equal(checkpoint.peek(name), tensor) for name, tensor in expected.items())
    assert load_config(folder) == load_config(directory)


def test_a_model_is_fetched_as_far_as_it_is_needed_and_once(hub: Hub, directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "modeling.py").write_text("raise SystemExit")
    (directory / "consolidated.safetensors").write_bytes(b"the same weights again")
    (directory / "merges.txt").write_text("a b")
    hub.commit(directory, more={"onnx/config.json": b"{}", "original/model.safetensors": b""})
    plan = find_model(REPO)
    assert plan.config == load_config(directory)
    assert fetched_names(hub) == ["config.json"]
    folder = plan.directory()
    assert sorted(fetched_names(hub)) == ["config.json", "merges.txt", "model.safetensors"]
    check_whole(folder, directory)
    assert find_model(REPO).directory() == folder
    assert len(hub.gets) == 3


SERVE = """
import sys
from tsched import LLM, SamplingParams

(output,) = LLM(sys.argv[1], device="cpu", kv_cache_bytes=10**6).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
print(len(output.outputs[0].token_ids))
"""


@pytest.mark.slow
def test_a_process_fetches_from_its_hf_endpoint_and_shows_its_progress(
    hub: Hub, directory: Path, tmp_path: Path
) -> None:
    hub.commit(directory, "v1")
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    for offline in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", SERVE, f"{REPO}@v1"], env={**environment, "HF_HUB_OFFLINE": offline},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr
        assert "Fetching 2 files: 100%" in done.stderr
    assert fetched_names(hub) == ["config.json", "model.safetensors"]


def test_of_a_sharded_model_the_files_that_the_index_names(hub: Hub, directory: Path) -> None:
    write_sharded(directory)
    (directory / "model-00001-of-00001.safetensors").write_bytes(b"another cut of the same weights")
    hub.commit(directory)
    check_whole(find_model(REPO).directory(), directory)
    assert "model-00001-of-00001.safetensors" not in fetched_names(hub)
    assert "model-00002-of-00002.safetensors" in fetched_names(hub)


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: Hub, directory: Path, write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    first = hub.commit(directory, "v1.0", "refs/pr/3")
    second = hub.commit(write_checkpoint(max_position_embeddings=32))
    assert first != second
    lengths = {
        name: find_model(f"{REPO}{name}").config.max_position_embeddings
        for name in ("", "@main", "@v1.0", "@refs/pr/3", f"@{first}", f"@{second}")
    }
    assert lengths == {"": 32, "@main": 32, "@v1.0": 64, "@refs/pr/3": 64, f"@{first}": 64, f"@{second}": 32}
    plan = plan_model(ModelSource(hub=f"{REPO}@v1.0"), tmp_path)  # as an experiment's YAML says it
    hub.revisions["v1.0"] = second  # the tag is moved between the two fetches
    assert plan.directory().name == first
    with pytest.raises(ConfigError, match=r"'someone/model@v9' cannot be fetched .*Revision Not Found"):
        find_model(f"{REPO}@v9")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", HubName("a/b")),
        ("a/b.c-d@v1.0", HubName("a/b.c-d", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b@", None),
        ("a/b@../../x", None),
        ("a/b@x/../y", None),
        ("a/b@/x", None),
        ("a/b@x@y", None),
        ("b@x", None),
        ("../b", None),
        ("a/b/c", None),
    ],
)
def test_names_of_the_hub(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected


def test_a_connection_that_breaks_once_goes_on_where_it_broke(hub: Hub, directory: Path) -> None:
    hub.commit(directory)
    whole = (directory / "model.safetensors").read_bytes()
    hub.broken["model.safetensors"] = [whole[:5000], whole]
    check_whole(find_model(REPO).directory(), directory)
    starts = [start for name, start in hub.gets if name == "model.safetensors"]
    assert starts == [0, 5000]


def test_a_download_that_is_cut_off_is_refused_and_goes_on_later(hub: Hub, directory: Path) -> None:
    write_sharded(directory)
    hub.commit(directory)
    second = "model-00002-of-00002.safetensors"
    whole = (directory / second).read_bytes()
    hub.broken[second] = [whole[:1000]]
    plan = find_model(REPO)
    with pytest.raises(HubError, match=r"'someone/model' was not wholly fetched .*ask again for the others"):
        plan.directory()
    del hub.broken[second]
    hub.gets.clear()
    check_whole(find_model(REPO).directory(), directory)
    assert fetched_names(hub) == [second]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_another_hash_is_refused_and_fetched_again(hub: Hub, directory: Path, name: str) -> None:
    """As long as the file that was asked for, and as well formed: its hash alone tells."""
    hub.commit(directory)
    whole = (directory / name).read_bytes()
    if name == "config.json":
        other = whole.replace(b'"max_position_embeddings": 64', b'"max_position_embeddings": 46')
    else:
        other = whole[:-4] + struct.pack("<f", 1.5)
    assert (len(other), other == whole) == (len(whole), False)
    hub.broken[name] = [other]
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=rf"'someone/model': {name} is damaged: its hash is .*{hub_hash(name, whole)}"
        ):
            find_model(REPO).directory()
    del hub.broken[name]
    check_whole(find_model(REPO).directory(), directory)


def test_a_file_that_was_checked_is_not_hashed_again_until_it_changes(
    hub: Hub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(directory)
    folder = find_model(REPO).directory()
    with monkeypatch.context() as patch:
        patch.setattr("tmodel.hub._hash", lambda *_: pytest.fail("hashed again"))
        assert find_model(REPO).directory() == folder
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-4] + struct.pack("<f", 1.5))
    with pytest.raises(HubError, match=r"model\.safetensors is damaged"):
        find_model(REPO).directory()
    check_whole(find_model(REPO).directory(), directory)


def test_without_a_network_the_cache_serves_or_it_is_said_how_to_fetch(
    hub: Hub, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.commit(directory, "v1")
    plan = find_model(f"{REPO}@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(f"{REPO}@v1").config == plan.config  # its config.json is there
    how = r".*local cache.*To fetch it where there is a network: `hf download someone/model --revision v1`"
    with pytest.raises(HubError, match=how):
        plan.directory()
    with pytest.raises(ConfigError, match=how.replace(" --revision v1", " --revision v2")):
        find_model(f"{REPO}@v2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = plan.directory()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(f"{REPO}@v1").directory() == folder
    shutil.rmtree(tmp_path / "hub")
    with pytest.raises(ConfigError, match=how):
        find_model(f"{REPO}@v1")


def test_a_model_of_pickles_alone_says_what_to_do(hub: Hub, directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "model.safetensors").unlink()
    hub.commit(directory)
    with pytest.raises(HubError, match=r"no model\.safetensors.*`hf download someone/model --local-dir.*`tk convert`"):
        find_model(REPO).directory()
    assert fetched_names(hub) == ["config.json"]


def test_what_the_hub_does_not_have(hub: Hub, directory: Path) -> None:
    hub.commit(directory)
    with pytest.raises(ConfigError, match=r"'someone/other' cannot be fetched from the Hugging Face hub: .*404"):
        find_model("someone/other")
    with pytest.raises(HubError, match="cannot be fetched"):
        fetch_config(HubName("someone/other"))
