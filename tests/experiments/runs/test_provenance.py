"""What a run records of where its figures come from."""

import hashlib
import importlib.metadata
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import experiments.runs.provenance
from experiments.document import read_document
from experiments.planning.plan import Plan, make_sweep
from experiments.runs.environment import environment_of, git_state, package_versions
from experiments.runs.provenance import (
    file_hashes,
    lockfile_entries,
    lockfile_hashes,
    model_hashes,
    source_files,
)
from tests.experiments.conftest import Write
from tests.experiments.test_workloads import write_trace
from tests.tkernels.outside import write_variant
from tkernels.config import Config
from tkernels.device import INTERPRETER, TARGETS
from tkernels.lockfile import Entry, lockfile, record

MakePlan = Callable[..., Plan]
H200 = TARGETS["sm_90"]


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def outside(plan: MakePlan, tmp_path: Path) -> Plan:
    write_variant(tmp_path / "mine")
    return plan(kernels={"swiglu": ["torch", "fused", "doubled"]}, variants_from=["mine"])


def test_the_sources_are_those_of_every_variant_used_outside_ones_too(outside: Plan, tmp_path: Path) -> None:
    files = source_files([outside])
    assert list(map(str, files)) == ["swiglu/doubled.py", "swiglu/fused.py", "swiglu/torch.py"]
    mine = tmp_path / "mine" / "swiglu" / "doubled.py"
    sweep = make_sweep(read_document(tmp_path / "experiment.yaml"))
    assert files[Path("swiglu/doubled.py")] == mine.resolve()
    before = environment_of(sweep, "r0", [])["sources"]
    assert before["swiglu.doubled"] == sha256(mine)
    mine.write_text(mine.read_text() + "# changed\n")
    after = environment_of(sweep, "r0", [])["sources"]
    assert {name for name in after if after[name] != before[name]} == {"swiglu.doubled"}


