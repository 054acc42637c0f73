"""YAML with its places, and --set."""

from pathlib import Path

import pytest

from experiments.document import Document, ExperimentError, parse_document, read_document
from experiments.planning.layout import lay_out

TEXT = "name: a\nkernels:\n  swiglu: [torch, fused]\nworkload:\n- {kind: prompts}\n"


def parse(text: str, *overrides: str) -> Document:
    return parse_document(text, "a.yaml", Path("/somewhere"), overrides)


def test_a_problem_names_the_path_and_the_line() -> None:
    document = parse(TEXT)
    assert document.problem(("kernels", "swiglu", 1), "no") == "kernels.swiglu[1] (a.yaml, line 3, column 19): no"
    assert document.problem(("workload", 0, "kind"), "no") == "workload[0].kind (a.yaml, line 5, column 4): no"


def test_a_problem_with_a_missing_key_is_at_its_mapping() -> None:
    assert (
        parse(TEXT)
        .problem(("workload", 0, "prompts"), "is required")
        .startswith("workload[0].prompts (a.yaml, line 5, column 3)")
    )


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("name=b", ("name",), "b"),
        ("scheduler.block_size=32", ("scheduler", "block_size"), 32),
        ("kernels.swiglu=[torch]", ("kernels", "swiglu"), ["torch"]),
        ("kernels.swiglu.1=torch", ("kernels", "swiglu", 1), "torch"),
        ("kernels.paged_decode={split_kv: {n: 4}}", ("kernels", "paged_decode"), {"split_kv": {"n": 4}}),
        ("model.path=a=b", ("model", "path"), "a=b"),
        ("dtype=", ("dtype",), None),
    ],
)  # fmt: skip
def test_set_puts_a_yaml_value_at_a_dotted_key(override: str, path: tuple[str | int, ...], value: object) -> None:
    document = parse(TEXT, override)
    found: object = document.data
    for part in path:
        found = found[part]  # type: ignore[index]
    assert found == value
    assert f"(--set {override})" in document.problem(path, "no")
    assert document.data["name"] in ("a", "b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "must be key=value"),
        ("=3", "must be key=value"),
        ("kernels.swiglu.7=torch", "kernels.swiglu is a list of 2"),
        ("kernels.swiglu.last=torch", "kernels.swiglu is a list of 2"),
        ("kernels.swiglu.0.fused=1", r"kernels.swiglu\[0\] is 'torch', with nothing inside"),
        ("name=[", "not YAML"),
    ],
)
def test_a_set_that_fits_nowhere_is_refused(override: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message) as caught:
        lay_out(parse(TEXT, override))
    assert any(problem.startswith(f"--set {override}") for problem in caught.value.problems)


_MANY_ALIASES = "a: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", r"name \(a.yaml, line 2, column 1\): given twice"),
        ("name: [a\n", "a.yaml, line 2, column 1: not YAML"),
        ("- a\n", "a.yaml: an experiment is a mapping of keys to values, got a list"),
        ("hello\n", "a.yaml: an experiment is a mapping of keys to values, got the str 'hello'"),
        ("", "a.yaml: is empty; an experiment is a mapping"),
        ("# nothing yet\n", "a.yaml: is empty; an experiment is a mapping"),
        ("1: a\n", "line 1, column 1: key 1 must be a text"),
        ("name: a\nseed: '\a'", r"a.yaml, line 2, column 8: not YAML: the character U\+0007 is not allowed"),
        ("name: a\nseed: 2024-13-45", r"seed \(a.yaml, line 2, column 7\): '2024-13-45' looks like a timestamp"),
        ("seed: !!int x", r"seed \(a.yaml, line 1, column 7\): 'x' looks like an int, and is none"),
        ('model: {path: "a\\0/b"}', r"model.path .*'a\\x00/b' has the character U\+0000"),
        (
            "kernels: !!python/object/apply:os.system [ls]",
            r"kernels \(a.yaml, line 1, column 10\): the tag '.*os.system'",
        ),
        ("model: !mine {preset: tiny}", "the tag '!mine' is none of a list or mapping"),
        ("seed: !!bool perhaps", "'perhaps' looks like a bool, and is none"),
        (
            "kernels: &k {swiglu: [*k]}",
            r"kernels.swiglu\[0\] \(a.yaml, line 1, column .*\): is an alias of what it is in",
        ),
        ("exclude: " + "[" * 9999, "a.yaml: its lists and mappings lie too deep in each other"),
        (_MANY_ALIASES, "a.yaml: its aliases stand for more than 100,000 parts"),
        ("<<: [3]", r"<< \(a.yaml, line 1, column 1\): takes a mapping"),
        ("full: {full.x: 1}", r"full.full.x \(a.yaml, line 1, column 8\): is not one of the sizes"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        lay_out(parse(text))


def test_a_merged_key_is_where_it_was_written_and_gives_way_to_the_mappings_own() -> None:
    base = "full: {x: &base {max_num_seqs: 4, block_size: 8}, y: &other {block_size: 32, order: fcfs}}\n"
    document = parse(f"{base}scheduler:\n  block_size: 16\n  <<: [*base, *other]\n  overlap: true\n")
    assert document.data["scheduler"] == {"block_size": 16, "overlap": True, "max_num_seqs": 4, "order": "fcfs"}
    where = {option: document.where(("scheduler", option)) for option in ("block_size", "max_num_seqs", "order")}
    assert [place.partition("line ")[2] for place in where.values()] == [
        "3, column 3)",
        "1, column 18)",
        "1, column 78)",
    ]
    assert document.faults == ()


def test_the_sizes_of_full_may_be_set() -> None:
    (sized, made) = (parse(TEXT + more, "full.kernels.swiglu=[torch]") for more in ("full: {dtype: float32}\n", ""))
    assert sized.full is not None
    assert made.full is not None
    assert sized.full.data["kernels"] == made.full.data["kernels"] == {"swiglu": ["torch"]}
    assert (sized.full.data["dtype"], "dtype" in made.full.data) == ("float32", False)
    assert sized.data["kernels"] == {"swiglu": ["torch", "fused"]}
    (fault,) = parse(TEXT, "full={kernels.swiglu.5: torch}").full.faults
    assert fault.startswith("full.kernels.swiglu.5 (--set full={kernels.swiglu.5: torch}): kernels.swiglu is a list")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"nothing\.yaml: cannot be read: No such file"):
        read_document(tmp_path / "nothing.yaml")


def test_a_part_that_only_an_override_or_a_size_names_has_its_place() -> None:
    made = parse(TEXT + "full: {modle.preset: tiny}\n", "shedule.x.y=1")
    assert made.full is not None
    line = TEXT.count("\n") + 1
    assert made.full.where(("modle",)) == f"modle (a.yaml, line {line}, column 8)"
    assert made.where(("shedule", "x")) == "shedule.x (--set shedule.x.y=1)"
