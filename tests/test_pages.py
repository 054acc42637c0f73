"""What the README and the pages of `docs/` show works as it stands there: links, YAML, code and commands."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from experiments.cli import app
from experiments.document import read_document
from experiments.planning.plan import make_sweep
from tmodel import PRESETS, RANDOM_PRESETS, known_architectures

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = {page.name: page for page in (README, *sorted((ROOT / "docs").glob("*.md")))}

NOT_RUN: Mapping[str, str] = {
    "source .venv/bin/activate": ".ci/run makes an environment",
    "python3 -m venv .venv": ".ci/run makes an environment",
    "pip install -e .": ".ci/run installs it",
    "pip install -e '.[dev]'": ".ci/run installs it",
    "pip install 'tkernels[plot]'": "needs a package index",
    "pip install 'tkernels[ray]'": "needs a package index",
    "pre-commit install": "changes the checkout's hooks",
    "pytest": ".ci/run runs it",
    "tk run experiments/quickstart.yaml": "the page runs.md makes its runs A and B of it",
    ".ci/run": "it runs these tests",
    "pytest tests/bench --benchmark-only": "minutes; tests/bench/test_suite.py runs the heaviest",
    "pytest tests/tkernels/test_properties.py --device cuda": "needs a GPU",
    "tk run experiments/batching_in_service.yaml": "minutes, and figures; tests/experiments/test_baselines.py plans it",
    "tk run experiments/gallery/chunk_size.yaml": "a minute; tests/experiments/test_gallery.py runs it with less",
    "tk bench --op paged_decode --variants-from mine": "times the largest points; tests/experiments/test_bench.py",
    "tk inspect": ".ci/run runs it for four architectures",
    "tk inspect --op dequant_gemm": "part of what .ci/run runs",
    "tk check --sanitize all": "hours; tests/tkernels/test_sanitizers.py runs every variant",
    "tk check --mutate swiglu": "minutes; tests/tkernels/test_mutants.py",
    "tk check --mutate --verify-equivalent": "hours; tests/experiments/test_mutate.py runs one op",
    **{
        f"tk {command}": "a minute or more; tests/experiments/test_new.py runs it for two ops"
        for command in (
            "check --op paged_decode --variant own --variants-from mine --sanitize all",
            "check --op paged_decode --variant newest_first --variants-from mine --sanitize all",
            "inspect --op paged_decode --variant newest_first --variants-from mine",
            "inspect --predict H100 --op paged_decode --variants-from mine",
        )
    },
    "tk check --op paged_decode --variant newest_first --variants-from mine": "README's own is checked",
    "tk run mine/paged_decode/newest_first.yaml": "README's own is run",
    "python -m tests.bench.launch_cost": "figures",
    "tk inspect --predict H200 --against runs/gpu-report": "needs a GPU's report; tests/experiments/test_predict.py",
    "tk make-model my-tiny": "trains a minute; tests/tmodel/test_train.py",
    "tk tune --op paged_decode": "needs a GPU; tests/experiments/test_tune.py",
    "tk profile --nsys-export steps.sqlite": "needs an export of nsys; tests/experiments/profiling/test_nsys.py",
    "tk profile experiments/quickstart.yaml --ncu paged_decode.split_kv": "needs a GPU",
    "tk profile experiments/quickstart.yaml --proton": "needs a GPU",
    "tk gpu-report --out experiments/results/NVIDIA_H200 --minutes 9": "needs a GPU",
    "tk gpu-report --out experiments/results/NVIDIA_H200 --minutes 9,9,9 --dry-run": "seconds; its tests run it",
    "tk run experiments/quickstart.yaml --executor ray": "tests/experiments/sweep/test_on_ray.py",
    "tk run experiments/vs_transformers.yaml": "minutes; tests/experiments/test_peers.py",
    **{
        f"tk run experiments/{name}.yaml": "minutes; tests/experiments/test_baselines.py"
        for name in ("kv_cache", "batching", "paged_memory", "prefix_cache", "chunked_prefill", "priorities")
    },
    "tk convert squeezellm-pickle squeezellm-safetensors": "needs a pickle; tests/experiments/test_convert.py",
    "python -m tests.tmodel.formats.written_elsewhere tiny packed-elsewhere": "needs a package index",
    "python -m tests.tmodel.quantizers.beside_gptqmodel beside-gptqmodel": "needs a package index",
    "tk convert directory-with-pytorch-model-bin directory-with-safetensors": "needs a pickle; "
    "tests/experiments/test_convert_bin.py",
    "tk serve tiny": "serves until a signal; tests/tsched/serving/test_serve_command.py",
    "tk serve tiny --port 8000": "serves until a signal; tests/tsched/serving/test_serve_command.py",
    "tk repeat A": "runs the quickstart a third time; tests/experiments/runs/test_repeat.py",
    **{
        f"python -m tests.mutants {package}": "an hour; tests/mutants/test_campaign.py"
        for package in ("tsched", "tmodel", "report")
    },
    "python -m tests.bench.range_cost": "minutes, and a figure",
    "python -m tests.bench.beside_nano_vllm PATH/TO/nano-vllm": "needs nano-vllm's sources",
    "python -m tests.tsched.serving.real_clients clients --vllm-benchmark PATH/TO/benchmark_serving.py": (
        "needs a package index; tests/tsched/serving/test_openai_clients.py"
    ),
    "python -m tests.experiments.sweep.overhead experiments/quickstart.yaml": "minutes, and a figure",
    "python -m tests.experiments.runs.simulated_experiments --count 10000": "minutes, and a figure",
    "python -m tests.experiments.runs.false_alarms": "hours, and a figure; tests/experiments/runs/test_verdicts.py",
    "python -m tests.experiments.sweep.kill_runs --times 20": "minutes; tests/experiments/sweep/test_kill_runs.py",
    "python -m tests.experiments.first_failure": "minutes, and a figure; tests/experiments/test_trials.py",
    "python -m tests.tmodel.fuzz_configs --count 2000": "minutes; tests/tmodel/test_config_bounds.py",
    "python -m tests.tmodel.moe_against_dense": "ten minutes, and figures; tests/tmodel/test_train.py",
    "python -m tests.tmodel.parity_table": "a minute, and a figure; tests/tmodel/test_parity.py",
    "python -m tests.tmodel.parity_table --trained": "trains every preset, and a figure; tests/tmodel/test_parity.py",
    "python -m tests.tsched.schedules --count 2000 --model hash": "hours; tests/tsched/test_schedules.py",
    "python -m tests.tsched.schedules --count 2000 --model state": "minutes; tests/tsched/test_state_slots.py",
    "python -m tests.tsched.schedules --count 1000 --model window": "minutes; tests/tsched/test_windows.py",
    "python -m tests.tsched.schedules --count 500 --model shared": "minutes; tests/tsched/test_schedules.py",
    "python -m tests.tsched.random_rules --steps 1000000": "hours; tests/tsched/test_state_machine.py",
    "python -m tests.tsched.random_rules --steps 1000000 --states": "hours; tests/tsched/test_state_slots.py",
    "python -m tests.tsched.random_rules --steps 1000000 --windows": "hours; tests/tsched/test_windows.py",
    "python -m tests.tsched.serving.soak --minutes 3": "minutes; tests/tsched/serving/test_soak.py",
    "python -m tests.tsched.serving.overload load": "a minute; tests/tsched/serving/test_large_marks.py",
    "python -m tests.tsched.serving.cancels load --cancels 1000": "minutes; tests/tsched/serving/test_cancels.py",
    "python -m tests.tsched.serving.many_streams load --streams 2000": (
        "minutes; tests/tsched/serving/test_large_marks.py"
    ),
    "python -m tests.tsched.serving.many_streams load --streams 100 --seconds 300": (
        "minutes; tests/tsched/serving/test_large_marks.py"
    ),
    "python -m tests.tsched.serving.stops load": "minutes; tests/tsched/serving/test_large_marks.py",
    "python -m tests.tsched.serving.framing_cost": "a figure",
    "python -m tests.tsched.serving.same_answers answers": "minutes; tests/tsched/serving/test_answers.py",
    "python -m tests.tsched.serving.cost_over_http cost": "a figure",
    "python -m tests.tsched.serving.fuzz_routes --examples 1000": "minutes; tests/tsched/serving/test_fuzz.py",
    "python -m tests.tsched.serving.perplexity perplexity": "seconds; tests/tsched/serving/test_perplexity.py",
    "python -m tests.tsched.serving.histograms histograms": "a minute; tests/tsched/serving/test_histograms.py",
    "python -m tests.tsched.serving.slow_and_large slow": "minutes; tests/tsched/serving/test_slow_clients.py",
    "python -m tests.tsched.serving.start_cost start": "a figure",
    "python -m tests.tsched.structured_cost 32": "a figure",
    "python -m tests.tkernels.bugs.table": "minutes, and figures; tests/tkernels/bugs/test_bugs.py",
    "python -m tests.tsched.planted_bugs": "minutes; tests/tsched/test_planted_bugs.py",
    "python -m tests.tsched.planted_path_bugs": "half a minute; tests/tsched/test_device_paths.py",
}
"""Command -> why the suite does not run it as it stands: where it is run, or what it needs."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)


