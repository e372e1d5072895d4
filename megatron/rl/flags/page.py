"""The text of ``docs/flags.md``, made from the tables."""

from megatron.rl.flags.conditions import CONDITIONS
from megatron.rl.flags.tables import THEMES
from megatron.rl.flags.verdict import Kind, Row, Theme

_INTRODUCTION = """\
# Flags

Every flag of Megatron's parser and of this program's own, and what becomes of it. (`tools/write_flags_page.py` writes
this page from the tables in `megatron/rl/flags`, by which the command line is checked.)

- A flag that **acts** means what it means in Megatron; where it means more, or something narrower, that is said.
- A flag that **comes from the model** may be given, and must then say what the config.json of `--hf-model` says.
- A flag that is **refused** ends the run in one line, with status 2, before any work. It is let through where its value
  leaves what it is about switched off (`0`, `none`), and where its value, named below, is what is done in any case.
- A flag that **holds anyway** asks for what is so without it.

A flag that would do nothing beside the others ("needs" below) is refused too, as is one that this page does not name.
"""
_HEADINGS = {
    Kind.ACTS: "act",
    Kind.MODEL: "come from the model",
    Kind.HOLDS: "hold anyway",
    Kind.REFUSED: "are refused",
}


def flags_page() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *(_section(theme) for theme in THEMES)])


def _section(theme: Theme) -> str:
    lines = [f"## {theme.title}", ""]
    for kind, heading in _HEADINGS.items():
        rows = [row for row in theme.rows if row.kind is kind]
        if rows:
            lines += [f"| these {heading} | |", "|---|---|", *map(_line, rows), ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    flags = ", ".join(f"`{flag}`" for flag in row.flags.split())
    return f"| {flags} | {'; '.join(_remarks(row))} |"


def _remarks(row: Row) -> list[str]:
    remarks = [row.why] if row.why else []
    if row.needs:
        remarks.append(f"needs {' and '.join(CONDITIONS[name].words for name in row.needs)}")
    if row.values is not None:
        remarks.append(f"only {' or '.join(f'`{value}`' for value in row.values)}")
    return [remark.replace("|", "\\|") for remark in remarks]
