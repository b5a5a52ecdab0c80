"""`hipfire config`: show, change and explain settings, globally or for one model (`--model TAG`)."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from hipfire.base import log
from hipfire.base.config import Config, Resolved, generation_defaults, require_key
from hipfire.base.config_keys import KEYS, Key, Value
from hipfire.base.errors import HipfireError, ValidationError
from hipfire.base.safe_names import check_name
from hipfire.checkpoint.library import LocalModel, open_library
from hipfire.checkpoint.source import open_checkpoint
from hipfire.cli.config_store import reset_values, set_value
from hipfire.cli.output import write, write_json
from hipfire.cli.settings import load_settings

Json = Annotated[bool, Parameter(name=["-j", "--json"], negative="")]
app = App(name="config", help="Read and change settings.", help_format="plaintext", help_formatter="plain")


@app.command(name="list")
def list_values(*, model: str | None = None, as_json: Json = False) -> None:
    """Show the values that the settings file holds.

    Parameters
    ----------
    model
        Show the overrides of this model.
    as_json
        Write JSON.
    """
    config = load_settings()
    values = _stored(config, model)
    if as_json:
        write_json(dict(values))
    for name, value in () if as_json else values.items():
        write(f"{name} = {show(value)}")


@app.command(name="get")
def get_value(key: str, /, *, model: str | None = None, as_json: Json = False) -> None:
    """Show one value of the settings file; one that is not set is an error (`explain` shows what applies).

    Parameters
    ----------
    key
        Dotted or short name.
    model
        Read the overrides of this model.
    as_json
        Write JSON.
    """
    config = load_settings()
    found = require_key(key)
    values = _stored(config, model)
    if found.name not in values:
        place = "globally" if model is None else f"for {model}"
        raise ValidationError(
            f"{found.name} is not set {place}",
            hint=f"`hipfire config explain {found.name}` shows what applies",
        )
    if as_json:
        write_json({found.name: values[found.name]})
    else:
        write(show(values[found.name]))


@app.command(name="set")
def set_setting(
    key: str, value: Annotated[str, Parameter(allow_leading_hyphen=True)], /, *, model: str | None = None
) -> None:
    """Store a value, after checking it.

    Parameters
    ----------
    key
        Dotted or short name.
    value
        The new value.
    model
        Store it for this model only.
    """
    config = load_settings()
    name = _settings_name(config, model)
    stored = set_value(config, key, value, model=name)
    log.logger().info(f"{require_key(key).name} = {show(stored)}{f' for {name}' if name else ''}")


@app.command(name="reset")
def reset(key: str | None = None, /, *, model: str | None = None) -> None:
    """Remove a value, so that the next layer applies again; without a key remove all of them.

    Parameters
    ----------
    key
        Dotted or short name.
    model
        Remove overrides of this model only.
    """
    config = load_settings()
    removed = reset_values(config, key, model=_settings_name(config, model))
    log.logger().info(f"removed {', '.join(removed)}" if removed else "nothing was set")


@app.command(name="explain")
def explain(key: str | None = None, /, *, model: str | None = None, as_json: Json = False) -> None:
    """Show which value applies, where it comes from, and which values it hides.

    Parameters
    ----------
    key
        Dotted or short name; without it all keys are explained.
    model
        Explain what applies to this model, its registry card and its file included.
    as_json
        Write JSON.
    """
    config = load_settings()
    wanted = [require_key(key)] if key is not None else list(KEYS)
    layers = _model_layers(config, model)
    resolved = [config.resolve(each.name, **layers) for each in wanted]
    if as_json:
        write_json({each.key.name: _explained(each) for each in resolved})
        return
    for each in resolved:
        write(f"{each.key.name} = {show(each.value)}  ({_where(each.winner.origin, each.winner.source)})")
        for hidden in each.shadowed:
            write(f"  hides {show(hidden.value)}  ({_where(hidden.origin, hidden.source)})")


@app.command(name="schema")
def schema(key: str | None = None, /, *, as_json: Json = False) -> None:
    """Describe the settings that there are.

    Parameters
    ----------
    key
        Describe this one only.
    as_json
        Write JSON.
    """
    wanted = [require_key(key)] if key is not None else list(KEYS)
    if as_json:
        write_json({each.name: _described(each) for each in wanted})
        return
    for each in wanted:
        write(f"{each.name}  ({each.flat}, {each.env})")
        write(f"  {each.help}")
        write(f"  {each.rule}; default {show(each.default)}")


def show(value: Value) -> str:
    """Return a setting's value as it is typed on the command line."""
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if value == "" else str(value)


def _stored(config: Config, model: str | None) -> dict[str, Value]:
    name = _settings_name(config, model)
    if name is None:
        return dict(config.values)
    entry = config.models.get(name)
    return dict(entry.values) if entry is not None else {}


def _settings_name(config: Config, model: str | None) -> str | None:
    """Return the name under which a model's overrides are kept: its registry tag if it has one."""
    if model is None:
        return None
    check_name(model)
    card = open_library(config).registry.resolve(model)
    return card.tag if card is not None else model


def _model_layers(config: Config, model: str | None) -> dict[str, Any]:
    if model is None:
        return {}
    library = open_library(config)
    found = library.find(model)
    card = found.card if found is not None else library.registry.resolve(model)
    name = found.settings_name if found is not None else _settings_name(config, model)
    return {
        "model": name,
        "card": card.settings() if card is not None else {},
        "model_file": _file_defaults(found) if found is not None else {},
    }


def _file_defaults(model: LocalModel) -> dict[str, Value]:
    try:
        with open_checkpoint(model.path) as checkpoint:
            return generation_defaults(checkpoint.text_assets().generation_config)
    except HipfireError as error:
        log.logger().warning(f"the model file's own settings are left out: {error.line()}")
        return {}


def _where(origin: str, source: str) -> str:
    return f"{origin}: {source}" if origin in ("model", "global", "env") else source


def _explained(resolved: Resolved) -> dict[str, Any]:
    candidates = (resolved.winner, *resolved.shadowed)
    shown = [{"value": each.value, "origin": each.origin, "source": each.source} for each in candidates]
    return {
        **shown[0],
        "shadowed": shown[1:],
        "scope": resolved.key.scope,
    }


def _described(key: Key) -> dict[str, Any]:
    return {
        "flat": key.flat,
        "env": key.env,
        "type": key.kind,
        "default": key.default,
        "rule": key.rule,
        "scope": key.scope,
        "help": key.help,
    }
