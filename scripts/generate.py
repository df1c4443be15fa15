"""Write the parts of files that are generated from the code, or check that they are up to date.

* ``[tool.flwr.app.config]`` in `pyproject.toml`: every setting with its default;
* the settings table and that of the preset ``paper`` in `docs/settings.md`;
* the options of the tasks on tables in `docs/tables.md`;
* the table of methods in `README.md`.

Usage: ``python scripts/generate.py [--check]``
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedapps.methods import METHODS, method_groups
from fedapps.results.settings_file import to_toml
from fedapps.settings import all_keys, bounds_of, choices_of, default_config, default_of, keys_of, kind_of
from fedapps.tasks import TASKS, task_class

ROOT = Path(__file__).resolve().parent.parent


def between(text: str, start: str, end: str, new: str) -> str:
    """Replace what stands between two marker lines."""
    head, found, rest = text.partition(start)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"markers {start!r} ... {end!r} not found")
    return f"{head}{start}\n{new.rstrip()}\n{end}{tail}"


def run_config() -> str:
    """The default run config as TOML tables below ``[tool.flwr.app.config]``."""
    lines = ["[tool.flwr.app.config]"]
    groups: dict[str, list[str]] = {}
    for key, value in default_config(method_groups()).items():
        group, _, name = key.rpartition(".")
        line = to_toml({name: value}).strip()
        if group:
            groups.setdefault(group, []).append(line)
        else:
            lines.append(line)
    for group, entries in groups.items():
        lines += ["", f"[tool.flwr.app.config.{group}]", *entries]
    return "\n".join(lines)


def settings_table() -> str:
    """The settings as a Markdown table."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in all_keys(method_groups()).items():
        default, kind = default_of(field), kind_of(field)
        choices = " \\| ".join(f"`{choice}`" for choice in choices_of(field))
        limits = "; ".join([*bounds_of(field), *([choices] if choices else [])])
        note = f" ({limits})" if limits else ""
        shown = f"`{str(default).lower() if kind is bool else default}`" if default != "" else "empty"
        rows.append(f"| `{key}` | {kind.__name__} | {shown} | {field.description}{note} |")
    return "\n".join(rows)


def table_options() -> str:
    """The options of the tasks on tables as a Markdown table."""
    own: dict[str, list[str]] = {}
    fields = {}
    names = [row.name for row in TASKS if row.group == "table"]
    for name in names:
        for key, field in keys_of(task_class(name).Options).items():
            own.setdefault(key, []).append(name)
            fields[key] = field
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for key, field in fields.items():
        of = "" if own[key] == names else ", ".join(f"`{name}`" for name in own[key]) + ": "
        choices = " \\| ".join(f"`{choice}`" for choice in choices_of(field))
        about = (of + str(field.description) + (f" ({choices})" if choices else "")).replace(" | ", " \\| ")
        default = f"`{to_toml({key: field.default}).partition(' = ')[2].strip()}`".replace("|", "\\|")
        rows.append(f"| `{key}` | {default if field.default != '' else 'empty'} | {about} |")
    return "\n".join(rows)


def presets_table() -> str:
    """What the preset ``paper`` sets, as a Markdown table."""
    rows = ["| method | tasks | `preset = paper` |", "| --- | --- | --- |"]
    for method in METHODS:
        for tasks, values in method.published.items():
            own = keys_of(method.own_settings) if method.own_settings else {}
            keys = {f"{method.group}.{key}" if key in own else key: value for key, value in values.items()}
            rows.append(
                f"| `{method.name}` | {tasks or 'all'} | {', '.join(f'`{k} = {v}`' for k, v in keys.items())} |"
            )
    return "\n".join(rows)


def methods_table() -> str:
    """The registry as a Markdown table."""
    rows = [
        "| method | family | tasks | the server | travels down | travels up | a client keeps | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| [`{m.name}`](docs/methods/{m.name}.md) | {m.family} | {', '.join(m.task_kinds)} | {m.mixing} "
        f"| {m.travels_down} | {m.travels_up} | {m.client_state} | {m.paper} |"
        for m in METHODS
    ]
    return "\n".join(rows)


def main() -> int:
    """Write or check the generated parts."""
    parts = [
        (ROOT / "pyproject.toml", "# <generated: settings>", "# </generated>", run_config()),
        (ROOT / "docs" / "settings.md", "<!-- generated: settings -->", "<!-- /generated -->", settings_table()),
        (ROOT / "docs" / "settings.md", "<!-- generated: presets -->", "<!-- /generated presets -->", presets_table()),
        (ROOT / "docs" / "tables.md", "<!-- generated: table options -->", "<!-- /generated -->", table_options()),
        (ROOT / "README.md", "<!-- generated: methods -->", "<!-- /generated -->", methods_table()),
    ]
    stale = []
    for path, start, end, new in parts:
        old = path.read_text(encoding="utf-8")
        text = between(old, start, end, new)
        if text != old:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run `make format`", file=sys.stderr)
        return 1
    print("generated parts: " + (f"wrote {', '.join(stale)}" if stale else "up to date"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