def test_what_an_outside_variant_imports_is_known_and_kept(
    plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = write_variant(tmp_path / "mine") / "swiglu" / "doubled.py"
    helper = tmp_path / "lib" / "my_helper.py"
    helper.parent.mkdir()
    helper.write_text("FACTOR = 1\n")
    variant.write_text(f"from my_helper import FACTOR\n{variant.read_text()}\n\ndef later():\n    import yaml\n")
    monkeypatch.syspath_prepend(helper.parent)
    used = plan(kernels={"swiglu": ["torch", "doubled"]}, variants_from=["mine"])
    sweep = make_sweep(read_document(tmp_path / "experiment.yaml"))
    assert environment_of(sweep, "r0", [])["imports"] == {"my_helper": sha256(helper)}
    assert source_files([used])[Path("imports/my_helper.py")] == helper
    helper.write_text("FACTOR = 2\n")
    assert environment_of(sweep, "r0", [])["imports"] == {"my_helper": sha256(helper)}
    assert package_versions([used]) == {"yaml": importlib.metadata.version("PyYAML")}
    assert package_versions([plan(kernels={"swiglu": ["torch", "fused"]})]) == {}


def test_the_files_that_an_experiment_reads_are_hashed(plan: MakePlan, checkpoint: Path, tmp_path: Path) -> None:
    trace = {**write_trace(tmp_path), "name": "chat"}
    (tmp_path / "text.txt").write_text("a text\n")
    quantization = {"methods": {"rtn": {"bits": 4}}, "text": "text.txt", "window": 16}
    made = plan(model={"path": str(checkpoint)}, workload=trace, quantization=quantization)
    assert file_hashes(made) == {
        "workload chat": {"file": "trace.jsonl", "sha256": sha256(tmp_path / "trace.jsonl")},
        "quantization.text": {"file": "text.txt", "sha256": sha256(tmp_path / "text.txt")},
    }


def test_lockfiles_are_hashed_and_the_entries_that_were_used_are_told(
    outside: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = outside.ops["swiglu"].variants["doubled"]
    folder = tmp_path / "tuned"
    assert lockfile_hashes([outside], INTERPRETER, folder) == {}
    beside, inside = (lockfile(outside.ops["swiglu"].variants[name], H200, folder) for name in ("doubled", "fused"))
    assert lockfile_hashes([outside], H200, folder) == {str(beside): None, inside.name: None}
    entry = Entry(
        "swiglu", "doubled", variant.source, "3.5.0", "I<=8", Config(num_warps=8), ((Config(num_warps=8), 2.0, ""),)
    )
    record(beside, H200, entry)
    assert lockfile_hashes([outside], H200, folder)[str(beside)] == sha256(beside)
    used = lockfile_entries([outside], H200, ["swiglu.doubled[I<=8]", "swiglu.doubled[I<=16]"], folder)
    assert used == {"swiglu.doubled[I<=8]": entry.as_json(), "swiglu.doubled[I<=16]": None}
    # What the device cannot launch, no call was served.
    monkeypatch.setattr(Config, "unmet_on", lambda config, arch: "not here" if config.num_warps == 8 else None)
    assert lockfile_entries([outside], H200, ["swiglu.doubled[I<=8]"], folder) == {"swiglu.doubled[I<=8]": None}


def test_a_models_files_are_hashed_where_it_is_served(
    plan: MakePlan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"path": str(checkpoint)}
    assert model_hashes([plan(model=model, kernels={"swiglu": "torch"})]) == {}
    served = plan(model=model, workload={"kind": "prompts", "prompts": ["a"]})
    shown = io.StringIO()
    (files,) = model_hashes([served], Console(file=shown, force_terminal=True)).values()
    assert shown.getvalue() == ""
    assert files == {
        file.name: sha256(file) for file in sorted(checkpoint.iterdir()) if file.suffix in (".json", ".safetensors")
    }
    assert {"config.json", "model.safetensors"} <= set(files)
    monkeypatch.setattr(experiments.runs.provenance, "_SHOWN_FROM_BYTES", 0)
    assert model_hashes([served], Console(file=shown, force_terminal=True)) == {checkpoint.name: files}
    assert "hashing the model" in shown.getvalue()


def test_models_in_folders_of_one_name_are_told_apart(write: Write, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(checkpoint, tmp_path / name / "model")
    (tmp_path / "b" / "model" / "more.json").write_text("{}")
    workload = {"kind": "prompts", "prompts": ["a"]}
    file = write(model=[{"path": "a/model"}, {"path": "b/model"}], workload=workload, dtype=["float32", "bfloat16"])
    found = model_hashes(make_sweep(read_document(file)).plans)
    assert list(found) == ["a/model", "b/model"]
    assert found["b/model"].keys() - found["a/model"].keys() == {"more.json"}


def git_in(folder: Path) -> Callable[..., None]:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(("git", "-C", str(folder), *identity, *arguments), check=True, capture_output=True)

    return git


def test_gits_state_has_the_diff_and_the_files_that_it_does_not_know(tmp_path: Path) -> None:
    git = git_in(tmp_path)
    assert git_state(tmp_path)["commit"] is None
    git("init")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.py").write_text("one\n")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git("add", "-A")
    git("commit", "-m", "first")
    clean = git_state(inside)
    assert (clean["dirty"], clean["diff"], clean["untracked"]) == (False, "", {})
    assert len(clean["commit"]) == 40
    (inside / "a.py").write_text("two\n")
    (tmp_path / "b.py").write_text("new\n")
    (tmp_path / "c.log").write_text("ignored\n")
    (tmp_path / "d.bin").write_bytes(bytes(1_000_000))
    dirty = git_state(inside)
    assert "-one\n+two" in dirty["diff"]
    assert dirty["untracked"] == {"b.py": sha256(tmp_path / "b.py"), "d.bin": "1000000 bytes"}
    assert (dirty["dirty"], dirty["commit"]) == (True, clean["commit"])
    assert json.loads(json.dumps(dirty)) == dirty


def test_a_virtual_environment_or_a_cache_in_the_checkout_is_no_change(tmp_path: Path) -> None:
    git = git_in(tmp_path)
    git("init")
    (tmp_path / "a.py").write_text("one\n")
    git("add", "-A")
    git("commit", "-m", "first")
    made = {
        "trial env/pyvenv.cfg": "home = /usr/bin\n",
        "trial env/lib/python3.12/site-packages/torch/__init__.py": "",
        "deep/er/env/pyvenv.cfg": "",
        "deep/er/env/bin/activate": "",
        "some-cache/CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55",
        "some-cache/v/one.json": "{}",
        "__pycache__/a.cpython-312.pyc": "",
        "site/node_modules/left-pad/index.js": "",
    }
    for name, text in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    clean = git_state(tmp_path)
    assert (clean["dirty"], clean["untracked"]) == (False, {})
    (tmp_path / "deep" / "er" / "mine.py").write_text("new\n")
    (tmp_path / "pyvenv.cfg").write_text("")  # an environment made in the checkout's own folder hides nothing of it
    dirty = git_state(tmp_path)
    assert (dirty["dirty"], sorted(dirty["untracked"])) == (True, ["deep/er/mine.py", "pyvenv.cfg"])
