"""A request of Ollama's API as a turn of the engine: every field and option is taken or refused by name.

Plain functions of the request's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hipfire.base.errors import UnsupportedError
from hipfire.base.sampling import MAX_SEED, GenerationParams, SamplingParams
from hipfire.engine.turn import ResponseFormat, Thinking, TurnKey, TurnRequest
from hipfire.server.errors import FieldError
from hipfire.server.fields import Fields
from hipfire.server.openai_tools import read_tools

MAX_TOKENS: Final = 393_216
MAX_CONTEXT: Final = 2**24
EFFORTS: Final = ("low", "medium", "high", "max")
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")
_AT_START: Final = "it is chosen when the server starts: see `hipfire serve --help`"
# options of loading that change how fast a reply comes but not what it says, with values that ask for nothing
_SPEED_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "numa": (False,),
    "num_batch": (),
    "num_gpu": (-1,),
    "main_gpu": (0,),
    "low_vram": (False,),
    "use_mmap": (),
    "use_mlock": (False,),
    "num_thread": (0,),
}
# options of loading that change replies, with values that ask for what happens anyway
_LOAD_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "f16_kv": (),
    "logits_all": (False,),
    "vocab_only": (False,),
    "embedding_only": (False,),
}
# samplers that hipfire does not have, with the values that switch them off
_OTHER_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
}
# numbers that say something only together with what is refused: mirostat, and a context that is cut
_IDLE_NUMBERS: Final = ("mirostat_tau", "mirostat_eta", "num_keep")


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A request: the turn, None where only a model is to be loaded, and how its reply is to be told.

    `context` is the least context that the client counts on, in tokens; `keep` the seconds for which the
    model should stay in memory, infinite for always, None where the client says nothing. `notes` are what the
    client is told of options without effect.
    """

    model: str
    turn: TurnRequest | None
    stream: bool
    context: int | None
    keep: float | None
    notes: tuple[str, ...] = ()


def read_chat(body: Mapping[str, Any], key: TurnKey) -> OllamaRequest:
    """Return what POST /api/chat asks for. Raises FieldError or UnsupportedError, naming the field."""
    fields = Fields(body)
    messages = fields.items("messages") or []
    made = tuple(_message(Fields(value, f"messages[{index}]")) for index, value in enumerate(messages))
    tools, _ = read_tools(Fields({"tools": _with_types(fields.items("tools") or [])}))
    return _request(fields, {"key": key, "messages": made, "tools": tools}, empty=not made)


def read_generate(body: Mapping[str, Any], key: TurnKey) -> OllamaRequest:
    """Return what POST /api/generate asks for. Raises FieldError or UnsupportedError, naming the field."""
    fields = Fields(body)
    prompt, system = fields.text("prompt") or "", fields.text("system") or ""
    raw = fields.flag("raw") or False
    fields.refuse("suffix", neutral=("",), hint="text is only continued at its end")
    fields.refuse("template", neutral=("",), hint="the model's own template is used; `raw` uses none")
    fields.refuse("context", neutral=([],), hint="use /api/chat, which takes the conversation")
    fields.refuse("images", neutral=([],))
    for name in ("width", "height", "steps"):
        fields.refuse(name)
    if raw and system:
        raise FieldError("system", "system has no place in a raw prompt", hint="put its text into prompt")
    if raw:
        return _request(fields, {"key": key, "prompt": prompt}, empty=not prompt)
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _request(fields, {"key": key, "messages": tuple(messages)}, empty=not prompt)


