"""The page of commands, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any


def markdown() -> str:
    """Every command with its arguments and options, as Markdown."""
    from typer.main import get_command

    from steppe.cli.app import app

    return "\n".join(section(name, command) for name, command in commands_of(get_command(app)).items())


def commands_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """The commands of a group by name; those of groups in it are named after both."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= commands_of(command, f"{name} ") if hasattr(command, "commands") else {prefix + name: command}
    return found


def section(name: str, command: Any) -> str:
    """One command."""
    lines = [f"## steppe {name}", "", inspect.cleandoc(command.help or ""), ""]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    for title, parameters in (("argument", arguments), ("option", options)):
        if parameters:
            lines += [f"| {title} | | default |", "|---|---|---|"]
            lines += [f"| {_name(p)} | {_cell(p.help or '')} | {_default(p)} |" for p in parameters]
            lines.append("")
    return "\n".join(lines)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is True:
        return "on"
    shown = value is not None and value != "" and not callable(value) and value is not False and value != []
    return f"`{value}`" if shown else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