def block(page: str, language: str, containing: str) -> str:
    """The page's one code block of a language that contains a text."""
    (found,) = [text for text in blocks(page, language) if containing in text]
    return found


def shell_lines(page: str) -> list[str]:
    """The page's lines for a shell, in order, without their comments: of fenced blocks, and indented ones."""
    text = PAGES[page].read_text(encoding="utf-8")
    fenced = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    indented = re.findall(r"^ {4}(\S.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    lines = [line for language, body in fenced if language == "sh" for line in body.splitlines()] + indented
    return [re.sub(r"\s+#.*", "", line) for line in lines]


def commands(line: str) -> list[str]:
    """The commands of a line, which && joins."""
    return [command.strip() for command in line.split("&&")]


ALL_COMMANDS = {command: page for page in PAGES for line in shell_lines(page) for command in commands(line)}


def test_the_first_page_is_short_and_has_the_two_commands_at_its_top() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 9000
    assert "\n    pip install -e '.[dev]' && tk run experiments/quickstart.yaml\n" in text[:2000]
    assert "\n    pip install -e '.[dev]' && pytest\n" in text[:2000]


def test_ci_runs_exactly_the_readmes_test_command() -> None:
    assert "\npip install -e '.[dev]' && pytest\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    """mkdocs checks those between the pages of docs/ too, and their headings; the README is no page of its."""
    prose = re.sub(r"```.*?```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        assert target.startswith("https://") or (PAGES[page].parent / target).is_file(), target


@pytest.mark.parametrize(("page", "index"), [(page, i) for page in PAGES for i in range(len(blocks(page, "yaml")))])
def test_every_yaml_is_an_experiment_or_part_of_one(page: str, index: int, tmp_path: Path) -> None:
    shown = yaml.safe_load(blocks(page, "yaml")[index])
    write_outside_variant(tmp_path)
    workload = {"kind": "synthetic", "num_requests": 1, "input_len": 8, "output_len": 8}
    around = {"name": "shown", "model": {"preset": "tiny"}, "workload": workload}
    (tmp_path / "shown.yaml").write_text(yaml.safe_dump(around | shown))
    sweep = make_sweep(read_document(tmp_path / "shown.yaml"))
    assert sweep.num_arms > 1


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_is_one(command: str) -> None:
    """Its options and files are there and of the right kind; what it does, `test_the_commands_of_a_page_work` shows."""
    words = shlex.split(command)
    if words[0] == "tk":
        group: Any = typer.main.get_command(app)
        group.commands[words[1]].make_context(words[1], words[2:])
        files = [word for word in words if word.startswith("experiments/") and word.endswith(".yaml")]
        assert all((ROOT / file).is_file() for file in files)
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
    elif words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if word.startswith("tests/"))
    else:
        assert command in NOT_RUN or words[0] in ("cat", "mkdocs") or words[0].startswith("lib=")


def test_only_commands_that_are_shown_are_excused_from_running() -> None:
    assert NOT_RUN.keys() <= ALL_COMMANDS.keys()


def write_outside_variant(folder: Path) -> Path:
    """Writes the page's variant as the page says, and returns its file."""
    file = folder / "mine" / "swiglu" / "one_row.py"
    file.parent.mkdir(parents=True)
    file.write_text(block("own-variant.md", "python", "VARIANT = "))
    return file


@pytest.mark.parametrize("status", ["ok", "wrong"])
def test_the_outside_variant_is_checked_by_its_yaml_alone(status: str, tmp_path: Path) -> None:
    file = write_outside_variant(tmp_path)
    source = file.read_text()
    assert len(source.splitlines()) < 25
    if status == "wrong":
        file.write_text(source.replace("gate * tl.sigmoid(gate) * up", "gate * tl.sigmoid(up) * up"))
    experiment = yaml.safe_load(block("own-variant.md", "yaml", "variants_from"))
    del experiment["model"], experiment["workload"]  # serving it takes a trained model, which this test does without
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(experiment))
    command = [sys.executable, "-c", "from experiments.cli import main; main()", "run", "mine.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (results,) = (tmp_path / "out").rglob("results.jsonl")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    checked = [row["status"] for row in rows if row["stage"] == "check" and row["variant"] == "one_row"]
    assert checked == [status] * len(checked)
    assert checked
    assert done.returncode == (0 if status == "ok" else 1), done.stderr


def test_the_kernels_called_alone_agree() -> None:
    source = block("python.md", "python", "tkernels.prepared")
    source = source.replace("return_lse=True)\n", "return_lse=True)\n    outs[name] = out, lse\n")
    names: dict[str, Any] = {"outs": {}}
    exec(source, names)
    expected = names["outs"].pop("torch")
    assert len(names["outs"]) == 3
    for out, lse in names["outs"].values():
        torch.testing.assert_close(out, expected[0], atol=2e-3, rtol=1e-2)
        torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which a reader types what the pages say, with the files that they talk of."""
    from tmodel import preset_path

    folder = tmp_path_factory.mktemp("reader")
    for name in ("experiments", "tests"):
        (folder / name).symlink_to(ROOT / name)
    write_outside_variant(folder)
    (folder / "path" / "to" / "a").mkdir(parents=True)
    (folder / "path" / "to" / "a" / "qwen3").symlink_to(preset_path("tiny"))
    traces = ROOT / "tests" / "experiments" / "simulation" / "data"
    (folder / "mooncake_conversation.jsonl").symlink_to(traces / "mooncake.jsonl")
    (folder / "bin").mkdir()
    # Wrappers, not links: a virtual environment's interpreter finds its packages by the path that it is started at.
    for name, arguments in (("python", ""), ("tk", " -c 'from experiments.cli import main; main()'")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_the_page_names_each_architecture_once_with_its_presets() -> None:
    rows = [line.split(" | ") for line in PAGES["python.md"].read_text().splitlines() if line.startswith("| `")]
    named = [(row[0].strip("| `"), *(set(re.findall("`(.+?)`", cell)) for cell in row[2:])) for row in rows]
    configs = ({name: recipe.config for name, recipe in PRESETS.items()}, RANDOM_PRESETS)
    there_is = [
        (architecture, *({name for name in some if some[name]["architectures"] == [architecture]} for some in configs))
        for architecture in known_architectures()
    ]
    assert sorted(named) == sorted(there_is)


def test_the_table_of_parity_has_each_architecture_and_each_trained_preset() -> None:
    row = re.compile(r"\| `(\w+)` \| (.+?), [\d,]+ rows \|")
    shown = sorted(row.findall(PAGES["how-we-know.md"].read_text()))
    random = [(architecture, "6 random shapes") for architecture in known_architectures()]
    trained = [(*recipe.config["architectures"], preset) for preset, recipe in PRESETS.items()]
    assert shown == sorted([*random, *trained])


def type_in(folder: Path, script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page: str, reader: Path) -> None:
    """In the page's order, in one folder and one shell: what one command makes or sets, the next may use."""
    if any(re.search(r" [AB]\b", line) for line in shell_lines(page)):
        two_timed_arms = "--set kernels={} --set scheduler.max_num_seqs=[2,4]"
        type_in(
            reader, f"tk run experiments/quickstart.yaml {two_timed_arms} --out runs/A && cp -r runs/A A && cp -r A B"
        )
    todo = [[command for command in commands(line) if command not in NOT_RUN] for line in shell_lines(page)]
    type_in(reader, "\n".join(" && ".join(line) for line in todo if line))


@pytest.mark.slow
@pytest.mark.parametrize("containing", ["llm.generate(\n", "async def stream", "llm.chat("])
def test_the_python_of_the_pages_works(containing: str, reader: Path) -> None:
    source = next(text for text in blocks("python.md", "python") if containing.strip() in text)
    if "async def stream" in source:
        source += "\nimport asyncio\nasyncio.run(stream())\n"
    (reader / "shown.py").write_text(source)
    assert type_in(reader, "python shown.py").strip()