def read_duration(value: object, where: str) -> float:
    """Return seconds for a number of seconds or a text such as "5m" or "1h30m"; infinite where negative."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if value >= 0 else float("inf")
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"-?\d{1,15}", text):
            return read_duration(int(text), where)
        parts = _DURATION.findall(text.removeprefix("-"))
        if parts and "".join(number + unit for number, unit in parts) == text.removeprefix("-"):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
            return float("inf") if text.startswith("-") else seconds
    raise FieldError(where, f'{where} must be a number of seconds, or text such as "5m"')


def _request(fields: Fields, turn: dict[str, Any], *, empty: bool) -> OllamaRequest:
    """Read the fields that both routes have, and end the reading."""
    model = fields.need_text("model")
    stream = fields.flag("stream")
    keep = fields.get("keep_alive")
    seconds = None if keep is None else read_duration(keep, "keep_alive")
    options = fields.part("options") or Fields({}, "options")
    logprobs = _logprobs(fields)
    turn |= {
        "thinking": _thinking(fields),
        "response_format": _format(fields),
        **_generation(options, logprobs),
    }
    context = options.integer("num_ctx", 1, MAX_CONTEXT)
    notes = _speed_notes(options)
    for name, neutral in _LOAD_OPTIONS.items():
        options.refuse(name, neutral=neutral, hint=_AT_START)
    for name, neutral in _OTHER_OPTIONS.items():
        options.refuse(name, neutral=neutral)
    for name in _IDLE_NUMBERS:
        options.number(name, -(2**31), 2**31)
    options.finish()
    fields.refuse("truncate", neutral=(False,), hint="a prompt that is too long is refused, never cut")
    fields.refuse("shift", neutral=(False,), hint="a reply ends where the context is full")
    fields.finish()
    return OllamaRequest(
        model=model,
        turn=None if empty else TurnRequest(**turn),
        stream=stream is not False,
        context=context,
        keep=seconds,
        notes=notes,
    )


def _speed_notes(options: Fields) -> tuple[str, ...]:
    """Return what to say of options that only the start of the server decides and no reply depends on."""
    notes = []
    for name, neutral in _SPEED_OPTIONS.items():
        value = options.get(name)
        if value is None or value in neutral:
            continue
        if not isinstance(value, int):
            raise options.fault(name, "a whole number, or true or false")
        notes.append(f"{options.where(name)} has no effect: {_AT_START}")
    return tuple(notes)


def _generation(options: Fields, logprobs: int | None) -> dict[str, Any]:
    """Return the parts of a turn that `options` decides. Negative `num_predict` is until the end."""
    given: dict[str, Any] = {
        "temperature": options.number("temperature", 0, 2),
        "top_k": options.integer("top_k", -1, 2**31 - 1),
        "top_p": options.number("top_p", 0, 1),
        "min_p": options.number("min_p", 0, 1),
        "repeat_penalty": options.number("repeat_penalty", 1, 3),
        "presence_penalty": options.number("presence_penalty", -2, 2),
        "frequency_penalty": options.number("frequency_penalty", -2, 2),
        "penalty_window": options.integer("repeat_last_n", -1, 2**31 - 1),
        # -1 is how Ollama spells a fresh seed
        "seed": None if (seed := options.integer("seed", -1, MAX_SEED)) == -1 else seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    limit = options.integer("num_predict", -2, MAX_TOKENS)
    return {
        "sampling": SamplingParams(**given),
        "sampling_given": frozenset(given),
        "generation": GenerationParams(
            max_tokens=None if limit is None or limit < 0 else limit,
            stop=_stops(options),
            top_logprobs=logprobs,
        ),
        # Ollama's limits are wishes: a reply ends where the context is full
        "fit": True,
    }


def _stops(options: Fields) -> tuple[str, ...]:
    stop = options.get("stop")
    if isinstance(stop, str):
        return (stop,) if stop else ()
    return options.texts("stop", most=16, longest=256)


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 20)
    if not wanted and top:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true")
    return (top or 0) if wanted else None


def _thinking(fields: Fields) -> Thinking:
    think = fields.get("think")
    if think is None or isinstance(think, bool):
        return Thinking(enabled=think)
    if think not in EFFORTS:
        raise fields.fault("think", f"true, false, or one of {', '.join(EFFORTS)}")
    return Thinking(enabled=True, effort=think)


def _format(fields: Fields) -> ResponseFormat:
    shape = fields.get("format")
    if shape is None or shape == "":
        return ResponseFormat()
    if shape == "json":
        return ResponseFormat("json_object")
    if not isinstance(shape, dict):
        raise fields.fault("format", '"json" or a JSON schema')
    return ResponseFormat("json_schema", shape)


def _message(fields: Fields) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    role = fields.choice("role", ("system", "user", "assistant", "tool"))
    if role is None:
        raise fields.fault("role", "system, user, assistant or tool")
    made: dict[str, Any] = {"role": role, "content": fields.text("content") or ""}
    if fields.get("images"):
        raise UnsupportedError(f"{fields.where('images')} is not supported", hint="send text only")
    thinking, name = fields.text("thinking"), fields.text("tool_name")
    name = fields.text("name") or name
    call, calls = fields.text("tool_call_id"), fields.items("tool_calls") or []
    if role != "assistant" and (thinking or calls):
        raise FieldError(
            fields.where("role"), f"{fields.where('role')} is {role}, which has no thinking and no tool_calls"
        )
    if role != "tool" and call:
        raise FieldError(fields.where("role"), f"{fields.where('role')} is {role}, which has no tool_call_id")
    fields.finish()
    extra = {"reasoning_content": thinking, "name": name, "tool_call_id": call}
    made |= {key: value for key, value in extra.items() if value}
    if calls:
        where = fields.where("tool_calls")
        made["tool_calls"] = [
            _call(Fields(value, f"{where}[{index}]"), index) for index, value in enumerate(calls)
        ]
    return made


def _call(fields: Fields, index: int) -> dict[str, Any]:
    call = fields.text("id") or f"call_{index}"
    fields.choice("type", ("function",))
    function = fields.part("function")
    if function is None:
        raise fields.fault("function", "an object with name and arguments")
    fields.finish()
    name, arguments = function.need_text("name"), function.get("arguments")
    function.integer("index", 0, 2**31 - 1)
    function.text("description")
    if not isinstance(arguments, dict | None):
        raise function.fault("arguments", "an object")
    function.finish()
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _with_types(tools: list[Any]) -> list[Any]:
    """Return the tools in OpenAI's form, which names the only type that there is."""
    return [{"type": "function", **tool} if isinstance(tool, dict) else tool for tool in tools]


def needs(context: int | None, held: int) -> None:
    """Raise UnsupportedError if the client counts on more context than the model was loaded with."""
    if context is not None and context > held:
        raise UnsupportedError(
            f"options.num_ctx is {context} but the model was loaded with {held}", hint=_AT_START
        )


def keep_warnings(keep: float | None, idle_s: float) -> Sequence[str]:
    """Return what to say where the model will not stay in memory for as long as the client asks."""
    effective = idle_s or float("inf")
    if keep is None or keep == effective:
        return ()
    kept = "always" if idle_s == 0 else f"for {idle_s:g} s after the last request"
    return (f"keep_alive has no effect: the server keeps a model {kept}",)
