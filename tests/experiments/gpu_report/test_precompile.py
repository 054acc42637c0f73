"""Pieces made in forks: each once, what fails noted, what hangs given up, on this machine and no other."""

import os
import time
from pathlib import Path

import pytest
import torch
import triton

from experiments.gpu_report import weights
from experiments.gpu_report.pieces import Piece, config_pieces, peer_pieces, signature_pieces, wall_seconds
from experiments.gpu_report.precompile import fault_of, made, make_all, notes
from experiments.gpu_report.steps import new_step
from experiments.gpu_report.worker import Job, carry_out
from experiments.gpu_report.worth import report_points
from experiments.peers import with_peers
from experiments.sweep.tasks import Ended
from tkernels import OPS, Tuning
from tkernels.isolation import Tell, run_forked
from tkernels.tuning import candidates

PIECES = [Piece("config", 1.0 + size, "swiglu", "fused", "0", {"T": size}) for size in range(5)]


@pytest.fixture(autouse=True)
def _a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))


def make(pieces: list[Piece], folder: Path) -> None:
    """Makes pieces two at a time, from a process that may fork: what one is to do, its T says."""

    def make_one(piece: Piece) -> None:
        with open(folder / f"{piece.axes['T']}", "a") as file:
            file.write("made\n")
        if piece.axes["T"] == "raises":
            raise ValueError("no such\nkernel")
        if piece.axes["T"] == "dies":
            os._exit(3)
        if piece.axes["T"] == "hangs":
            time.sleep(60.0)

    def work(tell: Tell) -> None:
        make_all(pieces, make_one, 2, 0.3)

    assert run_forked(work, lambda message: None, 30.0).death is None


def test_each_piece_is_made_once_and_another_machine_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made() == set()
    make(PIECES, tmp_path)
    assert made() == {piece.key for piece in PIECES}
    assert [(tmp_path / str(size)).read_text() for size in range(5)] == ["made\n"] * 5
    assert fault_of(PIECES) is None
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "fresh"))
    assert made() == set()


def test_what_raises_dies_or_hangs_is_named_and_the_others_are_made(tmp_path: Path) -> None:
    bad = {what: Piece("peer", 9.0, "rms_norm", "flashinfer", "", {"T": what}) for what in ("raises", "dies", "hangs")}
    make([bad["raises"], bad["dies"], bad["hangs"]], tmp_path)
    make(PIECES, tmp_path)
    assert made() == {piece.key for piece in (*bad.values(), *PIECES)}
    assert fault_of([bad["raises"]]) == "rms_norm.flashinfer, peer: ValueError: no such kernel"
    assert fault_of([bad["dies"]]) == (
        "rms_norm.flashinfer, peer: making it did not come to an end: its process hung or died"
    )
    assert fault_of([bad["hangs"]]) == fault_of([bad["dies"]])
    assert fault_of([*PIECES, bad["raises"]]) is not None


def test_pieces_are_what_is_compiled_and_their_time_follows_from_them() -> None:
    variant = OPS["paged_decode"].variants["last_arriver"]
    axes = report_points(variant.contract)["B=1,context=65536"]
    pieces = config_pieces(variant, axes, "sm_90")
    met = [config for config in candidates(variant, "sm_90") if config.unmet_on("sm_90") is None]
    assert [piece.config for piece in pieces] == [config.as_dict() for config in met]
    assert len({piece.key for piece in (*pieces, *signature_pieces(variant, 8))}) == len(pieces) + 8
    assert config_pieces(variant, {**axes, "B": 2}, "sm_90")[0].key != pieces[0].key
    assert wall_seconds(PIECES, 3) == 5.0
    assert wall_seconds(PIECES, 5) == 5.0
    assert wall_seconds(PIECES, 1) == 15.0
    peers = with_peers(OPS)["rms_norm"].variants
    assert [piece.what for piece in peer_pieces(peers["flashinfer"], axes)] == ["peer"]
    assert peer_pieces(peers["liger"], axes) == ()


def test_a_peer_that_could_not_be_built_is_named_and_not_timed(tmp_path: Path) -> None:
    ops = with_peers(OPS)
    variant = ops["rms_norm"].variants["torch_compile"]
    (piece,) = peer_pieces(variant, report_points(variant.contract)["T=4096,H=2560"])
    make_noted(piece, "making it did not come to an end: its process hung or died")
    step = new_step("time", 1.0, "rms_norm", "torch_compile", "-", "T=4096,H=2560")
    ended = Ended(step)
    carry_out(Job(step, "r1", ops, torch.device("cpu"), Tuning(), ended.hear))
    assert ended.rows == []
    assert ended.death == (
        "RuntimeError: rms_norm.torch_compile, peer: making it did not come to an end: its process hung or died"
    )


def make_noted(piece: Piece, reason: str) -> None:
    notes().mkdir(parents=True)
    (notes() / piece.key).write_text(reason)


def test_weights_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(weights, "preset_path", asked.append)
    weights.prepare(None)(["Qwen3-0.6B", "Qwen3-4B"])(lambda message: None)  # type: ignore[arg-type]
    assert asked == ["Qwen3-0.6B", "Qwen3-4B"]
    assert 20.0 < weights.draw_s("Qwen3-4B") < 40.0
    with weights.drawing([]):  # no process is begun for nothing
        pass
