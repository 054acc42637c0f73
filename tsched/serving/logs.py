"""A server's log: each record is a line of JSON, and none has a word of a prompt or an output."""

from __future__ import annotations

import json
import logging
from typing import TextIO

from tsched.serving.gate import ACCESS


class JsonLines(logging.Formatter):
    """Writes a record as a line of JSON; those of the access log are such lines already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == ACCESS.name:
            return record.getMessage()
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_lines(stream: TextIO) -> None:
    """Has the process log to a stream, but for uvicorn's chatter; what cannot be written there is lost."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.raiseExceptions = False  # a full disk has no room for why either
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
