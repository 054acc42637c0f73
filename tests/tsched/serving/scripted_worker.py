"""A worker that plays one: it speaks the link, and a prompt says how it behaves. It starts in a fraction of a second.

The model's name is a folder, in which it counts its lives. Its second one does not get ready where its name is "slow".
Graphs are recorded where it is "recording".
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgpack

from tsched.serving.link import encode_message

SPEAK_AND_WAIT, SILENT_ONCE, RAISE, HANG, ANSWER, LIE, SILENT, SPEAK_ONCE, MUMBLE_ONCE, HALVE_ONCE = range(1, 11)
"""Prompts of one token: say one token and no more; say nothing in the first life; fail; step no more; two tokens and
the end; send what is no message; say nothing in any life; say one token and no more in the first life; the same
without text; end the first of two completions by its length in the first life, and both by a stop in a later one.
"""

FACTS: dict[str, Any] = {
    "created": 1, "max_model_len": 64, "vocab_size": 300, "eos_token_ids": [0], "tokenizer_directory": None,
    "max_num_seqs": 8, "num_cache_tokens": 1024, "block_size": 16, "arm": {},
}  # fmt: skip
COUNTS = dict.fromkeys(
    ("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_steps", "num_prompt_tokens",
     "num_output_tokens", "num_preemptions", "num_cache_queries", "num_cache_hits"), 0,
) | {"num_blocks": 64}  # fmt: skip


class ScriptedWorker:
    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.counts: dict[str, Any] = dict(COUNTS)
        self.kernels: dict[str, str] = {}
        self.is_hanging = False
        self.life = 0

    def read(self) -> dict[str, Any]:
        head = self.link.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            os._exit(0)
        body = self.link.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL)
        return dict(msgpack.unpackb(body))

    def send(self, kind: str, **rest: Any) -> None:
        self.link.sendall(encode_message({"kind": kind, **rest}))

    def news(self, *deltas: Any) -> None:
        self.counts["num_steps"] += not self.is_hanging
        self.counts["num_output_tokens"] += sum(len(delta[0][0][1]) for _, delta in deltas)
        self.send("news", tokens=[], deltas=deltas, refusals=[], stats=self.counts)

    def run(self) -> None:
        load = self.read()
        folder = Path(load["model"])
        self.life = len(list(folder.iterdir()))
        (folder / str(self.life)).write_text(str(os.getpid()))
        if load["name"] == "broken" or (load["name"] == "broken later" and self.life > 0):
            self.send("load_failed", reason="ConfigError: no such model")
            os._exit(1)
        if load["name"] == "slow" and self.life == 1:
            time.sleep(60)
        if load["name"] == "killed":
            os.kill(os.getpid(), 9)
        for done in (0, 1, 4) if load["name"] == "recording" else ():
            self.send("recording", done=done, total=4)
        self.kernels = load["options"].get("kernels") or {}
        self.counts["arm"] = self.kernels
        if "crashing" in self.kernels.values():
            os.kill(os.getpid(), 9)
        self.send("ready", facts={"name": load["name"], **FACTS}, stats=self.counts)
        while True:
            if select.select([self.link], [], [], 0.02)[0]:
                self.obey(self.read())
            self.news()

    def obey(self, message: dict[str, Any]) -> None:
        if message["kind"] == "swap":
            self.kernels = self.counts["arm"] = self.kernels | message["choices"]
            self.send("swapped", id=message["id"], first_step=3, arm=self.kernels, kernels=self.kernels)
        if message["kind"] == "abort":
            self.news((message["id"], [[[0, [], "", None, "abort", None]], True, None, None, None, None, None]))
        if message["kind"] != "submit":
            return
        for request in message["requests"]:
            self.serve(request["request_id"], *request["prompt_token_ids"])

    def serve(self, name: str, token: int) -> None:
        if token == RAISE:
            self.send("failed", reason="the engine failed: RuntimeError: planted")
            os._exit(1)
        if token == LIE:
            self.link.sendall(struct.pack("!I", 2**31))
            time.sleep(60)
        self.is_hanging |= token == HANG
        if token == SPEAK_AND_WAIT or (token == SPEAK_ONCE and self.life == 0):
            self.news((name, [[[0, [7], "a", None, None, None]], False, None, None, None, None, None]))
        if token == HALVE_ONCE and self.life == 0:
            self.news((name, [[[0, [7], "a", None, "length", None]], False, None, None, None, None, None]))
        if token == HALVE_ONCE and self.life > 0:
            both = [[0, [7], "a", None, "stop", None], [1, [8], "b", None, "stop", None]]
            self.news((name, [both, True, None, None, None, [0.0, 0.1, 0.2], None]))
        if token == MUMBLE_ONCE and self.life == 0:
            self.news((name, [[[0, [7], "", None, None, None]], False, None, None, None, None, None]))
        if token == ANSWER or (token in (SILENT_ONCE, SPEAK_ONCE, MUMBLE_ONCE) and self.life > 0):
            self.news((name, [[[0, [7], "a", None, None, None]], False, None, None, None, None, None]))
            self.news((name, [[[0, [8], "b", None, "stop", None]], True, None, None, None, [0.0, 0.1, 0.2], None]))


def main(descriptor: int) -> None:
    ScriptedWorker(socket.socket(fileno=descriptor)).run()
