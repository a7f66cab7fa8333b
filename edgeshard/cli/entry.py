"""`edgectl`: settles the process before a command's modules are imported."""

from __future__ import annotations

from edgeshard.process.programs import program


def main() -> None:
    """Run edgectl with this process's arguments. Exits with the command's exit code."""
    with program():
        from edgeshard.cli.main import main as run_command

        run_command()
