"""Every column is documented, every number has a unit."""

from collections.abc import Iterator
from typing import Any, get_args

from experiments.runs.rows import Row, Stage, describe_columns


def documented() -> Iterator[tuple[str, str, dict[str, Any]]]:
    found = describe_columns()
    for stage, about in {"every row": found["every row"], **found["stages"]}.items():
        for name, one in about.items():
            yield stage, name, one


def test_every_field_of_every_row_is_documented() -> None:
    found = describe_columns()
    assert set(found["stages"]) == set(get_args(Stage))
    names = set(found["every row"]).union(*found["stages"].values())
    assert names == set(Row.model_fields)


def test_every_column_has_a_meaning_and_every_number_a_unit() -> None:
    for stage, name, about in documented():
        assert len(about["meaning"]) > 5 or name == "stage", (stage, name)
        numeric = "number" in about["type"] or "integer" in about["type"]
        assert bool(about["unit"]) == numeric, (stage, name, about)


def test_types_are_those_of_json_and_statuses_say_where_a_column_is() -> None:
    stages = describe_columns()["stages"]
    assert stages["kernels"]["median_us"] == {
        "type": "number or null", "unit": "us", "meaning": "median of the samples, per call", "given": ["ok"],
    }  # fmt: skip
    assert stages["kernels"]["samples_us"]["type"] == "array of number or null"
    assert stages["engine"]["ttft_s"]["type"] == "object of number or null"
    assert stages["check"]["replay"]["given"] == ["wrong", "failed"]
    assert describe_columns()["every row"]["status"]["type"] == "string"
    assert not {"op", "arm", "task"} & set(stages["engine"])
