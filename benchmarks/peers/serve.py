"""What both workers share: answering one JSON object per line until told to quit.

Only the standard library is used, since one of the workers runs in an environment without hipfire. This
file does not know what is asked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests `{"do": NAME, ...}` on stdin by `handlers[NAME](...)`; failures by `{"error": TEXT}`.

    Returns on `{"do": "quit"}` and at the end of the input, which is also how the end of the asking program
    shows.
    """
    # libraries print to stdout; their words must not come between the answers
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            name = request.pop("do")
            if name == "quit":
                return
            try:
                answer = handlers[name](**request)
            # whatever a library raises is for the asking program to judge
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
